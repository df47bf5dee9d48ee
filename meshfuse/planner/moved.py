"""How much of its moves' time a plan spends on what ops made, beyond what tensor parallelism spends in any plan.

Megatron-LM reduces a sum of all rows for every few weights that are split; with sequence parallelism (Korthikanti et
al. 2022) it scatters the sum and gathers the rows again where they meet such a weight, which takes as long. A plan that
spends its time so is near the best one already, as searches find; one that gathers or moves results otherwise need not
be.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from ..graph import Node
from ..ops.rules import FactorKind
from ..placement.factors import Placement
from ..placement.options import cheapest
from ..propagation import ShardedDefinition
from ..reshard.prices import price
from ..sharding.layout import is_prefix
from ..sharding.value import Sharding


def spent_on_results(plan: ShardedDefinition) -> float:
    """The part of the time of a plan's moves in which it moves results, from 0 to 1.

    Sums that are only reduced do not count, nor what is gathered for an op whose work stays split over the same ranks.
    """
    times = _Times(plan)
    for node, choice in zip(plan.graph.nodes, plan.choices, strict=True):
        times.add(node, choice.placement)
    return times.results / times.all if times.results else 0.0


@dataclass(slots=True)
class _Times:
    """Seconds of a plan's moves, and of those of results. A tensor comes to a sharding once."""

    plan: ShardedDefinition
    all: float = 0.0
    results: float = 0.0
    _made: dict[int, Sharding] = field(default_factory=dict)
    _came: set[tuple[int, Sharding]] = field(default_factory=set)

    def add(self, node: Node, placement: Placement) -> None:
        """Count the moves of an op's operands to it, and of its results to where they are kept."""
        if placement.step is not None:
            self._count(price(placement.step, *self._size(node.inputs[0])).seconds, True)
        for k, (i, need) in enumerate(zip(node.inputs, placement.operands, strict=True)):
            sharding = self.plan.shardings[i]
            have = self._made.get(i, sharding)
            if sharding is not need and have is not need and (i, need) not in self._came:
                self._came.add((i, need))
                stays = i not in self._made or _stays(have, need) or _stays(sharding, need)
                moved = not stays and not _is_for_work(have, need, node, k, placement)
                self._count(cheapest((have, sharding), need, *self._size(i)), moved)
        for i, have in zip(node.outputs, placement.results, strict=True):
            sharding = self.plan.shardings[i]
            self._made[i] = have
            if have is not sharding:
                self._count(cheapest((have,), sharding, *self._size(i)), not _stays(have, sharding))

    def _size(self, tensor: int) -> tuple[tuple[int, ...], int]:
        ttype = self.plan.graph.tensors[tensor].type
        return ttype.shape, ttype.dtype.itemsize

    def _count(self, seconds: float, of_result: bool) -> None:
        self.all += seconds
        if of_result:
            self.results += seconds


def _stays(have: Sharding, need: Sharding) -> bool:
    """Whether every rank that has a tensor in the one sharding has all of it in the other, once it is reduced."""
    return have.mesh == need.mesh and all(map(is_prefix, have.dims, need.dims))


def _is_for_work(have: Sharding, need: Sharding, node: Node, operand: int, placement: Placement) -> bool:
    """Whether an operand is gathered over ranks that share the op's work, as rows are for a weight that is split.

    Or in dims that the op sums over, where the result would have to be reduced instead.
    """
    if not _stays(need, have):
        return False
    lost = have.used() - need.used()
    if any([lost <= other.used() for other in (*placement.operands, *placement.results)]):
        return True
    rows = zip(have.dims, need.dims, node.rule.operands[operand], strict=True)
    read = [node.rule.factors[f].kind for had, left, factors in rows if had != left for f in factors]
    return all([kind is FactorKind.REDUCE for kind in read])
