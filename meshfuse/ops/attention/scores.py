"""Parts of attention's kernels: scores, masks, dropout, and the gradients of the scores.

Tensors are [*b, h, s, e] (q) and [*b, h / g, s, e] (k and v): g consecutive heads of q share one head of k and v. The
saved log-sum-exp stands for the probabilities in the backward pass as in FlashAttention (Dao et al. 2022).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from ...kernels.indices import Runs, global_index, linear_index
from ...kernels.random import RandomStream, fractions
from . import fused_kernels


class ScoreBlock(NamedTuple):
    """The part of the scores [*b, h, s, s_k] that is computed: runs and global sizes of all dims."""

    runs: Sequence[Runs]
    shape: Sequence[int]


class Options(NamedTuple):
    """The numbers and flags of attention, with the default scale filled in."""

    dropout_p: float
    is_causal: bool
    scale: float


def options_of(q: torch.Tensor, dropout_p: Any, is_causal: Any, scale: Any) -> Options:
    if scale is None:
        scale = 1.0 / math.sqrt(max(q.shape[-1], 1))
    return Options(float(dropout_p or 0.0), bool(is_causal), float(scale))


def widened(x: torch.Tensor) -> torch.Tensor:
    """The tensor in float32, or in float64 if it is that."""
    return x if x.dtype == torch.float64 else x.float()


def _grouped(x: torch.Tensor, kv: torch.Tensor) -> torch.Tensor:
    """[*b, h, s, n] as [*b, h / g, g * s, n]: all rows that read the same head of k and v."""
    rows = x.shape[-3] * x.shape[-2] // max(kv.shape[-3], 1)
    return x.reshape(*x.shape[:-3], kv.shape[-3], rows, x.shape[-1])


def _scores(q: torch.Tensor, k: torch.Tensor, scale: float) -> torch.Tensor:
    """q kᵀ times the scale: [*b, h, s, s_k]."""
    found = torch.matmul(_grouped(widened(q), k), widened(k).transpose(-1, -2)) * scale
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


def can_be_fused(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, options: Options, place: ScoreBlock) -> bool:
    """Whether one of torch's fused kernels computes exactly this."""
    whole = not options.is_causal or (q.shape[-2], k.shape[-2]) == tuple(place.shape[-2:])
    return whole and fused_kernels.can_fuse(q, k, v, options.dropout_p)


def is_addend(q: torch.Tensor, bias: Any, mask: Any, options: Options) -> bool:
    """Whether bias and mask can be one tensor of q's type, which the fused kernel adds to all the scores."""
    given = [x for x in (bias, mask) if x is not None]
    return not given or (not options.is_causal and all(x.dtype in (q.dtype, torch.bool) for x in given))


def addend_of(q: torch.Tensor, bias: Any, mask: Any) -> torch.Tensor | None:
    """Bias and mask as one tensor, added in q's type as in nvFuser."""
    if bias is None and mask is None:
        return None
    total = q.new_zeros(()) if bias is None else bias.to(q.dtype)
    if mask is not None:
        total = total.masked_fill(~mask, float("-inf")) if mask.dtype == torch.bool else total + mask
    return total


def attend(
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
    if can_be_fused(q, k, v, options, place) and is_addend(q, bias, mask, options):
        return fused_kernels.attend(q, k, v, addend_of(q, bias, mask), options.is_causal, options.scale)
    scores = _masked(_scores(q, k, options.scale), bias, mask, options, place)
    logsumexp = torch.logsumexp(scores, -1)
    probabilities = _probabilities(scores, logsumexp)
    if options.dropout_p > 0.0:
        probabilities = probabilities * _dropout_factors(probabilities, options, place, stream)
    out = torch.matmul(_grouped(probabilities, k), widened(v))
    return out.reshape(*q.shape[:-1], v.shape[-1]), logsumexp


def statistic(logsumexp: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    """The log-sum-exp in the op's result type: float64 if q is, else float32."""
    return logsumexp.double() if q.dtype == torch.float64 else logsumexp.float()


def state_tensors(stream: tuple[int, ...], device: Any) -> tuple[torch.Tensor, torch.Tensor]:
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


class Saved(NamedTuple):
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
    bias: torch.Tensor | None = None
    mask: torch.Tensor | None = None
    grad_logsumexp: torch.Tensor | None = None

    @property
    def options(self) -> Options:
        return options_of(self.q, self.dropout_p, self.is_causal, self.scale)

    @property
    def place(self) -> ScoreBlock:
        return ScoreBlock(*self.scores)


def query_gradient(s: Saved, grad_scores: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
    return torch.matmul(grad_scores, widened(s.k)).reshape(s.q.shape).to(s.q.dtype)


def key_and_value_gradients(
    s: Saved, grad_scores: torch.Tensor, dropped: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    grad_k = torch.matmul(grad_scores.transpose(-1, -2), _grouped(widened(s.q), s.k))
    grad_v = torch.matmul(dropped.transpose(-1, -2), _grouped(widened(s.grad), s.k))
    return grad_k.to(s.k.dtype), grad_v.to(s.v.dtype)


def score_gradients(s: Saved) -> tuple[torch.Tensor, torch.Tensor]:
    """(gradient of q kᵀ, probabilities after dropout), both grouped by the heads of k and v."""
    grad_scores, dropped = softmax_gradients(s)
    return _grouped(grad_scores, s.k) * s.options.scale, _grouped(dropped, s.k)


def softmax_gradients(s: Saved) -> tuple[torch.Tensor, torch.Tensor]:
    """(gradient of the scores that softmax takes, probabilities after dropout): [*b, h, s, s_k]."""
    options, place = s.options, s.place
    scores = _masked(_scores(s.q, s.k, options.scale), s.bias, s.mask, options, place)
    p = dropped = _probabilities(scores, s.logsumexp)
    grad_out = widened(s.grad)
    grad_p = torch.matmul(_grouped(grad_out, s.k), widened(s.v).transpose(-1, -2)).reshape(p.shape)
    if options.dropout_p > 0.0:
        kept = _dropout_factors(p, options, place, _stream(s.seed, s.offset))
        dropped, grad_p = p * kept, grad_p * kept
    row_dot = (grad_out * widened(s.out)).sum(-1, keepdim=True)
    if s.grad_logsumexp is not None:
        row_dot = row_dot - s.grad_logsumexp.unsqueeze(-1)
    return p * (grad_p - row_dot), dropped
