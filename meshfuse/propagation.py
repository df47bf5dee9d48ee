"""Propagation: every tensor gets a sharding and every op a placement, by the planner's exact optimum.

Annotated tensors are where they are annotated. All else is where a step takes least time (`planner.optimum`). (The
factor form of the rules is GSPMD's and Shardy's; deciding by modelled time is our own.)
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from .graph import Graph
from .mesh import DeviceMesh
from .placement.options import Choice
from .planner.answer import Optimum
from .planner.follow import followed
from .planner.frame import Frame
from .planner.op_labels import KnownLabels
from .planner.open_inputs import NOTHING_OPEN, OpenInputs
from .planner.optimum import Known, Solved, solved
from .planner.prices import Prices
from .planner.reshard_costs import whole_axes
from .sharding.value import Sharding, fit_together


@dataclass(frozen=True, slots=True)
class ShardedDefinition:
    """A graph with a sharding for every tensor and a placement for every op.

    `shardings[t]` is the sharding that tensor t has after its op: its annotation, if it has one. It may be partial. A
    free output has the one in which it is left.

    `gap` is the part of its time by which a better plan may take less: 0 where this one is proven the best of all
    placements, None where that is not known.
    """

    graph: Graph
    choices: tuple[Choice, ...]
    shardings: Mapping[int, Sharding]
    gap: float | None = None

    @property
    def seconds(self) -> float:
        """The modelled time of a step: of one rank's computation and of all moves."""
        return sum([choice.seconds for choice in self.choices])

    def verify(self) -> None:
        """Assert that every tensor has a sharding, annotated ones their own, and that every placement fits its op.

        No sharding has a part of an axis twice.
        """
        graph = self.graph
        made = {i for node in graph.nodes for i in node.outputs}
        assert set(self.shardings) == made | set(graph.input_tensors)
        assert all(self.shardings[i] == sharding for i, sharding in graph.annotations.items())
        used = set[Sharding]()
        for node, choice in zip(graph.nodes, self.choices, strict=True):
            assert len(choice.placement.operands) == len(node.inputs)
            assert len(choice.placement.results) == len(node.outputs)
            used.update(choice.placement.operands, choice.placement.results)
        assert all(fit_together((*sharding.splits, *sharding.partial)) for sharding in used)

    def __str__(self) -> str:
        lines = []
        for i in self.graph.input_tensors:
            lines.append(f"{self.graph.tensors[i].label}: {self.graph.tensors[i].type} {self.shardings[i]}")
        for node, choice in zip(self.graph.nodes, self.choices, strict=True):
            made = ", ".join(
                f"{self.graph.tensors[i].label}: {self.graph.tensors[i].type} {self.shardings[i]}" for i in node.outputs
            )
            taken = ", ".join(f"t{i} {s}" for i, s in zip(node.inputs, choice.placement.operands, strict=True))
            lines.append(f"{made} = {node.name}({taken})")
        return "\n".join(lines)


# Makes a plan of a graph.
Planner = Callable[[Graph], ShardedDefinition]


def ends(sharded: ShardedDefinition) -> dict[int, Sharding]:
    """For every output where it is left: reduced, unless it is annotated otherwise."""
    found, annotated = sharded.shardings, sharded.graph.annotations
    return {i: found[i] if i in annotated else found[i].reduced() for i in sharded.graph.outputs}


class Propagation:
    """Plans of the forms of one program, first over whole axes and with all equal layers alike.

    default_mesh: the mesh of a program in which no annotation names one.
    opened: which tensors' memory has a price.
    """

    def __init__(self, default_mesh: DeviceMesh, opened: OpenInputs = NOTHING_OPEN):
        self.default_mesh, self.opened = default_mesh, opened
        self._prices, self._labels, self._frames = Prices(whole_axes), KnownLabels(), list[Frame]()
        self._solved: dict[int, Solved] = {}  # by identity of graphs, which stay alive in it

    def __call__(self, graph: Graph) -> ShardedDefinition:
        return _sharded(graph, self._of(graph).plan())

    def cheaper(self, found: ShardedDefinition, graph: Graph) -> ShardedDefinition:
        """The plan of another form if it takes less time than `found`, which else stays."""
        return cheaper(found, self._below(graph, found.seconds * (1 - _SAME)))

    def simpler(self, found: ShardedDefinition, graph: Graph) -> ShardedDefinition:
        """The plan of another form unless it takes more time than `found`, which then stays."""
        return cheaper(self._below(graph, found.seconds / (1 - _SAME)), found)

    def _below(self, graph: Graph, seconds: float) -> ShardedDefinition:
        """The best plan of a graph if it takes less than these seconds, else any one."""
        there = self._solved.get(id(graph)) or self._solve(graph, below=seconds)
        if there.found.assignment.value < seconds:
            self._solved[id(graph)] = there
        return _sharded(graph, there.plan())

    def refined(self, found: ShardedDefinition, parts: bool) -> ShardedDefinition:
        """A plan over whole axes, now with the first and the last of equal layers as they are best.

        parts: place the parts of axes one by one, too.
        """
        known = None if parts else Known([choice.placement for choice in found.choices], found.gap)
        there = self._solved.get(id(found.graph))
        there = there or self._solve(found.graph, known)
        return _sharded(found.graph, there.refined(parts))

    def _of(self, graph: Graph) -> Solved:
        if id(graph) not in self._solved:
            self._solved[id(graph)] = self._solve(graph)
        return self._solved[id(graph)]

    def _solve(self, graph: Graph, known: Known | None = None, below: float = math.inf) -> Solved:
        return solved(graph, self.default_mesh, self._prices, known, self.opened, self._labels, self._frames, below)


def _sharded(graph: Graph, found: Optimum) -> ShardedDefinition:
    sharded = ShardedDefinition(graph, found.choices, found.shardings, found.gap)
    sharded.verify()
    return sharded


def propagate(graph: Graph, default_mesh: DeviceMesh, parts: bool = False) -> ShardedDefinition:
    """A sharding for every tensor and a placement for every op.

    default_mesh: the mesh of a program in which no annotation names one.
    parts: place the parts of axes one by one, too.
    """
    plan = Propagation(default_mesh)
    return plan.refined(plan(graph), parts)


def follow(graph: Graph, default_mesh: DeviceMesh) -> ShardedDefinition:
    """The plan that follows from the annotations by rules alone (`planner.follow`)."""
    return _sharded(graph, followed(graph, default_mesh))


# The part of a step that another way to write it must save: less is not worth a program that is not as it was written.
_SAME = 1e-5


def cheaper(found: ShardedDefinition, other: ShardedDefinition) -> ShardedDefinition:
    """The plan that takes less time; the first one where both take the same."""
    return other if other.seconds < found.seconds * (1 - _SAME) else found
