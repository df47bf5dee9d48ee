"""Where open inputs lie best at a price of memory."""

from __future__ import annotations

from ..graph import Graph
from ..mesh import DeviceMesh
from ..sharding.value import Sharding
from .answer import Answer
from .open_inputs import OpenInputs
from .optimum import solved
from .prices import Prices


def place_inputs(graph: Graph, mesh: DeviceMesh, opened: OpenInputs, prices: Prices) -> dict[int, Sharding]:
    """By open input where it lies in the best plan of a graph on a mesh, at the price of memory that it has."""
    found = solved(graph, mesh, prices, opened=opened)
    answer = Answer(found.program, found.found.assignment)
    return {i: answer.there(i)[0] for i in opened.places}
