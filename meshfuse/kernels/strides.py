"""The order of dims in memory."""

from __future__ import annotations

import torch


def in_stride_order(x: torch.Tensor, order: list[int]) -> torch.Tensor:
    """The same values in the memory order of nvFuser's stride order, in which 0 is the fastest dim."""
    by_stride = sorted(range(x.ndim), key=lambda d: -order[d])
    back = [by_stride.index(d) for d in range(x.ndim)]
    return x.permute(by_stride).contiguous().permute(back)
