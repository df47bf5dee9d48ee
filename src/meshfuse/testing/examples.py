"""What strategies know of a definition beside what it says: shapes of open inputs, and which numbers they take."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from weakref import WeakKeyDictionary

from ..definition.builder import DefinitionBuilder


@dataclass(frozen=True, slots=True)
class Example:
    """A tensor's shape; for an input also its numbers in row-major order (repeated), or the interval they are from."""

    shape: tuple[int, ...]
    values: Sequence[float] | None = None
    domain: tuple[float, float] | None = None


_examples: WeakKeyDictionary[DefinitionBuilder, dict[int, Example]] = WeakKeyDictionary()


def examples_of(fd: DefinitionBuilder) -> dict[int, Example]:
    """By tensor; empty for a definition that no strategy made."""
    return _examples.setdefault(fd, {})


def shape_of(fd: DefinitionBuilder, tensor: int) -> tuple[int, ...]:
    """The shape of a tensor, of an open one the example's; -1 stays where there is none."""
    shape = fd.tensors[tensor].type.shape
    found = examples_of(fd).get(tensor)
    return found.shape if -1 in shape and found is not None else shape
