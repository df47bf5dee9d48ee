"""What propagation gives: where every op is computed, and why."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from ..frozen import quickly_made
from ..graph import Graph
from ..sharding.value import Sharding
from .factors import Placement
from .votes import Source


class RunnerUp(NamedTuple):
    """The next best option at an op: what it follows, its modelled seconds, and where its operands and results lie."""

    source: Source
    seconds: float
    operands: tuple[Sharding, ...]
    results: tuple[Sharding, ...]


@quickly_made
@dataclass(frozen=True, slots=True)
class Choice:
    """The placement of one op, what it follows, its modelled seconds, and the next best option at this op."""

    placement: Placement
    source: Source
    seconds: float
    runner_up: RunnerUp | None = None


@dataclass(frozen=True, slots=True)
class ShardedDefinition:
    """A graph with a sharding for every tensor and a placement for every op.

    `homes[t]` is the sharding that tensor t has after its op: its annotation, if it has one. It may be partial.
    """

    graph: Graph
    choices: tuple[Choice, ...]
    homes: Mapping[int, Sharding]

    def verify(self) -> None:
        """Assert that every tensor has a sharding, annotated ones their own, and that every placement fits its op."""
        graph = self.graph
        made = {i for node in graph.nodes for i in node.outputs}
        assert set(self.homes) == made | set(graph.input_tensors)
        assert all(self.homes[i] == sharding for i, sharding in graph.annotations.items())
        for node, choice in zip(graph.nodes, self.choices, strict=True):
            assert len(choice.placement.operands) == len(node.inputs)
            assert len(choice.placement.results) == len(node.outputs)

    def __str__(self) -> str:
        lines = []
        for i in self.graph.input_tensors:
            lines.append(f"{self.graph.tensors[i].label}: {self.graph.tensors[i].type} {self.homes[i]}")
        for node, choice in zip(self.graph.nodes, self.choices, strict=True):
            made = ", ".join(
                f"{self.graph.tensors[i].label}: {self.graph.tensors[i].type} {self.homes[i]}" for i in node.outputs
            )
            taken = ", ".join(f"t{i} {s}" for i, s in zip(node.inputs, choice.placement.operands, strict=True))
            lines.append(f"{made} = {node.name}({taken})")
        return "\n".join(lines)
