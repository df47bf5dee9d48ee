"""Every fault of faults.py once, on real jobs; `make faults` repeats them. All end, say why, and leave nothing."""

from __future__ import annotations

import os

import pytest
from fault_kinds import FAULTS, RANKS, Fault
from faults import once

pytestmark = pytest.mark.ranks
REPEAT = int(os.environ.get("REPEAT", "1"))


@pytest.mark.parametrize("fault", FAULTS, ids=str)
def test_a_fault_ends_the_job(fault: Fault) -> None:
    """The victim is another rank in each repeat, and in each fault."""
    first = FAULTS.index(fault)
    for repeat in range(REPEAT):
        outcome = once(fault, (first + repeat) % RANKS)
        assert not outcome.problems, outcome.log
