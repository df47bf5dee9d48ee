"""Choosing placements along the ops with a beam of partial plans, so that a choice may pay off only later.

A plan of the beam is its cost so far and the shardings in which each tensor that is still read exists. A plan that
another reaches by resharding, at no greater cost, is dropped: what is left are the few plans that really differ.
Unreduced sums count as if they were reduced at once. (Beam search as in Alpa's and TePDist's relatives; the dominance
test is our own.)

What the beam does at an op is a function of the plans relative to the cheapest one, of the op, and of where its
operands are; tensors are named by where they stand, not by number. So the second of two equal layers finds everything
that the first one worked out: it is looked up, not searched. For the plans at the ends of two layers to be equal, they
must not remember for ever in what they once differed: after a horizon of so many ops the best plan's choice is final
(as a Viterbi decoder truncates its traceback). Of plans that differ in nothing but tensors that no op within the
horizon reads, such as those kept for the backward, the cheapest is as good as any.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ..graph import Graph
from ..ops.base import TensorType
from .choose import Available, Option
from .growth import EPSILON, Growth, Role, Roles, conversion, growths, role_of

# How many shardings of a tensor ops are asked to follow at least, those of dropped plans among them.
KNOWN = 4


class Step(NamedTuple):
    """The decision at one op; `runner_up` is the next best option there, if any."""

    option: Option
    runner_up: Option | None


class Plan(NamedTuple):
    """Seconds more than the cheapest plan's, and how each open tensor exists."""

    seconds: float
    held: tuple[Available, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Front:
    """The plans of the beam at some op, cheapest first, in terms of the open tensors: those in which they differ.

    `known[i]` are the shardings that open tensor i has in some plan, a plan that was dropped included: an op may
    follow it in any plan. Only so may a plan stand for those that it reaches. `near[i]`: it is read before the horizon.
    """

    types: tuple[TensorType, ...]
    near: tuple[bool, ...]
    known: tuple[Available, ...]
    plans: tuple[Plan, ...]


class Move(NamedTuple):
    """How one plan of the next front comes from one of this front."""

    parent: int
    step: Step


# Where a tensor of the next front comes from: the number of an open tensor, or (as ~k) of one of the op's.
Origin = int
# How an operand exists in all plans and in which shardings it is known; or the number of the open tensor that it is.
Entry = tuple[Available, Available] | int


@dataclass(frozen=True, slots=True)
class Stride:
    """What the beam does at one op: the moves, the tensors on which all plans agree now, and the next front.

    `settled` says of each of these how it exists and in which shardings it is known; `open` says where the tensors of
    the next front come from.
    """

    moves: tuple[Move, ...]
    settled: tuple[tuple[Origin, Available, Available], ...]
    open: tuple[Origin, ...]
    front: Front


@functools.lru_cache(maxsize=1 << 13)
def _front(
    types: tuple[TensorType, ...], near: tuple[bool, ...], known: tuple[Available, ...], plans: tuple[Plan, ...]
) -> Front:
    """Equal fronts are one object."""
    return Front(types, near, known, plans)


class Beam:
    """The search over one graph. `inputs` tells how its inputs exist."""

    def __init__(
        self, graph: Graph, roles: Roles, wanted: Mapping[int, Available], inputs: Mapping[int, Available], width: int
    ):
        self.graph, self.roles, self.wanted, self.width = graph, roles, wanted, width
        self.agreed: dict[int, tuple[Available, Available]] = {i: (found, found) for i, found in inputs.items()}
        self.open: list[int] = []
        self._opened: list[int] = []

    def run(self) -> list[Step]:
        """The cheapest plan's decisions, op by op."""
        front, strides = _front((), (), (), (Plan(0.0, ()),)), []
        for node in self.graph.nodes:
            kind, tensors = self.roles.kind(node.id)
            role = role_of(kind, tuple(self.wanted.get(i, ()) for i in tensors))
            entry = tuple(self._entry(i) for i in tensors[: kind.read])
            stride = _stride(front, role, entry, self._old(node.id), self.width)
            self._enter(stride, tensors, node.id)
            strides.append(stride)
            front = stride.front
        return _steps(strides)

    def _entry(self, tensor: int) -> Entry:
        return self.open.index(tensor) if tensor in self.open else self.agreed[tensor]

    def _old(self, now: int) -> int:
        """How many of the open tensors, the first ones, were opened before the horizon."""
        return sum(then < now - self.roles.horizon for then in self._opened) if self._opened else 0

    def _enter(self, stride: Stride, tensors: Sequence[int], now: int) -> None:
        for origin, available, known in stride.settled:
            self.agreed[self.open[origin] if origin >= 0 else tensors[~origin]] = (available, known)
        self._opened = [self._opened[o] if o >= 0 else now for o in stride.open]
        self.open = [self.open[o] if o >= 0 else tensors[~o] for o in stride.open]


@functools.lru_cache(maxsize=1 << 13)
def _stride(front: Front, role: Role, entry: tuple[Entry, ...], old: int, width: int) -> Stride:
    """`entry` tells of the distinct operands; what the first `old` open tensors are is decided now."""
    return _Striding(front, role, entry, width).run(old)


class _Found(NamedTuple):
    """A plan that goes on: `code` stands for how it holds the tensors that are read before the horizon."""

    parent: int
    growth: Growth
    seconds: float
    held: tuple[Available, ...]
    code: tuple[int, ...]


class _Coder:
    """Numbers for the ways in which each tensor exists, and what it costs to come from one to another."""

    def __init__(self, types: Sequence[TensorType]):
        self.types = types
        self._numbers: list[dict[Available, int]] = [{} for _ in types]
        self._costs: list[dict[tuple[int, int], float]] = [{} for _ in types]

    def code(self, columns: Iterable[int], held: Iterable[Available]) -> tuple[int, ...]:
        numbers = self._numbers
        return tuple([numbers[c].setdefault(found, len(numbers[c])) for c, found in zip(columns, held, strict=True)])

    def reaches(self, cost: float, have: Sequence[int], limit: float, want: Sequence[int]) -> bool:
        """True where resharding turns what one plan holds into what another does, at no greater cost."""
        for column, pair in enumerate(zip(have, want, strict=True)):
            if pair[0] != pair[1]:
                found = self._costs[column].get(pair)
                cost += self._priced(column, pair) if found is None else found
                if cost > limit:
                    return False
        return cost <= limit

    def _priced(self, column: int, pair: tuple[int, int]) -> float:
        ways = list(self._numbers[column])
        found = self._costs[column][pair] = conversion(ways[pair[0]], ways[pair[1]], self.types[column])
        return found


class _Striding:
    """The work of one stride."""

    def __init__(self, front: Front, role: Role, entry: tuple[Entry, ...], width: int):
        self.front, self.role, self.entry, self.width = front, role, entry, width
        touched = {e for e in entry if isinstance(e, int)}
        self.kept = [place for place in range(len(front.types)) if place not in touched]
        tensors = role.kind.tensors
        self.alive = [k for k, tensor in enumerate(tensors) if tensor.read_again]
        self.types = [front.types[p] for p in self.kept] + [tensors[k].type for k in self.alive]
        self.near = [front.near[p] for p in self.kept] + [tensors[k].is_near for k in self.alive]
        self.coder = _Coder([kind for kind, near in zip(self.types, self.near, strict=True) if near])

    def run(self, old: int) -> Stride:
        grown = sorted(self._grown(), key=lambda f: f.seconds)
        found = self._decided(self._pruned(grown), sum(place < old for place in self.kept))
        known = self._known(found, grown)
        columns = list(zip(*(f.held for f in found), strict=True))
        differ = [c for c, column in enumerate(columns) if any(held != column[0] for held in column)]
        origins = [*self.kept, *(~k for k in self.alive)]
        agreed = tuple((origins[c], columns[c][0], known[c]) for c in range(len(columns)) if c not in differ)
        plans = tuple(_relative(f, found[0], differ) for f in found)
        moves = tuple(Move(f.parent, Step(f.growth.option, f.growth.runner_up)) for f in found)
        facts = (tuple(facts[c] for c in differ) for facts in (self.types, self.near, known))
        front = _front(*facts, plans)
        return Stride(moves, agreed, tuple(origins[c] for c in differ), front)

    def _grown(self) -> list[_Found]:
        """Every plan gone on with in every way; of those that hold the same the cheapest."""
        best: dict[tuple[int, ...], _Found] = {}
        known = tuple(self.front.known[e] if isinstance(e, int) else e[1] for e in self.entry)
        old, new = [p for p in self.kept if self.front.near[p]], [k for k in self.alive if self._is_near(k)]
        olds, news = range(len(old)), range(len(old), len(old) + len(new))
        for parent, plan in enumerate(self.front.plans):
            available = tuple([plan.held[e] if isinstance(e, int) else e[0] for e in self.entry])
            before = tuple([plan.held[place] for place in self.kept])
            start = self.coder.code(olds, [plan.held[place] for place in old])
            for growth in growths(self.role, available, known, self.width):
                code = start + self.coder.code(news, [growth.after[k] for k in new])
                seconds = plan.seconds + growth.seconds
                if code not in best or seconds < best[code].seconds:
                    held = before + tuple([growth.after[k] for k in self.alive])
                    best[code] = _Found(parent, growth, seconds, held, code)
        return list(best.values())

    def _is_near(self, place: int) -> bool:
        return self.role.kind.tensors[place].is_near

    def _pruned(self, found: Sequence[_Found]) -> list[_Found]:
        """The cheapest plans that no other reaches."""
        kept: list[_Found] = []
        for f in found:
            if len(kept) == self.width:
                break
            limit = f.seconds + EPSILON
            if not any(self.coder.reaches(k.seconds, k.code, limit, f.code) for k in kept):
                kept.append(f)
        return kept

    def _known(self, found: Sequence[_Found], grown: Sequence[_Found]) -> list[Available]:
        """For each open tensor its shardings in the plans that are kept, then in the cheapest of the others."""
        known = [self.front.known[place] for place in self.kept]
        for column in range(len(self.kept), len(self.types)):
            seen = dict.fromkeys(s for f in found for s in f.held[column])
            more = dict.fromkeys(s for f in grown for s in f.held[column] if s not in seen)
            known.append((*seen, *list(more)[: max(KNOWN - len(seen), 0)]))
        return known

    def _decided(self, found: list[_Found], old: int) -> list[_Found]:
        """The plans that hold the first tensors as the best one does."""
        best = found[0].held[:old]
        return [f for f in found if f.held[:old] == best]


def _relative(found: _Found, best: _Found, columns: Sequence[int]) -> Plan:
    """In terms of the tensors that are left open; rounded, so that the plans at the ends of equal layers are equal."""
    return Plan(round(found.seconds - best.seconds, 15), tuple(found.held[c] for c in columns))


def _steps(strides: Sequence[Stride]) -> list[Step]:
    out, place = [], 0
    for stride in reversed(strides):
        move = stride.moves[place]
        out.append(move.step)
        place = move.parent
    return out[::-1]
