"""What an op's computation takes on one rank, in each of its placements."""

from __future__ import annotations

import functools
from collections.abc import Iterator

from ..costs import computation
from ..graph import Graph, Node
from ..mesh import DeviceMesh
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


class Roofline:
    """Seconds of an op's computation on one rank of its mesh: of its operations and bytes of memory what takes longer.

    A view takes none, and a lookup reads no more than it writes. Every op counts as one operation at least, so that
    work is not repeated where nothing is gained by it.
    """

    def __init__(self, call: Call, stored: Stored):
        self._flops, self._is_lookup = max(_operations(call), 1.0), call.op.is_lookup
        rows = zip((*call.types, *call.results), stored, strict=True)
        self._nbytes = [t.nbytes if is_stored and not call.op.is_view else 0 for t, is_stored in rows]
        self._operands = len(call.types)

    def seconds(self, placement: Placement) -> float:
        """What a placement takes."""
        mesh = placement.results[0].mesh
        return computation(*self.work(placement), mesh.flops, mesh.memory)

    def work(self, placement: Placement) -> tuple[float, float]:
        """Of a placement on one rank: (operations, bytes of memory that it reads and writes)."""
        return self._flops / placement.ways, self._moved(placement)

    def least(self, mesh: DeviceMesh) -> float:
        """What no placement on a mesh takes less than: nothing is computed or read twice."""
        read, written = sum(self._nbytes[: self._operands]), sum(self._nbytes[self._operands :])
        moved = written + (min(read, written) if self._is_lookup else read)
        return computation(self._flops / mesh.size, moved / mesh.size, mesh.flops, mesh.memory)

    def _moved(self, placement: Placement) -> float:
        rows = zip(self._nbytes, (*placement.operands, *placement.results), strict=True)
        each = [n / _ranks(sharding) if n else 0.0 for n, sharding in rows]
        read, written = sum(each[: self._operands]), sum(each[self._operands :])
        return written + (min(read, written) if self._is_lookup else read)


def computing_seconds(call: Call, placement: Placement, stored: Stored) -> float:
    """Seconds of an op's computation in one placement (`Roofline`)."""
    return Roofline(call, stored).seconds(placement)


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
