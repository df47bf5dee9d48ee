"""Attention as one op of a captured graph, on every device and with every mask.

torch picks a kernel for scaled_dot_product_attention by the device, the types and the mask, and each has an op of its
own. A captured graph has the two ops of this file instead, which are never run: they only have shapes and a gradient.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F


@torch.library.custom_op("meshfuse::attention", mutates_args=())
def attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None, dropout_p: float,
    is_causal: bool, scale: float | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """(output, log-sum-exp of the rows, seed, offset) of attention, as fd.ops.sdpfa_fwd has them."""
    raise AssertionError("attention of a captured graph is translated, not run")


@attention.register_fake
def _(query: Any, key: Any, value: Any, mask: Any, dropout_p: float, is_causal: bool, scale: float | None) -> Any:
    out = query.new_empty((*query.shape[:-1], value.shape[-1]))
    wide = torch.float64 if query.dtype == torch.float64 else torch.float32
    state = [query.new_empty(shape, dtype=torch.uint64) for shape in ((2,), ())]
    return (out, query.new_empty(query.shape[:-1], dtype=wide), *state)


@torch.library.custom_op("meshfuse::attention_backward", mutates_args=())
def attention_backward(
    grad: torch.Tensor, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None,
    output: torch.Tensor, logsumexp: torch.Tensor, seed: torch.Tensor, offset: torch.Tensor, dropout_p: float,
    is_causal: bool, scale: float | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """The gradients of attention by query, key and value."""
    raise AssertionError("attention of a captured graph is translated, not run")


@attention_backward.register_fake
def _(grad: Any, query: Any, key: Any, value: Any, *_: Any) -> Any:
    return torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Any, ...]) -> None:
    query, key, value, mask, *ctx.options = inputs
    ctx.save_for_backward(query, key, value, mask, *output)
    ctx.mark_non_differentiable(*output[1:])


def _gradients(ctx: Any, grad: Any, *_: Any) -> Any:
    found = attention_backward(grad.contiguous(), *ctx.saved_tensors, *ctx.options)
    return (*found, None, None, None, None)


attention.register_autograd(_gradients, setup_context=_save)


@torch.library.custom_op("meshfuse::enter_attention", mutates_args=())
def enter_attention(x: torch.Tensor) -> torch.Tensor:
    """A tensor as attention reads it under context parallelism; `leave_attention` is the way back."""
    raise AssertionError("attention of a captured graph is translated, not run")


@enter_attention.register_fake
def _(x: Any) -> Any:
    return torch.empty_like(x)


@torch.library.custom_op("meshfuse::leave_attention", mutates_args=())
def leave_attention(x: torch.Tensor, is_view: bool) -> torch.Tensor:
    """What attention makes under context parallelism, as all else reads it.

    is_view: whether nothing moves for that, so that a backward need not keep both.
    """
    raise AssertionError("attention of a captured graph is translated, not run")


@leave_attention.register_fake
def _(x: Any, is_view: bool) -> Any:
    return torch.empty_like(x)


# As nodes of a graph call them.
FORWARD, BACKWARD = torch.ops.meshfuse.attention.default, torch.ops.meshfuse.attention_backward.default
ENTER, LEAVE = torch.ops.meshfuse.enter_attention.default, torch.ops.meshfuse.leave_attention.default
TORCHS = F.scaled_dot_product_attention


def as_one_op(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0, is_causal: bool = False, scale: float | None = None, **more: Any,
) -> torch.Tensor:  # fmt: skip
    """torch's scaled_dot_product_attention, as this file's op.

    One whose mask has a gradient, as a learned bias has, stays torch's: it is written out in products.
    """
    if attn_mask is not None and attn_mask.requires_grad:
        return TORCHS(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, **more)
    return attention(query, key, value, attn_mask, float(dropout_p), is_causal, scale)[0]
