"""Tensors in the order of rows in which a plan carries them (`rewrites.carry_block_orders`)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..definition.tensor_view import TensorView
from ..graph import Carried


def in_order(fd: Any, x: TensorView, carried: Carried) -> TensorView:
    """A tensor of the definition in the order in which it is carried."""
    return _reordered(fd, x, carried, carried.order)


def in_sequence(fd: Any, x: TensorView, carried: Carried) -> TensorView:
    """The inverse of `in_order`."""
    order = carried.order
    return _reordered(fd, x, carried, sorted(range(len(order)), key=order.__getitem__))


def _reordered(fd: Any, x: TensorView, carried: Carried, order: Sequence[int]) -> TensorView:
    shape, dim, outer = list(x.type.shape), carried.dim, carried.outer
    if outer == 1:
        return fd.ops.reorder_blocks(x, dim, list(order))
    apart = fd.ops.reshape(x, [*shape[:dim], outer, shape[dim] // outer, *shape[dim + 1 :]])
    return fd.ops.reshape(fd.ops.reorder_blocks(apart, dim + 1, list(order)), shape)
