"""Attention of a trace as one op, forward and backward: the rule, and the gradient that Thunder is told."""

# pyright: reportMissingImports=false

from __future__ import annotations

from typing import Any

import thunder.torch as ltorch
from thunder.core.prims import get_grad, put_grad
from thunder.core.proxies import TensorProxy

from ..definition.tensor_view import TensorView
from ..frontends.aten import Translation
from .prims import MeshPrims, attention, attention_backward
from .rules import RULES, rule

SYMBOL = ltorch.scaled_dot_product_attention


def takes(
    query: TensorProxy, key: TensorProxy, value: TensorProxy, attn_mask: Any = None, dropout_p: float = 0.0,
    is_causal: bool = False, *, scale: Any = None,
) -> bool:  # fmt: skip
    """Whether attention is one op: its mask must have no gradient, and all heads must have keys of their own."""
    learned = attn_mask is not None and attn_mask.requires_grad
    same = query.shape[:-2] == key.shape[:-2] == value.shape[:-2]
    return not learned and same and 2 <= query.ndim <= 4


@rule(SYMBOL.id, check=takes)
def _forward(
    t: Translation, query: TensorView, key: TensorView, value: TensorView, attn_mask: Any = None,
    dropout_p: float = 0.0, is_causal: bool = False, *, scale: Any = None,
) -> TensorView:  # fmt: skip
    return RULES[MeshPrims.ATTENTION](t, query, key, value, attn_mask, dropout_p, is_causal, scale)[0]


def gradient(
    query: TensorProxy, key: TensorProxy, value: TensorProxy, attn_mask: Any = None, dropout_p: float = 0.0,
    is_causal: bool = False, *, scale: Any = None,
) -> TensorProxy:  # fmt: skip
    """Attention with its gradients put: a grad transform of Thunder's."""
    options = (float(dropout_p), bool(is_causal), scale)
    out, *state = attention(query, key, value, attn_mask, *options)
    found = attention_backward(get_grad(out), query, key, value, attn_mask, out, *state, *options)
    for x, grad in zip((query, key, value), found, strict=True):
        put_grad(x, grad)
    return out
