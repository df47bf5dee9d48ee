"""A beam search along the ops: several partial plans are kept, so that a choice may pay off only later.

*State.* A plan is the seconds that it has cost so far and, for every tensor that is still read, the shardings in which
the tensor exists. At an op every plan goes on in each way worth trying (`growth.growths`), and the cheapest `width`
plans are kept. Sums that a plan leaves unreduced are charged as if they were reduced at once.

*Dominance.* A plan is dropped if another plan can be turned into it by resharding, at no greater cost in all: those
left are the few that really differ. In a loose search (`slack`) it is dropped even if the other one costs a little
more. Else a beam fills with plans that differ only in small tensors, and drops those that are dear at first and pay
late. (What is left is an epsilon-approximate front, as in Laumanns et al., 2002. Alpa and TePDist search with beams,
too; the dominance test is our own.)

*Repeated layers.* What happens at an op, a `Stride`, follows from the op, from the plans relative to the cheapest one,
and from where the operands are, tensors being named by place and not by number. Strides are kept, so that the second of
two equal layers is looked up and not searched.

*Horizon.* For that, the plans after two equal layers must come to be equal, so they may not remember for ever where
they once differed: `horizon` ops later a choice is final, as the best plan has it (a Viterbi decoder truncates its
traceback so). Plans that differ only in tensors which no op within the horizon reads, such as those kept for the
backward, count as one: the cheapest stands for them.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from ..fast_dataclass import quickly_made
from ..sharding.value import Sharding
from .dominance import Table, joint_table_of
from .growth import EPSILON, Growth, Kind, Role, Roles, growths, role_of
from .operand_layouts import Available
from .options import Option

# How many shardings of a tensor ops are asked to follow at least, those of dropped plans among them.
KNOWN = 4


class Decision(NamedTuple):
    """The decision at one op; `runner_up` is the next best option there, if any."""

    option: Option
    runner_up: Option | None


class Plan(NamedTuple):
    """Seconds more than the cheapest plan, and for each open tensor the number, in its table, of how it exists."""

    seconds: float
    held: tuple[int, ...]


@quickly_made
@dataclass(frozen=True, slots=True, eq=False)
class Front:
    """The plans of the beam before some op, cheapest first. The open tensors are those in which the plans differ.

    `tables[i]` numbers the ways in which open tensor i may exist. `near[i]`: it is read before the horizon. `known[i]`
    are the shardings that it has in any plan, dropped plans included: an op in one plan may follow a sharding of
    another. Without that, a plan could not stand for those that it was found to reach.
    """

    tables: tuple[Table, ...]
    near: tuple[bool, ...]
    known: tuple[Available, ...]
    plans: tuple[Plan, ...]


class Child(NamedTuple):
    """A plan of the next front: from which plan of this front it comes, and how that went on."""

    parent: int
    growth: Growth


# Where a tensor of the next front comes from: the number of an open tensor, or (as ~k) of one of the op's.
FrontRef = int
# How an operand exists in all plans and in which shardings it is known; or the number of the open tensor that it is.
OperandState = tuple[Available, Available] | int


@quickly_made
@dataclass(frozen=True, slots=True)
class Stride:
    """What the beam does at one op: from one front to the next.

    `children` are the plans of the next front. `settled` are tensors on which all of them agree: where the tensor stood
    before, how it exists, and the shardings in which it is known. `open` tells where each open tensor of the next front
    stood before.
    """

    children: tuple[Child, ...]
    settled: tuple[tuple[FrontRef, Available, Available], ...]
    open: tuple[FrontRef, ...]
    front: Front


# Equal fronts are one object.
_front = functools.lru_cache(maxsize=1 << 13)(Front)


class BeamSettings(NamedTuple):
    """How wide and how far a beam searches.

    width: how many plans are kept.
    horizon: after how many ops a choice is final.
    thorough: from 1 on ops try more placements than are asked for (`votes.unasked`), from 2 on also with an axis less.
    sums: so do ops that reduce nothing, on unreduced operands: these are few.
    slack: a plan is dropped if another reaches it at up to so many seconds more.
    plainly: annotated results ask for what they need as it is, too (`wishes`).
    """

    width: int
    horizon: int
    thorough: int = 0
    sums: bool = False
    slack: float = 0.0
    plainly: bool = False


def _has_terms(front: Front, entry: Sequence[OperandState]) -> bool:
    """Whether an operand is unreduced in some plan."""
    return any(s.partial for e in entry for s in (front.known[e] if isinstance(e, int) else e[1]))


class Beam:
    """The search over one graph. `wanted` and `inputs` are by tensor: what is wanted of it, and how an input exists."""

    def __init__(
        self, roles: Roles, wanted: Mapping[int, Available], inputs: Mapping[int, Available], search: BeamSettings
    ):
        self.roles, self.wanted, self.search = roles, wanted, search
        self.agreed: dict[int, tuple[Available, Available]] = {i: (found, found) for i, found in inputs.items()}
        self.open: list[int] = []
        self._opened: list[int] = []

    def run(self) -> list[Decision]:
        """The cheapest plan's decisions, op by op."""
        front, strides = _front((), (), (), (Plan(0.0, ()),)), []
        width, horizon, slack = self.search.width, self.search.horizon, self.search.slack
        parts = zip(self.roles.parts, self.roles.near(horizon), strict=True)
        for now, ((kind, tensors, _), near) in enumerate(parts):
            role = role_of(kind, tuple([self.wanted.get(i, ()) for i in tensors]))
            entry = tuple([self._entry(i) for i in tensors[: kind.read]])
            more = self._more(kind, front, entry)
            stride = _stride(front, role, near, entry, self._old(now), width, more, slack)
            self._enter(stride, tensors, now)
            strides.append(stride)
            front = stride.front
        return _decisions(strides)

    def _more(self, kind: Kind, front: Front, entry: Sequence[OperandState]) -> int:
        """How many more placements than are asked for an op tries, as `BeamSettings.thorough` counts them."""
        more = self.search.thorough
        if not more and not self.search.sums:
            return 0
        if not kind.may_move:
            more = more or int(self.search.sums)
            more = more if more and _has_terms(front, entry) else 0
        # An axis on a dim in chunks leaves ranks with others, or with none.
        return more if more and not kind.in_chunks else 0

    def _entry(self, tensor: int) -> OperandState:
        return self.open.index(tensor) if tensor in self.open else self.agreed[tensor]

    def _old(self, now: int) -> int:
        """How many of the open tensors (they are in order of age) are older than the horizon."""
        return sum([then < now - self.search.horizon for then in self._opened]) if self._opened else 0

    def _enter(self, stride: Stride, tensors: Sequence[int], now: int) -> None:
        for origin, available, known in stride.settled:
            self.agreed[self.open[origin] if origin >= 0 else tensors[~origin]] = (available, known)
        self._opened = [self._opened[o] if o >= 0 else now for o in stride.open]
        self.open = [self.open[o] if o >= 0 else tensors[~o] for o in stride.open]


