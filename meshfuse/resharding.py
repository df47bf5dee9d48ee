"""Inserts a `Reshard` wherever an op needs a tensor in another sharding than it has."""

from __future__ import annotations

import functools
from dataclasses import dataclass, field, replace

from .errors import SourceLine, user_error
from .fast_dataclass import quickly_made
from .graph import Graph, Node
from .mesh import DeviceMesh
from .ops.values import TensorType
from .placement.factors import Placement
from .propagation import ShardedDefinition, ends
from .reshard.borders import Borders
from .reshard.order import Before, before
from .reshard.prices import Price, price
from .reshard.search import ReshardPlan, plan
from .reshard.steps import Step, StepKind, group_size, travels
from .sharding.value import Sharding


@quickly_made
@dataclass(frozen=True, slots=True)
class Value:
    """A tensor in one of the shardings in which it exists."""

    id: int
    tensor: int
    sharding: Sharding

    @property
    def name(self) -> str:
        return f"v{self.id}"


@quickly_made
@dataclass(frozen=True, slots=True)
class Compute:
    """One op in its placement. It reads and makes values, given by their numbers."""

    node: int
    placement: Placement
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]


@quickly_made
@dataclass(frozen=True, slots=True)
class Reshard:
    """One step of a tensor from one sharding to another: it makes a value from a value.

    `why` and `line` say which op or annotation needs it. If `node` is set, the step does the work of that op (a slice
    or pad of a sharded dim), and the target is a value of the op's result.
    """

    source: int
    target: int
    step: Step
    why: str
    line: SourceLine
    node: int | None = None

    @property
    def inputs(self) -> tuple[int, ...]:
        """The source, as a tuple: all statements have `inputs`."""
        return (self.source,)

    @property
    def outputs(self) -> tuple[int, ...]:
        """The target, as a tuple: all statements have `outputs`."""
        return (self.target,)


Statement = Compute | Reshard


@functools.lru_cache(maxsize=1 << 12)
def shard_bytes(sharding: Sharding, ttype: TensorType) -> int:
    """Bytes of the largest shard of a tensor; of rows of experts, if every expert gets as many."""
    if ttype.rows:
        return ttype.nbytes // group_size(sharding.splits)
    return sharding.max_local_numel(ttype.shape) * ttype.dtype.itemsize


