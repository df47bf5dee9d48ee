"""The placements that one op may be computed in, and what each costs."""

from __future__ import annotations

import bisect
import functools
import math
import operator
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ..costs import computation
from ..fast_dataclass import quickly_made
from ..ops.opdef import Call
from ..ops.rules import Rule
from ..ops.values import TensorType
from ..reshard.bounds import at_least
from ..reshard.prices import price
from ..reshard.search import plan
from ..reshard.steps import Reordering, Window
from ..reshard.windows import window_of, window_step
from ..sharding import layout as lay
from ..sharding.layout import WHOLE
from ..sharding.value import Sharding
from .factors import Layouts, Placement, carries, layouts_of, merged, placed, representable
from .operand_layouts import Available, Setting, Source, Vote, apportioned, asked_for, unasked, votes_of, without_one


class RunnerUp(NamedTuple):
    """The next best option at an op: what it follows, its modelled seconds, and where its operands and results lie."""

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


class Option(NamedTuple):
    """A placement, what it follows, and the modelled seconds of its reshards and of one rank's computation."""

    placement: Placement
    source: Source
    seconds: float


# So many of those that nobody asks for, the cheapest, are gone on with; so many of those that leave nothing to reduce,
# which look dear beside the others.
MOST_MORE, MOST_COMPLETE = 8, 4
_MORE = (unasked, apportioned)
# Seconds by which it must pay to multiply or divide the terms of a sum rather than the sum: a term may overflow, or be
# 0 times infinity, where the sum is not. As much as tells costs apart, so that it decides between equal ones only.
EARLIER = 2e-11

# A placement, what it follows, and the seconds that do not depend on where the operands are.
_Candidate = tuple[Placement, Source, float]


def options(setting: Setting, available: tuple[Available, ...], places: Sequence[int]) -> tuple[Option, ...]:
    """Every placement that some operand or result asks for, cheapest first, if the operands exist as `available`.

    A thorough setting adds the cheapest of those that nobody asks for. Operands of equal `places` are one tensor.
    """
    asked, *more = _candidates(setting)
    wire = _Wire(setting.call, available, places)
    found = wire.options([*_carried(setting, available), *asked])
    assert found, f"no placement for {setting.call.op}"
    for others in more:
        complete, owing = _by_terms(others)
        found += wire.cheapest(owing, MOST_MORE) + wire.cheapest(complete, MOST_COMPLETE)
    return tuple(sorted(found, key=_seconds))


_seconds = operator.attrgetter("seconds")


def _by_terms(candidates: Iterable[_Candidate]) -> tuple[list[_Candidate], list[_Candidate]]:
    """Candidates whose results are all reduced, and the others."""
    complete, owing = list[_Candidate](), list[_Candidate]()
    for candidate in candidates:
        (owing if any(made.partial for made in candidate[0].results) else complete).append(candidate)
    return complete, owing


@functools.lru_cache(maxsize=1 << 13)
def _candidates(setting: Setting) -> tuple[tuple[_Candidate, ...], ...]:
    """The placements that someone asks for; for a thorough search more groups of placements, each new ones alone."""
    votes = tuple(votes_of(setting))
    known = dict(_placed(setting, asked_for(setting, votes)))
    found = [(*known.values(), *_window_candidates(setting))]
    kinds = (*_MORE, without_one) if setting.thorough > 1 else _MORE
    for kind in kinds if setting.thorough and not setting.reductions else ():
        more = {at: candidate for at, candidate in _placed(setting, kind(setting, votes)) if at not in known}
        known |= more
        found.append(tuple(more.values()))
    return tuple(found)


def _placed(setting: Setting, votes: Iterable[Vote]) -> Iterator[tuple[Layouts, _Candidate]]:
    """By layouts the placements that the votes lead to; of votes for equal layouts the first counts."""
    sources: dict[Layouts, Source] = {}
    for source, layouts in votes:
        sources.setdefault(layouts, source)
    for layouts, source in sources.items():
        placement = placed(setting.call, setting.rule, setting.mesh, layouts)
        if placement is not None:
            yield layouts, (placement, source, _own_seconds(setting, placement))


def _carried(setting: Setting, available: tuple[Available, ...]) -> Iterator[_Candidate]:
    """The op on unreduced operands, if it can carry what is left to reduce of them to its result."""
    if not any([s.partial for found in available for s in found]):
        return
    rule, call = setting.rule, setting.call
    here = [[s for s in found if s.mesh == setting.mesh] for found in available]
    carry = carries(call, rule, here)
    if carry is None:
        return
    first = [layouts_of(rule, rule.operands[i], call.types[i].shape, next(s for s in here[i] if s.partial).dims)
             for i in carry.operands]  # fmt: skip
    votes = [*first, *(vote for _, vote in votes_of(setting))]
    layouts = representable(rule, merged(votes, carry.axes))
    placement = placed(call, rule, setting.mesh, layouts, carry)
    if placement is not None:
        risk = EARLIER if call.op.partial.scales else 0.0
        yield placement, Source("carry", carry.operands[0]), _own_seconds(setting, placement) + risk


