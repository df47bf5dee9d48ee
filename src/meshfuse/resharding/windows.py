"""Slices and pads of sharded dims, and other orders of their blocks, as moves of exact pieces."""

from __future__ import annotations

import functools
import math

from ..ops.base import BlockOrder, Call, ScalarRef
from ..ops.local import plain_text
from ..sharding import layout as lay
from ..sharding.value import Sharding, disjoint
from .moves import Move, MoveKind, Reordering, Window


def window_of(call: Call) -> Window | Reordering | None:
    """The window that a call takes, None where it takes none or fills it with a number known only at run time."""
    found = call.op.window(call) if call.op.window is not None else None
    if isinstance(found, BlockOrder):
        return Reordering(call.types[0].shape, found.dim, found.order)
    if found is None or isinstance(found[1], ScalarRef):
        return None
    return Window(call.types[0].shape, call.results[0].shape, found[0], plain_text(found[1]))


def window_move(src: Sharding, dst: Sharding, window: Window | Reordering) -> Move:
    """The move from a tensor to its window among the ranks that differ along an axis of a dim that it changes."""
    rows = enumerate(zip(src.dims, dst.dims, strict=True))
    changed = [split for d, (a, b) in rows if a != b or window.changes(d) for split in (*lay.axes(a), *lay.axes(b))]
    return Move(MoveKind.WINDOW, disjoint(changed), src, dst, window)


@functools.lru_cache(maxsize=1 << 12)
def window_wire(move: Move, sample: int = 16) -> float:
    """Elements that a rank gets from others: the mean over up to 16 ranks."""
    assert move.window is not None
    ranks = move.src.mesh.ranks[:: max(1, move.src.mesh.size // sample)]
    lacking = 0
    for rank in ranks:
        held = move.window.to_target(move.held((), rank))
        everywhere = move.window.to_target(tuple(((0, n),) for n in move.window.source_shape))
        wanted = tuple(map(lay.intersect, move.wanted((), rank), everywhere))
        common = math.prod(lay.count(lay.intersect(a, b)) for a, b in zip(held, wanted, strict=True))
        lacking += math.prod(map(lay.count, wanted)) - common
    return lacking / len(ranks)
