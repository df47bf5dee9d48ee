"""Slices and pads of sharded dims, and other orders of their blocks, as moves of exact pieces."""

from __future__ import annotations

import functools

from ..ops.base import BlockOrder, Call, ScalarRef
from ..ops.local import plain_text
from ..sharding import layout as lay
from ..sharding.value import Sharding, disjoint
from .move import Move, MoveKind, Reordering, Window, lacking_numel, sampled_ranks


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


def _indices(move: Move, rank: int) -> tuple[tuple[lay.Runs, ...], tuple[lay.Runs, ...]]:
    """What a rank has and what it wants of what there is, both as indices of the target."""
    assert move.window is not None
    everywhere = move.window.to_target(tuple(((0, n),) for n in move.window.source_shape))
    wanted = tuple(map(lay.intersect, move.wanted((), rank), everywhere))
    return move.window.to_target(move.held((), rank)), wanted


@functools.lru_cache(maxsize=1 << 12)
def window_peers(move: Move) -> int:
    """From how many others a rank gets something, at most: one where all is shifted by whole shards."""
    assert move.window is not None
    most = 0
    for rank in sampled_ranks(move.src.mesh):
        held, wanted = _indices(move, rank)
        others = {move.window.to_target(move.held((), peer)) for peer in move.group(rank)} - {held}
        most = max(most, sum(all(map(lay.intersect, other, wanted)) for other in others))
    return most


@functools.lru_cache(maxsize=1 << 12)
def window_wire(move: Move) -> float:
    """Elements that a rank gets from others: the mean over some ranks."""
    ranks = sampled_ranks(move.src.mesh)
    return sum(lacking_numel(*_indices(move, rank)) for rank in ranks) / len(ranks)
