"""Matrix products: matmul and linear.

A weight's gradient is one `contract` over all batch dims: each rank computes its terms, and one reduction follows.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from ..dtypes import DataType
from ..kernels.table import kernel
from .opdef import Call, Emit, NvfuserEmit, OpDef, Partial, Sample, Writing, cast_to
from .rules import DimFactors, Rule, RuleBuilder
from .shape_arithmetic import aligned_dims, broadcast_shapes, check_dtypes, check_ndim, check_same_size
from .values import Param, ParamKind, TensorRef, TensorType
from .vjp import Backward, Tensor, each, sum_to, transposed

K = ParamKind

# matmul -----------------------------------------------------------------------------------------------------------


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
    """Text of the first operand; dense in a product with a matrix, as torch multiplies rows with gaps one by one."""
    many = e.call.types[0].ndim > 2 and e.call.types[1].ndim == 2
    return f"{e.operands[0]}.contiguous()" if many else e.operands[0]


def _matmul_emit(e: Emit) -> str:
    return f"torch.matmul({_rows(e)}, {e.operands[1]})"


def _matmul_into(e: Emit, target: str) -> str | None:
    if min(t.ndim for t in e.call.types) < 2:
        return None  # For a vector torch resizes `out`, which may be part of another tensor.
    return _product_into(e, e.operands[1], target)


def _product_into(e: Emit, second: str, target: str) -> str:
    """Text of a product written into `target`.

    With more than two dims torch must be able to view `target` as one matrix.
    """
    many = e.call.types[0].ndim > 2 and e.call.types[1].ndim == 2
    function, end = ("K.rows_into", target) if many else ("torch.matmul", f"out={target}")
    return f"{function}({e.operands[0]}, {second}, {end})"


@kernel
def rows_into(x: torch.Tensor, matrix: torch.Tensor, out: torch.Tensor) -> None:
    """Writes [b*, k] times [k, n] into `out` [b*, n], which may be a slice of a larger tensor."""
    rows = x.flatten(0, -2)
    try:
        into = out.view(rows.shape[0], out.shape[-1])
    except RuntimeError:  # The strides are not those of one matrix.
        out.copy_(torch.mm(rows, matrix).view(out.shape))
    else:
        torch.mm(rows, matrix, out=into)


def _matmul_a_bwd(b: Backward) -> Tensor:
    left, right = b["a"], b.conj(b["b"])
    if right.ndim == 1:
        return b.ops.mul(_with_dim(b, b.grad, -1), right)
    if right.ndim == 2:
        return b.ops.linear(b.grad, right)
    if left.ndim > 2:
        return sum_to(b, b.ops.matmul(b.grad, transposed(b, right)), left)
    grad = b.grad if left.ndim == 1 else transposed(b, b.grad)
    return b.ops.contract(grad, transposed(b, right), right.ndim - 1)


def _matmul_b_bwd(b: Backward) -> Tensor:
    left, right = b.conj(b["a"]), b["b"]
    if right.ndim < 3:
        return b.ops.contract(left, b.grad, left.ndim - 1)
    if left.ndim == 1:
        return b.ops.mul(_with_dim(b, left, -1), _with_dim(b, b.grad, -2))
    return sum_to(b, b.ops.matmul(transposed(b, left), b.grad), right)


def _with_dim(b: Backward, x: Tensor, dim: int) -> Tensor:
    """The tensor with a new dim of size 1 at `dim`, counted from the back."""
    ndim = x.ndim + 1
    return b.ops.broadcast(x, [d == ndim + dim for d in range(ndim)])


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


# linear -----------------------------------------------------------------------------------------------------------


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
    """b* k, d n k, d n -> d b* n; the weight may lack d, or d and n."""
    x, w = call.types[:2]
    builder = RuleBuilder()
    stacked = builder.dims(w.shape[:-2])
    batch, columns = builder.dims(x.shape[:-1]), builder.dims(w.shape[-2:-1])
    inner = (builder.reduction(x.shape[-1]),)
    operands: list[DimFactors] = [(*batch, *inner), (*stacked, *columns, *inner)]
    if len(call.types) == 3:
        operands.append((*stacked, *columns))
    return builder.build(operands, [(*stacked, *batch, *columns)])


def _split_bias(r: Writing, call: Call, operands: tuple[TensorRef, ...]) -> Sequence[TensorRef]:
    """The product without the bias, and an add."""
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


@kernel
def stacked_linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """[b*, k] times [d, n, k], plus [d, n], to [d, b*, n]; the bias is added before 16-bit floats are rounded."""
    rows, matrices = x.reshape(1, math.prod(x.shape[:-1]), x.shape[-1]), weight.transpose(-1, -2)
    if bias is None:
        out = torch.matmul(rows, matrices)
    else:
        out = torch.baddbmm(bias.unsqueeze(1), rows.expand(weight.shape[0], -1, -1), matrices)
    return out.reshape(weight.shape[0], *x.shape[:-1], weight.shape[1])


def _linear_nvfuser(n: NvfuserEmit) -> Any:
    """One of the ranks with terms of the result adds the bias; a 1-D weight is a matmul."""
    bias = n.operand("bias") if n.leads() else None
    if n.call.types[1].ndim > 1:
        return n.plain(bias=bias)
    out = n.ops.matmul(n.operands[0], n.operands[1])
    dtype = n.call.results[0].dtype
    return out if bias is None else n.ops.cast(n.ops.add(out, bias), n.dtype(dtype))


def _linear_input_bwd(b: Backward) -> Tensor:
    weight = b.conj(b["weight"])
    if weight.ndim == 1:
        return b.ops.mul(_with_dim(b, b.grad, -1), weight)
    if weight.ndim == 2:
        return b.ops.matmul(b.grad, weight)
    last = b.grad.ndim - 1
    return b.ops.contract(b.ops.permute(b.grad, [0, last, *range(1, last)]), weight, 2)


def _linear_weight_bwd(b: Backward) -> Tensor:
    x, grad = b.conj(b["input"]), b.grad
    rows = x.ndim - 1
    if b["weight"].ndim > 2:
        grad = b.ops.permute(grad, [*range(1, rows + 1), 0, rows + 1])
    return b.ops.contract(grad, x, rows)


def _linear_bias_bwd(b: Backward) -> Tensor:
    """`grad` summed over the input's batch dims, which come after the dim of a stack of weights."""
    first = b["weight"].ndim - 2 if b["weight"].ndim > 2 else 0
    dims = list(range(first, first + b["input"].ndim - 1))
    return b.ops.sum(b.grad, dims) if dims else b.grad


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
        vjp=each(a=_matmul_a_bwd, b=_matmul_b_bwd),
        into=_matmul_into,
        accumulates_wide=True,
        concat_distributive=True,
        uses_library=True,
        scheduler="expr_eval",
        follows_weight_first=True,
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
        nvfuser=_linear_nvfuser,
        vjp=each(input=_linear_input_bwd, weight=_linear_weight_bwd, bias=_linear_bias_bwd),
        split_last_operand=_split_bias,
        into=_linear_into,
        accumulates_wide=True,
        concat_distributive=True,
        uses_library=True,
        scheduler="expr_eval",
        follows_weight_first=True,
        about="`input` times the transpose of `weight`, plus `bias`; a 3-d weight is a stack of weights",
    ),
)
