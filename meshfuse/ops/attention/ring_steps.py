"""Steps of attention in a ring: picks of blocks, and the merge of two attentions."""

from __future__ import annotations

from typing import Any

import torch

from ...dtypes import Category, DataType
from ...errors import DtypeError, user_error
from ...kernels.table import kernel
from ..nvfuser_lowering import sliced
from ..opdef import Call, Emit, NvfuserEmit, OpDef, Partial, Sample
from ..rules import Rule, RuleBuilder
from ..shape_arithmetic import agree, check_ndim
from ..values import Param, ParamKind, TensorType

K = ParamKind

# blocks -----------------------------------------------------------------------------------------------------------


def _pick_infer(call: Call) -> tuple[TensorType, ...]:
    if not call.types:
        raise user_error("block_pick: operands", "numbers alone", "a tensor", "Pass a tensor as early or late.")
    _keep_infer(call)
    if len(call.types) == 2 and call.types[0] != call.types[1]:
        raise user_error("block_pick: operands", f"{call.types[0]} and {call.types[1]}", "one type",
                         "Cast or reshape one of them.", cls=DtypeError)  # fmt: skip
    return call.types[:1]


def _keep_infer(call: Call) -> tuple[TensorType, ...]:
    check_ndim(call.op.name, "the operand", call.types[0], 1)
    return call.types


def _pick_rule(call: Call) -> Rule:
    builder = RuleBuilder()
    dims = builder.dims(call.types[0].shape)
    return builder.build([dims] * len(call.types), [dims])


def _picked(e: Emit | NvfuserEmit) -> list[tuple[str, int, int]]:
    """(operand, start, stop) of each part of the rank's blocks."""
    first, size = e.call["first"], e.result_shapes[0][0]
    early = sum(min(b, first) - a for a, b in e.result_runs(0)[0] if a < first)
    return [part for part in (("early", 0, early), ("late", early, size)) if part[2] > part[1]]


def _pick_emit(e: Emit) -> str:
    """Text of the joined parts; the operand's name on a rank with blocks on one side only."""
    size, tensor, parts = e.result_shapes[0][0], e.operands[0], []
    for name, start, stop in _picked(e):
        some, given = f".narrow(0, {start}, {stop - start})" if (start, stop) != (0, size) else "", e.operand(name)
        parts.append(given + some if given else f"torch.full_like({tensor}{some}, {e.scalar(name)})")
    return tensor if not parts else parts[0] if len(parts) == 1 else f"torch.cat([{', '.join(parts)}])"


def _pick_nvfuser(n: NvfuserEmit) -> Any:
    shape, dtype, parts = n.result_shapes[0], n.dtype(n.call.results[0].dtype), []
    for name, start, stop in _picked(n):
        given, here = n.operand(name), [stop - start, *shape[1:]]
        if given is None:
            parts.append(n.ops.full(here, n.val(n.number(name)), dtype))
        else:
            starts, ends = [start, *(0 for _ in shape[1:])], [stop, *shape[1:]]
            whole = n.operand_shapes[n.call.first_operand(name)]
            parts.append(sliced(n.ops, n.val, given, whole, starts, ends) if here != [*shape] else given)
    return n.ops.cat(parts, 0) if len(parts) > 1 else n.ops.set((*parts, *n.operands)[0])


def _keep_emit(e: Emit) -> str:
    """Text of the operand, with zeros for the blocks that are not kept."""
    size, tensor, parts = e.result_shapes[0][0], e.operands[0], []
    for side, start, stop in _picked(e):
        some = f"{tensor}.narrow(0, {start}, {stop - start})" if (start, stop) != (0, size) else tensor
        parts.append(some if (side == "late") == e.call["late"] else f"torch.zeros_like({some})")
    return tensor if not parts else parts[0] if len(parts) == 1 else f"torch.cat([{', '.join(parts)}])"


def _keep_samples() -> list[Sample]:
    return [Sample((TensorType((6, 4), DataType.Float), 2, late)) for late in (True, False)]


def _pick_samples() -> list[Sample]:
    x = TensorType((6, 4), DataType.Float)
    return [Sample((x, x, 2)), Sample((x, -1.5, 4)), Sample((float("-inf"), x, 1)), Sample((x, x, 0))]


# what is added to the scores --------------------------------------------------------------------------------------


