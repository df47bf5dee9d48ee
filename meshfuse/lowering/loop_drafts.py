"""Loops in the making: whether some statements can be one loop, and the order of a program with its loops."""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from ..graph import Stream
from ..resharding import Statement
from .chunked_dims import ChunkedDim
from .overlapped import ChunkLoop, RingKind


@dataclass(slots=True)
class LoopDraft:
    """A loop in the making; `steps` are the places of its statements in the program."""

    tensor: int
    stream: Stream
    statements: set[int] = field(default_factory=set)
    cuts: dict[int, ChunkedDim] = field(default_factory=dict)
    ring: RingKind | None = None


def is_convex(statements: Sequence[Statement], places: set[int]) -> bool:
    """Whether these statements can run in a row: no other one depends on one of them and is needed by another."""
    inside = set(statements[min(places)].outputs)
    outside: set[int] = set()
    for place in range(min(places) + 1, max(places) + 1):
        statement = statements[place]
        if place in places:
            if outside.intersection(statement.inputs):
                return False
            inside.update(statement.outputs)
        elif (inside | outside).intersection(statement.inputs):
            outside.update(statement.outputs)
    return True


def in_order(
    statements: Sequence[Statement], maker: Mapping[int, int], drafts: Sequence[LoopDraft]
) -> tuple[Statement | ChunkLoop, ...] | None:
    """All statements with each loop's in one place, each after what it reads, and otherwise in their order.

    None where two loops need results of each other. `maker` is, by value, the place of the statement that makes it.
    """
    unit_of = {place: min(draft.statements) for draft in drafts for place in draft.statements}
    before: dict[int, set[int]] = {}
    after: dict[int, set[int]] = {}
    for place, statement in enumerate(statements):
        unit = unit_of.get(place, place)
        found = {unit_of.get(maker[v], maker[v]) for v in statement.inputs if v in maker} - {unit}
        before.setdefault(unit, set()).update(found)
        for other in found:
            after.setdefault(other, set()).add(unit)
    ready = [unit for unit, needed in before.items() if not needed]
    heapq.heapify(ready)
    out: list[int] = []
    while ready:
        unit = heapq.heappop(ready)
        out.append(unit)
        for other in sorted(after.get(unit, ())):
            before[other].discard(unit)
            if not before[other]:
                heapq.heappush(ready, other)
    return tuple(_parts(statements, drafts, out)) if len(out) == len(before) else None


def _parts(
    statements: Sequence[Statement], drafts: Sequence[LoopDraft], units: Sequence[int]
) -> Iterator[Statement | ChunkLoop]:
    begins = {min(draft.statements): draft for draft in drafts}
    number = 0
    for unit in units:
        if unit not in begins:
            yield statements[unit]
            continue
        draft = begins[unit]
        inside = tuple(statements[place] for place in sorted(draft.statements))
        chunks = len(draft.cuts[draft.tensor].chunks)
        yield ChunkLoop(number, inside, draft.cuts, chunks, draft.ring, draft.tensor, draft.stream)
        number += 1
