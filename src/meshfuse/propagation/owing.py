"""How much of its reduction a tensor that stays unreduced will need, as far as the graph alone tells.

A plan is charged for the sums that it leaves unreduced, as if each were reduced where it is. But readers that are
linear in one may make so much less of it that their results are reduced at last, never the tensor itself: of the
products y of experts the sum of y * gates over experts, and for the gates' gradient that of y * grad over the width.
"""

from __future__ import annotations

import functools
import math

from ..graph import Graph, Node
from ..ops.base import Call, Rule
from .factors import passes

# Readers that make less of a tensor than one part in so many count: where it is about as much, the sizes of shards, and
# sums that meet in one, decide what is reduced, and the graph tells nothing of these.
LESS = 4


class Owing:
    """What is left to reduce of each tensor at last, in elements, for the nodes met so far, the last ones first."""

    def __init__(self, graph: Graph):
        self._numels = [tensor.type.numel for tensor in graph.tensors]
        self._left = {i: self._numels[i] for i in graph.outputs}

    def share(self, tensor: int) -> float:
        """The part of its reduction that those who read a tensor need. A power of two, so that equal layers have equal
        ones though what they make adds up from layer to layer.
        """
        left, numel = self._left.get(tensor, 0), self._numels[tensor]
        return 2.0 ** math.ceil(math.log2(left / numel)) if 0 < left * LESS <= numel else 1.0

    def meet(self, node: Node) -> None:
        """Count a node among the readers."""
        made = sum([min(self._numels[i], self._left.get(i, 0)) for i in node.outputs])
        for i in dict.fromkeys(node.inputs):
            numel = self._numels[i]
            if made < numel and _passes_alone(node.call, node.rule, _places(node, i)):
                numel = made
            self._left[i] = self._left.get(i, 0) + numel


def _places(node: Node, tensor: int) -> tuple[int, ...]:
    return tuple([place for place, i in enumerate(node.inputs) if i == tensor])


@functools.lru_cache(maxsize=1 << 13)
def _passes_alone(call: Call, rule: Rule, places: tuple[int, ...]) -> bool:
    """Whether a sum that is these operands, and no other is, can stay one."""
    return passes(call, rule, places, "sum")