@functools.lru_cache(maxsize=1 << 13)
def _stride(
    front: Front,
    role: Role,
    near: tuple[bool, ...],
    entry: tuple[OperandState, ...],
    old: int,
    width: int,
    thorough: int,
    slack: float,
) -> Stride:
    """One stride; kept, so that equal layers look it up.

    `near[i]`: tensor i of the op is read again before the horizon. `entry` says how the distinct operands exist. The
    first `old` open tensors are decided here.
    """
    return _Striding(front, role, near, entry, width, thorough, slack).run(old)


class _Found(NamedTuple):
    """A plan that goes on over an op.

    `old` and `new` are numbers for how it holds those tensors that are read before the horizon: those that were open
    before, and the op's own.
    """

    parent: int
    growth: Growth
    seconds: float
    old: int
    new: int


_seconds = operator.attrgetter("seconds")


class _Striding:
    """The work of one stride: the plans grown, pruned, and written as the next front."""

    def __init__(
        self,
        front: Front,
        role: Role,
        near: tuple[bool, ...],
        entry: tuple[OperandState, ...],
        width: int,
        thorough: int,
        slack: float,
    ):
        self.front, self.role, self.entry, self.width = front, role, entry, width
        known = tuple([front.known[e] if isinstance(e, int) else e[1] for e in entry])
        self.setting = role.setting(known, thorough)
        self.margin = EPSILON + slack
        touched = {e for e in entry if isinstance(e, int)}
        self.kept = [place for place in range(len(front.tables)) if place not in touched]
        self.alive = [k for k, tensor in enumerate(role.kind.tensors) if tensor.read_again]
        self.of_kept, self.of_alive = _picker(self.kept), _picker(self.alive)
        self.tables = (*self.of_kept(front.tables), *self.of_alive(role.kind.tables))
        self.near = (*self.of_kept(front.near), *self.of_alive(near))
        # Only tensors that are read before the horizon count where plans are compared.
        near_old = [place for place in self.kept if front.near[place]]
        # What large tensors cost decides soonest.
        near_old.sort(key=lambda place: -front.tables[place].kind.numel)
        self.near_old = _picker(near_old)
        self.near_new = _picker([k for k in self.alive if near[k]])
        self.old = joint_table_of(self.near_old(front.tables))
        self.new = joint_table_of(self.near_new(role.kind.tables))

    def run(self, old: int) -> Stride:
        grown = sorted(self._grown(), key=_seconds)
        found = self._decided(self._pruned(grown), sum([place < old for place in self.kept]))
        known = self._known(found, grown)
        rows = [self._held(f) for f in found]
        columns = list(zip(*rows, strict=True))
        differ = [c for c, column in enumerate(columns) if column.count(column[0]) < len(column)]
        origins = [*self.kept, *(~k for k in self.alive)]
        agreed = tuple([(origins[c], self.tables[c].ways[column[0]], known[c])
                        for c, column in enumerate(columns) if c not in differ])  # fmt: skip
        of_differing = _picker(differ)
        best = found[0].seconds
        # Rounded, so that the plans at the ends of equal layers are equal.
        plans = [Plan(round(f.seconds - best, 15), of_differing(row)) for f, row in zip(found, rows, strict=True)]
        front = _front(*map(of_differing, (self.tables, self.near, known)), tuple(plans))
        return Stride(tuple([Child(f.parent, f.growth) for f in found]), agreed, of_differing(origins), front)

    def _grown(self) -> list[_Found]:
        """Every plan gone on with in every way; of several that hold the same, the cheapest."""
        best: dict[tuple[int, int], _Found] = {}
        ways: dict[tuple[int, ...], list[tuple[Growth, float, int]]] = {}
        of_entry = _picker([e for e in self.entry if isinstance(e, int)])
        for parent, (before, held) in enumerate(self.front.plans):
            read, old = of_entry(held), self.old[self.near_old(held)]
            if read not in ways:
                ways[read] = self._ways(held)
            for growth, added, new in ways[read]:
                seconds, found = before + added, best.get((old, new))
                if found is None or seconds < found.seconds:
                    best[old, new] = _Found(parent, growth, seconds, old, new)
        return list(best.values())

    def _ways(self, held: tuple[int, ...]) -> list[tuple[Growth, float, int]]:
        """The growths of a plan that holds `held`, their seconds, and the number of how they hold the op's tensors."""
        tables = self.front.tables
        available = tuple([tables[e].ways[held[e]] if isinstance(e, int) else e[0] for e in self.entry])
        found = growths(self.role, self.setting, available, self.width)
        return [(growth, growth.seconds, self.new[self.near_new(growth.codes)]) for growth in found]

    def _pruned(self, found: Sequence[_Found]) -> list[_Found]:
        """The cheapest plans, up to the width, that no cheaper plan reaches."""
        kept: list[_Found] = []
        groups: dict[int, list[tuple[float, int]]] = {}
        for f in found:
            if len(kept) == self.width:
                break
            if not self._is_reached(f, groups):
                kept.append(f)
                groups.setdefault(f.new, []).append((f.seconds, f.old))
        return kept

    def _is_reached(self, f: _Found, groups: Mapping[int, Sequence[tuple[float, int]]]) -> bool:
        """Whether a cheaper plan can be resharded into this one at no greater cost (but for the slack).

        `groups` has the plans kept so far by how they hold the op's own tensors, each group cheapest first.
        """
        limit, old = f.seconds + self.margin, f.old
        for new, group in groups.items():
            left = limit - self.new.cost(new, f.new, limit - group[0][0])
            for seconds, have in group:
                room = left - seconds
                if room < 0.0:
                    break
                if self.old.cost(have, old, room) <= room:
                    return True
        return False

    def _known(self, found: Sequence[_Found], grown: Sequence[_Found]) -> list[Available]:
        """By tensor its shardings in the plans that are kept, then, up to `KNOWN`, in the cheapest dropped ones."""
        known = [self.front.known[place] for place in self.kept]
        for k in self.alive:
            seen = self._shardings(found, k)
            if len(seen) < KNOWN:
                more = [s for s in self._shardings(grown, k) if s not in seen]
                seen.update(dict.fromkeys(more[: KNOWN - len(seen)]))
            known.append(tuple(seen))
        return known

    def _shardings(self, found: Sequence[_Found], k: int) -> dict[Sharding, None]:
        """The shardings of tensor k of the op in these plans."""
        ways = self.role.kind.tables[k].ways
        return dict.fromkeys([s for code in dict.fromkeys([f.growth.codes[k] for f in found]) for s in ways[code]])

    def _decided(self, found: list[_Found], old: int) -> list[_Found]:
        """The plans that hold the first `old` tensors as the best plan does."""
        if not old:
            return found
        best = self._held(found[0])[:old]
        return [f for f in found if self._held(f)[:old] == best]

    def _held(self, found: _Found) -> tuple[int, ...]:
        """The numbers of how a plan holds each tensor that is read again."""
        return self.of_kept(self.front.plans[found.parent].held) + self.of_alive(found.growth.codes)


