"""What ranks remember of the calls that they make together, against a plain list of them for each pair of ranks."""

from __future__ import annotations

import itertools
import random

import pytest

from meshfuse.runtime.call_order import Calls, first_difference

SIZE = 5
Call = tuple[tuple[int, ...], str]
GROUPS = [ranks for count in (2, 3, 5) for ranks in itertools.combinations(range(SIZE), count)]


def schedule(draw: random.Random, count: int) -> list[Call]:
    groups = draw.sample(GROUPS, draw.randint(1, 4))
    return [(draw.choice(groups), draw.choice("abc")) for _ in range(count)]


def remembered(rank: int, calls: list[Call]) -> Calls:
    found = Calls(rank, SIZE)
    for ranks, name in calls:
        if rank in ranks:
            found.add(ranks, name)
    return found


def differ(one: int, other: int, summaries: dict[int, list[Call]]) -> bool:
    """Whether two ranks made other calls together, by plain lists."""
    common = [[name for ranks, name in summaries[rank] if one in ranks and other in ranks] for rank in (one, other)]
    return common[0] != common[1]


def changed(draw: random.Random, calls: list[Call]) -> list[Call]:
    """The calls in another order, with one left out or under another name, or as they are."""
    place, how = draw.randrange(len(calls) - 1), draw.randrange(4)
    before, (ranks, name), after = calls[:place], calls[place], calls[place + 1 :]
    if how == 0:
        return [*before, after[0], (ranks, name), *after[1:]]
    return {1: [*before, *after], 2: [*before, (ranks, f"{name}!"), *after]}.get(how, calls)


@pytest.mark.parametrize("seed", range(150))
def test_ranks_differ_where_two_of_them_made_other_calls_together(seed: int) -> None:
    draw = random.Random(seed)
    calls = schedule(draw, 40)
    odd = draw.randrange(SIZE)
    made = {rank: changed(draw, calls) if rank == odd else calls for rank in range(SIZE)}
    known = {rank: remembered(rank, made[rank]) for rank in made}
    for ranks in GROUPS:
        wrong = [pair for pair in itertools.combinations(ranks, 2) if differ(*pair, made)]
        found = first_difference(ranks, [known[rank].summary(ranks) for rank in ranks])
        assert bool(found) == bool(wrong), (ranks, wrong, found)
        if found:
            assert tuple(sorted(found[:2])) in wrong or any(odd in pair for pair in wrong)
            assert set(found) <= {*ranks} and len(set(found)) == len(found) > 1
            texts = [known[rank].text(found[1] if rank == found[0] else found[0]) for rank in found]
            assert len(set(texts)) > 1


def test_calls_of_some_ranks_are_compared_by_their_own_number() -> None:
    """Whatever they do with others in between."""
    calls, both, every = Calls(0, 4), (0, 1), (0, 1, 2, 3)
    summaries = [(calls.add(both, "a"), *(calls.add(every, "b") for _ in range(3))) for _ in range(8)]
    assert [number for number, (own, *_) in enumerate(summaries, 1) if own] == [4, 8]
    together = [due for _, *others in summaries for due in others]
    assert [number for number, due in enumerate(together, 1) if due] == [4, 8, 16]


def test_a_call_costs_one_line_where_all_programs_are_on_all_ranks() -> None:
    calls = Calls(3, 1000)
    for _ in range(10):
        calls.add(tuple(range(1000)), "a")
    assert len(calls._common) == 1 and calls.text(7).count("\n") == 9
    assert calls.summary(range(1000)) == Calls.summary(remembered_by(7, calls), range(1000))


def remembered_by(rank: int, other: Calls) -> Calls:
    made = Calls(rank, 1000)
    for _ in range(10):
        made.add(tuple(range(1000)), "a")
    assert made.text(other.rank) == other.text(rank)
    return made
