"""Choosing placements along the ops with a beam of partial plans, so that a choice may pay off only later.

A state of the beam is a plan for the ops so far: its cost, and the shardings in which each tensor that is still read
exists. A state that another reaches by resharding, at no greater cost, is dropped: what is left are the few plans
that really differ. Unreduced sums count as if they were reduced at once. (Beam search as in Alpa's and TePDist's
relatives; the dominance test is our own.)
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from ..graph import Graph, Node
from ..resharding.planner import plan
from ..sharding.value import Sharding
from .choose import Option, Setting, cheapest, options

Available = tuple[Sharding, ...]
WIDTH = 32
# Costs that differ by less than this many seconds (half a byte on the wire) are equal.
EPSILON = 1e-11


@dataclass(frozen=True, slots=True)
class Step:
    """One decision of a plan and the decisions before it; `runner_up` is the next best option at this op, if any."""

    option: Option
    before: Step | None
    runner_up: Option | None


@dataclass(frozen=True, slots=True)
class State:
    """A plan for the ops so far: seconds spent, seconds that its unreduced sums will need, and what exists where.

    `table` holds only the tensors in which the states of the beam differ; the beam's `common` table holds the others.
    """

    seconds: float
    owed: float
    table: dict[int, Available]
    last: Step | None

    @property
    def total(self) -> float:
        return self.seconds + self.owed


class Beam:
    """The search over one graph. `setting_of` makes a node's setting from the shardings of its operands."""

    def __init__(
        self, graph: Graph, wanted: Mapping[int, Available],
        setting_of: Callable[[Node, tuple[Available, ...]], Setting],
        inputs: Mapping[int, Available], width: int = WIDTH,
    ):  # fmt: skip
        self.graph, self.wanted, self.setting_of, self.width = graph, wanted, setting_of, width
        self.last_read = _last_reads(graph)
        self.common: dict[int, Available] = dict(inputs)
        self._options: dict[Setting, tuple[Option, ...]] = {}

    def run(self) -> list[Step]:
        """The cheapest plan's decisions, op by op."""
        states = [State(0.0, 0.0, {}, None)]
        for node in self.graph.nodes:
            grown = [self._grown(state, node, *entry) for state in states for entry in self._entries(state, node)]
            states = self._settled(self._pruned(grown, node.id), node.id)
        return _steps(min(states, key=lambda state: state.total).last)

    def _available(self, state: State, tensor: int) -> Available:
        return state.table.get(tensor) or self.common.get(tensor, ())

    def _entries(self, state: State, node: Node) -> Iterable[tuple[Option, Option | None]]:
        """The options of a node in a state, each with the best of the others."""
        setting = self.setting_of(node, tuple(self._available(state, i) for i in node.inputs))
        found = self._options.get(setting) or self._options.setdefault(setting, options(setting))
        first, second = found[0], found[1] if len(found) > 1 else None
        return [(option, second if option is first else first) for option in found[: self.width]]

    def _grown(self, state: State, node: Node, option: Option, other: Option | None) -> State:
        table = dict(state.table)
        placement = option.placement
        for i, needed in zip(node.inputs, placement.operands, strict=True):
            held = self._available(state, i)
            if needed not in held and self.last_read[i] > node.id:
                table[i] = (*held, needed)
        for i, made in zip(node.outputs, placement.results, strict=True):
            annotated = self.graph.annotations.get(i)
            if self.last_read[i] > node.id:
                table[i] = (made,) if annotated in (None, made) else (annotated, made)
        owed = state.owed + self._owed_change(state, table, node)
        return State(state.seconds + option.seconds, owed, table, Step(option, state.last, other))

    def _owed_change(self, before: State, table: Mapping[int, Available], node: Node) -> float:
        """Reductions that the op adds to what is owed, less those that are done or whose tensor is not read again."""
        change = 0.0
        for i in {*node.inputs, *node.outputs}:
            old = self._available(before, i)
            change -= self._owed(i, old)
            change += self._owed(i, table.get(i, old)) if self.last_read[i] > node.id else 0.0
        return change

    def _owed(self, tensor: int, available: Available | None) -> float:
        if not available or not all(s.partial for s in available):
            return 0.0
        kind, home = self.graph.tensors[tensor].type, available[0]
        targets = [home.reduced(), *(w for w in self.wanted.get(tensor, ()) if w.mesh == home.mesh)]
        plans = [plan(home, target, kind.shape, kind.dtype.itemsize) for target in targets]
        return min(p.seconds for p in plans if p is not None)

    def _pruned(self, states: list[State], now: int) -> list[State]:
        if len(states) == 1:
            return states
        states.sort(key=lambda state: state.total)
        kept: list[State] = []
        for state in states:
            if len(kept) == self.width:
                break
            if not any(self._reaches(better, state, now) for better in kept):
                kept.append(state)
        return kept

    def _reaches(self, better: State, state: State, now: int) -> bool:
        """True where resharding turns the better state into this one at no greater cost."""
        cost, limit = better.total, state.total + EPSILON
        for tensor in {**better.table, **state.table}:
            held, wanted = self._available(better, tensor), self._available(state, tensor)
            if held == wanted or self.last_read[tensor] <= now:
                continue
            kind = self.graph.tensors[tensor].type
            for sharding in wanted:
                cost += cheapest(held, sharding, kind.shape, kind.dtype.itemsize)
                if cost > limit:
                    return False
        return True

    def _settled(self, states: list[State], now: int) -> list[State]:
        """The states with what all agree on moved to the common table, and tensors that are not read again dropped."""
        tensors = {tensor for state in states for tensor in state.table}
        for tensor in tensors:
            found = {self._available(state, tensor) for state in states}
            if len(found) == 1 or self.last_read[tensor] <= now:
                self.common[tensor] = found.pop()
                for state in states:
                    state.table.pop(tensor, None)
        return states


def _last_reads(graph: Graph) -> dict[int, int]:
    """For every tensor the last node that reads it; outputs are read after all nodes, unused ones never."""
    last = {tensor.id: -1 for tensor in graph.tensors}
    for node in graph.nodes:
        last.update(dict.fromkeys(node.inputs, node.id))
    last.update(dict.fromkeys(graph.outputs, len(graph.nodes)))
    return last


def _steps(last: Step | None) -> list[Step]:
    out = []
    while last is not None:
        out.append(last)
        last = last.before
    return out[::-1]
