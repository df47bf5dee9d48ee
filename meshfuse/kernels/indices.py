"""Global indices that a rank holds, where global indices lie in its shard, and tensors made of indices."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch

from ..sharding.layout import Runs

# The error text of compiled code, which cannot say which index it is.
OUT_OF_RANGE = "meshfuse: an index is out of range"


def global_index(index: Runs, device: Any = "cpu") -> torch.Tensor:
    """The global indices of a dim that a rank holds, int64, from their runs."""
    if not index:
        return torch.empty(0, dtype=torch.int64, device=device)
    return torch.cat([torch.arange(a, b, device=device) for a, b in index])


def linear_index(runs: Sequence[Runs], shape: Sequence[int], device: Any) -> torch.Tensor:
    """The row-major number, in the global tensor of this shape, of every element that a rank holds."""
    out = torch.zeros((1,) * len(shape), dtype=torch.int64, device=device)
    stride = 1
    for d in reversed(range(len(shape))):
        sizes = [-1 if other == d else 1 for other in range(len(shape))]
        out = out + (global_index(runs[d], device) * stride).reshape(sizes)
        stride *= shape[d]
    return out


def local_places(index: torch.Tensor, runs: Runs) -> tuple[torch.Tensor, torch.Tensor]:
    """(where each global index lies in a shard with these runs, whether it is there); place 0 for indices elsewhere."""
    index = index.long()
    if len(runs) == 1:
        start, stop = runs[0]
        inside = (index >= start) & (index < stop)
        return torch.where(inside, index - start, 0), inside
    if not runs:
        return torch.zeros_like(index), torch.zeros_like(index, dtype=torch.bool)
    starts, stops, offsets = (torch.tensor(column, device=index.device) for column in _columns(runs))
    run = torch.searchsorted(starts, index.contiguous(), right=True) - 1
    inside = (run >= 0) & (index < stops[run])
    return torch.where(inside, offsets[run] + index - starts[run], 0), inside


def local_place(index: int, runs: Runs) -> int | None:
    """Where one global index lies in a shard with these runs; None where it is not there."""
    place = 0
    for start, stop in runs:
        if start <= index < stop:
            return place + index - start
        place += stop - start
    return None


def _columns(runs: Runs) -> tuple[list[int], list[int], list[int]]:
    """The runs as columns: starts, stops, and how many indices come before each run."""
    sizes = itertools.accumulate((b - a for a, b in runs), initial=0)
    return [a for a, _ in runs], [b for _, b in runs], list(sizes)[:-1]


def grid(*index: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Index tensors that broadcast together and name every element of a box."""
    return torch.meshgrid(*index, indexing="ij")


class IndexOutOfRange(IndexError):
    """An index that the dim does not have. `index` is the tensor that it was in, None for a single number."""

    def __init__(self, value: int, low: int, size: int, index: torch.Tensor | None = None):
        super().__init__(f"index {value} of a dim of size {size}")
        self.value, self.low, self.size, self.index = value, low, size, index


def checked(index: torch.Tensor, size: int) -> torch.Tensor:
    """The indices as int64. Raises IndexOutOfRange unless all are from 0 to size - 1.

    On a GPU, and in code that is being traced, the kernel asserts it, as torch's own look-ups do, so that the host does
    not wait.
    """
    if index.numel() and not index.is_meta:
        low, high = torch.aminmax(index)
        if not index.is_cpu or torch._is_functional_tensor(index):
            torch._assert_async((low >= 0) & (high < size), OUT_OF_RANGE)
        elif not (int(low) >= 0 and int(high) < size):
            raise IndexOutOfRange(int(low if low < 0 else high), 0, size, index)
    return index.long()


def checked_place(index: int, size: int) -> int:
    """One index counted from the front, a negative one being counted from the end. Raises IndexOutOfRange."""
    if not -size <= index < size:
        raise IndexOutOfRange(index, -size, size)
    return index % size
