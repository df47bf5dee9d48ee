"""What is sliced and put back where it was stays there; the rest is chosen by index.

A cache with a new token is written as its rows before, the token, and its rows after, in a cat; the gradient of a slice
is the slice's gradient with zeros around it. Where the dim lies over ranks, each slice has other blocks than the
tensor, so most of it moves, and moves back. But the result is the tensor, but for some indices, and every rank can tell
which of its own these are. What is put back at another place, as in a roll, or where the states of a pipeline's stages
go on to the next ones, is the tensor shifted: that moves only what a rank lacks of it. It is done where it pays:
unsharded, a copy of the parts is as good.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

from ..graph import Graph, Node
from ..ops.shape_arithmetic import one_dim_widths, shape_along
from ..ops.values import TensorRef
from ..propagation import Planner, ShardedDefinition, cheaper
from ..sharding.layout import axes
from .graph_writer import GraphWriter, without_unread
from .split_concats import joined_dim, reshards_along
from .window_views import Number, dims_after, own_window, placed_dims

# The ops that may put a slice back.
_PUT = ("cat", "pad")
# More are as many choices for every element.
_MOST = 8


class DimSpan(NamedTuple):
    """What stands in a dim from index `start` on: a tensor or a number.

    `stays`: it is a tensor as long as the result, whose elements keep their index, but for `shift`. `split`: its dim
    lies over ranks.
    """

    value: int | Number
    start: int
    stays: bool = False
    shift: int = 0
    split: bool = False
    is_tensor: bool = True


class DimSpans(NamedTuple):
    """All that stands along a dim of a result, in order."""

    dim: int
    spans: tuple[DimSpan, ...]


class Turn(NamedTuple):
    """A tensor rolled along a dim, by so many indices, the shorter way round."""

    root: int
    dim: int
    by: int


@dataclass(frozen=True, slots=True)
class Placed:
    """The rewriting of cats and pads, by number, as choices by index among what stands along their dim."""

    ops: tuple[tuple[int, DimSpans], ...]
    sized: ClassVar[bool] = True

    def __call__(self, graph: Graph) -> Graph:
        put = dict(self.ops)
        written = without_unread(_PlacesWriter(graph, put).run(put))
        return written.with_rewrite(self)


def update_in_place(graph: Graph, plan: Planner) -> ShardedDefinition:
    """The plan of a graph; if that is better, of the graph in which what is sliced and put back stays where it is."""
    plain = plan(graph)
    if not any(node.name in _PUT for node in graph.nodes):
        return plain
    finder = _PlacesFinder(graph, plain)
    put = tuple(finder.run())
    if not put or not reshards_along(plain, finder.dims):
        return plain
    return cheaper(plain, plan(Placed(put)(graph)))


class _PlacesFinder:
    """Looks for ops that put slices back, along a dim that lies over ranks.

    `dims`: by the number of such an op, and of the slices, the dim.
    """

    def __init__(self, graph: Graph, plan: ShardedDefinition):
        self.graph, self.shardings = graph, plan.shardings
        self.makers = {i: node for node in graph.nodes for i in node.outputs}
        self.noted = {*graph.annotations, *graph.streams}
        # A plan may go out of the way of what moves so much: the dims that would lie over ranks if it did not.
        self.cut = placed_dims(plan)
        self.dims: dict[int, int] = {}

    def run(self) -> Iterator[tuple[int, DimSpans]]:
        for node in self.graph.nodes:
            put = self._spans(node)
            if put is not None:
                self.dims[node.origin] = put.dim
                self.dims.update((self.makers[i].origin, put.dim) for i in node.inputs if i in self.makers)
                yield node.id, put
            for i, dims in zip(node.outputs, self._dims_after(node, put), strict=True):
                self.cut.setdefault(i, dims)

    def _dims_after(self, node: Node, spans: DimSpans | None) -> Iterable[Mapping[int, int]]:
        if spans is None:
            return dims_after(node, self.cut)
        staying = [self.cut[int(span.value)] for span in spans.spans if span.stays]
        return [{d: dims[d] for dims in staying for d in sorted(dims)}]

    def _spans(self, node: Node) -> DimSpans | None:
        """What stands along the dim of an op's result, if a part of it stays in place and lies over ranks."""
        found = _cat_spans(node) if node.name == "cat" else _pad_spans(node) if node.name == "pad" else None
        if found is None or len(found.spans) > _MOST:
            return None
        spans = tuple([self._told(node, found.dim, span) for span in found.spans])
        kept = any(span.stays and found.dim in self.cut[int(span.value)] for span in spans)
        return DimSpans(found.dim, spans) if kept else None

    def _told(self, node: Node, dim: int, span: DimSpan) -> DimSpan:
        """The span as one of the tensor that it is a slice of, if that stays in its place or is shifted."""
        if not span.is_tensor:
            return span
        root, sharding = self._root(node, dim, span), self.shardings.get(int(span.value))
        if root is not None:
            return root
        return span._replace(split=sharding is not None and bool(axes(sharding.dims[dim])))

    def _root(self, node: Node, dim: int, span: DimSpan) -> DimSpan | None:
        """The tensor of the result's size that the span is a slice of. (A shifting pad is one window: see `shifts`.)"""
        maker, shape = self.makers.get(int(span.value)), node.call.results[0].shape
        window = own_window(maker) if maker is not None and maker.call.op.is_view else None
        if maker is None or window is None or maker.outputs[0] in self.noted:
            return None
        (root,), shift = maker.inputs, span.start - window[0][dim]
        along = self.graph.shape(root) == shape and not any(o for d, o in enumerate(window[0]) if d != dim)
        return DimSpan(root, span.start, True, shift) if along and (not shift or node.name == "cat") else None


