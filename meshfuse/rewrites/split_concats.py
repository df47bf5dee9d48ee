"""Tensors that are put together of parts, and then summed over or taken apart again, left in parts.

The keys in a cache and that of a new token, or the keys of two memories, are put together, and attention sums over
both. Where the parts lie over ranks, what is put together has other blocks than they have, and most of it moves. But a
sum over it is the sum of the parts' sums, and likewise for a maximum: each part can stay where it is. (FlashDecoding
merges attention over parts so.) It is done where it pays: unsharded, one op is better than two.
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

from ..dtypes import Category
from ..graph import Graph, Node
from ..ops.opdef import BlockOrder, cast_to
from ..ops.rules import DimFactors, FactorKind
from ..ops.shape_arithmetic import with_size
from ..ops.values import TensorRef
from ..propagation import Planner, ShardedDefinition, cheaper
from ..reshard.steps import Step
from ..resharding import insert_resharding
from ..sharding.layout import axes
from ..traversal import inner_first
from .graph_writer import GraphWriter, dim_of, dims_of, is_whole_dim, without_unread

# Of what a reduction makes of two parts, what it makes of both.
_FOLD = {"sum": "add", "prod": "mul", "max": "maximum", "min": "minimum"}
# Less of the moves' time than this is not worth another plan.
_NOTABLE = 0.02
# Every op on parts is as many ops.
_MOST_PARTS = 8


class Parts(NamedTuple):
    """The tensors that a tensor is made of, one after the other along `dim`."""

    dim: int
    refs: tuple[TensorRef, ...]


class _FactorParts(NamedTuple):
    """A factor of an op that is in parts, and their sizes."""

    factor: int
    sizes: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Parted:
    """The rewriting in which what follows from these cats, by number, is computed on their operands."""

    cats: tuple[int, ...]
    sized: ClassVar[bool] = False

    def __call__(self, graph: Graph) -> Graph:
        written = _PartsWriter(graph, self.cats).run(range(len(graph.nodes)))
        return without_unread(written).with_rewrite(self)


def split_concats(graph: Graph, plan: Planner) -> ShardedDefinition:
    """The plan of a graph; if that is better, of the graph in which what lies over ranks is left in parts."""
    found = plan(graph)
    cats = list(_over_ranks(found, graph))
    rewriting = Parted(tuple([node.id for node in cats]))
    dims = {node.origin: joined_dim(node) for node in cats}
    if not cats or not reshards_along(found, dims) or not _PartsWriter(graph, rewriting.cats).pays():
        return found
    return cheaper(found, plan(rewriting(graph)))


def _over_ranks(plan: ShardedDefinition, graph: Graph) -> Iterator[Node]:
    """The cats along a dim that is split, in the result or an operand; not those that an annotation places.

    Outputs may be annotated. A cat that reads the result of another one counts as well: the plan may have gathered
    that.
    """
    reached = set[int]()
    for node in graph.nodes:
        if node.name == "cat" and (node.outputs[0] not in graph.annotations or node.outputs[0] in graph.outputs):
            dim = joined_dim(node)
            split = any(axes(plan.shardings[i].dims[dim]) for i in (*node.inputs, *node.outputs))
            if split or reached.intersection(node.inputs):
                reached.update(node.outputs)
                yield node


def reshards_along(plan: ShardedDefinition, dims: Mapping[int, int]) -> bool:
    """Whether moves along these dims, of what these ops read or make, take a notable part of all moves' time.

    `dims` is by the number that the op has in the definition (`Node.origin`).
    """
    resharded, total, along = insert_resharding(plan), 0.0, 0.0
    written = [node for node in plan.graph.nodes if node.origin in dims]
    touched = {i: dims[node.origin] for node in written for i in (*node.inputs, *node.outputs)}
    for reshard in resharded.reshards:
        seconds, tensor = resharded.seconds(reshard), resharded.values[reshard.source].tensor
        total += seconds
        along += seconds if tensor in touched and _changes(reshard.step, touched[tensor]) else 0.0
    return along > _NOTABLE * total


def joined_dim(cat: Node) -> int:
    """The dim along which a cat joins."""
    return cat.call["dim"] % cat.call.results[0].ndim


def _changes(step: Step, dim: int) -> bool:
    src, dst = step.src.dims, step.dst.dims
    return dim < len(src) and (src[dim] != dst[dim] or step.window is not None)


# A tensor, and one of its dims.
_Place = tuple[int, int]


class _PartsWriter(GraphWriter):
    """Writes ops on parts. The whole tensors, where nobody reads them, are dropped afterwards."""

    def __init__(self, graph: Graph, cats: Iterable[int]):
        super().__init__(graph)
        self.cats = frozenset(cats)
        self.parts: dict[int, Parts] = {}
        self.noted = {*graph.annotations, *graph.streams}
        self._makers = {i: node for node in graph.nodes for i in node.outputs}
        self._alike: dict[_Place, bool] = {}
        self._spread: dict[int, dict[_Place, TensorRef]] = {}
        self._ends = 0

    def pays(self) -> bool:
        """Whether something sums over parts, or reads one of them alone."""
        self.run(range(len(self.graph.nodes)))
        return self._ends > 0

    def form(self, node: Node) -> Sequence[TensorRef] | None:
        if node.id in self.cats:
            self._put_together(node)
            return None
        if not any(i in self.parts for i in node.inputs):
            return None
        if node.call.op.window is not None:
            return self._windowed(node) if node.inputs[0] in self.parts else None
        cut = self._cut(node)
        return None if cut is None else self._on_parts(node, cut)

    def _put_together(self, cat: Node) -> None:
        """Note the parts of a cat: its operands, or the parts of those; empty ones left out."""
        dim, refs = joined_dim(cat), list[TensorRef]()
        for i in cat.inputs:
            inner = self.parts.get(i)
            refs += inner.refs if inner is not None and inner.dim == dim else [TensorRef(i)]
        filled = tuple([ref for ref in refs if self.type(ref).shape[dim]])
        if 0 < len(filled) <= _MOST_PARTS:
            self.parts[cat.outputs[0]] = Parts(dim, filled)

    def _sizes(self, parts: Parts) -> tuple[int, ...]:
        return tuple(self.type(ref).shape[parts.dim] for ref in parts.refs)

    def _windowed(self, node: Node) -> Sequence[TensorRef] | None:
        """A slice of a tensor in parts: what it has of each part."""
        assert node.call.op.window is not None
        window, parts = node.call.op.window(node.call), self.parts[node.inputs[0]]
        if isinstance(window, BlockOrder) or window is None or not _lies_within(window[0], node):
            return None
        (shape,), (made,), (starts, _), dim = [t.shape for t in node.call.results], node.outputs, window, parts.dim
        first, found = starts[dim], list[TensorRef]()
        for ref, size in zip(parts.refs, self._sizes(parts), strict=True):
            low, high = max(first, 0), min(first + shape[dim], size)
            if low < high:
                found.append(self._slice(ref, with_size(starts, dim, low), with_size(shape, dim, high - low)))
            first -= size
        self._ends += 1
        if len(found) > 1 and made not in self.noted:
            self.parts[made] = Parts(dim, tuple(found))
        nothing = () if found else (self._slice(parts.refs[0], with_size(starts, dim, 0), shape),)
        return (*found, *nothing) if len(found) < 2 else [self.call("cat", tuple(found), dim)]

    def _slice(self, ref: TensorRef, starts: Sequence[int], shape: Sequence[int]) -> TensorRef:
        return self.call("slice", ref, tuple(starts), tuple(map(operator.add, starts, shape)))

    def _cut(self, node: Node) -> _FactorParts | None:
        """The factor that an operand has in parts; None where the op cannot be computed part by part."""
        if not node.call.op.concat_distributive or len(node.outputs) > 1 or node.id in self.graph.reductions:
            return None
        rows = zip(node.inputs, node.rule.operands, strict=True)
        parted = [(parts, dims[parts.dim]) for i, dims in rows if (parts := self.parts.get(i)) is not None]
        found = [_FactorParts(factors[0], self._sizes(parts)) for parts, factors in parted if len(factors) == 1]
        return found[0] if found and self._can_be_parted(node, found[0].factor) else None

    def _can_be_parted(self, node: Node, factor: int) -> bool:
        """Whether the factor is a whole dim wherever it is, and in all operands passes through or is reduced."""
        alone = is_whole_dim(node.rule, factor)
        kind, (made,) = node.rule.factors[factor].kind, node.outputs
        if kind is FactorKind.PASS:
            return alone and made not in self.noted
        everywhere = all(dim_of(dims, factor) is not None for dims in node.rule.operands)
        sums = kind is FactorKind.REDUCE and node.call.results[0].dtype.category >= Category.FLOAT
        return alone and everywhere and sums and made not in self.graph.streams

    def _on_parts(self, node: Node, cut: _FactorParts) -> Sequence[TensorRef]:
        made = tuple(self._on_part(node, cut, place) for place in range(len(cut.sizes)))
        factor = node.rule.factors[cut.factor]
        if factor.kind is FactorKind.PASS:
            dim = dim_of(node.rule.results[0], cut.factor)
            assert dim is not None
            self.parts[node.outputs[0]] = Parts(dim, made)
            return [self.call("cat", made, dim)]
        self._ends += 1
        folded = made[0]
        for more in made[1:]:
            folded = self.call(_FOLD[factor.reduce], folded, more)
        return [cast_to(self, folded, node.call.results[0].dtype)]

    def _on_part(self, node: Node, cut: _FactorParts, place: int) -> TensorRef:
        rows = zip(node.inputs, node.rule.operands, strict=True)
        return self.again(node, cut.factor, cut.sizes[place], [self._part(i, dims, cut, place) for i, dims in rows])

    def _part(self, tensor: int, dims: DimFactors, cut: _FactorParts, place: int) -> TensorRef:
        """An operand's part: one of its own, the operand itself if it is the same all along, else a slice."""
        dim, parts, size = dim_of(dims, cut.factor), self.parts.get(tensor), cut.sizes[place]
        if dim is None:
            return TensorRef(tensor)
        if parts is not None and parts.dim == dim and self._sizes(parts) == cut.sizes:
            return parts.refs[place]
        if self._is_alike(tensor, dim):
            return self._of_size(tensor, dim, size)
        shape = self.graph.shape(tensor)
        starts = with_size([0] * len(shape), dim, sum(cut.sizes[:place]))
        return self._slice(TensorRef(tensor), starts, with_size(shape, dim, size))

    def _is_alike(self, tensor: int, dim: int) -> bool:
        """Whether a tensor is the same all along a dim: an op spreads what it reads along it."""
        for place in inner_first((tensor, dim), lambda place: _without(self._read_along(*place), self._alike)):
            read = self._read_along(*place)
            self._alike[place] = read is not None and all(self._alike[other] for other in read)
        return self._alike[tensor, dim]

    def _read_along(self, tensor: int, dim: int) -> list[_Place] | None:
        """The operands that an op passes on along this dim, and the dim of each; None if it does anything else."""
        node = self._makers.get(tensor)
        if node is None or not node.call.op.concat_distributive or len(node.outputs) > 1 or tensor in self.noted:
            return None
        factors = node.rule.results[0][dim]
        if len(factors) != 1 or node.rule.factors[factors[0]].kind is not FactorKind.PASS:
            return None
        rows = zip(node.inputs, dims_of(node, factors[0]), strict=True)
        return [(i, there) for i, there in rows if there is not None]

    def _of_size(self, tensor: int, dim: int, size: int) -> TensorRef:
        """A tensor that is the same all along a dim, with another size there."""
        known = self._spread.setdefault(size, {})
        for place in inner_first((tensor, dim), lambda place: _without(self._read_along(*place), known)):
            if place not in known:
                known[place] = self._resized(*place, size)
        return known[tensor, dim]

    def _resized(self, tensor: int, dim: int, size: int) -> TensorRef:
        node = self._makers[tensor]
        (factor,) = node.rule.results[0][dim]
        rows = zip(node.inputs, dims_of(node, factor), strict=True)
        read = [TensorRef(i) if there is None else self._spread[size][i, there] for i, there in rows]
        return self.again(node, factor, size, read)


def _without(places: Iterable[_Place] | None, known: Collection[_Place]) -> list[_Place]:
    return [place for place in places or () if place not in known]


def _lies_within(starts: Sequence[int], node: Node) -> bool:
    """Whether all elements of a window are elements of the tensor."""
    rows = zip(starts, node.call.results[0].shape, node.call.types[0].shape, strict=True)
    return all(0 <= start <= n - m for start, m, n in rows)
