"""Thunder's prims in ops of a definition: `RULES`, by id. Most are aten's rules with their arguments in another order.

A rule is called with a `Translation` and the prim's arguments, in which tensors are TensorViews.
"""

# pyright: reportMissingImports=false

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from thunder.core.prims import PrimIDs

from ..definition.tensor_view import TensorView
from ..dtypes import Category, DataType
from ..frontends.aten import Translation, rule_for
from ..frontends.sdpa import BACKWARD, FORWARD
from .prims import MeshPrims

Rule = Callable[..., Any]
RULES: dict[Any, Rule] = {}
# By id whether a prim with these arguments has a rule, where not all have: others are left to torch.
CHECKS: dict[Any, Callable[..., bool]] = {}
aten = torch.ops.aten

_FUNCTIONS = (
    "abs", "acos", "acosh", "asin", "asinh", "atan", "atanh", "bitwise_not", "ceil", "cos", "cosh", "erf", "erfc",
    "erfcinv", "erfinv", "exp", "exp2", "expm1", "floor", "isfinite", "lgamma", "log", "log10", "log1p", "log2", "neg",
    "reciprocal", "round", "rsqrt", "sign", "signbit", "sin", "sinh", "sqrt", "tan", "tanh", "trunc", "real", "imag",
)  # fmt: skip
_BINARY = (
    "atan2", "bitwise_and", "bitwise_or", "bitwise_xor", "bitwise_left_shift", "bitwise_right_shift", "eq", "ne", "lt",
    "le", "gt", "ge", "fmod", "remainder", "maximum", "minimum", "nextafter",
)  # fmt: skip
# By prim: the aten op whose rule takes the same arguments.
_SAME = {
    PrimIDs.ADD: aten.add.Tensor, PrimIDs.SUB: aten.sub.Tensor, PrimIDs.MUL: aten.mul.Tensor,
    PrimIDs.POW: aten.pow.Tensor_Tensor, PrimIDs.WHERE: aten.where.self, PrimIDs.LERP: aten.lerp.Tensor,
    PrimIDs.AMAX: aten.amax.default, PrimIDs.AMIN: aten.amin.default, PrimIDs.SUM: aten.sum.dim_IntList,
    PrimIDs.VAR: aten.var.correction, PrimIDs.VAR_MEAN: aten.var_mean.correction, PrimIDs.ARGMAX: aten.argmax.default,
    PrimIDs.ARGMIN: aten.argmin.default, PrimIDs.TOPK: aten.topk.default, PrimIDs.CAT: aten.cat.default,
    PrimIDs.TRANSPOSE: aten.permute.default, PrimIDs.FLIP: aten.flip.default, PrimIDs.MATMUL: aten.matmul.default,
    PrimIDs.INDEX_PUT: aten.index_put.default, PrimIDs._GROUPED_MM: aten._grouped_mm.default,
    PrimIDs.RESHAPE: aten.view.default, PrimIDs.VIEW: aten.view.default, PrimIDs.CLONE: aten.clone.default,
    PrimIDs.SHALLOW_COPY: aten.alias.default,
    MeshPrims.ATTENTION: FORWARD,
    MeshPrims.ATTENTION_BACKWARD: BACKWARD,
}  # fmt: skip


def rule(*ids: Any, check: Callable[..., bool] | None = None) -> Callable[[Rule], Rule]:
    """Enter a function for these ids of prims or symbols; with `check`, for arguments of which it is true."""

    def enter(function: Rule) -> Rule:
        RULES.update(dict.fromkeys(ids, function))
        CHECKS.update(dict.fromkeys(ids, check) if check is not None else {})
        return function

    return enter


def _aten(op: Any) -> Rule:
    found = rule_for(op)
    assert found is not None, op
    return found


def _function(name: str) -> Rule:
    """Integers are floats before a function that makes floats of them."""

    def write(t: Translation, x: TensorView) -> TensorView:
        made_float = t.dtype.category is Category.FLOAT and x.dtype.category < Category.FLOAT
        return t.fd.call(name, [t.cast(x, t.dtype) if made_float else x])

    return write


def _binary(name: str) -> Rule:
    def write(t: Translation, a: Any, b: Any) -> TensorView:
        return t.fd.call(name, [a, b])

    return write


