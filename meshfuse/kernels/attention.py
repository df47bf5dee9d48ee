"""Scaled dot product attention on one rank: forward with its log-sum-exp, and backward from that.

Tensors are [*b, h, s, e] (q) and [*b, h / g, s, e] (k and v): g consecutive heads of q share one head of k and v. The
saved log-sum-exp stands for the probabilities in the backward pass as in FlashAttention (Dao et al. 2022).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from .fused_attention import attend, attend_bwd, can_fuse
from .indices import Runs, global_index, linear_index
from .random import RandomStream, fractions


class ScoreBlock(NamedTuple):
    """The part of the scores [*b, h, s, s_k] that is computed: runs and global sizes of all dims."""

    runs: Sequence[Runs]
    shape: Sequence[int]


class Options(NamedTuple):
    """The numbers and flags of attention, with the default scale filled in."""

    dropout_p: float
    is_causal: bool
    scale: float


def _options(q: torch.Tensor, dropout_p: Any, is_causal: Any, scale: Any) -> Options:
    if scale is None:
        scale = 1.0 / math.sqrt(max(q.shape[-1], 1))
    return Options(float(dropout_p or 0.0), bool(is_causal), float(scale))


def _widened(x: torch.Tensor) -> torch.Tensor:
    """The tensor in float32, or in float64 if it is that."""
    return x if x.dtype == torch.float64 else x.float()


def _grouped(x: torch.Tensor, kv: torch.Tensor) -> torch.Tensor:
    """[*b, h, s, n] as [*b, h / g, g * s, n]: all rows that read the same head of k and v."""
    rows = x.shape[-3] * x.shape[-2] // max(kv.shape[-3], 1)
    return x.reshape(*x.shape[:-3], kv.shape[-3], rows, x.shape[-1])


def _scores(q: torch.Tensor, k: torch.Tensor, scale: float) -> torch.Tensor:
    """q kᵀ times the scale: [*b, h, s, s_k]."""
    found = torch.matmul(_grouped(_widened(q), k), _widened(k).transpose(-1, -2)) * scale
    return found.reshape(*q.shape[:-1], k.shape[-2])


def _mask_causal(scores: torch.Tensor, place: ScoreBlock) -> torch.Tensor:
    """Scores with -inf where the column is after the row, both counted in the whole sequence."""
    row, column = (global_index(runs, scores.device) for runs in place.runs[-2:])
    return scores.masked_fill(column > row[:, None], float("-inf"))


def _masked(scores: torch.Tensor, bias: Any, mask: Any, options: Options, place: ScoreBlock) -> torch.Tensor:
    if bias is not None:
        scores = scores + bias
    if mask is not None:
        scores = scores.masked_fill(~mask, float("-inf")) if mask.dtype == torch.bool else scores + mask
    return _mask_causal(scores, place) if options.is_causal else scores


def _probabilities(scores: torch.Tensor, logsumexp: torch.Tensor) -> torch.Tensor:
    """exp(scores - logsumexp); zero in rows that see nothing."""
    shift = logsumexp.masked_fill(logsumexp == float("-inf"), 0.0)
    return torch.exp(scores - shift.unsqueeze(-1))


def _dropout_factors(
    probabilities: torch.Tensor, options: Options, place: ScoreBlock, stream: tuple[int, ...]
) -> torch.Tensor:
    """Dropout's factor for every probability: 0, or 1 / (1 - p). It is drawn by global index."""
    index = linear_index(place.runs, place.shape, probabilities.device)
    keep = fractions(index, RandomStream(*stream), torch.float32) >= options.dropout_p
    return keep.to(probabilities.dtype) / (1.0 - options.dropout_p)


def _can_fuse(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, options: Options, place: ScoreBlock) -> bool:
    """Whether one of torch's fused kernels computes exactly this."""
    whole = not options.is_causal or (q.shape[-2], k.shape[-2]) == tuple(place.shape[-2:])
    return whole and can_fuse(q, k, v, options.dropout_p)


def _is_addend(q: torch.Tensor, bias: Any, mask: Any, options: Options) -> bool:
    """Whether bias and mask can be one tensor of q's type, which the fused kernel adds to all the scores."""
    given = [x for x in (bias, mask) if x is not None]
    return not given or (not options.is_causal and all(x.dtype in (q.dtype, torch.bool) for x in given))


def _addend(q: torch.Tensor, bias: Any, mask: Any) -> torch.Tensor | None:
    """Bias and mask as one, rounded when they are added, as nvFuser's are."""
    if bias is None and mask is None:
        return None
    total = q.new_zeros(()) if bias is None else bias.to(q.dtype)
    if mask is not None:
        total = total.masked_fill(~mask, float("-inf")) if mask.dtype == torch.bool else total + mask
    return total


