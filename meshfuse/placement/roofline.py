"""What an op's computation takes on one rank, in each of its placements."""

from __future__ import annotations

import functools
from collections.abc import Iterator

from ..costs import computation
from ..graph import Graph, Node
from ..ops.opdef import Call
from ..ops.values import TensorType
from ..reshard.steps import group_size
from ..sharding.value import Sharding
from .factors import Placement

# By operand and by result of an op, whether it is in memory.
Stored = tuple[bool, ...]


def local_cost(call: Call, placement: Placement) -> tuple[float, float]:
    """Of an op on one rank, by itself: (operations, bytes that it reads and writes at least)."""
    nbytes = sum([t.nbytes / _ranks(sharding) for sharding, t in _tensors(call, placement)])
    return _operations(call) / placement.ways, nbytes


def stored_tensors(graph: Graph) -> frozenset[int]:
    """The tensors that are in memory: the others only pass between ops that one kernel computes.

    Neighbouring ops that work element by element, or reduce, are one kernel. What all others read and write is in
    memory, and inputs, outputs and what an annotation moves.
    """
    others = [node for node in graph.nodes if not node.call.op.is_fused]
    found = {i for node in others for i in (*node.inputs, *node.outputs)}
    return frozenset(found.union(graph.input_tensors, graph.outputs, graph.annotations))


def stored_by(node: Node, stored: frozenset[int]) -> Stored:
    """Which operands and results of an op are in memory."""
    return tuple([i in stored for i in (*node.inputs, *node.outputs)])


def computing_seconds(call: Call, placement: Placement, stored: Stored) -> float:
    """Seconds of an op's computation on one rank of its mesh: a roofline of operations and bytes of memory.

    A view takes none, and a lookup reads no more than it writes. Every op counts as one operation at least, so that
    work is not repeated where nothing is gained by it.
    """
    mesh, flops = placement.results[0].mesh, max(_operations(call), 1.0) / placement.ways
    return computation(flops, _nbytes(call, placement, stored), mesh.flops, mesh.memory)


def _nbytes(call: Call, placement: Placement, stored: Stored) -> float:
    if call.op.is_view:
        return 0.0
    rows = zip(_tensors(call, placement), stored, strict=True)
    each = [t.nbytes / _ranks(sharding) if is_stored else 0.0 for (sharding, t), is_stored in rows]
    read, written = sum(each[: len(call.types)]), sum(each[len(call.types) :])
    return written + (min(read, written) if call.op.is_lookup else read)


def _tensors(call: Call, placement: Placement) -> Iterator[tuple[Sharding, TensorType]]:
    yield from zip(placement.operands, call.types, strict=True)
    yield from zip(placement.results, call.results, strict=True)


@functools.lru_cache(maxsize=1 << 13)
def _operations(call: Call) -> float:
    return call.op.flops(call)


@functools.lru_cache(maxsize=1 << 14)
def _ranks(sharding: Sharding) -> int:
    """Over how many ranks a tensor is split."""
    return group_size(sharding.splits)
