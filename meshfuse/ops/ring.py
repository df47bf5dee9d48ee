"""Attention in a ring: keys and values of a sharded sequence travel from rank to rank (context parallelism)."""

from __future__ import annotations

from typing import Any

from ..dtypes import Category, DataType
from ..errors import DtypeError, user_error
from ..gradients.attention import RING_ATTENTION, RING_ATTENTION_BWD
from .attention_blocks import QKV, qkv_types
from .attention_rules import AttentionDims, checked_types, scale_text, score_flops, scores_text, statistic_dtype
from .nvfuser_lowering import sliced
from .opdef import Call, Emit, NvfuserEmit, OpDef, Partial, Rounds, Sample
from .ring_rounds import attention_rounds, gradient_rounds, is_zigzag
from .rules import FactorKind, Rule, RuleBuilder
from .shape_arithmetic import UNKNOWN, agree, check_ndim
from .values import Param, ParamKind, TensorType

K = ParamKind
_NOT_NATIVE = "its steps are nvFuser's where they are written out"


def _checked(call: Call) -> tuple[TensorType, TensorType, TensorType]:
    """(q, k, v). Raises DefinitionError where they do not fit together or into the ring."""
    q, k, v = checked_types(call)
    name, ring = call.op.name, call["ring"]
    if q.ndim != 4:
        raise user_error(f"{name}: query", str(q), "4 dims: batch, heads, rows, width", "Merge the batch dims.")
    if ring < 1:
        raise user_error(f"{name}: ring", str(ring), "1 or more", "Give the number of blocks that go round.")
    blocks = 2 * ring if call["zigzag"] else ring
    for what, rows in (("query", q.shape[-2]), ("key", k.shape[-2])):
        if rows != UNKNOWN and rows % blocks:
            raise user_error(f"{name}: rows (dim 2) of {what}",
                             f"{rows} in {blocks} blocks{' of a zig-zag order' if call['zigzag'] else ''}",
                             f"a multiple of {blocks}", "Pad the sequence, or take another ring.")  # fmt: skip
    if call["is_causal"] and UNKNOWN not in (q.shape[-2], k.shape[-2]) and q.shape[-2] != k.shape[-2]:
        raise user_error(f"{name}: causal, with rows of query and key", f"{q.shape[-2]} and {k.shape[-2]}",
                         "as many", "A row sees the keys up to its own: give it as many keys as rows.")  # fmt: skip
    return q, k, v


def _infer(call: Call) -> tuple[TensorType, ...]:
    q, _, v = _checked(call)
    return TensorType((*q.shape[:-1], v.shape[-1]), q.dtype), TensorType(q.shape[:-1], statistic_dtype(q.dtype))


def _rows_kind(call: Call) -> FactorKind:
    return FactorKind.BLOCK if is_zigzag(call) else FactorKind.PASS


def _rule(call: Call) -> Rule:
    """As of sdpfa_fwd where the op is not in a ring; in zig-zag order the rows are needed whole, to be sorted first."""
    dims = AttentionDims(
        call, FactorKind.PASS, _rows_kind(call), [(checked_types(call)[1].shape[-2], FactorKind.BLOCK)]
    )
    return dims.builder.build([dims.q, dims.k, dims.v], [dims.out, dims.out[:-1]])


def _round_rule(call: Call) -> Rule:
    """In a ring block r of the rows lies with block r of the columns."""
    dims = AttentionDims(call, FactorKind.PASS, _rows_kind(call), _column_blocks(call), call["ring"])
    return dims.builder.build([dims.q, dims.k, dims.v], [dims.out, dims.out[:-1]])