RULES.update({PrimIDs[name.upper()]: _function(name) for name in _FUNCTIONS})
RULES.update({PrimIDs[name.upper()]: _binary(name) for name in _BINARY})
RULES.update({prim: _aten(op) for prim, op in _SAME.items()})


@rule(PrimIDs.DIV)
def _div(t: Translation, a: Any, b: Any) -> TensorView:
    """Integers are divided as such, towards zero."""
    return t.ops.truediv(a, b) if t.dtype.category >= Category.FLOAT else t.ops.div(a, b)


@rule(PrimIDs.CONVERT_ELEMENT_TYPE)
def _cast(t: Translation, x: TensorView, dtype: Any) -> TensorView:
    return t.cast(x, t.dtype)


@rule(PrimIDs.STRIDE_ORDER)
def _stride_order(t: Translation, x: TensorView, order: Any) -> TensorView:
    """The order of dims in memory is the kernels' affair."""
    return x


# tensors of numbers


@rule(PrimIDs.FULL)
def _full(t: Translation, shape: Any, value: Any, **_: Any) -> TensorView:
    return t.full(value, t.shape, t.dtype)


@rule(PrimIDs.IOTA)
def _iota(t: Translation, length: int, *, start: Any, step: Any, **_: Any) -> TensorView:
    return t.ops.iota(length, start, step, t.dtype)


@rule(PrimIDs.UNIFORM)
def _uniform(t: Translation, shape: Any, low: Any, high: Any, **_: Any) -> TensorView:
    """Numbers follow the global index: they are the same on every mesh, and not torch's."""
    wide = DataType.Float if t.dtype.is_reduced_float else t.dtype
    return t.ops.uniform(low, high, t.shape, dtype=wide)


# shapes


@rule(PrimIDs.BROADCAST_IN_DIM)
def _broadcast_in_dim(t: Translation, x: TensorView, shape: Any, dims: Sequence[int]) -> TensorView:
    return t.ops.broadcast_in_dim(x, t.shape, list(dims))


@rule(PrimIDs.SQUEEZE)
def _squeeze(t: Translation, x: TensorView, dims: Sequence[int]) -> TensorView:
    return t.ops.squeeze(x, list(dims)) if dims else x


@rule(PrimIDs.SLICE)
def _slice(t: Translation, x: TensorView, starts: Any, ends: Any, strides: Any = None) -> TensorView:
    return t.ops.slice(x, list(starts), list(ends), [1] * x.ndim if strides is None else list(strides))


def _pads(x: Any, value: Any, config: Any) -> bool:
    """What stands between elements is zero."""
    return value == 0 or not any(dilation for _, _, dilation in config)


@rule(PrimIDs.PAD, check=_pads)
def _pad(t: Translation, x: TensorView, value: Any, config: Sequence[Sequence[int]]) -> TensorView:
    """Negative widths take elements away; the last dim comes first in the op. `dilation` goes between elements."""
    for dim, (_, _, dilation) in enumerate(config):
        x = _dilated(t, x, dim, dilation) if dilation else x
    starts = [max(0, -low) for low, *_ in config]
    ends = [n - max(0, -high) for n, (_, high, *_) in zip(x.type.shape, config, strict=True)]
    x = _slice(t, x, starts, ends)
    widths = [max(0, width) for low, high, *_ in reversed(config) for width in (low, high)]
    return t.ops.pad(x, widths, value) if any(widths) else x


def _dilated(t: Translation, x: TensorView, dim: int, dilation: int) -> TensorView:
    """Zeros between the elements of a dim: what the gradient of a slice in steps is."""
    sizes, step = list(x.type.shape), dilation + 1
    sizes[dim] = max(0, (sizes[dim] - 1) * step + 1)
    return _aten(aten.slice_backward.default)(t, x, sizes, dim, 0, sizes[dim], step)


# reductions and orders


@rule(PrimIDs.PROD)
def _prod(t: Translation, x: TensorView, dims: Sequence[int]) -> TensorView:
    return t.ops.prod(x, list(dims)) if dims else x


