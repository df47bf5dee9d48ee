"""The minimum of a cost graph by HiGHS, a solver of mixed-integer programs that shares nothing with ours.

A variable is 0 or 1 for each label. An edge has one for each pair of labels, or of what these have in common; those of
a label add up to the label's own.
"""

from __future__ import annotations

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import coo_array

from meshfuse.planner.cost_graph import CostGraph, Edge, table_of


def least(graph: CostGraph, unit: float, seconds: float = 60.0) -> float:
    """What the best assignment costs, to a millionth of `unit`, the size of the answer.

    Raises TimeoutError where HiGHS takes longer than so many seconds.
    """
    model = _Model(graph)
    found = milp(
        np.concatenate(model.costs) / unit, constraints=model.constraints(), bounds=Bounds(0, 1),
        integrality=np.concatenate(model.integral), options={"time_limit": seconds, "mip_rel_gap": 0.0},
    )  # fmt: skip
    if found.status == 1:
        raise TimeoutError(f"HiGHS: {found.message}")
    assert found.success, found.message
    return float(found.fun) * unit


class _Model:
    """Columns: every variable's labels, then every edge's pairs; rows: one for each label, or class, of an edge."""

    def __init__(self, graph: CostGraph):
        self.costs = list(graph.costs)
        self.integral = [np.ones(len(costs)) for costs in graph.costs]
        self.starts = np.concatenate([[0], np.cumsum(graph.sizes())])
        self.width = int(self.starts[-1])
        self.entries = list[tuple[np.ndarray, np.ndarray, np.ndarray]]()  # rows, columns, values
        self.wanted = list[np.ndarray]()
        self.height = 0
        for variable, costs in enumerate(graph.costs):
            self._add_rows(np.zeros(len(costs), dtype=np.int64), self._columns(variable), 1, one=1.0)
        for edge in graph.edges:
            self._add_edge(edge)

    def constraints(self) -> LinearConstraint:
        rows, columns, values = (np.concatenate(part) for part in zip(*self.entries, strict=True))
        wanted = np.concatenate(self.wanted)
        return LinearConstraint(coo_array((values, (rows, columns)), (self.height, self.width)).tocsr(), wanted, wanted)

    def _columns(self, variable: int) -> np.ndarray:
        return np.arange(self.starts[variable], self.starts[variable + 1])

    def _add_rows(self, rows: np.ndarray, columns: np.ndarray, count: int, one: float = 0.0) -> None:
        self.entries.append((rows + self.height, columns, np.ones(len(rows))))
        self.wanted.append(np.full(count, one))
        self.height += count

    def _add_edge(self, edge: Edge) -> None:
        """A pair's variable for every cell of the table of distinct rows and columns."""
        table = table_of(edge)
        rows, first = np.unique(table, axis=0, return_inverse=True)
        cells, second = np.unique(rows, axis=1, return_inverse=True)
        pairs = np.arange(cells.size).reshape(cells.shape) + self.width
        self.costs.append(cells.ravel())
        self.integral.append(np.zeros(cells.size))
        self.width += cells.size
        for variable, classes, grid in zip(edge.sides, (first.ravel(), second.ravel()), (pairs, pairs.T), strict=True):
            count, at = len(grid), self.height
            numbers = np.repeat(np.arange(count), grid.shape[1])
            self._add_rows(numbers, grid.ravel(), count)
            self.entries.append((classes + at, self._columns(variable), -np.ones(len(classes))))
