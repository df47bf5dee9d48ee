"""What resharding gives: on values, ops in their placements and a `Set` for each move between them."""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace

from ..errors import SourceLine
from ..frozen import quickly_made
from ..graph import Graph
from ..moves.move import Move, MoveKind, travels
from ..moves.prices import Price, price
from ..ops.base import TensorType
from ..propagation.factors import Placement
from ..propagation.sharded import ShardedDefinition
from ..sharding.value import Sharding


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
    """One op in its placement. It reads and makes values, by number."""

    node: int
    placement: Placement
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]


@quickly_made
@dataclass(frozen=True, slots=True)
class Set:
    """One move of a reshard: from one value of a tensor to another.

    `why` says who asked for it, at `line`. If `node` is given, the move does that op's work (a slice or pad of a
    sharded dim), and its target is a value of the op's result.
    """

    source: int
    target: int
    move: Move
    why: str
    line: SourceLine
    node: int | None = None

    @property
    def inputs(self) -> tuple[int, ...]:
        """The value that is moved; steps of all kinds have this."""
        return (self.source,)

    @property
    def outputs(self) -> tuple[int, ...]:
        """The value that is made; steps of all kinds have this."""
        return (self.target,)


Step = Compute | Set


@functools.lru_cache(maxsize=1 << 12)
def shard_bytes(sharding: Sharding, kind: TensorType) -> int:
    """Bytes of the largest shard of a tensor."""
    return sharding.max_local_numel(kind.shape) * kind.dtype.itemsize


@dataclass(frozen=True, slots=True)
class ReshardedDefinition:
    """Ops and moves in order; every op reads and makes values in exactly the shardings of its placement."""

    sharded: ShardedDefinition
    values: tuple[Value, ...]
    steps: tuple[Step, ...]
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

    def price(self, step: Set) -> Price:
        """A move's modelled seconds, and the bytes that it sends."""
        kind = self.type_of(step.source)
        return price(step.move, kind.shape, kind.dtype.itemsize)

    def seconds(self, step: Set) -> float:
        """The modelled time of a move."""
        return self.price(step).seconds

    def name_of(self, step: Step) -> str:
        """The name of a step's op, or the kind of its move."""
        return self.graph.nodes[step.node].name if isinstance(step, Compute) else step.move.kind.value

    @property
    def moves(self) -> tuple[Set, ...]:
        """All moves but slices, in order."""
        return tuple(s for s in self.steps if isinstance(s, Set) and s.move.kind is not MoveKind.SLICE)

    @property
    def collectives(self) -> tuple[Set, ...]:
        """The moves in which something travels between ranks, in order."""
        return tuple(s for s in self.moves if travels(s.move, self.graph.shape(self.values[s.source].tensor)))

    def read(self) -> set[int]:
        """The values that some step reads, or that are outputs."""
        return {value for step in self.steps for value in step.inputs}.union(self.outputs)

    def without_unread(self) -> ReshardedDefinition:
        """The same without moves whose result nobody reads."""
        read, kept = set(self.outputs), list[Step]()
        for step in reversed(self.steps):
            if isinstance(step, Compute) or step.target in read:
                kept.append(step)
                read.update(step.inputs)
        return replace(self, steps=tuple(reversed(kept)))

    def verify(self) -> None:
        """Assert that every value is made once, before it is read, and that moves fit the shardings of their values.

        What is moved is read.
        """
        known, shardings = set(self.inputs), [value.sharding for value in self.values]
        assert self.read().issuperset([step.target for step in self.steps if isinstance(step, Set)])
        for step in self.steps:
            assert known.issuperset(step.inputs) and known.isdisjoint(step.outputs)
            known.update(step.outputs)
            if isinstance(step, Set):
                assert shardings[step.source] is step.move.src and shardings[step.target] is step.move.dst
            else:
                assert tuple([shardings[v] for v in step.inputs]) == step.placement.operands
                assert tuple([shardings[v] for v in step.outputs]) == step.placement.results
        assert known.issuperset(self.outputs)
        assert not any(shardings[v].partial for v in self.outputs)

    def __str__(self) -> str:
        graph, lines = self.graph, []
        for step in self.steps:
            if isinstance(step, Set):
                tensor = graph.tensors[self.values[step.source].tensor]
                text = f"v{step.target} = set v{step.source} {tensor.label}: {step.move}"
                lines.append(f"{text}  # {step.why} {step.line}")
            else:
                made = ", ".join(f"v{v} {self.values[v].sharding}" for v in step.outputs)
                node = graph.nodes[step.node]
                lines.append(f"{made} = {node.name}({', '.join(f'v{v}' for v in step.inputs)})  # {node.line}")
        return "\n".join([*lines, "return " + ", ".join(f"v{v}" for v in self.outputs)])

    def fingerprint(self) -> str:
        """A text that is equal only for equal definitions.

        An op or move that repeats is written once and then numbered.

        (The `str` of a large definition would take a fifth of its compilation.)
        """
        known: dict[tuple[int, int], int] = {}
        numbers: dict[str, int] = {}
        lines, nodes = [], self.graph.nodes
        for step in self.steps:
            what, how, ids = (
                (nodes[step.node].call, step.placement, f"{step.inputs}{step.outputs}")
                if isinstance(step, Compute)
                else (self.type_of(step.source), step.move, f"{step.source}>{step.target}")
            )
            key = (id(what), id(how))
            number = known.get(key)
            if number is None:
                number = known[key] = numbers.setdefault(f"{what} {how}", len(numbers))
            lines.append(f"{ids} {number}")
        return "\n".join([*lines, *numbers, f"{self.inputs} {self.outputs}"])