@rule(PrimIDs.SORT)
def _sort(t: Translation, x: TensorView, dim: int, descending: bool, sorted: bool) -> tuple[TensorView, ...]:
    return _aten(aten.sort.default)(t, x, dim=dim, descending=descending)


# products


@rule(PrimIDs.LINEAR)
def _linear(t: Translation, x: TensorView, weight: TensorView, bias: TensorView | None) -> TensorView:
    return t.ops.linear(x, weight) if bias is None else t.ops.linear(x, weight, bias)


# look-ups and writes by index


@rule(PrimIDs.TAKE)
def _take(t: Translation, x: TensorView, index: TensorView, dim: int) -> TensorView:
    return t.reshape(_aten(aten.index_select.default)(t, x, dim, index), t.shape)


@rule(PrimIDs.TAKE_ALONG_AXIS)
def _take_along_axis(t: Translation, x: TensorView, index: TensorView, dim: int) -> TensorView:
    return t.ops.take_along_axis(x, index, dim % x.ndim)


@rule(PrimIDs.GATHER)
def _gather(t: Translation, x: TensorView, index: TensorView, dim: int) -> TensorView:
    return t.ops.gather(x, index, dim % x.ndim)


@rule(PrimIDs.SCATTER)
def _scatter(t: Translation, x: TensorView, index: TensorView, source: Any, dim: int) -> TensorView:
    return _aten(aten.scatter.src)(t, x, dim, index, source)


def _adds_whole_rows(x: Any, index: Any, value: Any, dim: int) -> bool:
    others = [d for d in range(x.ndim) if d != dim % x.ndim]
    return tuple(index.shape) == tuple(value.shape) and all(x.shape[d] == index.shape[d] for d in others)


@rule(PrimIDs.SCATTER_ADD, check=_adds_whole_rows)
def _scatter_add(t: Translation, x: TensorView, index: TensorView, value: TensorView, dim: int) -> TensorView:
    return _aten(aten.scatter_add.default)(t, x, dim, index, value)


@rule(PrimIDs.INDEX_ADD)
def _index_add(t: Translation, x: TensorView, index: TensorView, value: TensorView, dim: int) -> TensorView:
    return _aten(aten.index_add.default)(t, x, dim, index, value)


@rule(PrimIDs.EMBEDDING)
def _embedding(t: Translation, index: TensorView, weight: TensorView, **_: Any) -> TensorView:
    return t.ops.embedding_fwd(index, weight)


def _is_plain(grad: Any, index: Any, rows: int, padding: Any, by_frequency: bool, sparse: bool) -> bool:
    return not by_frequency and not sparse


@rule(PrimIDs.EMBEDDING_BACKWARD, check=_is_plain)
def _embedding_backward(
    t: Translation,
    grad: TensorView,
    index: TensorView,
    rows: int,
    padding: int | None,
    by_frequency: bool,
    sparse: bool,
) -> TensorView:
    padding = -1 if padding is None else padding
    return _aten(aten.embedding_dense_backward.default)(t, grad, index, rows, padding, False)


# losses


@rule("nll_loss_backward")
def _nll_loss_backward(
    t: Translation, grad: TensorView, x: TensorView, target: TensorView, weight: TensorView | None, reduction: str,
    ignore_index: int, total: TensorView | None,
) -> TensorView:  # fmt: skip
    """Minus the weight of its class at each target, times the gradient; nothing at targets that are left out."""
    place = 1 if x.ndim > 1 else 0
    grad = t.ops.truediv(grad, total) if reduction == "mean" and total is not None else grad
    if weight is not None:
        safe = t.ops.where(t.ops.ne(target, ignore_index), target, 0)
        taken = t.ops.index_select(weight, t.reshape(safe, [safe.type.numel]), 0)
        grad = t.ops.mul(t.reshape(taken, target.type.shape), grad)
    grad = t.unsqueeze(grad, place) if grad.ndim == target.ndim and target.ndim else grad
    classes = t.along(t.ops.iota(x.type.shape[place]), place, x.ndim)
    targets = t.unsqueeze(target, place)
    hit = t.ops.logical_and(t.ops.eq(classes, targets), t.ops.ne(targets, ignore_index))
    return t.ops.where(hit, t.ops.neg(grad), t.full(0, [], DataType.Float))
