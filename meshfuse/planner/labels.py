"""The labels of an op: the placements that its factor rule allows on the whole axes of a mesh, and what they cost."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

from ..mesh import DeviceMesh
from ..ops.opdef import Call, Partial
from ..ops.rules import FactorKind, Rule
from ..ops.values import TensorType
from ..placement.exchanges import exchange_placements, exchange_seconds
from ..placement.factors import NO_CARRY, Carry, Layouts, Placement, passes, placer, representable
from ..placement.options import EARLIER, window_seconds
from ..placement.roofline import Roofline
from ..sharding import layout as lay
from ..sharding.layout import WHOLE, Layout, Split
from ..sharding.value import canonical_partial, fit_together
from .reshard_costs import Atoms

_CARRIED = -1


class Spot(NamedTuple):
    """How a label was made: the layouts it starts from, and by atom the factor that it is on, None, or carried.

    `order` is that of the atoms on one factor, major to minor, by their numbers.
    """

    start: Layouts
    at: tuple[int | None, ...]
    order: tuple[int, ...]


def nowhere(rule: Rule, atoms: Atoms) -> Spot:
    """All atoms on nothing."""
    return Spot((WHOLE,) * len(rule.factors), (None,) * len(atoms), tuple(range(len(atoms))))


class Label(NamedTuple):
    """A placement of an op; `spot` is None for a window."""

    placement: Placement
    spot: Spot | None


class Near(NamedTuple):
    """The labels that differ from one in where some atoms are, by their numbers."""

    spot: Spot
    free: frozenset[int]


def axis_labels(
    call: Call, rule: Rule, mesh: DeviceMesh, atoms: Atoms,
    special: tuple[Layouts, ...] = (), reductions: tuple[Layout, ...] = (), near: Near | None = None,
) -> tuple[Label, ...]:  # fmt: skip
    """Every way to put each axis on one factor, on none, or under the terms of operands that the op carries.

    special: layouts that some annotation asks for and that no axis on a factor gives (`special_layouts`). Each is a
        start, to which the other axes are added.
    reductions: the layouts that the user gave the factors that are reduced, in the rule's order; () where none.
    near: only the labels near one, from its own start and the special ones.
    """
    # Ops whose dims go the same ways have the same labels.
    alike, carried = _alike(rule.factors, rule.operands, rule.results), carried_operands(call, rule)
    found = _axis_labels(call.types, call.results, alike, carried, mesh, atoms, special, reductions, near)
    return found if call.op.exchange is None else _with_exchanges(call, rule, found)


_alike = functools.lru_cache(maxsize=1 << 12)(Rule)
# Sets of operands whose terms are carried, and the reduction.
_Carried = tuple[tuple[tuple[int, ...], str], ...]


@functools.lru_cache(maxsize=1 << 12)
def _axis_labels(
    types: tuple[TensorType, ...], made: tuple[TensorType, ...], rule: Rule, carried: _Carried, mesh: DeviceMesh,
    atoms: Atoms, special: tuple[Layouts, ...], reductions: tuple[Layout, ...], near: Near | None,
) -> tuple[Label, ...]:  # fmt: skip
    first = (WHOLE,) * len(rule.factors) if near is None else near.spot.start
    starts = [_with_reductions(rule, start, reductions) for start in (first, *special)]
    starts = [start for start in starts if _is_possible(start)]
    kinds = (FactorKind.BLOCK, FactorKind.REDUCE) if reductions else (FactorKind.BLOCK,)
    free = tuple(f for f, factor in enumerate(rule.factors) if factor.kind not in kinds)
    ways = _Ways(rule, carried, atoms, free, near)
    place = placer(types, made, rule, mesh).placed
    each = (_enumerated(ways, start, place) for start in dict.fromkeys(starts))
    found = distinct(itertools.chain.from_iterable(each))
    if found or not reductions:
        return found
    # Layouts of reductions that no placement can have are left out.
    return _axis_labels(types, made, rule, carried, mesh, atoms, special, (), near)


class _Ways(NamedTuple):
    """What labels of an op are made of: the atoms, and the factors on which they may be."""

    rule: Rule
    carried: _Carried
    atoms: Atoms
    free: tuple[int, ...]
    near: Near | None


@functools.lru_cache(maxsize=1 << 10)
def _with_exchanges(call: Call, rule: Rule, labels: tuple[Label, ...]) -> tuple[Label, ...]:
    """Labels, and those in which rows also go between ranks along their axes."""
    return distinct(
        Label(placement, label.spot)
        for label in labels for placement in exchange_placements(call, rule, label.placement)
    )  # fmt: skip


def _with_reductions(rule: Rule, start: Layouts, reductions: tuple[Layout, ...]) -> Layouts:
    given = iter(reductions)
    return tuple([
        lay.canonical(next(given), factor.size) if reductions and factor.kind is FactorKind.REDUCE else layout
        for factor, layout in zip(rule.factors, start, strict=True)
    ])  # fmt: skip


def _is_possible(layouts: Layouts) -> bool:
    """Whether no part of an axis is on two factors."""
    return fit_together(split for layout in layouts for split in lay.axes(layout))


def distinct(labels: Iterable[Label]) -> tuple[Label, ...]:
    """Of labels with the same operands and results the first."""
    found: dict[tuple[object, ...], Label] = {}
    for label in labels:
        found.setdefault(identity(label.placement), label)
    return tuple(found.values())


def identity(placement: Placement) -> tuple[object, ...]:
    """What tells labels apart."""
    return placement.operands, placement.results, placement.carry.operands, placement.step


def _enumerated(ways: _Ways, start: Layouts, place: Callable[[Layouts, Carry], Placement | None]) -> Iterator[Label]:
    rule, carried, atoms, free, near = ways
    in_parts = len({atom.axis for atom in atoms}) < len(atoms)
    for at in _spots(atoms, start, [None, *free, *([_CARRIED] if carried else [])], near):
        carries = _carries(carried, atoms, at) if _CARRIED in at else (NO_CARRY,)
        for order in _orders(atoms, at, near):
            for layouts in _layouts(rule, start, atoms, at, order, in_parts):
                found = [place(layouts, carry) for carry in carries]
                yield from [Label(placement, Spot(start, at, order)) for placement in found if placement is not None]


def _carries(carried: _Carried, atoms: Atoms, at: Sequence[int | None]) -> tuple[Carry, ...]:
    """What may be carried where some atoms are under terms of operands."""
    terms = canonical_partial([axis for axis, place in zip(atoms, at, strict=True) if place == _CARRIED])
    return tuple([Carry(terms, reduce, operands) for operands, reduce in carried]) if terms else (NO_CARRY,)


def _spots(
    atoms: Atoms, start: Layouts, places: Sequence[int | None], near: Near | None
) -> Iterable[tuple[int | None, ...]]:
    """Where atoms may be; those of axes that the start uses are on nothing else."""
    used = {split.axis for layout in start for split in layout if split.bound}
    ways: list[Sequence[int | None]] = [
        (None,) if atom.axis in used else places if near is None or n in near.free else (near.spot.at[n],)
        for n, atom in enumerate(atoms)
    ]
    return itertools.product(*ways)


def _orders(atoms: Atoms, at: Sequence[int | None], near: Near | None) -> Iterator[tuple[int, ...]]:
    """The orders of axes, whose parts stay together, that differ on some factor; those near a label differ in atoms."""
    groups: dict[int | None, dict[str | None, list[int]]] = {}
    for n, place in enumerate(at):
        groups.setdefault(place, {}).setdefault(atoms[n].axis, []).append(n)
    if all([len(group) == 1 for group in groups.values()]):
        yield tuple([n for group in groups.values() for axis in group.values() for n in axis])
        return
    ways = [_arranged(place, [*group.values()], near) for place, group in groups.items()]
    yield from (tuple(itertools.chain.from_iterable(order)) for order in itertools.product(*ways))


def _arranged(place: int | None, axes: Sequence[Sequence[int]], near: Near | None) -> list[tuple[int, ...]]:
    """The orders of some axes, each in its atoms, on one factor; atoms that are not free keep theirs."""
    if place is None or place == _CARRIED or len(axes) == 1:
        return [tuple(itertools.chain.from_iterable(axes))]
    orders = [tuple(itertools.chain.from_iterable(order)) for order in itertools.permutations(axes)]
    if near is None:
        return orders
    there = [n for n in near.spot.order if n in orders[0] and n not in near.free]
    return [order for order in orders if [n for n in order if n not in near.free] == there]


def _layouts(
    rule: Rule, start: Layouts, axes: Sequence[Split], at: Sequence[int | None], order: Sequence[int], in_parts: bool
) -> Iterator[Layouts]:
    """The factors' layouts; none where an axis cuts a factor unevenly, or where no merged dim can show them.

    Of an axis in parts the minor ones alone may lie in blocks, or as gathering the major ones leaves them: in strides.
    """
    placed = [(n, place) for n in order for place in (at[n],) if place is not None and place != _CARRIED]
    for strides in (False, True) if in_parts and _has_gaps(axes, at) else (False,):
        out = list(start)
        for n, place in placed:
            gap = _gap(axes, at, n) if strides else 1
            out[place] = (*out[place], *((Split(gap), axes[n]) if gap > 1 else (axes[n],)))
        fits = True
        for place, n in [(f, factor.size) for f, factor in enumerate(rule.factors) if out[f]]:
            out[place] = lay.canonical(out[place], n)
            fits = fits and (out[place] == start[place] or _fits(out[place], n))
        layouts = tuple(out)
        if fits and representable(rule, layouts) == layouts:
            yield layouts


def _fits(layout: Layout, n: int) -> bool:
    """Whether all blocks are of one size, or axes cut a size that they do not divide, and most ranks have some."""
    extent = lay.extent(layout)
    return not n % extent or extent < 2 * n


def _has_gaps(axes: Sequence[Split], at: Sequence[int | None]) -> bool:
    return any(_gap(axes, at, n) > 1 for n, place in enumerate(at) if place is not None and place != _CARRIED)


def _gap(axes: Sequence[Split], at: Sequence[int | None], n: int) -> int:
    """How many blocks the more major parts of an axis, just before this one, would cut the factor into."""
    gap = 1
    for m in reversed(range(n)):
        if axes[m].axis != axes[n].axis or at[m] == at[n]:
            break
        gap *= axes[m].size or 1
    return gap


@functools.lru_cache(maxsize=1 << 12)
def carried_operands(call: Call, rule: Rule) -> tuple[tuple[tuple[int, ...], str], ...]:
    """The sets of operands whose terms the op carries to its results, and the reduction."""
    count = len(call.types)
    if call.op.partial is Partial.NONE or not count:
        return ()
    sets = dict.fromkeys([*((i,) for i in range(count)), tuple(range(count)), tuple(range(1, count))])
    reduce = call.op.partial.reduce
    return tuple((operands, reduce) for operands in sets if operands and passes(call, rule, operands, reduce))


@functools.lru_cache(maxsize=1 << 14)
def others(placement: Placement, axis: str) -> tuple[object, ...]:
    """On which dims of an op's operands and results all axes but one are, in any order, and which are unreduced."""
    return tuple([
        (*[frozenset([s.axis for s in layout if s.bound and s.axis != axis]) for layout in sharding.dims],
         frozenset([s.axis for s in sharding.partial if s.axis != axis]))
        for sharding in (*placement.operands, *placement.results)
    ])  # fmt: skip


def own_seconds(call: Call, placement: Placement, roofline: Roofline) -> float:
    """Seconds of one rank's computation, with what terms that may overflow are worth (`EARLIER`).

    Of a window, whose step does the op's work, the step's.
    """
    if placement.step is not None:
        return window_seconds(call, placement)
    moved = exchange_seconds(call, placement) if placement.exchange else 0.0
    risk = EARLIER if placement.carry.axes and call.op.partial.scales else 0.0
    return roofline.seconds(placement) + risk + moved
