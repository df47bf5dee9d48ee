"""Where a split of a tensor comes from: the tensors that it follows, back to an annotation."""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

from ..graph import Node, users
from ..ops.base import DimFactors
from ..propagation.sharded import Choice, ShardedDefinition
from ..sharding import layout as lay
from ..sharding.layout import Layout, Split
from ..sharding.value import Sharding, conflicting


@dataclass(frozen=True, slots=True)
class Origin:
    """One split of a tensor and the tensors that it was taken over from, nearest first.

    `dim` is None for an unreduced sum, which comes from the split of a reduced dim. `backward`: the chain
    leads to a later tensor, whose annotation asks for the split. `annotated`: the chain ends in an
    annotation; else the split was the cheapest choice at its end.
    """

    split: Split
    dim: int | None
    chain: tuple[int, ...]
    backward: bool
    annotated: bool


class Provenance:
    """Traces splits through a sharded definition."""

    def __init__(self, sharded: ShardedDefinition):
        self.sharded, self.graph = sharded, sharded.graph
        self._producers = {i: node for node in self.graph.nodes for i in node.outputs}
        self._readers = users(self.graph.nodes)
        self._steps_back: dict[tuple[int, int | None, Split], list[tuple[int, int | None]]] = {}
        self._origins: dict[int, list[Origin]] = {}

    def producer(self, tensor: int) -> Node | None:
        return self._producers.get(tensor)

    def origins(self, tensor: int) -> list[Origin]:
        """One for every split of the tensor and for every axis it is unreduced over."""
        if tensor not in self._origins:
            self._origins[tensor] = self._traced(tensor)
        return self._origins[tensor]

    def _traced(self, tensor: int) -> list[Origin]:
        home = self.made_as(tensor)
        splits: list[tuple[Split, int | None]] = [
            (s, d) for d, layout in enumerate(home.dims) for s in lay.axes(layout)
        ]
        return [self._origin(tensor, s, d) for s, d in [*splits, *((s, None) for s in home.partial)]]

    def made_as(self, tensor: int) -> Sharding:
        """The sharding in which the tensor's op makes it; an input's own."""
        node = self.producer(tensor)
        if node is None:
            return self.sharded.homes[tensor]
        return self._choice(node).placement.results[node.outputs.index(tensor)]

    def _choice(self, node: Node) -> Choice:
        return self.sharded.choices[node.id]

    def _origin(self, tensor: int, split: Split, dim: int | None) -> Origin:
        back = self._backward(tensor, split, dim)
        if back and self._is_annotated(back[-1], split):
            return Origin(split, dim, tuple(back), False, True)
        ahead = self._forward(tensor, split, dim) if dim is not None else []
        if ahead:
            return Origin(split, dim, tuple(ahead), True, True)
        return Origin(split, dim, tuple(back), False, False)

    def _is_annotated(self, tensor: int, split: Split) -> bool:
        sharding = self.graph.annotations.get(tensor)
        return sharding is not None and any(conflicting(split, s) for s in sharding.splits)

    # towards the inputs

    def _backward(self, tensor: int, split: Split, dim: int | None) -> list[int]:
        """The operands that the split came from: to the nearest annotated one, else to an end."""
        queue: deque[tuple[int, int | None]] = deque([(tensor, dim)])
        before: dict[int, int] = {tensor: tensor}
        first: int | None = None
        while queue:
            here, place = queue.popleft()
            if here != tensor and self._is_annotated(here, split):
                return _path(before, here)
            found = [f for f in self._from_operands(here, place, split) if f[0] not in before]
            if not found and first is None:
                first = here
            for operand, operand_dim in found:
                before.setdefault(operand, here)
                queue.append((operand, operand_dim))
        return _path(before, tensor if first is None else first)

    def _from_operands(self, tensor: int, dim: int | None, split: Split) -> list[tuple[int, int | None]]:
        """The operands, and the dim of each, that a split of a tensor was taken over from."""
        key = (tensor, dim, split)
        if key not in self._steps_back:
            self._steps_back[key] = self._step_back(tensor, dim, split)
        return self._steps_back[key]

    def _step_back(self, tensor: int, dim: int | None, split: Split) -> list[tuple[int, int | None]]:
        node = self.producer(tensor)
        if node is None:
            return []
        placement = self._choice(node).placement
        if placement.move is not None:
            return [(node.inputs[0], d) for d in _dims_split(placement.move.src, split)]
        carry = placement.carry
        if dim is None and any(conflicting(split, s) for s in carry.axes):
            return [(node.inputs[carry.operands[0]], None)]
        factors = self._factors(node, tensor, dim, split)
        return [place for factor in factors for place in self._operands(node, factor, split)]

    def _factors(self, node: Node, tensor: int, dim: int | None, split: Split) -> list[int]:
        """The op's factors in a dim of its result (all, for an unreduced sum) split over the axis."""
        layouts = self._choice(node).placement.layouts
        dims = node.rule.results[node.outputs.index(tensor)]
        candidates = range(len(layouts)) if dim is None else dims[dim]
        return [f for f in candidates if _has(layouts[f], split)]

    def _operands(self, node: Node, factor: int, split: Split) -> Iterator[tuple[int, int]]:
        """Operands, and the dim of each, that were split over the axis in this factor before the op."""
        for i, dims in zip(node.inputs, node.rule.operands, strict=True):
            home = self.made_as(i) if i not in self.graph.annotations else self.sharded.homes[i]
            for dim in _dims_with(dims, factor):
                if _has(home.dims[dim], split):
                    yield i, dim

    # towards the outputs

    def _forward(self, tensor: int, split: Split, dim: int) -> list[int]:
        """Later tensors that have the split, up to one whose annotation asks for it; [] for none."""
        queue, before = deque([(tensor, dim)]), {tensor: tensor}
        while queue:
            here, place = queue.popleft()
            if self._is_annotated(here, split):
                return _path(before, here) or [tensor]
            for later, later_dim in self._results(here, place, split):
                if later not in before:
                    before[later] = here
                    queue.append((later, later_dim))
        return []

    def _results(self, tensor: int, dim: int, split: Split) -> Iterator[tuple[int, int]]:
        for number in self._readers.get(tensor, ()):
            node = self.graph.nodes[number]
            placement = self._choice(node).placement
            if placement.move is not None:
                yield from ((node.outputs[0], d) for d in _dims_split(placement.move.dst, split))
            layouts = placement.layouts
            factors = [f for i, dims in zip(node.inputs, node.rule.operands, strict=True) if i == tensor
                       for f in dims[dim] if _has(layouts[f], split)]  # fmt: skip
            for factor in factors:
                for out, dims in zip(node.outputs, node.rule.results, strict=True):
                    yield from ((out, d) for d in _dims_with(dims, factor))


def _path(before: dict[int, int], end: int) -> list[int]:
    """The tensors from the start of a search, which is left out, to this one."""
    found: list[int] = []
    while before[end] != end:
        found.append(end)
        end = before[end]
    return found[::-1]


@functools.lru_cache(maxsize=1 << 14)
def _has(layout: Layout, split: Split) -> bool:
    return any(conflicting(split, s) for s in lay.axes(layout))


def _dims_split(sharding: Sharding, split: Split) -> list[int]:
    return [d for d, layout in enumerate(sharding.dims) if _has(layout, split)]


def _dims_with(dims: DimFactors, factor: int) -> list[int]:
    return [d for d, factors in enumerate(dims) if factor in factors]