def _attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    bias: Any,
    mask: Any,
    options: Options,
    place: ScoreBlock,
    stream: tuple[int, ...],
) -> tuple[torch.Tensor, torch.Tensor]:
    """(output, log-sum-exp) over the columns of the place, in the precision of the computation."""
    if _can_fuse(q, k, v, options, place) and _is_addend(q, bias, mask, options):
        return attend(q, k, v, _addend(q, bias, mask), options.is_causal, options.scale)
    scores = _masked(_scores(q, k, options.scale), bias, mask, options, place)
    logsumexp = torch.logsumexp(scores, -1)
    probabilities = _probabilities(scores, logsumexp)
    if options.dropout_p > 0.0:
        probabilities = probabilities * _dropout_factors(probabilities, options, place, stream)
    out = torch.matmul(_grouped(probabilities, k), _widened(v))
    return out.reshape(*q.shape[:-1], v.shape[-1]), logsumexp


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
    """(output, log-sum-exp, seed [2], offset []): the last two let the backward pass drop the same."""
    options = _options(q, dropout_p, is_causal, scale)
    out, logsumexp = _attend(q, k, v, bias, mask, options, ScoreBlock(*place), stream)
    return out.to(q.dtype), _statistic(logsumexp, q), *_state_tensors(stream, q.device)


