"""What is sliced and put back where it was stays there, and what stands beside it is chosen by index.

A cache with a new token at a place is written as its rows before, the token, and its rows after, put together; the
gradient of a slice is the slice's gradient with zeros around it. Where the dim lies over ranks each slice has other
blocks than the tensor, so most of it moves, and moves back. But the result is the tensor, but for some indices: every
rank can tell which of its own these are. It is done where it pays: unsharded, a copy of the parts is as good.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

from ..graph import Graph, Node
from ..ops.base import TensorRef
from ..ops.shapes import one_dim_widths, shape_along
from ..planning.search import Effort, better
from ..propagation.sharded import ShardedDefinition
from ..sharding.layout import axes
from .graphs import Writer, without_unread
from .parts import Planner, joined_dim, moves_along
from .shifts import dims_after, own_window, placed_dims

Number = int | float
# The ops that may put a slice back.
_PUT = ("cat", "pad")
# More are as many choices for every element.
_MOST = 8


class Span(NamedTuple):
    """What stands in a dim from `start` on: a tensor, or a number.

    `stays`: the tensor is as long as the result, and stands where it does there. `split`: its dim lies over ranks.
    """

    value: int | Number
    start: int
    stays: bool = False
    split: bool = False
    is_tensor: bool = True


class Spans(NamedTuple):
    """A dim of a result, and what stands along it."""

    dim: int
    spans: tuple[Span, ...]


@dataclass(frozen=True, slots=True)
class Placed:
    """The rewriting of ops, by number, as choices among what stands along a dim of theirs."""

    ops: tuple[tuple[int, Spans], ...]
    sized: ClassVar[bool] = True

    def __call__(self, graph: Graph) -> Graph:
        found = dict(self.ops)
        written = without_unread(_Writer(graph, found).run(found))
        return written.noting(self)


def in_place(graph: Graph, plan: Planner, effort: Effort = Effort.AUTO) -> ShardedDefinition:
    """The plan of a graph, or, if that is better, of one where what is sliced and put back stays where it is."""
    plain = plan(graph)
    if not effort.rewrites(graph) or not any(node.name in _PUT for node in graph.nodes):
        return plain
    finder = _Finder(graph, plain)
    found = tuple(finder.run())
    if not found or not moves_along(plain, finder.dims):
        return plain
    return better(plain, plan(Placed(found)(graph)))


class _Finder:
    """Looks for what is put together of slices that stay in their place, along a dim that lies over ranks.

    `dims`: by number the dims of the ops that do so, and of the slices.
    """

    def __init__(self, graph: Graph, plan: ShardedDefinition):
        self.graph, self.homes = graph, plan.homes
        self.makers = {i: node for node in graph.nodes for i in node.outputs}
        self.noted = {*graph.annotations, *graph.streams}
        # A plan may go out of the way of what moves so much: the dims that would lie over ranks if it did not.
        self.cut = placed_dims(plan)
        self.dims: dict[int, int] = {}

    def run(self) -> Iterator[tuple[int, Spans]]:
        for node in self.graph.nodes:
            found = self._spans(node)
            if found is not None:
                self.dims[node.origin] = found.dim
                self.dims.update((self.makers[i].origin, found.dim) for i in node.inputs if i in self.makers)
                yield node.id, found
            for i, dims in zip(node.outputs, self._dims_after(node, found), strict=True):
                self.cut.setdefault(i, dims)

    def _dims_after(self, node: Node, found: Spans | None) -> Iterable[tuple[int, ...]]:
        if found is None:
            return dims_after(node, self.cut)
        staying = [self.cut[int(span.value)] for span in found.spans if span.stays]
        return [tuple(sorted({d for dims in staying for d in dims}))]

    def _spans(self, node: Node) -> Spans | None:
        """What stands along a dim of the op's result, if some of it stays in its place and lies over ranks."""
        found = _cat_spans(node) if node.name == "cat" else _pad_spans(node) if node.name == "pad" else None
        if found is None or len(found.spans) > _MOST:
            return None
        spans = tuple([self._told(node, found.dim, span) for span in found.spans])
        kept = any(span.stays and found.dim in self.cut[int(span.value)] for span in spans)
        return Spans(found.dim, spans) if kept else None

    def _told(self, node: Node, dim: int, span: Span) -> Span:
        """The span, of the tensor that it is a slice of where that stays in its place."""
        if not span.is_tensor:
            return span
        root, home = self._root(node, dim, span), self.homes.get(int(span.value))
        if root is not None:
            return span._replace(value=root, stays=True)
        return span._replace(split=home is not None and bool(axes(home.dims[dim])))

    def _root(self, node: Node, dim: int, span: Span) -> int | None:
        """The tensor of the result's size that the span is a slice of, where that stands in its place."""
        maker, shape = self.makers.get(int(span.value)), node.call.results[0].shape
        window = own_window(maker) if maker is not None and maker.name == "slice" else None
        if maker is None or window is None or maker.outputs[0] in self.noted:
            return None
        (root,), offsets = maker.inputs, shape_along(len(shape), dim, span.start + 1)
        stays = self.graph.shape(root) == shape and list(window[0]) == [o - 1 for o in offsets]
        return root if stays else None


