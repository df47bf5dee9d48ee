"""Matrix products: matmul and linear."""

from __future__ import annotations

import math
from collections.abc import Sequence

from ..dtypes import DataType
from ..gradients.products import LINEAR, MATMUL
from . import nvfuser_forms
from .opdef import Call, Emit, OpDef, Partial, Sample, Writing, cast_to
from .rules import DimFactors, Rule, RuleBuilder
from .shape_arithmetic import aligned_dims, broadcast_shapes, check_dtypes, check_ndim, check_same_size
from .values import Param, ParamKind, TensorRef, TensorType

K = ParamKind


def _matmul_infer(call: Call) -> tuple[TensorType, ...]:
    a, b = call.types
    check_ndim("matmul", "the first operand", a, 1)
    check_ndim("matmul", "the second operand", b, 1)
    check_same_size("matmul", "the contracted dims", a.shape[-1], b.shape[-2] if b.ndim > 1 else b.shape[0])
    batch = broadcast_shapes("matmul", [a.shape[:-2], b.shape[:-2]])
    rows, columns = a.shape[-2:-1] if a.ndim > 1 else (), b.shape[-1:] if b.ndim > 1 else ()
    return (TensorType((*batch, *rows, *columns), check_dtypes(call)),)


def _matmul_rule(call: Call) -> Rule:
    """b* m k, b* k n -> b* m n."""
    (a, b), result, builder = call.types, call.results[0].shape, RuleBuilder()
    kept = int(a.ndim > 1) + int(b.ndim > 1)
    batch_shape = result[: len(result) - kept]
    batch = builder.dims(batch_shape)
    rows = (builder.dim(a.shape[-2]),) if a.ndim > 1 else ()
    columns = (builder.dim(b.shape[-1]),) if b.ndim > 1 else ()
    inner = builder.reduction(a.shape[-1])
    left = (*aligned_dims(a.shape[:-2], batch_shape, batch), *rows, inner)
    right = (*aligned_dims(b.shape[:-2], batch_shape, batch), inner, *columns)
    return builder.build([left, right], [(*batch, *rows, *columns)])


def _matmul_flops(call: Call) -> float:
    return 2.0 * call.results[0].numel * call.types[0].shape[-1]


def _rows(e: Emit) -> str:
    """Text of the first operand in a product with a matrix, dense: torch would multiply rows with gaps one by one."""
    many = e.call.types[0].ndim > 2 and e.call.types[1].ndim == 2
    return f"{e.operands[0]}.contiguous()" if many else e.operands[0]


def _matmul_emit(e: Emit) -> str:
    return f"torch.matmul({_rows(e)}, {e.operands[1]})"


def _matmul_into(e: Emit, target: str) -> str | None:
    if min(t.ndim for t in e.call.types) < 2:
        return None  # For a vector torch would resize the tensor that it writes into, which may be part of another.
    return _product_into(e, e.operands[1], target)


def _product_into(e: Emit, second: str, target: str) -> str:
    """Text of a product written into `target`.

    With more than two dims, torch must see the rows of `target` as one matrix's.
    """
    many = e.call.types[0].ndim > 2 and e.call.types[1].ndim == 2
    function, end = ("K.rows_into", target) if many else ("torch.matmul", f"out={target}")
    return f"{function}({e.operands[0]}, {second}, {end})"


def _linear_infer(call: Call) -> tuple[TensorType, ...]:
    x, w = call.types[:2]
    check_ndim("linear", "the input", x, 1)
    check_ndim("linear", "the weight", w, 1, 3)
    check_same_size("linear", "the input's and the weight's last dims", x.shape[-1], w.shape[-1])
    shape = (*w.shape[:-2], *x.shape[:-1], *w.shape[-2:-1])
    if len(call.types) == 3:
        _check_bias(call.types[2], w)
    return (TensorType(shape, check_dtypes(call)),)


def _check_bias(bias: TensorType, w: TensorType) -> None:
    check_ndim("linear", "the bias", bias, max(w.ndim - 1, 0), max(w.ndim - 1, 0))
    for a, b in zip(bias.shape, w.shape, strict=False):
        check_same_size("linear", "the bias' and the weight's dims", a, b)


