"""Divisions by the sums of a softmax, which a kernel does as products with reciprocals.

A division by a row's sum is done for each element of the row, and is what a softmax spends most of its time on (0.86 of
a copy's bandwidth on an H200, 0.99 with a reciprocal per row). The reciprocal of a number near either end of the range
overflows or loses bits, so this is done where the sum is known to be between 1 and the number of its terms: of
exp(x - max(x)) over the dims of the maximum.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ...dtypes import DataType
from ...graph import Graph, Node
from ...ops.reductions import reduced_dims
from .repeated import repeated_shape, repeats

_WIDE = (DataType.Float, DataType.Double)


def softmax_divisions(graph: Graph, nodes: set[int]) -> frozenset[int]:
    """Those of these nodes that divide by a softmax's sum, which has fewer elements than the quotient."""
    divisions = [node for i in nodes if (node := graph.nodes[i]).name == "truediv" and len(node.inputs) == 2]
    if not divisions:
        return frozenset()
    makers = {t: node for node in graph.nodes for t in node.outputs}
    return frozenset(node.id for node in divisions if _divides_by_a_softmax_sum(node, makers))


def quotient(ops: Any, a: Any, b: Any) -> Any:
    """a / b in a definition, of a `b` that is broadcast and far from zero and from the end of the range."""
    return ops.mul(a, ops.reciprocal(b))


def _divides_by_a_softmax_sum(node: Node, makers: Mapping[int, Node]) -> bool:
    if any(ttype.dtype not in _WIDE for ttype in (*node.call.types, *node.call.results)):
        return False
    total = _maker(node.inputs[1], makers)
    if total is None or total.name != "sum" or total.call.results[0].numel >= node.call.results[0].numel:
        return False
    top = _subtracted_maximum(makers.get(total.inputs[0]), makers)
    if top is None or top.call.types[0].shape != total.call.types[0].shape:
        return False
    return reduced_dims(top.call) == reduced_dims(total.call)


def _subtracted_maximum(exp: Node | None, makers: Mapping[int, Node]) -> Node | None:
    """The maximum of x in exp(x - max(x)), each of whose elements is subtracted from those that it is of."""
    shifted = makers.get(exp.inputs[0]) if exp is not None and exp.name == "exp" else None
    if shifted is None or shifted.name != "sub" or len(shifted.inputs) != 2:
        return None
    top = _maker(shifted.inputs[1], makers)
    if top is None or top.name != "max" or top.inputs[0] != shifted.inputs[0]:
        return None
    shape, last = top.call.types[0].shape, makers[shifted.inputs[1]].call
    kept = tuple(1 if d in reduced_dims(top.call) else n for d, n in enumerate(shape))
    narrow = repeated_shape(last, last.types[0].shape) if repeats(last) else last.results[0].shape
    return top if (1,) * (len(shape) - len(narrow)) + narrow == kept else None


def _maker(tensor: int, makers: Mapping[int, Node]) -> Node | None:
    """The op that makes a tensor's elements."""
    node = makers.get(tensor)
    while node is not None and node.call.op.keeps_elements:
        node = makers.get(node.inputs[0])
    return node
