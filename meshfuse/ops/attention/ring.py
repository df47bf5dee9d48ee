"""Attention in a ring: keys and values of a sharded sequence travel from rank to rank (context parallelism)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from ...dtypes import DataType
from ...errors import user_error
from ...kernels.table import kernel
from ...sharding.layout import Runs
from ..block_order import zigzag_order
from ..opdef import Call, Emit, OpDef, RingSchedule, Sample
from ..rules import DimFactors, FactorKind, Rule
from ..shape_arithmetic import UNKNOWN
from ..values import Param, ParamKind, TensorType
from ..vjp import Backward, sizes
from .column_blocks import sdpfa_bwd_kv, sdpfa_bwd_q
from .gradients import WrittenOut, second_gradients
from .operands import (
    ADDED,
    QKV,
    AttentionDims,
    added_text,
    added_types,
    checked_types,
    qkv_types,
    scale_text,
    score_flops,
    scores_text,
    statistic_dtype,
)
from .ring_schedule import attention_rounds, gradient_rounds, is_zigzag
from .scaled_dot_product import sdpfa_bwd
from .scores import Gradients, ScoreBlock, attend, options_of, statistic

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
    """As of sdpfa_fwd, outside of a ring. Rows in zig-zag order are blocked: they are sorted first."""
    dims = AttentionDims(
        call, FactorKind.PASS, _rows_kind(call), [(checked_types(call)[1].shape[-2], FactorKind.BLOCK)]
    )
    return dims.builder.build([dims.q, dims.k, dims.v, *dims.added(call)], [dims.out, dims.out[:-1]])


def _round_rule(call: Call) -> Rule:
    """In a ring block r of the rows lies with block r of the columns; its bias and mask have all columns."""
    dims = AttentionDims(call, FactorKind.PASS, _rows_kind(call), _column_blocks(call), call["ring"])
    return dims.builder.build([dims.q, dims.k, dims.v, *_added(call, dims)], [dims.out, dims.out[:-1]])


def _added(call: Call, dims: AttentionDims) -> list[DimFactors]:
    """The factors of bias and mask in a ring, whose columns are whole."""
    return [(*factors[:-1], dims.builder.blocked(t.shape[-1])) if factors else ()
            for factors, t in zip(dims.added(call), added_types(call), strict=True)]  # fmt: skip


def _column_blocks(call: Call) -> list[tuple[int, FactorKind]]:
    return [(checked_types(call)[1].shape[-2] // call["ring"], FactorKind.BLOCK)]


def _emit(e: Emit) -> str:
    operands, causal = [str(e.operand(name)) for name in ("query", "key", "value")], str(bool(e.call["is_causal"]))
    where = [causal, scale_text(e), scores_text(e, e.result_runs(1), 1), str(_chunks(e.call))]
    return f"K.ring_attention({', '.join([*operands, *where, *added_text(e)])})"


def _chunks(call: Call) -> int:
    """The number of chunks, if the rows are in zig-zag order; else 0."""
    return 2 * call["ring"] if is_zigzag(call) else 0


@kernel
def ring_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    is_causal: bool,
    scale: Any,
    place: tuple[Sequence[Runs], Sequence[int]],
    chunks: int,
    bias: torch.Tensor | None,
    mask: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(output, log-sum-exp) on a rank that has all columns.

    chunks: 0, or the number of chunks of the rows, which are then all here, in zig-zag order.
    """
    options = options_of(q, 0.0, is_causal, scale)
    q, k, v = (_in_sequence(x, chunks) for x in (q, k, v))
    bias, mask = (_scores_in_sequence(x, chunks) for x in (bias, mask))
    out, logsumexp = attend(q, k, v, bias, mask, options, ScoreBlock(*place), ())
    return _in_zigzag(out.to(q.dtype), chunks, -2), _in_zigzag(statistic(logsumexp, q), chunks, -1)


