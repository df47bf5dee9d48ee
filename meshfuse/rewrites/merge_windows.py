"""Windows of windows as one window, and all windows of one tensor together: what neighbours hold comes once.

A convolution by hand is a pad and a slice of it for every tap; its gradient is a slice of a sum of pads. A padded dim
that lies over ranks has other blocks than the tensor, so each slice moves more than the rows that it lacks, and one in
steps moves most of it. As one op, a slice of a pad is a window of the tensor: a part of a rank's own rows and the edges
of its neighbours' (`halos`). Windows that reach further are shifts. A shift by two goes on from the tensor shifted by
one, if there is one, and moves one row, not two. In a sum of shifts, terms that go further travel a part of the way
together with the others (as in Horner's rule). It is done where it pays: unsharded, a slice is no work at all.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from ..graph import Graph, Node
from ..ops.values import TensorRef
from ..propagation import Propagation, ShardedDefinition
from .graph_writer import GraphWriter, without_unread
from .halos import Frame, HaloGroup, edges_added, framed, frames_of, groups, room, sum_frames, taken, term_in_frames
from .window_views import CutDims, Number, Offsets, Shifted, Term, WindowFinder, cut_dims, dims_after, placed_dims


@dataclass(frozen=True, slots=True)
class Joined:
    """The rewriting of ops, by number, as the windows that they make. `cut`: by root the dims that lie over ranks."""

    windows: tuple[tuple[int, Shifted], ...]
    cut: tuple[tuple[int, tuple[tuple[int, int], ...]], ...]
    sized: ClassVar[bool] = True

    def __call__(self, graph: Graph) -> Graph:
        windows = dict(self.windows)
        written = without_unread(_ShiftWriter(graph, {i: dict(dims) for i, dims in self.cut}, windows).run(windows))
        return written.with_rewrite(self)


def merge_windows(sharded: ShardedDefinition, plan: Propagation) -> ShardedDefinition:
    """The plan; if that is better, one with windows of sharded dims joined and chained.

    Windows one by one may cost so much that the plan avoids them, by having no windows of sharded dims. So windows are
    also looked for along dims that would lie over ranks if the plan did not avoid that.
    """
    graph = sharded.graph
    if not any(node.call.op.window is not None for node in graph.nodes):
        return sharded
    cuts = {i: cut_dims(sharding) for i, sharding in sharded.shardings.items()}, _followed(sharded)
    best, windows = sharded, WindowFinder(graph).run()
    for rewriting in dict.fromkeys(filter(None, [_joined(graph, cut, windows) for cut in cuts])):
        best = plan.cheaper(best, rewriting(graph))
    return best


def _followed(sharded: ShardedDefinition) -> CutDims:
    """By tensor the dims that would lie over ranks if inputs' dims stayed sharded all the way, through windows."""
    cut = placed_dims(sharded)
    for node in sharded.graph.nodes:
        for i, dims in zip(node.outputs, dims_after(node, cut), strict=True):
            cut.setdefault(i, dims)
    return cut


def _joined(graph: Graph, cut: CutDims, windows: Mapping[int, Shifted]) -> Joined | None:
    """The rewriting of the windows that move less joined; None where there are none."""
    ways = _WindowForms(graph, cut, windows.values())
    paying = {number: made for number, made in windows.items() if ways.pays(made)}
    roots = {term.root: tuple(cut[term.root].items()) for made in paying.values() for term in made.terms}
    return Joined(tuple(paying.items()), tuple(roots.items())) if paying else None


