"""The graph that the compiler's passes work on: tensors, ops and annotations, with every size known."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar, NamedTuple, Protocol

from ..errors import SourceLine
from ..fast_dataclass import quickly_made
from ..ops.opdef import Call
from ..ops.rules import Rule
from ..ops.values import ScalarRef, TensorRef, TensorType
from ..scalars import ScalarDef
from ..sharding.layout import Layout
from ..sharding.value import Sharding


@quickly_made
@dataclass(frozen=True, slots=True)
class Tensor:
    """A tensor of the graph: its number, its concrete type and the line of the script that made it."""

    id: int
    type: TensorType
    line: SourceLine

    @property
    def name(self) -> str:
        return f"t{self.id}"

    @property
    def label(self) -> str:
        """The script's variable, if its line shows one, with the name: `x (t0)`."""
        return self.line.label(self.name)


@dataclass(frozen=True, slots=True)
class Stream:
    """A dim that is worked on in chunks: one chunk is communicated while another is computed.

    layout: the dim's factors, of which that of the chunks is bound to the stream; None lets the compiler place the
        chunks.
    ring: whether every rank begins with its own shard, and shards travel from rank to rank.
    """

    dim: int
    chunks: int
    layout: Layout | None
    ring: bool
    line: SourceLine


@quickly_made
@dataclass(frozen=True, slots=True)
class Node:
    """One op: the call with concrete types, its factor rule, and the numbers of the tensors that it reads and makes.

    origin: the number of the definition's op that it is, or is a part of.
    salt: how many ops before that one draw random numbers; what this op draws depends on it.
    """

    id: int
    call: Call
    rule: Rule
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    line: SourceLine
    origin: int
    salt: int = 0

    @property
    def name(self) -> str:
        return self.call.op.name


class Carried(NamedTuple):
    """A tensor that is in another order than its op in the definition makes it.

    The dim is [outer, blocks, the rest]; block i of it is block order[i] of the definition's tensor.
    """

    dim: int
    outer: int
    order: tuple[int, ...]


class Rewriting(Protocol):
    """A function that writes some ops of a graph, known by their numbers, in other ops.

    It is kept with the graph and applied again for other sizes, unless `sized`: then it is right for these sizes only.
    """

    sized: ClassVar[bool]

    def __call__(self, graph: Graph) -> Graph: ...


