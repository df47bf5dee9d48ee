"""One step of a reshard, and what it puts on the wire."""

from __future__ import annotations

import enum
import functools
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from ..fast_dataclass import quickly_made
from ..mesh import DeviceMesh
from ..sharding import layout as lay
from ..sharding.layout import Layout, Split
from ..sharding.value import Sharding


class StepKind(enum.Enum):
    """What a step does. Only SLICE sends nothing."""

    SLICE = "slice"
    ALL_REDUCE = "all-reduce"
    REDUCE_SCATTER = "reduce-scatter"
    ALL_GATHER = "all-gather"
    ALL_TO_ALL = "all-to-all"
    EXCHANGE = "permute"
    TRANSFER = "send-recv"
    WINDOW = "window"

    # Enum's own is written in Python, and kinds are in the keys of what is looked up for every step.
    __hash__ = object.__hash__


# Of pieces that each rank's lack tells; a rank may lack nothing.
_IN_PIECES = (StepKind.EXCHANGE, StepKind.WINDOW, StepKind.TRANSFER)
# Of pieces, each from one that has it.
_FROM_HOLDERS = (*_IN_PIECES, StepKind.ALL_TO_ALL)


@dataclass(frozen=True, slots=True)
class Window:
    """A tensor whose index i is another one's index i + offset, dim by dim: a slice or a pad.

    Elements of the target that the source does not have are `fill`: the text of a number or of a scalar of the program.
    """

    source_shape: tuple[int, ...]
    target_shape: tuple[int, ...]
    offsets: tuple[int, ...]
    fill: str = "0"

    def to_target(self, index: tuple[lay.Runs, ...]) -> tuple[lay.Runs, ...]:
        """Source indices as target indices, without those that the target does not have."""
        pairs = zip(index, self.offsets, self.target_shape, strict=True)
        return tuple([_within(runs, -offset, n) for runs, offset, n in pairs])

    def to_source(self, index: tuple[lay.Runs, ...]) -> tuple[lay.Runs, ...]:
        """Target indices as source indices; they must have a source."""
        return tuple(_shifted(runs, offset) for runs, offset in zip(index, self.offsets, strict=True))

    def in_order(self, box: tuple[lay.Runs, ...]) -> tuple[tuple[lay.Runs, ...], ...]:
        """A box of target indices, cut into boxes whose elements stand in the same order in both tensors: itself."""
        return (box,)

    def along(self, dim: int) -> Window:
        """What it does along one dim."""
        return Window((self.source_shape[dim],), (self.target_shape[dim],), (self.offsets[dim],))

    def changes(self, dim: int) -> bool:
        """Whether an index of this dim is another one in the target."""
        return self.offsets[dim] != 0 or self.source_shape[dim] != self.target_shape[dim]


