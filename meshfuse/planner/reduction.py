"""A cost graph without its variables of one or two neighbours, which are eliminated exactly.

The reductions RI and RII of partitioned boolean quadratic problems (Scholz and Eckstein 2002): the least that such a
variable costs, by the labels of its neighbours, is an edge between these. What is left of a model is its core, a tenth
of its variables; the labels of the others follow from those of the core.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from .cost_graph import CostGraph, Costs, Dense, Edge, least_along, quickest, table_of

# Cells of the largest table of labels by labels.
_MOST_CELLS = 1 << 16


@dataclass(frozen=True, slots=True)
class Removed:
    """A variable that is gone: what its labels cost, and with each neighbour's, [its labels, the neighbour's]."""

    variable: int
    costs: Costs
    neighbours: tuple[int, ...]
    tables: tuple[Costs, ...]

    def best(self, labels: Sequence[int]) -> int:
        """Its best label, given those of its neighbours."""
        costs = self.costs
        for other, table in zip(self.neighbours, self.tables, strict=True):
            costs = costs + table[:, labels[other]]
        return int(costs.argmin())


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
            out[gone.variable] = gone.best(out)
        return tuple(out)


def reduced(graph: CostGraph) -> Reduced:
    """The core of a graph."""
    tables = _Tables(graph)
    tables.run()
    kept = [v for v in range(len(graph.costs)) if v in tables.near]
    number = {v: n for n, v in enumerate(kept)}
    sizes = graph.sizes()
    edges = [*[quickest(edge, sizes[a] * sizes[b]) for (a, b), edge in tables.edges.items()], *tables.large]
    placed = [edge.between((number[edge.sides[0]], number[edge.sides[1]])) for edge in edges]
    return Reduced(
        CostGraph([tables.costs[v] for v in kept], placed), tuple(kept), tuple(tables.removed), tables.constant
    )


@dataclass(slots=True)
class _Tables:
    """What variables cost alone, and in pairs by the lower number and the higher.

    `large` edges have more pairs than a table may have; their variables stay.
    """

    graph: CostGraph
    costs: list[Costs] = field(default_factory=list)
    edges: dict[tuple[int, int], Edge] = field(default_factory=dict)
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
                self._add(edge)
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
                if math.prod([len(self.costs[u]) for u in (v, *around)]) <= _MOST_CELLS:
                    self._remove(v, around)
                    waiting += around

    def _remove(self, v: int, around: Sequence[int]) -> None:
        tables = tuple([_from(v, self.edges.pop((min(u, v), max(u, v)))) for u in around])
        self.removed.append(Removed(v, self.costs[v], tuple(around), tables))
        del self.near[v]
        for u in around:
            self.near[u].discard(v)
        if not around:
            self.constant += float(self.costs[v].min())
            return
        table = self.costs[v][:, None] + tables[0]
        if len(around) == 1:
            self._add_costs(around[0], least_along(table, 0))
        else:
            least = least_along(table[:, :, None] + tables[1][:, None, :], 0)
            self._add(Dense((around[0], around[1]), least))

    def _add(self, edge: Edge) -> None:
        """Add what two variables cost together; what depends on one alone is that one's own."""
        a, b = edge.sides
        if len(self.costs[a]) == 1 or len(self.costs[b]) == 1:
            table = table_of(edge)
            self._add_costs(*((b, table[0]) if len(self.costs[a]) == 1 else (a, table[:, 0])))
            return
        low, high = sides = min(a, b), max(a, b)
        known = self.edges.get(sides)
        if known is not None:
            edge = Dense(sides, _from(low, known) + _from(low, edge))
        self.edges[sides] = edge
        self.near[low].add(high)
        self.near[high].add(low)

    def _add_costs(self, v: int, costs: Costs) -> None:
        self.costs[v] = self.costs[v] + costs


def _from(v: int, edge: Edge) -> Costs:
    """The table of an edge, [labels of one of its variables, labels of the other]."""
    table = table_of(edge)
    return table if edge.sides[0] == v else table.T
