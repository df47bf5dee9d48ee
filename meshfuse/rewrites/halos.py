"""Windows of a tensor in blocks that come with their neighbours' edges; and sums of windows, whose edges go back.

Each edge travels once, however many windows there are, in whatever steps and along however many dims.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from ..graph import Graph
from ..ops.halo import in_blocks, whole_again
from ..ops.opdef import Writing
from ..ops.shape_arithmetic import one_dim_widths
from ..ops.values import TensorRef
from .window_views import CutDims, Number, Offsets, Shifted, Term

# How far windows reach beyond the ends of each dim.
Room = Mapping[int, tuple[int, int]]


class Frame(NamedTuple):
    """A dim in `blocks` blocks of `size` elements, each with `before` and `after` elements of its neighbours.

    `early`: blocks are longer than the tensor's own and begin with the elements before them, where a rank has these.
    """

    dim: int
    blocks: int
    size: int
    before: int
    after: int
    early: bool = False

    @classmethod
    def of(cls, place: tuple[int, int, int], reach: tuple[int, int], last: int, n: int) -> Frame | None:
        """The frame of a dim of size n for windows that reach beyond blocks by `reach`, up to element `last`.

        `reach` is (before, after). None where they reach further than the next block, or the blocks hold fewer
        elements.
        """
        dim, blocks, size = place
        before, after = (max(0, far) for far in reach)
        last = min(last, n - 1)
        if max(before, after) > size or last >= blocks * size:
            return None
        early = size > -(-n // blocks) and before + after <= size and last + before < blocks * size
        return cls(dim, blocks, size, before, after, early)

    @property
    def own(self) -> int:
        """Where the elements that a block has of its own begin among all that it has."""
        return 0 if self.early else self.before

    @property
    def edges(self) -> tuple[int, int]:
        """How many elements come from the block before, and from the one after."""
        return (0, self.before + self.after) if self.early else (self.before, self.after)


class HaloGroup(NamedTuple):
    """Windows that share their blocks: of one tensor (`root`), with the same `fill` around it.

    `sizes` are (dim, blocks, elements of a block); along `dims` some of the windows reach beyond their blocks.
    """

    root: int
    fill: Number
    sizes: tuple[tuple[int, int, int], ...]
    dims: frozenset[int]


def groups(windows: Iterable[Shifted], graph: Graph, cut: CutDims) -> dict[Shifted, HaloGroup]:
    """By window its group, for those of tensors whose sharded dims lie in blocks.

    A window that reaches beyond its blocks along several dims takes those with it that do so along some of them.
    """
    alone = {made: group for made in windows if (group := _group_of(made, graph, cut)) is not None}
    largest = sorted(dict.fromkeys(alone.values()), key=lambda group: (-len(group.dims), sorted(group.dims)))
    return {made: next(g for g in largest if _holds(g, group)) for made, group in alone.items()}


def _group_of(made: Shifted, graph: Graph, cut: CutDims) -> HaloGroup | None:
    (root, offsets), *more = made.terms
    if more or max(made.ups, default=1) > 1 or not all(cut[root].values()):
        return None
    sizes = tuple((d, blocks, made.steps[d] * -(-made.shape[d] // blocks)) for d, blocks in cut[root].items())
    shape = graph.shape(root)
    dims = frozenset(d for d in cut[root] if (offsets[d], made.steps[d], made.shape[d]) != (0, 1, shape[d]))
    return HaloGroup(root, made.fill or 0, sizes, dims)


def _holds(group: HaloGroup, other: HaloGroup) -> bool:
    return group[:3] == other[:3] and group.dims >= other.dims


def frames_of(group: HaloGroup, members: Sequence[Shifted], shape: Offsets) -> tuple[Frame, ...]:
    """The frames of a group's windows.

    None where they reach further than the next block or beyond the last one, and where shifts would move as little.
    """
    found = []
    for d, blocks, size in group.sizes:
        spans = [(m.terms[0].offsets[d], m.steps[d], m.shape[d]) for m in members]
        reach = max(-o for o, _, _ in spans), max(o - s + 1 for o, s, _ in spans)
        frame = Frame.of((d, blocks, size), reach, max(o + s * (m - 1) for o, s, m in spans), shape[d])
        if frame is None:
            return ()
        if d in group.dims:
            found.append(frame)
    as_good = all(made.is_plain and made.shape[frame.dim] == shape[frame.dim] for made in members for frame in found)
    return () if as_good and len(found) == 1 else tuple(found)


def sum_frames(made: Shifted, graph: Graph, cut: CutDims) -> tuple[Frame, ...]:
    """The frames of a sum of windows.

    None where its terms' blocks are not alike or reach further than the next one, and where shifts would move as
    little.
    """
    if set(made.steps) != {1} or made.fill or any(cut[t.root] != cut[made.terms[0].root] for t in made.terms):
        return ()
    found = []
    for d, blocks in cut[made.terms[0].root].items():
        up, sizes = made.ups[d], {graph.shape(term.root)[d] for term in made.terms}
        parts = {-(-n // blocks) for n in sizes} if blocks else set()
        if len(parts) != 1:
            return ()
        size, offsets = up * parts.pop(), [term.offsets[d] for term in made.terms]
        reach, last = (max(offsets), 1 - up - min(offsets)), up * (max(sizes) - 1) - min(offsets)
        frame = Frame.of((d, blocks, size), reach, last, made.shape[d])
        if frame is None:
            return ()
        if any(offsets) or up > 1 or sizes != {made.shape[d]}:
            found.append(frame)
    as_good = made.is_plain and {graph.shape(term.root) for term in made.terms} == {made.shape}
    return () if as_good and len(found) == 1 else tuple(found)


def framed(
    r: Writing, x: TensorRef, frames: Sequence[Frame], fill: Number, rest: Mapping[int, tuple[int, int]]
) -> TensorRef:
    """x in blocks with their edges. `rest` is how much of `fill` stands before and after the other dims."""
    for place, frame in enumerate(frames):
        dim, whole = frame.dim + place, frame.blocks * frame.size
        if frame.early:
            n = r.type(x).shape[dim]
            x = _padded(r, x, dim, frame.before, whole - frame.before - n, fill)
        x = in_blocks(r, x, dim, frame.blocks, frame.size, frame.edges, fill)
    own = {frame.dim for frame in frames}
    widths = {_place(d, frames): width for d, width in rest.items() if any(width) and d not in own}
    around = [w for d in reversed(range(len(r.type(x).shape))) for w in widths.get(d, (0, 0))]
    return r.call("pad", x, around, fill) if widths else x


def _place(dim: int, frames: Sequence[Frame]) -> int:
    """Where a dim stands (its elements inside a block) once frames are made."""
    return dim + sum(frame.dim <= dim for frame in frames)


def taken(
    r: Writing, x: TensorRef, frames: Sequence[Frame], made: Shifted, rest: Mapping[int, tuple[int, int]]
) -> TensorRef:
    """The window, taken of its tensor in frames."""
    shape = r.type(x).shape
    starts, ends, steps = [0] * len(shape), list(shape), [1] * len(shape)
    framed_dims = {frame.dim: frame for frame in frames}
    for d, (o, s, m) in enumerate(zip(made.terms[0].offsets, made.steps, made.shape, strict=True)):
        place, frame = _place(d, frames), framed_dims.get(d)
        n = -(-m // frame.blocks) if frame is not None else m
        starts[place] = o + (frame.before if frame is not None else rest[d][0])
        ends[place], steps[place] = starts[place] + s * (n - 1) + 1, s
    x = r.call("slice", x, starts, ends, *([steps] if set(steps) != {1} else []))
    for frame in frames:
        x = whole_again(r, x, frame.dim, made.shape[frame.dim])
    return x


def room(members: Sequence[Shifted], shape: Offsets) -> Room:
    """By dim, how far windows reach beyond its two ends."""
    found = {}
    for d, n in enumerate(shape):
        spans = [(m.terms[0].offsets[d], m.terms[0].offsets[d] + m.steps[d] * (m.shape[d] - 1) + 1) for m in members]
        found[d] = max(0, *(-a for a, _ in spans)), max(0, *(b - n for _, b in spans))
    return found


def term_in_frames(r: Writing, term: Term, frames: Sequence[Frame], made: Shifted) -> TensorRef:
    """A term of a sum in frames: its own elements in each block and the edges, zeros elsewhere."""
    x, by_dim = TensorRef(term.root), {frame.dim: frame for frame in frames}
    for d in reversed(range(len(made.shape))):
        frame, up, offset = by_dim.get(d), made.ups[d], term.offsets[d]
        size, place, n = made.shape[d], d, r.type(x).shape[d]
        if frame is not None:
            x = in_blocks(r, x, d, frame.blocks, frame.size // up, (0, 0), 0)
            size, place, n = frame.size + frame.after, d + 1, frame.size // up
            x = _padded(r, _spread(r, x, place, up), place, frame.before - offset, size + offset - up * n)
        else:
            x = _padded(r, _spread(r, x, d, up), d, -offset, size + offset - up * n)
    return x


def _padded(r: Writing, x: TensorRef, dim: int, before: int, after: int, fill: Number = 0) -> TensorRef:
    return r.call("pad", x, one_dim_widths(len(r.type(x).shape), dim, before, after), fill) if before or after else x


def _spread(r: Writing, x: TensorRef, dim: int, up: int) -> TensorRef:
    """A dim with zeros after each of its elements."""
    shape = r.type(x).shape
    if up == 1:
        return x
    x = r.call("reshape", x, (*shape[: dim + 1], 1, *shape[dim + 1 :]))
    x = _padded(r, x, dim + 1, 0, up - 1)
    return r.call("reshape", x, (*shape[:dim], shape[dim] * up, *shape[dim + 1 :]))


def edges_added(r: Writing, x: TensorRef, frames: Sequence[Frame], shape: Offsets) -> TensorRef:
    """The tensor whose blocks have sums for their neighbours' edges, too: these are sent there and added."""
    for place, frame in reversed(list(enumerate(frames))):
        x = _fold(r, x, frame.dim + place, frame)
    for frame in frames:
        n, first, whole = shape[frame.dim], frame.before if frame.early else 0, frame.blocks * frame.size
        x = whole_again(r, x, frame.dim, min(first + n, whole))
        x = _padded(r, x, frame.dim, -first, max(0, first + n - whole))
    return x


def _fold(r: Writing, x: TensorRef, dim: int, frame: Frame) -> TensorRef:
    """The dims (block, before + size + after) as (block, size)."""
    blocks, size, start = frame.blocks, frame.size, frame.own
    before, after = frame.edges
    own = _cut(r, x, dim + 1, start, start + size)
    for width, first, by in ((before, 0, -1), (after, start + size, 1)):
        if width and blocks > 1:
            edge = _cut(r, x, dim + 1, first, first + width)
            edge = _cut(r, edge, dim, max(0, -by), blocks - max(0, by))
            edge = _padded(r, edge, dim, max(0, by), max(0, -by))
            own = r.call("add", own, _padded(r, edge, dim + 1, *((size - width, 0) if by < 0 else (0, size - width))))
    return own


def _cut(r: Writing, x: TensorRef, dim: int, start: int, stop: int) -> TensorRef:
    shape = r.type(x).shape
    if (start, stop) == (0, shape[dim]):
        return x
    starts, ends = [0] * len(shape), list(shape)
    starts[dim], ends[dim] = start, stop
    return r.call("slice", x, starts, ends)
