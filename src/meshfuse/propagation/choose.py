"""The placements that one op may be computed in, and what each costs."""

from __future__ import annotations

import bisect
import functools
import itertools
import math
import operator
from collections.abc import Iterable, Iterator, Sequence
from typing import Literal, NamedTuple

from ..costs import computation
from ..mesh import DeviceMesh
from ..moves.bounds import at_least
from ..moves.move import Reordering, Window
from ..moves.planner import plan
from ..moves.prices import price
from ..moves.windows import window_move, window_of
from ..ops.base import Call, FactorKind, Rule, TensorType
from ..sharding import layout as lay
from ..sharding.layout import WHOLE, Layout, Split
from ..sharding.value import Sharding, conflicting
from .factors import (
    Layouts,
    Placement,
    carries,
    displaced,
    layouts_of,
    merged,
    moved,
    placed,
    reduces,
    representable,
    without_reductions,
)

# The shardings in which a tensor exists, the one that its op (or an annotation) gave it first.
Available = tuple[Sharding, ...]


class Setting(NamedTuple):
    """What the placements of a node depend on; equal for equal layers, so that each is worked out once.

    `known[i]` are shardings that operand i has in some plan; `wanted[j]` those that someone asks of result j;
    `fixed[j]` tells whether it is one, from its annotation. `reductions` are layouts that the user gave the op's
    reduction dims.
    """

    call: Call
    rule: Rule
    mesh: DeviceMesh
    known: tuple[Available, ...]
    wanted: tuple[Available, ...]
    fixed: tuple[bool, ...]
    reductions: tuple[Layout, ...] = ()
    thorough: bool = False


# What a placement follows: the sharding of an operand, what a result is wanted as, an operand's unreduced terms; or
# nothing, whole on every rank; or it is a move of exact pieces.
SourceKind = Literal["operand", "result", "carry", "whole", "pieces"]


class Source(NamedTuple):
    """What a placement follows, and of operands or results which."""

    kind: SourceKind
    place: int = 0
    split_reduction: bool = True


class Option(NamedTuple):
    """A placement, what it follows, and the modelled seconds of its reshards and of one rank's computation."""

    placement: Placement
    source: Source
    seconds: float


# So many ways to put axes on an op's factors are tried at most.
MOST_WAYS = 64
# And so many of those that nobody asks for, the cheapest, are gone on with.
MOST_MORE = 8

# A placement, what it follows, and the seconds that do not depend on where the operands are.
_Candidate = tuple[Placement, Source, float]
_Vote = tuple[Source, Layouts]


def options(setting: Setting, available: tuple[Available, ...], places: Sequence[int]) -> tuple[Option, ...]:
    """Every placement that some operand or result asks for, from operands that exist as `available`; cheapest first.

    Operands of equal `places` are one tensor.
    """
    asked, *more = _candidates(setting)
    wire = _Wire(setting.call, available, places)
    found = wire.options([*_carried(setting, available), *asked])
    assert found, f"no placement for {setting.call.op}"
    for others in more:
        found += wire.cheapest(others, MOST_MORE)
    return tuple(sorted(found, key=_seconds))


_seconds = operator.attrgetter("seconds")


@functools.lru_cache(maxsize=1 << 13)
def _candidates(setting: Setting) -> tuple[tuple[_Candidate, ...], ...]:
    """The placements that someone asks for, and those that only a thorough search tries, in kinds."""
    votes = tuple(_votes(setting))
    known = dict(_placed(setting, _layout_candidates(setting, votes)))
    found = [(*known.values(), *_window_candidates(setting))]
    for kind in (_more_candidates, _apportioned) if setting.thorough and not setting.reductions else ():
        more = {at: candidate for at, candidate in _placed(setting, kind(setting, votes)) if at not in known}
        known |= more
        found.append(tuple(more.values()))
    return tuple(found)


def _placed(setting: Setting, votes: Iterable[_Vote]) -> Iterator[tuple[Layouts, _Candidate]]:
    """The placements of the votes that have one, by their layouts; of equal ones the first."""
    sources: dict[Layouts, Source] = {}
    for source, layouts in votes:
        sources.setdefault(layouts, source)
    for layouts, source in sources.items():
        placement = placed(setting.call, setting.rule, setting.mesh, layouts)
        if placement is not None:
            yield layouts, (placement, source, _own_seconds(setting, placement))


