"""aten ops that move elements: views, parts and wholes of tensors."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

from ...definition.tensor_view import TensorView
from .table import Translation, aten, dims_of, rule


@rule(aten.view.default, aten._unsafe_view.default, aten.reshape.default)
def _view(t: Translation, x: TensorView, shape: Any) -> TensorView:
    return t.reshape(x, t.shape)


@rule(aten.expand.default)
def _expand(t: Translation, x: TensorView, size: Any, implicit: bool = False) -> TensorView:
    return t.expand(x, t.shape)


@rule(aten.permute.default)
def _permute(t: Translation, x: TensorView, dims: Sequence[int]) -> TensorView:
    order = [d % x.ndim for d in dims]
    return x if order == list(range(x.ndim)) else t.ops.permute(x, order)


@rule(aten.t.default)
def _t(t: Translation, x: TensorView) -> TensorView:
    return t.ops.permute(x, [1, 0]) if x.ndim == 2 else x


@rule(aten.transpose.int)
def _transpose(t: Translation, x: TensorView, a: int, b: int) -> TensorView:
    order = list(range(x.ndim))
    if order:
        order[a], order[b] = order[b], order[a]
    return _permute(t, x, order)


@rule(aten.unsqueeze.default)
def _unsqueeze(t: Translation, x: TensorView, dim: int) -> TensorView:
    return t.unsqueeze(x, dim)


@rule(aten.squeeze.dim, aten.squeeze.dims, aten.squeeze.default)
def _squeeze(t: Translation, x: TensorView, dims: Any = None) -> TensorView:
    """Of all dims, or of those in the list, which may be empty."""
    chosen = [] if dims == [] or dims == () else dims_of(dims, x.ndim)
    found = [d for d in chosen if x.type.shape[d] == 1]
    return t.ops.squeeze(x, found) if found else x


@rule(aten.slice.Tensor)
def _slice(
    t: Translation, x: TensorView, dim: int = 0, start: Any = None, end: Any = None, step: int = 1
) -> TensorView:
    n, dim = x.type.shape[dim], dim % x.ndim
    first, last, _ = slice(start, end, step).indices(n)
    return _part(t, x, dim, first, max(first, last), step)


def _part(t: Translation, x: TensorView, dim: int, first: int, last: int, step: int = 1) -> TensorView:
    """Elements `first` to `last` of a dim."""
    shape = x.type.shape
    if (first, last, step) == (0, shape[dim], 1):
        return x
    starts = [first if d == dim else 0 for d in range(x.ndim)]
    stops = [last if d == dim else n for d, n in enumerate(shape)]
    return t.ops.slice(x, starts, stops, [step if d == dim else 1 for d in range(x.ndim)])


@rule(aten.select.int)
def _select(t: Translation, x: TensorView, dim: int, index: int) -> TensorView:
    return t.ops.select(x, index % x.type.shape[dim], dim % x.ndim)


@rule(aten.split.Tensor)
def _split(t: Translation, x: TensorView, size: int, dim: int = 0) -> tuple[TensorView, ...]:
    n = x.type.shape[dim]
    return tuple(_part(t, x, dim % x.ndim, a, min(a + size, n)) for a in range(0, max(n, 1), max(size, 1)))


@rule(aten.split_with_sizes.default)
def _split_with_sizes(t: Translation, x: TensorView, sizes: Sequence[int], dim: int = 0) -> tuple[TensorView, ...]:
    ends = list(itertools.accumulate(sizes))
    return tuple(_part(t, x, dim % x.ndim, b - n, b) for n, b in zip(sizes, ends, strict=True))


@rule(aten.unbind.int)
def _unbind(t: Translation, x: TensorView, dim: int = 0) -> tuple[TensorView, ...]:
    return tuple(t.ops.select(x, i, dim % x.ndim) for i in range(x.type.shape[dim]))


@rule(aten.cat.default)
def _cat(t: Translation, tensors: Sequence[TensorView], dim: int = 0) -> TensorView:
    """Operands are cast first, and empty ones of one dim left out, as torch does."""
    found = [t.cast(x, t.dtype) for x in tensors if list(x.type.shape) != [0]]
    return found[0] if len(found) == 1 else t.ops.cat(found, dim % found[0].ndim)


@rule(aten.stack.default)
def _stack(t: Translation, tensors: Sequence[TensorView], dim: int = 0) -> TensorView:
    place = dim % (tensors[0].ndim + 1)
    return _cat(t, [t.unsqueeze(x, place) for x in tensors], place)


@rule(aten.constant_pad_nd.default)
def _pad(t: Translation, x: TensorView, widths: Sequence[int], value: Any = 0) -> TensorView:
    return t.ops.pad(x, list(widths), value) if any(widths) else x


@rule(aten.slice_backward.default)
def _slice_backward(
    t: Translation, grad: TensorView, sizes: Sequence[int], dim: int, start: int, end: int, step: int
) -> TensorView:
    dim, n = dim % grad.ndim, sizes[dim]
    first, last, _ = slice(start, end, step).indices(n)
    if step != 1:
        return t.ops.take_along_axis_bwd(grad, _steps(t, grad, dim, first, step), dim, n)
    return _padded(t, grad, dim, first, n - max(first, last))


def _steps(t: Translation, grad: TensorView, dim: int, first: int, step: int) -> TensorView:
    """The indices of a slice in steps, in the gradient's shape."""
    index = t.ops.iota(grad.type.shape[dim], first, step)
    return t.expand(t.along(index, dim, grad.ndim), grad.type.shape)


