"""Attention in torch, by its definition: what the ops of attention, of its blocks and of its rings are held against."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch


def _attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    bias: Any,
    mask: Any,
    is_causal: Any,
    scale: Any,
    kept: Any = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Repeats the heads of k and v, and takes every row's softmax."""
    groups = q.shape[-3] // k.shape[-3]
    k, v = (t.repeat_interleave(groups, -3) for t in (k, v))
    scores = torch.einsum("...se,...te->...st", q, k) * (scale if scale is not None else q.shape[-1] ** -0.5)
    scores = scores if bias is None else scores + bias
    if mask is not None:
        scores = torch.where(mask, scores, -math.inf)
    if is_causal:
        scores = torch.where(torch.ones(scores.shape[-2:]).tril() > 0, scores, -math.inf)
    # A row that sees nothing takes nothing.
    weights = torch.nan_to_num(torch.softmax(scores, -1))
    weights = weights if kept is None else weights * kept
    return torch.einsum("...st,...te->...se", weights, v), torch.logsumexp(scores, -1)


def attention_bwd(
    inputs: list[torch.Tensor], added: Any, is_causal: Any, scale: Any, kept: Any, grad_lse: Any = None
) -> tuple[torch.Tensor, ...]:
    """Gradients of q, k, v (and a bias) by autograd from [grad, q, k, v] and (bias, mask), of which one may be None.

    They can be differentiated in turn.
    """
    (grad, *qkv), (bias, mask) = inputs, added
    # Views, as one operand may depend on another.
    given = [*qkv, *([] if bias is None else [bias])]
    leaves = [t.view_as(t) if t.requires_grad else t.detach().requires_grad_() for t in given]
    again = any(t.requires_grad for t in (*inputs, bias, grad_lse) if t is not None)
    out, lse = _attention(*leaves[:3], None if bias is None else leaves[3], mask, is_causal, scale, kept)
    if grad_lse is None:
        return torch.autograd.grad(out, leaves, grad, create_graph=again)
    return torch.autograd.grad([out, lse], leaves, [grad, grad_lse], create_graph=again, allow_unused=True)


def seen_in_ring(rows: int, ring: int, is_causal: bool, zigzag: bool, mask: Any = None) -> torch.Tensor | None:
    """Which columns a row sees: those whose place in the sequence is not later than its own; the mask's of these."""
    if not is_causal:
        return mask
    places = torch.arange(rows)
    if zigzag:
        low, high = places.view(2, ring, -1)
        places = torch.stack([low, high.flip(0)], 1).flatten()
    seen = places <= places[:, None]
    return seen if mask is None else seen & mask


def ring_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    ring: int,
    is_causal: bool,
    scale: Any,
    zigzag: bool,
    bias: Any,
    mask: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    return _attention(q, k, v, bias, seen_in_ring(q.shape[-2], ring, is_causal, zigzag, mask), False, scale)


def ring_attention_bwd(
    grad: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    ring: int,
    is_causal: bool,
    scale: Any,
    zigzag: bool,
    grad_lse: Any,
    bias: Any,
    mask: Any,
) -> tuple[torch.Tensor, ...]:
    """From q, k and v alone: the saved output and log-sum-exp are those of them."""
    seen = seen_in_ring(q.shape[-2], ring, is_causal, zigzag, mask)
    return attention_bwd([grad, q, k, v], (bias, seen), False, scale, None, grad_lse)[:3]


def merged_attention(
    out: torch.Tensor, lse: torch.Tensor, other: torch.Tensor, other_lse: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """By the probabilities of the two sets of columns; nothing of none."""
    both = torch.stack([lse, other_lse])
    weights = torch.nan_to_num(both.softmax(0))
    return (torch.stack([out, other]) * weights[..., None]).sum(0), both.logsumexp(0)


def attention(inputs: list[Any], is_causal: Any, scale: Any, kept: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """(output, log-sum-exp) from [q, k, v, bias, mask]."""
    return _attention(*inputs, is_causal, scale, kept)


def block_attention(
    inputs: list[Any], is_causal: Any, scale: Any, kept: Any, blocks: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """(output, log-sum-exp) of every block of columns by itself: all others masked out."""
    *qkv, bias, mask = inputs
    size = max(1, -(-qkv[1].shape[-2] // blocks))
    made = []
    for number in range(blocks):
        inside = torch.arange(qkv[1].shape[-2]) // size == number
        seen = inside if mask is None else inside & mask
        made.append(_attention(*qkv, bias, seen, is_causal, scale, kept))
    return torch.stack([out for out, _ in made]), torch.stack([lse for _, lse in made])


ATTENTION: dict[str, Callable[..., Any]] = {"sdpfa_fwd": attention, "block_attention": block_attention}
# Which of the gradients of q, k, v and the bias an op gives.
GRADIENTS = {
    "sdpfa_bwd": slice(0, 3),
    "sdpfa_bwd_q": slice(0, 1),
    "sdpfa_bwd_kv": slice(1, 3),
    "sdpfa_bwd_added": slice(3, 4),
    "ring_attention_bwd": slice(0, 3),
}