def _carried(setting: Setting, available: tuple[Available, ...]) -> Iterator[_Candidate]:
    """The op on unreduced operands, where it can carry what they have left to reduce."""
    rule, call = setting.rule, setting.call
    here = [[s for s in found if s.mesh == setting.mesh] for found in available]
    carry = carries(call, rule, here)
    if carry is None:
        return
    first = [layouts_of(rule, rule.operands[i], call.types[i].shape, next(s for s in here[i] if s.partial).dims)
             for i in carry.operands]  # fmt: skip
    votes = [*first, *(vote for _, vote in _votes(setting))]
    layouts = representable(rule, merged(votes, carry.axes))
    placement = placed(call, rule, setting.mesh, layouts, carry)
    if placement is not None:
        yield placement, Source("carry", carry.operands[0]), _own_seconds(setting, placement)


def _layout_candidates(setting: Setting, votes: tuple[_Vote, ...]) -> Iterator[_Vote]:
    rule = setting.rule
    yield from _agreed(rule, votes, tuple(_displaced_votes(setting)), setting.reductions)
    yield Source("whole"), _with_reductions(rule, setting.reductions, (WHOLE,) * len(rule.factors))


def _more_candidates(setting: Setting, votes: Sequence[_Vote]) -> Iterator[_Vote]:
    """What nobody asks for as it is."""
    if _is_product(setting.rule):
        yield from reassigned(setting.rule, votes)
    yield from _scattered(setting, votes)
    yield from _beyond(setting.rule, votes)


def _is_product(rule: Rule) -> bool:
    """Whether operands meet and something is reduced."""
    return len(rule.operands) > 1 and reduces(rule)


@functools.lru_cache(maxsize=1 << 13)
def _agreed(
    rule: Rule, votes: tuple[_Vote, ...], displaced: tuple[_Vote, ...], reductions: tuple[Layout, ...]
) -> tuple[_Vote, ...]:
    """What each vote gives with the others after it, and alone; the same with nothing split that is reduced."""
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


def _led_by(vote: Layouts, votes: Sequence[_Vote]) -> list[Layouts]:
    """The vote, and the others after it."""
    return [vote, *[other for _, other in votes if other != vote]]


def reassigned(rule: Rule, votes: Sequence[_Vote]) -> Iterator[_Vote]:
    """Every way to put the axes of the votes on factors; of very many ways, those with but one axis where nobody asks.

    Where operands disagree, the best may be what none of them asks for: an operand comes there by an all-to-all, which
    moves an n-th of what gathering it would, and nothing is left to reduce.
    """
    on, free = _axes_of(votes), _free_factors(rule)
    ways = [[free] * len(on)]
    if len(free) ** len(on) > MOST_WAYS:
        ways = [[free if axis is moves else sorted(on[axis]) for axis in on] for moves in on]
    for places in itertools.chain.from_iterable(itertools.product(*way) for way in ways) if on else ():
        layouts = _on_factors(rule, zip(places, on, strict=True))
        if layouts is not None:
            yield votes[0][0], representable(rule, layouts)


def _axes_of(votes: Iterable[_Vote]) -> dict[Split, set[int]]:
    """The axes of the votes, the first of those that overlap, and the factors that they are asked for on."""
    on: dict[Split, set[int]] = {}
    for factor, axis in ((f, axis) for _, vote in votes for f, layout in enumerate(vote) for axis in lay.axes(layout)):
        if axis in on or not any(conflicting(axis, other) for other in on):
            on.setdefault(axis, set()).add(factor)
    return on


def _free_factors(rule: Rule) -> list[int]:
    return [f for f, factor in enumerate(rule.factors) if factor.kind is not FactorKind.BLOCK]


