"""Which aten ops are written in others while a graph is captured: all that can be, but for those that have a rule."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch._decomp import core_aten_decompositions, decomposition_table

from .aten import has_rule

# Decompositions that are wrong for a joint graph: flash attention's on a CPU gives wrong gradients. Those of ops that
# change the layout in memory or draw numbers of other distributions come out in ops that have no rule either.
_WRONG = (
    "_scaled_dot_product_flash_attention_for_cpu", "as_strided_scatter", "dropout", "alpha_dropout", "unfold",
)  # fmt: skip


def _weight_norm_backward(
    grad: torch.Tensor, v: torch.Tensor, g: torch.Tensor, norms: torch.Tensor, dim: int
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """The gradients of g v / |v|, whose norms are along all dims but one."""
    others = [d for d in range(v.ndim) if d != dim % v.ndim]
    along = (grad * v).sum(others, keepdim=True) / norms
    return g / norms * (grad - v * along / norms), along.to(g.dtype)


# torch has none.
_OWN: dict[Any, Callable[..., Any]] = {torch.ops.aten._weight_norm_interface_backward.default: _weight_norm_backward}


@functools.cache
def _all() -> dict[Any, Callable[..., Any]]:
    """torch's decompositions of aten ops, the core ones before others."""
    others = {op: function for op, function in decomposition_table.items() if str(op).startswith("aten.")}
    found = others | dict(core_aten_decompositions()) | _OWN
    return {op: function for op, function in found.items() if _name(op) not in _WRONG}


def _name(op: Any) -> str:
    return str(op).removeprefix("aten.").partition(".")[0]


def decompositions() -> dict[Any, Callable[..., Any]]:
    """The decompositions of all ops that have no rule."""
    return {op: function for op, function in _all().items() if not has_rule(op)}
