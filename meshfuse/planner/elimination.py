"""Exact minimisation of a cost graph by eliminating one variable after another.

Bucket elimination (Dechter 1999), also known as nonserial dynamic programming (Bertelè and Brioschi 1972): the costs
that mention a variable are added to one table over it and its neighbours, and its least costs, with the label that
attains them, stand for it from then on. The work is in the largest table: small where the graph is nearly a tree, as
models' are.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from .cost_graph import CostGraph, Costs, least_along, table_of


@dataclass(frozen=True, slots=True)
class Assignment:
    """A label for every variable, and what that costs."""

    labels: tuple[int, ...]
    value: float


@dataclass(frozen=True, slots=True)
class Step:
    """One elimination: the variable, and the variables that its table has as well."""

    variable: int
    scope: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Order:
    """In which order variables are eliminated; `cells` are those of all tables together."""

    steps: tuple[Step, ...]
    cells: int


def elimination_order(sizes: Sequence[int], sides: Iterable[tuple[int, int]]) -> Order:
    """Always the variable whose table is smallest, of equal ones the one with fewest neighbours, then the first.

    A variable of one label is nobody's neighbour: what it costs with another's labels depends on these alone.
    """
    near = [set[int]() for _ in sizes]
    for a, b in sides:
        if sizes[a] > 1 and sizes[b] > 1:
            near[a].add(b)
            near[b].add(a)
    queue = [(*_table(sizes, near, v), v) for v in range(len(sizes))]
    heapq.heapify(queue)
    steps, cells, done = list[Step](), 0, [False] * len(sizes)
    while queue:
        *size, v = heapq.heappop(queue)
        if done[v] or tuple(size) != _table(sizes, near, v):
            continue
        done[v], cells = True, cells + size[0]
        steps.append(Step(v, tuple(sorted(near[v]))))
        for other in near[v]:
            near[other] |= near[v]
            near[other] -= {other, v}
        for other in near[v]:
            heapq.heappush(queue, (*_table(sizes, near, other), other))
    return Order(tuple(steps), cells)


def _table(sizes: Sequence[int], near: Sequence[set[int]], variable: int) -> tuple[int, int]:
    cells = sizes[variable]
    for other in near[variable]:
        cells *= sizes[other]
    return cells, len(near[variable])


def eliminate(graph: CostGraph, order: Order) -> Assignment:
    """The assignment that costs least; of equal ones that of the first labels, in the order of elimination."""
    place = {step.variable: n for n, step in enumerate(order.steps)}
    buckets = _Buckets(graph, place)
    chosen = list[tuple[Step, list[_Part]]]()
    total = 0.0
    for step in order.steps:
        parts = buckets.held.pop(step.variable)
        chosen.append((step, parts))
        least = least_along(buckets.table(step, parts), 0)
        if step.scope:
            buckets.add(step.scope, least)
        else:
            total += float(least)
    labels = [0] * len(graph.costs)
    for step, parts in reversed(chosen):
        labels[step.variable] = _best(step.variable, parts, labels)
    return Assignment(tuple(labels), total)


class _Part(NamedTuple):
    """Costs over some variables."""

    scope: tuple[int, ...]
    table: Costs


def _best(variable: int, parts: Sequence[_Part], labels: Sequence[int]) -> int:
    """The label of a variable that costs least with these of the variables after it."""
    rows = [table[tuple([slice(None) if v == variable else labels[v] for v in scope])] for scope, table in parts]
    return int(sum(rows[1:], rows[0]).argmin())


class _Buckets:
    """The tables that are still to be added up, each with the first of its variables to be eliminated."""

    def __init__(self, graph: CostGraph, place: dict[int, int]):
        self.sizes, self.place = graph.sizes(), place
        self.held: dict[int, list[_Part]] = {}
        for v, costs in enumerate(graph.costs):
            self.add((v,), costs)
        for edge in graph.edges:
            scope = tuple([v for v in edge.sides if self.sizes[v] > 1]) or edge.sides[:1]
            self.add(scope, table_of(edge).reshape([self.sizes[v] for v in scope]))

    def add(self, scope: tuple[int, ...], table: Costs) -> None:
        self.held.setdefault(min(scope, key=self.place.__getitem__), []).append(_Part(scope, table))

    def table(self, step: Step, parts: Sequence[_Part]) -> Costs:
        """All that mentions a variable, over it and then its scope."""
        axes = (step.variable, *step.scope)
        out = np.zeros([self.sizes[v] for v in axes])
        for scope, table in parts:
            ordered = sorted(range(len(scope)), key=lambda k: axes.index(scope[k]))
            shape = [self.sizes[v] if v in scope else 1 for v in axes]
            out += table.transpose(ordered).reshape(shape)
        return out