def _picker(places: Sequence[int]) -> Callable[[Sequence[Any]], tuple[Any, ...]]:
    """A function that takes the entries at these places of a sequence."""
    if len(places) > 1:
        return operator.itemgetter(*places)
    return (lambda row: (row[places[0]],)) if places else (lambda row: ())


def _decisions(strides: Sequence[Stride]) -> list[Decision]:
    out, place = [], 0
    for stride in reversed(strides):
        child = stride.children[place]
        out.append(Decision(child.growth.option, child.growth.runner_up))
        place = child.parent
    return out[::-1]


def greedy(roles: Roles, wanted: Mapping[int, Available], inputs: Mapping[int, Available]) -> dict[int, Sharding]:
    """By tensor its sharding in a sweep that decides each op at once: a beam of one plan, nothing left open."""
    held, made = dict(inputs), {}
    for kind, tensors, _ in roles.parts:
        role = role_of(kind, tuple([wanted.get(i, ()) for i in tensors]))
        available = tuple([held[i] for i in tensors[: kind.read]])
        (growth,) = growths(role, role.setting(available, 0), available, 1)
        held.update((i, table.ways[code]) for i, table, code in zip(tensors, kind.tables, growth.codes, strict=True))
        made.update(zip(tensors[kind.read :], growth.option.placement.results, strict=True))
    return made
