"""The memory order of outputs: in nvFuser, results follow the stride order of their operands."""

from __future__ import annotations

from ..definition.builder import DefinitionBuilder
from ..definition.records import OpNode
from ..ops.pointwise import pointwise_rule

StrideOrder = tuple[int, ...]  # The place of each dim in memory, 0 the fastest.
# The operand (by place) that a result (by place) is laid out like.
_ATTENTION = {"sdpfa_fwd": {0: 0}, "sdpfa_bwd": {0: 1, 1: 2, 2: 3}}


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
    if node.op.name in _ATTENTION:
        place = _ATTENTION[node.op.name].get(node.outputs.index(tensor))
        return [] if place is None else [node.inputs[place]]
    if node.op.rule is not pointwise_rule:
        return []
    ndim = fd.tensors[tensor].type.ndim
    return [i for i in node.inputs if fd.tensors[i].type.ndim == ndim]
