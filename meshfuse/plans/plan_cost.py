"""What a plan takes, by its moves and its computation."""

from __future__ import annotations

from typing import NamedTuple

from ..placement.roofline import computing_seconds, stored_by, stored_tensors
from ..propagation import ShardedDefinition
from ..resharding import Reshard, insert_resharding


class PlanCost(NamedTuple):
    """What a plan takes on one rank: modelled seconds of its moves and of its computation, and bytes on the wire."""

    moving: float
    computing: float
    wire: float

    @property
    def seconds(self) -> float:
        return self.moving + self.computing


def plan_cost(sharded: ShardedDefinition) -> PlanCost:
    """What a plan takes, with the moves that it needs."""
    resharded = insert_resharding(sharded)
    prices = [resharded.price(statement) for statement in resharded.statements if isinstance(statement, Reshard)]
    placed = zip(sharded.graph.nodes, (choice.placement for choice in sharded.choices), strict=True)
    stored = stored_tensors(sharded.graph)
    work = [computing_seconds(node.call, p, stored_by(node, stored)) for node, p in placed if not p.step]
    return PlanCost(sum([p.seconds for p in prices]), sum(work), sum([p.wire for p in prices]))
