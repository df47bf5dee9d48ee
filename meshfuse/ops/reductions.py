"""Reductions: sum, prod, max, min."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from ..dtypes import Category, DataType
from ..errors import user_error
from ..kernels.reductions import highest, lowest
from ..kernels.table import kernel
from .nvfuser_lowering import cast
from .opdef import Call, Emit, NvfuserEmit, OpDef, Partial, Sample
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
    """The shape that is left, with 1 for the reduced dims where keepdim is asked for."""
    dims, keep = reduced_dims(call), keeps_dims(call)
    return tuple(1 if d in dims else n for d, n in enumerate(call.types[0].shape) if keep or d not in dims)


def _accumulated(op: str, dtype: DataType) -> DataType:
    """The type of a sum: Int for integers and booleans, as in torch; half precision stays half, as in nvFuser."""
    return DataType.Int if op in ("sum", "prod") and dtype.category < Category.FLOAT else dtype


def _infer(call: Call) -> tuple[TensorType, ...]:
    asked = call["dtype"]
    if call.op.name in _DOMAINS:
        _check_order(call, asked)
        _check_elements(call)
    dtype = asked if asked is not DataType.Null else _accumulated(call.op.name, call.types[0].dtype)
    return (TensorType(reduced_shape(call), dtype),)


def _check_order(call: Call, asked: DataType) -> None:
    """Raises DefinitionError unless max and min keep the operand's type, and it has an order."""
    if asked not in (DataType.Null, call.types[0].dtype):
        needed = f"{call.types[0].dtype.name}, the operand's"
        raise user_error(f"{call.op.name}: a result type", asked.name, needed, "Cast the result with fd.ops.cast.")
    check_order(call.op.name, call.types[0])


def _check_elements(call: Call) -> None:
    """Raises DefinitionError where max or min has no element to take, unless the user has asked for its neutral one."""
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


def _rule(call: Call) -> Rule:
    return reduction_rule(call, call.op.name)


def _emit_sum(e: Emit) -> str:
    result, dims = e.call.results[0].dtype, list(reduced_dims(e.call))
    if not dims:
        return cast_text(e.operands[0], e.call.types[0].dtype, result)
    return f"torch.sum({e.operands[0]}, {dims}, keepdim={e.call['keepdim']}, dtype={dtype_text(result)})"


def _emit_reduce(e: Emit) -> str:
    """Text for prod, max and min: helpers that give the neutral element for shards without elements."""
    result, dims = e.call.results[0].dtype, list(reduced_dims(e.call))
    operand = e.operands[0] if e.call.op.name != "prod" else cast_text(e.operands[0], e.call.types[0].dtype, result)
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
    """nvFuser wants all dims listed, and at least one. Its kernels reduce nothing in half precision or less."""
    dims, result, found = list(reduced_dims(n.call)), n.call.results[0].dtype, n.call.types[0].dtype
    if not dims:
        return n.ops.cast(n.operands[0], n.dtype(result))
    if not (found.is_reduced_float or result.is_reduced_float):
        return n.plain(dims=dims, empty=None)
    wide = DataType.Float if result.is_reduced_float else result
    made = n.plain(arg=cast(n, n.operands[0], found, wide), dims=dims, dtype=n.dtype(DataType.Null), empty=None)
    return n.ops.cast(made, n.dtype(result))


def _sum_vjp(b: Backward) -> Tensor:
    return restored(b, b.grad, b["arg"], b.dims, b["keepdim"])


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
    return [
        Sample((_EXAMPLE, [1])),
        Sample((_EXAMPLE, [0, 2], True)),
        Sample((_EXAMPLE,)),
        Sample((_EXAMPLE, -1)),
    ]


# Operands of one sign show when an empty shard contributes a number of its own.
_DOMAINS = {"max": (-4.0, -1.0), "min": (1.0, 4.0)}
_ABOUT = {
    "sum": "the sum over `dims` (all of them for None); integers and bools are summed as Int",
    "prod": "the product over `dims`",
    "max": "the greatest element over `dims`; of none an error, or with `empty` the type's lowest number",
    "min": "the least element over `dims`; of none an error, or with `empty` the type's highest number",
}
_VJPS: dict[str, Vjp] = {
    "sum": each(arg=_sum_vjp),
    "prod": each(arg=_prod_vjp),
    "max": each(arg=_extreme_vjp),
    "min": each(arg=_extreme_vjp),
}
_CARRIED = {"sum": Partial.FIRST, "max": Partial.MAX, "min": Partial.MIN}
OPS = tuple(
    OpDef(
        name,
        (*REDUCTION_PARAMS, _EMPTY) if name in _DOMAINS else REDUCTION_PARAMS,
        _infer,
        _rule,
        _emit_sum if name == "sum" else _emit_reduce,
        _CARRIED.get(name, Partial.NONE),
        samples=_samples,
        nvfuser=_nvfuser,
        vjp=_VJPS[name],
        pieced=True,
        domain=_DOMAINS.get(name),
        about=about,
    )
    for name, about in _ABOUT.items()
)
