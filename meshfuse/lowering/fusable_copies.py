"""Which inputs and results of a segment a compiler can fuse a copy with."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from ..graph import Graph
from ..ops.opdef import Call
from .segments import Segment, SegmentedDefinition


def by_element(call: Call) -> bool:
    """Whether an op does little work per element: pointwise ops, reductions, changes of shape."""
    return call.op.flops(call) <= max((t.numel for t in (*call.types, *call.results)), default=0)


@dataclass(frozen=True, slots=True)
class Fusible:
    """Inputs that only such ops read (`read`), and results that such ops make (`made`).

    A product wants its operands in memory and writes its result there: a copy beside it stays a copy. `turned` are
    results that may lie otherwise than row by row, as they are parts of others, or these in another order of dims.
    """

    read: frozenset[int]
    made: frozenset[int]
    turned: frozenset[int]


def fusible_parts(segmented: SegmentedDefinition) -> Mapping[str, Fusible]:
    """By the name of each segment."""
    graph = segmented.resharded.graph
    # Calls of equal layers are the same objects, and live as long as the graph.
    calls = {id(node.call): node.call for node in graph.nodes}
    light = {key for key, call in calls.items() if by_element(call)}
    return {part.name: _fusible(graph, part, light) for part in segmented.parts if isinstance(part, Segment)}


def fusable_copies(segmented: SegmentedDefinition, parts: Mapping[str, Fusible]) -> frozenset[int]:
    """The values whose first reader is a segment that can put them together itself."""
    seen: set[int] = set()
    found: set[int] = set()
    for part in segmented.parts:
        if isinstance(part, Segment):
            found.update(parts[part.name].read - seen)
        seen.update(part.inputs)
    return frozenset(found)


def _fusible(graph: Graph, part: Segment, light: Collection[int]) -> Fusible:
    read = frozenset(part.inputs) - _read_by_products(graph, part, light)
    made, turned = _made(graph, part, light)
    return Fusible(read, made.intersection(part.outputs), made.intersection(turned, part.outputs))


def _read_by_products(graph: Graph, part: Segment, light: Collection[int]) -> set[int]:
    """The values that products and the like read, or views of which they read."""
    found: set[int] = set()
    for compute in reversed(part.computes):
        call = graph.nodes[compute.node].call
        if id(call) not in light or (call.op.is_view and not found.isdisjoint(compute.outputs)):
            found.update(compute.inputs)
    return found


def _made(graph: Graph, part: Segment, light: Collection[int]) -> tuple[frozenset[int], set[int]]:
    """(values made by element, or views of such; those of them that may lie in another order)."""
    made: set[int] = set()
    turned: set[int] = set()
    for compute in part.computes:
        node = graph.nodes[compute.node]
        if made.issuperset(compute.inputs[:1]) if node.call.op.is_view else id(node.call) in light:
            made.update(compute.outputs)
        same = not node.call.op.is_view or node.rule.operands[:1] == node.rule.results[:1]
        if not same or not turned.isdisjoint(compute.inputs):
            turned.update(compute.outputs)
    return frozenset(made), turned
