"""Which tensors are windows of others: by slices, pads, steps and zeros in between, and as sums of such."""

from __future__ import annotations

import math
import operator
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from ..dtypes import is_negative_zero
from ..graph import Graph, Node, users
from ..ops.shape_arithmetic import with_size
from ..ops.windows import slice_bounds
from ..propagation import ShardedDefinition
from ..sharding.layout import axes, extent
from ..sharding.value import Sharding

Number = float | int
Offsets = tuple[int, ...]
# By tensor the dims that lie over ranks, and in how many blocks each does; 0 where these are no blocks.
CutDims = Mapping[int, Mapping[int, int]]
# The ops that change none of the elements.
_MOVING = ("permute", "set", "segment_set")


class Term(NamedTuple):
    """One root tensor of a window: at index i of the window stands its element i * step + offset.

    Where a dim is spread by `up` it is element (i + offset) / up, with zeros between such elements.
    """

    root: int
    offsets: Offsets


class OpWindow(NamedTuple):
    """What an op takes of its operand: at index i of a dim its element i * step + offset, else `fill`."""

    offsets: Offsets
    steps: Offsets
    fill: Number | None


class Shifted(NamedTuple):
    """What a tensor is: a sum of windows (`terms`) of root tensors.

    `fill` stands where a term has no element; None where all have one everywhere. `changed` are the dims that windows
    on the way change, `depth` is the number of ops that make it. All rows are in the order of the roots' dims; if the
    tensor's own order is another, `order` says which. It is true of the indices in `valid`, by dim.
    """

    terms: tuple[Term, ...]
    shape: tuple[int, ...]
    fill: Number | None
    changed: frozenset[int]
    steps: Offsets
    ups: Offsets
    valid: tuple[tuple[int, int], ...]
    depth: int = 1
    order: tuple[int, ...] = ()

    @property
    def is_true(self) -> bool:
        """Whether it is true of all indices."""
        return all(span == (0, n) for span, n in zip(self.valid, self.shape, strict=True))

    @property
    def is_plain(self) -> bool:
        """Whether it has no steps and no zeros in between."""
        return {*self.steps, *self.ups} <= {1}

    def permuted(self, dims: Sequence[int]) -> Shifted:
        """The same with the tensor's dims in another order."""
        order = tuple(self.order[d] for d in dims) if self.order else tuple(dims)
        return self._replace(order=order if order != tuple(sorted(order)) else ())

    def in_roots(self, row: Sequence[int]) -> tuple[int, ...]:
        """A row with an entry for each dim of the tensor, in the order of the roots' dims."""
        return tuple(entry for _, entry in sorted(zip(self.order, row, strict=True))) if self.order else tuple(row)


def view_of(node: Node) -> OpWindow | None:
    """The window that a slice, or a pad with a number, takes; None for other ops."""
    window = own_window(node)
    if window is not None:
        return OpWindow(window[0], (1,) * len(window[0]), window[1])
    if node.name != "slice":
        return None
    starts, stops, steps = zip(*slice_bounds(node.call), strict=True)
    return OpWindow(starts, steps, None) if min(*starts, *stops) >= 0 else None


def own_window(node: Node) -> tuple[Offsets, Number | None] | None:
    """(offsets, fill) of a slice without steps, or of a pad with a number; None for other ops.

    A pad with -0.0 is none: sums of windows, and windows of pads with 0, would make 0.0 of it.
    """
    window = node.call.op.window(node.call) if node.call.op.window is not None else None
    if type(window) is not tuple or not isinstance(window[1], int | float) or is_negative_zero(window[1]):
        return None
    source, target = node.call.types[0].shape, node.call.results[0].shape
    outside = any(o < 0 or m + o > n for o, n, m in zip(window[0], source, target, strict=True))
    return window[0], window[1] if outside else None


def placed_dims(sharded: ShardedDefinition) -> dict[int, Mapping[int, int]]:
    """By input and annotated tensor, the dims that lie over ranks."""
    return {i: cut_dims(sharded.shardings[i]) for i in (*sharded.graph.input_tensors, *sharded.graph.annotations)}


def cut_dims(sharding: Sharding) -> Mapping[int, int]:
    """By dim that lies over ranks, in how many blocks; 0 where it does not lie in blocks."""
    there = {d: layout for d, layout in enumerate(sharding.dims) if axes(layout)}
    return {d: extent(layout) if all(split.bound for split in layout) else 0 for d, layout in there.items()}


def dims_after(node: Node, cut: CutDims) -> Iterator[Mapping[int, int]]:
    """By result, the dims that follow those dims of the operands: through a window, or by the same factor."""
    if view_of(node) is not None:
        yield cut[node.inputs[0]]
        return
    factors: dict[int, int] = {}
    for i, dims in zip(node.inputs, node.rule.operands, strict=True):
        for d, blocks in cut[i].items():
            for place, factor in enumerate(dims[d]):
                factors.setdefault(factor, 0 if place else blocks)
    for made in node.rule.results:
        found = {d: [(place, f) for place, f in enumerate(own) if f in factors] for d, own in enumerate(made)}
        yield {d: 0 if own[0][0] else factors[own[0][1]] for d, own in found.items() if own}


