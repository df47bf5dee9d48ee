"""How local tensors lie in memory, as nvFuser's definitions say it."""

from __future__ import annotations

from dataclasses import dataclass

import torch

_Strides = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class MemoryLayout:
    """How a tensor's dims lie in memory.

    order: for each dim, how many dims vary faster than it.
    contiguity: for each dim None where its size is 1, else whether its stride is the extent of the next faster dim.
        Where it is False, a definition takes any stride.
    """

    order: tuple[int, ...]
    contiguity: tuple[bool | None, ...]

    @property
    def row_major(self) -> bool:
        return self.order == tuple(reversed(range(len(self.order))))

    def slowest_first(self) -> list[bool | None]:
        """The contiguity of dims in their order in memory, slowest first, as nvFuser takes it."""
        dims = sorted(range(len(self.order)), key=lambda d: -self.order[d])
        return [self.contiguity[d] for d in dims]

    def takes(self, other: MemoryLayout) -> bool:
        """Whether a definition for this layout computes right on tensors of the other layout."""
        pairs = zip(self.contiguity, other.contiguity, strict=True)
        return self.order == other.order and all(b or not a for a, b in pairs)


def memory_layout(tensor: torch.Tensor) -> MemoryLayout:
    """The layout of a tensor, also of one on the meta device. Tensors without elements are dense."""
    shape, strides = tuple(tensor.shape), tuple(tensor.stride())
    if tensor.numel() == 0:
        strides = _dense(shape, range(len(shape)))
    slowest_first = _slowest_first(shape, strides)
    flags: list[bool | None] = [None] * len(shape)
    expected = 1
    for d in reversed(slowest_first):
        if shape[d] != 1:
            flags[d] = strides[d] == expected
            expected = strides[d] * max(shape[d], 1)
    order = [0] * len(shape)
    for place, d in enumerate(slowest_first):
        order[d] = len(shape) - 1 - place
    return MemoryLayout(tuple(order), tuple(flags))


def dense_strides(tensor: torch.Tensor) -> _Strides:
    """The strides of a tensor without holes whose dims lie in the same order."""
    shape = tuple(tensor.shape)
    return _dense(shape, _slowest_first(shape, tuple(tensor.stride())))


def _slowest_first(shape: tuple[int, ...], strides: _Strides) -> list[int]:
    """The dims in their order in memory, slowest first.

    The strides of dims of size 1, or with repeated elements, say nothing. The order is row-major where that agrees with
    the other dims; else these dims come first.
    """
    dims = range(len(shape))
    telling = [d for d in dims if shape[d] != 1 and strides[d] != 0]
    if telling == sorted(telling, key=lambda d: -strides[d]):
        return list(dims)
    return [*(d for d in dims if d not in telling), *sorted(telling, key=lambda d: -strides[d])]


def _dense(shape: tuple[int, ...], slowest_first: range | list[int]) -> _Strides:
    strides, extent = [1] * len(shape), 1
    for d in reversed(slowest_first):
        strides[d] = extent
        extent *= max(shape[d], 1)
    return tuple(strides)
