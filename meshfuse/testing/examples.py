"""What strategies know of a definition beyond its text: the shapes of open inputs, and the numbers that they take."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from weakref import WeakKeyDictionary

from ..fusion_definition import FusionDefinition


@dataclass(frozen=True, slots=True)
class Example:
    """A tensor's shape; for an input also its numbers (row-major, repeated), or the interval that they are from."""

    shape: tuple[int, ...]
    values: Sequence[float] | None = None
    domain: tuple[float, float] | None = None


_examples: WeakKeyDictionary[FusionDefinition, dict[int, Example]] = WeakKeyDictionary()


def examples_of(fd: FusionDefinition) -> dict[int, Example]:
    """Examples by tensor; empty for a definition that no strategy made."""
    return _examples.setdefault(fd, {})


def shape_of(fd: FusionDefinition, tensor: int) -> tuple[int, ...]:
    """The shape of a tensor, with the example's sizes for open ones; -1 stays where there is no example."""
    shape = fd.recording.tensors[tensor].type.shape
    found = examples_of(fd).get(tensor)
    return found.shape if -1 in shape and found is not None else shape