def _apportioned(setting: Setting, votes: Sequence[_Vote]) -> Iterator[_Vote]:
    """Every way to put one axis on a factor too small for it, by its minor part, and the rest of it on another; the
    other axes are where they are asked for.

    So eight ranks go on four experts: two ranks share one, with half of its rows each.
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


def _beyond(rule: Rule, votes: Sequence[_Vote]) -> Iterator[_Vote]:
    """What each vote gives with the others after it, where those whose axes it uses keep their other axes."""
    for source, vote in votes if len(votes) > 1 else ():
        order = _led_by(vote, votes)
        layouts = merged(order, beyond=True)
        if layouts != merged(order) and _divides(rule, layouts):
            yield source, representable(rule, layouts)


def _divides(rule: Rule, layouts: Layouts) -> bool:
    return all(factor.size % lay.extent(layout) == 0 for factor, layout in zip(rule.factors, layouts, strict=True))


def _on_factors(rule: Rule, parts: Iterable[tuple[int, Split]]) -> Layouts | None:
    """Each part of an axis on its factor; None where one is not divided."""
    out = [WHOLE] * len(rule.factors)
    for place, axis in parts:
        out[place] = lay.canonical((*out[place], axis), rule.factors[place].size)
    return tuple(out) if _divides(rule, tuple(out)) else None


def _scattered(setting: Setting, votes: Sequence[_Vote]) -> Iterator[_Vote]:
    """What the votes agree on with the axes that an operand is unreduced over on its roomiest dim, of those that pass
    or are reduced: it comes there by a reduce-scatter, which moves half of what an all-reduce does.
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
    """The axes that a sharding is unreduced over, as the mesh has them: names decide nothing."""
    names = sharding.mesh.names
    return tuple(sorted(sharding.partial, key=lambda split: (names.index(split.axis or ""), split.pre)))


def _with_all(rule: Rule, layouts: Layouts, axes: Sequence[Split], side: tuple[int, ...]) -> Layouts | None:
    """The layouts with all the axes on the roomiest of some factors; None where one divides none of them."""
    for axis in axes:
        found = moved(rule, layouts, axis, side)
        if found is None:
            return None
        layouts = found
    return layouts


def _votes(setting: Setting) -> list[tuple[Source, Layouts]]:
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


def _operand_votes(setting: Setting, operand: int) -> list[Layouts]:
    rule, shape = setting.rule, setting.call.types[operand].shape
    here = [s for s in setting.known[operand] if s.mesh == setting.mesh]
    return [layouts_of(rule, rule.operands[operand], shape, s.dims) for s in here]


def _displaced_votes(setting: Setting) -> list[tuple[Source, Layouts]]:
    """What operands ask for where an all-to-all moves the axes of dims that the op needs whole to other dims."""
    rule, found = setting.rule, []
    for i, (dims, kind) in enumerate(zip(rule.operands, setting.call.types, strict=True)):
        for sharding in setting.known[i]:
            if sharding.mesh == setting.mesh:
                found.append((Source("operand", i), displaced(rule, dims, kind.shape, sharding.dims)))
    return [(source, vote) for source, vote in dict.fromkeys(found) if vote is not None]


def _with_reductions(rule: Rule, reductions: tuple[Layout, ...], layouts: Layouts) -> Layouts:
    """The layouts that the user gave the reduction dims, before all others."""
    if not reductions:
        return layouts
    given = iter(reductions)
    forced = tuple(
        lay.canonical(next(given), factor.size) if factor.kind is FactorKind.REDUCE else WHOLE
        for factor in rule.factors
    )
    return merged([forced, layouts])


def _own_seconds(setting: Setting, placement: Placement) -> float:
    """Seconds of one rank's computation, and to bring annotated results to where they must be."""
    total = computation(work(setting.call, placement), setting.mesh.flops)
    return total + _to_annotations(setting, placement.results)


def _to_annotations(setting: Setting, results: Sequence[Sharding]) -> float:
    if not any(setting.fixed):
        return 0.0
    rows = zip(results, setting.wanted, setting.fixed, setting.call.results, strict=True)
    return sum(cheapest((made,), wanted[0], kind.shape, kind.dtype.itemsize)
               for made, wanted, fixed, kind in rows if fixed)  # fmt: skip


class _Wire:
    """The seconds to bring operands that exist as `available` to where placements need them."""

    def __init__(self, call: Call, available: Sequence[Available], places: Sequence[int]):
        self._reshards = [reshards(found, kind) for found, kind in zip(available, call.types, strict=True)]
        self._first = tuple(map(places.index, places))
        self._apart = self._first == tuple(range(len(places)))

    def options(self, candidates: Iterable[_Candidate]) -> list[Option]:
        """The candidates that can be had."""
        found = [Option(placement, source, own + self.seconds(placement)) for placement, source, own in candidates]
        return [option for option in found if math.isfinite(option.seconds)]

    def cheapest(self, candidates: Sequence[_Candidate], count: int) -> list[Option]:
        """So many of the candidates that can be had, cheapest first. What takes longer than these is not searched."""
        bounds = [own + sum([self._reshards[i].at_least(need) for i, need in self._needs(placement)])
                  for placement, _, own in candidates]  # fmt: skip
        found: list[tuple[float, int, Option]] = []
        for i in sorted(range(len(candidates)), key=bounds.__getitem__):
            if bounds[i] == math.inf or (len(found) >= count and bounds[i] > found[count - 1][0]):
                break
            for option in self.options([candidates[i]]):
                bisect.insort(found, (option.seconds, i, option))
        return [option for _, _, option in found[:count]]

    def seconds(self, placement: Placement) -> float:
        """Of all operands."""
        if self._apart:
            return sum([known[need] for known, need in zip(self._reshards, placement.operands, strict=False)])
        return sum([self._reshards[i][need] for i, need in self._needs(placement)])

    def _needs(self, placement: Placement) -> Iterable[tuple[int, Sharding]]:
        """What is needed of each operand; a tensor that is two of them comes once, if they need the same."""
        return dict.fromkeys(zip(self._first, placement.operands, strict=False))


