"""The mean and variance of a sharded dim by one collective: every rank's own mean and sum of squares, gathered and
merged.

The mean is a sum over ranks. The squares of the differences from it are another, which cannot begin before the first is
done. Where starting a collective costs more than its bytes, each rank's own mean and squared differences from that are
gathered instead, and merged without loss (Chan, Golub & LeVeque 1983). Over two ranks that takes as many bytes. (The
mean of squares less the square of the mean would need one sum only, but is all rounding where the mean is large beside
the deviation.)
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

from ..dtypes import Category
from ..graph import CallTable, Graph, Node, Tensor, numbered
from ..ops import OPS
from ..ops.blocks import block_counts
from ..ops.reductions import reduced_dims
from ..ops.values import TensorRef
from ..propagation import Propagation, ShardedDefinition
from ..sharding.layout import axes, extent
from ..sharding.value import Sharding
from .graph_writer import with_nodes


class Moments(NamedTuple):
    """Ops by number: the sum of x, its mean, the squares of x less the mean, and their sum.

    Of the reduced dims of x `dim` alone lies over ranks, in `blocks` blocks.
    """

    total: int
    mean: int
    squared: int
    squares: int
    dim: int
    blocks: int


@dataclass(frozen=True, slots=True)
class Merged:
    """The rewriting of moments: two ops each, that make and merge each rank's own moments."""

    moments: tuple[Moments, ...]
    sized: ClassVar[bool] = False

    def __call__(self, graph: Graph) -> Graph:
        """The graph itself, where a sum is divided by another number than that of its terms: it is no mean then."""
        if not all(_is_mean(graph.nodes[m.total], graph.nodes[m.mean]) for m in self.moments):
            return graph
        return _rewritten(graph, self.moments).with_rewrite(self)


def fuse_mean_variance(sharded: ShardedDefinition, plan: Propagation) -> ShardedDefinition:
    """The plan with moments over sharded dims merged, if that takes less time; else the plan itself."""
    found = tuple(_MomentsFinder(sharded).run())
    if not found:
        return sharded
    other = plan.cheaper(sharded, Merged(found)(sharded.graph))
    return other if _by_gathers(other) else sharded


def _by_gathers(sharded: ShardedDefinition) -> bool:
    """Whether all moments are merged after a gather; an all-to-all would need more calls after it."""
    merges = [(n, c) for n, c in zip(sharded.graph.nodes, sharded.choices, strict=True) if n.name == "block_merge"]
    return all(c.placement.operands[0].dims[2:] == sharded.shardings[n.inputs[0]].dims[2:] for n, c in merges)


class _MomentsFinder:
    """Looks for moments in a graph by its unreduced sums."""

    def __init__(self, sharded: ShardedDefinition):
        self.sharded, self.graph = sharded, sharded.graph
        self.sums = [
            (node, choice.placement)
            for node, choice in zip(self.graph.nodes, sharded.choices, strict=True)
            if node.name == "sum" and choice.placement.results[0].partial
        ]
        self.readers: dict[int, list[Node]] = {}

    def run(self) -> Iterator[Moments]:
        found = [(total, _place(total, placement.operands[0])) for total, placement in self.sums]
        if len(found) < 2 or not any(place for _, place in found):
            return
        for node in self.graph.nodes:
            for i in dict.fromkeys(node.inputs):
                self.readers.setdefault(i, []).append(node)
        for total, place in found:
            mean = self._only_reader(total, "truediv")
            if place is not None and mean is not None and _is_mean(total, mean):
                yield from self._squares(total, mean, place)

    def _squares(self, total: Node, mean: Node, place: tuple[int, int]) -> Iterator[Moments]:
        """The first op that sums the squares of x less its mean."""
        for centred in self._readers(mean, "sub", (total.inputs[0], mean.outputs[0])):
            for squared in self._readers(centred, "mul", centred.outputs * 2):
                squares = self._only_reader(squared, "sum")
                if squares is not None and squares.call.args == total.call.args:
                    yield Moments(total.id, mean.id, squared.id, squares.id, *place)
                    return

    def _readers(self, node: Node, name: str, inputs: Sequence[int]) -> list[Node]:
        """The ops of this name whose operands are these tensors."""
        found = self.readers.get(node.outputs[0], [])
        return [other for other in found if other.name == name and other.inputs == tuple(inputs)]

    def _only_reader(self, node: Node, name: str) -> Node | None:
        """The op of this name that alone reads a node's result, if the user has not named that."""
        (made,), graph = node.outputs, self.graph
        found = self.readers.get(made, [])
        free = made not in graph.outputs and made not in graph.annotations and made not in graph.streams
        return found[0] if free and len(found) == 1 and found[0].name == name else None