def _cat_spans(node: Node) -> DimSpans | None:
    """The operands of a cat along its dim, without empty ones."""
    dim, start, spans = joined_dim(node), 0, list[DimSpan]()
    for i, ttype in zip(node.inputs, node.call.types, strict=True):
        if ttype.shape[dim]:
            spans.append(DimSpan(i, start))
        start += ttype.shape[dim]
    return DimSpans(dim, tuple(spans)) if len(spans) > 1 else None


def _pad_spans(node: Node) -> DimSpans | None:
    """The operand of a pad along its one dim, with the number before and after it."""
    window, (source, target) = own_window(node), (node.call.types[0].shape, node.call.results[0].shape)
    padded = [d for d, (n, m) in enumerate(zip(source, target, strict=True)) if n != m]
    if window is None or len(padded) != 1 or not source[padded[0]]:
        return None
    (dim,) = padded
    before, fill = -window[0][dim], window[1]
    after = target[dim] - before - source[dim]
    if fill is None or min(before, after) < 0 or any(window[0][d] for d in range(len(target)) if d != dim):
        return None
    ends = [DimSpan(fill, start, is_tensor=False) for start, n in ((0, before), (target[dim] - after, after)) if n]
    spans = sorted([DimSpan(node.inputs[0], before), *ends], key=lambda span: span.start)
    return DimSpans(dim, tuple(spans))


def _is_on_the_way(turn: Turn, further: Turn) -> bool:
    """Whether one turn of a tensor goes in the same direction as another and no further."""
    alike = turn._replace(by=0) == further._replace(by=0)
    return alike and turn.by * further.by > 0 and abs(turn.by) <= abs(further.by)


def _turn(node: Node, spans: DimSpans) -> Turn | None:
    """The turn that these spans are: the end of a tensor, then what stood before it."""
    (first, *others), size = spans.spans, node.call.results[0].shape[spans.dim]
    if len(others) != 1 or first.value != others[0].value or not first.stays:
        return None
    start = others[0].start
    by = start if 2 * start <= size else start - size
    is_turned = others[0].stays and (first.shift, others[0].shift) == (start - size, start)
    return Turn(int(first.value), spans.dim, by) if is_turned else None


class _PlacesWriter(GraphWriter):
    """Writes what is put together as choices by index. A turn goes on from shorter turns of the same tensor."""

    def __init__(self, graph: Graph, put: Mapping[int, DimSpans]):
        super().__init__(graph)
        self.put = put
        turns = {number: _turn(graph.nodes[number], spans) for number, spans in put.items()}
        self.turns = {number: turn for number, turn in turns.items() if turn is not None}
        self._made: dict[Turn, int] = {}

    def form(self, node: Node) -> Sequence[TensorRef] | None:
        if node.id in self.turns:
            return [self._turned(node, self.turns[node.id])]
        made = self._choice(self.put[node.id], node.call.results[0].shape)
        return [made] if self.type(made) == node.call.results[0] else None

    def _turned(self, node: Node, turn: Turn) -> TensorRef:
        """The turned tensor, by way of the turns that go less far in the same direction."""
        if turn in self._made:
            return self.call("set", TensorRef(self._made[turn]))
        shape, root, done = node.call.results[0].shape, turn.root, 0
        for by in sorted({t.by for t in self.turns.values() if _is_on_the_way(t, turn)}, key=abs):
            step = turn._replace(by=by)
            if step not in self._made:
                start, size = (by - done) % shape[turn.dim], shape[turn.dim]
                spans = DimSpan(root, 0, True, start - size), DimSpan(root, start, True, start)
                self._made[step] = self._choice(DimSpans(turn.dim, spans), shape).id
            root, done = self._made[step], by
        # The result has the node's own number from now on.
        self._made[turn] = node.outputs[0]
        return TensorRef(root)

    def _choice(self, put: DimSpans, shape: Sequence[int]) -> TensorRef:
        dim, (first, *others) = put
        size, ndim = shape[dim], len(shape)
        index = self.call("reshape", self.call("iota", size), shape_along(ndim, dim, size))
        made = self._value(first, dim, size)
        for span in others:
            made = self.call("where", self.call("lt", index, span.start), made, self._value(span, dim, size))
        return made

    def _value(self, span: DimSpan, dim: int, size: int) -> Any:
        """What stands in the span, as long as the dim or of size 1: it is not read elsewhere."""
        if not span.is_tensor:
            return span.value
        ref = TensorRef(int(span.value))
        shape = self.type(ref).shape
        here = shape[dim]
        if span.shift:
            return self.call("pad", ref, one_dim_widths(len(shape), dim, span.shift, -span.shift))
        if span.stays or here == 1:
            return ref
        if span.split:
            return self.call("pad", ref, one_dim_widths(len(shape), dim, span.start, size - span.start - here))
        return self.call("index_select", ref, self._within(span.start, here, size), dim)

    def _within(self, start: int, here: int, size: int) -> TensorRef:
        """For each index of the dim its place in a tensor that stands from `start` on, limited to that tensor."""
        place = self.call("sub", self.call("iota", size), start)
        return self.call("minimum", self.call("maximum", place, 0), here - 1)
