"""The layouts that an op's factors may have: what operands and results ask for, and what thorough searches add."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from ..fast_dataclass import quickly_made
from ..mesh import DeviceMesh
from ..ops.opdef import Call
from ..ops.rules import FactorKind, Rule
from ..sharding import layout as lay
from ..sharding.layout import WHOLE, Layout, Split
from ..sharding.value import Sharding, conflicting
from .factors import Layouts, displaced, layouts_of, merged, moved, reduces, representable, without_reductions

# The shardings in which a tensor exists, the one that its op (or an annotation) gave it first.
Available = tuple[Sharding, ...]


@quickly_made
@dataclass(frozen=True, slots=True, eq=False)
class Setting:
    """What the placements of a node depend on; one object for equal ones, so that each is worked out once.

    `known[i]` are shardings that operand i has in some plan. `wanted[j]` are those that someone asks of result j; if
    `fixed[j]`, it is the result's annotation. `reductions` are layouts that the user gave the op's reduction dims.
    """

    call: Call
    rule: Rule
    mesh: DeviceMesh
    known: tuple[Available, ...]
    wanted: tuple[Available, ...]
    fixed: tuple[bool, ...]
    reductions: tuple[Layout, ...]
    thorough: int


# Equal settings, as those of equal layers, are one object.
setting_of = functools.lru_cache(maxsize=1 << 13)(Setting)


# What a placement follows: the sharding of an operand, what a result is wanted as, an operand's unreduced terms; or
# nothing, whole on every rank; or it is a move of exact pieces.
SourceKind = Literal["operand", "result", "carry", "whole", "pieces"]


class Source(NamedTuple):
    """What a placement follows; `place` tells which operand or result."""

    kind: SourceKind
    place: int = 0
    split_reduction: bool = True


# What asks, and how it would have the op's factors laid out.
Vote = tuple[Source, Layouts]
# So many ways to put axes on an op's factors are tried at most.
MOST_WAYS = 64


def votes_of(setting: Setting) -> list[Vote]:
    """The factor layouts that each operand and each wanted result asks for; equal ones once."""
    votes: dict[Layouts, Source] = {}
    for i in range(len(setting.known)):
        for vote in _operand_votes(setting, i):
            votes.setdefault(vote, Source("operand", i))
    for j, wanted in enumerate(setting.wanted):
        for sharding in wanted:
            if sharding.mesh == setting.mesh:
                vote = layouts_of(setting.rule, setting.rule.results[j], setting.call.results[j].shape, sharding.dims)
                votes.setdefault(vote, Source("result", j))
    return [(source, vote) for vote, source in votes.items()]


def asked_for(setting: Setting, votes: tuple[Vote, ...]) -> Iterator[Vote]:
    """All layouts that operands and results ask for.

    Each vote, alone and refined by the others; the op whole on every rank; and, for products, each vote with what the
    others ask for beyond the axes that the first one has taken.
    """
    rule = setting.rule
    yield from _agreed(rule, votes, tuple(_displaced_votes(setting)), setting.reductions)
    yield Source("whole"), _with_reductions(rule, setting.reductions, (WHOLE,) * len(rule.factors))
    if _is_product(rule) and not setting.reductions:
        yield from _beyond(rule, votes)


def unasked(setting: Setting, votes: Sequence[Vote]) -> Iterator[Vote]:
    """Layouts that nobody asks for as they are."""
    yield from (reassigned if _is_product(setting.rule) else _beyond)(setting.rule, votes)
    yield from _scattered(setting, votes)


def _is_product(rule: Rule) -> bool:
    """Whether several operands meet in the op and something is reduced."""
    return len(rule.operands) > 1 and reduces(rule)


@functools.lru_cache(maxsize=1 << 13)
def _agreed(
    rule: Rule, votes: tuple[Vote, ...], displaced: tuple[Vote, ...], reductions: tuple[Layout, ...]
) -> tuple[Vote, ...]:
    """Each vote refined by the others, and alone; and the same with reduced factors left whole."""
    found: dict[Layouts, Source] = {}
    for source, vote in (*votes, *displaced):
        order = _led_by(vote, votes)
        for agreed in (order, [vote]) if len(order) > 1 else (order,):
            layouts = representable(rule, _with_reductions(rule, reductions, merged(agreed)))
            found.setdefault(layouts, source)
            if not reductions and reduces(rule):
                passing = [without_reductions(rule, asked) for asked in agreed]
                found.setdefault(representable(rule, merged(passing)), source._replace(split_reduction=False))
    return tuple((source, layouts) for layouts, source in found.items())


def _led_by(vote: Layouts, votes: Sequence[Vote]) -> list[Layouts]:
    """The votes with this one first."""
    return [vote, *[other for _, other in votes if other != vote]]


def reassigned(rule: Rule, votes: Sequence[Vote]) -> Iterator[Vote]:
    """Every way to put the axes of the votes on factors; if these are too many, those that move one axis only.

    Where operands disagree, the best may be what none of them asks for: an operand gets there by an all-to-all, which
    moves an n-th of what gathering it would, and nothing is left to reduce.
    """
    on, free = _axes_of(votes), _free_factors(rule)
    ways = [[free] * len(on)]
    if len(free) ** len(on) > MOST_WAYS:
        ways = [[free if axis is moves else sorted(on[axis]) for axis in on] for moves in on]
    if on:
        places = itertools.chain.from_iterable(itertools.product(*way) for way in ways)
        yield from _put_on_factors(rule, votes, list(on), places)


def without_one(setting: Setting, votes: Sequence[Vote]) -> Iterator[Vote]:
    """Every way to put all axes of the votes but one on factors, for products: their operands are whole along that one.

    Where an axis splits the rows and a product has more columns than sums, rows gathered before it move less than its
    result would, if that is needed whole.
    """
    rule, on = setting.rule, _axes_of(votes)
    free, more = _free_factors(rule), len(on) - 1
    may_go = _is_product(rule) and more > 0 and len(free) ** more <= MOST_WAYS
    for gone in on if may_go else ():
        rest = [axis for axis in on if axis is not gone]
        yield from _put_on_factors(rule, votes, rest, itertools.product(free, repeat=more))


def _put_on_factors(
    rule: Rule, votes: Sequence[Vote], axes: Sequence[Split], ways: Iterable[Sequence[int]]
) -> Iterator[Vote]:
    """The axes on the factors that each way names, where they divide these."""
    for places in ways:
        layouts = _on_factors(rule, zip(places, axes, strict=True))
        if layouts is not None:
            yield votes[0][0], representable(rule, _where_it_was(rule, layouts, votes))


def _where_it_was(rule: Rule, layouts: Layouts, votes: Sequence[Vote]) -> Layouts:
    """The layouts in the blocks that data already lie in, where a vote has more axes on a factor.

    If a dim over (x, y) gives up x, a gather over x brings each rank all blocks of its place on y: that layout needs
    one gather. Neighbouring blocks, as (y) alone means, would need a permutation after it.
    """
    rows = zip(layouts, zip(*(vote for _, vote in votes), strict=True), rule.factors, strict=True)
    return tuple(_among(layout, asked, factor.size) for layout, asked, factor in rows)


def _among(layout: Layout, asked: Iterable[Layout], size: int) -> Layout:
    kept = set(lay.axes(layout))
    whole = next((other for other in asked if kept < set(lay.axes(other))), None) if kept else None
    if whole is None:
        return layout
    return lay.canonical(tuple(s if s in kept or not s.bound else Split(s.size) for s in whole), size)


def _axes_of(votes: Iterable[Vote]) -> dict[Split, set[int]]:
    """The axes of the votes, with the factors they are asked for on; of axes that overlap only the first."""
    on: dict[Split, set[int]] = {}
    for factor, axis in ((f, axis) for _, vote in votes for f, layout in enumerate(vote) for axis in lay.axes(layout)):
        if axis in on or not any(conflicting(axis, other) for other in on):
            on.setdefault(axis, set()).add(factor)
    return on


def _free_factors(rule: Rule) -> list[int]:
    return [f for f, factor in enumerate(rule.factors) if factor.kind is not FactorKind.BLOCK]


def apportioned(setting: Setting, votes: Sequence[Vote]) -> Iterator[Vote]:
    """Every way to put the minor part of an axis on a factor too small for all of it, and the rest on another factor.

    Other axes are where they are asked for. So eight ranks go on four experts: two ranks share one, with half of its
    rows each.
    """
    rule = setting.rule
    on, free = _axes_of(votes), _free_factors(rule)
    for axis in on if _is_product(rule) else ():
        for seat in _seats(rule, axis, free):
            others = [[(place, other) for place in sorted(on[other])] for other in on if other is not axis]
            for parts in itertools.product(*others):
                layouts = _on_factors(rule, (*parts, *seat))
                if layouts is not None:
                    yield votes[0][0], representable(rule, layouts)


def _seats(rule: Rule, axis: Split, free: Sequence[int]) -> Iterator[tuple[tuple[int, Split], ...]]:
    size = axis.size or 1
    for small, other in itertools.permutations(free, 2):
        part = math.gcd(size, rule.factors[small].size)
        if part > 1 and rule.factors[small].size < size:
            rest = size // part
            yield (small, axis._replace(size=part, pre=axis.pre * rest)), (other, axis._replace(size=rest))


def _beyond(rule: Rule, votes: Sequence[Vote]) -> Iterator[Vote]:
    """Each vote refined by the others, where these keep the axes that it has not taken."""
    for source, vote in votes if len(votes) > 1 else ():
        order = _led_by(vote, votes)
        layouts = merged(order, beyond=True)
        if layouts != merged(order) and _divides(rule, layouts):
            yield source, representable(rule, layouts)


def _divides(rule: Rule, layouts: Layouts) -> bool:
    return all(factor.size % lay.extent(layout) == 0 for factor, layout in zip(rule.factors, layouts, strict=True))


def _on_factors(rule: Rule, parts: Iterable[tuple[int, Split]]) -> Layouts | None:
    """The parts of axes on these factors; None where one is not divided evenly.

    A factor of fewer steps than ranks counts as divided if more than half of the ranks have one.
    """
    out = [WHOLE] * len(rule.factors)
    for place, axis in parts:
        out[place] = lay.canonical((*out[place], axis), rule.factors[place].size)
    rows = [(factor.size, lay.extent(layout)) for factor, layout in zip(rule.factors, out, strict=True)]
    return tuple(out) if all(n % ways == 0 or n < ways < 2 * n for n, ways in rows) else None


def _scattered(setting: Setting, votes: Sequence[Vote]) -> Iterator[Vote]:
    """What the votes agree on, with the axes that an operand is unreduced over on its roomiest dim.

    The operand gets there by a reduce-scatter, which moves half of what an all-reduce does.
    """
    rule = setting.rule
    base = merged([vote for _, vote in votes]) if votes else (WHOLE,) * len(rule.factors)
    for i, (dims, known) in enumerate(zip(rule.operands, setting.known, strict=True)):
        terms = dict.fromkeys(_in_order(s) for s in known if s.partial and s.mesh == setting.mesh)
        for kind in (FactorKind.PASS, FactorKind.REDUCE) if terms else ():
            side = tuple(f for factors in dims for f in factors if rule.factors[f].kind is kind)
            for axes in terms if side else ():
                layouts = _with_all(rule, base, axes, side)
                if layouts is not None:
                    yield Source("operand", i), representable(rule, layouts)


def _in_order(sharding: Sharding) -> tuple[Split, ...]:
    """The axes that a sharding is unreduced over, in the order of the mesh: so that names decide nothing."""
    names = sharding.mesh.names
    return tuple(sorted(sharding.partial, key=lambda split: (names.index(split.axis or ""), split.pre)))


def _with_all(rule: Rule, layouts: Layouts, axes: Sequence[Split], side: tuple[int, ...]) -> Layouts | None:
    """The layouts with all these axes on the roomiest factors in `side`; None where one divides none of them."""
    for axis in axes:
        found = moved(rule, layouts, axis, side)
        if found is None:
            return None
        layouts = found
    return layouts


def _operand_votes(setting: Setting, operand: int) -> list[Layouts]:
    rule, shape = setting.rule, setting.call.types[operand].shape
    here = [s for s in setting.known[operand] if s.mesh == setting.mesh]
    return [layouts_of(rule, rule.operands[operand], shape, s.dims) for s in here]


def _displaced_votes(setting: Setting) -> list[Vote]:
    """What operands ask for if an all-to-all moves the axes of dims that the op needs whole to other dims."""
    rule, found = setting.rule, []
    for i, (dims, ttype) in enumerate(zip(rule.operands, setting.call.types, strict=True)):
        for sharding in setting.known[i]:
            if sharding.mesh == setting.mesh:
                ways = displaced(rule, dims, ttype.shape, sharding.dims)
                found += [(Source("operand", i), way) for way in ways]
    return list(dict.fromkeys(found))


def _with_reductions(rule: Rule, reductions: tuple[Layout, ...], layouts: Layouts) -> Layouts:
    """The layouts merged under those that the user gave the reduction dims, which come first."""
    if not reductions:
        return layouts
    given = iter(reductions)
    forced = tuple(
        lay.canonical(next(given), factor.size) if factor.kind is FactorKind.REDUCE else WHOLE
        for factor in rule.factors
    )
    return merged([forced, layouts])
