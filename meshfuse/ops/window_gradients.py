"""Gradients of windows of a tensor: windows that tile the tensor are joined, others are padded with zeros.

Otherwise the gradient of a fused q, k, v projection would be a sum of three tensors of its size.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from .vjp import Tensor


@dataclass(frozen=True, slots=True)
class WindowGradient:
    """The gradient of a window of a tensor, which begins at the indices `starts`. It cuts no dim whose size is open."""

    grad: Tensor
    starts: tuple[int, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        return self.grad.type.shape


def zero_padded(ops: Any, x: Tensor, before: Sequence[Any], after: Sequence[Any]) -> Tensor:
    """A tensor with zeros around it, by dim so many before and after; the tensor itself if there are none."""
    if all(isinstance(n, int) and n == 0 for n in (*before, *after)):
        return x
    widths = [n for pair in zip(reversed(before), reversed(after), strict=True) for n in pair]
    return ops.pad(x, widths)


def joined_windows(ops: Any, pieces: Sequence[WindowGradient], shape: tuple[int, ...]) -> list[Tensor]:
    """Gradients in the shape of the whole tensor, whose sum is that of the pieces."""
    dim = _tiled_dim(pieces, shape)
    if dim is None:
        return [_alone(ops, piece, shape) for piece in pieces]
    ordered = sorted(pieces, key=lambda piece: piece.starts[dim])
    return [ops.cat([piece.grad for piece in ordered], dim)]


def _tiled_dim(pieces: Sequence[WindowGradient], shape: tuple[int, ...]) -> int | None:
    """The one dim that the pieces cut, if together they are the whole tensor with each element once; else None."""
    cut = {d for piece in pieces for d, left in enumerate(_left(piece, shape)) if left}
    if len(cut) != 1:
        return None
    (dim,) = cut
    spans = sorted((piece.starts[dim], piece.starts[dim] + piece.shape[dim]) for piece in pieces)
    whole = spans[0][0] == 0 and spans[-1][1] == shape[dim]
    return dim if whole and all(a[1] == b[0] for a, b in itertools.pairwise(spans)) else None


def _left(piece: WindowGradient, shape: tuple[int, ...]) -> list[int]:
    """By dim, how many elements the window leaves out."""
    return [0 if -1 in (n, m) else n - m for n, m in zip(shape, piece.shape, strict=True)]


def _alone(ops: Any, piece: WindowGradient, shape: tuple[int, ...]) -> Tensor:
    after = [left - start for left, start in zip(_left(piece, shape), piece.starts, strict=True)]
    return zero_padded(ops, piece.grad, piece.starts, after)
