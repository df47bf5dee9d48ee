"""Ops that add an operand once, as a linear its bias, in two, where that operand lies over ranks that share the sum.

In one op the operand would have to be whole on the rank that adds it. Added by an op of its own it stays as it is, and
the sum may be scattered to where it lies: half the bytes of an all-reduce.
"""

from __future__ import annotations

from collections.abc import Sequence

from ..graph import Graph, Node
from ..ops.rules import FactorKind
from ..ops.values import TensorRef
from ..sharding.layout import axes
from ..sharding.value import Axis
from .graph_writer import GraphWriter


def split_biases(graph: Graph) -> Graph:
    """The graph with such ops in two; itself where there are none, going by the annotations of its inputs."""
    chosen = {node.id for node in graph.nodes if node.call.op.split_last_operand is not None and _clashes(graph, node)}
    return _ApartWriter(graph).run(chosen) if chosen else graph


def _clashes(graph: Graph, node: Node) -> bool:
    """Whether the last operand, which the op does not sum over, lies over an axis that splits a dim of the sum."""
    if node.id in graph.reductions or any(i in graph.streams for i in node.outputs):
        return False
    last, summed = len(node.inputs) - 1, set[Axis]()
    over = {axis for dim in range(len(node.rule.operands[last])) for axis in _axes(graph, node, last, dim)}
    for operand, dims in enumerate(node.rule.operands):
        for dim, factors in enumerate(dims):
            if any(node.rule.factors[f].kind is FactorKind.REDUCE for f in factors):
                if operand == last:
                    return False
                summed |= _axes(graph, node, operand, dim)
    return bool(over & summed)


def _axes(graph: Graph, node: Node, operand: int, dim: int) -> set[Axis]:
    """The mesh axes that an annotation has an operand's dim lie over."""
    known = graph.annotations.get(node.inputs[operand])
    return set() if known is None else {(known.mesh, split.axis) for split in axes(known.dims[dim])}


class _ApartWriter(GraphWriter):
    def form(self, node: Node) -> Sequence[TensorRef] | None:
        assert node.call.op.split_last_operand is not None
        return node.call.op.split_last_operand(self, node.call, tuple(map(TensorRef, node.inputs)))
