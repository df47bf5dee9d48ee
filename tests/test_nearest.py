"""The nearest annotations that splits lead to, as searches from each place find them."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from meshfuse.report.nearest import Ways


@st.composite
def graphs(draw: st.DrawFn) -> tuple[list[list[int]], set[int]]:
    """For every tensor some earlier ones, and those that are annotated."""
    count = draw(st.integers(1, 12))
    steps = [draw(st.lists(st.integers(0, i - 1), max_size=3)) if i else [] for i in range(count)]
    return steps, draw(st.sets(st.integers(0, count - 1)))


def reached(steps: Sequence[Sequence[int]], annotated: set[int], start: int) -> dict[int, int]:
    """The tensors that a search from here comes to, which goes no further where one is annotated: how far each is."""
    found, front = {start: 0}, [start]
    while front:
        front = [n for here in front if here not in annotated for n in steps[here] if n not in found]
        found |= {n: max(found.values()) + 1 for n in front}
    return found


@given(graphs())
def test_ways_are_the_shortest_that_a_search_finds(graph: tuple[list[list[int]], set[int]]) -> None:
    steps, annotated = graph
    ways = Ways(lambda place: [(i, 0) for i in steps[place[0]]], annotated.__contains__)
    for start in reversed(range(len(steps))):
        way, far = ways.of((start, 0)), reached(steps, annotated, start)
        goals = annotated & far.keys() or {i for i in far if not steps[i]}
        assert way.annotated == bool(annotated & far.keys())
        assert way.end in goals
        assert far[way.end] == min(far[goal] for goal in goals) == way.length
        path = list(way.tensors())
        assert path[0] == start and path[-1] == way.end
        assert all(later in steps[here] for here, later in itertools.pairwise(path))


def test_places_are_looked_at_once_however_deep() -> None:
    visited: list[int] = []

    def steps(place: tuple[int, int | None]) -> list[tuple[int, int | None]]:
        visited.append(place[0])
        return [(place[0] - 1, 0)] * (place[0] > 0)

    ways = Ways(steps, lambda tensor: tensor == 0)
    assert [ways.of((i, 0)).length for i in (50_000, 49_999, 50_000, 7)] == [50_000, 49_999, 50_000, 7]
    assert len(visited) <= 3 * 50_000  # going in, coming back, and to see which is nearest
