"""Where a split of a tensor comes from: the tensors that it follows, back to an annotation."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from ..graph import Node, users
from ..ops.rules import DimFactors
from ..placement.options import Choice
from ..propagation import ShardedDefinition
from ..sharding import layout as lay
from ..sharding.layout import Layout, Split
from ..sharding.value import Sharding, conflicting
from .nearest import Place, Way, Ways


@dataclass(frozen=True, slots=True)
class Origin:
    """One split of a tensor, and the tensors that it was taken over from.

    dim: the dim that is split; None for an unreduced sum, which comes from the split of a reduced dim.
    way: the tensors on the way to its origin; None where the split begins here.
    backward: whether the way leads to a later tensor, whose annotation asks for the split.
    """

    split: Split
    dim: int | None
    way: Way | None
    backward: bool

    @property
    def annotated(self) -> bool:
        """Whether the way leads to an annotation; if not, the split was the cheapest choice where the way ends."""
        return self.way is not None and self.way.annotated

    @property
    def chain(self) -> tuple[int, ...]:
        """The tensors on the way, nearest first."""
        return tuple(self.way.tensors()) if self.way is not None else ()


class Provenance:
    """Traces splits through a sharded definition."""

    def __init__(self, sharded: ShardedDefinition):
        self.sharded, self.graph = sharded, sharded.graph
        self._producers = {i: node for node in self.graph.nodes for i in node.outputs}
        self._readers = users(self.graph.nodes)
        self._back: dict[Split, Ways] = {}
        self._ahead: dict[Split, Ways] = {}
        self._origins: dict[int, list[Origin]] = {}

    def producer(self, tensor: int) -> Node | None:
        return self._producers.get(tensor)

    def origins(self, tensor: int) -> list[Origin]:
        """The origins of every split of the tensor, and of every axis over which it is unreduced."""
        if tensor not in self._origins:
            self._origins[tensor] = self._traced(tensor)
        return self._origins[tensor]

    def _traced(self, tensor: int) -> list[Origin]:
        sharding = self.made_as(tensor)
        splits: list[tuple[Split, int | None]] = [
            (s, d) for d, layout in enumerate(sharding.dims) for s in lay.axes(layout)
        ]
        return [self._origin((tensor, d), s) for s, d in [*splits, *((s, None) for s in sharding.partial)]]

    def made_as(self, tensor: int) -> Sharding:
        """The sharding in which the tensor's op makes it; for an input, its own."""
        node = self.producer(tensor)
        if node is None:
            return self.sharded.shardings[tensor]
        return self._choice(node).placement.results[node.outputs.index(tensor)]

    def _choice(self, node: Node) -> Choice:
        return self.sharded.choices[node.id]

    def _origin(self, place: Place, split: Split) -> Origin:
        back = self._ways(self._back, split, self._from_operands).after(place)
        if back is None or not back.annotated:
            ahead = self._wanted_by(place, split)
            if ahead is not None:
                return Origin(split, place[1], ahead, True)
        return Origin(split, place[1], back, False)

    def _wanted_by(self, place: Place, split: Split) -> Way | None:
        """The way to the nearest later tensor whose annotation asks for the split; to itself where its own does."""
        if place[1] is None:
            return None
        way = self._ways(self._ahead, split, self._results).of(place)
        return (way.next or way) if way.annotated else None

    def _ways(self, known: dict[Split, Ways], split: Split, steps: Callable[[Place, Split], Iterable[Place]]) -> Ways:
        if split not in known:
            known[split] = Ways(lambda place: steps(place, split), lambda tensor: self._is_annotated(tensor, split))
        return known[split]

    def _is_annotated(self, tensor: int, split: Split) -> bool:
        sharding = self.graph.annotations.get(tensor)
        return sharding is not None and any(conflicting(split, s) for s in sharding.splits)

    # towards the inputs

    def _from_operands(self, place: Place, split: Split) -> list[Place]:
        """(operand, dim) from which a split of a tensor was taken over."""
        tensor, dim = place
        node = self.producer(tensor)
        if node is None:
            return []
        placement = self._choice(node).placement
        if placement.step is not None:
            return [(node.inputs[0], d) for d in _dims_split(placement.step.src, split)]
        carry = placement.carry
        if dim is None and any(conflicting(split, s) for s in carry.axes):
            return [(node.inputs[carry.operands[0]], None)]
        factors = self._factors(node, tensor, dim, split)
        return [place for factor in factors for place in self._operands(node, factor, split)]

    def _factors(self, node: Node, tensor: int, dim: int | None, split: Split) -> list[int]:
        """The factors that the op splits over the axis, in this dim of its result (None: anywhere)."""
        layouts = self._choice(node).placement.layouts
        dims = node.rule.results[node.outputs.index(tensor)]
        candidates = range(len(layouts)) if dim is None else dims[dim]
        return [f for f in candidates if _has(layouts[f], split)]

    def _operands(self, node: Node, factor: int, split: Split) -> Iterator[tuple[int, int]]:
        """(operand, dim) of those that were split over the axis in this factor before the op."""
        for i, dims in zip(node.inputs, node.rule.operands, strict=True):
            sharding = self.made_as(i) if i not in self.graph.annotations else self.sharded.shardings[i]
            for dim in _dims_with(dims, factor):
                if _has(sharding.dims[dim], split):
                    yield i, dim

    # towards the outputs

    def _results(self, place: Place, split: Split) -> Iterator[Place]:
        """(result, dim) of the ops that take over a split of a tensor."""
        tensor, dim = place
        assert dim is not None  # no result takes over a sum that is unreduced
        for number in self._readers.get(tensor, ()):
            node = self.graph.nodes[number]
            placement = self._choice(node).placement
            if placement.step is not None:
                yield from ((node.outputs[0], d) for d in _dims_split(placement.step.dst, split))
            layouts = placement.layouts
            factors = [f for i, dims in zip(node.inputs, node.rule.operands, strict=True) if i == tensor
                       for f in dims[dim] if _has(layouts[f], split)]  # fmt: skip
            for factor in factors:
                for out, dims in zip(node.outputs, node.rule.results, strict=True):
                    yield from ((out, d) for d in _dims_with(dims, factor))


@functools.lru_cache(maxsize=1 << 14)
def _has(layout: Layout, split: Split) -> bool:
    return any(conflicting(split, s) for s in lay.axes(layout))


def _dims_split(sharding: Sharding, split: Split) -> list[int]:
    return [d for d, layout in enumerate(sharding.dims) if _has(layout, split)]


def _dims_with(dims: DimFactors, factor: int) -> list[int]:
    return [d for d, factors in enumerate(dims) if factor in factors]
