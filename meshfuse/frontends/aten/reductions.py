"""aten's reductions, scans and sorts."""

from __future__ import annotations

import math
from typing import Any

from ...definition.tensor_view import TensorView
from ...dtypes import Category, DataType, from_torch
from ...errors import user_error
from .table import Translation, aten, dims_of, rule


@rule(aten.sum.default, aten.sum.dim_IntList)
def _sum(t: Translation, x: TensorView, dims: Any = None, keepdim: bool = False, dtype: Any = None) -> TensorView:
    if not x.ndim:
        return x
    return t.ops.sum(x if dtype is None else t.cast(x, from_torch(dtype)), dims_of(dims, x.ndim), keepdim)


@rule(aten.mean.default, aten.mean.dim)
def _mean(t: Translation, x: TensorView, dims: Any = None, keepdim: bool = False, dtype: Any = None) -> TensorView:
    if not x.ndim:
        return x
    found = dims_of(dims, x.ndim)
    wide = t.computing(x if dtype is None else t.cast(x, from_torch(dtype)))
    return t.ops.truediv(t.ops.sum(wide, found, keepdim), float(math.prod(x.type.shape[d] for d in found)))


@rule(aten.prod.default)
def _prod(t: Translation, x: TensorView, dtype: Any = None) -> TensorView:
    return t.ops.prod(x) if x.ndim else x


@rule(aten.prod.dim_int)
def _prod_dim(t: Translation, x: TensorView, dim: int, keepdim: bool = False, dtype: Any = None) -> TensorView:
    return t.ops.prod(x, [dim % x.ndim], keepdim)


@rule(aten.amax.default)
def _amax(t: Translation, x: TensorView, dims: Any = (), keepdim: bool = False) -> TensorView:
    return _extreme(t, "max", x, dims, keepdim)


@rule(aten.amin.default)
def _amin(t: Translation, x: TensorView, dims: Any = (), keepdim: bool = False) -> TensorView:
    return _extreme(t, "min", x, dims, keepdim)


@rule(aten.max.default)
def _max(t: Translation, x: TensorView) -> TensorView:
    return _extreme(t, "max", x, None, False)


@rule(aten.min.default)
def _min(t: Translation, x: TensorView) -> TensorView:
    return _extreme(t, "min", x, None, False)


def _extreme(t: Translation, name: str, x: TensorView, dims: Any, keepdim: bool) -> TensorView:
    return t.fd.call(name, [x, dims_of(dims, x.ndim), keepdim]) if x.ndim else x


@rule(aten.max.dim)
def _max_dim(t: Translation, x: TensorView, dim: int, keepdim: bool = False) -> tuple[TensorView, ...]:
    return _extreme(t, "max", x, dim, keepdim), _place(t, x, dim, keepdim, "max")


@rule(aten.min.dim)
def _min_dim(t: Translation, x: TensorView, dim: int, keepdim: bool = False) -> tuple[TensorView, ...]:
    return _extreme(t, "min", x, dim, keepdim), _place(t, x, dim, keepdim, "min")


@rule(aten.argmax.default)
def _argmax(t: Translation, x: TensorView, dim: Any = None, keepdim: bool = False) -> TensorView:
    return _place(t, x, dim, keepdim, "max")


@rule(aten.argmin.default)
def _argmin(t: Translation, x: TensorView, dim: Any = None, keepdim: bool = False) -> TensorView:
    return _place(t, x, dim, keepdim, "min")


def _place(t: Translation, x: TensorView, dim: Any, keepdim: bool, name: str) -> TensorView:
    """The index of the first greatest or least element. NaN counts as both, as in torch, and equals nothing."""
    if dim is None:
        found = _place(t, t.reshape(x, [x.type.numel]), 0, False, name)
        return t.reshape(found, t.shape)
    if not x.ndim:
        return t.full(0, [], DataType.Int)
    place = dim % x.ndim
    index = t.along(t.ops.iota(x.type.shape[place]), place, x.ndim)
    is_top = t.ops.eq(x, t.fd.call(name, [x, [place], True]))
    is_top = t.ops.logical_or(is_top, t.ops.isnan(x)) if x.dtype.category >= Category.FLOAT else is_top
    return t.ops.min(t.ops.where(is_top, index, x.type.shape[place]), [place], keepdim)


