"""Sums in another order: terms that are unreduced sums over ranks are added first, so that they are reduced together.

In (x + A) + B, where A and B are products whose terms lie on the ranks, A must be reduced before x is added, and then
B: two all-reduces, or a plan that goes out of their way. In x + (A + B) one all-reduce is enough. (The parallel
attention and MLP of a GPT-J or PaLM layer are written so by hand.) Sums of floats in another order round otherwise, so
the plan is taken only where it is better.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar

from ..dtypes import Category
from ..graph import Graph, Node
from ..ops.opdef import Partial
from ..ops.values import TensorRef
from ..placement.factors import reduces
from ..propagation import Propagation, ShardedDefinition
from .graph_writer import GraphWriter, without_unread

# The most ops between a sum over ranks and the sum that it is a term of.
_BETWEEN = 8


@dataclass(frozen=True, slots=True)
class Regrouped:
    """The rewriting of sums: by the number of a sum's last addition, its terms in their new order."""

    sums: tuple[tuple[int, tuple[int, ...]], ...]
    sized: ClassVar[bool] = False

    def __call__(self, graph: Graph) -> Graph:
        found = dict(self.sums)
        written = without_unread(_SumWriter(graph, found).run(found))
        return written.with_rewrite(self)


class _SumWriter(GraphWriter):
    """Writes sums in another order."""

    def __init__(self, graph: Graph, sums: dict[int, tuple[int, ...]]):
        super().__init__(graph)
        self.sums = sums

    def form(self, node: Node) -> Sequence[TensorRef]:
        first, *others = map(TensorRef, self.sums[node.id])
        for term in others:
            first = self.call(node.call.op, first, term)
        return [first]


def reassociate_sums(sharded: ShardedDefinition, plan: Propagation) -> ShardedDefinition:
    """The plan; if that is better, one in which terms that may be sums over ranks are added before others."""
    graph = sharded.graph
    if not graph.annotations:
        return sharded
    found = tuple(_SumFinder(sharded).run())
    if not found:
        return sharded
    return plan.cheaper(sharded, Regrouped(found)(graph))


class _SumFinder:
    """Looks for sums in which only some terms may be unreduced, or only some are so in the plan."""

    def __init__(self, plan: ShardedDefinition):
        self.plan, self.graph = plan, (graph := plan.graph)
        self.reads = Counter(itertools.chain.from_iterable([node.inputs for node in graph.nodes]))
        self.last_reader = {i: node for node in graph.nodes for i in node.inputs}
        self.producers = {i: node for node in graph.nodes for i in node.outputs}
        self.kept = {*graph.outputs, *graph.annotations, *graph.streams}

    def run(self) -> Iterator[tuple[int, tuple[int, ...]]]:
        """(last addition, its terms in the better order) of each such sum."""
        for node in self.graph.nodes:
            if _adds(node) and not self._is_inner(node):
                terms = list(self._terms(node))
                reduced = [i for i in terms if self._may_be_unreduced(i)]
                reduced = reduced if len(reduced) < len(terms) else [i for i in terms if self._is_unreduced(i)]
                if 2 <= len(reduced) < len(terms) and not self._together(node, reduced):
                    yield node.id, (*reduced, *(i for i in terms if i not in reduced))

    def _is_inner(self, node: Node) -> bool:
        """Whether a result is read by one addition alone, and the user has not named it."""
        (made,) = node.outputs
        if made in self.kept or self.reads[made] != 1:
            return False
        reader = self.last_reader[made]
        return _adds(reader) and reader.call == node.call

    def _inner(self, tensor: int) -> Node | None:
        """The addition that makes a term, if that is an inner part of the sum."""
        node = self.producers.get(tensor)
        return node if node is not None and _adds(node) and self._is_inner(node) else None

    def _terms(self, node: Node) -> Iterator[int]:
        """The terms of a sum, from left to right."""
        waiting = list(reversed(node.inputs))
        while waiting:
            term = waiting.pop()
            inner = self._inner(term)
            if inner is None:
                yield term
            else:
                waiting += reversed(inner.inputs)

    def _together(self, node: Node, terms: Sequence[int]) -> bool:
        """Whether one of the sum's additions already adds just these terms."""
        wanted, known = set(terms), dict[int, set[int] | None]()
        for part in reversed(self._parts(node)):
            (made,) = part.outputs
            known[made] = _joined([known.pop(i, {i} if i in wanted else None) for i in part.inputs])
            if known[made] == wanted:
                return True
        return False

    def _parts(self, node: Node) -> list[Node]:
        """The inner additions of a sum, each before those that make its terms."""
        found = [node]
        for part in found:
            found += [inner for i in part.inputs if (inner := self._inner(i)) is not None]
        return found[1:]

    def _is_unreduced(self, tensor: int) -> bool:
        """Whether the plan makes a tensor as terms of a sum over ranks."""
        node = self.producers.get(tensor)
        return node is not None and bool(self.plan.choices[node.id].placement.results[0].partial)

    def _may_be_unreduced(self, tensor: int) -> bool:
        """Whether a tensor is the result of a reduction, perhaps by way of ops that pass on what is unreduced."""
        for _ in range(_BETWEEN):
            node = self.producers.get(tensor)
            if node is None or reduces(node.rule):
                return node is not None
            if len(node.inputs) != 1 or node.call.op.partial is Partial.NONE:
                return False
            (tensor,) = node.inputs
        return False


def _joined(terms: Sequence[set[int] | None]) -> set[int] | None:
    """The union of these sets, in the largest of them; None where one is None."""
    known = [some for some in terms if some is not None]
    if len(known) < len(terms):
        return None
    largest = max(known, key=len)
    largest.update(*known)
    return largest


def _adds(node: Node) -> bool:
    """Whether the node adds two tensors of floats that have its result's type."""
    if node.call.op.name != "add":
        return False
    (made, *_) = node.call.results
    return node.call.types == (made, made) and made.dtype.category >= Category.FLOAT
