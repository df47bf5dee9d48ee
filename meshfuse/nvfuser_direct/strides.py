"""The memory order of outputs: in nvFuser, results follow the stride order of their operands."""

from __future__ import annotations

from ..definition.builder import DefinitionBuilder
from ..definition.records import OpNode
from ..ops.pointwise import pointwise_rule

StrideOrder = tuple[int, ...]  # The place of each dim in memory, 0 the fastest.


def row_major(ndim: int) -> StrideOrder:
    return tuple(reversed(range(ndim)))


def inferred_orders(fd: DefinitionBuilder) -> list[StrideOrder]:
    """For every tensor the stride order that it takes from the inputs; elementwise ops and attention pass it on."""
    orders = [made.stride_order or row_major(made.type.ndim) for made in fd.tensors]
    for node in fd.nodes:
        for tensor in node.outputs:
            plain = row_major(fd.tensors[tensor].type.ndim)
            found = (orders[operand] for operand in _followed(fd, node, tensor))
            orders[tensor] = next((order for order in found if order != plain), plain)
    return orders


def _followed(fd: DefinitionBuilder, node: OpNode, tensor: int) -> list[int]:
    if node.op.laid_out_like:
        return [node.inputs[place] for place in node.op.laid_out_like[node.outputs.index(tensor) :][:1]]
    if node.op.rule is not pointwise_rule:
        return []
    ndim = fd.tensors[tensor].type.ndim
    return [i for i in node.inputs if fd.tensors[i].type.ndim == ndim]
