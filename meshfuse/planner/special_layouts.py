"""Layouts that no axis on a factor gives: axes inside a dim's blocks, and uneven ones.

The shards of a fused weight are strided: rank r has part r of each of its matrices. Seven rows over four ranks are cut
unevenly. Of a dim over two axes of which the major one is gathered, the other lies in strides. Such layouts are
followed through the ops' rules, forward and back; each is then a start for the labels of all the ops that it reaches.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from ..graph import Graph, Node
from ..mesh import DeviceMesh
from ..ops.rules import DimFactors
from ..placement.exchanges import exchanged
from ..placement.factors import Layouts, layouts_of, representable, tensor_layouts
from ..sharding import layout as lay
from ..sharding.layout import WHOLE, Layout, Split

Dims = tuple[Layout, ...]
_Asked = tuple[tuple[Dims, ...], ...]  # of an op: the layouts of each of its tensors
# Layouts of one tensor on one mesh that are followed; most have one or two.
_MOST = 8


@functools.lru_cache(maxsize=1 << 14)
def is_special(mesh: DeviceMesh, layout: Layout, n: int) -> bool:
    """Whether axes lie inside a dim's blocks, are there in part, or cut its size n unevenly."""
    sizes = dict(zip(mesh.names, mesh.shape, strict=True))
    return any(split.size != sizes.get(split.axis or "") for split in layout) or not lay.is_even(layout, n)


@dataclass(frozen=True, slots=True)
class SpecialLayouts:
    """Layouts of each tensor's dims on one mesh that follow from annotations, the special ones among them.

    alike: by tensor the one that it shares its layouts with.
    """

    graph: Graph
    mesh: DeviceMesh
    alike: Mapping[int, int]
    dims: dict[int, tuple[Dims, ...]] = field(default_factory=dict)
    _followed: dict[Hashable, tuple[tuple[int, Dims], ...]] = field(default_factory=dict)
    _of_op: dict[Hashable, tuple[Layouts, ...]] = field(default_factory=dict)
    _known: dict[int, tuple[_Asked, tuple[Layouts, ...]]] = field(default_factory=dict)  # the last of `of_op`, by op
    _done: dict[int, _Asked] = field(default_factory=dict)  # by op what it was followed from last

    @classmethod
    def of(cls, graph: Graph, mesh: DeviceMesh, nodes: Sequence[Node], alike: Mapping[int, int]) -> SpecialLayouts:
        """Those that the annotations of a graph ask for, or leave when an axis is gathered, and what follows.

        nodes: those that they are followed through.
        """
        found = cls(graph, mesh, alike)
        for tensor, sharding in graph.annotations.items():
            if sharding.mesh == mesh:
                for dims in (sharding.dims, *_gathered(sharding.dims, graph.shape(tensor))):
                    found.add(tensor, dims)
        for node in (*nodes, *reversed(nodes), *nodes):
            found.follow(node)
        return found

    def copy(self) -> SpecialLayouts:
        """The same, to add to; what follows from equal layouts of equal ops is worked out once for both."""
        return dataclasses.replace(self, dims={**self.dims}, _known={**self._known}, _done={**self._done})

    def _is_special(self, layout: Layout, n: int) -> bool:
        return is_special(self.mesh, layout, n)

    def of_op(self, node: Node) -> tuple[Layouts, ...]:
        """The special layouts of an op's factors that its operands and results ask for, all other factors whole."""
        asked = self._asked_of(node)
        before = self._known.get(node.id)
        if before is None or before[0] != asked:
            before = self._known[node.id] = asked, self._factors(node, asked)
        return before[1]

    def _factors(self, node: Node, asked: _Asked) -> tuple[Layouts, ...]:
        key = id(node.call), id(node.rule), asked
        found = self._of_op.get(key)
        if found is None:
            sizes = [factor.size for factor in node.rule.factors]
            only = (tuple([lt if self._is_special(lt, n) else WHOLE for lt, n in zip(asked, sizes, strict=True)])
                    for asked in self._asked(node))  # fmt: skip
            alone = tuple(dict.fromkeys(layouts for layouts in only if any(layouts)))
            found = self._of_op[key] = tuple(dict.fromkeys([*alone, *_together(alone)]))
        return found

    def of_tensor(self, tensor: int) -> tuple[Dims, ...]:
        """The layouts of a tensor's dims of which some are special."""
        found, shape = self._dims_of(tensor), self.graph.shape(tensor)
        return tuple(dims for dims in found if any(map(self._is_special, dims, shape)))

    def follow(self, node: Node) -> None:
        """Add what the op's tensors are in the layouts that some of them ask for; equal ops are worked out once."""
        tensors, asked = (*node.inputs, *node.outputs), self._asked_of(node)
        if not any(asked) or self._done.get(node.id) == asked:
            return
        self._done[node.id] = asked
        key = id(node.call), id(node.rule), asked
        if key not in self._followed:
            asked = [layouts for found in self._asked(node) for layouts in _with_exchanged(node, found)]
            self._followed[key] = tuple([
                (place, tensor_layouts(node.rule, factors, shape, layouts) or ())
                for layouts in asked
                for place, (_, factors, shape) in enumerate(tensors_of(node))
            ])  # fmt: skip
        for place, dims in self._followed[key]:
            self.add(tensors[place], dims)

    def add(self, tensor: int, dims: Dims) -> None:
        """Add a tensor's layouts, if it has not too many yet."""
        known = self._dims_of(tensor)
        if any(dims) and len(known) < _MOST and dims not in known:
            self.dims[self.alike[tensor]] = (*known, dims)

    def _asked_of(self, node: Node) -> _Asked:
        """The layouts of an op's operands and results."""
        return tuple([self._dims_of(i) for i in (*node.inputs, *node.outputs)])

    def _dims_of(self, tensor: int) -> tuple[Dims, ...]:
        return self.dims.get(self.alike[tensor], ())

    def _asked(self, node: Node) -> Iterator[Layouts]:
        for tensor, factors, shape in tensors_of(node):
            for dims in self._dims_of(tensor):
                yield representable(node.rule, layouts_of(node.rule, factors, shape, dims))


