"""One step of a reshard, and what it puts on the wire."""

from __future__ import annotations

import enum
import functools
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from ..mesh import DeviceMesh
from ..sharding import layout as lay
from ..sharding.layout import Split
from ..sharding.value import Sharding


class MoveKind(enum.Enum):
    """What a step does. Only SLICE is free."""

    SLICE = "slice"
    ALL_REDUCE = "all-reduce"
    REDUCE_SCATTER = "reduce-scatter"
    ALL_GATHER = "all-gather"
    ALL_TO_ALL = "all-to-all"
    EXCHANGE = "permute"
    TRANSFER = "send-recv"
    WINDOW = "window"

    # Enum's own is written in Python, and kinds are in the keys of what is looked up for every move.
    __hash__ = object.__hash__


# Of pieces that each rank's lack tells; a rank may lack nothing.
_IN_PIECES = (MoveKind.EXCHANGE, MoveKind.WINDOW, MoveKind.TRANSFER)
# Of pieces, each from one that has it.
_FROM_HOLDERS = (*_IN_PIECES, MoveKind.ALL_TO_ALL)


@dataclass(frozen=True, slots=True)
class Window:
    """How the indices of two tensors correspond: target index i is source index i + offset, dim by dim.

    Target elements without a source are `fill`, a Python number or (as text) a scalar of the program.
    """

    source_shape: tuple[int, ...]
    target_shape: tuple[int, ...]
    offsets: tuple[int, ...]
    fill: str = "0"

    def to_target(self, index: tuple[lay.Runs, ...]) -> tuple[lay.Runs, ...]:
        """Source indices as target indices; those outside the target left out."""
        pairs = zip(index, self.offsets, self.target_shape, strict=True)
        return tuple(lay.intersect(_shifted(runs, -offset), lay.everything(n)) for runs, offset, n in pairs)

    def to_source(self, index: tuple[lay.Runs, ...]) -> tuple[lay.Runs, ...]:
        """Target indices that have a source, as source indices."""
        return tuple(_shifted(runs, offset) for runs, offset in zip(index, self.offsets, strict=True))

    def in_order(self, box: tuple[lay.Runs, ...]) -> tuple[tuple[lay.Runs, ...], ...]:
        """A box of target indices in parts whose elements stand in one order in both tensors."""
        return (box,)

    def changes(self, dim: int) -> bool:
        """Whether indices of this dim are others in the target."""
        return self.offsets[dim] != 0 or self.source_shape[dim] != self.target_shape[dim]


