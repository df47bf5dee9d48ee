"""Every kind of fault of faults.py once, on real jobs; `make faults` has each of them in all jobs, many times. All end,
say why, and leave nothing.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
from fault_kinds import FAULTS, RANKS, RUN, Fault
from faults import once

pytestmark = pytest.mark.ranks
REPEAT = int(os.environ.get("REPEAT", "1"))


def _in_turn() -> Iterator[Fault]:
    """Each kind in a job that was started in one of the ways that it has, in turn, so that every way meets deaths,
    stops, errors, exits and disagreements; what is done to the launcher, in one of our own.
    """
    kinds: dict[str, list[Fault]] = {}
    for fault in FAULTS:
        kinds.setdefault(fault.name, []).append(fault)
    for number, ways in enumerate(kinds.values()):
        ours = [fault for fault in ways if fault.outside and fault.mode == RUN]
        yield ours[0] if ours else ways[number % len(ways)]


@pytest.mark.parametrize("fault", [*_in_turn()], ids=str)
def test_a_fault_ends_the_job(fault: Fault) -> None:
    """The victim is another rank in each repeat, and in each fault."""
    first = FAULTS.index(fault)
    for repeat in range(REPEAT):
        outcome = once(fault, (first + repeat) % RANKS)
        assert not outcome.problems, outcome.log
