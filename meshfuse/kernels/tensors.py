"""Tensors made of numbers, and tensors in an order in memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch


def tensor_like(value: Any, like: Any) -> torch.Tensor:
    """A number as a tensor that promotes with `like` as the number would; a tensor as it is."""
    if isinstance(value, torch.Tensor):
        return value
    dtype = like.dtype if isinstance(like, torch.Tensor) else None
    device = like.device if isinstance(like, torch.Tensor) else "cpu"
    return torch.tensor(value, dtype=dtype, device=device)


def in_stride_order(x: torch.Tensor, order: list[int]) -> torch.Tensor:
    """The same values in the memory order of nvFuser's stride order, in which 0 is the fastest dim."""
    by_stride = sorted(range(x.ndim), key=lambda d: -order[d])
    back = [by_stride.index(d) for d in range(x.ndim)]
    return x.permute(by_stride).contiguous().permute(back)


# An attribute of what stands for a ragged tensor outside of programs: its rows.
ROWS = "meshfuse_rows"


def stand_in(rows: torch.Tensor, shape: Sequence[int], carried: Any = None) -> torch.Tensor:
    """A tensor of this shape that takes no memory, and carries the rows of a ragged one out of a program.

    carried: what it carries in their place.
    """
    out = rows.new_zeros(()).expand(tuple(shape))
    setattr(out, ROWS, rows if carried is None else carried)
    return out
