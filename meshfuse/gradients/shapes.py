"""VJPs of ops that move, repeat and cut elements along dims."""

from __future__ import annotations

from ..ops.vjp import Vjp, each, sizes

SUM_TO: Vjp = each(arg=lambda b: b.ops.expand(b.grad, sizes(b["arg"])))
SIZED: Vjp = each(arg=lambda b: b.grad)
TRIU: Vjp = each(arg=lambda b: b.ops.triu(b.grad, b["diagonal"]))