@rule(aten.any.default, aten.any.dim, aten.any.dims)
def _any(t: Translation, x: TensorView, dims: Any = None, keepdim: bool = False) -> TensorView:
    """A maximum of bools as integers."""
    return t.cast(_extreme(t, "max", _as_int(t, x), dims, keepdim), DataType.Bool)


@rule(aten.all.default, aten.all.dim, aten.all.dims)
def _all(t: Translation, x: TensorView, dims: Any = None, keepdim: bool = False) -> TensorView:
    return t.cast(_extreme(t, "min", _as_int(t, x), dims, keepdim), DataType.Bool)


def _as_int(t: Translation, x: TensorView) -> TensorView:
    return t.cast(t.cast(x, DataType.Bool), DataType.Int32)


@rule(aten.var.correction)
def _var(t: Translation, x: TensorView, dims: Any = None, *, correction: Any = 1, keepdim: bool = False) -> TensorView:
    return t.ops.var(t.computing(x), dims_of(dims, x.ndim), _corrected(correction), keepdim)


@rule(aten.var_mean.correction)
def _var_mean(
    t: Translation, x: TensorView, dims: Any = None, *, correction: Any = 1, keepdim: bool = False
) -> tuple[TensorView, ...]:
    return t.ops.var_mean(t.computing(x), dims_of(dims, x.ndim), _corrected(correction), keepdim)


def _corrected(correction: Any) -> int:
    return 1 if correction is None else int(correction)


@rule(aten.cumsum.default)
def _cumsum(t: Translation, x: TensorView, dim: int, dtype: Any = None) -> TensorView:
    return t.ops.cumsum(t.cast(x, t.dtype), dim % x.ndim) if x.ndim else x


@rule(aten.cumprod.default)
def _cumprod(t: Translation, x: TensorView, dim: int, dtype: Any = None) -> TensorView:
    return t.ops.cumprod(t.cast(x, t.dtype), dim % x.ndim) if x.ndim else x


@rule(aten.topk.default)
def _topk(
    t: Translation, x: TensorView, k: int, dim: int = -1, largest: bool = True, sorted: bool = True
) -> tuple[TensorView, ...]:
    return t.ops.topk(x, k, dim % x.ndim, largest, sorted)


@rule(aten.sort.default, aten.sort.stable)
def _sort(t: Translation, x: TensorView, *args: Any, dim: int = -1, descending: bool = False, **more: Any) -> Any:
    """`sort.stable` has its flag before dim as a keyword."""
    if args:
        dim, descending = (*args, descending)[:2]
    place = dim % x.ndim
    order = t.ops.argsort(x, place, descending, True)
    return t.ops.gather(x, order, place), order


@rule(aten.argsort.default)
def _argsort(t: Translation, x: TensorView, dim: int = -1, descending: bool = False) -> TensorView:
    return t.ops.argsort(x, dim % x.ndim, descending, True)


@rule(aten.histc.default)
def _histc(t: Translation, x: TensorView, bins: int = 100, low: Any = 0, high: Any = 0) -> TensorView:
    """How many elements fall in each of equal bins, of which the last one has its upper end; others do not count."""
    if low == high:
        raise user_error("histc: the range", f"{low} to {high}", "ends that differ", "Pass min and max.")
    flat = t.cast(t.reshape(x, [x.type.numel]), DataType.Float)
    place = t.ops.floor(t.ops.mul(t.ops.sub(flat, float(low)), bins / (high - low)))
    inside = t.ops.logical_and(t.ops.ge(flat, float(low)), t.ops.le(flat, float(high)))
    place = t.ops.where(inside, t.ops.minimum(place, float(bins - 1)), -1.0)
    bin_of = t.ops.iota(bins, 0.0, 1.0, DataType.Float)
    hits = t.ops.eq(t.along(place, 0, 2), t.along(bin_of, 1, 2))
    return t.ops.sum(t.cast(hits, DataType.Float), [0])
