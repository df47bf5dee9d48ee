"""Scaled dot product attention: sdpfa_fwd and sdpfa_bwd.

q is [b, h, s, e] or, with heads sharded by hand in nvFuser, [d, b, h, s, e]. k and v may have fewer heads
(grouped-query attention): consecutive heads of q then share one of theirs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ...dtypes import DataType
from ...errors import user_error
from ...kernels.table import kernel
from ...sharding.layout import Runs
from ..factories import RANDOM, stream_text
from ..nvfuser_lowering import cast, is_whole
from ..opdef import Call, Emit, NvfuserEmit, OpDef, Sample, ToTorch, Writing
from ..rules import DimFactors, FactorKind, Rule
from ..values import TensorRef, TensorType
from ..vjp import Backward
from . import fused_kernels
from .gradients import WrittenOut, second_gradients
from .operands import (
    BACKWARD_PARAMS,
    FORWARD_PARAMS,
    STATE,
    AttentionDims,
    added_text,
    checked_types,
    drops,
    operands_text,
    options_text,
    qkv_types,
    scale_text,
    score_flops,
    scores_text,
    statistic_dtype,
    with_operands,
)
from .scores import (
    Gradients,
    Saved,
    ScoreBlock,
    addend_of,
    attend,
    can_be_fused,
    is_addend,
    key_and_value_gradients,
    options_of,
    query_gradient,
    score_gradients,
    state_tensors,
    statistic,
)

# forward ----------------------------------------------------------------------------------------------------------


def _fwd_infer(call: Call) -> tuple[TensorType, ...]:
    q, _, v = checked_types(call)
    out = TensorType((*q.shape[:-1], v.shape[-1]), q.dtype)
    return (out, TensorType(q.shape[:-1], statistic_dtype(q.dtype)), *STATE)


def _fwd_rule(call: Call) -> Rule:
    """Batch, heads and rows pass through; keys, values and the embedding are blocked."""
    columns = (checked_types(call)[1].shape[-2], FactorKind.BLOCK)
    dims = AttentionDims(call, FactorKind.PASS, FactorKind.PASS, [columns])
    operands = [dims.q, dims.k, dims.v, *dims.added(call)]
    return dims.builder.build(operands, [dims.out, dims.out[:-1], *dims.state()])


def _fwd_emit(e: Emit) -> str:
    scores = scores_text(e, e.result_runs(1), 1)
    return f"K.sdpfa_fwd({', '.join([*operands_text(e), *options_text(e), scale_text(e), scores, stream_text(e)])})"


@kernel
def sdpfa_fwd(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    bias: Any,
    mask: Any,
    dropout_p: Any,
    is_causal: Any,
    scale: Any,
    place: tuple[Sequence[Runs], Sequence[int]],
    stream: tuple[int, ...],
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """(output, log-sum-exp, seed [2], offset []): with the last two the backward pass drops the same."""
    options = options_of(q, dropout_p, is_causal, scale)
    out, logsumexp = attend(q, k, v, bias, mask, options, ScoreBlock(*place), stream)
    return out.to(q.dtype), statistic(logsumexp, q), *state_tensors(stream, q.device)


def _fwd_nvfuser(n: NvfuserEmit) -> Any:
    """A bias or mask gets the scores' number of dims. A causal mask needs all rows: nvFuser counts from the first."""
    _check_nvfuser(n)
    if n.call["is_causal"] not in (None, False) and not is_whole(n, 0, len(n.operand_shapes[0]) - 2):
        raise ToTorch("the causal mask of some of the rows")
    options = {name: n.number(name) for name in ("dropout_p", "is_causal", "scale")}
    return n.plain(**options, bias=_as_scores(n, "bias"), mask=_as_scores(n, "mask"))