def _padded(t: Translation, x: TensorView, dim: int, before: int, after: int) -> TensorView:
    if not before and not after:
        return x
    return t.ops.pad(x, [0, 0] * (x.ndim - 1 - dim) + [before, after])


@rule(aten.select_backward.default)
def _select_backward(t: Translation, grad: TensorView, sizes: Sequence[int], dim: int, index: int) -> TensorView:
    n, dim = sizes[dim], dim % len(sizes)
    return t.ops.select_bwd(grad, index % n, dim, n)


@rule(aten.slice_scatter.default)
def _slice_scatter(
    t: Translation, x: TensorView, source: TensorView, dim: int = 0, start: Any = None, end: Any = None, step: int = 1
) -> TensorView:
    """What is before the slice, the source, and what is behind it; in steps it is a scatter."""
    n, dim = x.type.shape[dim], dim % x.ndim
    first, last, _ = slice(start, end, step).indices(n)
    source = t.cast(source, x.dtype)
    if step != 1:
        return t.ops.scatter(x, _steps(t, source, dim, first, step), source, dim)
    parts = [_part(t, x, dim, 0, first), source, _part(t, x, dim, max(first, last), n)]
    found = [part for part in parts if part.type.shape[dim]]
    return found[0] if len(found) == 1 else t.ops.cat(found, dim)


@rule(aten.select_scatter.default)
def _select_scatter(t: Translation, x: TensorView, source: TensorView, dim: int, index: int) -> TensorView:
    place = index % x.type.shape[dim]
    return _slice_scatter(t, x, t.unsqueeze(source, dim % x.ndim), dim, place, place + 1)


@rule(aten.repeat.default)
def _repeat(t: Translation, x: TensorView, repeats: Sequence[int]) -> TensorView:
    """A dim of repeats before each dim, merged with it."""
    missing = len(repeats) - x.ndim
    shape = [1] * missing + list(x.type.shape)
    x = t.ops.broadcast(t.reshape(x, shape), [d % 2 == 0 for d in range(2 * len(shape))])
    x = t.expand(x, [n for pair in zip(repeats, shape, strict=True) for n in pair])
    return t.reshape(x, [r * n for r, n in zip(repeats, shape, strict=True)])


@rule(aten.flip.default)
def _flip(t: Translation, x: TensorView, dims: Sequence[int]) -> TensorView:
    for dim in dims_of(list(dims), x.ndim) if dims else []:
        n = x.type.shape[dim]
        x = t.ops.index_select(x, t.ops.iota(n, n - 1, -1), dim)
    return x


@rule(aten.roll.default)
def _roll(t: Translation, x: TensorView, shifts: Sequence[int], dims: Sequence[int] = ()) -> TensorView:
    if not dims:
        flat = t.reshape(x, [x.type.numel])
        return t.reshape(_roll(t, flat, shifts, [0]), x.type.shape)
    for shift, dim in zip(shifts, dims, strict=True):
        n, dim = x.type.shape[dim], dim % x.ndim
        cut = -shift % n if n else 0
        if cut:
            x = t.ops.cat([_part(t, x, dim, cut, n), _part(t, x, dim, 0, cut)], dim)
    return x


@rule(aten.tril.default)
def _tril(t: Translation, x: TensorView, diagonal: int = 0) -> TensorView:
    """What `triu` of the next diagonal leaves out."""
    rows, columns = _places(t, x)
    keep = t.ops.le(columns, t.ops.add(rows, diagonal))
    return t.ops.where(keep, x, t.full(0, [], x.dtype))


@rule(aten.triu.default)
def _triu(t: Translation, x: TensorView, diagonal: int = 0) -> TensorView:
    rows, columns = _places(t, x)
    keep = t.ops.ge(columns, t.ops.add(rows, diagonal))
    return t.ops.where(keep, x, t.full(0, [], x.dtype))


def _places(t: Translation, x: TensorView) -> tuple[TensorView, TensorView]:
    """The row and the column of every element of the last two dims."""
    rows, columns = x.type.shape[-2:]
    return t.along(t.ops.iota(rows), -2, x.ndim), t.along(t.ops.iota(columns), -1, x.ndim)


# complex numbers as pairs


@rule(aten.view_as_real.default)
def _view_as_real(t: Translation, x: TensorView) -> TensorView:
    return _stack(t, [t.ops.real(x), t.ops.imag(x)], -1)


@rule(aten.view_as_complex.default)
def _view_as_complex(t: Translation, x: TensorView) -> TensorView:
    return t.ops.complex(_select(t, x, -1, 0), _select(t, x, -1, 1))


@rule(aten._conj.default, aten._conj_physical.default, aten.conj_physical.default)
def _conj(t: Translation, x: TensorView) -> TensorView:
    return t.ops.complex(t.ops.real(x), t.ops.neg(t.ops.imag(x)))
