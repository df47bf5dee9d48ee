"""Which aten ops are written in others while a graph is captured: all that can be, but for those that have a rule."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from torch._decomp import core_aten_decompositions, decomposition_table

from .aten import has_rule

# Decompositions that are wrong for a joint graph: flash attention's on a CPU gives wrong gradients. Those of ops that
# change the layout in memory or draw numbers of other distributions come out in ops that have no rule either.
_WRONG = (
    "_scaled_dot_product_flash_attention_for_cpu", "as_strided_scatter", "dropout", "alpha_dropout", "unfold",
)  # fmt: skip


@functools.cache
def _all() -> dict[Any, Callable[..., Any]]:
    """torch's decompositions of aten ops, the core ones before others."""
    others = {op: function for op, function in decomposition_table.items() if str(op).startswith("aten.")}
    found = others | dict(core_aten_decompositions())
    return {op: function for op, function in found.items() if _name(op) not in _WRONG}


def _name(op: Any) -> str:
    return str(op).removeprefix("aten.").partition(".")[0]


def decompositions() -> dict[Any, Callable[..., Any]]:
    """The decompositions of all ops that have no rule."""
    return {op: function for op, function in _all().items() if not has_rule(op)}
