"""Graphs that leave sizes of arguments open.

torch traces with a number for each such size, and takes two sizes with equal numbers for one where it compares them: a
batch of as many rows as a sequence has tokens comes out as a number. Such a graph is traced again with other numbers.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import torch

from ..errors import MeshfuseError
from .calls import Arguments
from .captured_graph import Captured

# Traces with some sizes of dynamic dims replaced by others.
Trace = Callable[[Mapping[int, int]], Captured]


def with_open_sizes(trace: Trace, arguments: Arguments, dims: Collection[tuple[int, int]]) -> Captured | None:
    """A graph that leaves some dims of arguments open, each by place and number; None where the forward fixes some."""
    found = trace({})
    closed = found.sizes.fixed(dims)
    if not closed:
        return found
    instead = _others([arguments.shapes[place][dim] for place, dim in closed], _sizes_in(found))
    try:
        again = trace(instead)
    except MeshfuseError:  # A relation of sizes does not hold for the others.
        return None
    return None if again.sizes.fixed(dims) else again


def _sizes_in(graph: Captured) -> set[int]:
    """The numbers that are sizes of tensors in a graph."""
    values = (node.meta.get("val") for node in graph.module.graph.nodes)
    tensors = [value for value in values if isinstance(value, torch.Tensor)]
    return {int(n) for tensor in tensors for n in tensor.shape if _is_number(n)}


def _is_number(size: Any) -> bool:
    """Whether a size of a graph is one number, be it that of a symbol."""
    return isinstance(size, int) or bool(size.node.expr.is_number)


def _others(sizes: Sequence[int], taken: set[int]) -> dict[int, int]:
    """For sizes others that are not taken, which what divides a size should divide as well."""
    found = dict[int, int]()
    for n in dict.fromkeys(sizes):
        found[n] = next(m for m in _near(n) if m not in taken and m not in found.values())
    return found


def _near(n: int) -> Iterator[int]:
    """A half of an even number, as tables of positions have a last one, and then its multiples."""
    if n > 2 and not n % 2:
        yield n // 2
    yield from (n * times for times in itertools.count(2))
