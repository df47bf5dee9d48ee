"""Reductions: sum, nansum, prod, max, min."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from ..dtypes import Category, DataType
from ..errors import user_error
from ..kernels.reductions import highest, lowest
from ..kernels.table import kernel
from .nvfuser_lowering import cast, zero_where_not
from .opdef import Call, Emit, Lowering, NvfuserEmit, OpDef, Partial, Sample
from .promotion import cast_text, dtype_text
from .rules import DimFactors, FactorKind, Rule, RuleBuilder
from .shape_arithmetic import check_order, check_reduced
from .values import Param, ParamKind, TensorType
from .vjp import Backward, Tensor, Vjp, each, kept, restored

K = ParamKind


def reduced_dims(call: Call) -> tuple[int, ...]:
    """The dims that a reduction removes, counted from the front, ascending."""
    return check_reduced(call.op.name, call["dims"], call.types[0].ndim)


def keeps_dims(call: Call) -> bool:
    """Whether reduced dims stay, with size 1."""
    return "keepdim" in call.op.places and call["keepdim"]


def reduced_shape(call: Call) -> tuple[int, ...]:
    """The shape that is left, with 1 for the reduced dims with keepdim."""
    dims, keep = reduced_dims(call), keeps_dims(call)
    return tuple(1 if d in dims else n for d, n in enumerate(call.types[0].shape) if keep or d not in dims)


def _accumulating_infer(call: Call) -> tuple[TensorType, ...]:
    """Unless a type is given, Int for integers and booleans, as in torch; half precision stays half, as in nvFuser."""
    requested, found = call["dtype"], call.types[0].dtype
    accumulated = DataType.Int if found.category < Category.FLOAT else found
    return (TensorType(reduced_shape(call), accumulated if requested is DataType.Null else requested),)


def _extreme_infer(call: Call) -> tuple[TensorType, ...]:
    _check_order(call, call["dtype"])
    _check_elements(call)
    return (TensorType(reduced_shape(call), call.types[0].dtype),)


def _check_order(call: Call, requested: DataType) -> None:
    """Raises DefinitionError unless max and min keep the operand's type, and it has an order."""
    if requested not in (DataType.Null, call.types[0].dtype):
        needed = f"{call.types[0].dtype.name}, the operand's"
        raise user_error(f"{call.op.name}: a result type", requested.name, needed, "Cast the result with fd.ops.cast.")
    check_order(call.op.name, call.types[0])


def _check_elements(call: Call) -> None:
    """Raises DefinitionError where max or min has no element to take, unless the user has allowed its neutral one."""
    shape = call.types[0].shape
    empty = next((d for d in reduced_dims(call) if shape[d] == 0), None)
    if empty is not None and not call["empty"]:
        raise user_error(f"{call.op.name} of no elements", f"dim {empty} of {call.types[0]}", "an element at least",
                         "Leave it out where the tensor is empty, or pass empty=True for the number that changes no "
                         f"{call.op.name}.")  # fmt: skip


def reduction_rule(call: Call, reduce: str) -> Rule:
    """Kept dims pass through; reduced dims are reduction factors of the operand."""
    dims, builder = reduced_dims(call), RuleBuilder()
    operand = builder.dims(call.types[0].shape, dims, FactorKind.REDUCE, reduce)
    return builder.build([operand], [kept_factors(operand, dims, call["keepdim"])])


def kept_factors(operand: DimFactors, dims: tuple[int, ...], keepdim: bool) -> DimFactors:
    """The factors of a reduction's result, by dim."""
    return tuple(() if d in dims else factors for d, factors in enumerate(operand) if keepdim or d not in dims)


def _sum_emit(e: Emit) -> str:
    return _sum_text(e, e.operands[0])


def _sum_text(e: Emit, terms: str) -> str:
    result, dims = e.call.results[0].dtype, list(reduced_dims(e.call))
    if not dims:
        return cast_text(terms, e.call.types[0].dtype, result)
    return f"torch.sum({terms}, {dims}, keepdim={e.call['keepdim']}, dtype={dtype_text(result)})"


def _prod_emit(e: Emit) -> str:
    return _reduce_text(e, cast_text(e.operands[0], e.call.types[0].dtype, e.call.results[0].dtype))


def _extreme_emit(e: Emit) -> str:
    return _reduce_text(e, e.operands[0])


