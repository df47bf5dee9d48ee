"""An order of a graph's nodes that does not depend on the order in which they were defined."""

from __future__ import annotations

from collections.abc import Container, Mapping

from .nodes import Graph

# At most so many ops that one output alone needs come right after the last tensor that they read.
_SHORT = 16


def depth_first(graph: Graph) -> tuple[int, ...]:
    """The nodes, each after what it reads, in an order that depends on the outputs alone.

    However independent ops were ordered in the definition, the order is the same. It keeps together what is read
    together: a few ops that only one output needs, such as a weight's gradient, come right after what they read.
    """
    producer = {out: node.id for node in graph.nodes for out in node.outputs}
    places: dict[int, tuple[int, ...]] = {}
    for number, root in enumerate(producer[i] for i in [*graph.outputs, *sorted(producer)] if i in producer):
        if root in places:
            continue
        group = _missing(graph, producer, root, places)
        read = {producer[i] for node in group for i in graph.nodes[node].inputs if i in producer}.difference(group)
        start = max((places[node] for node in read), default=()) if len(group) <= _SHORT else ()
        places.update((node, (*start, number, place)) for place, node in enumerate(group))
    return tuple(sorted(places, key=places.__getitem__))


def _missing(graph: Graph, producer: Mapping[int, int], root: int, have: Container[int]) -> list[int]:
    """The nodes that `root` still needs, in depth-first order, and `root` itself last."""
    found: dict[int, None] = {}
    stack = [root]
    while stack:
        node = stack[-1]
        before = [producer[i] for i in graph.nodes[node].inputs if i in producer]
        missing = [i for i in reversed(before) if i not in found and i not in have]
        if node in found or not missing:
            found[node] = None
            stack.pop()
        else:
            stack += missing
    return list(found)
