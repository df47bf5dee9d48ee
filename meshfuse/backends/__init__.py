"""Compilers of segments: what one is given, what it gives back, and how it says that it cannot.

A backend makes of a segment (the ops between two communications) on one rank a function that is called like the
segment's `Kernel`, whose text is the reference: same parameters in the same order, results of the same shapes, dtypes
and strides. A backend is imported only by those who ask for it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from ..lowering.instructions import Kernel
from ..lowering.segments import Segment, SegmentedDefinition

# Called with the kernel's parameters; gives the result, or a tuple of them where the kernel has several. Its `note`,
# where it has one, says for the table of backends how much of the segment is compiled.
Prepared = Callable[..., Any]


class Unsupported(Exception):
    """A backend cannot compile a segment; the text says why, for a reader of the host program."""


@dataclass(frozen=True, slots=True)
class Task:
    """One segment to compile for one rank.

    eager: runs the kernel's text.
    arguments: examples, one per parameter: tensors on the meta device with the shapes, dtypes and strides that calls
        have, and Python numbers.
    segment: the ops with their shardings, by the numbers of `definition`; None for a kernel that is only a part of a
        segment, in a loop.
    """

    kernel: Kernel
    segment: Segment | None
    definition: SegmentedDefinition
    rank: int
    device: torch.device
    eager: Prepared
    arguments: tuple[Any, ...]


class Backend(Protocol):
    """One way to compile segments."""

    name: str

    def prepare(self, task: Task) -> Prepared:
        """The compiled segment, which may be called any number of times. Raises Unsupported.

        Called once per segment and rank, between executions. Must not communicate.
        """
        ...