def _with_exchanged(node: Node, layouts: Layouts) -> Iterator[Layouts]:
    """Layouts of an op's factors, and of rows at experts those that an exchange gives."""
    yield layouts
    if node.call.op.exchange is not None:
        yield from (found for _, found in exchanged(node.call, node.rule, layouts))


def _together(asked: Sequence[Layouts]) -> Iterator[Layouts]:
    """What two ask for, of different factors and different axes."""
    for one, other in itertools.combinations(asked, 2):
        names = [{split.axis for layout in layouts for split in lay.axes(layout)} for layouts in (one, other)]
        if not names[0] & names[1] and not any(a and b for a, b in zip(one, other, strict=True)):
            yield tuple([a or b for a, b in zip(one, other, strict=True)])


def _gathered(dims: Dims, shape: Sequence[int]) -> Iterator[Dims]:
    """What gathering one of a dim's axes leaves of it: the more minor ones in strides."""
    for d, (layout, n) in enumerate(zip(dims, shape, strict=True)):
        for at, split in enumerate(layout):
            if split.bound and len(lay.axes(layout)) > 1:
                left = (*layout[:at], Split(split.size), *layout[at + 1 :])
                yield tuple([lay.canonical(left, n) if e == d else other for e, other in enumerate(dims)])


def tensors_of(node: Node) -> list[tuple[int, DimFactors, tuple[int, ...]]]:
    """An op's operands and results: each one's number, the factors of its dims, and its shape."""
    rule, call = node.rule, node.call
    sides = ((node.inputs, rule.operands, call.types), (node.outputs, rule.results, call.results))
    rows = (row for side in sides for row in zip(*side, strict=True))
    return [(tensor, factors, ttype.shape) for tensor, factors, ttype in rows]
