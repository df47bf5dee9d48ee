"""How much of its reduction an unreduced tensor will need in the end, as far as the graph alone tells.

A plan is charged for the sums that it leaves unreduced, as if each were reduced where it is. But readers that are
linear in a sum may make so much less of it that only their results are reduced, never the tensor itself. So of the
products y of experts: what is read of it is the sum of y * gates over experts and, for the gates' gradient, that of y *
grad over the width.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable

from ..graph import Graph, Node
from ..ops.opdef import Call
from ..ops.rules import Rule
from .factors import passes

# Readers that make less of a tensor than one part in so many count: where it is about as much, the sizes of shards, and
# sums that meet in one, decide what is reduced, and the graph tells nothing of these.
LESS = 4


class Owing:
    """For each tensor how many elements must be reduced in the end; nodes are met last ones first."""

    def __init__(self, graph: Graph):
        made = {i for node in graph.nodes for i in (*node.inputs, *node.outputs)}
        self._numels = {i: graph.tensors[i].type.numel for i in made.union(graph.outputs)}
        self._left = {i: self._numels[i] for i in graph.outputs}
        self._shares: dict[int, float] = {}

    def shares(self, tensors: Iterable[int]) -> tuple[float, ...]:
        """For each tensor the part of its own reduction that its readers, met so far, need."""
        return tuple([self._shares.get(i, 1.0) for i in tensors])

    def meet(self, node: Node) -> None:
        """Count a node among the readers of its operands."""
        numels, left = self._numels, self._left
        made = sum([min(numels[i], left.get(i, 0)) for i in node.outputs])
        for i in dict.fromkeys(node.inputs):
            before, numel = left.get(i, 0), numels[i]
            if before < numel:
                less = made < numel and _passes_alone(node.call, node.rule, _places(node, i))
                left[i] = before + made if less else numel
                self._note(i)

    def _note(self, tensor: int) -> None:
        """Shares are powers of two, so that equal layers have equal ones, though elements add up over layers."""
        left, numel = self._left[tensor], self._numels[tensor]
        if 0 < left * LESS <= numel:
            self._shares[tensor] = 2.0 ** math.ceil(math.log2(left / numel))
        else:
            self._shares.pop(tensor, None)


def _places(node: Node, tensor: int) -> tuple[int, ...]:
    return tuple([place for place, i in enumerate(node.inputs) if i == tensor])


@functools.lru_cache(maxsize=1 << 13)
def _passes_alone(call: Call, rule: Rule, places: tuple[int, ...]) -> bool:
    """Whether the op carries a sum that stands at these places, its other operands being reduced."""
    return passes(call, rule, places, "sum")
