"""The placement chosen for an op, and the placements in which a step of exact pieces does an op's work."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from ..fast_dataclass import quickly_made
from ..ops.opdef import Call
from ..ops.rules import Rule
from ..reshard.prices import price
from ..reshard.search import plan
from ..reshard.steps import Reordering, Window
from ..reshard.windows import window_of, window_step
from ..sharding import layout as lay
from ..sharding.layout import WHOLE
from ..sharding.value import Sharding
from .factors import Placement
from .roofline import Stored, computing_seconds

SourceKind = Literal["operand", "result", "carry", "whole", "pieces"]


class Source(NamedTuple):
    """What an op's placement follows.

    An operand or result, the unreduced terms of an operand (carry), pieces that ranks lack, or nothing: it is whole.
    """

    kind: SourceKind
    place: int = 0


class RunnerUp(NamedTuple):
    """The next best placement of an op: what it follows, its modelled seconds, and where operands and results lie."""

    source: Source
    seconds: float
    operands: tuple[Sharding, ...]
    results: tuple[Sharding, ...]


@quickly_made
@dataclass(frozen=True, slots=True)
class Choice:
    """The placement of one op, what it follows, its modelled seconds, and the next best option at this op."""

    placement: Placement
    source: Source
    seconds: float
    runner_up: RunnerUp | None = None


# Seconds by which it must pay to multiply or divide the terms of a sum rather than the sum: a term may overflow, or be
# 0 times infinity, where the sum is not. As much as tells costs apart, so that it decides between equal ones only.
EARLIER = 2e-11


def window_placements(
    call: Call, rule: Rule, sources: Iterable[Sharding], wanted: Sequence[Sharding]
) -> Iterator[Placement]:
    """Placements in which a step of exact pieces does the op's work; none if it takes no window.

    sources: where the operand may be.
    wanted: where the result may be asked for, beside where the operand has most of it and in shared blocks.
    """
    window = window_of(call)
    if window is None:
        return
    for source in sources:
        if not source.partial and _cuts(window, source):
            for target in _window_targets(source, window, wanted):
                step = window_step(source, target, window)
                yield Placement((WHOLE,) * len(rule.factors), (source,), (target,), step=step)


def window_seconds(call: Call, placement: Placement) -> float:
    """Seconds of a step that does an op's work, by sending the pieces: as a reshard, it computes nothing."""
    ttype = call.types[0]
    assert placement.step is not None
    return price(placement.step, ttype.shape, ttype.dtype.itemsize).seconds


def _cuts(window: Window | Reordering, src: Sharding) -> bool:
    """True where a dim that the op changes is sharded."""
    return any(layout and window.changes(d) for d, layout in enumerate(src.dims))


def _window_targets(src: Sharding, window: Window | Reordering, wanted: Sequence[Sharding]) -> list[Sharding]:
    """Shardings for the window: where the operand has most of it, in shared blocks, or as someone asks."""
    shape = window.target_shape
    dims = [lay.axes(d) if m != n else d for d, n, m in zip(src.dims, window.source_shape, shape, strict=True)]
    shared = [_shared(src, window)] if isinstance(window, Window) else []
    return list(dict.fromkeys([Sharding.make(src.mesh, dims, shape), *filter(None, shared), *wanted]))


def _shared(src: Sharding, window: Window) -> Sharding | None:
    """The sharding of a slice that shares its blocks with the ranks that hold the same blocks of other slices.

    If a gated unit's rows are (gate, up) and the dim is split over ranks, half of these have gate and the others up; so
    sliced, gate and up come to lie alike. None where a dim is not made of whole slices, or these of whole blocks.
    """
    dims = list(src.dims)
    rows = zip(src.dims, window.source_shape, window.target_shape, window.offsets, strict=True)
    for dim, (layout, n, m, offset) in enumerate(rows):
        if n != m:
            parts = lay.project(layout, n, (n // m, m)) if m and n % m == 0 and offset % m == 0 else None
            if parts is None or m % lay.extent(layout):
                return None
            dims[dim] = (*parts[1], *parts[0])
    return Sharding.make(src.mesh, dims, window.target_shape)


def cheapest(available: Sequence[Sharding], needed: Sharding, shape: tuple[int, ...], itemsize: int) -> float:
    """Modelled seconds of the cheapest reshard from any sharding in `available`; inf where there is none."""
    if needed in available:
        return 0.0
    plans = [plan(have, needed, shape, itemsize) for have in available]
    return min((p.seconds for p in plans if p is not None), default=math.inf)


def op_seconds(
    call: Call, placement: Placement, shardings: tuple[Sharding, ...], ends: tuple[Sharding, ...], stored: Stored
) -> float:
    """Seconds of an op and its reshards, if its operands lie in these shardings, and its results are brought there."""
    brought = zip(shardings, placement.operands, call.types, strict=True)
    done = zip(placement.results, ends, call.results, strict=True)
    wire = [cheapest((have,), need, t.shape, t.dtype.itemsize) for have, need, t in (*brought, *done)]
    return sum(wire) + computing_seconds(call, placement, stored)
