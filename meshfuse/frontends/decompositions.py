"""Which aten ops are written in others while a graph is captured: all that can be, but for those that have a rule."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection
from typing import Any

import torch
from torch._decomp import core_aten_decompositions, decomposition_table

# Decompositions that are wrong for a joint graph: flash attention's on a CPU gives wrong gradients.
_WRONG = ("_scaled_dot_product_flash_attention_for_cpu",)
# Ops of which `core_aten_decompositions` has none, and that models have.
_MORE = (
    "native_layer_norm", "native_group_norm", "_native_batch_norm_legit_functional", "_native_batch_norm_legit",
    "_native_batch_norm_legit_no_training", "native_batch_norm", "native_batch_norm_backward", "max_pool2d_with_indices_backward", "native_layer_norm_backward",
    "native_group_norm_backward", "_fused_rms_norm", "_fused_rms_norm_backward", "upsample_nearest2d", "upsample_bilinear2d",
    "nll_loss_forward", "nll_loss_backward", "nll_loss2d_forward", "nll_loss2d_backward", "_softmax", "_log_softmax",
    "_softmax_backward_data", "_log_softmax_backward_data", "squeeze", "addcdiv", "softplus", "grid_sampler_2d",
)  # fmt: skip


@functools.cache
def _all() -> dict[Any, Callable[..., Any]]:
    found = dict(core_aten_decompositions())
    for name in _MORE:
        packet = getattr(torch.ops.aten, name, None)
        for overload in packet.overloads() if packet is not None else ():
            op = getattr(packet, overload)
            if op in decomposition_table:
                found[op] = decomposition_table[op]
    return {op: function for op, function in found.items() if _name(op) not in _WRONG}


def _name(op: Any) -> str:
    return str(op).removeprefix("aten.").partition(".")[0]


def decompositions(kept: Collection[Any]) -> dict[Any, Callable[..., Any]]:
    """The decompositions of all ops but those that are `kept`."""
    return {op: function for op, function in _all().items() if op not in kept}
