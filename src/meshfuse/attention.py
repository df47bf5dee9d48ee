"""Scaled dot product attention on one rank: forward with its log-sum-exp, and backward from that.

Tensors are [*b, h, s, e] (q) and [*b, h / g, s, e] (k and v): g consecutive heads of q share one head of k
and v. The saved log-sum-exp stands for the probabilities in the backward pass as in FlashAttention (Dao et
al. 2022).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from .indices import Runs, global_index, linear_index
from .random import Stream, fractions


class Rows(NamedTuple):
    """Which rows of the scores [*b, h, s, s_k] a rank has: runs and global sizes of all dims but the last."""

    runs: Sequence[Runs]
    shape: Sequence[int]


class Options(NamedTuple):
    dropout_p: float
    is_causal: bool
    scale: float


def _options(q: torch.Tensor, dropout_p: Any, is_causal: Any, scale: Any) -> Options:
    if scale is None:
        scale = 1.0 / math.sqrt(q.shape[-1])
    return Options(float(dropout_p or 0.0), bool(is_causal), float(scale))


def _compute(x: torch.Tensor) -> torch.Tensor:
    return x if x.dtype == torch.float64 else x.float()


def _grouped(x: torch.Tensor, kv: torch.Tensor) -> torch.Tensor:
    """[*b, h, s, n] as [*b, h / g, g * s, n]: all rows that read the same head of k and v."""
    rows = x.shape[-3] * x.shape[-2] // max(kv.shape[-3], 1)
    return x.reshape(*x.shape[:-3], kv.shape[-3], rows, x.shape[-1])


def _scores(q: torch.Tensor, k: torch.Tensor, scale: float) -> torch.Tensor:
    """[*b, h, s, s_k]."""
    found = torch.matmul(_grouped(_compute(q), k), _compute(k).transpose(-1, -2)) * scale
    return found.reshape(*q.shape[:-1], k.shape[-2])


def _mask_causal(scores: torch.Tensor, rows: Rows) -> torch.Tensor:
    """Row i sees the columns up to i, i counted in the whole sequence."""
    row = global_index(rows.runs[-1], scores.device)[:, None]
    return scores.masked_fill(torch.arange(scores.shape[-1], device=scores.device) > row, float("-inf"))


def _masked(scores: torch.Tensor, bias: Any, mask: Any, options: Options, rows: Rows) -> torch.Tensor:
    if bias is not None:
        scores = scores + bias
    if mask is not None:
        scores = scores.masked_fill(~mask, float("-inf")) if mask.dtype == torch.bool else scores + mask
    return _mask_causal(scores, rows) if options.is_causal else scores


def _probabilities(scores: torch.Tensor, logsumexp: torch.Tensor) -> torch.Tensor:
    """exp(scores - logsumexp); zero in rows that see nothing."""
    shift = logsumexp.masked_fill(logsumexp == float("-inf"), 0.0)
    return torch.exp(scores - shift.unsqueeze(-1))


def _kept(probabilities: torch.Tensor, options: Options, rows: Rows, stream: tuple[int, ...]) -> torch.Tensor:
    """Dropout's factor for every probability: 0, or 1 / (1 - p). Drawn by global index."""
    columns = probabilities.shape[-1]
    runs = (*rows.runs, ((0, columns),) if columns else ())
    index = linear_index(runs, (*rows.shape, columns), probabilities.device)
    keep = fractions(index, Stream(*stream), torch.float32) >= options.dropout_p
    return keep.to(probabilities.dtype) / (1.0 - options.dropout_p)


def _fused(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, options: Options, rows: Rows) -> bool:
    """Whether torch's fused CPU kernel does exactly this."""
    same = q.dtype == k.dtype == v.dtype and q.shape[-3] == k.shape[-3] and q.shape[-1] == v.shape[-1]
    whole = not options.is_causal or q.shape[-2] == rows.shape[-1]
    return (
        q.device.type == "cpu"
        and same
        and whole
        and options.dropout_p == 0.0
        and min(*q.shape, *k.shape, 1) > 0
        and q.dtype in (torch.float32, torch.bfloat16, torch.float16)
    )


