"""Rows of a table by index: embedding_fwd.

A rank finds the rows that it holds, the others count as zero, and the result is a partial sum of the result's size,
however large the table (masked local access, as Megatron-LM looks up a vocabulary-parallel embedding: Shoeybi et al.
2019). `embedding_bwd` adds the gradient up where it was read, so that a sharded table has it in shards.
"""

from __future__ import annotations

from typing import Any

import torch

from ..argument_checks import as_int
from ..dtypes import DataType
from ..errors import user_error
from ..kernels.table import kernel
from ..sharding.layout import Runs
from .indexing import checked_index, holds_all, index_select
from .nvfuser_lowering import is_whole, nvfuser_places, zero_where_not, zeros
from .opdef import Call, Emit, NvfuserEmit, OpDef, Sample, ToTorch, flops_of_lookup
from .rules import Rule, RuleBuilder
from .shape_arithmetic import UNKNOWN, check_index, check_ndim
from .values import Param, ParamKind, ScalarRef, TensorType
from .vjp import Backward, Tensor, each, sizes

K = ParamKind


def _infer(call: Call) -> tuple[TensorType, ...]:
    index, weight = call.types
    check_ndim("embedding_fwd", "the weight", weight, 2, 2)
    check_index(call, index)
    _check_padding(call["padding_idx"], weight)
    return (TensorType((*index.shape, weight.shape[1]), weight.dtype),)


def _check_padding(padding: Any, weight: TensorType) -> None:
    """Raises DefinitionError unless it is a row of the table, counted from the end if negative.

    Of a scalar the type counts.
    """
    n, place = weight.shape[0], as_int(padding)
    if padding is None or (isinstance(padding, ScalarRef) and padding.dtype in (None, DataType.Int, DataType.Int32)):
        return
    if place is None or (n != UNKNOWN and not -n <= place < n):
        found = "a scalar of another type" if isinstance(padding, ScalarRef) else str(padding)
        rows = f"an int from {-n} to {n - 1}" if n != UNKNOWN else "an int"
        raise user_error("embedding_fwd: padding_idx", found, f"{rows}, a row of {weight}",
                         "Pass an existing row, or None.")  # fmt: skip


def _rule(call: Call) -> Rule:
    """b*, v e -> b* e, summed over v; a norm limit needs the rows whole."""
    (index, weight), builder = call.types, RuleBuilder()
    places, rows = builder.dims(index.shape), builder.reduction(weight.shape[0])
    row = builder.factor(weight.shape[1]) if call["max_norm"] is None else builder.blocked(weight.shape[1])
    return builder.build([places, (rows, row)], [(*places, row)])


def _emit(e: Emit) -> str:
    """Text of the call; padding_idx, scale_grad_by_freq and sparse matter for gradients only."""
    weight, index = e.operands[1], checked_index(e, 0, e.call.types[1].shape[0])
    text = f"F.embedding({index}, {weight})"
    if not holds_all(e, 1, 0):
        text = f"K.embedding({index}, {weight}, {e.operand_runs(1)[0]})"
    if e.call["max_norm"] is None:
        return text
    norm_type = "2.0" if e.call["norm_type"] is None else e.scalar("norm_type")
    return f"K.limit_norm({text}, {e.scalar('max_norm')}, {norm_type})"


@kernel
def embedding(index: torch.Tensor, weight: torch.Tensor, runs: Runs) -> torch.Tensor:
    """Rows of a table of which the rank holds the rows in `runs`; zeros for the others."""
    return index_select(weight, index, 0, runs).reshape(*index.shape, weight.shape[1])


@kernel
def limit_norm(rows: torch.Tensor, max_norm: float, norm_type: float) -> torch.Tensor:
    """Rows whose norm is above `max_norm` scaled down to it, with torch's 1e-7 in the divisor."""
    norm = torch.linalg.vector_norm(rows, norm_type, -1, keepdim=True)
    return torch.where(norm > max_norm, rows * (max_norm / (norm + 1e-7)), rows)


def _nvfuser(n: NvfuserEmit) -> Any:
    """padding_idx, scale_grad_by_freq and sparse matter for gradients only."""
    index, weight = n.operands
    if n.call["max_norm"] is not None:
        raise ToTorch("nvFuser's max_norm changes the table in place")
    if is_whole(n, 1, 0):
        return n.ops.embedding_fwd(index, weight)
    if not n.operand_runs(1)[0]:
        return zeros(n)
    places, inside = nvfuser_places(n, index, n.operand_runs(1)[0])
    kept = n.ops.broadcast(inside, [*(False for _ in n.call.types[0].shape), True])
    return zero_where_not(n, kept, n.ops.embedding_fwd(places, weight), n.call.types[1].dtype)


def _from_front(b: Backward, index: Any, n: Any) -> Any:
    """An index counted from the front, where a negative one counts from the end of a dim of size n.

    Both may be scalars.
    """
    if isinstance(index, int):
        return index if index >= 0 else n + index
    return b.ops.where(b.ops.lt(index, 0), b.ops.add(index, n), index)


def _weight_vjp(b: Backward) -> Tensor:
    """Rows of `padding_idx` get nothing; `scale_grad_by_freq` divides by how often a row was read."""
    index, weight = b["input"], b["weight"]
    if b["max_norm"] is not None:
        raise user_error(
            "embedding_fwd: no derivative here", "max_norm", "None", "Limit the norm of the table before the look-up."
        )
    grad, rows = b.grad, sizes(weight)[0]
    read = None
    if b["padding_idx"] is not None:
        read = b.ops.ne(index, _from_front(b, b["padding_idx"], rows))
        grad = b.ops.where(_column(b, read), grad, 0.0)
    found = b.ops.embedding_bwd(grad, index, rows)
    if not b["scale_grad_by_freq"]:
        return found
    ones = b.ops.full([*sizes(index), 1], 1.0, weight.dtype)
    return b.ops.truediv(found, b.ops.maximum(b.ops.embedding_bwd(ones, index, rows), 1.0))


def _column(b: Backward, x: Tensor) -> Tensor:
    return b.ops.broadcast(x, [False] * x.ndim + [True])


def _samples() -> list[Sample]:
    index, weight, values = TensorType((2, 6), DataType.Int), TensorType((10, 8), DataType.Float), {0: (9, 0, 4, 7, 2)}
    return [Sample((index, weight), values=values), Sample((index, weight, None, 1.5), values=values)]


_OPTIONS = tuple(
    Param(name, K.OPTIONAL_SCALAR, None)
    for name in ("padding_idx", "max_norm", "norm_type", "scale_grad_by_freq", "sparse")
)
OPS = (
    OpDef(
        "embedding_fwd",
        (Param("input", K.TENSOR), Param("weight", K.TENSOR), *_OPTIONS),
        _infer,
        _rule,
        _emit,
        flops=flops_of_lookup,
        samples=_samples,
        nvfuser=_nvfuser,
        vjp=each(weight=_weight_vjp),
        order_free=("input",),
        scheduler="expr_eval",
        about="rows of `weight` by index, as torch's embedding",
    ),
)
