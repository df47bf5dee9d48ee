"""Schedules as values: what they cost by the closed forms of their papers, and what is wrong with a user's own."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import meshfuse as mf
from meshfuse.errors import SourceLine
from meshfuse.frontends.pipeline.orders import KINDS, named, written
from meshfuse.frontends.pipeline.schedule import Action, Schedule

HERE = SourceLine(__file__, 1)


@given(st.sampled_from(sorted(KINDS)), st.integers(1, 5), st.integers(1, 11), st.integers(1, 3))
def test_every_schedule_can_be_worked_off(name: str, ranks: int, microbatches: int, virtual: int) -> None:
    """Also with fewer micro-batches than ranks, and numbers that nothing divides."""
    found = named(name, ranks, microbatches, virtual)
    found.verify()
    assert (found.ranks, found.microbatches) == (ranks, microbatches)
    assert found.is_split == KINDS[name].is_split
    assert str(found).count("\n") == ranks + 1


def seconds(name: str, ranks: int, microbatches: int, virtual: int = 1) -> float:
    """A step's time where a rank's layers take 1 for a forward and 2 for a backward."""
    found = named(name, ranks, microbatches, virtual)
    chunks = found.stages // ranks
    return found.makespan({"F": 1 / chunks, "B": 2 / chunks, "I": 1 / chunks, "W": 1 / chunks})


@pytest.mark.parametrize(("p", "m"), [(2, 4), (2, 8), (4, 4), (4, 8), (3, 9)])
def test_steps_take_what_the_papers_say(p: int, m: int) -> None:
    assert seconds("gpipe", p, m) == seconds("1f1b", p, m) == (m + p - 1) * 3
    if m % p == 0:
        assert seconds("interleaved", p, m, 2) == pytest.approx(m * 3 + (p - 1) * 3 / 2)
    # Zero bubble at 1F1B's memory: ranks wait for the first forwards, and for input gradients at the end.
    assert seconds("zero-bubble", p, m) <= m * 3 + 2 * (p - 1)
    if m >= 2 * p:  # Nothing but the way of the first forward to the last rank.
        assert seconds("zbv", p, m) <= m * 3 + (p - 1) / 2 + 0.01
        assert seconds("dualpipe-v", p, m) <= m * 3 + (p - 1) / 2 + 0.01


@pytest.mark.parametrize(("p", "m"), [(2, 8), (4, 8), (4, 16)])
def test_what_ranks_hold(p: int, m: int) -> None:
    assert [named("1f1b", p, m).in_flight(r) for r in range(p)] == [p - r for r in range(p)]
    assert [named("zero-bubble", p, m).in_flight(r) for r in range(p)] == [p - r for r in range(p)]
    assert [named("gpipe", p, m).in_flight(r) for r in range(p)] == [m] * p
    # Two chunks of half a rank's layers: hardly more than 1F1B's first rank holds.
    assert max(named("zbv", p, m).in_flight(r) for r in range(p)) <= 2 * p + 3
    for name in set(KINDS) - {"gpipe"}:
        assert named(name, p, 2 * m, 2).in_flight(0) == named(name, p, m, 2).in_flight(0)


def test_a_schedule_is_a_picture() -> None:
    assert str(named("1f1b", 2, 2)) == (
        "1f1b: 2 stages on 2 ranks, 2 micro-batches\n"
        "rank 0 |F0 |F1 |   |   |B0 |== |   |B1 |== |\n"
        "rank 1 |   |F0 |B0 |== |F1 |B1 |== |\n"
        "33% of 9 units idle; forwards held at once, by rank: 2, 1"
    )


ONE = [["F0.0", "B0.0"], ["F1.0", "B1.0"]]


@pytest.mark.parametrize(
    ("orders", "said"),
    [
        ([["B0.0", "F0.0"], ["F1.0", "B1.0"]], "rank 0 waits with B0.0 for F0.0; rank 1 waits with F1.0 for F0.0"),
        ([["F0.0", "B0.0"], ["F1.0"]], "no backward of stage 1, micro-batch 0"),
        ([["F0.0", "B0.0", "F0.0"], ["F1.0", "B1.0"]], "the forward of stage 0, micro-batch 0: found there twice"),
        ([["F0.0", "B0.0"], ["F1.0", "B1.0", "F0.1", "B0.1"]], "stage 0: found on ranks 0 and 1"),
        ([["F0.0", "I0.0", "B0.0"], ["F1.0", "B1.0"]], "a whole backward and its input gradient"),
        ([["X0.0"]], "'X0.0', needed \"F0.3\""),
        (7, "schedule: found 7"),
        ([[]], "no actions"),
    ],
)
def test_what_is_wrong_with_a_schedule(orders: Any, said: str) -> None:
    with pytest.raises(mf.DefinitionError) as found:
        written(orders, HERE)
    assert said in str(found.value)


def test_users_write_schedules() -> None:
    assert written(ONE, HERE).orders == ((Action("F", 0, 0), Action("B", 0, 0)), (Action("F", 1, 0), Action("B", 1, 0)))
    mixed = written([["F0.0", "I0.0", "W0.0"], ["F1.0", "B1.0"]], HERE)  # only stage 0 is split
    assert mixed.is_split and mixed.makespan() == 6


def test_a_rank_that_waits_is_found_over_all_orders_of_its_actions() -> None:
    """Played by hand: an order works exactly if forwards come before backwards, and in the order of stages."""
    actions = [Action("F", 0, 0), Action("F", 1, 0), Action("B", 1, 0), Action("B", 0, 0)]
    for order in itertools.permutations(actions):
        assert Schedule("one rank", (order,)).is_free_of_circles() == (list(order) == actions)
