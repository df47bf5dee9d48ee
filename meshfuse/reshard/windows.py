"""Slices and pads of sharded dims, and other orders of their blocks, as steps of exact pieces."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Sequence
from typing import NamedTuple

from ..mesh import DeviceMesh
from ..ops.local import plain_text
from ..ops.opdef import BlockOrder, Call
from ..ops.values import ScalarRef
from ..sharding import layout as lay
from ..sharding.value import Sharding, disjoint
from .steps import Reordering, Step, StepKind, Window, sampled_digits


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


class _Along(NamedTuple):
    """Of one dim and one rank: how many indices of the target it wants of those that exist, how many of these it has.

    holders: how many of the parts of the dim, among the rank's group, have some of them.
    """

    wanted: int
    there: int
    holders: int


def window_peers(step: Step) -> int:
    """From how many other ranks a rank gets something at most: one, if all is shifted by whole shards."""
    ranks = zip(*_along_dims(step), strict=True)
    return max([math.prod([d.holders for d in dims]) - all([d.there for d in dims]) for dims in ranks])


def window_wire(step: Step) -> float:
    """Elements that a rank gets from others: the mean over sampled ranks."""
    ranks = [*zip(*_along_dims(step), strict=True)]
    lacking = [math.prod([d.wanted for d in dims]) - math.prod([d.there for d in dims]) for dims in ranks]
    return sum(lacking) / len(lacking)


def _along_dims(step: Step) -> list[tuple[_Along, ...]]:
    """What is asked of each dim, of the ranks that prices are means over."""
    assert step.window is not None
    dim, runs = step.only if step.only is not None else (None, None)
    return [
        _along(step.window.along(d), old, new, step.src.mesh, runs if d == dim else None)
        for d, (old, new) in enumerate(zip(step.src.dims, step.dst.dims, strict=True))
    ]


@functools.lru_cache(maxsize=1 << 14)
def _along(
    window: Window | Reordering, old: lay.Layout, new: lay.Layout, mesh: DeviceMesh, only: lay.Runs | None
) -> tuple[_Along, ...]:
    """Of a window of one dim: what many windows have in common."""
    pairs = [*zip(sampled_digits(old, mesh), sampled_digits(new, mesh), strict=True)]
    # The ranks of a group are in different parts only along axes of dims that the step changes.
    parts = _parts(old, window, only) if old != new or window.changes(0) else None
    found = {pair: _along_of(window, (old, new), pair, parts, only) for pair in dict.fromkeys(pairs)}
    return tuple([found[pair] for pair in pairs])


def _along_of(
    window: Window | Reordering, layouts: tuple[lay.Layout, lay.Layout], digits: Sequence[tuple[int, ...]],
    parts: lay.Parts | None, only: lay.Runs | None,
) -> _Along:  # fmt: skip
    sizes = (*window.source_shape, *window.target_shape)
    have, want = (_cut(lay.runs(*of), only) for of in zip(layouts, sizes, digits, strict=True))
    (held,), (existing,) = window.to_target((have,)), window.to_target((lay.everything(sizes[0]),))
    wanted = lay.intersect(want, existing)
    there = lay.intersect(held, wanted)
    holders = int(bool(there)) if parts is None else len(parts.sharing(wanted))
    return _Along(lay.count(wanted), lay.count(there), holders)


def _cut(runs: lay.Runs, only: lay.Runs | None) -> lay.Runs:
    return runs if only is None else lay.intersect(runs, only)


@functools.lru_cache(maxsize=1 << 8)
def _parts(layout: lay.Layout, window: Window | Reordering, only: lay.Runs | None) -> lay.Parts:
    """The parts of the dim of the source, as indices of the target; found once for all ranks of a large mesh."""
    digits = itertools.product(*[range(split.size or 1) for split in lay.axes(layout)])
    held = [_cut(lay.runs(layout, window.source_shape[0], there), only) for there in digits]
    return lay.Parts([window.to_target((runs,))[0] for runs in held])