@dataclass(frozen=True, slots=True)
class Reordering:
    """How the indices of two tensors of one shape correspond: block i of the target's dim is block order[i] of the
    source's, all blocks of one size.
    """

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
        """A box of target indices in parts whose elements stand in one order in both tensors."""
        parts: list[list[tuple[int, int]]] = []
        last = -1
        for a, b in self._cut(box[self.dim]):
            source = self.order[a // self._block]
            if source < last or not parts:
                parts.append([])
            parts[-1].append((a, b))
            last = source
        return tuple((*box[: self.dim], lay.as_runs(part), *box[self.dim + 1 :]) for part in parts)

    def changes(self, dim: int) -> bool:
        """Whether indices of this dim are others in the target."""
        return dim == self.dim

    @property
    def _block(self) -> int:
        return max(1, self.source_shape[self.dim] // len(self.order))

    def _cut(self, runs: lay.Runs) -> list[tuple[int, int]]:
        """Runs of the dim, none of them over the edge of a block."""
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
    return tuple((a + by, b + by) for a, b in runs)


@dataclass(frozen=True, slots=True)
class Move:
    """A step from `src` to `dst` among the ranks that differ along `axes` only (TRANSFER: between two meshes).

    WINDOW: `src` is the sharding of one tensor and `dst` that of another, whose indices correspond by `window`.
    `only` (a dim, and indices of it) leaves out all elements but those of a chunk.
    """

    kind: MoveKind
    axes: tuple[Split, ...]
    src: Sharding
    dst: Sharding
    window: Window | Reordering | None = None
    only: tuple[int, lay.Runs] | None = None

    def held(self, shape: Sequence[int], rank: int) -> tuple[lay.Runs, ...]:
        """What the rank has, in the source's indices."""
        shape = self.window.source_shape if self.window else tuple(shape)
        return restricted(_runs(self.src, shape, rank), self.only)

    def wanted(self, shape: Sequence[int], rank: int) -> tuple[lay.Runs, ...]:
        """What the rank gets, in the target's indices."""
        shape = self.window.target_shape if self.window else tuple(shape)
        return restricted(_runs(self.dst, shape, rank), self.only)

    def __str__(self) -> str:
        over = f"[{', '.join(map(str, self.axes))}]" if self.axes else ""
        return f"{self.kind.value}{over} {self.src} -> {self.dst}"

    def group(self, rank: int) -> tuple[int, ...]:
        """The ranks that take part together with this one, in order."""
        if self.kind is MoveKind.TRANSFER:
            return tuple(sorted({*self.src.mesh.ranks, *self.dst.mesh.ranks}))
        return self.src.mesh.group(rank, axis_keys(self.axes))


@functools.lru_cache(maxsize=1 << 14)
def _runs(sharding: Sharding, shape: tuple[int, ...], rank: int) -> tuple[lay.Runs, ...]:
    """What a rank has of a tensor: asked of all moves, and several times of each."""
    return sharding.runs(shape, rank)


def restricted(index: tuple[lay.Runs, ...], only: tuple[int, lay.Runs] | None) -> tuple[lay.Runs, ...]:
    """The indices of a box that are in a chunk of one dim."""
    if only is None:
        return index
    dim, runs = only
    return (*index[:dim], lay.intersect(index[dim], runs), *index[dim + 1 :])


def group_size(axes: Sequence[Split]) -> int:
    """How many ranks take part in a collective over these axes."""
    return math.prod([split.size or 1 for split in axes])


def is_even(src: Sharding, dst: Sharding, shape: Sequence[int]) -> bool:
    """True where all ranks hold as much, before and after."""
    layouts = zip((*src.dims, *dst.dims), (*shape, *shape), strict=True)
    return all(n % lay.extent(layout) == 0 for layout, n in layouts)


def axis_keys(axes: Sequence[Split]) -> tuple[tuple[str, int, int], ...]:
    """Splits as (axis, pre, size), as meshes name sub-axes."""
    return tuple((s.axis, s.pre, s.size) for s in axes)  # type: ignore[misc]


def wire_elements(move: Move, shape: Sequence[int], rank: int) -> float:
    """Elements that the rank puts on the wire, collectives counted as rings.

    All-reduce 2(n-1)/n of its tensor, all-gather its block to n-1 peers, reduce-scatter all but its own part,
    otherwise what leaves; exact for uneven blocks, and (n-1)/n of the whole tensor for even ones.
    """
    n = group_size(move.axes)
    if move.kind is MoveKind.SLICE or (n == 1 and move.kind is not MoveKind.TRANSFER):
        return 0.0
    if move.kind is MoveKind.ALL_REDUCE:
        return 2.0 * (n - 1) / n * box_numel(move.held(shape, rank))
    if move.kind is MoveKind.REDUCE_SCATTER:
        kept = box_numel(move.wanted(shape, rank))
        return float(box_numel(move.held(shape, rank)) - kept)
    if move.kind is MoveKind.ALL_GATHER:
        return float((n - 1) * box_numel(move.held(shape, rank)))
    return float(sum(p.numel for p in rank_pieces(move, tuple(shape), rank) if p.source == rank != p.target))


def mean_wire_elements(move: Move, shape: Sequence[int]) -> float:
    """The mean of `wire_elements` over the ranks of the source. What leaves ranks is what comes to others, and ranks'
    parts of a dim make up the dim: a mesh may be of thousands.
    """
    n = group_size(move.axes)
    if move.kind in _FROM_HOLDERS:
        ranks, groups = _for_all(move, tuple(shape))
        return groups * sum(arriving(move, tuple(shape), rank) for rank in ranks) / move.src.mesh.size
    if move.kind is MoveKind.SLICE or n == 1:
        return 0.0
    held = _mean_numel(move.src, shape, move.only)
    if move.kind is MoveKind.ALL_REDUCE:
        return 2.0 * (n - 1) / n * held
    return held - _mean_numel(move.dst, shape, move.only) if move.kind is MoveKind.REDUCE_SCATTER else (n - 1) * held


def _mean_numel(sharding: Sharding, shape: Sequence[int], only: tuple[int, lay.Runs] | None) -> float:
    index = restricted(tuple(map(lay.everything, shape)), only)
    return box_numel(index) / group_size(sharding.splits)


def _for_all(move: Move, shape: tuple[int, ...]) -> tuple[tuple[int, ...], int]:
    """Ranks that something comes to, and how many times as much comes to all: one group's where all are alike."""
    ranks = move.dst.mesh.ranks
    if move.kind is MoveKind.TRANSFER or move.window is not None or not is_even(move.src, move.dst, shape):
        return ranks, 1
    group = move.group(ranks[0])
    return group, len(ranks) // len(group)


@functools.lru_cache(maxsize=4096)
def travels(move: Move, shape: tuple[int, ...]) -> bool:
    """Whether anything of a tensor of this shape goes from rank to rank."""
    if move.kind in _IN_PIECES:
        return any(arriving(move, shape, rank) for rank in _for_all(move, shape)[0])
    return move.kind is not MoveKind.SLICE


def arriving(move: Move, shape: tuple[int, ...], rank: int) -> int:
    """Elements of a move in pieces that come to a rank from others: what it wants of the source but has not."""
    if move.window is None and move.only is None:
        there = _in_both(move.src, move.dst, shape, rank) if rank in move.src.mesh else 0
        return _in_both(move.dst, move.dst, shape, rank) - there
    wanted = move.wanted(shape, rank)
    if move.window is not None:
        wanted = _common(wanted, move.window.to_target(tuple(map(lay.everything, move.window.source_shape))))
    held = move.held(shape, rank) if rank in move.src.mesh else tuple(() for _ in wanted)
    return lacking_numel(move.window.to_target(held) if move.window else held, wanted)


def _in_both(a: Sharding, b: Sharding, shape: tuple[int, ...], rank: int) -> int:
    """Elements of a tensor that a rank has in one sharding as in the other."""
    rows = zip(a.dims, b.dims, shape, strict=True)
    return math.prod([
        lay.shared(x, lay.digits(x, a.mesh, rank), y, lay.digits(y, b.mesh, rank), n) for x, y, n in rows
    ])  # fmt: skip


def box_numel(index: Sequence[lay.Runs]) -> int:
    """Elements of a box of indices."""
    return math.prod(map(lay.count, index))


def lacking_numel(held: Sequence[lay.Runs], wanted: Sequence[lay.Runs]) -> int:
    """Elements of one box of indices that another has not."""
    return box_numel(wanted) - box_numel(_common(held, wanted))


def _common(a: Sequence[lay.Runs], b: Sequence[lay.Runs]) -> tuple[lay.Runs, ...]:
    return tuple(map(lay.intersect, a, b))


# So many ranks stand for all of a mesh in what a plan is priced by.
_SAMPLE = 16


def sampled_ranks(mesh: DeviceMesh) -> tuple[int, ...]:
    """Some ranks of a mesh, evenly spread; all of a small one."""
    return mesh.ranks[:: max(1, mesh.size // _SAMPLE)]


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
def pieces(move: Move, shape: tuple[int, ...], group: tuple[int, ...]) -> tuple[Piece, ...]:
    """Every piece of a move among the ranks of a group that gives each exactly the elements of its new shard, each from
    one holder.

    A rank keeps what it holds; the rest comes from the replica nearest to it in mesh coordinates, replicas of one
    shard being shared evenly among those who need it.
    """
    return tuple(_group_pieces(move, shape, group))


@functools.lru_cache(maxsize=4096)
def rank_pieces(move: Move, shape: tuple[int, ...], rank: int) -> tuple[Piece, ...]:
    """Those of the pieces that one rank sends, gets or keeps."""
    found = _group_pieces(move, shape, move.group(rank), rank)
    return tuple(p for p in found if rank in (p.source, p.target))


def _group_pieces(
    move: Move, shape: tuple[int, ...], group: Sequence[int], about: int | None = None
) -> Iterator[Piece]:
    """All, or at least those that are about one rank."""
    sources, targets = _ends(move, group)
    holders: dict[tuple[lay.Runs, ...], list[int]] = {}
    for rank in sources:
        held = move.held(shape, rank)
        holders.setdefault(move.window.to_target(held) if move.window else held, []).append(rank)
    from_it = [(held, ranks) for held, ranks in holders.items() if about in ranks]
    sharing = _sharing(list(holders.items()))
    for place, target in enumerate(targets):
        wanted = move.wanted(shape, target)
        for held, ranks in sharing(wanted) if about in (None, target) else from_it:
            box = _common(held, wanted)
            if all(box):
                source = _nearest(move.src.mesh, ranks, target, place)
                parts = move.window.in_order(box) if move.window else (box,)
                yield from (Piece(source, target, part) for part in parts)


def _sharing(holders: list[_Holder]) -> Callable[[tuple[lay.Runs, ...]], list[_Holder]]:
    """Those of the holders that may have something of a box, by the dim that most tells them apart."""
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


def _ends(move: Move, group: Sequence[int]) -> tuple[Sequence[int], Sequence[int]]:
    """The ranks that send, and those that get something, each in its mesh's order."""
    return (move.src.mesh.ranks, move.dst.mesh.ranks) if move.kind is MoveKind.TRANSFER else (group, group)


def _nearest(mesh: DeviceMesh, ranks: Sequence[int], target: int, place: int) -> int:
    """The rank itself, else the holder that shares most coordinates with it, taking turns among equals."""
    if len(ranks) == 1 or target in ranks:
        return ranks[0] if len(ranks) == 1 else target
    if target not in mesh:
        return ranks[place % len(ranks)]
    here = mesh.coordinate(target)
    shared = [sum(a == b for a, b in zip(mesh.coordinate(r), here, strict=True)) for r in ranks]
    best = [r for r, n in zip(ranks, shared, strict=True) if n == max(shared)]
    return best[place % len(best)]
