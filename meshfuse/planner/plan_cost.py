"""What a plan takes, and which of two plans is better."""

from __future__ import annotations

from typing import NamedTuple

from ..costs import computation
from ..placement.growth import EPSILON
from ..propagation import ShardedDefinition
from ..resharding import Reshard, insert_resharding

# A plan that moves more must take less than this part of the time: rates of computation are the rougher estimate.
WORTH = 0.75
# One that moves as much must take less than this part: an all-reduce in two halves saves next to no computation.
NOTABLE = 0.98


class PlanCost(NamedTuple):
    """What a plan takes on one rank: modelled seconds of its moves and of its computation, and bytes on the wire."""

    moving: float
    computing: float
    wire: float

    @property
    def seconds(self) -> float:
        return self.moving + self.computing

    def beats(self, other: PlanCost) -> bool:
        """Whether this plan is better: it takes less time, where time for moves counts for more than computation.

        A plan that spends more on moves must take much less time (`WORTH`), one that spends as much notably less. One
        that spends less on moves may spend the time that it saves on computation, and a part of that again.
        """
        saved = other.moving - self.moving
        if saved > EPSILON:
            limit = other.seconds + saved * (1 / WORTH - 1)
        else:
            limit = other.seconds * (NOTABLE if saved > -EPSILON else WORTH)
        return self.seconds < limit - EPSILON

    def sends_less_than(self, other: PlanCost) -> bool:
        """Whether this plan sends fewer bytes, or as many and computes less.

        How many collectives there are does not count: where small ones become one call, fewer save less than modelled.
        """
        return (round(self.wire), self.computing) < (round(other.wire), other.computing)


def plan_cost(sharded: ShardedDefinition) -> PlanCost:
    """What a plan takes, with the moves that it needs."""
    resharded = insert_resharding(sharded)
    prices = [resharded.price(statement) for statement in resharded.statements if isinstance(statement, Reshard)]
    placed = zip(sharded.graph.nodes, (choice.placement for choice in sharded.choices), strict=True)
    work = [computation(n.call.op.flops(n.call) / p.ways, p.results[0].mesh.flops) for n, p in placed if not p.step]
    return PlanCost(sum([p.seconds for p in prices]), sum(work), sum([p.wire for p in prices]))


def better(found: ShardedDefinition, other: ShardedDefinition) -> ShardedDefinition:
    """The better of two plans; the first one where neither beats the other."""
    return other if plan_cost(other).beats(plan_cost(found)) else found
