"""Scans along a dim: cumsum, cumprod, cummax, cummin, and cumsum's gradient, the sums from the end."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ..dtypes import Category, DataType
from ..kernels.table import kernel
from ..kernels.tensors import tensor_like
from .nvfuser_lowering import cast, of_category
from .opdef import Call, Emit, NvfuserEmit, OpDef, Partial, Sample, Writing, cast_to
from .promotion import widen
from .reductions import product_factors, product_without
from .rules import FactorKind, Rule, RuleBuilder
from .shape_arithmetic import check_number, check_order, dim_of, one_dim_widths, shape_along
from .values import Param, ParamKind, TensorRef, TensorType
from .vjp import Backward, OperandGradient, Tensor, each, sizes

K = ParamKind
# The op that combines a scan's result so far with the next element, and the reduction that gives its last element.
COMBINE = {"cumsum": "add", "cumprod": "mul", "cummax": "maximum", "cummin": "minimum"}
REDUCE = {"cumsum": "sum", "cumprod": "prod", "cummax": "max", "cummin": "min"}


def _infer(call: Call) -> tuple[TensorType, ...]:
    """The operand's type: unlike torch, nvFuser keeps Int32 and Bool."""
    name, (arg,) = call.op.name, call.types
    dim_of(call)
    if name in ("cummax", "cummin"):
        check_order(name, arg)
    if arg.dtype.category is Category.INTEGER and "init" in call.op.places:
        check_number(name, call["init"], arg.dtype)
    return call.types


def whole_dim_rule(call: Call, dim: int) -> Rule:
    """One operand and results of its shape; the op needs one dim whole."""
    builder = RuleBuilder()
    dims = builder.dims(call.types[0].shape, [dim], FactorKind.BLOCK)
    return builder.build([dims], [dims] * len(call.results))


def _rule(call: Call) -> Rule:
    return whole_dim_rule(call, dim_of(call))


def _emit(e: Emit) -> str:
    """Text of the scan; of the terms of a partial operand only one starts with `init`."""
    name, dim = e.call.op.name, dim_of(e.call)
    init = e.scalar("init") if e.call["init"] is not None and (name != "cumsum" or e.leads()) else None
    if init is None and e.call.types[0].dtype.category >= Category.FLOAT:
        return f"torch.{name}({e.operands[0]}, {dim})" + (".values" if name in ("cummax", "cummin") else "")
    return f"K.scan({name!r}, {e.operands[0]}, {dim}, {init})"


@kernel
def scan(name: str, x: torch.Tensor, dim: int, init: Any) -> torch.Tensor:
    """A scan along a dim that starts with `init`, in the operand's type; "cumsum_bwd" is a cumsum from the end."""
    wide = x.long() if x.dtype == torch.bool else x
    if name == "cumsum_bwd":
        return wide.flip(dim).cumsum(dim).flip(dim).to(x.dtype)
    found = getattr(torch, name)(wide, dim)
    out = found.values if name in ("cummax", "cummin") else found
    if init is not None:
        out = _BEGIN[name](out, tensor_like(init, wide))
    return out.to(x.dtype)


_BEGIN = {"cumsum": torch.add, "cumprod": torch.mul, "cummax": torch.maximum, "cummin": torch.minimum}


def _scan_nvfuser(n: NvfuserEmit) -> Any:
    """With `init` combined afterwards: nvFuser's scans take one and ignore it. Of partial terms one starts with it."""
    ops, dtype, name = n.ops, n.call.types[0].dtype, n.call.op.name
    init = n.call["init"] if name != "cumsum" or n.leads() else None
    if init is None and not dtype.is_reduced_float:
        return n.plain(init=None)
    wide = DataType.Int if dtype is DataType.Bool else widen(dtype)
    found = getattr(ops, name)(cast(n, n.operands[0], dtype, wide), dim_of(n.call))
    if init is not None:
        found = getattr(ops, COMBINE[name])(found, of_category(n, "init", wide))
    return ops.cast(found, n.dtype(dtype))


def _sum_after_nvfuser(n: NvfuserEmit) -> Any:
    """The sum of all, less what is before: nvFuser scans from the start only, and keeps Bool."""
    ops, dim, dtype = n.ops, dim_of(n.call), n.call.types[0].dtype
    x = cast(n, n.operands[0], dtype, DataType.Int if dtype is DataType.Bool else widen(dtype))
    found = ops.sub(ops.add(ops.sum(x, [dim], True), x), ops.cumsum(x, dim))
    return ops.cast(found, n.dtype(n.call.results[0].dtype))


def _distributed_scan(
    r: Writing, call: Call, operands: tuple[TensorRef, ...], dim: int, blocks: int
) -> Sequence[TensorRef] | None:
    """Scan each piece, then combine it with the total of all pieces before it, and with `init` (Blelloch 1990)."""
    if call.types[0].dtype.category in (Category.BOOL, Category.COMPLEX):
        return None
    (x,), name, pieces = operands, call.op.name, r.pieces
    size = r.type(x).shape[dim]
    scanned = r.call(f"block_{name}", x, dim, pieces)
    totals = r.call(name, r.call(f"block_{REDUCE[name]}", x, dim, pieces), dim)
    before = r.call("block_repeat", _shifted(r, totals, dim), dim, size, pieces)
    first = r.call("block_repeat", _is_first(r, dim, pieces, r.type(x).ndim), dim, size, pieces)
    combined = r.call("where", first, scanned, r.call(COMBINE[name], scanned, before))
    dtype = call.results[0].dtype  # arithmetic widens half precision
    if call["init"] is not None:
        # In a wide type first, so that a number beyond the dtype becomes infinite, as in the op itself.
        wide = DataType.Double if dtype.category is Category.FLOAT else dtype
        init = cast_to(r, r.call("full", [1] * r.type(x).ndim, call["init"], wide), dtype)
        combined = r.call(COMBINE[name], combined, init)
    return [cast_to(r, combined, dtype)]


