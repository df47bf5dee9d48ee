"""Lower bounds of a cost graph, and with them its exact minimum where the tables of elimination would be too large.

Dual ascent by sequential messages (TRW-S: Kolmogorov 2006): messages move costs between neighbours, which changes no
assignment's total, until the sum of all least costs, a lower bound of every assignment, grows no more. A label whose
assignments all exceed a known one is dropped; what is left is eliminated exactly.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from .cost_graph import CostGraph, Costs, Numbers, numbered
from .elimination import Assignment, Order, eliminate, elimination_order
from .reduction import reduced

# Cells of all tables of one elimination, some hundredths of a second and 32 MB. Whoever has less time or memory may
# lower it; a plan that is then no longer proven says so.
MOST_CELLS = 1 << 22
# Sweeps before labels are looked at again, and in all; edges of these sweeps in all, some seconds. A plan that is not
# proven by then has a gap, which is stated.
_SWEEPS, MOST_SWEEPS, _MOST_EDGES = 8, 64, 80_000
# From one look to the next the bound or the best value is to change by this part of it, or the number of labels to
# become that part of what it was: what is left else is no matter of more sweeps.
ADVANCE, _FEWER = 1e-3, 0.8
# The part of the value by which a bound may be below it without more sweeps for the bound alone.
_CLOSE = 0.01
# How many bounds of the slack are tried: the closer, the more labels are eliminated together.
_LEVELS = 16
# So many labels of every variable are tried together.
_FEW = 12
# The part of the value by which costs count as equal.
TOLERANCE = 1e-12


NONE = Assignment((), np.inf)


@dataclass(frozen=True, slots=True)
class Certified:
    """An assignment, and what no assignment costs less than."""

    assignment: Assignment
    bound: float

    @property
    def gap(self) -> float:
        """The part of the value by which a better assignment may cost less; 0 where this one is proven the best."""
        value = self.assignment.value
        return (value - self.bound) / abs(value) if value - self.bound > TOLERANCE * abs(value) else 0.0

    def repriced(self, before: CostGraph, now: CostGraph) -> Certified:
        """The same assignment at other costs: the bound is less by what may have become cheaper."""
        labels = self.assignment.labels
        return Certified(Assignment(labels, now.value(labels)), self.bound - before.most_above(now))


def solve(
    graph: CostGraph, most_cells: int = MOST_CELLS, known: Assignment | None = None, sweeps: int = MOST_SWEEPS,
    below: float = np.inf,
) -> Certified:  # fmt: skip
    """The assignment that costs least, with its proof; one with a gap where its tables would be too large.

    known: a good assignment: labels that are in no better one are dropped sooner.
    sweeps: how many are made at most; few suffice for a better assignment than a known one, if not for its proof.
    below: what the assignment is to cost less than; any one is found where the bound shows that none does.
    """
    small = reduced(graph)
    labels = None if known is None else [known.labels[v] for v in small.kept]
    found = _solved(small.core, most_cells, labels, sweeps, below - small.constant)
    best = Assignment(small.whole(found.assignment.labels), found.assignment.value + small.constant)
    return Certified(best, found.bound + small.constant)


def _solved(core: CostGraph, most_cells: int, known: Sequence[int] | None, sweeps: int, below: float) -> Certified:
    order = elimination_order(core.sizes(), core.sides())
    if order.cells <= most_cells:
        best = eliminate(core, order)
        return Certified(best, best.value)
    start = Assignment(tuple(known), core.value(known)) if known else NONE
    return _Ascent(core, most_cells, start, below).run(sweeps)


class _Ascent:
    """A cost graph from which labels are dropped; `kept` are the first numbers of those that are left."""

    def __init__(self, graph: CostGraph, most_cells: int, known: Assignment, below: float):
        self.graph, self.most_cells, self.below = graph, most_cells, below
        self.kept = [np.arange(n) for n in graph.sizes()]
        self.messages = Messages(graph)
        self.best = known
        self.bound = -np.inf

    def run(self, most: int) -> Certified:
        """The best assignment after at most so many sweeps, and the bound."""
        sweeps, before = min(most, _MOST_EDGES // max(len(self.graph.edges), 1)), (-np.inf, np.inf, np.inf)
        for _ in range(max(sweeps // _SWEEPS, 1)):
            for _ in range(_SWEEPS):
                self.messages.sweep()
            bound = self.messages.bound()
            slacks = [*self.messages.slacks()]
            within = self._near(slacks, bound)
            # Whatever has a label with a larger slack costs more than this.
            self.bound = max(self.bound, min(bound + within, self.best.value))
            if self._is_closed():
                return Certified(self.best, self.bound if self.best.value > self.below else self.best.value)
            before, now = (bound, self.best.value, sum(self.graph.sizes())), before
            if not _advances(now, before):
                break
            self._drop(slacks, self._allowed(bound))
        return Certified(self.best, self.bound)

    def _is_closed(self) -> bool:
        return min(self.best.value, self.below) - self.bound <= TOLERANCE * abs(self.best.value)

    def _near(self, slacks: Sequence[Costs], bound: float) -> float:
        """Take the best assignment of labels with the least slack, of as many as can be eliminated.

        Returns by how much every other assignment exceeds the bound at least.
        """
        self._round(slacks)
        levels = numbered(np.concatenate(slacks))[0]
        # No assignment with a label of more slack is good enough.
        useful = max(int(np.searchsorted(levels, self._allowed(bound), "right")), 1)
        level, order = self._level(slacks, levels[:useful])
        if order is None:
            return 0.0
        least = [np.array([slack.argmin()]) for slack in slacks]
        within = [np.flatnonzero(slack <= level) for slack in slacks]
        self._eliminate([some if len(some) else one for some, one in zip(within, least, strict=True)], order)
        above = int(np.searchsorted(levels, level, "right"))
        return float(levels[above]) if above < len(levels) else np.inf

    def _level(self, slacks: Sequence[Costs], levels: Costs) -> tuple[float, Order | None]:
        """The most slack, of some of these levels, whose labels can be eliminated, and their order; None for none."""
        ordered, sides = [np.sort(slack) for slack in slacks], self.graph.sides()
        found: tuple[float, Order | None] = (0.0, None)
        tried = _quantiles(levels)
        low, high, middle = 0, len(tried), len(tried) - 1  # All of them first: often they can.
        while low < high:
            sizes = [max(1, int(np.searchsorted(slack, tried[middle], "right"))) for slack in ordered]
            order = elimination_order(sizes, sides)
            if order.cells <= self.most_cells:
                found, low = (float(tried[middle]), order), middle + 1
            else:
                high = middle
            middle = (low + high) // 2
        return found

    def _round(self, slacks: Sequence[Costs]) -> None:
        """Take the messages' own assignments, and the best one of every variable's few labels with the least slack."""
        for backward in (False, True):
            labels = self.messages.rounded(backward)
            self._take(Assignment(tuple(labels), self.graph.value(labels)))
        kept = [np.argsort(slack, kind="stable")[:_FEW] for slack in slacks]
        order = elimination_order([*map(len, kept)], self.graph.sides())
        if order.cells <= self.most_cells:
            self._eliminate(kept, order)

    def _eliminate(self, kept: Sequence[Numbers], order: Order) -> None:
        """Take the best assignment of these labels."""
        small = eliminate(self.graph.only(kept), order)
        self._take(Assignment(tuple(int(k[n]) for k, n in zip(kept, small.labels, strict=True)), small.value))

    def _take(self, found: Assignment) -> None:
        if found.value < self.best.value:
            labels = [int(kept[label]) for kept, label in zip(self.kept, found.labels, strict=True)]
            self.best = Assignment(tuple(labels), found.value)

    def _allowed(self, bound: float) -> float:
        """The slack that a label in a better assignment has at most."""
        return min(self.best.value, self.below) - bound + TOLERANCE * abs(self.best.value)

    def _drop(self, slacks: Sequence[Costs], allowed: float) -> None:
        """Drop the labels that are in no better assignment."""
        kept = [np.flatnonzero(slack <= allowed) for slack in slacks]
        kept = [now if len(now) else np.arange(len(before)) for now, before in zip(kept, self.kept, strict=True)]
        self.kept = [before[now] for before, now in zip(self.kept, kept, strict=True)]
        self.graph, self.messages = self.graph.only(kept), self.messages.only(kept)


def _advances(before: tuple[float, float, float], now: tuple[float, float, float]) -> bool:
    """Whether the bound, the best value or the number of labels has become better by some part."""
    bound, best, labels = now
    rises = best - bound > _CLOSE * abs(best) and bound - before[0] > ADVANCE * abs(bound)
    return rises or before[1] - best > ADVANCE * abs(best) or labels < _FEWER * before[2]


def _quantiles(values: Costs) -> Costs:
    """Some of these sorted values, most of them low ones: the tables grow fast with the number of labels."""
    places = numbered(np.geomspace(1, len(values), _LEVELS).astype(np.int64) - 1)[0]
    return values[places]


class Messages:
    """What edges have given to the labels of their two sides: an edge's own costs are less by both."""

    def __init__(self, graph: CostGraph):
        self.graph = graph
        self.sent = [[np.zeros(len(graph.costs[v])) for v in edge.sides] for edge in graph.edges]
        self.at = [list[tuple[int, int]]() for _ in graph.costs]  # by variable, its edges and which side it is
        for number, edge in enumerate(graph.edges):
            for side, v in enumerate(edge.sides):
                self.at[v].append((number, side))
        # Of these, the edges to variables before this one, and to those after it.
        self.sides = [tuple([[at for at in near if (graph.edges[at[0]].sides[1 - at[1]] > v) == after]
                             for after in (False, True)]) for v, near in enumerate(self.at)]  # fmt: skip

    def only(self, kept: Sequence[Numbers]) -> Messages:
        """The messages about some of the labels."""
        out = Messages(self.graph.only(kept))
        out.sent = [[sent[kept[v]] for sent, v in zip(both, edge.sides, strict=True)]
                    for both, edge in zip(self.sent, self.graph.edges, strict=True)]  # fmt: skip
        return out

    def _belief(self, v: int) -> Costs:
        """What a variable's labels cost with all that its neighbours say."""
        out = self.graph.costs[v].copy()
        for edge, side in self.at[v]:
            out += self.sent[edge][side]
        return out

    def sweep(self) -> None:
        """Once forward and once back."""
        for v, (before, after) in enumerate(self.sides):
            self._pass(v, before, after)
        for v in reversed(range(len(self.sides))):
            before, after = self.sides[v]
            self._pass(v, after, before)

    def _pass(self, v: int, behind: Sequence[tuple[int, int]], ahead: Sequence[tuple[int, int]]) -> None:
        """Take from the edges behind what they cost at least, and hand all on in equal parts to those ahead.

        From those ahead it was taken when the sweep last came by, and their other sides have not changed since.
        """
        for edge, side in behind:
            self.sent[edge][side] = self.graph.edges[edge].passed(-self.sent[edge][1 - side], back=side == 0)
        if ahead:
            part = self._belief(v) / max(len(ahead), len(behind))
            for edge, side in ahead:
                self.sent[edge][side] -= part

    def _edge_least(self, number: int, side: int) -> Costs:
        """For each label on a side of an edge, what the edge costs at least, less both messages."""
        other = self.graph.edges[number].passed(-self.sent[number][1 - side], back=side == 0)
        return other - self.sent[number][side]

    def bound(self) -> float:
        """What no assignment costs less than."""
        alone = sum(float(self._belief(v).min()) for v in range(len(self.graph.costs)))
        return alone + sum(float(self._edge_least(number, 0).min()) for number in range(len(self.graph.edges)))

    def slacks(self) -> Iterable[Costs]:
        """For every label, by how much the assignments with it exceed the bound at least."""
        for v in range(len(self.graph.costs)):
            parts = [self._belief(v), *[self._edge_least(edge, side) for edge, side in self.at[v]]]
            yield np.add.reduce([part - part.min() for part in parts])

    def rounded(self, backward: bool = False) -> list[int]:
        """An assignment, one variable after another, each in view of those before it."""
        labels, known = [0] * len(self.graph.costs), set[int]()
        for v in reversed(range(len(labels))) if backward else range(len(labels)):
            costs = self.graph.costs[v].copy()
            for number, side in self.at[v]:
                edge = self.graph.edges[number]
                other = edge.sides[1 - side]
                if other in known:
                    values = np.full(len(self.graph.costs[other]), np.inf)
                    values[labels[other]] = 0.0
                    costs += edge.passed(values, back=side == 0)
                else:
                    costs += edge.passed(-self.sent[number][1 - side], back=side == 0)
            labels[v] = int(costs.argmin())
            known.add(v)
        return labels