def _check_nvfuser(n: NvfuserEmit) -> None:
    q, k, v = (n.call.type_of(name) for name in ("query", "key", "value"))
    assert q is not None and k is not None and v is not None
    if not q.dtype.is_reduced_float:
        raise ToTorch("nvFuser's flash attention is of Half and BFloat16 only")
    if q.ndim != 4:
        raise ToTorch(f"nvFuser's attention is of 4 dims, this one's of {q.ndim}")
    if q.shape[-3] != k.shape[-3] or q.shape[-1] != v.shape[-1]:
        raise ToTorch("nvFuser's attention wants heads and widths of query, key and value to be equal")
    if n.number("dropout_p") not in (None, 0, 0.0):
        raise ToTorch(RANDOM)
    if n.call["is_causal"] not in (None, False) and q.shape[-2] != k.shape[-2]:
        raise ToTorch("flash attention's causal mask ends in the last row and column, torch's begins in the first")


def _as_scores(n: NvfuserEmit, name: str) -> Any:
    found, tensor, ndim = n.call.type_of(name), n.operand(name), n.call.types[0].ndim
    if found is None or found.ndim == ndim:
        return tensor
    return n.ops.broadcast(tensor, [d < ndim - found.ndim for d in range(ndim)])


def _fwd_vjp(b: Backward) -> dict[str, Any]:
    """`sdpfa_bwd`, and `sdpfa_bwd_added` for a bias or mask, if only the output has a gradient; else written out."""
    if b.grads[1] is not None:
        return WrittenOut(b).gradients()
    out, lse, seed, offset = b.results
    p, causal = b["dropout_p"], b["is_causal"]
    options = (0.0 if p is None else p, False if causal is None else causal)
    qkv, found = ("query", "key", "value"), {}
    saved = (b.grad, *(b[name] for name in qkv), out, lse, *options, seed, offset, b["scale"], b["bias"], b["mask"])
    if any(b.needs(name) for name in qkv):
        found |= dict(zip(qkv, b.ops.sdpfa_bwd(*saved), strict=True))
    for name in ("bias", "mask"):
        if b.needs(name):
            found[name] = b.ops.sdpfa_bwd_added(*saved, name == "mask")
    return found


def _distributed_fwd(
    r: Writing, call: Call, operands: tuple[TensorRef, ...], dim: int, blocks: int
) -> Sequence[TensorRef] | None:
    """Attention to each block of keys and values where it is, merged by the online softmax.

    Outputs and their log-sum-exps travel instead of keys and values (Rabe & Staats 2021; Liu et al. 2023, Ring
    Attention; for one row and long keys Flash-Decoding, Dao et al. 2023).
    """
    if not blocks or not _is_columns(r, operands, dim):
        return None
    out, lse, seed, offset = r.call("block_attention", *with_operands(call, operands), blocks)
    top = r.call("max", lse, [0])
    top = r.call("where", r.call("isfinite", top), top, 0.0)
    weight = r.call("exp", r.call("sub", lse, top))
    total = r.call("sum", weight, [0])
    merged = r.call("sum", r.call("mul", out, _column(r, weight)), [0])
    seen = r.call("where", r.call("eq", total, 0.0), 1.0, total)
    output = r.call("truediv", merged, _column(r, seen))
    logsumexp = r.call("add", r.call("log", total), top)
    pairs = zip((output, logsumexp), call.results, strict=False)
    return [*(r.call("cast", made, ttype.dtype) for made, ttype in pairs), seed, offset]


def _is_columns(r: Writing, operands: Sequence[TensorRef], dim: int) -> bool:
    """Whether the dim is the scores' columns: the rows of k and v, or the last dim of a bias or mask."""
    ndim = r.type(operands[r.operand]).ndim
    return r.operand > 0 and dim == (ndim - 2 if r.operand < 3 else ndim - 1)


def _column(r: Writing, x: TensorRef) -> TensorRef:
    """The tensor with a last dim of size 1 added."""
    return r.call("broadcast", x, [False] * r.type(x).ndim + [True])