@dataclass(frozen=True, slots=True)
class Reordering:
    """A tensor that is another one with the equal blocks of a dim reordered: block i is the other's order[i]."""

    source_shape: tuple[int, ...]
    dim: int
    order: tuple[int, ...]
    fill: str = ""

    @property
    def target_shape(self) -> tuple[int, ...]:
        return self.source_shape

    def to_target(self, index: tuple[lay.Runs, ...]) -> tuple[lay.Runs, ...]:
        """Source indices as target indices."""
        places = {block: place for place, block in enumerate(self.order)}
        return self._mapped(index, [places[block] for block in range(len(places))])

    def to_source(self, index: tuple[lay.Runs, ...]) -> tuple[lay.Runs, ...]:
        """Target indices as source indices."""
        return self._mapped(index, self.order)

    def in_order(self, box: tuple[lay.Runs, ...]) -> tuple[tuple[lay.Runs, ...], ...]:
        """A box of target indices, cut into boxes whose elements stand in the same order in both tensors."""
        parts: list[list[tuple[int, int]]] = []
        last = -1
        for a, b in self._cut(box[self.dim]):
            source = self.order[a // self._block]
            if source < last or not parts:
                parts.append([])
            parts[-1].append((a, b))
            last = source
        return tuple((*box[: self.dim], lay.as_runs(part), *box[self.dim + 1 :]) for part in parts)

    def along(self, dim: int) -> Window | Reordering:
        """What it does along one dim."""
        shape = (self.source_shape[dim],)
        return Reordering(shape, 0, self.order) if dim == self.dim else Window(shape, shape, (0,))

    def changes(self, dim: int) -> bool:
        """Whether an index of this dim is another one in the target."""
        return dim == self.dim

    @property
    def _block(self) -> int:
        return max(1, self.source_shape[self.dim] // len(self.order))

    def _cut(self, runs: lay.Runs) -> list[tuple[int, int]]:
        """Runs of the dim, cut at the edges of blocks."""
        size = self._block
        return [
            (max(a, block * size), min(b, (block + 1) * size))
            for a, b in runs
            for block in range(a // size, -(-b // size))
        ]

    def _mapped(self, index: tuple[lay.Runs, ...], blocks: Sequence[int]) -> tuple[lay.Runs, ...]:
        size = self._block
        cut = [(a, b, (blocks[a // size] - a // size) * size) for a, b in self._cut(index[self.dim])]
        moved = sorted((a + by, b + by) for a, b, by in cut)
        return (*index[: self.dim], lay.as_runs(moved), *index[self.dim + 1 :])


def _shifted(runs: lay.Runs, by: int) -> lay.Runs:
    return tuple([(a + by, b + by) for a, b in runs]) if by else runs


def _within(runs: lay.Runs, by: int, n: int) -> lay.Runs:
    """Indices moved by so many, without those that a dim of size n does not have."""
    moved = _shifted(runs, by)
    is_within = not moved or (moved[0][0] >= 0 and moved[-1][1] <= n)
    return moved if is_within else lay.intersect(moved, lay.everything(n))


@quickly_made
@dataclass(frozen=True, slots=True)
class Step:
    """A step from `src` to `dst` among ranks that differ along `axes` only (for TRANSFER: between two meshes).

    For WINDOW, `src` is the sharding of one tensor and `dst` that of another, which is its `window`. With `only`, (a
    dim, indices of it), the step moves that chunk alone.
    """

    kind: StepKind
    axes: tuple[Split, ...]
    src: Sharding
    dst: Sharding
    window: Window | Reordering | None = None
    only: tuple[int, lay.Runs] | None = None

    def held(self, shape: Sequence[int], rank: int) -> tuple[lay.Runs, ...]:
        """The global indices that the rank has before, dim by dim, of the source."""
        shape = self.window.source_shape if self.window else tuple(shape)
        return restricted(_runs(self.src, shape, rank), self.only)

    def wanted(self, shape: Sequence[int], rank: int) -> tuple[lay.Runs, ...]:
        """The global indices that the rank has after, dim by dim, of the target."""
        shape = self.window.target_shape if self.window else tuple(shape)
        return restricted(_runs(self.dst, shape, rank), self.only)

    def __str__(self) -> str:
        over = f"[{', '.join(map(str, self.axes))}]" if self.axes else ""
        return f"{self.kind.value}{over} {self.src} -> {self.dst}"

    def group(self, rank: int) -> tuple[int, ...]:
        """The ranks that communicate with this one in the step, itself among them, in order."""
        if self.kind is StepKind.TRANSFER:
            return tuple(sorted({*self.src.mesh.ranks, *self.dst.mesh.ranks}))
        return self.src.mesh.group(rank, axis_keys(self.axes))


@functools.lru_cache(maxsize=1 << 14)
def _runs(sharding: Sharding, shape: tuple[int, ...], rank: int) -> tuple[lay.Runs, ...]:
    """Kept: it is asked for every step, and several times for each."""
    return sharding.runs(shape, rank)


def restricted(index: tuple[lay.Runs, ...], only: tuple[int, lay.Runs] | None) -> tuple[lay.Runs, ...]:
    """A box of indices without those outside a chunk of one dim."""
    if only is None:
        return index
    dim, runs = only
    return (*index[:dim], lay.intersect(index[dim], runs), *index[dim + 1 :])


def group_size(axes: Sequence[Split]) -> int:
    """How many ranks take part in a collective over these axes."""
    return math.prod([split.size or 1 for split in axes])


def is_even(src: Sharding, dst: Sharding, shape: Sequence[int]) -> bool:
    """Whether all ranks hold equally much, before as well as after."""
    layouts = zip((*src.dims, *dst.dims), (*shape, *shape), strict=True)
    return all(lay.is_even(layout, n) for layout, n in layouts)


def axis_keys(axes: Sequence[Split]) -> tuple[tuple[str, int, int], ...]:
    """Splits as (axis, pre, size), which is how meshes name sub-axes."""
    return tuple((s.axis, s.pre, s.size) for s in axes)  # type: ignore[misc]


def wire_elements(step: Step, shape: Sequence[int], rank: int) -> float:
    """Elements that the rank sends, collectives counted as rings over n ranks.

    All-reduce: 2 (n - 1) / n of its tensor. All-gather: its block to n - 1 peers. Reduce-scatter: all but its own part.
    All else: what leaves the rank. This is exact for uneven blocks, too.
    """
    n = group_size(step.axes)
    if step.kind is StepKind.SLICE or (n == 1 and step.kind is not StepKind.TRANSFER):
        return 0.0
    if step.kind is StepKind.ALL_REDUCE:
        return 2.0 * (n - 1) / n * box_numel(step.held(shape, rank))
    if step.kind is StepKind.REDUCE_SCATTER:
        kept = box_numel(step.wanted(shape, rank))
        return float(box_numel(step.held(shape, rank)) - kept)
    if step.kind is StepKind.ALL_GATHER:
        return float((n - 1) * box_numel(step.held(shape, rank)))
    return float(sum(p.numel for p in rank_pieces(step, tuple(shape), rank) if p.source == rank != p.target))


def mean_wire_elements(step: Step, shape: Sequence[int]) -> float:
    """The mean of `wire_elements` over the ranks of the source.

    Worked out without asking each rank, as a mesh may have thousands: what leaves some ranks is what reaches others,
    and the ranks' parts of a dim add up to the dim.
    """
    n = group_size(step.axes)
    if step.kind in _FROM_HOLDERS:
        ranks, groups = _for_all(step, tuple(shape))
        return groups * sum(arriving(step, tuple(shape), rank) for rank in ranks) / step.src.mesh.size
    if step.kind is StepKind.SLICE or n == 1:
        return 0.0
    held = _mean_numel(step.src, shape, step.only)
    if step.kind is StepKind.ALL_REDUCE:
        return 2.0 * (n - 1) / n * held
    return held - _mean_numel(step.dst, shape, step.only) if step.kind is StepKind.REDUCE_SCATTER else (n - 1) * held


def _mean_numel(sharding: Sharding, shape: Sequence[int], only: tuple[int, lay.Runs] | None) -> float:
    index = restricted(tuple(map(lay.everything, shape)), only)
    return box_numel(index) / group_size(sharding.splits)


def _for_all(step: Step, shape: tuple[int, ...]) -> tuple[tuple[int, ...], int]:
    """(ranks, times): what reaches these ranks, so many times, is what reaches all; one group's where all are alike."""
    ranks = step.dst.mesh.ranks
    if step.kind is StepKind.TRANSFER or step.window is not None or not is_even(step.src, step.dst, shape):
        return ranks, 1
    group = step.group(ranks[0])
    return group, len(ranks) // len(group)


@functools.lru_cache(maxsize=4096)
def travels(step: Step, shape: tuple[int, ...]) -> bool:
    """Whether any element of a tensor of this global shape goes from one rank to another."""
    if step.kind in _IN_PIECES:
        return any(arriving(step, shape, rank) for rank in _for_all(step, shape)[0])
    return step.kind is not StepKind.SLICE


def arriving(step: Step, shape: tuple[int, ...], rank: int) -> int:
    """Elements that reach the rank from others, of a step in pieces: what it wants of the source and does not have."""
    if step.window is None and step.only is None:
        there = _in_both(step.src, step.dst, shape, rank) if rank in step.src.mesh else 0
        return _in_both(step.dst, step.dst, shape, rank) - there
    wanted = step.wanted(shape, rank)
    if step.window is not None:
        wanted = _common(wanted, step.window.to_target(tuple(map(lay.everything, step.window.source_shape))))
    held = step.held(shape, rank) if rank in step.src.mesh else tuple(() for _ in wanted)
    return lacking_numel(step.window.to_target(held) if step.window else held, wanted)


def _in_both(a: Sharding, b: Sharding, shape: tuple[int, ...], rank: int) -> int:
    """The number of elements that a rank has in both shardings."""
    rows = zip(a.dims, b.dims, shape, strict=True)
    return math.prod([
        lay.shared(x, lay.digits(x, a.mesh, rank), y, lay.digits(y, b.mesh, rank), n) for x, y, n in rows
    ])  # fmt: skip


def box_numel(index: Sequence[lay.Runs]) -> int:
    """The number of elements in a box of indices."""
    return math.prod(map(lay.count, index))


def lacking_numel(held: Sequence[lay.Runs], wanted: Sequence[lay.Runs]) -> int:
    """How many elements of the box `wanted` are not in the box `held`."""
    return box_numel(wanted) - box_numel(_common(held, wanted))


def _common(a: Sequence[lay.Runs], b: Sequence[lay.Runs]) -> tuple[lay.Runs, ...]:
    return tuple(map(lay.intersect, a, b))


# So many ranks stand for all of a mesh in what a plan is priced by.
_SAMPLE = 16


def sampled_ranks(mesh: DeviceMesh) -> tuple[int, ...]:
    """Up to some tens of ranks, evenly spread over the mesh: prices are means over these."""
    return mesh.ranks[:: max(1, mesh.size // _SAMPLE)]


@functools.lru_cache(maxsize=1 << 12)
def sampled_digits(layout: Layout, mesh: DeviceMesh) -> tuple[tuple[int, ...], ...]:
    """For each sampled rank its coordinate along each bound split."""
    return tuple([lay.digits(layout, mesh, rank) for rank in sampled_ranks(mesh)])


@dataclass(frozen=True, slots=True)
class Piece:
    """Elements that go from one rank to another: a box of index runs, one per dim."""

    source: int
    target: int
    box: tuple[lay.Runs, ...]

    @property
    def numel(self) -> int:
        return math.prod(lay.count(part) for part in self.box)


# What is held, in the target's indices, and the ranks that have it.
_Holder = tuple[tuple[lay.Runs, ...], list[int]]


@functools.lru_cache(maxsize=4096)
def pieces(step: Step, shape: tuple[int, ...], group: tuple[int, ...]) -> tuple[Piece, ...]:
    """Every piece of a step within a group, so that each rank gets exactly its new shard, each element from one holder.

    A rank keeps what it has. The rest comes from the replica nearest in mesh coordinates; equally near ones take turns.
    """
    return tuple(_group_pieces(step, shape, group))


@functools.lru_cache(maxsize=4096)
def rank_pieces(step: Step, shape: tuple[int, ...], rank: int) -> tuple[Piece, ...]:
    """The pieces that this rank sends, receives or keeps."""
    found = _group_pieces(step, shape, step.group(rank), rank)
    return tuple(p for p in found if rank in (p.source, p.target))


def _group_pieces(
    step: Step, shape: tuple[int, ...], group: Sequence[int], about: int | None = None
) -> Iterator[Piece]:
    """All pieces of a group; with `about`, at least those that concern this rank."""
    sources, targets = _ends(step, group)
    holders: dict[tuple[lay.Runs, ...], list[int]] = {}
    for rank in sources:
        held = step.held(shape, rank)
        holders.setdefault(step.window.to_target(held) if step.window else held, []).append(rank)
    from_it = [(held, ranks) for held, ranks in holders.items() if about in ranks]
    sharing = _sharing(list(holders.items()))
    for place, target in enumerate(targets):
        wanted = step.wanted(shape, target)
        for held, ranks in sharing(wanted) if about in (None, target) else from_it:
            box = _common(held, wanted)
            if all(box):
                source = _nearest(step.src.mesh, ranks, target, place)
                parts = step.window.in_order(box) if step.window else (box,)
                yield from (Piece(source, target, part) for part in parts)


def _sharing(holders: list[_Holder]) -> Callable[[tuple[lay.Runs, ...]], list[_Holder]]:
    """The holders that may have elements of a box, judged by the dim that tells most of them apart."""
    if not holders or not holders[0][0]:
        return lambda wanted: holders
    boxes = [held for held, _ in holders]
    parts = [[*dict.fromkeys(along)] for along in zip(*boxes, strict=True)]
    dim = max(range(len(parts)), key=lambda d: len(parts[d]))
    with_part: dict[lay.Runs, list[int]] = {}
    for place, held in enumerate(boxes):
        with_part.setdefault(held[dim], []).append(place)
    index = lay.Parts(parts[dim])

    def sharing(wanted: tuple[lay.Runs, ...]) -> list[_Holder]:
        found = [with_part[parts[dim][part]] for part in index.sharing(wanted[dim])]
        return [holders[place] for place in sorted(itertools.chain.from_iterable(found))]

    return sharing


def _ends(step: Step, group: Sequence[int]) -> tuple[Sequence[int], Sequence[int]]:
    """The ranks that send, and those that receive, each in the order of its mesh."""
    return (step.src.mesh.ranks, step.dst.mesh.ranks) if step.kind is StepKind.TRANSFER else (group, group)


def _nearest(mesh: DeviceMesh, ranks: Sequence[int], target: int, place: int) -> int:
    """The rank itself if it is a holder, else the holder nearest to it in coordinates; equal ones take turns."""
    if len(ranks) == 1 or target in ranks:
        return ranks[0] if len(ranks) == 1 else target
    if target not in mesh:
        return ranks[place % len(ranks)]
    here = mesh.coordinate(target)
    shared = [sum(a == b for a, b in zip(mesh.coordinate(r), here, strict=True)) for r in ranks]
    best = [r for r, n in zip(ranks, shared, strict=True) if n == max(shared)]
    return best[place % len(best)]
