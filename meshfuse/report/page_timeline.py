"""The timeline of the page: ops at the peak rate, collectives at the speed of their links, and no overlap.

Its bars are the page's rows and the bill's entries. `report/timeline.py` plays the host programs instead, with overlap.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..compiler import CompiledProgram
from ..graph import Graph
from ..placement.roofline import computing_seconds, stored_by, stored_tensors
from ..reshard.steps import StepKind
from ..resharding import Compute, Reshard


@dataclass(frozen=True, slots=True)
class Bar:
    """From `start` on, for so many `seconds`, a rank computes a node or takes part in a collective.

    collective: its place in the bill; -1 for a node.
    node: the node's number; None for a collective.
    """

    start: float
    seconds: float
    node: int | None
    collective: int = -1


Lane = tuple[tuple[int, ...], tuple[Bar, ...]]


def lanes(compiled: CompiledProgram) -> list[Lane]:
    """The ranks that do the same at the same times, with their bars.

    A collective begins when its last rank has come.
    """
    clock = dict.fromkeys(compiled.ranks, 0.0)
    bars: dict[int, list[Bar]] = {rank: [] for rank in compiled.ranks}
    place, stored = 0, stored_tensors(compiled.graph)
    for statement in compiled.resharded.statements:
        if isinstance(statement, Compute):
            ranks = statement.placement.results[0].mesh.ranks
            seconds = _compute_seconds(compiled.graph, statement, stored)
            alike = {start: Bar(start, seconds, statement.node) for start in {clock[rank] for rank in ranks}}
            for rank in ranks:
                bars[rank].append(alike[clock[rank]])
                clock[rank] += seconds
        elif statement.step.kind is not StepKind.SLICE:
            _communicate(compiled, statement, place, clock, bars)
            place += 1
    return _merged(bars)


def _compute_seconds(graph: Graph, statement: Compute, stored: frozenset[int]) -> float:
    node = graph.nodes[statement.node]
    return computing_seconds(node.call, statement.placement, stored_by(node, stored))


def _communicate(
    compiled: CompiledProgram, reshard: Reshard, place: int, clock: dict[int, float], bars: dict[int, list[Bar]]
) -> None:
    seconds = compiled.resharded.seconds(reshard)
    ranks = {*reshard.step.src.mesh.ranks, *reshard.step.dst.mesh.ranks}
    for group in {reshard.step.group(rank) for rank in ranks}:
        bar = Bar(max(clock[rank] for rank in group), seconds, None, place)
        for rank in group:
            bars[rank].append(bar)
            clock[rank] = bar.start + seconds


def _merged(bars: dict[int, list[Bar]]) -> list[Lane]:
    alike: dict[tuple[Bar, ...], list[int]] = {}
    for rank, found in bars.items():
        alike.setdefault(tuple(found), []).append(rank)
    return [(tuple(ranks), found) for found, ranks in alike.items()]
