"""Attention, captured as one op (`frontends/sdpa.py`), in ops of a definition."""

from __future__ import annotations

from typing import Any

from ...definition.tensor_view import TensorView
from ...dtypes import DataType
from ...ops.attention.operands import STATE
from ..sdpa import BACKWARD, ENTER, FORWARD, LEAVE
from .ring import Ring
from .table import Translation, rule

_HEADS = 4  # The dims of a query: batch, heads, rows, width.


@rule(FORWARD)
def _forward(
    t: Translation, query: TensorView, key: TensorView, value: TensorView, mask: Any, dropout_p: float,
    is_causal: bool, scale: float | None,
) -> tuple[TensorView, ...]:  # fmt: skip
    missing = _HEADS - query.ndim
    q, k, v = (_lifted(t, x, missing) for x in (query, key, value))
    if t.spread is not None and t.spread.ring:
        out, lse = _ring(t, q, k, mask, is_causal, scale).forward((q, k, v))
        state = [t.ops.full(list(x.shape), 0, x.dtype) for x in STATE]
    else:
        out, lse, *state = t.ops.sdpfa_fwd(
            q, k, v, **_added(t, mask), dropout_p=dropout_p or None, is_causal=is_causal, scale=scale
        )
    return _lowered(t, out, missing), _lowered(t, lse, missing), *state


@rule(BACKWARD)
def _gradients(
    t: Translation, grad: TensorView, query: TensorView, key: TensorView, value: TensorView, mask: Any,
    output: TensorView, logsumexp: TensorView, seed: TensorView, offset: TensorView, dropout_p: float,
    is_causal: bool, scale: float | None,
) -> tuple[TensorView, ...]:  # fmt: skip
    missing = _HEADS - query.ndim
    lifted = [_lifted(t, x, missing) for x in (grad, query, key, value, output, logsumexp)]
    if t.spread is not None and t.spread.ring:
        made = _ring(t, lifted[1], lifted[2], mask, is_causal, scale).backward(lifted[:5], lifted[5])
    else:
        made = t.ops.sdpfa_bwd(*lifted, dropout_p, is_causal, seed, offset, scale, **_added(t, mask))
    return tuple(_lowered(t, x, missing) for x in made)


@rule(ENTER)
def _enter(t: Translation, x: TensorView) -> TensorView:
    return x if t.spread is None else t.spread.entered(t.fd, x)


@rule(LEAVE)
def _leave(t: Translation, x: TensorView, _: bool) -> TensorView:
    return x if t.spread is None else t.spread.left(t.fd, x)


def _ring(t: Translation, q: TensorView, k: TensorView, mask: Any, is_causal: bool, scale: float | None) -> Ring:
    assert t.spread is not None
    return Ring(t, t.spread, q.type.shape[-2], k.type.shape[-2], is_causal, scale, _added(t, mask))


def _lifted(t: Translation, x: TensorView, dims: int) -> TensorView:
    return t.ops.broadcast(x, [True] * dims + [False] * x.ndim) if dims > 0 else x


def _lowered(t: Translation, x: TensorView, dims: int) -> TensorView:
    return t.ops.squeeze(x, list(range(dims))) if dims > 0 else x


def _added(t: Translation, mask: Any) -> dict[str, TensorView]:
    """What is added to the scores, by the name of sdpfa_fwd's parameter."""
    if mask is None:
        return {}
    return {"mask" if mask.dtype is DataType.Bool else "bias": mask}