def _reduce_text(e: Emit, operand: str) -> str:
    """Text of a kernel that gives the neutral element for shards without elements."""
    dims = list(reduced_dims(e.call))
    return f"K.reduce_{e.call.op.name}({operand}, {dims}, {e.call['keepdim']})" if dims else operand


@kernel
def reduce_max(x: torch.Tensor, dims: list[int], keepdim: bool) -> torch.Tensor:
    """The largest elements; the lowest value of the type over a shard with nothing in it."""
    return _reduced_empty(x, dims, keepdim, lowest(x.dtype)) if _is_empty(x, dims) else torch.amax(x, dims, keepdim)


@kernel
def reduce_min(x: torch.Tensor, dims: list[int], keepdim: bool) -> torch.Tensor:
    """The smallest elements; the highest value of the type over a shard with nothing in it."""
    return _reduced_empty(x, dims, keepdim, highest(x.dtype)) if _is_empty(x, dims) else torch.amin(x, dims, keepdim)


@kernel
def reduce_prod(x: torch.Tensor, dims: list[int], keepdim: bool) -> torch.Tensor:
    """The products, in the type of x."""
    for d in sorted(dims, reverse=True):
        x = torch.prod(x, d, keepdim, dtype=x.dtype)  # else Int of every integer
    return x


def _reduced_empty(x: torch.Tensor, dims: list[int], keepdim: bool, fill: Any) -> torch.Tensor:
    """The neutral element in the shape of a reduction of a tensor without elements."""
    sizes = [1 if d in dims else n for d, n in enumerate(x.shape) if keepdim or d not in dims]
    return x.new_full(sizes, fill)


def _is_empty(x: torch.Tensor, dims: list[int]) -> bool:
    return any(x.shape[d] == 0 for d in dims)


def _nvfuser(n: NvfuserEmit) -> Any:
    return _nvfuser_reduced(n, getattr(n.ops, n.call.op.name), n.operands[0])


def _nvfuser_reduced(n: NvfuserEmit, reduce: Callable[..., Any], terms: Any) -> Any:
    """nvFuser wants all dims listed, and at least one. Its kernels reduce nothing in half precision or less."""
    dims, result, found = list(reduced_dims(n.call)), n.call.results[0].dtype, n.call.types[0].dtype
    if not dims:
        return n.ops.cast(terms, n.dtype(result))
    if not (found.is_reduced_float or result.is_reduced_float):
        return reduce(terms, dims, n.call["keepdim"], n.dtype(n.call["dtype"]))
    wide = DataType.Float if result.is_reduced_float else result
    return n.ops.cast(reduce(cast(n, terms, found, wide), dims, n.call["keepdim"]), n.dtype(result))


def _sum_vjp(b: Backward) -> Tensor:
    return restored(b, b.grad, b["arg"], b.dims, b["keepdim"])


def _nansum_emit(e: Emit) -> str:
    x = e.operands[0]
    return _sum_text(e, f"torch.where(torch.isnan({x}), 0, {x})")


def _nansum_nvfuser(n: NvfuserEmit) -> Any:
    x, dtype = n.operands[0], n.call.types[0].dtype
    is_number = n.ops.logical_not(n.ops.isnan(x))
    terms = zero_where_not(n, is_number, x, dtype) if dtype.category >= Category.FLOAT else x
    return _nvfuser_reduced(n, n.ops.sum, terms)


def _nansum_vjp(b: Backward) -> Tensor:
    return b.ops.where(b.ops.isnan(b["arg"]), 0.0, _sum_vjp(b))


def _nansum_samples() -> list[Sample]:
    return [replace(sample, values={0: (1.5, math.nan, -2.0, 0.5, math.nan)}) for sample in _samples()]


class ProductFactors(NamedTuple):
    """The factors of a product, with the zeros apart, so that what is made of them can be differentiated again.

    is_zero: which ones are 0.
    zeros: those, and 0 for the others: their sum stands for their product where there is one of them.
    rest: the others, and 1 for the zeros: these can be divided by.
    """

    is_zero: Tensor
    zeros: Tensor
    rest: Tensor


def product_factors(b: Backward) -> ProductFactors:
    o, x = b.ops, b["arg"]
    is_zero = o.eq(x, 0)
    return ProductFactors(is_zero, b.conj(o.where(is_zero, x, 0.0)), o.where(is_zero, 1.0, x))