def _window_candidates(setting: Setting) -> Iterator[_Candidate]:
    """For an op that takes a window of a sharded dim: the exact pieces, from where they are to where they belong."""
    window = window_of(setting.call)
    if window is None:
        return
    (kind,), target = setting.call.types[:1], setting.call.results[0]
    for src in setting.known[0]:
        if src.partial or src.mesh != setting.mesh or not _cuts(window, src):
            continue
        for dst in _window_targets(setting, src, window):
            move = window_move(src, dst, window)
            seconds = price(move, kind.shape, kind.dtype.itemsize).seconds
            seconds += computation(dst.max_local_numel(target.shape), setting.mesh.flops)
            placement = Placement((WHOLE,) * len(setting.rule.factors), (src,), (dst,), move=move)
            yield placement, Source("pieces"), seconds + _to_annotations(setting, (dst,))


def _cuts(window: Window | Reordering, src: Sharding) -> bool:
    """True where a dim that the op changes is sharded."""
    return any(layout and window.changes(d) for d, layout in enumerate(src.dims))


def _window_targets(setting: Setting, src: Sharding, window: Window | Reordering) -> list[Sharding]:
    """Shardings for the result: over the same axes as the operand, most of it where it is, or as someone asks."""
    shape = window.target_shape
    dims = [lay.axes(d) if m != n else d for d, n, m in zip(src.dims, window.source_shape, shape, strict=True)]
    asked = [w for w in setting.wanted[0] if w.mesh == setting.mesh and not w.partial]
    shared = [_shared(src, window)] if isinstance(window, Window) else []
    return list(dict.fromkeys([Sharding.make(src.mesh, dims, shape), *filter(None, shared), *asked]))


def _shared(src: Sharding, window: Window) -> Sharding | None:
    """The blocks of a slice on the ranks that hold them, each shared with those that hold the same of the other parts.

    So the two halves of a gated unit's rows come to lie alike by half a shard each. None where a dim is not cut into
    whole parts, or its parts into whole blocks.
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


class Reshards(dict[Sharding, float]):
    """The seconds to bring a tensor that exists as `available` to any sharding, worked out as they are asked for."""

    def __init__(self, available: Available, kind: TensorType):
        self.available, self.kind = available, kind

    def __missing__(self, needed: Sharding) -> float:
        found = self[needed] = cheapest(self.available, needed, self.kind.shape, self.kind.dtype.itemsize)
        return found

    def at_least(self, needed: Sharding) -> float:
        """What it takes at least, without a search for the ways there; what it takes, if that is known."""
        found = self.get(needed)
        if found is not None:
            return found
        size = self.kind.dtype.itemsize
        return min([at_least(have, needed, self.kind.shape, size) for have in self.available])


reshards = functools.lru_cache(maxsize=1 << 15)(Reshards)


def cheapest(available: Sequence[Sharding], needed: Sharding, shape: tuple[int, ...], itemsize: int) -> float:
    """Modelled seconds of the cheapest reshard from any sharding that the tensor exists in; inf where there is none."""
    if needed in available:
        return 0.0
    plans = [plan(have, needed, shape, itemsize) for have in available]
    return min((p.seconds for p in plans if p is not None), default=math.inf)


def work(call: Call, placement: Placement) -> float:
    """Operations of one rank, where every op has at least one."""
    return _operations(call) / placement.ways


@functools.lru_cache(maxsize=1 << 13)
def _operations(call: Call) -> float:
    return max(call.op.flops(call), 1.0)
