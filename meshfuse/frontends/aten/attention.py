"""Attention, captured as one op (`frontends/sdpa.py`), in ops of a definition."""

from __future__ import annotations

from typing import Any

import torch

from ...definition.tensor_view import TensorView
from ...dtypes import DataType
from ...errors import user_error
from ...ops.registry import find
from .. import sdpa
from .table import Translation, rule

assert sdpa.attention is not None  # its import registers the ops of this file
_attention = torch.ops.meshfuse.attention.default
_backward = torch.ops.meshfuse.attention_backward.default
_HEADS = 4  # The dims of a query: batch, heads, rows, width.


@rule(_attention)
def _forward(
    t: Translation, query: TensorView, key: TensorView, value: TensorView, mask: Any, dropout_p: float,
    is_causal: bool, scale: float | None,
) -> tuple[TensorView, ...]:  # fmt: skip
    missing = _HEADS - query.ndim
    q, k, v = (_lifted(t, x, missing) for x in (query, key, value))
    out, lse, *state = t.ops.sdpfa_fwd(
        q, k, v, **_added(t, mask), dropout_p=dropout_p or None, is_causal=is_causal, scale=scale
    )
    return _lowered(t, out, missing), _lowered(t, lse, missing), *state


@rule(_backward)
def _gradients(
    t: Translation, grad: TensorView, query: TensorView, key: TensorView, value: TensorView, mask: Any,
    output: TensorView, logsumexp: TensorView, seed: TensorView, offset: TensorView, dropout_p: float,
    is_causal: bool, scale: float | None,
) -> tuple[TensorView, ...]:  # fmt: skip
    missing = _HEADS - query.ndim
    lifted = [_lifted(t, x, missing) for x in (grad, query, key, value, output, logsumexp)]
    added = _added(t, mask)
    if added and "mask" not in _op().places:
        made = _written_out(t, lifted, added, dropout_p, is_causal, scale)
    else:
        made = t.ops.sdpfa_bwd(*lifted, dropout_p, is_causal, seed, offset, scale, **added)
    return tuple(_lowered(t, x, missing) for x in made)


def _op() -> Any:
    found = find("sdpfa_bwd")
    assert found is not None
    return found


def _lifted(t: Translation, x: TensorView, dims: int) -> TensorView:
    return t.ops.broadcast(x, [True] * dims + [False] * x.ndim) if dims > 0 else x


def _lowered(t: Translation, x: TensorView, dims: int) -> TensorView:
    return t.ops.squeeze(x, list(range(dims))) if dims > 0 else x


def _added(t: Translation, mask: Any) -> dict[str, TensorView]:
    """What is added to the scores, by the name of sdpfa_fwd's parameter."""
    if mask is None:
        return {}
    return {"mask" if mask.dtype is DataType.Bool else "bias": mask}


def _written_out(
    t: Translation, operands: list[TensorView], added: dict[str, TensorView], dropout_p: float, is_causal: bool,
    scale: float | None,
) -> tuple[TensorView, ...]:  # fmt: skip
    """The gradients in products, with all scores in memory: sdpfa_bwd takes no mask."""
    if dropout_p:
        raise user_error(
            "the gradient of attention with a mask and dropout", f"dropout_p={dropout_p}", "no dropout, or no mask",
            "Set the model's attention dropout to 0.",
        )  # fmt: skip
    grad, q, k, v, out, lse = (t.computing(x) for x in operands)
    ops, groups = t.ops, q.type.shape[1] // k.type.shape[1]
    factor = q.type.shape[-1] ** -0.5 if scale is None else scale
    wide_k, wide_v = (_repeated(t, x, groups) for x in (k, v))
    scores = ops.mul(ops.matmul(q, _turned(t, wide_k)), factor)
    seen = _seen(t, scores, added.get("mask"), is_causal)
    scores = scores if "bias" not in added else ops.add(scores, t.computing(added["bias"]))
    weights = ops.exp(ops.sub(scores, t.unsqueeze(lse, lse.ndim)))
    weights = weights if seen is None else ops.where(seen, weights, 0.0)
    inner = ops.sum(ops.mul(grad, out), [-1], True)
    slopes = ops.mul(ops.mul(weights, ops.sub(ops.matmul(grad, _turned(t, wide_v)), inner)), factor)
    by_k, by_v = ops.matmul(_turned(t, slopes), q), ops.matmul(_turned(t, weights), grad)
    return ops.matmul(slopes, wide_k), _summed(t, by_k, groups), _summed(t, by_v, groups)


def _seen(t: Translation, scores: TensorView, mask: Any, is_causal: bool) -> Any:
    if not is_causal:
        return mask
    rows, columns = scores.type.shape[-2:]
    causal = t.ops.le(t.along(t.ops.iota(columns), -1, 2), t.along(t.ops.iota(rows), 0, 2))
    return causal if mask is None else t.ops.logical_and(causal, mask)


def _turned(t: Translation, x: TensorView) -> TensorView:
    return t.ops.permute(x, [0, 1, 3, 2])


def _repeated(t: Translation, x: TensorView, groups: int) -> TensorView:
    """Each head of keys or values for the heads of queries that share it."""
    if groups == 1:
        return x
    b, h, s, e = x.type.shape
    return t.reshape(t.expand(t.unsqueeze(x, 2), [b, h, groups, s, e]), [b, h * groups, s, e])


def _summed(t: Translation, x: TensorView, groups: int) -> TensorView:
    if groups == 1:
        return x
    b, h, s, e = x.type.shape
    return t.ops.sum(t.reshape(x, [b, h // groups, groups, s, e]), [2])
