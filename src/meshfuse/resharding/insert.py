"""From a sharded definition to one with a `Set` wherever a tensor is needed otherwise than it lies."""

from __future__ import annotations

from dataclasses import dataclass, field

from ..errors import SourceLine
from ..graph import Node
from ..mesh import DeviceMesh
from ..moves.planner import Path, plan
from ..propagation.factors import Placement
from ..propagation.outputs import ends
from ..propagation.sharded import ShardedDefinition
from ..sharding.value import Sharding
from .borders import Borders
from .order import Before, before
from .resharded import Compute, ReshardedDefinition, Set, Step, Value


@dataclass(slots=True)
class _Inserter:
    """The values and steps so far.

    `by_tensor` has each tensor's values, the first one made in front. `before` tells what to make of a tensor first, on
    the way to another of its shardings. Of the tensors in `unread` nobody reads what an annotation asks for.
    """

    sharded: ShardedDefinition
    borders: Borders | None = None
    unread: frozenset[int] = frozenset()
    values: list[Value] = field(default_factory=list)
    steps: list[Step] = field(default_factory=list)
    by_tensor: dict[int, list[Value]] = field(default_factory=dict)
    inputs: list[int] = field(default_factory=list)
    before: Before = field(default_factory=dict)

    def run(self) -> ReshardedDefinition:
        graph, targets = self.sharded.graph, ends(self.sharded)
        self.before = before(self.sharded, targets)
        for i in graph.input_tensors:
            home = self.sharded.homes[i]
            self.inputs.append(self._new(i, home if self.borders is None else self.borders.passed(i, home)))
        for node, choice in zip(graph.nodes, self.sharded.choices, strict=True):
            self._compute(node, choice.placement)
        outputs = [self._output(i, targets[i]) for i in graph.outputs]
        values, steps = tuple(self.values), tuple(self.steps)
        return ReshardedDefinition(self.sharded, values, steps, tuple(self.inputs), tuple(outputs))

    def _new(self, tensor: int, sharding: Sharding) -> int:
        values = self.values
        value = Value(len(values), tensor, sharding)
        values.append(value)
        there = self.by_tensor.get(tensor)
        if there is None:
            self.by_tensor[tensor] = [value]
        else:
            there.append(value)
        return value.id

    def _compute(self, node: Node, placement: Placement) -> None:
        inputs = tuple([self._operand(node, place, s) for place, s in enumerate(placement.operands)])
        outputs = tuple(map(self._new, node.outputs, placement.results))
        if placement.move is not None:
            why = f"{node.name} of a sharded dim"
            self.steps.append(Set(inputs[0], outputs[0], placement.move, why, node.line, node.id))
        else:
            self.steps.append(Compute(node.id, placement, inputs, outputs))
        graph = self.sharded.graph
        for i in node.outputs:
            if i in graph.annotations and i not in self.unread:
                self.need(i, graph.annotations[i], graph.brought_for(i), graph.annotation_lines[i])

    def _operand(self, node: Node, place: int, sharding: Sharding) -> int:
        there = self._there(node.inputs[place], sharding)
        if there is not None:
            return there
        return self._brought(node.inputs[place], sharding, f"operand {place} of {node.name}", node.line)

    def _output(self, tensor: int, target: Sharding) -> int:
        made, borders = self.sharded.graph.tensors[tensor], self.borders
        end = target if borders is None else borders.left(target, made.type.shape)
        return self.need(tensor, end, "output", made.line)

    def need(self, tensor: int, sharding: Sharding, why: str, line: SourceLine) -> int:
        """The number of the value of a tensor in a sharding; made from the nearest one if it is not there."""
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
        """The number of the value of a tensor in a sharding, if there is one."""
        for value in self.by_tensor[tensor]:
            if value.sharding is sharding:
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
                existing = self.values[self._new(value.tensor, move.dst)]
                self.steps.append(Set(value.id, existing.id, move, why, line))
            value = existing
        return value.id

    def _whole_everywhere(self, tensor: int, mesh: DeviceMesh) -> bool:
        if any(v.sharding.mesh == mesh for v in self.by_tensor[tensor]):
            return False
        graph = self.sharded.graph
        return tensor in graph.input_tensors and tensor not in graph.annotations

    def _reuse_input(self, tensor: int, mesh: DeviceMesh) -> None:
        """Add an input's value on this mesh: one without an annotation is passed whole on every rank of every mesh."""
        self.inputs.append(self._new(tensor, Sharding.replicated(mesh, len(self.sharded.graph.shape(tensor)))))


def insert_resharding(sharded: ShardedDefinition, borders: Borders | None = None) -> ReshardedDefinition:
    """Put in the moves that the placements need: each reshard by its cheapest path, equal moves once.

    `borders` tells how inputs are passed and outputs returned, where they are DTensors. A tensor is not brought to its
    annotation if all its readers take it from where its op makes it.
    """
    found = _Inserter(sharded, borders).run()
    unread = _unread(found)
    return _Inserter(sharded, borders, unread).run() if unread else found


def _unread(found: ReshardedDefinition) -> frozenset[int]:
    """The tensors that are moved to where nobody reads them."""
    read = found.read()
    moved = [step.target for step in found.steps if isinstance(step, Set)]
    return frozenset([found.values[value].tensor for value in moved if value not in read])