def _linear_rule(call: Call) -> Rule:
    """b* k, d n k, d n -> d b* n, where d and n are there only if the weight has them."""
    x, w = call.types[:2]
    builder = RuleBuilder()
    stacked = builder.dims(w.shape[:-2])
    batch, columns = builder.dims(x.shape[:-1]), builder.dims(w.shape[-2:-1])
    inner = (builder.reduction(x.shape[-1]),)
    operands: list[DimFactors] = [(*batch, *inner), (*stacked, *columns, *inner)]
    if len(call.types) == 3:
        operands.append((*stacked, *columns))
    return builder.build(operands, [(*stacked, *batch, *columns)])


def _linear_apart(r: Writing, call: Call, operands: tuple[TensorRef, ...]) -> Sequence[TensorRef]:
    """The product without the bias, and then the bias added."""
    x, w, bias = operands
    product, result = r.call("linear", x, w), call.results[0]
    stacked, columns = r.type(w).ndim - 2, r.type(bias).ndim - max(r.type(w).ndim - 2, 0)
    missing = [stacked <= dim < result.ndim - columns for dim in range(result.ndim)]
    total = r.call("add", product, r.call("broadcast", bias, missing))
    return [cast_to(r, total, result.dtype)]


def _linear_emit(e: Emit) -> str:
    bias = e.operands[2] if len(e.operands) == 3 and e.leads() else None
    if e.call.types[1].ndim < 3:
        return f"F.linear({_rows(e)}, {e.operands[1]}{f', {bias}' if bias else ''})"
    return f"K.stacked_linear({e.operands[0]}, {e.operands[1]}, {bias})"


def _linear_into(e: Emit, target: str) -> str | None:
    x, w, bias = e.operands[0], e.operands[1], len(e.operands) == 3 and e.leads()
    if e.call.types[1].ndim != 2 or e.call.types[0].ndim < 2 or (bias and e.call.types[0].ndim != 2):
        return None
    if bias:
        return f"torch.addmm({e.operands[2]}, {x}, {w}.t(), out={target})"
    return _product_into(e, f"{w}.t()", target)


def _types(*shapes: tuple[int, ...]) -> tuple[TensorType, ...]:
    return tuple(TensorType(shape, DataType.Float) for shape in shapes)


def _matmul_samples() -> list[Sample]:
    return [
        Sample(_types((6, 4), (4, 8))),
        Sample(_types((2, 6, 4), (2, 4, 8))),
        Sample(_types((3, 2, 6, 4), (1, 4, 8))),
        Sample(_types((4,), (4, 8))),
        Sample(_types((6, 4), (4,))),
    ]


def _linear_samples() -> list[Sample]:
    return [
        Sample(_types((6, 4), (8, 4))),
        Sample(_types((2, 6, 4), (8, 4), (8,))),
        Sample(_types((6, 4), (4,))),
        Sample(_types((2, 6, 4), (3, 8, 4), (3, 8))),
    ]


def _linear_flops(call: Call) -> float:
    return 2.0 * call.results[0].numel * call.types[0].shape[-1] + math.prod(call.results[0].shape)


OPS = (
    OpDef(
        "matmul",
        (Param("a", K.TENSOR, alias="arg1"), Param("b", K.TENSOR, alias="arg2")),
        _matmul_infer,
        _matmul_rule,
        _matmul_emit,
        Partial.EACH,
        _matmul_flops,
        _matmul_samples,
        vjp=MATMUL,
        into=_matmul_into,
        accumulates_wide=True,
        pieced=True,
        about="matrix product, as torch.matmul: vectors, matrices, and batches that broadcast",
    ),
    OpDef(
        "linear",
        (
            Param("input", K.TENSOR, alias="arg1"),
            Param("weight", K.TENSOR, alias="arg2"),
            Param("bias", K.OPTIONAL_TENSOR, None),
        ),
        _linear_infer,
        _linear_rule,
        _linear_emit,
        Partial.EACH,
        _linear_flops,
        _linear_samples,
        nvfuser=nvfuser_forms.linear,
        vjp=LINEAR,
        apart=_linear_apart,
        into=_linear_into,
        accumulates_wide=True,
        pieced=True,
        about="`input` times the transpose of `weight`, plus `bias`; a 3-d weight is a stack of weights",
    ),
)