class WindowFinder:
    """Looks for tensors that are windows, or sums of windows."""

    def __init__(self, graph: Graph):
        self.graph = graph
        self.readers = users(graph.nodes)
        self.makers = {i: node for node in graph.nodes for i in node.outputs}
        self.kept = {*graph.annotations, *graph.streams}
        self.known: dict[int, Shifted] = {}

    def known_all(self) -> Mapping[int, Shifted]:
        """All tensors that are known to be windows."""
        self.run()
        return self.known

    def run(self) -> dict[int, Shifted]:
        """By node what it makes, where that is true of all indices."""
        found: dict[int, Shifted] = {}
        for node in self.graph.nodes:
            if node.name in _MOVING:
                self._moved(node)
                continue
            spread = self._spread(node)
            made = spread or self._window(node) or self._sum(node)
            if made is None or node.id in self.graph.reductions or node.outputs[0] in self.graph.streams:
                continue
            self.known[node.outputs[0]] = made
            if made.is_true and spread is None:
                found[node.id] = made
        return found

    def _fresh(self, tensor: int) -> Shifted:
        """A tensor as a window of itself."""
        shape = self.graph.shape(tensor)
        ones, spans = (1,) * len(shape), tuple((0, n) for n in shape)
        return Shifted((Term(tensor, (0,) * len(shape)),), shape, None, frozenset(), ones, ones, spans, 0)

    def _window(self, node: Node) -> Shifted | None:
        """What a slice or a pad makes, in terms of the roots of its operand."""
        own = view_of(node)
        if own is None:
            return None
        (operand,), shape = node.inputs, node.call.results[0].shape
        before = self._before(operand)
        joined = _joined(self.graph, before, own, shape) if before is not None else None
        return joined if joined is not None else _joined(self.graph, self._fresh(operand), own, shape)

    def _moved(self, node: Node) -> None:
        """Note that a permuted window is a window, as of images with channels last, and that `set` changes nothing."""
        before = self._before(node.inputs[0])
        if before is not None:
            self.known[node.outputs[0]] = before.permuted(_dims(node)) if node.name == "permute" else before

    def _before(self, operand: int) -> Shifted | None:
        """What an operand is, if the operand itself need not be there."""
        before = self.known.get(operand) if operand not in self.kept else None
        return before if before is not None and (len(before.terms) == 1 or self._read_once(operand)) else None

    def _sum(self, node: Node) -> Shifted | None:
        """The sum that an addition of two windows with zeros around them makes."""
        parts = [self.known.get(i) for i in node.inputs]
        kinds = {*node.call.types, *node.call.results}
        if node.name != "add" or len(parts) != 2 or len(kinds) != 1 or not all(map(self._read_once, node.inputs)):
            return None
        first, second = parts
        if first is None or second is None or not (first.is_true and second.is_true):
            return None
        alike = (first.order, first.steps, first.ups) == (second.order, second.steps, second.ups)
        if first.fill or second.fill or not alike or set(first.steps) != {1}:
            return None
        terms, changed = (*first.terms, *second.terms), first.changed | second.changed
        return first._replace(terms=terms, fill=0, changed=changed, depth=first.depth + second.depth)

    def _read_once(self, tensor: int) -> bool:
        free = tensor not in self.kept and tensor not in self.graph.outputs
        return free and len(self.readers.get(tensor, ())) == 1

    def _spread(self, node: Node) -> Shifted | None:
        """What a reshape makes of a dim of 1, padded with zeros, and the dim before it: elements among zeros."""
        pad = self.makers.get(node.inputs[0]) if node.name == "reshape" else None
        own = own_window(pad) if pad is not None and pad.outputs[0] not in self.kept else None
        if pad is None or own is None or own[1] != 0:
            return None
        source, target = pad.call.types[0].shape, pad.call.results[0].shape
        dim, *more = [d for d, (n, m) in enumerate(zip(source, target, strict=True)) if n != m]
        merged = (*target[: dim - 1], target[dim - 1] * target[dim], *target[dim + 1 :]) if dim else ()
        if more or source[dim] != 1 or own[0][dim] > 0 or merged != node.call.results[0].shape:
            return None
        root = self._without(pad.inputs[0], dim)
        return self._between_zeros(root, dim - 1, target[dim], -own[0][dim]) if root is not None else None

    def _without(self, tensor: int, dim: int) -> int | None:
        """The tensor that this one is, but for a dim of size 1."""
        node, shape = self.makers.get(tensor), self.graph.shape(tensor)
        if node is None or node.name not in ("broadcast", "reshape") or tensor in self.kept:
            return None
        return node.inputs[0] if node.call.types[0].shape == (*shape[:dim], *shape[dim + 1 :]) else None

    def _between_zeros(self, root: int, dim: int, up: int, inside: int) -> Shifted:
        before, place = self._before(root), dim
        if before is not None:
            place = before.order[dim] if before.order else dim
        if before is None or not before.is_true or before.fill or {*before.steps, before.ups[place]} != {1}:
            before, place = self._fresh(root), dim
        terms = tuple(Term(t.root, with_size(t.offsets, place, up * t.offsets[place] - inside)) for t in before.terms)
        shape, ups = with_size(before.shape, place, up * before.shape[place]), with_size(before.ups, place, up)
        spans, changed = tuple((0, n) for n in shape), before.changed | {place}
        depth = before.depth + 1
        return before._replace(terms=terms, shape=shape, fill=0, ups=ups, valid=spans, changed=changed, depth=depth)


