"""The memory order of outputs: in nvFuser results follow the stride order of their operands."""

from __future__ import annotations

from ..definition.fusion import DefinitionBuilder, OpNode
from ..ops.pointwise import pointwise_rule

Order = tuple[int, ...]  # The place of each dim in memory, 0 the fastest.
# The operand (by place) that a result (by place) is laid out like.
_ATTENTION = {"sdpfa_fwd": {0: 0}, "sdpfa_bwd": {0: 1, 1: 2, 2: 3}}


def row_major(ndim: int) -> Order:
    return tuple(reversed(range(ndim)))


def inferred_order(fd: DefinitionBuilder, tensor: int) -> Order:
    """The order that a tensor takes over from the inputs: elementwise ops and attention pass it on."""
    ndim = fd.tensors[tensor].type.ndim
    node = next((node for node in fd.nodes if tensor in node.outputs), None)
    if node is None:
        return fd.tensors[tensor].stride_order or row_major(ndim)
    for operand in _followed(fd, node, tensor):
        order = inferred_order(fd, operand)
        if order != row_major(ndim):
            return order
    return row_major(ndim)


def _followed(fd: DefinitionBuilder, node: OpNode, tensor: int) -> list[int]:
    if node.op.name in _ATTENTION:
        place = _ATTENTION[node.op.name].get(node.outputs.index(tensor))
        return [] if place is None else [node.inputs[place]]
    if node.op.rule is not pointwise_rule:
        return []
    ndim = fd.tensors[tensor].type.ndim
    return [i for i in node.inputs if fd.tensors[i].type.ndim == ndim]