def _fwd_samples() -> list[Sample]:
    plain, grouped = qkv_types((2, 4, 6, 8), (2, 4, 5, 8)), qkv_types((2, 6, 4, 8), (2, 3, 4, 8))
    stacked = qkv_types((3, 2, 4, 6, 8), (3, 2, 4, 6, 8))
    bias, mask = TensorType((2, 4, 6, 5), DataType.Float), TensorType((6, 5), DataType.Bool)
    return [
        Sample(plain),
        Sample(qkv_types((2, 4, 6, 8), (2, 4, 6, 8)), {"is_causal": True}),
        Sample((*plain, bias, mask)),
        Sample(grouped, {"is_causal": True, "scale": 0.3}),
        Sample(grouped, {"dropout_p": 0.4}),
        Sample(stacked, {"is_causal": True}),
    ]


# backward ---------------------------------------------------------------------------------------------------------


def _bwd_rule(call: Call) -> Rule:
    """Batch and heads of k and v pass through; rows, columns and a group's heads do for some gradients.

    Rows and a group's heads pass through to the gradient of q, which sums over columns. Columns pass through to the
    gradients of k and v, which sum over rows and a group's heads: given the log-sum-exp, scores are independent (Dao
    2023, FlashAttention-2).
    """
    return backward_rule(call, FactorKind.REDUCE, FactorKind.REDUCE, FactorKind.REDUCE, "qkv")


def backward_rule(call: Call, group: FactorKind, rows: FactorKind, columns: FactorKind, of: str) -> Rule:
    """The rule of a backward pass that gives the gradients of the tensors in `of`: some of q, k and v."""
    dims = AttentionDims(call, group, rows, [(checked_types(call)[1].shape[-2], columns)])
    results: dict[str, DimFactors] = {"q": dims.q, "k": dims.k, "v": dims.v}
    return dims.builder.build(backward_operands(call, dims), [results[name] for name in of])


def backward_operands(call: Call, dims: AttentionDims) -> list[DimFactors]:
    """The factors of all that a backward pass reads."""
    saved = [dims.out, dims.q, dims.k, dims.v, dims.out, dims.out[:-1]]
    state = [tuple(dims.builder.blocked(n) for n in t.shape) for t in call.types[6:8]]
    has_more = call.op.places.get("grad_logsumexp") is not None and call.type_of("grad_logsumexp") is not None
    return [*saved, *state, *dims.added(call), *([dims.out[:-1]] if has_more else [])]


def backward_text(e: Emit, kernel: str, *first: str) -> str:
    """Python text of a call of a kernel, on `first` and then all that a backward of attention reads."""
    names = ("grad_output", "query", "key", "value", "output", "logsumexp")
    state = [str(e.operand(name)) for name in ("philox_seed", "philox_offset")]
    operands = [str(e.operand(name)) for name in names]
    scores = scores_text(e, e.operand_runs(5), 2)
    more = added_text(e) + [str(e.operand(name)) for name in e.call.op.places if name == "grad_logsumexp"]
    while more and more[-1] == "None":
        more.pop()
    return f"K.{kernel}({', '.join([*first, *operands, *options_text(e), *state, scale_text(e), scores, *more])})"


@kernel
def sdpfa_bwd(*saved: Any) -> Gradients:
    """Gradients of q, k and v from what the forward pass saved (`Saved`)."""
    s, options = Saved(*saved), Saved(*saved).options
    if not (can_be_fused(s.q, s.k, s.v, options, s.place) and is_addend(s.q, s.bias, s.mask, options)):
        scores = score_gradients(s)
        return (query_gradient(s, *scores), *key_and_value_gradients(s, *scores))
    added = addend_of(s.q, s.bias, s.mask)
    return fused_kernels.attend_bwd(*s[:6], added, options.is_causal, options.scale)