def _flat(x: torch.Tensor) -> torch.Tensor:
    """4-D: leading dims merged with the batch."""
    return x.reshape(-1, *x.shape[-3:])


def sdpfa_fwd(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    bias: Any,
    mask: Any,
    dropout_p: Any,
    is_causal: Any,
    scale: Any,
    rows: tuple[Sequence[Runs], Sequence[int]],
    stream: tuple[int, ...],
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """(output, log-sum-exp, seed [2], offset []): the last two are what the backward pass needs to drop the
    same.
    """
    options, place = _options(q, dropout_p, is_causal, scale), Rows(*rows)
    state = _state(stream, q.device)
    if bias is None and mask is None and _fused(q, k, v, options, place):
        out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            _flat(q), _flat(k), _flat(v), 0.0, options.is_causal, scale=options.scale
        )
        return out.reshape(q.shape), lse.reshape(q.shape[:-1]).float(), *state
    scores = _masked(_scores(q, k, options.scale), bias, mask, options, place)
    logsumexp = torch.logsumexp(scores, -1)
    probabilities = _probabilities(scores, logsumexp)
    if options.dropout_p > 0.0:
        probabilities = probabilities * _kept(probabilities, options, place, stream)
    out = torch.matmul(_grouped(probabilities, k), _compute(v))
    return out.reshape(*q.shape[:-1], v.shape[-1]).to(q.dtype), logsumexp.float(), *state


def _state(stream: tuple[int, ...], device: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """The random state as tensors: [seed, salt] and offset."""
    seed, offset, salt = stream
    both = torch.tensor([seed, salt], dtype=torch.uint64, device=device)
    return both, torch.tensor(offset, dtype=torch.uint64, device=device)


def _stream(seed: torch.Tensor, offset: torch.Tensor) -> tuple[int, ...]:
    first, salt = seed.tolist()
    return (first, int(offset.item()), salt)


def sdpfa_bwd(
    grad: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    logsumexp: torch.Tensor,
    dropout_p: Any,
    is_causal: Any,
    seed: torch.Tensor,
    offset: torch.Tensor,
    scale: Any,
    rows: tuple[Sequence[Runs], Sequence[int]],
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of q, k and v from what the forward pass saved."""
    options, place = _options(q, dropout_p, is_causal, scale), Rows(*rows)
    if _fused(q, k, v, options, place):
        flat = [_flat(x.contiguous()) for x in (grad, q, k, v, out)]
        lse = logsumexp.reshape(-1, *logsumexp.shape[-2:])
        found = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            *flat, lse, 0.0, options.is_causal, scale=options.scale
        )
        return tuple(g.reshape(x.shape) for g, x in zip(found, (q, k, v), strict=True))  # type: ignore[return-value]
    return _plain_bwd(grad, q, k, v, out, logsumexp, options, place, (seed, offset))


def _plain_bwd(
    grad: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    logsumexp: torch.Tensor,
    options: Options,
    rows: Rows,
    state: tuple[torch.Tensor, torch.Tensor],
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    scores = _masked(_scores(q, k, options.scale), None, None, options, rows)
    # The saved log-sum-exp is float32, too coarse for gradients in float64.
    p = _probabilities(scores, torch.logsumexp(scores, -1) if q.dtype == torch.float64 else logsumexp)
    grad_out = _compute(grad)
    grad_p = torch.matmul(_grouped(grad_out, k), _compute(v).transpose(-1, -2)).reshape(p.shape)
    dropped = p
    if options.dropout_p > 0.0:
        kept = _kept(p, options, rows, _stream(*state))
        dropped, grad_p = p * kept, grad_p * kept
    row_dot = (grad_out * _compute(out)).sum(-1, keepdim=True)
    grad_scores = _grouped(p * (grad_p - row_dot), k) * options.scale
    grad_q = torch.matmul(grad_scores, _compute(k)).reshape(q.shape)
    grad_k = torch.matmul(grad_scores.transpose(-1, -2), _grouped(_compute(q), k))
    grad_v = torch.matmul(_grouped(dropped, k).transpose(-1, -2), _grouped(grad_out, k))
    return grad_q.to(q.dtype), grad_k.to(k.dtype), grad_v.to(v.dtype)
