"""From a sharded definition to one with a `set` wherever a tensor must lie otherwise than it does."""

from __future__ import annotations

from dataclasses import dataclass, field

from ..errors import SourceLine
from ..mesh import DeviceMesh
from ..moves.planner import Path, plan
from ..propagation.factors import Placement
from ..propagation.outputs import ends
from ..propagation.sharded import ShardedDefinition
from ..sharding.value import Sharding
from .order import Before, before
from .resharded import Compute, ReshardedDefinition, Set, Step, Value


@dataclass(slots=True)
class _Inserter:
    """The values and steps so far. `by_tensor` has each tensor's values, the one that was made first in front; `before`
    what of a tensor is to be there before another.
    """

    sharded: ShardedDefinition
    values: list[Value] = field(default_factory=list)
    steps: list[Step] = field(default_factory=list)
    by_tensor: dict[int, list[Value]] = field(default_factory=dict)
    inputs: list[int] = field(default_factory=list)
    before: Before = field(default_factory=dict)

    def run(self) -> ReshardedDefinition:
        graph, targets = self.sharded.graph, ends(self.sharded)
        self.before = before(self.sharded, targets)
        for i in graph.input_tensors:
            self.inputs.append(self._new(i, self.sharded.homes[i]).id)
        for node, choice in zip(graph.nodes, self.sharded.choices, strict=True):
            self._compute(node.id, choice.placement)
        outputs = [self._output(i, targets[i]) for i in graph.outputs]
        values, steps = tuple(self.values), tuple(self.steps)
        return ReshardedDefinition(self.sharded, values, steps, tuple(self.inputs), tuple(outputs))

    def _new(self, tensor: int, sharding: Sharding) -> Value:
        value = Value(len(self.values), tensor, sharding)
        self.values.append(value)
        self.by_tensor.setdefault(tensor, []).append(value)
        return value

    def _compute(self, number: int, placement: Placement) -> None:
        graph = self.sharded.graph
        node = graph.nodes[number]
        inputs = []
        for place, (i, sharding) in enumerate(zip(node.inputs, placement.operands, strict=True)):
            there = self._there(i, sharding)
            if there is None:
                there = self._brought(i, sharding, f"operand {place} of {node.name}", node.line)
            inputs.append(there)
        outputs = [self._new(i, sharding) for i, sharding in zip(node.outputs, placement.results, strict=True)]
        if placement.move is not None:
            why = f"{node.name} of a sharded dim"
            self.steps.append(Set(inputs[0], outputs[0].id, placement.move, why, node.line, number))
        else:
            self.steps.append(Compute(number, placement, tuple(inputs), tuple(v.id for v in outputs)))
        for i in node.outputs:
            if i in graph.annotations:
                self.need(i, graph.annotations[i], "its annotation", graph.annotation_lines[i])

    def _output(self, tensor: int, target: Sharding) -> int:
        return self.need(tensor, target, "output", self.sharded.graph.tensors[tensor].line)

    def need(self, tensor: int, sharding: Sharding, why: str, line: SourceLine) -> int:
        """The value of a tensor in a sharding, made from the nearest one that there is."""
        there = self._there(tensor, sharding)
        return self._brought(tensor, sharding, why, line) if there is None else there

    def _brought(self, tensor: int, sharding: Sharding, why: str, line: SourceLine) -> int:
        """A new value of a tensor in a sharding."""
        first = self.before.get((tensor, sharding))
        if first is not None:
            self.need(tensor, *first)
        if self._whole_everywhere(tensor, sharding.mesh):
            self._reuse_input(tensor, sharding.mesh)
        value, found = self._nearest(tensor, sharding)
        return self._move(value, found, why, line)

    def _there(self, tensor: int, sharding: Sharding) -> int | None:
        """The value of a tensor in a sharding, if there is one."""
        for value in self.by_tensor[tensor]:
            if value.sharding == sharding:
                return value.id
        return None

    def _nearest(self, tensor: int, sharding: Sharding) -> tuple[Value, Path]:
        kind = self.sharded.graph.tensors[tensor].type
        plans = [(v, plan(v.sharding, sharding, kind.shape, kind.dtype.itemsize)) for v in self.by_tensor[tensor]]
        return min(((v, p) for v, p in plans if p is not None), key=lambda entry: entry[1].seconds)

    def _move(self, value: Value, found: Path, why: str, line: SourceLine) -> int:
        for move in found.moves:
            existing = next((v for v in self.by_tensor[value.tensor] if v.sharding == move.dst), None)
            if existing is None:
                existing = self._new(value.tensor, move.dst)
                self.steps.append(Set(value.id, existing.id, move, why, line))
            value = existing
        return value.id

    def _whole_everywhere(self, tensor: int, mesh: DeviceMesh) -> bool:
        if any(v.sharding.mesh == mesh for v in self.by_tensor[tensor]):
            return False
        graph = self.sharded.graph
        return tensor in graph.input_tensors and tensor not in graph.annotations

    def _reuse_input(self, tensor: int, mesh: DeviceMesh) -> None:
        """An input that no annotation places is passed whole on every rank: it is there on this mesh as well."""
        self.inputs.append(self._new(tensor, Sharding.replicated(mesh, len(self.sharded.graph.shape(tensor)))).id)


def insert_resharding(sharded: ShardedDefinition) -> ReshardedDefinition:
    """Put in the moves that the placements need, each planned as the cheapest path; equal ones once."""
    return _Inserter(sharded).run()
