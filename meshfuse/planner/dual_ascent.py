"""Lower bounds of a cost graph, and with them its exact minimum where the tables of elimination would be too large.

Dual ascent by sequential reparametrisation (TRW-S: Kolmogorov 2006; SRMP: Kolmogorov 2015): costs are moved between
variables and pairs, which changes no assignment's total, until the sum of all least costs, a lower bound of every
assignment, grows no more. A label whose reduced cost exceeds the bound by more than a known assignment does is in no
better one, and is dropped; what is left is eliminated exactly.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from .cost_graph import CostGraph, Costs
from .elimination import Assignment, eliminate, elimination_order

# Cells of the largest table that is made in memory: 64 MB of float64. Whoever has less memory may lower it; plans that
# then are no longer proven say so.
MOST_CELLS = 1 << 23
# Sweeps forward and back before the labels are looked at again; doubled each time that drops none, up to so many.
_SWEEPS, _MOST_SWEEPS = 8, 64
# Parts of the value by which two costs are equal.
TOLERANCE = 1e-9


@dataclass(frozen=True, slots=True)
class Certified:
    """An assignment, and what no assignment costs less than."""

    assignment: Assignment
    bound: float

    @property
    def gap(self) -> float:
        """The part of the value by which a better assignment may cost less: 0 where this one is proven the best."""
        value = self.assignment.value
        gap = value - self.bound
        return gap / abs(value) if gap > TOLERANCE * abs(value) else 0.0


def solve(graph: CostGraph, most_cells: int = MOST_CELLS) -> Certified:
    """The assignment that costs least, with its proof; one with a gap where its tables would be too large."""
    order = elimination_order(graph)
    if order.cells <= most_cells:
        best = eliminate(graph, order)
        return Certified(best, best.value)
    return _Ascent(graph, most_cells).run()


class _Ascent:
    """The dual of a cost graph from which labels are dropped; `kept` are those left, by their first numbers."""

    def __init__(self, graph: CostGraph, most_cells: int):
        self.whole, self.most_cells = graph, most_cells
        self.kept = [np.arange(n) for n in graph.sizes()]
        self.graph = graph
        self.dual = _Dual(graph)
        self.best = Assignment(tuple(improved(graph, [0] * len(graph.costs))), np.inf)
        self.bound = -np.inf

    def run(self) -> Certified:
        sweeps = _SWEEPS
        while sweeps <= _MOST_SWEEPS:
            for _ in range(sweeps):
                self.dual.sweep()
            self._round()
            self.bound = max(self.bound, self.dual.bound())
            if self._is_closed():
                return Certified(self.best, self.best.value)
            dropped = self._drop()
            order = elimination_order(self.graph)
            if order.cells <= self.most_cells:
                self._finish(eliminate(self.graph, order))
                return Certified(self.best, self.best.value)
            sweeps = sweeps if dropped else sweeps * 2
        return Certified(self.best, self.bound)

    def _is_closed(self) -> bool:
        return self.best.value - self.bound <= TOLERANCE * abs(self.best.value)

    def _round(self) -> None:
        """Take the dual's own assignment, improved one variable at a time, where it is better than the best."""
        for backward in (False, True):
            labels = improved(self.graph, self.dual.rounded(backward))
            self._finish(Assignment(tuple(labels), self.graph.value(labels)))

    def _finish(self, found: Assignment) -> None:
        if found.value < self.best.value:
            labels = [int(kept[label]) for kept, label in zip(self.kept, found.labels, strict=True)]
            self.best = Assignment(tuple(labels), found.value)

    def _drop(self) -> bool:
        """Drop the labels that are in no better assignment; returns whether there were any."""
        allowed = self.best.value - self.dual.bound() + TOLERANCE * abs(self.best.value)
        kept = [np.flatnonzero(slack <= allowed) for slack in self.dual.slacks()]
        for place, labels in enumerate(kept):
            if not len(labels):  # only rounding can have dropped all of them
                kept[place] = np.arange(len(self.kept[place]))
        if all(len(now) == len(before) for now, before in zip(kept, self.kept, strict=True)):
            return False
        self.kept = [before[now] for before, now in zip(self.kept, kept, strict=True)]
        self.graph, self.dual = self.graph.restricted(kept), self.dual.restricted(kept)
        return True


