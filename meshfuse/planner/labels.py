"""The labels of an op: the placements that its factor rule allows on the whole axes of a mesh, and what they cost."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator, Sequence

from ..costs import computation
from ..mesh import DeviceMesh
from ..ops.opdef import Call, Partial
from ..ops.rules import FactorKind, Rule
from ..placement.factors import NO_CARRY, Carry, Layouts, Placement, passes, placed, representable
from ..placement.options import EARLIER, work
from ..sharding import layout as lay
from ..sharding.layout import WHOLE, Split
from ..sharding.value import canonical_partial
from .reshard_costs import whole_axes

_CARRIED = -1


@functools.lru_cache(maxsize=1 << 12)
def axis_labels(call: Call, rule: Rule, mesh: DeviceMesh) -> tuple[Placement, ...]:
    """Every way to put each axis on one factor, on none, or under the terms of operands that the op carries."""
    return distinct(_enumerated(call, rule, mesh))


def distinct(placements: Iterator[Placement] | Sequence[Placement]) -> tuple[Placement, ...]:
    """Of placements with the same operands and results the first."""
    found: dict[tuple[object, ...], Placement] = {}
    for placement in placements:
        found.setdefault((placement.operands, placement.results, placement.carry.operands, placement.move), placement)
    return tuple(found.values())


def _enumerated(call: Call, rule: Rule, mesh: DeviceMesh) -> Iterator[Placement]:
    axes, carried = whole_axes(mesh), carried_operands(call, rule)
    free = [f for f, factor in enumerate(rule.factors) if factor.kind is not FactorKind.BLOCK]
    places = [None, *free, *([_CARRIED] if carried else [])]
    for at in itertools.product(places, repeat=len(axes)):
        layouts = _layouts(rule, axes, at)
        if layouts is None:
            continue
        terms = canonical_partial([axis for axis, place in zip(axes, at, strict=True) if place == _CARRIED])
        carries = [Carry(terms, reduce, operands) for operands, reduce in carried] if terms else [NO_CARRY]
        found = (placed(call, rule, mesh, layouts, carry) for carry in carries)
        yield from (placement for placement in found if placement is not None)


def _layouts(rule: Rule, axes: Sequence[Split], at: Sequence[int | None]) -> Layouts | None:
    """The factors' layouts; None where an axis cuts a factor unevenly, or one that no merged dim can show."""
    out = [WHOLE] * len(rule.factors)
    for axis, place in zip(axes, at, strict=True):
        if place is not None and place != _CARRIED:
            out[place] = lay.canonical((*out[place], axis), rule.factors[place].size)
    if any(layout and factor.size % lay.extent(layout) for layout, factor in zip(out, rule.factors, strict=True)):
        return None
    layouts = tuple(out)
    return layouts if representable(rule, layouts) == layouts else None


@functools.lru_cache(maxsize=1 << 12)
def carried_operands(call: Call, rule: Rule) -> tuple[tuple[tuple[int, ...], str], ...]:
    """The sets of operands whose terms the op carries to its results, and the reduction."""
    count = len(call.types)
    if call.op.partial is Partial.NONE or not count:
        return ()
    sets = dict.fromkeys([*((i,) for i in range(count)), tuple(range(count)), tuple(range(1, count))])
    reduce = call.op.partial.reduce
    return tuple((operands, reduce) for operands in sets if operands and passes(call, rule, operands, reduce))


def own_seconds(call: Call, placement: Placement) -> float:
    """Seconds of one rank's computation, with what terms that may overflow are worth (`EARLIER`)."""
    risk = EARLIER if placement.carry.axes and call.op.partial.scales else 0.0
    return computation(work(call, placement), placement.results[0].mesh.flops) + risk
