"""Slices and pads of sharded dims, and other orders of their blocks, as steps of exact pieces."""

from __future__ import annotations

import functools
import itertools
import math

from ..ops.local import plain_text
from ..ops.opdef import BlockOrder, Call
from ..ops.values import ScalarRef
from ..sharding import layout as lay
from ..sharding.value import Sharding, disjoint
from .steps import Reordering, Step, StepKind, Window, lacking_numel, restricted, sampled_ranks


def window_of(call: Call) -> Window | Reordering | None:
    """The window that a call takes of its operand.

    None where it takes none, or fills it with a number that only the run tells.
    """
    found = call.op.window(call) if call.op.window is not None else None
    if isinstance(found, BlockOrder):
        return Reordering(call.types[0].shape, found.dim, found.order)
    if found is None or isinstance(found[1], ScalarRef):
        return None
    return Window(call.types[0].shape, call.results[0].shape, found[0], plain_text(found[1]))


def window_step(src: Sharding, dst: Sharding, window: Window | Reordering) -> Step:
    """The step from a tensor to its window, among ranks that differ along the axes of the dims that it changes."""
    rows = enumerate(zip(src.dims, dst.dims, strict=True))
    changed = [split for d, (a, b) in rows if a != b or window.changes(d) for split in (*lay.axes(a), *lay.axes(b))]
    return Step(StepKind.WINDOW, disjoint(changed), src, dst, window)


def _indices(step: Step, rank: int) -> tuple[tuple[lay.Runs, ...], tuple[lay.Runs, ...]]:
    """Of one dim, what a rank has and what it wants of what exists, both as indices of the target."""
    assert step.window is not None
    wanted = tuple(map(lay.intersect, step.wanted((), rank), _existing(step.window)))
    return step.window.to_target(step.held((), rank)), wanted


@functools.lru_cache(maxsize=1 << 8)
def _existing(window: Window | Reordering) -> tuple[lay.Runs, ...]:
    """All of the source, as indices of the target."""
    return window.to_target(tuple(((0, n),) for n in window.source_shape))


@functools.lru_cache(maxsize=1 << 6)
def _sampled(step: Step) -> list[tuple[tuple[lay.Runs, ...], tuple[lay.Runs, ...]]]:
    """`_indices` of the ranks that prices are means over: of a step both its peers and its elements are asked."""
    return [_indices(step, rank) for rank in sampled_ranks(step.src.mesh)]


@functools.lru_cache(maxsize=1 << 12)
def window_peers(step: Step) -> int:
    """From how many other ranks a rank gets something at most: one, if all is shifted by whole shards."""
    most = 0
    for held, wanted in set(_sampled(step)):
        sides = enumerate(zip(held, wanted, strict=True))
        holders = math.prod([_holders(step, dim, *side) for dim, side in sides])
        most = max(most, holders - all(map(lay.intersect, held, wanted)))
    return most


def _holders(step: Step, dim: int, held: lay.Runs, wanted: lay.Runs) -> int:
    """How many of the parts of a dim, among the rank's group, have something that it wants."""
    assert step.window is not None
    if step.src.dims[dim] == step.dst.dims[dim] and not step.window.changes(dim):
        return bool(lay.intersect(held, wanted))  # its axes are not the step's: all of the group have the same
    return len(_parts(step.src.dims[dim], step.window, dim, step.only).sharing(wanted))


@functools.lru_cache(maxsize=1 << 8)
def _parts(layout: lay.Layout, window: Window | Reordering, dim: int, only: tuple[int, lay.Runs] | None) -> lay.Parts:
    """The parts of a dim of the source, as indices of the target; found once for all ranks of a large mesh."""
    digits = itertools.product(*[range(split.size or 1) for split in lay.axes(layout)])
    held = [lay.runs(layout, window.source_shape[dim], there) for there in digits]
    boxes = [tuple([runs if d == dim else () for d in range(len(window.source_shape))]) for runs in held]
    return lay.Parts([window.to_target(restricted(box, only))[dim] for box in boxes])


@functools.lru_cache(maxsize=1 << 12)
def window_wire(step: Step) -> float:
    """Elements that a rank gets from others: the mean over sampled ranks."""
    ranks = _sampled(step)
    return sum(lacking_numel(held, wanted) for held, wanted in ranks) / len(ranks)
