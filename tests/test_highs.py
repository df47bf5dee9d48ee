"""The planner's minimum beside that of HiGHS, for the same cost graphs: of random programs, over whole axes."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from defining import graph_of
from highs import least
from ledger.known_programs import all_programs
from meshfuse.mesh import DeviceMesh
from meshfuse.planner.optimum import Solved, solved
from meshfuse.planner.prices import Prices
from meshfuse.planner.reshard_costs import whole_axes

# Pairs of labels of one program that HiGHS takes no more than some seconds for.
CELLS = 60_000


def problems() -> Iterator[tuple[str, Solved]]:
    """One of twelve of the ledger's programs, as far as all their axes are placed at once and HiGHS is quick."""
    for name, define in sorted(all_programs().items())[4::12]:
        graph = graph_of(define())
        found = solved(graph, DeviceMesh([0]), Prices(whole_axes))
        sizes = found.program.costs.sizes()
        if not found.axes and sum(sizes[a] * sizes[b] for a, b in found.program.costs.sides()) <= CELLS:
            yield name, found


@pytest.mark.slow
def test_no_assignment_costs_less() -> None:
    compared = 0
    for name, found in problems():
        value = found.found.assignment.value
        best = least(found.program.costs, value)
        assert value * (1 - found.found.gap) <= best * (1 + 1e-6), name
        assert best <= value * (1 + 1e-6), name
        assert found.found.gap or value <= best * (1 + 1e-6), name
        compared += 1
    assert compared > 5
