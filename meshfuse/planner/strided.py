"""Layouts that annotations ask for and that no axis on a factor gives: axes inside the blocks of a dim.

The shards of a fused weight are strided: rank r has part r of each of its matrices. Such layouts are followed forward
and back through the ops' rules once; each is then a label of all the ops that it reaches.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from ..graph import Graph, Node
from ..ops.rules import DimFactors
from ..ops.values import TensorType
from ..placement.factors import Layouts, layouts_of, representable, tensor_layouts
from ..sharding import layout as lay
from ..sharding.layout import WHOLE, Layout

Dims = tuple[Layout, ...]
# Layouts of one tensor that are followed; programs have one or two.
_MOST = 6


def is_strided(layout: Layout) -> bool:
    """Whether an axis lies inside a dim's blocks, or is in parts."""
    return any(not split.bound for split in layout)


@dataclass(slots=True)
class _Found:
    """By tensor the strided layouts of its dims."""

    graph: Graph
    dims: dict[int, dict[Dims, None]]

    def add(self, tensor: int, dims: Iterable[Layout]) -> None:
        only = tuple(layout if is_strided(layout) else WHOLE for layout in dims)
        known = self.dims.setdefault(tensor, {})
        if any(only) and len(known) < _MOST:
            known.setdefault(only)

    def asked(self, node: Node) -> dict[Layouts, None]:
        """The layouts of an op's factors that its operands and results ask for."""
        rule, call = node.rule, node.call
        sides = [*zip(node.inputs, rule.operands, call.types), *zip(node.outputs, rule.results, call.results)]
        out: dict[Layouts, None] = {}
        for tensor, factors, ttype in sides:
            for dims in self.dims.get(tensor, ()):
                found = representable(rule, layouts_of(rule, factors, ttype.shape, dims))
                if any(map(is_strided, found)):
                    out.setdefault(found)
        return out

    def follow(self, node: Node) -> None:
        """Add what the op's other tensors are in these layouts."""
        rule, call = node.rule, node.call
        sides = [*zip(node.inputs, rule.operands, call.types), *zip(node.outputs, rule.results, call.results)]
        for layouts in self._all(node):
            for tensor, factors, ttype in sides:
                dims = tensor_layouts(rule, factors, ttype.shape, layouts)
                if dims is not None:
                    self.add(tensor, dims)

    def _all(self, node: Node) -> Iterable[Layouts]:
        rule, call = node.rule, node.call
        sides = [*zip(node.inputs, rule.operands, call.types), *zip(node.outputs, rule.results, call.results)]
        for tensor, factors, ttype in sides:
            for dims in self.dims.get(tensor, ()):
                yield representable(rule, layouts_of(rule, factors, ttype.shape, dims))


def strided_layouts(graph: Graph) -> Mapping[int, tuple[Layouts, ...]]:
    """By op the strided layouts of its factors that some annotation asks for."""
    found = _Found(graph, {})
    for tensor, sharding in graph.annotations.items():
        found.add(tensor, sharding.dims)
    if any(found.dims.values()):
        for node in (*graph.nodes, *reversed(graph.nodes), *graph.nodes):
            found.follow(node)
    return {node.id: tuple(found.asked(node)) for node in graph.nodes}, {i: tuple(d) for i, d in found.dims.items()}
