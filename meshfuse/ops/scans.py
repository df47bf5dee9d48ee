"""Scans along a dim: cumsum, cumprod, cummax, cummin, and cumsum's gradient, the sums from the end."""

from __future__ import annotations

from ..dtypes import Category, DataType
from ..gradients.reductions import CUMSUM_BWD, SCANS
from . import nvfuser_forms
from .blocks import distributed_scan, distributed_sum_after
from .opdef import Call, Emit, OpDef, Partial, Sample
from .rules import FactorKind, Rule, RuleBuilder
from .shape_arithmetic import check_number, check_order, dim_of
from .values import Param, ParamKind, TensorType

K = ParamKind


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


def _samples() -> list[Sample]:
    example = TensorType((6, 8), DataType.Float)
    return [
        Sample((example, 1)),
        Sample((example, -2, 0.5)),
        Sample((TensorType((6, 4), DataType.Int32), 0)),
        Sample((TensorType((6, 4), DataType.Bool), 0)),
    ]


_ABOUT = {
    "cumsum": "running sums along `dim`, beginning with `init`",
    "cumprod": "running products along `dim`",
    "cummax": "running maxima along `dim`",
    "cummin": "running minima along `dim`",
}
_SCANS = tuple(
    OpDef(
        name,
        (Param("arg", K.TENSOR), Param("dim", K.DIM), Param("init", K.OPTIONAL_SCALAR, None)),
        _infer,
        _rule,
        _emit,
        Partial.FIRST if name == "cumsum" else Partial.NONE,
        samples=_samples,
        nvfuser=nvfuser_forms.scan,
        distributed=distributed_scan,
        vjp=SCANS[name],
        about=about,
    )
    for name, about in _ABOUT.items()
)
OPS = (
    *_SCANS,
    OpDef(
        "cumsum_bwd",
        (Param("grad", K.TENSOR), Param("dim", K.DIM)),
        _infer,
        _rule,
        lambda e: f"K.scan('cumsum_bwd', {e.operands[0]}, {e.call['dim'] % e.call.types[0].ndim}, None)",
        Partial.FIRST,
        samples=lambda: [sample for sample in _samples() if len(sample.args) == 2],
        nvfuser=nvfuser_forms.sum_after,
        distributed=distributed_sum_after,
        vjp=CUMSUM_BWD,
        about="sums along `dim` of an element and all after it: the gradient of `cumsum`",
    ),
)
