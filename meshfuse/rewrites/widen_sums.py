"""Terms of sums over ranks in a type with the range of float32, until they are reduced.

A sum of Half numbers is accumulated in float32 on one rank. Rounded to Half, a rank's term of it may overflow where the
whole sum does not, so ops that leave such terms compute on operands cast to Float, and the reduced sum is cast back.
BFloat16 has the range of float32: its terms are left as they are.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ..dtypes import DataType
from ..graph import Graph, Node, users
from ..ops.values import TensorRef
from ..placement.factors import Placement
from ..placement.options import Choice, Source
from ..propagation import ShardedDefinition, ends
from ..sharding.value import Sharding
from .graph_writer import GraphWriter, with_tensors, without_unread


def widen_sums(sharded: ShardedDefinition) -> ShardedDefinition:
    """The plan with such sums made in Float; itself if it has none."""
    chosen = {node.id for node, choice in _pairs(sharded) if _is_narrow(node, choice.placement)}
    return _Widener(sharded, chosen).widened() if chosen else sharded


def _pairs(sharded: ShardedDefinition) -> Iterator[tuple[Node, Choice]]:
    return zip(sharded.graph.nodes, sharded.choices, strict=True)


def _is_narrow(node: Node, placement: Placement) -> bool:
    """Whether the op reads or makes terms of a sum in a type in which one may overflow."""
    if placement.step is not None:
        return False
    sides = zip((*placement.operands, *placement.results), (*node.call.types, *node.call.results), strict=True)
    return any(sharding.partial and sharding.reduce == "sum" and ttype.dtype.term_type is not ttype.dtype
               for sharding, ttype in sides)  # fmt: skip


class _Widener(GraphWriter):
    """Writes the chosen ops on operands in Float; `wide` has the terms of a tensor in that type."""

    def __init__(self, sharded: ShardedDefinition, chosen: set[int]):
        super().__init__(sharded.graph)
        self.sharded, self.chosen = sharded, chosen
        self.wide: dict[int, TensorRef] = {}
        self.choices: list[Choice] = []
        self._reduced = _reduced_places(sharded)

    def widened(self) -> ShardedDefinition:
        """The plan of the ops so written."""
        graph = self.run(self.chosen)
        kept = {node.outputs: choice for node, choice in _pairs(self.sharded) if node.id not in self.chosen}
        made = iter(self.choices)
        choices = {node.outputs: kept.get(node.outputs) or next(made) for node in graph.nodes}
        graph = without_unread(self._streamed(graph))  # Casts of sums that are read unreduced only go.
        ordered = tuple([choices[node.outputs] for node in graph.nodes])
        done = ShardedDefinition(graph, ordered, self._shardings(graph, ordered))
        done.verify()
        return done

    def _streamed(self, graph: Graph) -> Graph:
        """The graph with the terms worked on in chunks where their sum was to be."""
        terms = {i: node.inputs[0] for node in graph.nodes for i in node.outputs if i in self.wide}
        return dataclasses.replace(graph, streams={terms.get(i, i): stream for i, stream in graph.streams.items()})

    def _shardings(self, graph: Graph, choices: Sequence[Choice]) -> dict[int, Sharding]:
        """Where each tensor is after its op: its annotation, if it has one."""
        known = {i: self.sharded.shardings[i] for i in graph.input_tensors}
        for node, choice in zip(graph.nodes, choices, strict=True):
            known.update(zip(node.outputs, choice.placement.results, strict=True))
        return {i: graph.annotations.get(i, place) for i, place in known.items()}

    def form(self, node: Node) -> Sequence[TensorRef]:
        choice = self.sharded.choices[node.id]
        operands = [self._operand(i, s) for i, s in zip(node.inputs, choice.placement.operands, strict=True)]
        given = iter(operands)
        args = [_widened(with_tensors(arg, given)) for arg in node.call.args]
        made = self.call(node.call.op, *args)
        self.choices.append(choice)
        results = (made,) if isinstance(made, TensorRef) else made
        return [self._result(i, wide, place)
                for i, wide, place in zip(node.outputs, results, choice.placement.results, strict=True)]  # fmt: skip

    def _operand(self, tensor: int, place: Sharding) -> TensorRef:
        """The tensor in its terms' type: the terms themselves where they are read unreduced."""
        if place.partial and tensor in self.wide:
            return self.wide[tensor]
        ref = TensorRef(tensor)
        return self._cast(ref, self.type(ref).dtype.term_type, place)

    def _result(self, tensor: int, wide: TensorRef, place: Sharding) -> TensorRef:
        """The op's own result: the sum cast back where it is reduced."""
        dtype = self.graph.tensors[tensor].type.dtype
        if self.type(wide).dtype is dtype:
            return wide
        self.wide[tensor] = wide
        return self._cast(wide, dtype, self._reduced.get(tensor, place.reduced()))

    def _cast(self, ref: TensorRef, dtype: DataType, place: Sharding) -> TensorRef:
        if self.type(ref).dtype is dtype:
            return ref
        made = self.call("cast", ref, dtype)
        self.choices.append(Choice(_elementwise(self.nodes[-1], place), Source("operand"), 0.0))
        return made


def _widened(arg: Any) -> Any:
    """An argument of an op that computes in the terms' type: a result type that was asked for follows."""
    return arg.term_type if isinstance(arg, DataType) else arg


def _elementwise(node: Node, place: Sharding) -> Placement:
    """The placement of a cast where its operand lies."""
    layouts = tuple([place.dims[d] for d, factors in enumerate(node.rule.operands[0]) if factors])
    return Placement(layouts, (place,), (place,))


def _reduced_places(sharded: ShardedDefinition) -> Mapping[int, Sharding]:
    """Where each tensor is first read reduced, its annotation before all others."""
    graph, found = sharded.graph, dict(sharded.graph.annotations)
    readers = users(graph.nodes)
    for tensor, nodes in readers.items():
        asked = [place for n in nodes for i, place in zip(graph.nodes[n].inputs, sharded.choices[n].placement.operands,
                 strict=True) if i == tensor and not place.partial]  # fmt: skip
        if asked:
            found.setdefault(tensor, asked[0])
    return {**ends(sharded), **found}
