"""A cost graph without its variables of one or two neighbours, which are eliminated exactly.

The reductions RI and RII of partitioned boolean quadratic problems (Scholz and Eckstein 2002): the least that such a
variable costs, by the labels of its neighbours, is an edge between these. What is left of a model is its core, a tenth
of its variables; the labels of the others follow from those of the core.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from .cost_graph import CostGraph, Costs, Dense, Edge

# Cells of the largest table of labels by labels: edges of more are quicker by what their labels have in common.
_MOST_CELLS = 1 << 16


@dataclass(frozen=True, slots=True)
class Removed:
    """A variable that is gone: its best label, [labels of each neighbour]."""

    variable: int
    neighbours: tuple[int, ...]
    best: np.ndarray


@dataclass(frozen=True, slots=True)
class Reduced:
    """The core, the numbers that its variables had, what is gone in order, and the rest of the value."""

    core: CostGraph
    kept: tuple[int, ...]
    removed: tuple[Removed, ...]
    constant: float

    def whole(self, labels: Sequence[int]) -> tuple[int, ...]:
        """The best labels of all variables, given those of the core."""
        out = [0] * (len(self.kept) + len(self.removed))
        for variable, label in zip(self.kept, labels, strict=True):
            out[variable] = int(label)
        for gone in reversed(self.removed):
            out[gone.variable] = int(gone.best[tuple([out[v] for v in gone.neighbours])])
        return tuple(out)


def reduced(graph: CostGraph) -> Reduced:
    """The core of a graph."""
    tables = _Tables(graph)
    tables.run()
    kept = [v for v in range(len(graph.costs)) if v in tables.near]
    number = {v: n for n, v in enumerate(kept)}
    edges = [Dense((number[a], number[b]), table) for (a, b), table in tables.edges.items()]
    large = [edge.between((number[edge.sides[0]], number[edge.sides[1]])) for edge in tables.large]
    core = CostGraph([tables.costs[v] for v in kept], [*edges, *large])
    return Reduced(core, tuple(kept), tuple(tables.removed), tables.constant)


@dataclass(slots=True)
class _Tables:
    """What variables cost alone, and in pairs as one table [labels of the lower number, of the higher].

    `large` edges have more pairs than a table may have; their variables stay.
    """

    graph: CostGraph
    costs: list[Costs] = field(default_factory=list)
    edges: dict[tuple[int, int], Costs] = field(default_factory=dict)
    large: list[Edge] = field(default_factory=list)
    near: dict[int, set[int]] = field(default_factory=dict)
    removed: list[Removed] = field(default_factory=list)
    constant: float = 0.0

    def __post_init__(self) -> None:
        self.costs = [*self.graph.costs]
        self.near = {v: set() for v in range(len(self.costs))}
        for edge in self.graph.edges:
            a, b = edge.sides
            if len(self.costs[a]) * len(self.costs[b]) <= _MOST_CELLS:
                self._add(a, b, edge.table())
            else:
                self.large.append(edge)
                self.near[a].add(b)
                self.near[b].add(a)

    def run(self) -> None:
        """Remove variables as long as some have at most two neighbours."""
        waiting = [*reversed(self.near)]
        while waiting:
            v = waiting.pop()
            if v in self.near and len(self.near[v]) <= 2:
                around = sorted(self.near[v])
                if np.prod([len(self.costs[u]) for u in (v, *around)]) <= _MOST_CELLS:
                    self._remove(v, around)
                    waiting += around

    def _remove(self, v: int, around: Sequence[int]) -> None:
        table = self.costs[v].reshape(-1, *[1] * len(around))
        for n, u in enumerate(around):
            edge = self.edges.pop((min(u, v), max(u, v)))
            edge = edge if v < u else edge.T
            table = table + (edge[:, None, :] if n else edge.reshape(*edge.shape, *[1] * (len(around) - 1)))
            self.near[u].discard(v)
        del self.near[v]
        self.removed.append(Removed(v, tuple(around), table.argmin(0)))
        least = table.min(0)
        if not around:
            self.constant += float(least)
        elif len(around) == 1:
            self._add_costs(around[0], least)
        else:
            self._add(around[0], around[1], least)

    def _add(self, a: int, b: int, table: Costs) -> None:
        """What two variables cost together; what depends on one alone is that one's own."""
        if table.shape[0] == 1 or table.shape[1] == 1:
            self._add_costs(*((b, table[0]) if table.shape[0] == 1 else (a, table[:, 0])))
            return
        (low, high), table = ((a, b), table) if a < b else ((b, a), table.T)
        known = self.edges.get((low, high))
        self.edges[low, high] = table if known is None else known + table
        self.near[low].add(high)
        self.near[high].add(low)

    def _add_costs(self, v: int, costs: Costs) -> None:
        self.costs[v] = self.costs[v] + costs