def _in_sequence(x: torch.Tensor, chunks: int, dim: int = -2) -> torch.Tensor:
    """Puts chunks in zig-zag order (first, last, second, ...) into the order of the sequence; 0: the tensor itself."""
    if not chunks:
        return x
    parts = x.chunk(chunks, dim)
    return torch.cat([*parts[::2], *parts[::-2]], dim)


def _scores_in_sequence(x: torch.Tensor | None, chunks: int) -> torch.Tensor | None:
    """As `_in_sequence`, of the rows and columns of a bias or mask that do not broadcast."""
    for dim in (-1, -2):
        if x is not None and x.ndim >= -dim and x.shape[dim] > 1:
            x = _in_sequence(x, chunks, dim)
    return x


def _in_zigzag(x: torch.Tensor, chunks: int, dim: int) -> torch.Tensor:
    """The inverse of `_in_sequence`."""
    if not chunks:
        return x
    parts = x.chunk(chunks, dim)
    pairs = zip(parts[: chunks // 2], parts[: chunks // 2 - 1 : -1], strict=True)
    return torch.cat([part for pair in pairs for part in pair], dim)


def _fwd_vjp(b: Backward) -> dict[str, Any]:
    """By `ring_attention_bwd`, from the output and the log-sum-exp; those of bias and mask are written out."""
    if b.needs("bias") or b.needs("mask"):
        return WrittenOut(replace(b, arguments={**b.arguments, "dropout_p": None}), _zigzag_chunks(b)).gradients()
    grad = b.grad if b.grad is not None else b.ops.full(sizes(b.result), 0.0, b.result.dtype)
    qkv, options = (b[name] for name in ("query", "key", "value")), (b["ring"], b["is_causal"], b["scale"], b["zigzag"])
    made = b.ops.ring_attention_bwd(grad, *qkv, *b.results, *options, b.grads[1], b["bias"], b["mask"])
    return dict(zip(("query", "key", "value"), made, strict=True))


# backward ---------------------------------------------------------------------------------------------------------


def _bwd_infer(call: Call) -> tuple[TensorType, ...]:
    return _checked(call)


def _bwd_rule(call: Call) -> Rule:
    """Batch and heads of k and v pass through; rows, columns and a group's heads are blocked."""
    columns = (checked_types(call)[1].shape[-2], FactorKind.BLOCK)
    return _bwd_dims(call, AttentionDims(call, FactorKind.BLOCK, FactorKind.BLOCK, [columns]))


def _bwd_round_rule(call: Call) -> Rule:
    """Heads of a group may lie on several ranks: gradients of k and v are partial until they are home."""
    blocks = _column_blocks(call)
    return _bwd_dims(call, AttentionDims(call, FactorKind.PASS, FactorKind.BLOCK, blocks, call["ring"]))


def _bwd_dims(call: Call, dims: AttentionDims) -> Rule:
    rows = [dims.out[:-1]] * (1 if call["grad_logsumexp"] is None else 2)
    added = _added(call, dims)
    return dims.builder.build([dims.out, dims.q, dims.k, dims.v, dims.out, *rows, *added], [dims.q, dims.k, dims.v])


def _bwd_emit(e: Emit) -> str:
    names = ("grad_output", "query", "key", "value", "output", "logsumexp")
    operands, causal = [str(e.operand(name)) for name in names], str(bool(e.call["is_causal"]))
    where = [scale_text(e), scores_text(e, e.operand_runs(5), 2), str(_chunks(e.call))]
    more = [str(e.operand("grad_logsumexp")), *added_text(e)]
    return f"K.ring_attention_bwd({', '.join([*operands, causal, *where, *more])})"


@kernel
def ring_attention_bwd(
    grad: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    logsumexp: torch.Tensor,
    is_causal: bool,
    scale: Any,
    place: tuple[Sequence[Runs], Sequence[int]],
    chunks: int,
    grad_logsumexp: torch.Tensor | None,
    bias: torch.Tensor | None,
    mask: torch.Tensor | None,
) -> Gradients:
    """Gradients of q, k and v on a rank that has all rows and columns."""
    rows = [_in_sequence(x, chunks) for x in (grad, q, k, v, out)]
    sums = [None if x is None else _in_sequence(x, chunks, -1) for x in (logsumexp, grad_logsumexp)]
    added = [_scores_in_sequence(x, chunks) for x in (bias, mask)]
    saved = (*rows, sums[0], 0.0, is_causal, None, None, scale, place, *added)
    made = sdpfa_bwd(*saved) if sums[1] is None else (sdpfa_bwd_q(*saved, sums[1]), *sdpfa_bwd_kv(*saved, sums[1]))
    grad_q, grad_k, grad_v = (_in_zigzag(x, chunks, -2) for x in made)
    return grad_q, grad_k, grad_v


def _bwd_vjp(b: Backward) -> dict[str, Any]:
    return second_gradients(b, _zigzag_chunks(b))


def _zigzag_chunks(b: Backward) -> Sequence[int]:
    """By place the number of the chunk of rows that stands there; () for rows in order."""
    return zigzag_order(b["ring"]) if b["zigzag"] else ()


def _sample(
    q: tuple[int, ...], kv: tuple[int, ...], ring: int, causal: bool = False, zigzag: bool = False, *added: TensorType
) -> Sample:
    return Sample((*qkv_types(q, kv), ring, causal, 0.3 if zigzag else None, zigzag, *added))


def _samples() -> list[Sample]:
    bias, mask = TensorType((4, 8, 8), DataType.Float), TensorType((2, 1, 1, 8), DataType.Bool)
    return [
        _sample((2, 4, 6, 8), (2, 4, 9, 8), 3),
        _sample((2, 4, 8, 8), (2, 2, 8, 8), 4, True),
        _sample((2, 4, 8, 8), (2, 2, 8, 8), 2, True, True),
        _sample((2, 4, 8, 8), (2, 2, 8, 8), 2, True, True, bias, mask),
    ]


def _bwd_sample(sample: Sample, more: bool) -> Sample:
    query, key, value, *options = sample.args
    rows = TensorType(query.shape[:-1], DataType.Float)
    lse = rows if more else None
    return Sample((query, query, key, value, query, rows, *options[:4], lse, *options[4:]), values={5: (2.0, 3.0, 2.5)})


def _bwd_samples() -> list[Sample]:
    return [_bwd_sample(sample, bool(place % 2)) for place, sample in enumerate(_samples())]


_OPTIONS = (
    Param("ring", K.INT),
    Param("is_causal", K.BOOL, False),
    Param("scale", K.OPTIONAL_SCALAR, None),
    Param("zigzag", K.BOOL, False),
)
_MORE = (*_OPTIONS, Param("grad_logsumexp", K.OPTIONAL_TENSOR, None), *ADDED)
OPS = (
    OpDef("ring_attention", (*QKV, *_OPTIONS, *ADDED), _infer, _rule, _emit, flops=lambda call: score_flops(call, 2),
          samples=_samples, nvfuser=_NOT_NATIVE, vjp=_fwd_vjp,
          ring_schedule=RingSchedule(_round_rule, attention_rounds),
          about="attention in rounds: blocks of keys and values travel through a ring of ranks"),
    OpDef("ring_attention_bwd",
          (Param("grad_output", K.TENSOR), *QKV, Param("output", K.TENSOR), Param("logsumexp", K.TENSOR), *_MORE),
          _bwd_infer, _bwd_rule, _bwd_emit, flops=lambda call: score_flops(call, 5), samples=_bwd_samples,
          nvfuser=_NOT_NATIVE, vjp=_bwd_vjp, ring_schedule=RingSchedule(_bwd_round_rule, gradient_rounds),
          about="the gradients of `ring_attention` by query, key and value"),
)  # fmt: skip
