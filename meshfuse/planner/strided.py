"""Layouts that annotations ask for and that no axis on a factor gives: axes inside the blocks of a dim.

The shards of a fused weight are strided: rank r has part r of each of its matrices. Such layouts are followed through
the ops' rules, forward and back; each is then a start for the labels of all the ops that it reaches.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from ..graph import Graph, Node
from ..ops.rules import DimFactors
from ..placement.factors import Layouts, layouts_of, representable, tensor_layouts
from ..sharding.layout import WHOLE, Layout

Dims = tuple[Layout, ...]
# Layouts of one tensor that are followed; programs have one or two.
_MOST = 6


def is_strided(layout: Layout) -> bool:
    """Whether an axis lies inside a dim's blocks."""
    return any(not split.bound for split in layout)


@dataclass(frozen=True, slots=True)
class StridedLayouts:
    """The strided layouts of each tensor's dims, all other dims whole."""

    graph: Graph
    dims: dict[int, dict[Dims, None]] = field(default_factory=dict)

    @classmethod
    def of(cls, graph: Graph) -> StridedLayouts:
        """Those that the annotations of a graph ask for, and what follows from them."""
        found = cls(graph)
        for tensor, sharding in graph.annotations.items():
            found._add(tensor, sharding.dims)
        if any(found.dims.values()):
            for node in (*graph.nodes, *reversed(graph.nodes), *graph.nodes):
                found._follow(node)
        return found

    def of_op(self, node: Node) -> tuple[Layouts, ...]:
        """The layouts of an op's factors that its operands and results ask for."""
        return tuple(dict.fromkeys(found for found in self._asked(node) if any(map(is_strided, found))))

    def of_tensor(self, tensor: int) -> tuple[Dims, ...]:
        """The strided layouts of a tensor's dims."""
        return tuple(self.dims.get(tensor, ()))

    def _asked(self, node: Node) -> Iterator[Layouts]:
        for tensor, factors, shape in _tensors(node):
            for dims in self.of_tensor(tensor):
                yield representable(node.rule, layouts_of(node.rule, factors, shape, dims))

    def _follow(self, node: Node) -> None:
        """Add what the op's tensors are in the layouts that some of them ask for."""
        for layouts in [*self._asked(node)]:
            for tensor, factors, shape in _tensors(node):
                self._add(tensor, tensor_layouts(node.rule, factors, shape, layouts) or ())

    def _add(self, tensor: int, dims: Iterable[Layout]) -> None:
        only = tuple(layout if is_strided(layout) else WHOLE for layout in dims)
        known = self.dims.setdefault(tensor, {})
        if any(only) and len(known) < _MOST:
            known.setdefault(only)


def _tensors(node: Node) -> list[tuple[int, DimFactors, tuple[int, ...]]]:
    """An op's operands and results: each one's number, the factors of its dims, and its shape."""
    rule, call = node.rule, node.call
    sides = ((node.inputs, rule.operands, call.types), (node.outputs, rule.results, call.results))
    rows = (row for side in sides for row in zip(*side, strict=True))
    return [(tensor, factors, ttype.shape) for tensor, factors, ttype in rows]
