"""Windows of windows as one, and shifts of one tensor in a chain: what neighbours hold comes once.

A convolution by hand is a pad and a slice of it for every tap, and its gradient a slice of a sum of pads. A padded dim
that lies over ranks has other blocks than the tensor, so each slice moves more than the rows it lacks. As one op, a
slice of a pad is a shift, and moves those alone; a shift by two of a tensor that is shifted by one, too, goes on from
that, and moves one row, not two. In a sum of shifts the terms that go furthest go a part of the way together with the
others (as in Horner's rule). It is done where it pays: unsharded, a slice is no work at all.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

from ..graph import Graph, Node, users
from ..mesh import DeviceMesh
from ..ops.base import TensorRef
from ..planning.search import Effort, better, searched
from ..propagation.propagate import propagate
from ..propagation.sharded import ShardedDefinition
from ..sharding.layout import axes
from ..sharding.value import Sharding
from .graphs import Writer, without_unread

Number = float | int
Offsets = tuple[int, ...]
Cut = Mapping[int, tuple[int, ...]]  # by tensor the dims that lie over ranks


class Term(NamedTuple):
    """A tensor whose element i + offset is what stands at i."""

    root: int
    offsets: Offsets


class Shifted(NamedTuple):
    """A sum of terms, and its shape; `fill` is what stands where a term has no element, None where all have them all.

    `changed` are the dims that some of the windows on the way change, `depth` tells of how many ops it is made. All of
    this is in the order of dims that the roots have; `order`, where it is another, is the one of the result.
    """

    terms: tuple[Term, ...]
    shape: tuple[int, ...]
    fill: Number | None
    changed: frozenset[int]
    depth: int = 1
    order: tuple[int, ...] = ()

    def permuted(self, dims: Sequence[int]) -> Shifted:
        """With the dims of the result in another order."""
        order = tuple(self.order[d] for d in dims) if self.order else tuple(dims)
        return self._replace(order=order if order != tuple(sorted(order)) else ())

    def in_roots(self, row: Sequence[int]) -> tuple[int, ...]:
        """An entry per dim of the result, in the order of the roots."""
        return tuple(entry for _, entry in sorted(zip(self.order, row, strict=True))) if self.order else tuple(row)


@dataclass(frozen=True, slots=True)
class Joined:
    """The rewriting of ops, by number, as the windows that they make; `cut`: by root the dims that lie over ranks."""

    windows: tuple[tuple[int, Shifted], ...]
    cut: tuple[tuple[int, tuple[int, ...]], ...]
    sized: ClassVar[bool] = True

    def __call__(self, graph: Graph) -> Graph:
        found = dict(self.windows)
        written = without_unread(_Writer(graph, dict(self.cut), found).run(found))
        return written.noting(self)


def shifted(sharded: ShardedDefinition, world: DeviceMesh, effort: Effort = Effort.AUTO) -> ShardedDefinition:
    """The definition with windows of sharded dims joined and chained, if that plan is better.

    Windows one by one may cost so much that the plan goes out of their way, and has none of a sharded dim. So they are
    looked for where they would be if nothing did, too.
    """
    graph = sharded.graph
    if not any(node.call.op.window is not None for node in graph.nodes):
        return sharded
    cuts = {i: _cut(home) for i, home in sharded.homes.items()}, _followed(sharded)
    best = sharded
    for rewriting in dict.fromkeys(filter(None, [_Finder(graph, cut).rewriting() for cut in cuts])):
        best = better(best, searched(propagate(rewriting(graph), world), world, effort))
    return best


def _followed(sharded: ShardedDefinition) -> Cut:
    """The dims that would lie over ranks if those of inputs did all the way, through windows, too."""
    cut = placed_dims(sharded)
    for node in sharded.graph.nodes:
        for i, dims in zip(node.outputs, dims_after(node, cut), strict=True):
            cut.setdefault(i, dims)
    return cut


def placed_dims(sharded: ShardedDefinition) -> dict[int, tuple[int, ...]]:
    """The dims of inputs, and of what is annotated, that lie over ranks."""
    return {i: _cut(sharded.homes[i]) for i in (*sharded.graph.input_tensors, *sharded.graph.annotations)}


def dims_after(node: Node, cut: Cut) -> Iterator[tuple[int, ...]]:
    """The dims of an op's results that are those dims of its operands: a window's own, or of the same factor."""
    if own_window(node) is not None:
        yield cut[node.inputs[0]]
        return
    rows = zip(node.inputs, node.rule.operands, strict=True)
    factors = {f for i, dims in rows for d in cut[i] for f in dims[d]}
    for made in node.rule.results:
        yield tuple(d for d, own in enumerate(made) if factors.intersection(own))


class _Finder:
    """Looks for windows, and sums of windows, that move what lies over ranks."""

    def __init__(self, graph: Graph, cut: Cut):
        self.graph, self.cut = graph, cut
        self.readers = users(self.graph.nodes)
        self.kept = {*self.graph.annotations, *self.graph.streams}
        self.known: dict[int, Shifted] = {}

    def rewriting(self) -> Joined | None:
        """What writes the windows that it finds as one; None where there is nothing to write."""
        found = self._found()
        roots = {term.root: self.cut[term.root] for made in found.values() for term in made.terms}
        return Joined(tuple(found.items()), tuple(roots.items())) if found else None

    def _found(self) -> dict[int, Shifted]:
        """By node, what to write in its place; nothing where that would be what is there."""
        found: dict[int, Shifted] = {}
        for node in self.graph.nodes:
            if node.name == "permute":
                self._permute(node)
                continue
            made = self._window(node) or self._sum(node)
            if made is not None and node.id not in self.graph.reductions and node.outputs[0] not in self.graph.streams:
                self.known[node.outputs[0]] = made
                if len(made.terms) == 1 or all(self.graph.shape(term.root) == made.shape for term in made.terms):
                    found[node.id] = made
        steps = _Steps(self.graph, self.cut, found.values())
        return {number: made for number, made in found.items() if self._pays(made, steps)}

    def _window(self, node: Node) -> Shifted | None:
        """What a slice or pad makes, from before the windows that its operand is made by."""
        own = own_window(node)
        if own is None:
            return None
        (operand,), shape = node.inputs, node.call.results[0].shape
        before = self._before(operand)
        joined = _joined(self.graph, before, own, shape) if before is not None else None
        if joined is not None:
            return joined
        return Shifted((Term(operand, own[0]),), shape, own[1], _changed(own[0], self.graph.shape(operand), shape))

    def _permute(self, node: Node) -> None:
        """Windows of what is permuted are those before it, permuted: so the rows of an image whose channels go last."""
        before = self._before(node.inputs[0])
        if before is not None:
            self.known[node.outputs[0]] = before.permuted(_dims(node))

    def _before(self, operand: int) -> Shifted | None:
        """What an operand is made by, where it need not be there itself."""
        before = self.known.get(operand) if operand not in self.kept else None
        return before if before is not None and (len(before.terms) == 1 or self._read_once(operand)) else None

    def _sum(self, node: Node) -> Shifted | None:
        """What an addition makes of windows with zeros around them."""
        parts = [self.known.get(i) for i in node.inputs]
        kinds = {*node.call.types, *node.call.results}
        if node.name != "add" or len(parts) != 2 or len(kinds) != 1 or not all(map(self._read_once, node.inputs)):
            return None
        first, second = parts
        if first is None or second is None or first.fill or second.fill or first.order != second.order:
            return None
        terms, changed = (*first.terms, *second.terms), first.changed | second.changed
        return Shifted(terms, first.shape, 0, changed, first.depth + second.depth, first.order)

    def _read_once(self, tensor: int) -> bool:
        free = tensor not in self.kept and tensor not in self.graph.outputs
        return free and len(self.readers.get(tensor, ())) == 1

    def _pays(self, made: Shifted, steps: _Steps) -> bool:
        """Whether a sharded dim is changed by ops that can be one, or shifted by several amounts."""
        if made.depth > 1:
            return any(d in made.changed for term in made.terms for d in self.cut[term.root])
        return any(steps.are_many(way, offset) for way, offset in steps.ways(made))


def own_window(node: Node) -> tuple[Offsets, Number | None] | None:
    """The offsets and the fill of a slice without steps, or of a pad with a number."""
    window = node.call.op.window(node.call) if node.call.op.window is not None else None
    if type(window) is not tuple or not isinstance(window[1], int | float):
        return None
    source, target = node.call.types[0].shape, node.call.results[0].shape
    return window[0], window[1] if _any_outside(window[0], source, target) else None


def _dims(node: Node) -> list[int]:
    """The dims of a permute, none counted from the end."""
    return [int(d) % len(node.call["dims"]) for d in node.call["dims"]]


def _any_outside(offsets: Offsets, source: Sequence[int], target: Sequence[int]) -> bool:
    return any(o < 0 or m + o > n for o, n, m in zip(offsets, source, target, strict=True))


def _changed(offsets: Sequence[int], source: Sequence[int], target: Sequence[int]) -> frozenset[int]:
    rows = enumerate(zip(offsets, source, target, strict=True))
    return frozenset(d for d, (o, n, m) in rows if o != 0 or n != m)


def _joined(
    graph: Graph, before: Shifted, own: tuple[Offsets, Number | None], result: tuple[int, ...]
) -> Shifted | None:
    """A window of windows as one; None where it shows less of them than one window would, nothing, or two fills."""
    fills = {fill for fill in (before.fill, own[1]) if fill is not None}
    if len(fills) > 1:
        return None
    by, shape, terms = before.in_roots(own[0]), before.in_roots(result), []
    for root, offsets in before.terms:
        rows = zip(graph.shape(root), offsets, before.shape, by, shape, strict=True)
        if not all(_shows_all(*row) for row in rows):
            return None
        terms.append(Term(root, tuple(a + b for a, b in zip(offsets, by, strict=True))))
    outside = any(_any_outside(term.offsets, graph.shape(term.root), shape) for term in terms)
    changed, fill = before.changed | _changed(by, before.shape, shape), fills.pop() if outside and fills else None
    return Shifted(tuple(terms), shape, fill, changed, before.depth + 1, before.order)


def _shows_all(n: int, first: int, between: int, second: int, m: int) -> bool:
    """Whether what the second window fills in has no element in the dim of size n that the first is of; some have."""
    some = max(first + second, 0) < min(n, m + first + second)
    return some and (second >= 0 or first <= 0) and (m + second <= between or between + first >= n)


def _cut(home: Sharding) -> tuple[int, ...]:
    """The dims that lie over ranks."""
    return tuple(d for d, layout in enumerate(home.dims) if axes(layout))


# Moves a tensor along a dim by so much, with what comes in.
_Mover = Callable[[TensorRef, int, int, Number | None], TensorRef]
# What is shifted along a dim: a tensor, the (dim, offset) that it was shifted by before, the dim, and what comes in.
_Way = tuple[int, tuple[tuple[int, int], ...], int, Number | None]


class _Steps:
    """The shifts of sharded dims, one tensor's by what they shift: each may go on from one that goes less far."""

    def __init__(self, graph: Graph, cut: Cut, found: Iterable[Shifted]):
        self.graph, self.cut = graph, cut
        self._offsets: dict[_Way, set[int]] = {}
        for made in found:
            for way, offset in self.ways(made):
                self._offsets.setdefault(way, set()).add(offset)

    def ways(self, made: Shifted) -> Iterator[tuple[_Way, int]]:
        """The shifts that a window is made by, one sharded dim after the other; none for sums."""
        if len(made.terms) == 1:
            root, offsets = made.terms[0]
            before: tuple[tuple[int, int], ...] = ()
            for d in self.cut[root]:
                if offsets[d] and made.shape[d] == self.graph.shape(root)[d]:
                    yield (root, before, d, made.fill), offsets[d]
                    before = (*before, (d, offsets[d]))

    def are_many(self, way: _Way, offset: int) -> bool:
        """Whether the shift goes on from another, or another from it."""
        chains = [self.up_to(way, other) for other in self._offsets[way]]
        return any(len(chain) > 1 and offset in chain for chain in chains)

    def up_to(self, way: _Way, offset: int) -> list[int]:
        """The offsets in this direction, nearest first, up to this one, each no step from the next that moves more than
        is left of the tensor there: so much may come alone.
        """
        size, chain = self.graph.shape(way[0])[way[2]], [offset]
        nearer = [o for o in self._offsets[way] if o * offset > 0 and abs(o) < abs(offset)]
        for o in sorted(nearer, key=abs, reverse=True):
            if abs(chain[0] - o) >= size - abs(chain[0]):
                break
            chain.insert(0, o)
        return chain