def _bwd_nvfuser(n: NvfuserEmit) -> Any:
    _check_nvfuser(n)
    if any(n.call[name] is not None for name in ("bias", "mask")):
        raise ToTorch("nvFuser's backward takes neither bias nor mask")
    dropout, causal = n.number("dropout_p") or 0.0, n.number("is_causal") or False
    rows, columns = len(n.operand_shapes[5]) - 1, len(n.operand_shapes[2]) - 2
    if causal and not (is_whole(n, 5, rows) and is_whole(n, 2, columns)):
        raise ToTorch("the causal mask of some of the scores")
    # Unlike the forward op, nvFuser's backward has no scale of its own.
    scale = n.operand_shapes[1][-1] ** -0.5 if n.call["scale"] is None else n.number("scale")
    lse = cast(n, n.operands[5], n.call.types[5].dtype, DataType.Float)  # Read as Float, whatever it is.
    return n.plain(logsumexp=lse, dropout_p=float(dropout), is_causal=causal, scale=scale)


def _bwd_vjp(b: Backward) -> dict[str, Any]:
    _check_no_dropout(b)
    return second_gradients(b)


def added_vjp(b: Backward) -> dict[str, Any]:
    """The gradients of `sdpfa_bwd_added`."""
    _check_no_dropout(b)
    return second_gradients(b, of=("mask",) if b["of_mask"] else ("bias",))


def _check_no_dropout(b: Backward) -> None:
    p = b["dropout_p"]
    if p not in (None, 0, 0.0):
        raise user_error(
            f"{b.name}: no derivative here with dropout", f"dropout_p {p}", "0",
            "Write the attention with matmul, softmax and dropout.",
        )  # fmt: skip


def _bwd_sample(q: tuple[int, ...], kv: tuple[int, ...], dropout: float, causal: bool) -> Sample:
    query, key, value = qkv_types(q, kv)
    saved = (query, TensorType(q[:-1], DataType.Float), dropout, causal)
    return Sample((query, query, key, value, *saved, *STATE, 0.5), values={5: (2.0, 3.0, 2.5), 6: (5, 1), 7: (2,)})


def backward_samples() -> list[Sample]:
    return [
        _bwd_sample((2, 4, 6, 8), (2, 4, 6, 8), 0.0, True),
        _bwd_sample((2, 6, 4, 8), (2, 3, 5, 8), 0.3, False),
        _bwd_sample((3, 2, 4, 4, 8), (3, 2, 4, 4, 8), 0.0, False),
        masked_sample(),
    ]


def masked_sample() -> Sample:
    """A call with a bias and a mask."""
    sample = _bwd_sample((2, 4, 6, 8), (2, 2, 7, 8), 0.0, False)
    bias, mask = TensorType((4, 6, 7), DataType.Float), TensorType((2, 1, 1, 7), DataType.Bool)
    seen = (1, 0, 1, 1, 0, 1, 1, 0, 1, 1, 1, 0, 0, 1)
    return Sample((*sample.args, bias, mask), values={**sample.values, 9: seen})


OPS = (
    OpDef(
        "sdpfa_fwd",
        FORWARD_PARAMS,
        _fwd_infer,
        _fwd_rule,
        _fwd_emit,
        flops=lambda call: score_flops(call, 2),
        samples=_fwd_samples,
        nvfuser=_fwd_nvfuser,
        vjp=_fwd_vjp,
        distributed=_distributed_fwd,
        about="scaled dot product attention: output, log-sum-exp of the rows, and the random state",
        draws=drops,
        uses_library=True,
        scheduler="expr_eval",
        laid_out_like=(0,),
    ),
    OpDef(
        "sdpfa_bwd",
        BACKWARD_PARAMS,
        checked_types,
        _bwd_rule,
        lambda e: backward_text(e, "sdpfa_bwd"),
        flops=lambda call: score_flops(call, 5),
        samples=backward_samples,
        nvfuser=_bwd_nvfuser,
        vjp=_bwd_vjp,
        about="the gradients of `sdpfa_fwd` by query, key and value",
        uses_library=True,
        scheduler="expr_eval",
        laid_out_like=(1, 2, 3),
    ),
)
