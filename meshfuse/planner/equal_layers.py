"""Equal layers share their decisions: a program of many layers is planned in the time of one.

An unrolled model repeats itself: forward it has a stretch of ops for each layer, backward another. Ops at the same
place of the layers of a stretch take one placement, so that the plan of any number of layers is one layer's, and equal
layers have equal plans. (Loops are planned once in Alpa, 2022, and PartIR, 2024, where the user marks them; here they
are found.)
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from ..graph import Graph

# What repeats is found by so many ops in a row.
_ROW = 24
# Layers that share their decisions: two are planned as quickly each for itself.
_FEWEST = 3


def deciders(graph: Graph, ends: bool = False) -> tuple[int, ...]:
    """By op the op that decides where it is: itself, or the one at its place in the second layer of its stretch.

    In the second layer, as what the first one reads may be special.

    ends: the ops of the first and of the last layer decide for themselves.
    """
    out = [node.id for node in graph.nodes]
    for stretch in _stretches_of(graph):
        for op in range(*stretch.between if ends else (stretch.start, stretch.end)):
            out[op] = stretch.second(op)
    return tuple(out)


def _stretches_of(graph: Graph) -> list[_Stretch]:
    """Of several meshes none: layers may be on different ones."""
    meshes = {sharding.mesh for sharding in graph.annotations.values()}
    return [] if len(meshes) > 1 else _stretches(_kinds(graph))


class _Stretch(NamedTuple):
    """Ops from `start` to before `end` that repeat every `period`."""

    start: int
    period: int
    end: int

    @property
    def count(self) -> int:
        return (self.end - self.start) // self.period

    def second(self, op: int) -> int:
        """The op of the second layer at the place of another in its own."""
        return self.start + self.period + (op - self.start) % self.period

    @property
    def between(self) -> tuple[int, int]:
        """Where the second layer begins, and where the last one does."""
        return self.start + self.period, self.start + (self.count - 1) * self.period


def _kinds(graph: Graph) -> list[int]:
    """A number for each op, equal where the same is done with tensors of which the same is said."""
    inputs, outputs, said = set(graph.input_tensors), set(graph.outputs), graph.annotations
    streams, kept, rare = graph.streams, graph.stationary, graph.once_in
    told = {i: (said.get(i), i in inputs, i in outputs, streams.get(i), kept.get(i), rare.get(i))
            for i in {*inputs, *outputs, *said, *streams}}  # fmt: skip
    numbers: dict[Any, int] = {}
    kinds = []
    for node in graph.nodes:
        places = tuple(map(node.inputs.index, node.inputs)) if len(node.inputs) > 1 else ()
        facts = tuple(map(told.get, (*node.inputs, *node.outputs)))
        key = (id(node.call), id(node.rule), places, facts, graph.reductions.get(node.id))
        kinds.append(numbers.setdefault(key, len(numbers)))
    return kinds


def _stretches(kinds: Sequence[int]) -> list[_Stretch]:
    """The longest stretches that repeat often enough, in order; no two share an op."""
    chosen: list[_Stretch] = []
    for found in sorted(_repeating(kinds), key=lambda s: s.start - s.end):
        for other in chosen:
            found = _beside(found, other)
        if found.count >= _FEWEST:
            chosen.append(found)
    return sorted(chosen)


def _beside(stretch: _Stretch, other: _Stretch) -> _Stretch:
    """What is left of a stretch before or after another."""
    if stretch.start < other.start:
        return stretch._replace(end=min(stretch.end, other.start))
    return stretch._replace(start=max(stretch.start, other.end))


def _repeating(kinds: Sequence[int]) -> Iterator[_Stretch]:
    """Every stretch that repeats often enough."""
    last: dict[tuple[int, ...], int] = {}
    ends: dict[int, int] = {}  # by period, up to where it has been tried
    for place in range(len(kinds) - _ROW + 1):
        row = tuple(kinds[place : place + _ROW])
        before = last.get(row)
        last[row] = place
        if before is not None and place >= ends.get(place - before, 0):
            found = _extended(kinds, before, place - before)
            ends[found.period] = found.end
            if found.count >= _FEWEST:
                yield found


def _extended(kinds: Sequence[int], start: int, period: int) -> _Stretch:
    end = start + period + _ROW
    while end < len(kinds) and kinds[end] == kinds[end - period]:
        end += 1
    while start > 0 and kinds[start - 1] == kinds[start - 1 + period]:
        start -= 1
    return _Stretch(start, period, end)