class _WindowForms:
    """How each window is written: in blocks with their neighbours' edges, or by shifts of the whole tensor."""

    def __init__(self, graph: Graph, cut: CutDims, windows: Collection[Shifted]):
        self.graph, self.cut = graph, cut
        self.groups = groups(windows, graph, cut)
        self.members: dict[HaloGroup, list[Shifted]] = {}
        for made, group in self.groups.items():
            self.members.setdefault(group, []).append(made)
        shape = graph.shape
        self.frames = {group: frames_of(group, rows, shape(group.root)) for group, rows in self.members.items()}
        self.steps = _Steps(graph, cut, [made for made in windows if made.is_plain])

    def of(self, made: Shifted) -> tuple[Frame, ...]:
        """The frames that a window, or a sum of windows, is written with; none where it is written by shifts."""
        if len(made.terms) > 1 or max(made.ups, default=1) > 1:
            return sum_frames(made, self.graph, self.cut)
        return self.frames[self.groups[made]] if made in self.groups else ()

    def pays(self, made: Shifted) -> bool:
        """Whether several ops on a sharded dim become one, or several windows of it share what moves."""
        if not any(d in made.changed for term in made.terms for d in self.cut[term.root]):
            return False
        if self.of(made):
            return made.depth > 1 or len(self.members[self.groups[made]]) > 1
        alike = len(made.terms) == 1 or all(self.graph.shape(term.root) == made.shape for term in made.terms)
        return made.is_plain and alike and (made.depth > 1 or self.steps.are_many(made))


# Moves a tensor along a dim by so much, with what comes in.
_Mover = Callable[[TensorRef, int, int, Number | None], TensorRef]
# What is shifted along a dim: a tensor, the (dim, offset) that it was shifted by before, the dim, and what comes in.
_Way = tuple[int, tuple[tuple[int, int], ...], int, Number | None]


class _Steps:
    """The shifts of sharded dims, by what they shift: each may go on from one that goes less far."""

    def __init__(self, graph: Graph, cut: CutDims, windows: Iterable[Shifted]):
        self.graph, self.cut = graph, cut
        self._offsets: dict[_Way, set[int]] = {}
        self._together: dict[tuple[_Way, bool], list[Shifted]] = {}
        for made in windows:
            ways = list(self.ways(made))
            for way, offset in ways:
                self._offsets.setdefault(way, set()).add(offset)
            for way, offset in ways[:1]:
                self._together.setdefault((way, offset > 0), []).append(made)

    def ways(self, made: Shifted) -> Iterator[tuple[_Way, int]]:
        """The shifts that make a window, one sharded dim after the other; none for sums of windows."""
        if len(made.terms) == 1:
            root, offsets = made.terms[0]
            before: tuple[tuple[int, int], ...] = ()
            for d in self.cut[root]:
                if offsets[d] and made.shape[d] == self.graph.shape(root)[d]:
                    yield (root, before, d, made.fill), offsets[d]
                    before = (*before, (d, offsets[d]))

    def box(self, made: Shifted) -> list[tuple[int, int]]:
        """By dim the indices that a window shows, or one that is shifted with it; all of the sharded dims."""
        root, _ = made.terms[0]
        sizes, box = self.graph.shape(root), [(0, n) for n in self.graph.shape(root)]
        for way, offset in itertools.islice(self.ways(made), 1):
            for d in set(range(len(sizes))).difference(self.cut[root]):
                spans = [(m.terms[0].offsets[d], m.shape[d]) for m in self._together[way, offset > 0]]
                box[d] = max(0, min(o for o, _ in spans)), min(sizes[d], max(o + n for o, n in spans))
        return box

    def are_many(self, made: Shifted) -> bool:
        """Whether one of a window's shifts goes on from another shift, or another from it."""
        chains = [(self.up_to(way, o), offset) for way, offset in self.ways(made) for o in self._offsets[way]]
        return any(len(chain) > 1 and offset in chain for chain, offset in chains)

    def up_to(self, way: _Way, offset: int) -> list[int]:
        """The offsets on the way to this one, nearest first.

        A step is left out where it would move more than is left of the tensor there: that much may as well come alone.
        """
        size, chain = self.graph.shape(way[0])[way[2]], [offset]
        nearer = [o for o in self._offsets[way] if o * offset > 0 and abs(o) < abs(offset)]
        for o in sorted(nearer, key=abs, reverse=True):
            if abs(chain[0] - o) >= size - abs(chain[0]):
                break
            chain.insert(0, o)
        return chain


def _changed(offsets: Sequence[int], source: Sequence[int], target: Sequence[int]) -> bool:
    return any(offsets) or tuple(source) != tuple(target)


