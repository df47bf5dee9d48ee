"""A problem of many choices: every variable takes one label, at a cost, and neighbours' labels cost together.

The planner's variables are the placements of ops and the copies of tensors (`planner.program`); here they are numbers.
What neighbours' labels cost depends on few things about them, such as the sharding of one tensor. An edge knows these:
costs are passed along it with far less work than its table of all pairs has cells.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

import numpy as np

Costs = np.ndarray  # float64
Numbers = np.ndarray  # of labels, or of what they have in common
# An array's least values along an axis: its method `min` is a detour through Python.
least_along = np.minimum.reduce


def numbered(values: np.ndarray) -> tuple[np.ndarray, Numbers]:
    """The different values of a row, ascending, and which one each is.

    As numpy's `unique`, which loads masked arrays first: that takes longer than most plannings.
    """
    order = values.argsort(kind="stable")
    ordered = values[order]
    is_new = np.concatenate([[True], ordered[1:] != ordered[:-1]])[: len(values)]
    which = np.empty(len(values), dtype=np.int64)
    which[order] = np.cumsum(is_new) - 1
    return ordered[is_new], which


class Classes:
    """Labels by what they have in common: `of[label]` is a label's class."""

    __slots__ = ("_sorted", "count", "of")

    def __init__(self, of: Numbers, count: int):
        self.of, self.count = of, count
        self._sorted: tuple[Numbers, Numbers] | None = None

    def least(self, values: Costs) -> Costs:
        """By class the least value of its labels; inf for a class without labels."""
        order, starts = self._sorted = self._sorted or self._sort()
        out = np.full(self.count, np.inf)
        if len(values):
            out[self.of[order[starts]]] = np.minimum.reduceat(values[order], starts)
        return out

    def _sort(self) -> tuple[Numbers, Numbers]:
        """The labels by class, and where each class begins among them."""
        order = np.argsort(self.of, kind="stable")
        ordered = self.of[order]
        return order, np.flatnonzero(np.concatenate([[True], ordered[1:] != ordered[:-1]]))

    def only(self, labels: Numbers) -> tuple[Classes, Numbers]:
        """The classes of some of the labels, numbered anew, and their old numbers."""
        if len(labels) == 1:
            return _ONE, self.of[labels]
        there, of = numbered(self.of[labels])
        return Classes(of, len(there)), there


_ONE = Classes(np.zeros(1, dtype=np.int64), 1)