def _columns_infer(call: Call) -> tuple[TensorType, ...]:
    _keep_infer(call)
    (arg,) = call.types
    check_ndim("block_columns", "the operand", arg, 2)
    return (TensorType((*arg.shape[:-1], arg.shape[-1] // max(arg.shape[0], 1)), arg.dtype),)


def _columns_rule(call: Call) -> Rule:
    """The last dim has as many blocks as the first, and is needed whole."""
    builder, (arg,) = RuleBuilder(), call.types
    dims = builder.dims(arg.shape[:-1])
    operand, result = (*dims, builder.blocked(arg.shape[-1])), (*dims, builder.blocked(call.results[0].shape[-1]))
    return builder.build([operand], [result])


def _columns_emit(e: Emit) -> str:
    """Text of each of the rank's blocks with its columns, one behind the other."""
    blocks, size = e.call.types[0].shape[0], e.call.results[0].shape[-1]
    numbers = [n for a, b in e.result_runs(0)[0] for n in range(a, b)]
    starts = [(n - e.call["step"]) % blocks * size for n in numbers]
    parts = [f"{e.operands[0]}[{i}:{i + 1}, ..., {a}:{a + size}]" for i, a in enumerate(starts)]
    return f"torch.cat([{', '.join(parts)}])" if parts else f"{e.operands[0]}[..., :{size}]"


def _columns_samples() -> list[Sample]:
    return [Sample((TensorType((4, 2, 8), DataType.Float), 1)), Sample((TensorType((3, 6), DataType.Bool), 0))]


# the merge --------------------------------------------------------------------------------------------------------


def _merge_infer(call: Call) -> tuple[TensorType, ...]:
    """Types of the results: float32, or float64 where any operand is float64."""
    (out, _), wide = call.types[:2], DataType.Float
    check_ndim("attention_merge", "output", out, 1)
    for t, wanted in zip(call.types, (out.shape, out.shape[:-1]) * 2, strict=True):
        if t.dtype.category is not Category.FLOAT or not agree(t.shape, wanted):
            raise user_error("attention_merge: operands", " and ".join(map(str, call.types)),
                             "two outputs [.., e] and their log-sum-exps [..], floating point", "",
                             cls=DtypeError)  # fmt: skip
        wide = DataType.Double if t.dtype is DataType.Double else wide
    return TensorType(out.shape, wide), TensorType(out.shape[:-1], wide)


def _merge_rule(call: Call) -> Rule:
    builder = RuleBuilder()
    out = builder.dims(call.types[0].shape)
    return builder.build([out, out[:-1]] * 2, [out, out[:-1]])


@kernel
def attention_merge(
    out: torch.Tensor, logsumexp: torch.Tensor, other: torch.Tensor, other_logsumexp: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention over two sets of columns, from the attention over each (online softmax, Milakov & Gimelshein 2018).

    A row that sees nothing of a set has -inf as its log-sum-exp there; its output is then ignored.
    """
    given = (out, logsumexp, other, other_logsumexp)
    wide = torch.float64 if any(x.dtype == torch.float64 for x in given) else torch.float32
    out, logsumexp, other, other_logsumexp = (x.to(wide) for x in given)
    top = torch.maximum(logsumexp, other_logsumexp)
    top = top.masked_fill(~torch.isfinite(top), 0.0)
    mine, its = torch.exp(logsumexp - top), torch.exp(other_logsumexp - top)
    total = mine + its
    seen = total.masked_fill(total == 0.0, 1.0)
    merged = out * (mine / seen).unsqueeze(-1) + other * (its / seen).unsqueeze(-1)
    return merged, torch.log(total) + top


def _merge_nvfuser(n: NvfuserEmit) -> Any:
    """The same formula as in `attention_merge`."""
    ops, last = n.ops, [False] * (len(n.operand_shapes[0]) - 1) + [True]
    wide = n.dtype(n.call.results[0].dtype)
    out, lse, other, other_lse = (ops.cast(x, wide) for x in n.operands)
    top = ops.maximum(lse, other_lse)
    top = ops.where(ops.isfinite(top), top, 0.0)
    weights = [ops.exp(ops.sub(x, top)) for x in (lse, other_lse)]
    total = ops.add(*weights)
    seen = ops.where(ops.eq(total, 0.0), 1.0, total)
    parts = [ops.mul(x, ops.broadcast(w, last)) for x, w in zip((out, other), weights, strict=True)]
    return ops.truediv(ops.add(*parts), ops.broadcast(seen, last)), ops.add(ops.log(total), top)


def _merge_samples() -> list[Sample]:
    out, lse = TensorType((2, 4, 6, 8), DataType.Float), TensorType((2, 4, 6), DataType.Float)
    seen_by_some = (2.0, float("-inf"), 0.5, float("-inf"))
    return [
        Sample((out, lse, out, lse)),
        Sample((out, lse, TensorType(out.shape, DataType.BFloat16), lse)),
        Sample((out, lse, out, lse), values={1: (1.0, 2.0, float("-inf"), float("-inf")), 3: seen_by_some}),
    ]


OPS = (
    OpDef("block_pick", (Param("early", K.TENSOR_OR_SCALAR), Param("late", K.TENSOR_OR_SCALAR), Param("first", K.INT)),
          _pick_infer, _pick_rule, _pick_emit, flops=lambda call: 0.0, samples=_pick_samples,
          nvfuser=_pick_nvfuser,
          about="the first `first` blocks of `early`, then those of `late`; part of the ring's rounds"),
    OpDef("block_keep", (Param("arg", K.TENSOR), Param("first", K.INT), Param("late", K.BOOL)), _keep_infer,
          _pick_rule, _keep_emit, Partial.MOVE, flops=lambda call: 0.0, samples=_keep_samples,
          nvfuser="zeros for some of the ranks",
          about="zeros in the first `first` blocks, or in the others; part of the ring's rounds"),
    OpDef("block_columns", (Param("arg", K.TENSOR), Param("step", K.INT)), _columns_infer, _columns_rule, _columns_emit,
          Partial.MOVE, flops=lambda call: 0.0, samples=_columns_samples, nvfuser="other columns for each block",
          reference=lambda x, step: torch.stack([x[r].chunk(len(x), -1)[(r - step) % len(x)] for r in range(len(x))]),
          about="of block r's columns, in as many blocks, those of block r - `step`; part of the ring's rounds"),
    OpDef("attention_merge",
          tuple(Param(name, K.TENSOR) for name in ("output", "logsumexp", "other_output", "other_logsumexp")),
          _merge_infer, _merge_rule, lambda e: f"K.attention_merge({', '.join(e.operands)})",
          flops=lambda call: 8.0 * call.types[0].numel, samples=_merge_samples, nvfuser=_merge_nvfuser,
          about="two attentions over different keys as one over all: output and log-sum-exp"),
)  # fmt: skip