def _own_seconds(setting: Setting, placement: Placement) -> float:
    """Seconds of one rank's computation, and of bringing annotated results to where they must be."""
    total = computation(work(setting.call, placement), setting.mesh.flops)
    return total + _to_annotations(setting, placement.results)


def _to_annotations(setting: Setting, results: Sequence[Sharding]) -> float:
    if not any(setting.fixed):
        return 0.0
    rows = zip(results, setting.wanted, setting.fixed, setting.call.results, strict=True)
    return sum(cheapest((made,), wanted[0], ttype.shape, ttype.dtype.itemsize)
               for made, wanted, fixed, ttype in rows if fixed)  # fmt: skip


class _Wire:
    """The seconds of bringing operands from where they exist (`available`) to where a placement needs them."""

    def __init__(self, call: Call, available: Sequence[Available], places: Sequence[int]):
        self._reshards = [reshards(found, kind) for found, kind in zip(available, call.types, strict=True)]
        self._places = places
        self._apart = len(set(places)) == len(places)

    def options(self, candidates: Iterable[_Candidate]) -> list[Option]:
        """The candidates whose operands can be brought there."""
        found = [Option(placement, source, own + self.seconds(placement)) for placement, source, own in candidates]
        return [option for option in found if math.isfinite(option.seconds)]

    def cheapest(self, candidates: Sequence[_Candidate], count: int) -> list[Option]:
        """The `count` cheapest of the candidates. Reshards are searched only for those that may be among them."""
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
        """The seconds to bring all operands to where the placement needs them."""
        if self._apart:
            return sum([known[need] for known, need in zip(self._reshards, placement.operands, strict=False)])
        return sum([self._reshards[i][need] for i, need in self._needs(placement)])

    def _needs(self, placement: Placement) -> Iterable[tuple[int, Sharding]]:
        """(operand, sharding it is needed in), once where one tensor is several operands and is needed alike."""
        return dict.fromkeys(zip(map(self._places.index, self._places), placement.operands, strict=False))


def _window_candidates(setting: Setting) -> Iterator[_Candidate]:
    """For an op that takes a window of a sharded dim: a step of exact pieces does the op's work."""
    if setting.call.op.window is None:
        return
    sources = [s for s in setting.known[0] if s.mesh == setting.mesh]
    wanted = [w for w in setting.wanted[0] if w.mesh == setting.mesh and not w.partial]
    for placement, seconds in window_placements(setting.call, setting.rule, sources, wanted):
        yield placement, Source("pieces"), seconds + _to_annotations(setting, placement.results)


def window_placements(
    call: Call, rule: Rule, sources: Iterable[Sharding], wanted: Sequence[Sharding]
) -> Iterator[tuple[Placement, float]]:
    """Placements in which a step of exact pieces does the op's work, with their seconds; none if it takes no window.

    sources: where the operand may be.
    wanted: where the result may be asked for, beside where the operand has most of it and in shared blocks.
    """
    window = window_of(call)
    if window is None:
        return
    (ttype,), made = call.types[:1], call.results[0]
    for source in sources:
        if not source.partial and _cuts(window, source):
            for target in _window_targets(source, window, wanted):
                step = window_step(source, target, window)
                seconds = price(step, ttype.shape, ttype.dtype.itemsize).seconds
                seconds += computation(target.max_local_numel(made.shape), target.mesh.flops)
                yield Placement((WHOLE,) * len(rule.factors), (source,), (target,), step=step), seconds


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


class Reshards(dict[Sharding, float]):
    """By sharding, the seconds to bring a tensor there that exists as `available`; worked out when asked for."""

    def __init__(self, available: Available, ttype: TensorType):
        super().__init__(dict.fromkeys(available, 0.0))
        self.available, self.kind = available, ttype

    def __missing__(self, needed: Sharding) -> float:
        found = self[needed] = cheapest(self.available, needed, self.kind.shape, self.kind.dtype.itemsize)
        return found

    def at_least(self, needed: Sharding) -> float:
        """A lower bound of these seconds that takes no search; the seconds themselves if they are known."""
        found = self.get(needed)
        if found is not None:
            return found
        size = self.kind.dtype.itemsize
        return min([at_least(have, needed, self.kind.shape, size) for have in self.available])


reshards = functools.lru_cache(maxsize=1 << 15)(Reshards)


def cheapest(available: Sequence[Sharding], needed: Sharding, shape: tuple[int, ...], itemsize: int) -> float:
    """Modelled seconds of the cheapest reshard from any sharding in `available`; inf where there is none."""
    if needed in available:
        return 0.0
    plans = [plan(have, needed, shape, itemsize) for have in available]
    return min((p.seconds for p in plans if p is not None), default=math.inf)


def work(call: Call, placement: Placement) -> float:
    """Operations of one rank; every op counts as one at least."""
    return _operations(call) / placement.ways


@functools.lru_cache(maxsize=1 << 13)
def _operations(call: Call) -> float:
    return max(call.op.flops(call), 1.0)
