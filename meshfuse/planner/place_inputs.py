"""Where open inputs lie best at a price of memory."""

from __future__ import annotations

from typing import NamedTuple

from ..graph import Graph
from ..mesh import DeviceMesh
from ..sharding.value import Sharding
from .answer import Answer, Optimum
from .op_labels import KnownLabels
from .open_inputs import OpenInputs
from .optimum import solved
from .prices import Prices


class Placed(NamedTuple):
    """By open input where it lies, and by output that follows one; and the plan of all ops with it."""

    inputs: dict[int, Sharding]
    followers: dict[int, Sharding]
    plan: Optimum


def place_inputs(graph: Graph, mesh: DeviceMesh, opened: OpenInputs, prices: Prices, labels: KnownLabels) -> Placed:
    """Where the open inputs of a graph lie in its best plan on a mesh, at the price of memory that they have.

    Equal layers are all alike, and axes whole.

    labels: those of the graph's ops that were made at other prices, to which are added those that are made.
    """
    found = solved(graph, mesh, prices, opened=opened, labels=labels)
    answer = Answer(found.program, found.found.assignment)
    inputs = {i: answer.there(i)[0] for i in opened.places}
    return Placed(inputs, {i: inputs[of] for i, of in opened.follow.items()}, found.plan())