def product_without(o: Any, left_out: int, count: Tensor, total: Tensor) -> Tensor:
    """The product of `count` zeros but for some that are left out; `total` is the sum of the others.

    It is 1 where no other is left, that other where it is one, and else 0, as are then its derivatives.
    """
    return o.where(o.eq(count, left_out), 1.0, o.where(o.eq(count, left_out + 1), total, 0.0))


def _prod_vjp(b: Backward) -> Tensor:
    """By x the product of the other elements."""
    o, dims = b.ops, b.dims
    is_zero, zeros, rest = product_factors(b)
    count, total = o.sum(is_zero, dims, True), o.sum(zeros, dims, True)
    grad = o.mul(kept(b, b.grad, b["arg"], dims, b["keepdim"]), b.conj(o.prod(rest, dims, True)))
    by_rest = o.mul(o.truediv(grad, b.conj(rest)), product_without(o, 0, count, total))
    return o.where(is_zero, o.mul(grad, product_without(o, 1, count, o.sub(total, zeros))), by_rest)


def _extreme_vjp(b: Backward) -> Tensor:
    """Equal extremes share the gradient, as in torch.amax; a NaN equals nothing, and all get NaN."""
    o, x, dims = b.ops, b["arg"], b.dims
    is_top = o.eq(x, kept(b, b.result, x, dims, b["keepdim"]))
    share = o.where(is_top, kept(b, b.grad, x, dims, b["keepdim"]), 0.0)
    return o.truediv(share, o.sum(is_top, dims, True))


REDUCTION_PARAMS = (
    Param("arg", K.TENSOR),
    Param("dims", K.OPTIONAL_DIMS, None, "dim"),
    Param("keepdim", K.BOOL, False, "keep_dim"),
    Param("dtype", K.DTYPE, DataType.Null),
)
_EMPTY = Param("empty", K.BOOL, False)  # Of max and min: whether they may be of no elements.
_EXAMPLE = TensorType((4, 6, 5), DataType.Float)


def _samples() -> list[Sample]:
    return [Sample((_EXAMPLE, [1])), Sample((_EXAMPLE, [0, 2], True)), Sample((_EXAMPLE,)), Sample((_EXAMPLE, -1))]


def _reduction(name: str, about: str, emit: Lowering, partial: Partial, vjp: Vjp, **more: Any) -> OpDef:
    """The op in which the terms of a reduction of this name are reduced by itself."""
    return OpDef(
        name, more.pop("params", REDUCTION_PARAMS), more.pop("infer", _accumulating_infer),
        lambda call: reduction_rule(call, name), emit, partial, samples=_samples, nvfuser=_nvfuser, vjp=vjp,
        concat_distributive=True, about=about, **more,
    )  # fmt: skip


def _extreme(name: str, about: str, partial: Partial, domain: tuple[float, float]) -> OpDef:
    """Operands of one sign, as in `domain`, show when an empty shard contributes a number of its own."""
    return _reduction(
        name, about, _extreme_emit, partial, each(arg=_extreme_vjp), params=(*REDUCTION_PARAMS, _EMPTY),
        infer=_extreme_infer, domain=domain,
    )  # fmt: skip


OPS = (
    _reduction("sum", "the sum over `dims` (all of them for None); integers and bools are summed as Int",
               _sum_emit, Partial.FIRST, each(arg=_sum_vjp)),
    OpDef("nansum", REDUCTION_PARAMS, _accumulating_infer, lambda call: reduction_rule(call, "sum"), _nansum_emit,
          samples=_nansum_samples, nvfuser=_nansum_nvfuser, vjp=each(arg=_nansum_vjp), concat_distributive=True,
          reference=lambda x, dims, keepdim, _: torch.nansum(x, dims, keepdim),
          about="the sum over `dims` of what is not NaN: of data with gaps"),
    _reduction("prod", "the product over `dims`", _prod_emit, Partial.NONE, each(arg=_prod_vjp)),
    _extreme("max", "the greatest element over `dims`; of none an error, or with `empty` the type's lowest number",
             Partial.MAX, (-4.0, -1.0)),
    _extreme("min", "the least element over `dims`; of none an error, or with `empty` the type's highest number",
             Partial.MIN, (1.0, 4.0)),
)  # fmt: skip