class _Dual:
    """A reparametrisation of a cost graph, whose variables are swept in their order."""

    def __init__(self, graph: CostGraph):
        self.near = [sorted(neighbours) for neighbours in graph.neighbours]
        self.costs = [costs.copy() for costs in graph.costs]
        self.pairs = {key: table.copy() for key, table in graph.pairs.items()}

    def restricted(self, kept: Sequence[np.ndarray]) -> _Dual:
        """The same without some labels."""
        out = object.__new__(_Dual)
        out.near = self.near
        out.costs = [costs[k] for costs, k in zip(self.costs, kept, strict=True)]
        out.pairs = {(a, b): table[np.ix_(kept[a], kept[b])] for (a, b), table in self.pairs.items()}
        return out

    def _table(self, a: int, b: int) -> Costs:
        """A view of the pair's table, [labels of a, labels of b]."""
        return self.pairs[a, b] if a < b else self.pairs[b, a].T

    def sweep(self) -> None:
        """Once forward and once back."""
        count = len(self.costs)
        for v in range(count):
            self._pass(v, [u for u in self.near[v] if u > v], [u for u in self.near[v] if u < v])
        for v in reversed(range(count)):
            self._pass(v, [u for u in self.near[v] if u < v], [u for u in self.near[v] if u > v])

    def _pass(self, v: int, ahead: list[int], behind: list[int]) -> None:
        """Gather what all pairs of a variable cost at least, and hand it on in equal parts to those ahead."""
        costs = self.costs[v]
        for u in self.near[v]:
            table = self._table(v, u)
            least = table.min(1)
            costs += least
            table -= least[:, None]
        if ahead:
            part = costs / max(len(ahead), len(behind))
            for u in ahead:
                self._table(v, u)[...] += part[:, None]
            costs -= part * len(ahead)

    def bound(self) -> float:
        """What no assignment costs less than."""
        return sum(float(costs.min()) for costs in self.costs) + sum(float(t.min()) for t in self.pairs.values())

    def slacks(self) -> list[np.ndarray]:
        """For every label, by how much the assignments with it exceed the bound at least."""
        out = []
        for v, costs in enumerate(self.costs):
            slack = costs - costs.min()
            for u in self.near[v]:
                least = self._table(v, u).min(1)
                slack = slack + least - least.min()
            out.append(slack)
        return out

    def rounded(self, backward: bool = False) -> list[int]:
        """An assignment, one variable after another, each in view of those before it."""
        labels, known = [0] * len(self.costs), set[int]()
        for v in reversed(range(len(self.costs))) if backward else range(len(self.costs)):
            costs = self.costs[v].copy()
            for u in self.near[v]:
                table = self._table(v, u)
                costs += table[:, labels[u]] if u in known else table.min(1)
            labels[v] = int(costs.argmin())
            known.add(v)
        return labels


def improved(graph: CostGraph, labels: Sequence[int]) -> list[int]:
    """An assignment that no change of one label makes better (iterated conditional modes: Besag 1986)."""
    out = list(labels)
    queue, waiting = list(range(len(out))), [True] * len(out)
    while queue:
        v = queue.pop(0)
        waiting[v] = False
        costs = graph.costs[v].copy()
        for u in graph.neighbours[v]:
            costs += graph.pair(v, u)[:, out[u]]
        best = int(costs.argmin())
        if costs[best] < costs[out[v]] * (1 - TOLERANCE):
            out[v] = best
            fresh = [u for u in graph.neighbours[v] if not waiting[u]]
            for u in fresh:
                waiting[u] = True
            queue += fresh
    return out
