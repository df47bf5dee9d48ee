"""Loops that are being made, as places of steps: whether steps can be one, and the order of a program with them."""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from ..graph import Stream
from ..resharding.resharded import Step
from .chunked_dims import ChunkedDim
from .overlap import ChunkLoop, RingKind


@dataclass(slots=True)
class LoopDraft:
    """A loop that is being made, by the places of its steps."""

    tensor: int
    stream: Stream
    steps: set[int] = field(default_factory=set)
    cuts: dict[int, ChunkedDim] = field(default_factory=dict)
    ring: RingKind | None = None


def is_convex(steps: Sequence[Step], places: set[int]) -> bool:
    """True where nothing outside stands between two of the steps at these places."""
    inside = set(steps[min(places)].outputs)
    outside: set[int] = set()
    for place in range(min(places) + 1, max(places) + 1):
        step = steps[place]
        if place in places:
            if outside.intersection(step.inputs):
                return False
            inside.update(step.outputs)
        elif (inside | outside).intersection(step.inputs):
            outside.update(step.outputs)
    return True


def in_order(
    steps: Sequence[Step], maker: Mapping[int, int], drafts: Sequence[LoopDraft]
) -> tuple[Step | ChunkLoop, ...] | None:
    """All steps, those of loops in one place, each after what it reads; otherwise as they were. None where loops stand
    between each other's steps. `maker` tells the place of the step that makes a value.
    """
    unit_of = {place: min(draft.steps) for draft in drafts for place in draft.steps}
    before: dict[int, set[int]] = {}
    after: dict[int, set[int]] = {}
    for place, step in enumerate(steps):
        unit = unit_of.get(place, place)
        found = {unit_of.get(maker[v], maker[v]) for v in step.inputs if v in maker} - {unit}
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
    return tuple(_parts(steps, drafts, out)) if len(out) == len(before) else None


def _parts(steps: Sequence[Step], drafts: Sequence[LoopDraft], units: Sequence[int]) -> Iterator[Step | ChunkLoop]:
    begins = {min(draft.steps): draft for draft in drafts}
    number = 0
    for unit in units:
        if unit not in begins:
            yield steps[unit]
            continue
        draft = begins[unit]
        inside = tuple(steps[place] for place in sorted(draft.steps))
        chunks = len(draft.cuts[draft.tensor].chunks)
        yield ChunkLoop(number, inside, draft.cuts, chunks, draft.ring, draft.tensor, draft.stream)
        number += 1
