"""How long programs are planned, and which long ones are worth more than one plan."""

from __future__ import annotations

import os
from enum import Enum
from typing import Any

from ..errors import SourceLine, shown, user_error
from ..graph import Graph
from ..propagation.sharded import ShardedDefinition
from ..sharding.layout import is_prefix
from ..sharding.value import Sharding
from .weights import saved_by_gathering, saved_by_leaving

VARIABLE = "MESHFUSE_SEARCH"
# The most ops of a program that is planned several times as it is, whatever it moves: about a second's work.
MOST = 400
# Few different calls: more than an MLP has, forward and backward, and fewer than attention beside it.
FEW = 32
# A long program is searched where weights that are gathered would save more than this part of its reductions, or
# weights that are left where they are more than this part of what gathers them.
SAVED = 0.1


class Effort(Enum):
    """How long programs are planned.

    FAST: once.
    AUTO: several times up to `MOST` ops, and longer ones where `searches` says so.
    THOROUGH: several times, however long they are.
    """

    FAST = "fast"
    AUTO = "auto"
    THOROUGH = "thorough"

    @property
    def rewrites(self) -> bool:
        """Whether a program that may be written in other ops is planned in these, too."""
        return self is not Effort.FAST

    def searches(self, plan: ShardedDefinition) -> bool:
        """Whether a long program whose first plan this is is planned several times.

        On one axis it is, and so are layers of few different ops, as there are few ways to place an op. On several axes
        there is little to find where the plan only reduces sums and brings inputs to where they are read; unless the
        sums are larger than the weights behind them, or the weights larger than the rows that they are gathered for.
        """
        if self is not Effort.AUTO:
            return self is Effort.THOROUGH
        graph = plan.graph
        if most_axes(graph) <= 1 or len({id(node.call) for node in graph.nodes}) <= FEW or _moves_results(plan):
            return True
        return saved_by_leaving(plan) > SAVED or saved_by_gathering(plan) > SAVED


def most_axes(graph: Graph) -> int:
    """How many axes of several ranks a mesh of the graph has at most."""
    return max([sum(n > 1 for n in sharding.mesh.shape) for sharding in graph.annotations.values()], default=0)


def _moves_results(plan: ShardedDefinition) -> bool:
    """Whether the plan gathers or moves what an op made, for a reader or for its annotation."""
    made, homes = dict[int, Sharding](), plan.homes
    for node, choice in zip(plan.graph.nodes, plan.choices, strict=True):
        placement = choice.placement
        if placement.move is not None:
            return True
        for i, need in zip(node.inputs, placement.operands, strict=True):
            have = made.get(i, need)
            if have is not need and not (_stays(have, need) or _stays(homes[i], need)):
                return True
        for i, have in zip(node.outputs, placement.results, strict=True):
            if homes[i] is not have and not _stays(have, homes[i]):
                return True
            made[i] = have
    return False


def _stays(have: Sharding, need: Sharding) -> bool:
    """Whether every rank that has a tensor in the one sharding has all of it in the other, once it is reduced."""
    return have.mesh == need.mesh and all(map(is_prefix, have.dims, need.dims))


def effort_of(given: Any, line: SourceLine | None) -> Effort:
    """The effort of the given name, else the one that MESHFUSE_SEARCH names, else AUTO.

    Raises DefinitionError for any other name.
    """
    name = os.environ.get(VARIABLE) or "auto" if given is None else given
    try:
        return Effort(name)
    except ValueError:
        told = VARIABLE if given is None else "search"
        needed = "'fast', 'auto' or 'thorough'"
        raise user_error(told, shown(name), needed, "'thorough' plans long programs longer.", line) from None