def _place(total: Node, operand: Sharding) -> tuple[int, int] | None:
    """(dim, blocks) of the one reduced dim that lies in blocks over ranks; None where a sum is not of that kind."""
    ttype, dims = total.call.types[0], reduced_dims(total.call)
    cut = [d for d in dims if axes(operand.dims[d])]
    fits = (
        total.call["keepdim"] and ttype.dtype is total.call.results[0].dtype and ttype.dtype.category is Category.FLOAT
    )
    if not fits or len(cut) != 1 or operand.partial or not all(split.bound for split in operand.dims[cut[0]]):
        return None
    return cut[0], extent(operand.dims[cut[0]])


def _is_mean(total: Node, mean: Node) -> bool:
    """Whether the node divides the sum by the number of its terms."""
    shape = total.call.types[0].shape
    return mean.call.args[1] == math.prod(shape[d] for d in reduced_dims(total.call))


def _rewritten(graph: Graph, moments: Sequence[Moments]) -> Graph:
    """The graph with each moments' sums replaced by two ops, its other ops left out."""
    tensors, kinds = list(graph.tensors), CallTable()
    firsts = {m.total: m for m in moments}
    dropped = {number for m in moments for number in (m.mean, m.squared, m.squares)}
    nodes: list[Node] = []
    numbers: dict[int, int] = {}
    for node in graph.nodes:
        if node.id in firsts:
            nodes += _merging(graph, firsts[node.id], len(nodes), tensors, kinds)
        elif node.id not in dropped:
            numbers[node.id] = len(nodes)
            nodes.append(numbered(node, len(nodes)))
    return with_nodes(graph, tensors, nodes, numbers)


def _merging(graph: Graph, m: Moments, start: int, tensors: list[Tensor], kinds: CallTable) -> list[Node]:
    """The ops that make the mean and the sum of squares, by way of a new tensor with each block's moments."""
    total = graph.nodes[m.total]
    ttype, dims = total.call.types[0], reduced_dims(total.call)
    others = math.prod(ttype.shape[d] for d in dims if d != m.dim)
    counts = tuple(block_counts(ttype.shape[m.dim], m.blocks, others))
    made = Tensor(len(tensors), ttype, dataclasses.replace(total.line, given=""))
    first = _node(kinds, "block_moments", (dims, m.dim, m.blocks), total, start, made.id, ttype)
    tensors.append(dataclasses.replace(made, type=first.call.results[0]))
    second = _node(kinds, "block_merge", (counts,), total, start + 1, made.id, first.call.results[0])
    outputs = (*graph.nodes[m.mean].outputs, *graph.nodes[m.squares].outputs)
    return [first, dataclasses.replace(second, inputs=(made.id,), outputs=outputs)]


def _node(kinds: CallTable, name: str, more: tuple[Any, ...], total: Node, number: int, made: int, ttype: Any) -> Node:
    """An op on x with these arguments that makes the tensor `made`."""
    (x,) = total.inputs
    call, rule = kinds.get(OPS[name], (TensorRef(x), *more), (ttype,))
    return Node(number, call, rule, (x,), (made,), total.line, total.origin, total.salt)
