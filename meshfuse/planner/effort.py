"""How long programs are planned, and which long ones are worth more than one plan."""

from __future__ import annotations

import itertools
import os
from enum import Enum
from typing import Any

from ..errors import SourceLine, shown, user_error
from ..graph import Graph
from ..propagation import ShardedDefinition
from .moved import spent_on_results
from .weights import saved_by_gathering, saved_by_leaving

VARIABLE = "MESHFUSE_SEARCH"
# The most ops of a program that is planned several times as it is, whatever it moves: about a second's work.
MOST = 400
# Few different calls: more than an MLP has, forward and backward, and fewer than attention beside it.
FEW = 32
# A long program is searched where these parts together are more than this: of its moves' time, what goes into results;
# of its reductions, what weights that are gathered would save; of what gathers weights, what leaving them would.
NOTED = 0.1


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
        there is little to find where the plan only reduces sums, and gathers rows and weights for products: unless
        these sums and rows are larger than the weights beside them, or the weights larger than the rows beside them.
        """
        if self is not Effort.AUTO:
            return self is Effort.THOROUGH
        graph = plan.graph
        if most_axes(graph) <= 1 or len({id(node.call) for node in graph.nodes}) <= FEW:
            return True
        parts = itertools.accumulate(part(plan) for part in (saved_by_leaving, saved_by_gathering, spent_on_results))
        return any(part > NOTED for part in parts)


def most_axes(graph: Graph) -> int:
    """How many axes of several ranks a mesh of the graph has at most."""
    return max([sum(n > 1 for n in sharding.mesh.shape) for sharding in graph.annotations.values()], default=0)


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