def _statistic(logsumexp: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    """The log-sum-exp as the op gives it: in float64 if q is that, as every gradient is made of it."""
    return logsumexp.double() if q.dtype == torch.float64 else logsumexp.float()


def ring_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    is_causal: bool,
    scale: Any,
    place: tuple[Sequence[Runs], Sequence[int]],
    chunks: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(output, log-sum-exp) on a rank that has all columns.

    With `chunks` it also has all rows, as so many chunks in zig-zag order; else in the order of the sequence.
    """
    options = _options(q, 0.0, is_causal, scale)
    q, k, v = (_in_sequence(x, chunks) for x in (q, k, v))
    out, logsumexp = _attend(q, k, v, None, None, options, ScoreBlock(*place), ())
    return _in_zigzag(out.to(q.dtype), chunks, -2), _in_zigzag(_statistic(logsumexp, q), chunks, -1)


def _in_sequence(x: torch.Tensor, chunks: int, dim: int = -2) -> torch.Tensor:
    """Put chunks that are in zig-zag order (first, last, second, ...) into the order of the sequence.

    0: leave all as it is.
    """
    if not chunks:
        return x
    parts = x.chunk(chunks, dim)
    return torch.cat([*parts[::2], *parts[::-2]], dim)


def _in_zigzag(x: torch.Tensor, chunks: int, dim: int) -> torch.Tensor:
    """The inverse of `_in_sequence`."""
    if not chunks:
        return x
    parts = x.chunk(chunks, dim)
    pairs = zip(parts[: chunks // 2], parts[: chunks // 2 - 1 : -1], strict=True)
    return torch.cat([part for pair in pairs for part in pair], dim)


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


def block_attention(
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
    block: int,
    numbers: Runs,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """`sdpfa_fwd` on each of the rank's blocks of columns by itself: [blocks, *b, h, s, e] and [blocks, *b, h, s].

    `numbers` are the runs of the blocks' numbers. A block without columns gives zeros, and -inf as its log-sum-exp.
    """
    options, (runs, shape) = _options(q, dropout_p, is_causal, scale), place
    q, k, v = _widened(q), _widened(k), _widened(v)
    outs, sums, start = [], [], 0
    for number in itertools.chain.from_iterable(itertools.starmap(range, numbers)):
        first, last = (min(edge * block, shape[-1]) for edge in (number, number + 1))
        here, start = slice(start, start + last - first), start + last - first
        part = ScoreBlock((*runs[:-1], ((first, last),) if last > first else ()), shape)
        added = [_columns(x, here) for x in (bias, mask)]
        out, logsumexp = _attend(q, k[..., here, :], v[..., here, :], *added, options, part, stream)
        outs.append(out)
        sums.append(logsumexp.to(out.dtype))
    made = _stacked(outs, (*q.shape[:-1], v.shape[-1]), q), _stacked(sums, q.shape[:-1], q)
    return *made, *_state_tensors(stream, q.device)


def _columns(x: Any, here: slice) -> Any:
    """These columns of a bias or mask; all of it where its last dim broadcasts, None where there is none."""
    return x if x is None or x.shape[-1] == 1 else x[..., here]


def _stacked(parts: list[torch.Tensor], shape: Sequence[int], like: torch.Tensor) -> torch.Tensor:
    return torch.stack(parts) if parts else like.new_empty((0, *shape))


def _state_tensors(stream: tuple[int, ...], device: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """The random state as tensors: [seed, salt] and offset.

    Only the seed's low 64 bits count, as for all random numbers.
    """
    seed, offset, salt = stream
    if isinstance(seed, torch.Tensor) and isinstance(offset, torch.Tensor):  # In compiled code, int64.
        return torch.stack([seed, torch.full_like(seed, salt)]).view(torch.uint64), offset.view(torch.uint64)
    if not any(stream):  # Nothing is drawn; a copy from the host could not be part of a CUDA graph.
        none = torch.zeros(3, dtype=torch.uint64, device=device)
        return none[:2], none[2]
    both = torch.tensor([seed % 2**64, salt], dtype=torch.uint64, device=device)
    return both, torch.tensor(offset, dtype=torch.uint64, device=device)


def _stream(seed: torch.Tensor, offset: torch.Tensor) -> tuple[int, ...]:
    first, salt = seed.tolist()
    return (first, int(offset.item()), salt)


Gradients = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


class _Saved(NamedTuple):
    """What the backward pass takes, as the ops pass it."""

    grad: torch.Tensor
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    out: torch.Tensor
    logsumexp: torch.Tensor
    dropout_p: Any
    is_causal: Any
    seed: torch.Tensor
    offset: torch.Tensor
    scale: Any
    scores: tuple[Sequence[Runs], Sequence[int]]
    grad_logsumexp: torch.Tensor | None = None

    @property
    def options(self) -> Options:
        return _options(self.q, self.dropout_p, self.is_causal, self.scale)

    @property
    def place(self) -> ScoreBlock:
        return ScoreBlock(*self.scores)


def sdpfa_bwd(*saved: Any) -> Gradients:
    """Gradients of q, k and v from what the forward pass saved (`_Saved`)."""
    s = _Saved(*saved)
    if not _can_fuse(s.q, s.k, s.v, s.options, s.place):
        scores = _score_gradients(s)
        return (_query_gradient(s, *scores), *_key_and_value_gradients(s, *scores))
    return attend_bwd(s.grad, s.q, s.k, s.v, s.out, s.logsumexp, s.options.is_causal, s.options.scale)


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
) -> Gradients:
    """Gradients of q, k and v on a rank that has all rows and columns."""
    rows = [_in_sequence(x, chunks) for x in (grad, q, k, v, out)]
    sums = [None if x is None else _in_sequence(x, chunks, -1) for x in (logsumexp, grad_logsumexp)]
    saved = (*rows, sums[0], 0.0, is_causal, None, None, scale, place)
    made = sdpfa_bwd(*saved) if sums[1] is None else (sdpfa_bwd_q(*saved, sums[1]), *sdpfa_bwd_kv(*saved, sums[1]))
    grad_q, grad_k, grad_v = (_in_zigzag(x, chunks, -2) for x in made)
    return grad_q, grad_k, grad_v


def sdpfa_bwd_q(*saved: Any) -> torch.Tensor:
    """The gradient of q, summed over the columns that this rank has."""
    s = _Saved(*saved)
    return _query_gradient(s, *_score_gradients(s))


def _query_gradient(s: _Saved, grad_scores: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
    return torch.matmul(grad_scores, _widened(s.k)).reshape(s.q.shape).to(s.q.dtype)


def sdpfa_bwd_kv(*saved: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """The gradients of k and v, summed over the rows and heads of q that this rank has."""
    s = _Saved(*saved)
    return _key_and_value_gradients(s, *_score_gradients(s))


def _key_and_value_gradients(
    s: _Saved, grad_scores: torch.Tensor, dropped: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    grad_k = torch.matmul(grad_scores.transpose(-1, -2), _grouped(_widened(s.q), s.k))
    grad_v = torch.matmul(dropped.transpose(-1, -2), _grouped(_widened(s.grad), s.k))
    return grad_k.to(s.k.dtype), grad_v.to(s.v.dtype)


def _score_gradients(s: _Saved) -> tuple[torch.Tensor, torch.Tensor]:
    """(gradient of q kᵀ, probabilities after dropout), both grouped by the heads of k and v."""
    options, place = s.options, s.place
    scores = _masked(_scores(s.q, s.k, options.scale), None, None, options, place)
    p = dropped = _probabilities(scores, s.logsumexp)
    grad_out = _widened(s.grad)
    grad_p = torch.matmul(_grouped(grad_out, s.k), _widened(s.v).transpose(-1, -2)).reshape(p.shape)
    if options.dropout_p > 0.0:
        kept = _dropout_factors(p, options, place, _stream(s.seed, s.offset))
        dropped, grad_p = p * kept, grad_p * kept
    row_dot = (grad_out * _widened(s.out)).sum(-1, keepdim=True)
    if s.grad_logsumexp is not None:
        row_dot = row_dot - s.grad_logsumexp.unsqueeze(-1)
    return _grouped(p * (grad_p - row_dot), s.k) * options.scale, _grouped(dropped, s.k)