class _Writer(Writer):
    """Writes shifts, each once."""

    def __init__(self, graph: Graph, cut: Cut, found: Mapping[int, Shifted]):
        super().__init__(graph)
        self.cut, self.found = cut, found
        self.steps = _Steps(graph, cut, found.values())
        self._made: dict[tuple[int, Offsets, Offsets, Number], int] = {}

    def form(self, node: Node) -> Sequence[TensorRef] | None:
        start, found = len(self.nodes), self.found[node.id]
        if len(found.terms) > 1:
            result = self._total(found.terms, sorted({d for term in found.terms for d in self.cut[term.root]}))
        else:
            result = self._alone(found)
        if found.order:
            result = self.call("permute", result, list(found.order))
        if not any(result.id in new.outputs for new in self.nodes[start:]):
            result = self.call("set", result)
        # The result has the node's own number from now on.
        self._made = {key: node.outputs[0] if made == result.id else made for key, made in self._made.items()}
        return [result]

    def _alone(self, made: Shifted) -> TensorRef:
        """Shifted along one sharded dim after the other, in steps, then cut along the others."""
        ((root, offsets),) = made.terms
        ref, left = TensorRef(root), list(offsets)
        for way, offset in self.steps.ways(made):
            done, left[way[2]] = 0, 0
            for step in self.steps.up_to(way, offset):
                ref, done = self._shift(ref, way[2], step - done, way[3]), step
        return self._cut_out(ref, left, made.shape, made.fill)

    def _shift(self, ref: TensorRef, dim: int, by: int, fill: Number | None) -> TensorRef:
        shape = self.type(ref).shape
        return self._cut_out(ref, [by if d == dim else 0 for d in range(len(shape))], shape, fill)

    def _cut_out(self, ref: TensorRef, offsets: Sequence[int], shape: Sequence[int], fill: Number | None) -> TensorRef:
        """One window of a tensor, the tensor itself where that is all of it; equal ones once."""
        key = (ref.id, tuple(offsets), tuple(shape), fill or 0)
        if not _changed(offsets, self.type(ref).shape, shape):
            return ref
        if key not in self._made:
            self._made[key] = self._window(ref, *key[1:]).id
        return TensorRef(self._made[key])

    def _window(self, ref: TensorRef, offsets: Offsets, shape: Offsets, fill: Number) -> TensorRef:
        rows = list(zip(offsets, self.type(ref).shape, shape, strict=True))
        if all(o >= 0 and m + o <= n for o, n, m in rows):
            return self.call("slice", ref, [o for o, _, _ in rows], [m + o for o, _, m in rows])
        return self.call("pad", ref, [w for o, n, m in reversed(rows) for w in (-o, m + o - n)], fill)

    def _total(self, terms: Sequence[Term], dims: Sequence[int]) -> TensorRef:
        """The sum of terms of one shape, those that go further along a dim on their way with the others."""
        if not dims:
            shape = self.type(TensorRef(terms[0].root)).shape
            return self._added([self._cut_out(TensorRef(root), offsets, shape, 0) for root, offsets in terms])
        dim, by_offset = dims[0], dict[int, list[Term]]()
        for term in terms:
            rest = tuple(0 if d == dim else o for d, o in enumerate(term.offsets))
            by_offset.setdefault(term.offsets[dim], []).append(Term(term.root, rest))
        turned = self._round(by_offset, self.graph.shape(terms[0].root)[dim])
        sums = {offset: self._total(group, dims[1:]) for offset, group in by_offset.items()}
        turns = {by: self._total(group, dims[1:]) for by, group in turned.items()}
        ends = [
            self._gathered({o: ref for o, ref in found.items() if o * sign > 0}, dim, move)
            for found, move in ((sums, self._shift), (turns, self._turn))
            for sign in (1, -1)
        ]
        return self._added([ref for ref in (sums.get(0), *ends) if ref is not None])

    def _round(self, by_offset: dict[int, list[Term]], size: int) -> dict[int, list[Term]]:
        """Takes what is shifted out at one end and comes in at the other, as in a roll: by how far, the shorter way."""
        found: dict[int, list[Term]] = {}
        for offset in [o for o in by_offset if 0 < o < size and o - size in by_offset]:
            by = offset if 2 * offset <= size else offset - size
            for term in list(by_offset[offset]):
                if term in by_offset[offset - size]:
                    by_offset[offset].remove(term)
                    by_offset[offset - size].remove(term)
                    found.setdefault(by, []).append(term)
        for offset in [o for o, row in by_offset.items() if not row]:
            del by_offset[offset]
        return found

    def _gathered(self, sums: Mapping[int, TensorRef], dim: int, move: _Mover) -> TensorRef | None:
        """Sums by how far they are to be moved in one direction: the furthest first, to the next, and on with it."""
        order = [*sorted(sums, key=abs, reverse=True), 0]
        ref = None
        for offset, then in itertools.pairwise(order):
            ref = sums[offset] if ref is None else self.call("add", ref, sums[offset])
            ref = move(ref, dim, offset - then, 0)
        return ref

    def _turn(self, ref: TensorRef, dim: int, by: int, fill: Number | None) -> TensorRef:
        """Shifted, and what goes out at one end comes in at the other."""
        back = by - self.type(ref).shape[dim] * (1 if by > 0 else -1)
        return self.call("add", self._shift(ref, dim, by, fill), self._shift(ref, dim, back, fill))

    def _added(self, refs: Sequence[TensorRef]) -> TensorRef:
        total = refs[0]
        for ref in refs[1:]:
            total = self.call("add", total, ref)
        return total