class Digits(Classes):
    """Labels that are pairs of numbers, row by row; their classes are the first numbers, or (`axis` 1) the second."""

    __slots__ = ("axis", "shape")

    def __init__(self, shape: tuple[int, int], axis: int):
        pairs = np.arange(shape[0] * shape[1])
        super().__init__(pairs % shape[1] if axis else pairs // shape[1], shape[axis])
        self.shape, self.axis = shape, axis

    def least(self, values: Costs) -> Costs:
        return values.reshape(self.shape).min(1 - self.axis)


class Edge(Protocol):
    """What the labels of two variables cost together; `sides` are their numbers."""

    @property
    def sides(self) -> tuple[int, int]: ...

    def passed(self, values: Costs, back: bool) -> Costs:
        """For each label of the second side the least of (value of a label of the first + what both cost); or back."""
        ...

    def at(self, first: int, second: int) -> float:
        """What a label of the first side and one of the second cost."""
        ...

    def only(self, first: Numbers, second: Numbers) -> Edge:
        """The same for some of the labels of both sides."""
        ...

    def pairs(self, first: Numbers | slice, second: Numbers | slice) -> Costs:
        """What some of the pairs cost: [labels of the first side, labels of the second]."""
        ...

    def between(self, sides: tuple[int, int]) -> Edge:
        """The same between variables of other numbers."""
        ...

    def tables(self) -> tuple[Costs, ...]:
        """The costs of which each pair's is the least."""
        ...


@dataclass(frozen=True, slots=True)
class Between:
    """Costs by the classes of both sides' labels: `costs` is [classes of the first, classes of the second]."""

    sides: tuple[int, int]
    costs: Costs
    first: Classes
    second: Classes

    def passed(self, values: Costs, back: bool) -> Costs:
        if back:
            return least_along(self.costs + self.second.least(values), 1)[self.first.of]
        return least_along(self.costs + self.first.least(values)[:, None], 0)[self.second.of]

    def at(self, first: int, second: int) -> float:
        return float(self.costs[self.first.of[first], self.second.of[second]])

    def only(self, first: Numbers, second: Numbers) -> Between:
        (one, rows), (two, columns) = self.first.only(first), self.second.only(second)
        return Between(self.sides, self.costs[rows[:, None], columns], one, two)

    def between(self, sides: tuple[int, int]) -> Between:
        return replace(self, sides=sides)

    def pairs(self, first: Numbers | slice, second: Numbers | slice) -> Costs:
        return self.costs[self.first.of[first]][:, self.second.of[second]]

    def tables(self) -> tuple[Costs, ...]:
        return (self.costs,)


@dataclass(frozen=True, slots=True)
class Same:
    """The labels of both sides must be of the same class; `penalty` where they are not."""

    sides: tuple[int, int]
    first: Classes
    second: Classes
    penalty: float

    def passed(self, values: Costs, back: bool) -> Costs:
        given, other = (self.second, self.first) if back else (self.first, self.second)
        return np.minimum(given.least(values), values.min() + self.penalty)[other.of]

    def at(self, first: int, second: int) -> float:
        return 0.0 if self.first.of[first] == self.second.of[second] else self.penalty

    def only(self, first: Numbers, second: Numbers) -> Same:
        one, two = Classes(self.first.of[first], self.first.count), Classes(self.second.of[second], self.second.count)
        return Same(self.sides, one, two, self.penalty)

    def between(self, sides: tuple[int, int]) -> Same:
        return replace(self, sides=sides)

    def pairs(self, first: Numbers | slice, second: Numbers | slice) -> Costs:
        return np.where(self.first.of[first][:, None] == self.second.of[second], 0.0, self.penalty)

    def tables(self) -> tuple[Costs, ...]:
        return ()


@dataclass(frozen=True, slots=True)
class FromEither:
    """A label of the first side has two sources, and one of the second takes the cheaper one.

    `sources[k]` are the first side's labels by source k. `costs` is [classes of the first source and then of the other
    one, classes of the second side].
    """

    sides: tuple[int, int]
    costs: Costs
    sources: tuple[Classes, Classes]
    second: Classes

    def passed(self, values: Costs, back: bool) -> Costs:
        one, other = self.sources
        if back:
            least = least_along(self.costs + self.second.least(values), 1)
            return np.minimum(least[: one.count][one.of], least[one.count :][other.of])
        there = np.concatenate([one.least(values), other.least(values)])
        return least_along(self.costs + there[:, None], 0)[self.second.of]

    def at(self, first: int, second: int) -> float:
        (one, other), column = self.sources, self.second.of[second]
        return float(min(self.costs[one.of[first], column], self.costs[one.count + other.of[first], column]))

    def only(self, first: Numbers, second: Numbers) -> FromEither:
        two, columns = self.second.only(second)
        (one, rows), (other, others) = (source.only(first) for source in self.sources)
        kept = np.concatenate([rows, self.sources[0].count + others])
        return FromEither(self.sides, self.costs[kept[:, None], columns], (one, other), two)

    def between(self, sides: tuple[int, int]) -> FromEither:
        return replace(self, sides=sides)

    def pairs(self, first: Numbers | slice, second: Numbers | slice) -> Costs:
        (one, other), costs = self.sources, self.costs[:, self.second.of[second]]
        return np.minimum(costs[one.of[first]], costs[one.count + other.of[first]])

    def tables(self) -> tuple[Costs, ...]:
        return (self.costs,)


@dataclass(frozen=True, slots=True)
class Dense:
    """Costs of all pairs: [labels of the first side, labels of the second]."""

    sides: tuple[int, int]
    costs: Costs

    def passed(self, values: Costs, back: bool) -> Costs:
        return least_along(self.costs + values, 1) if back else least_along(self.costs + values[:, None], 0)

    def at(self, first: int, second: int) -> float:
        return float(self.costs[first, second])

    def only(self, first: Numbers, second: Numbers) -> Dense:
        return Dense(self.sides, self.costs[first[:, None], second])

    def between(self, sides: tuple[int, int]) -> Dense:
        return replace(self, sides=sides)

    def pairs(self, first: Numbers | slice, second: Numbers | slice) -> Costs:
        return self.costs[first][:, second]

    def tables(self) -> tuple[Costs, ...]:
        return (self.costs,)


# Messages along edges of more pairs than these are quicker by what labels have in common.
_FEW_CELLS = 1 << 12
_ALL = slice(None)


def table_of(edge: Edge) -> Costs:
    """What all pairs cost: [labels of the first side, labels of the second]."""
    return edge.pairs(_ALL, _ALL)


def quickest(edge: Edge, cells: int) -> Edge:
    """An edge of so many pairs in the form in which messages along it take least time."""
    return Dense(edge.sides, table_of(edge)) if cells <= _FEW_CELLS else edge


def _only(edge: Edge, first: Numbers, second: Numbers) -> Edge:
    few = len(first) * len(second) <= _FEW_CELLS
    return Dense(edge.sides, edge.pairs(first, second)) if few else edge.only(first, second)


def _most(differences: Costs) -> float:
    return max(float(differences.max(initial=0.0)), 0.0)


@dataclass(slots=True)
class CostGraph:
    """Variables by number, with what their labels cost by themselves, and the edges between them."""

    costs: list[Costs] = field(default_factory=list)
    edges: list[Edge] = field(default_factory=list)

    def add_variable(self, costs: Sequence[float] | Costs) -> int:
        """A new variable; returns its number."""
        self.costs.append(np.array(costs, dtype=np.float64))
        return len(self.costs) - 1

    def add_costs(self, variable: int, costs: Costs) -> None:
        """What the variable's labels cost beside what they cost already."""
        self.costs[variable] = self.costs[variable] + costs

    def sizes(self) -> list[int]:
        """The number of labels of every variable."""
        return [len(costs) for costs in self.costs]

    def value(self, labels: Sequence[int]) -> float:
        """What an assignment costs."""
        alone = sum([float(costs[label]) for costs, label in zip(self.costs, labels, strict=True)])
        return alone + sum([edge.at(labels[edge.sides[0]], labels[edge.sides[1]]) for edge in self.edges])

    def most_above(self, other: CostGraph) -> float:
        """By how much an assignment may cost more than in a graph of the same labels at other costs, at most."""
        alone = [_most(mine - its) for mine, its in zip(self.costs, other.costs, strict=True)]
        pairs = zip(self.edges, other.edges, strict=True)
        both = [[_most(a - b) for a, b in zip(mine.tables(), its.tables(), strict=True)] for mine, its in pairs]
        return sum(alone) + sum([max(each, default=0.0) for each in both])

    def sides(self) -> list[tuple[int, int]]:
        """The neighbours, in pairs."""
        return [edge.sides for edge in self.edges]

    def only(self, kept: Sequence[Numbers]) -> CostGraph:
        """The same problem with only these labels, by number, for every variable."""
        edges = [_only(edge, kept[edge.sides[0]], kept[edge.sides[1]]) for edge in self.edges]
        return replace(self, costs=[costs[k] for costs, k in zip(self.costs, kept, strict=True)], edges=edges)
