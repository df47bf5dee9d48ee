"""A problem of many choices: every variable takes one label, at a cost, and every pair of labels of two variables costs.

The planner's variables are the placements of ops and the copies of tensors (`planner.program`); here they are numbers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

Costs = np.ndarray  # of float64: [labels], or [labels of one variable, labels of another]
# What no plan may cost: labels that do not go together. It can be added up without losing what small costs differ by.
FORBIDDEN = 1e6


@dataclass(slots=True)
class CostGraph:
    """Variables by number. `pairs[i, j]`, for i < j, has the costs of i's labels beside j's."""

    costs: list[Costs] = field(default_factory=list)
    pairs: dict[tuple[int, int], Costs] = field(default_factory=dict)
    neighbours: list[set[int]] = field(default_factory=list)

    def add_variable(self, costs: Sequence[float] | Costs) -> int:
        """A new variable whose labels cost so much by themselves; returns its number."""
        self.costs.append(np.array(costs, dtype=np.float64))
        self.neighbours.append(set())
        return len(self.costs) - 1

    def add_costs(self, variable: int, costs: Costs) -> None:
        """What the variable's labels cost beside what they cost already."""
        self.costs[variable] = self.costs[variable] + costs

    def add_pair(self, a: int, b: int, costs: Costs) -> None:
        """What the labels of two variables cost together, [labels of a, labels of b]."""
        if a == b:
            self.add_costs(a, np.diagonal(costs))
            return
        key, table = ((a, b), costs) if a < b else ((b, a), costs.T)
        known = self.pairs.get(key)
        self.pairs[key] = table if known is None else known + table
        self.neighbours[a].add(b)
        self.neighbours[b].add(a)

    def pair(self, a: int, b: int) -> Costs:
        """The costs of two neighbours together, [labels of a, labels of b]."""
        return self.pairs[a, b] if a < b else self.pairs[b, a].T

    def sizes(self) -> list[int]:
        """The number of labels of every variable."""
        return [len(costs) for costs in self.costs]

    def value(self, labels: Sequence[int]) -> float:
        """What an assignment costs."""
        alone = sum(float(costs[label]) for costs, label in zip(self.costs, labels, strict=True))
        return alone + sum(float(table[labels[a], labels[b]]) for (a, b), table in self.pairs.items())

    def restricted(self, kept: Sequence[np.ndarray]) -> CostGraph:
        """The same problem with only these labels, by number, for every variable."""
        pairs = {(a, b): table[np.ix_(kept[a], kept[b])] for (a, b), table in self.pairs.items()}
        return CostGraph([costs[k] for costs, k in zip(self.costs, kept, strict=True)], pairs, self.neighbours)