def _dims(node: Node) -> list[int]:
    """The dims of a permute, counted from the front."""
    return [int(d) % len(node.call["dims"]) for d in node.call["dims"]]


def _joined(graph: Graph, before: Shifted, own: OpWindow, result: Offsets) -> Shifted | None:
    """A window on a window as one; None where it shows nothing of a root, or steps through several.

    It is not true of indices at which the first one has cut something off, or another number stands.
    """
    by, steps, shape = (before.in_roots(row) for row in (own.offsets, own.steps, result))
    if set(steps) != {1} and (len(before.terms) > 1 or set(before.ups) != {1}):
        return None
    offsets = [tuple(a + s * b for a, s, b in zip(t.offsets, before.steps, by, strict=True)) for t in before.terms]
    every = tuple(map(operator.mul, before.steps, steps))
    sizes = [tuple(map(_among_zeros, before.ups, graph.shape(term.root))) for term in before.terms]
    seen = [_Seen(*row) for n, o in zip(sizes, offsets, strict=True) for row in zip(n, o, every, shape, strict=True)]
    if not all(dim.some for dim in seen):
        return None
    alike = before.fill is None or own.fill is None or before.fill == own.fill
    spans = zip(_known_spans(before, sizes, alike), zip(by, steps, shape, strict=True), strict=True)
    valid = tuple((_first_at(low, *view), _first_at(high, *view)) for (low, high), view in spans)
    fill = before.fill if before.fill is not None else own.fill
    views = enumerate(zip(by, steps, before.shape, shape, strict=True))
    changed = before.changed | {d for d, (o, s, n, m) in views if o or s != 1 or n != m}
    terms = tuple(Term(term.root, o) for term, o in zip(before.terms, offsets, strict=True))
    return before._replace(
        terms=terms, shape=shape, fill=None if all(dim.all for dim in seen) else fill or 0, changed=changed,
        steps=every, valid=valid, depth=before.depth + 1,
    )  # fmt: skip


def _among_zeros(up: int, n: int) -> int:
    """How many elements there are from the first to the last of n, if zeros stand between them."""
    return up * (n - 1) + 1 if n else 0


class _Seen(NamedTuple):
    """What a dim of size m shows of n elements: that at `first`, and so on in steps."""

    n: int
    first: int
    step: int
    m: int

    @property
    def some(self) -> bool:
        """Whether it shows one of them."""
        place = max(0, -(self.first // self.step))
        return place < self.m and self.first + self.step * place < self.n

    @property
    def all(self) -> bool:
        """Whether it shows nothing else."""
        return self.first >= 0 and self.first + self.step * (self.m - 1) < self.n


def _known_spans(view: Shifted, sizes: Sequence[Offsets], alike: bool) -> Iterator[tuple[float, float]]:
    """By dim the indices at which it is known what would stand there.

    Also beyond the dim's ends, if nothing was cut off there and a window on the view is filled with the same number
    (`alike`). `sizes` are those of the terms' dims.
    """
    for d, (span, step, m) in enumerate(zip(view.valid, view.steps, view.shape, strict=True)):
        seen = [_Seen(n[d], term.offsets[d], step, m) for n, term in zip(sizes, view.terms, strict=True)]
        yield _known_span(span, seen, alike)


def _known_span(span: tuple[int, int], roots: Sequence[_Seen], alike: bool) -> tuple[float, float]:
    low, high = span
    below = alike and low == 0 and all(r.first < r.step for r in roots)
    above = alike and high == roots[0].m and all(r.first + r.step * r.m >= r.n for r in roots)
    return -math.inf if below else low, math.inf if above else high


def _first_at(index: float, by: int, step: int, m: int) -> int:
    """The first index of a view of a dim that shows this index of it or a later one; at most the view's size m."""
    return min(max(-((by - index) // step), 0), m) if math.isfinite(index) else 0 if index < 0 else m  # type: ignore[return-value]
