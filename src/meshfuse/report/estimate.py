"""A simple estimate of when each rank does what: ops at the peak rate, moves at their links, nothing overlapped."""

from __future__ import annotations

from dataclasses import dataclass

from .. import costs
from ..compiler import CompiledProgram
from ..resharding.insert import Compute, Set
from ..resharding.moves import MoveKind
from .alternatives import move_seconds


@dataclass(frozen=True, slots=True)
class Span:
    """From `start` on, a rank computes a node, or takes part in a collective (its place in the bill; else -1)."""

    start: float
    seconds: float
    node: int | None
    collective: int = -1


Lane = tuple[tuple[int, ...], tuple[Span, ...]]


def estimate(compiled: CompiledProgram) -> list[Lane]:
    """Ranks that do the same at the same times, and their spans. A collective begins when its last rank is there."""
    clock = dict.fromkeys(compiled.ranks, 0.0)
    spans: dict[int, list[Span]] = {rank: [] for rank in compiled.ranks}
    place = 0
    for step in compiled.resharded.steps:
        if isinstance(step, Compute):
            ranks, seconds = step.placement.results[0].mesh.ranks, _compute_seconds(compiled, step)
            alike = {start: Span(start, seconds, step.node) for start in {clock[rank] for rank in ranks}}
            for rank in ranks:
                spans[rank].append(alike[clock[rank]])
                clock[rank] += seconds
        elif step.move.kind is not MoveKind.SLICE:
            _communicate(compiled, step, place, clock, spans)
            place += 1
    return _merged(spans)


def _compute_seconds(compiled: CompiledProgram, step: Compute) -> float:
    call = compiled.graph.nodes[step.node].call
    mesh = step.placement.results[0].mesh
    return costs.computation(call.op.flops(call) / step.placement.ways, mesh.flops)


def _communicate(
    compiled: CompiledProgram, step: Set, place: int, clock: dict[int, float], spans: dict[int, list[Span]]
) -> None:
    tensor = compiled.resharded.values[step.source].tensor
    seconds = move_seconds(compiled.graph, tensor, step.move)
    ranks = {*step.move.src.mesh.ranks, *step.move.dst.mesh.ranks}
    for group in {step.move.group(rank) for rank in ranks}:
        span = Span(max(clock[rank] for rank in group), seconds, None, place)
        for rank in group:
            spans[rank].append(span)
            clock[rank] = span.start + seconds


def _merged(spans: dict[int, list[Span]]) -> list[Lane]:
    lanes: dict[tuple[tuple[float, float, int | None, int], ...], list[int]] = {}
    for rank, found in spans.items():
        lanes.setdefault(tuple((s.start, s.seconds, s.node, s.collective) for s in found), []).append(rank)
    return [(tuple(ranks), tuple(spans[ranks[0]])) for ranks in lanes.values()]