def _column_blocks(call: Call) -> list[tuple[int, FactorKind]]:
    return [(checked_types(call)[1].shape[-2] // call["ring"], FactorKind.BLOCK)]


def _emit(e: Emit) -> str:
    operands, causal = [str(e.operand(name)) for name in ("query", "key", "value")], str(bool(e.call["is_causal"]))
    scores = scores_text(e, e.result_runs(1), 1)
    return f"K.ring_attention({', '.join([*operands, causal, scale_text(e), scores, str(_chunks(e.call))])})"


def _chunks(call: Call) -> int:
    """The number of chunks, if the rows are in zig-zag order; else 0."""
    return 2 * call["ring"] if is_zigzag(call) else 0


def _bwd_infer(call: Call) -> tuple[TensorType, ...]:
    return _checked(call)


def _bwd_rule(call: Call) -> Rule:
    """Batch and heads of k and v pass through; rows, columns and a group's heads are needed whole."""
    columns = (checked_types(call)[1].shape[-2], FactorKind.BLOCK)
    return _bwd_dims(call, AttentionDims(call, FactorKind.BLOCK, FactorKind.BLOCK, [columns]))


def _bwd_round_rule(call: Call) -> Rule:
    """Heads of a group may be apart: gradients of k and v are unreduced then, until they are home."""
    blocks = _column_blocks(call)
    return _bwd_dims(call, AttentionDims(call, FactorKind.PASS, FactorKind.BLOCK, blocks, call["ring"]))


def _bwd_dims(call: Call, dims: AttentionDims) -> Rule:
    rows = [dims.out[:-1]] * (len(call.types) - 5)
    return dims.builder.build([dims.out, dims.q, dims.k, dims.v, dims.out, *rows], [dims.q, dims.k, dims.v])


def _bwd_emit(e: Emit) -> str:
    names = ("grad_output", "query", "key", "value", "output", "logsumexp")
    operands, causal = [str(e.operand(name)) for name in names], str(bool(e.call["is_causal"]))
    where = [scale_text(e), scores_text(e, e.operand_runs(5), 2), str(_chunks(e.call))]
    return f"K.ring_attention_bwd({', '.join([*operands, causal, *where, str(e.operand('grad_logsumexp'))])})"


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


def _merge_nvfuser(n: NvfuserEmit) -> Any:
    """The same formula as in `kernels.attention_merge`."""
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
    """Text of the parts joined. A rank with blocks on one side only needs no more than the operand's name."""
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


def _sample(q: tuple[int, ...], kv: tuple[int, ...], ring: int, causal: bool = False, zigzag: bool = False) -> Sample:
    return Sample((*qkv_types(q, kv), ring, causal, 0.3 if zigzag else None, zigzag))


def _samples() -> list[Sample]:
    return [
        _sample((2, 4, 6, 8), (2, 4, 9, 8), 3),
        _sample((2, 4, 8, 8), (2, 2, 8, 8), 4, True),
        _sample((2, 4, 8, 8), (2, 2, 8, 8), 2, True, True),
    ]


def _bwd_sample(sample: Sample, more: bool) -> Sample:
    query, key, value, *options = sample.args
    rows = TensorType(query.shape[:-1], DataType.Float)
    lse = rows if more else None
    return Sample((query, query, key, value, query, rows, *options, lse), values={5: (2.0, 3.0, 2.5)})


def _bwd_samples() -> list[Sample]:
    return [_bwd_sample(sample, bool(place % 2)) for place, sample in enumerate(_samples())]


def _merge_samples() -> list[Sample]:
    out, lse = TensorType((2, 4, 6, 8), DataType.Float), TensorType((2, 4, 6), DataType.Float)
    seen_by_some = (2.0, float("-inf"), 0.5, float("-inf"))
    return [
        Sample((out, lse, out, lse)),
        Sample((out, lse, TensorType(out.shape, DataType.BFloat16), lse)),
        Sample((out, lse, out, lse), values={1: (1.0, 2.0, float("-inf"), float("-inf")), 3: seen_by_some}),
    ]


_OPTIONS = (
    Param("ring", K.INT),
    Param("is_causal", K.BOOL, False),
    Param("scale", K.OPTIONAL_SCALAR, None),
    Param("zigzag", K.BOOL, False),
)
OPS = (
    OpDef("ring_attention", (*QKV, *_OPTIONS), _infer, _rule, _emit, flops=lambda call: score_flops(call, 2),
          samples=_samples, nvfuser=_NOT_NATIVE, vjp=RING_ATTENTION, rounds=Rounds(_round_rule, attention_rounds),
          about="attention in rounds: blocks of keys and values travel through a ring of ranks"),
    OpDef("ring_attention_bwd",
          (Param("grad_output", K.TENSOR), *QKV, Param("output", K.TENSOR), Param("logsumexp", K.TENSOR), *_OPTIONS,
           Param("grad_logsumexp", K.OPTIONAL_TENSOR, None)),
          _bwd_infer, _bwd_rule, _bwd_emit, flops=lambda call: score_flops(call, 5), samples=_bwd_samples,
          nvfuser=_NOT_NATIVE, vjp=RING_ATTENTION_BWD, rounds=Rounds(_bwd_round_rule, gradient_rounds),
          about="the gradients of `ring_attention` by query, key and value"),
    OpDef("block_pick", (Param("early", K.TENSOR_OR_SCALAR), Param("late", K.TENSOR_OR_SCALAR), Param("first", K.INT)),
          _pick_infer, _pick_rule, _pick_emit, flops=lambda call: 0.0, samples=_pick_samples,
          nvfuser=_pick_nvfuser,
          about="the first `first` blocks of `early`, then those of `late`; part of the ring's rounds"),
    OpDef("block_keep", (Param("arg", K.TENSOR), Param("first", K.INT), Param("late", K.BOOL)), _keep_infer,
          _pick_rule, _keep_emit, Partial.MOVE, flops=lambda call: 0.0, samples=_keep_samples,
          nvfuser="zeros for some of the ranks",
          about="zeros in the first `first` blocks, or in the others; part of the ring's rounds"),
    OpDef("attention_merge",
          tuple(Param(name, K.TENSOR) for name in ("output", "logsumexp", "other_output", "other_logsumexp")),
          _merge_infer, _merge_rule, lambda e: f"K.attention_merge({', '.join(e.operands)})",
          flops=lambda call: 8.0 * call.types[0].numel, samples=_merge_samples, nvfuser=_merge_nvfuser,
          about="two attentions over different keys as one over all: output and log-sum-exp"),
)  # fmt: skip