@dataclass(frozen=True, slots=True)
class Graph:
    """Ops, each after those whose results it reads, and the user's annotations.

    annotation_lines: of tensors in `implied`, the lines that make them.
    implied: by annotated tensor that the user said nothing of, in words why it lies so.
    reductions: by node the layouts that the user gave the reduction dims of its result, in the rule's order.
    streams: the tensors to be worked on in chunks.
    rewritings: those that made this graph of the definition's own ops, first one first.
    stationary: by tensor the mesh axes along which no collective may move it.
    carried: the tensors that are in another order than in the definition.
    once_in: by output that is added up over so many runs, how many; it is brought to its place once in them.
    units: the tensors that come of a reshard which goes in one call with those of the same text: weights of a unit that
        are gathered, and their gradients.
    """

    tensors: tuple[Tensor, ...]
    nodes: tuple[Node, ...]
    inputs: tuple[TensorRef | ScalarRef, ...]
    outputs: tuple[int, ...]
    annotations: Mapping[int, Sharding]
    reductions: Mapping[int, tuple[Layout, ...]]
    annotation_lines: Mapping[int, SourceLine]
    scalars: Mapping[int, ScalarDef]
    streams: Mapping[int, Stream] = field(default_factory=dict)
    rewritings: tuple[Rewriting, ...] = ()
    implied: Mapping[int, str] = field(default_factory=dict)
    stationary: Mapping[int, tuple[str, ...]] = field(default_factory=dict)
    carried: Mapping[int, Carried] = field(default_factory=dict)
    units: Mapping[int, str] = field(default_factory=dict)
    once_in: Mapping[int, int] = field(default_factory=dict)

    def shape(self, tensor: int) -> tuple[int, ...]:
        return self.tensors[tensor].type.shape

    def streamed(self) -> frozenset[int]:
        """The tensors that the user cuts into chunks of a size, by a stream's own factor."""
        return frozenset([i for i, stream in self.streams.items() if stream.layout is not None])

    def annotated(self, places: Mapping[int, Sharding], why: str = "held there") -> Graph:
        """The graph with these tensors annotated as well, as if in the lines that make them; `why` says what for."""
        lines = {i: self.tensors[i].line for i in places}
        return replace(
            self, annotations={**self.annotations, **places}, annotation_lines={**self.annotation_lines, **lines},
            implied={**self.implied, **dict.fromkeys(places, why)},
        )  # fmt: skip

    def brought_for(self, tensor: int) -> str:
        """In words what an annotated tensor is brought to its place for."""
        return "output" if tensor in self.implied else "its annotation"

    def with_rewrite(self, rewriting: Rewriting) -> Graph:
        """The graph, with a note that this rewriting made it."""
        return replace(self, rewritings=(*self.rewritings, rewriting))

    @property
    def input_tensors(self) -> tuple[int, ...]:
        return tuple(ref.id for ref in self.inputs if isinstance(ref, TensorRef))

    def in_words(self) -> str:
        """The program by the number of its ops, its first output and the line that makes it."""
        made = [self.tensors[i] for i in self.outputs[:1]]
        named = f"{made[0].label} at {made[0].line}" if made else "nothing"
        return f"{len(self.nodes):,} op{'s' if len(self.nodes) != 1 else ''} of the definition of {named}"

    def __str__(self) -> str:
        lines = [f"inputs: {', '.join(f'{self.tensors[i].label}: {self.tensors[i].type}' for i in self.input_tensors)}"]
        for node in self.nodes:
            made = ", ".join(f"t{i}: {self.tensors[i].type}" for i in node.outputs)
            taken = ", ".join(f"t{i}" for i in node.inputs)
            lines.append(f"  {made} = {node.name}({taken})  # {node.rule}  {node.line}")
        lines.append("outputs: " + ", ".join(f"t{i}" for i in self.outputs))
        return "\n".join(lines)


def rewritten(graph: Graph, rewritings: Sequence[Rewriting]) -> Graph:
    """The graph after these rewritings, applied one after the other."""
    for rewriting in rewritings:
        graph = rewriting(graph)
    return graph


def needed(nodes: Sequence[Node], outputs: Sequence[int]) -> tuple[Node, ...]:
    """The nodes that some output depends on, numbered anew."""
    wanted, kept = set(outputs), []
    for node in reversed(nodes):
        if wanted.intersection(node.outputs):
            wanted.update(node.inputs)
            kept.append(node)
    return tuple([numbered(node, number) for number, node in enumerate(reversed(kept))])


def numbered(node: Node, number: int, inputs: tuple[int, ...] | None = None) -> Node:
    """The node with another number and, if given, other inputs. Several times as fast as `dataclasses.replace`."""
    inputs = node.inputs if inputs is None else inputs
    if node.id == number and node.inputs == inputs:
        return node
    return Node(number, node.call, node.rule, inputs, node.outputs, node.line, node.origin, node.salt)


def users(nodes: Sequence[Node]) -> dict[int, list[int]]:
    """By tensor, the nodes that read it."""
    found: dict[int, list[int]] = {}
    for node in nodes:
        for tensor in dict.fromkeys(node.inputs):
            found.setdefault(tensor, []).append(node.id)
    return found


def reordered(graph: Graph, order: Sequence[int]) -> Graph:
    """The graph with its nodes in this order, numbered anew."""
    nodes = tuple(numbered(graph.nodes[old], new) for new, old in enumerate(order))
    reductions = {new: graph.reductions[old] for new, old in enumerate(order) if old in graph.reductions}
    return replace(graph, nodes=nodes, reductions=reductions)
