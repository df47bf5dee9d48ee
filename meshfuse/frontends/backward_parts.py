"""The backward half of a graph as one part, or as two: gradients of what came in first, then those of weights."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from .captured_graph import Captured, Source
from .cut import Cut, Reads

Node = torch.fx.Node


@dataclass(frozen=True, slots=True)
class Part:
    """A part of the backward.

    again: nodes of the forward that it computes once more.
    nodes: its own, in the graph's order.
    saved: what it reads of what the forward saved, as places there.
    taken, given: nodes of the backward that it has of the part before, or gives to the one after.
    reads: inputs of the graph.
    ends: gradients that it returns.
    """

    again: tuple[Node, ...]
    nodes: tuple[Node, ...]
    saved: tuple[int, ...]
    taken: tuple[Node, ...]
    given: tuple[Node, ...]
    reads: tuple[Node, ...]
    ends: tuple[tuple[Node, Source], ...]


def parts_of(graph: Captured, cut: Cut, read: Reads, is_split: bool) -> list[Part]:
    """The backward in parts; two where it is split, and both gradients of arguments and of weights are asked for."""
    ends = [(node, source) for node, source in graph.of_kind("gradient") if node is not None]
    early = read.ancestors([node for node, source in ends if source.of == "argument"]) & set(cut.backward)
    if not is_split or not early or len(early) == len(cut.backward):
        return [_part(graph, cut, read, cut.backward, ends, (), ())]
    late = [node for node in cut.backward if node not in early]
    later = [(node, source) for node, source in ends if node not in early]
    wanted = {x for node in late for x in read(node)} | {node for node, _ in later}
    held = tuple(node for node in cut.backward if node in early and node in wanted)
    first = [node for node in cut.backward if node in early]
    return [
        _part(graph, cut, read, first, [end for end in ends if end not in later], (), held),
        _part(graph, cut, read, late, later, held, ()),
    ]


def _part(
    graph: Captured, cut: Cut, read: Reads, nodes: Sequence[Node], ends: Sequence[tuple[Node, Source]],
    taken: tuple[Node, ...], given: tuple[Node, ...],
) -> Part:  # fmt: skip
    wanted = {x for node in nodes for x in read(node)} | {node for node, _ in ends}
    stop = set(cut.saved)
    again = read.ancestors(wanted & set(cut.again), stop) & set(cut.again)
    wanted |= {x for node in again for x in read(node)}
    return Part(
        tuple(node for node in cut.again if node in again), tuple(nodes),
        tuple(place for place, node in enumerate(cut.saved) if node in wanted), taken, given,
        tuple(node for node, _ in graph.inputs if node in wanted and node not in stop), tuple(ends),
    )  # fmt: skip