def _cat_spans(node: Node) -> Spans | None:
    """The operands of a `cat` that are not empty."""
    dim, start, spans = joined_dim(node), 0, list[Span]()
    for i, kind in zip(node.inputs, node.call.types, strict=True):
        if kind.shape[dim]:
            spans.append(Span(i, start))
        start += kind.shape[dim]
    return Spans(dim, tuple(spans)) if len(spans) > 1 else None


def _pad_spans(node: Node) -> Spans | None:
    """The operand of a `pad` of one dim by numbers, and these."""
    window, (source, target) = own_window(node), (node.call.types[0].shape, node.call.results[0].shape)
    padded = [d for d, (n, m) in enumerate(zip(source, target, strict=True)) if n != m]
    if window is None or len(padded) != 1 or not source[padded[0]]:
        return None
    (dim,) = padded
    before, fill = -window[0][dim], window[1]
    after = target[dim] - before - source[dim]
    if fill is None or min(before, after) < 0 or any(window[0][d] for d in range(len(target)) if d != dim):
        return None
    ends = [Span(fill, start, is_tensor=False) for start, n in ((0, before), (target[dim] - after, after)) if n]
    spans = sorted([Span(node.inputs[0], before), *ends], key=lambda span: span.start)
    return Spans(dim, tuple(spans))


class _Writer(Writer):
    """Writes what is put together as choices by index."""

    def __init__(self, graph: Graph, found: Mapping[int, Spans]):
        super().__init__(graph)
        self.found = found

    def form(self, node: Node) -> Sequence[TensorRef] | None:
        dim, (first, *others) = self.found[node.id]
        (result,) = node.call.results
        size, ndim = result.shape[dim], result.ndim
        index = self.call("reshape", self.call("iota", size), shape_along(ndim, dim, size))
        made = self._value(first, dim, size)
        for span in others:
            made = self.call("where", self.call("lt", index, span.start), made, self._value(span, dim, size))
        return [made] if self.type(made) == result else None

    def _value(self, span: Span, dim: int, size: int) -> Any:
        """What stands there, as long as the dim or of size 1: elsewhere it is not read."""
        if not span.is_tensor:
            return span.value
        ref = TensorRef(int(span.value))
        shape = self.type(ref).shape
        here = shape[dim]
        if span.stays or here == 1:
            return ref
        if span.split:
            return self.call("pad", ref, one_dim_widths(len(shape), dim, span.start, size - span.start - here))
        return self.call("index_select", ref, self._within(span.start, here, size), dim)

    def _within(self, start: int, here: int, size: int) -> TensorRef:
        """For each index of the dim its place in a tensor that stands from `start` on, its ends beyond them."""
        place = self.call("sub", self.call("iota", size), start)
        return self.call("minimum", self.call("maximum", place, 0), here - 1)