def _distributed_sum_after(
    r: Writing, call: Call, operands: tuple[TensorRef, ...], dim: int, blocks: int
) -> Sequence[TensorRef] | None:
    """Sum each piece from its end, and add the total of all pieces after it."""
    if call.types[0].dtype.category is Category.BOOL:
        return None
    (x,), pieces = operands, r.pieces
    within = r.call("block_cumsum_bwd", x, dim, pieces)
    totals = r.call("cumsum_bwd", r.call("block_sum", x, dim, pieces), dim)
    after = r.call("block_repeat", _shifted(r, totals, dim, after=True), dim, r.type(x).shape[dim], pieces)
    combined = r.call("add", within, after)  # arithmetic widens half precision
    return [cast_to(r, combined, call.results[0].dtype)]


def _shifted(r: Writing, totals: TensorRef, dim: int, after: bool = False) -> TensorRef:
    """For every block the total of the block before it (with `after`, of the one after it); 0 where there is none."""
    shape = r.type(totals).shape
    starts, ends = [0] * len(shape), list(shape)
    starts[dim], ends[dim] = int(after), shape[dim] - int(not after)
    widths = one_dim_widths(len(shape), dim, int(not after), int(after))
    return r.call("pad", r.call("slice", totals, starts, ends), widths)


def _is_first(r: Writing, dim: int, blocks: int, ndim: int) -> TensorRef:
    first = r.call("eq", r.call("iota", blocks), 0)
    return r.call("reshape", first, shape_along(ndim, dim, blocks))


def _cumsum_vjp(b: Backward) -> Tensor:
    return b.ops.cumsum_bwd(b.grad, b.dim)


def _cumprod_vjp(b: Backward) -> Tensor:
    """By x_i the sum of grad_j y_j / x_i over j >= i, with the zeros up to j apart from the other factors of y_j."""
    o, dim = b.ops, b.dim
    is_zero, zeros, rest = product_factors(b)
    count, total = o.cumsum(o.cast(is_zero, DataType.Int), dim), o.cumsum(zeros, dim)
    grad = b.times(o.cumprod(rest, dim, b["init"]))
    by_rest = o.cumsum_bwd(o.mul(grad, product_without(o, 0, count, total)), dim)
    with_own = o.cumsum_bwd(o.mul(grad, product_without(o, 1, count, total)), dim)
    of_own = o.mul(zeros, o.cumsum_bwd(o.where(o.eq(count, 2), grad, 0.0), dim))
    return o.where(is_zero, o.sub(with_own, of_own), o.truediv(by_rest, b.conj(rest)))


def _extreme_vjp(b: Backward) -> Tensor:
    """The gradient goes to the last element that is the extreme so far, as in torch; to none where that is `init`.

    From the first NaN on that is the last NaN.
    """
    o, x, dim = b.ops, b["arg"], b.dim
    index = o.broadcast(o.iota(sizes(x)[dim]), [d != dim for d in range(x.ndim)])
    is_extreme = o.logical_or(o.eq(x, b.result), o.isnan(x))
    found = o.cummax(o.where(is_extreme, index, -1), dim)
    grad = o.where(o.ge(found, 0), b.grad, 0.0)
    return o.take_along_axis_bwd(grad, o.maximum(found, 0), dim, sizes(x)[dim])


def _samples() -> list[Sample]:
    example = TensorType((6, 8), DataType.Float)
    return [
        Sample((example, 1)),
        Sample((example, -2, 0.5)),
        Sample((TensorType((6, 4), DataType.Int32), 0)),
        Sample((TensorType((6, 4), DataType.Bool), 0)),
    ]


def _scan(name: str, about: str, vjp: OperandGradient, partial: Partial = Partial.NONE) -> OpDef:
    return OpDef(
        name, (Param("arg", K.TENSOR), Param("dim", K.DIM), Param("init", K.OPTIONAL_SCALAR, None)), _infer, _rule,
        _emit, partial, samples=_samples, nvfuser=_scan_nvfuser, distributed=_distributed_scan, vjp=each(arg=vjp),
        about=about,
    )  # fmt: skip


OPS = (
    _scan("cumsum", "running sums along `dim`, beginning with `init`", _cumsum_vjp, Partial.FIRST),
    _scan("cumprod", "running products along `dim`", _cumprod_vjp),
    _scan("cummax", "running maxima along `dim`", _extreme_vjp),
    _scan("cummin", "running minima along `dim`", _extreme_vjp),
    OpDef(
        "cumsum_bwd",
        (Param("grad", K.TENSOR), Param("dim", K.DIM)),
        _infer,
        _rule,
        lambda e: f"K.scan('cumsum_bwd', {e.operands[0]}, {e.call['dim'] % e.call.types[0].ndim}, None)",
        Partial.FIRST,
        samples=lambda: [sample for sample in _samples() if len(sample.args) == 2],
        nvfuser=_sum_after_nvfuser,
        distributed=_distributed_sum_after,
        vjp=each(grad=lambda b: b.ops.cumsum(b.grad, b["dim"])),
        about="sums along `dim` of an element and all after it: the gradient of `cumsum`",
    ),
)