@dataclass(frozen=True, slots=True)
class ReshardedDefinition:
    """Ops and reshards in order; every op reads and makes values in exactly the shardings of its placement."""

    sharded: ShardedDefinition
    values: tuple[Value, ...]
    statements: tuple[Statement, ...]
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]

    @property
    def graph(self) -> Graph:
        return self.sharded.graph

    def type_of(self, value: int) -> TensorType:
        """The type of a value's tensor, with its global shape."""
        return self.graph.tensors[self.values[value].tensor].type

    def nbytes(self, value: int) -> int:
        """Bytes of the largest shard of a value."""
        found = self.values[value]
        return shard_bytes(found.sharding, self.graph.tensors[found.tensor].type)

    def price(self, reshard: Reshard) -> Price:
        """The modelled seconds of a reshard, and the bytes that it sends."""
        ttype = self.type_of(reshard.source)
        return price(reshard.step, ttype.shape, ttype.dtype.itemsize)

    def seconds(self, reshard: Reshard) -> float:
        """The modelled time of a reshard."""
        return self.price(reshard).seconds

    def name_of(self, statement: Statement) -> str:
        """The name of the op, or the kind of the step."""
        return self.graph.nodes[statement.node].name if isinstance(statement, Compute) else statement.step.kind.value

    @property
    def reshards(self) -> tuple[Reshard, ...]:
        """All reshards except slices, in order."""
        return tuple(s for s in self.statements if isinstance(s, Reshard) and s.step.kind is not StepKind.SLICE)

    @property
    def collectives(self) -> tuple[Reshard, ...]:
        """The reshards that send something, in order."""
        return tuple([s for s in self.sends if isinstance(s, Reshard)])

    @property
    def sends(self) -> tuple[Statement, ...]:
        """All statements in which ranks send something, in order: collectives, and ops that exchange rows."""
        return tuple(filter(self._sends, self.statements))

    def _sends(self, statement: Statement) -> bool:
        if isinstance(statement, Compute):
            return bool(statement.placement.exchange)
        if statement.step.kind is StepKind.SLICE:
            return False
        return travels(statement.step, self.graph.shape(self.values[statement.source].tensor))

    def read(self) -> set[int]:
        """The values that a statement reads or the program returns."""
        return {value for statement in self.statements for value in statement.inputs}.union(self.outputs)

    def without_unread(self) -> ReshardedDefinition:
        """The same without reshards whose result is not read."""
        read, kept = set(self.outputs), list[Statement]()
        for statement in reversed(self.statements):
            if isinstance(statement, Compute) or statement.target in read:
                kept.append(statement)
                read.update(statement.inputs)
        return replace(self, statements=tuple(reversed(kept)))

    def verify(self) -> None:
        """Assert that every value is made once, before it is read, and that steps fit the shardings of their values.

        The result of every reshard is read.
        """
        known, shardings = set(self.inputs), [value.sharding for value in self.values]
        assert self.read().issuperset(
            [statement.target for statement in self.statements if isinstance(statement, Reshard)]
        )
        for statement in self.statements:
            assert known.issuperset(statement.inputs) and known.isdisjoint(statement.outputs)
            known.update(statement.outputs)
            if isinstance(statement, Reshard):
                assert (
                    shardings[statement.source] is statement.step.src
                    and shardings[statement.target] is statement.step.dst
                )
            else:
                assert tuple([shardings[v] for v in statement.inputs]) == statement.placement.operands
                assert tuple([shardings[v] for v in statement.outputs]) == statement.placement.results
        assert known.issuperset(self.outputs)
        ends = [(shardings[v], self.graph.annotations.get(self.values[v].tensor)) for v in self.outputs]
        assert all(not end.partial or end is said for end, said in ends)

    def __str__(self) -> str:
        graph, lines = self.graph, []
        for statement in self.statements:
            if isinstance(statement, Reshard):
                tensor = graph.tensors[self.values[statement.source].tensor]
                text = f"v{statement.target} = set v{statement.source} {tensor.label}: {statement.step}"
                lines.append(f"{text}  # {statement.why} {statement.line}")
            else:
                made = ", ".join(f"v{v} {self.values[v].sharding}" for v in statement.outputs)
                node = graph.nodes[statement.node]
                lines.append(f"{made} = {node.name}({', '.join(f'v{v}' for v in statement.inputs)})  # {node.line}")
        return "\n".join([*lines, "return " + ", ".join(f"v{v}" for v in self.outputs)])

    def fingerprint(self) -> str:
        """A text that is equal only for equal definitions.

        Ops and steps that repeat are written once and numbered: the `str` of a large definition would take a fifth of
        the time of compiling it.
        """
        known: dict[tuple[int, int], int] = {}
        numbers: dict[str, int] = {}
        lines, nodes = [], self.graph.nodes
        for statement in self.statements:
            what, how, ids = (
                (nodes[statement.node].call, statement.placement, f"{statement.inputs}{statement.outputs}")
                if isinstance(statement, Compute)
                else (self.type_of(statement.source), statement.step, f"{statement.source}>{statement.target}")
            )
            key = (id(what), id(how))
            number = known.get(key)
            if number is None:
                number = known[key] = numbers.setdefault(f"{what} {how}", len(numbers))
            lines.append(f"{ids} {number}")
        return "\n".join([*lines, *numbers, f"{self.inputs} {self.outputs}"])