class _ShiftWriter(GraphWriter):
    """Writes windows by frames or shifts, each once."""

    def __init__(self, graph: Graph, cut: CutDims, windows: Mapping[int, Shifted]):
        super().__init__(graph)
        self.cut = cut
        self.windows = windows
        self.ways = _WindowForms(graph, cut, windows.values())
        self.steps = self.ways.steps
        self._framed: dict[HaloGroup, int] = {}
        self._made: dict[tuple[int, Offsets, Offsets, Number], int] = {}

    def form(self, node: Node) -> Sequence[TensorRef] | None:
        start, window = len(self.nodes), self.windows[node.id]
        frames = self.ways.of(window)
        if frames:
            result = self._in_frames(window, frames)
        elif len(window.terms) > 1:
            result = self._total(window.terms, sorted({d for term in window.terms for d in self.cut[term.root]}))
        else:
            result = self._alone(window)
        if window.order:
            result = self.call("permute", result, list(window.order))
        if not any(result.id in new.outputs for new in self.nodes[start:]):
            result = self.call("set", result)
        # The result has the node's own number from now on.
        self._made = {key: node.outputs[0] if made == result.id else made for key, made in self._made.items()}
        return [result]

    def _in_frames(self, made: Shifted, frames: Sequence[Frame]) -> TensorRef:
        """A window, or a sum, in blocks with their neighbours' edges."""
        group = self.ways.groups.get(made)
        if group is None:
            terms = [term_in_frames(self, term, frames, made) for term in made.terms]
            return edges_added(self, self._added(terms), frames, made.shape)
        root, fill = group.root, group.fill
        if made.shape == self.graph.shape(root) and not any(made.terms[0].offsets) and set(made.steps) == {1}:
            return TensorRef(root)
        rest = room(self.ways.members[group], self.graph.shape(root))
        if group not in self._framed:
            self._framed[group] = framed(self, TensorRef(root), frames, fill, rest).id
        return taken(self, TensorRef(self._framed[group]), frames, made, rest)

    def _alone(self, made: Shifted) -> TensorRef:
        """A window shifted along one sharded dim after the other, in steps, and cut along the other dims.

        What none of the windows shows that are shifted together is cut off before that.
        """
        ((root, offsets),) = made.terms
        box = self.steps.box(made)
        ref = self._cut_out(TensorRef(root), [low for low, _ in box], [high - low for low, high in box], made.fill)
        left = [offset - low for offset, (low, _) in zip(offsets, box, strict=True)]
        for way, offset in self.steps.ways(made):
            done, left[way[2]] = 0, 0
            for step in self.steps.up_to(way, offset):
                ref, done = self._shift(ref, way[2], step - done, way[3]), step
        return self._cut_out(ref, left, made.shape, made.fill)

    def _shift(self, ref: TensorRef, dim: int, by: int, fill: Number | None) -> TensorRef:
        shape = self.type(ref).shape
        return self._cut_out(ref, [by if d == dim else 0 for d in range(len(shape))], shape, fill)

    def _cut_out(self, ref: TensorRef, offsets: Sequence[int], shape: Sequence[int], fill: Number | None) -> TensorRef:
        """A window of a tensor, the tensor itself if the window is all of it; equal ones once."""
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
        """The sum of terms of one shape; terms that go further along a dim travel with the others."""
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
        """Take out what goes out at one end and comes in at the other: by offset, the shorter way round, the turns."""
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
        """Sums, by how far they go in one direction, as one: the furthest moves to the next, and on with it."""
        order = [*sorted(sums, key=abs, reverse=True), 0]
        ref = None
        for offset, then in itertools.pairwise(order):
            ref = sums[offset] if ref is None else self.call("add", ref, sums[offset])
            ref = move(ref, dim, offset - then, 0)
        return ref

    def _turn(self, ref: TensorRef, dim: int, by: int, fill: Number | None) -> TensorRef:
        """The tensor shifted, what goes out at one end coming in at the other."""
        back = by - self.type(ref).shape[dim] * (1 if by > 0 else -1)
        return self.call("add", self._shift(ref, dim, by, fill), self._shift(ref, dim, back, fill))

    def _added(self, refs: Sequence[TensorRef]) -> TensorRef:
        total = refs[0]
        for ref in refs[1:]:
            total = self.call("add", total, ref)
        return total