@dataclass(slots=True)
class _Inserter:
    """The values and statements so far.

    by_tensor: the values of each tensor, in the order in which they are made.
    before: for a sharding of a tensor, another one to make first, on the way.
    unread: tensors whose annotated value is not read.
    """

    sharded: ShardedDefinition
    borders: Borders | None = None
    unread: frozenset[int] = frozenset()
    values: list[Value] = field(default_factory=list)
    statements: list[Statement] = field(default_factory=list)
    by_tensor: dict[int, list[Value]] = field(default_factory=dict)
    inputs: list[int] = field(default_factory=list)
    before: Before = field(default_factory=dict)

    def run(self) -> ReshardedDefinition:
        graph, targets = self.sharded.graph, ends(self.sharded)
        self.before = before(self.sharded, targets)
        for i in graph.input_tensors:
            sharding = self.sharded.shardings[i]
            self.inputs.append(self._new(i, sharding if self.borders is None else self.borders.passed(i, sharding)))
        for node, choice in zip(graph.nodes, self.sharded.choices, strict=True):
            self._compute(node, choice.placement)
        outputs = [self._output(i, targets[i]) for i in graph.outputs]
        values, statements = tuple(self.values), tuple(self.statements)
        return ReshardedDefinition(self.sharded, values, statements, tuple(self.inputs), tuple(outputs))

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
        if placement.step is not None:
            why = f"{node.name} of a sharded dim"
            self.statements.append(Reshard(inputs[0], outputs[0], placement.step, why, node.line, node.id))
        else:
            self.statements.append(Compute(node.id, placement, inputs, outputs))
        graph = self.sharded.graph
        for i in node.outputs:
            if i in graph.annotations and i not in self.unread:
                there = self.need(i, graph.annotations[i], graph.brought_for(i), graph.annotation_lines[i])
                self.by_tensor[i] = [self.values[there]]  # Every reader takes it from there.

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
        """The value of a tensor in a sharding, by number; made from the nearest one if there is none yet."""
        there = self._there(tensor, sharding)
        return self._brought(tensor, sharding, why, line) if there is None else there

    def _brought(self, tensor: int, sharding: Sharding, why: str, line: SourceLine) -> int:
        """Make the value of a tensor in a sharding."""
        first = self.before.get((tensor, sharding))
        if first is not None:
            self.need(tensor, *first)
        if self._whole_everywhere(tensor, sharding.mesh):
            self._reuse_input(tensor, sharding.mesh)
        value, found = self._nearest(tensor, sharding)
        return self._move(value, found, why, line)

    def _there(self, tensor: int, sharding: Sharding) -> int | None:
        """The value of a tensor in a sharding, by number, if there is one."""
        for value in self.by_tensor[tensor]:
            if value.sharding is sharding:
                return value.id
        return None

    def _nearest(self, tensor: int, sharding: Sharding) -> tuple[Value, ReshardPlan]:
        ttype = self.sharded.graph.tensors[tensor].type
        plans = [(v, plan(v.sharding, sharding, ttype.shape, ttype.dtype.itemsize)) for v in self.by_tensor[tensor]]
        return min(((v, p) for v, p in plans if p is not None), key=lambda entry: entry[1].seconds)

    def _move(self, value: Value, found: ReshardPlan, why: str, line: SourceLine) -> int:
        made = self.sharded.graph.tensors[value.tensor]
        if made.type.rows:
            raise user_error(
                f"{made.label}: rows of experts are to move ({why})", f"{value.sharding} -> {found.steps[-1].dst}",
                "rows that stay", "Annotate tokens and the experts' weights alone, or all rows alike.", line,
            )  # fmt: skip
        for step in found.steps:
            existing = next((v for v in self.by_tensor[value.tensor] if v.sharding == step.dst), None)
            if existing is None:
                existing = self.values[self._new(value.tensor, step.dst)]
                self.statements.append(Reshard(value.id, existing.id, step, why, line))
            value = existing
        return value.id

    def _whole_everywhere(self, tensor: int, mesh: DeviceMesh) -> bool:
        if any(v.sharding.mesh == mesh for v in self.by_tensor[tensor]):
            return False
        graph = self.sharded.graph
        return tensor in graph.input_tensors and tensor not in graph.annotations

    def _reuse_input(self, tensor: int, mesh: DeviceMesh) -> None:
        """Add the value of an input on this mesh: without an annotation, every rank is given the whole tensor."""
        self.inputs.append(self._new(tensor, Sharding.replicated(mesh, len(self.sharded.graph.shape(tensor)))))


def insert_resharding(sharded: ShardedDefinition, borders: Borders | None = None) -> ReshardedDefinition:
    """Insert the reshards that the placements need, each by the cheapest plan; equal ones are made once.

    `borders` says how DTensors are passed and returned. A tensor is not resharded to its annotation if no reader needs
    it there.
    """
    found = _Inserter(sharded, borders).run()
    unread = _unread(found)
    return _Inserter(sharded, borders, unread).run() if unread else found


def _unread(found: ReshardedDefinition) -> frozenset[int]:
    """The tensors that have a resharded value that is not read."""
    read = found.read()
    moved = [statement.target for statement in found.statements if isinstance(statement, Reshard)]
    return frozenset([found.values[value].tensor for value in moved if value not in read])
