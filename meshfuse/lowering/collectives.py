"""Lowers one reshard on one rank: to its collective where blocks are equal, else to an exchange of exact pieces."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ..ops.values import TensorType
from ..reshard.steps import Piece, Step, StepKind, arriving, box_numel, pieces, rank_pieces
from ..sharding.layout import Runs
from .blocks import block_exchange_dims, gathered_dim, is_dense, local_box, local_shape
from .boxes import Box, box_text, whole_box
from .copies import (
    join,
    joined_text,
    joins_by_view,
    lies_in_blocks,
    own,
    pack_blocks,
    pack_boxes,
    put,
    unflatten,
    view_box,
)
from .instructions import (
    Allocate,
    Collective,
    CollectiveKind,
    Communication,
    Copy,
    Instruction,
    MessageKind,
    Reduce,
    SendRecv,
    Wait,
)


@dataclass(frozen=True, slots=True)
class ReshardContext:
    """A reshard as one rank sees it, with the names of its source and target.

    fresh: the source may be overwritten.
    is_fusable: the kernel that first reads the target can unpack it from the received buffer.
    placed: the target exists, as a dense part of a larger buffer (for a chunk of a loop).
    """

    rank: int
    step: Step
    type: TensorType
    source: str
    target: str
    about: Communication
    fresh: bool
    work: str
    is_fusable: bool = False
    placed: bool = False

    @property
    def group(self) -> tuple[int, ...]:
        return self.step.group(self.rank)

    @property
    def held(self) -> tuple[Runs, ...]:
        return self.step.held(self.type.shape, self.rank)

    @property
    def wanted(self) -> tuple[Runs, ...]:
        return self.step.wanted(self.type.shape, self.rank)

    @property
    def source_shape(self) -> tuple[int, ...]:
        return local_shape(self.held)

    @property
    def target_shape(self) -> tuple[int, ...]:
        return local_shape(self.wanted)

    @property
    def gathered_dim(self) -> int | None:
        """The dim along which the equal blocks of the ranks, in order, make the target; None if there is none."""
        return gathered_dim(self.step, self.type.shape, self.group, self.rank)

    @property
    def block_exchange_dims(self) -> tuple[int, int] | None:
        """For an all-to-all of equal blocks: the dims along which the source is cut and the target is joined.

        The rank's own block is sent as well, so that the received buffer is the target or can be read as the target.
        None where it would have to be copied again, and for all other steps.
        """
        dims = None if self.placed else block_exchange_dims(self.step, self.type.shape, self.group)
        return dims if dims is not None and (self.is_fusable or math.prod(self.target_shape[: dims[1]]) == 1) else None

    def source_box(self, box: Sequence[Runs]) -> Box:
        """The place of a box of global target indices in the local source."""
        window = self.step.window
        return local_box(self.held, window.to_source(tuple(box)) if window else box)

    def collective(
        self, kind: CollectiveKind, reads: Sequence[str], writes: Sequence[str], text: str, size: int
    ) -> Collective:
        payload = (size, self.type.dtype.value)
        return Collective(self.work, self.group, kind, tuple(reads), tuple(writes), text, self.about, payload)


def lower_reshard(c: ReshardContext) -> list[Instruction]:
    """The instructions of a reshard on this rank."""
    kind = c.step.kind
    if kind is StepKind.TRANSFER:
        return _transfer(c)
    if kind is StepKind.WINDOW:
        return _exchange(c)
    if kind is StepKind.SLICE or len(c.group) == 1:
        return [view_box(c.target, c.source, local_box(c.held, c.wanted), c.source_shape)]
    if c.step.only is not None and kind is not StepKind.ALL_REDUCE and (found := _simple(c)) is not None:
        return found
    if kind is StepKind.ALL_REDUCE:
        return _all_reduce(c)
    if kind is StepKind.REDUCE_SCATTER:
        return _reduce_scatter(c)
    if kind is StepKind.ALL_GATHER and (dim := c.gathered_dim) is not None:
        return _all_gather(c, dim)
    if (dims := c.block_exchange_dims) is not None:
        return _exchange_blocks(c, *dims)
    return _exchange(c)


def _simple(c: ReshardContext) -> list[Instruction] | None:
    """The instructions if no rank of the group has a part of a chunk, or one rank has all of it; else None."""
    if not any(box_numel(c.step.wanted(c.type.shape, rank)) for rank in c.group):
        return _make_target(c)
    if c.step.kind is StepKind.REDUCE_SCATTER:
        return None
    owners = [rank for rank in c.group if box_numel(c.step.held(c.type.shape, rank))]
    if len(owners) > 1 or any(c.step.wanted(c.type.shape, r) != c.step.held(c.type.shape, owners[0]) for r in c.group):
        return None
    return _broadcast(c, c.group.index(owners[0]))


def _make_target(c: ReshardContext) -> list[Instruction]:
    """New memory for the target, filled where a window reaches beyond its source."""
    fill = c.step.window.fill if c.step.window else ""
    return [] if c.placed else [Allocate(c.target, c.target_shape, c.type.dtype, fill)]


def _broadcast(c: ReshardContext, root: int) -> list[Instruction]:
    mine = c.group[root] == c.rank
    copy = [put(c.target, whole_box(c.target_shape), c.target_shape, c.source)] if mine else []
    reads, writes = ([c.target], []) if mine else ([], [c.target])
    text = f"broadcast({c.target}, {root})"
    call = c.collective("broadcast", reads, writes, text, math.prod(c.target_shape))
    return [*_make_target(c), *copy, call, Wait(c.work)]


def _all_reduce(c: ReshardContext) -> list[Instruction]:
    reduce = c.step.src.reduce
    size = math.prod(c.source_shape)
    call = c.collective("all_reduce", [c.target], [c.target], f"all_reduce({c.target}, {reduce!r})", size)
    if not c.placed:
        first: list[Instruction] = [own(c.target, c.source, c.fresh)]
    else:
        is_there = c.source == c.target
        first = [] if is_there else [put(c.target, whole_box(c.source_shape), c.source_shape, c.source)]
    return [*first, call, Wait(c.work)]


def _all_gather(c: ReshardContext, dim: int) -> list[Instruction]:
    flat, mine, size = f"{c.target}_flat", f"{c.target}_mine", math.prod(c.source_shape)
    n = len(c.group)

    def gather(out: str) -> Collective:
        return c.collective("all_gather", [mine], [out], f"all_gather({out}, {mine})", size)

    if c.placed and joins_by_view(c.source_shape, dim):  # Blocks come one behind the other: straight into the part.
        return [_packed(c, mine), gather(c.target), Wait(c.work)]
    buffer = Allocate(flat, (size * n,), c.type.dtype)
    if c.placed:
        text = joined_text(n, c.source_shape, dim)
        last: Instruction = put(c.target, whole_box(c.target_shape), c.target_shape, flat, text)
    else:
        last = join(c.target, flat, n, c.source_shape, dim)
    return [_packed(c, mine), buffer, gather(flat), Wait(c.work), last]


def _packed(c: ReshardContext, name: str) -> Copy:
    """The source in one piece."""
    return pack_boxes(name, c.source, (whole_box(c.source_shape),), c.source_shape)


@dataclass(frozen=True, slots=True)
class Traffic:
    """The boxes of global indices that this rank sends to and receives from each peer of the group, and those it keeps.

    `any`: some rank of the group sends something.
    """

    sent: tuple[tuple[tuple[Runs, ...], ...], ...]
    received: tuple[tuple[tuple[Runs, ...], ...], ...]
    kept: tuple[tuple[Runs, ...], ...]
    any: bool

    @classmethod
    def of(cls, mine: Sequence[Piece], rank: int, group: Sequence[int], some: bool) -> Traffic:
        """From the pieces that this rank sends, receives or keeps."""
        sent, received = ({r: list[tuple[Runs, ...]]() for r in group} for _ in range(2))
        for p in mine:
            if p.source == rank != p.target:
                sent[p.target].append(p.box)
            elif p.target == rank != p.source:
                received[p.source].append(p.box)
        kept = tuple(p.box for p in mine if p.source == p.target)
        return cls(tuple(map(tuple, sent.values())), tuple(map(tuple, received.values())), kept, some)


def numel(boxes: Sequence[Sequence[Runs]]) -> int:
    """The number of elements in some boxes."""
    return sum(map(box_numel, boxes))


def _exchange_blocks(c: ReshardContext, cut: int, joined: int) -> list[Instruction]:
    """An all-to-all of equal blocks, including the rank's own; the target is a view or one copy of what is received."""
    n, block = len(c.group), sent_block(c, cut)
    sizes = [math.prod(block)] * n
    if lies_in_blocks(c.source_shape, cut):
        pack = _packed(c, _sent(c))
    else:
        pack = pack_blocks(_sent(c), c.source, n, c.source_shape, cut)
    issued = _sent_to_all(c, pack, sizes, sizes)
    return [*issued, Wait(c.work), join(c.target, _flat(c), n, block, joined)]


def sent_block(c: ReshardContext, cut: int) -> tuple[int, ...]:
    """The shape of the blocks that the source is cut into along a dim."""
    return tuple(size // len(c.group) if d == cut else size for d, size in enumerate(c.source_shape))


def sent_part(c: ReshardContext, cut: int, place: int) -> str:
    """Python text that takes the block of the source for one rank of the group."""
    size = sent_block(c, cut)[cut]
    mine = ((place * size, (place + 1) * size),)
    box = tuple(mine if d == cut else ((0, n),) for d, n in enumerate(c.source_shape))
    return box_text(box, c.source_shape)


def _all_to_all(c: ReshardContext, boxes: Sequence[Box], sent: Sequence[int], got: Sequence[int]) -> list[Instruction]:
    """Send boxes of the source to the peers and receive theirs in `_flat`; `sent` and `got` count elements per peer."""
    return _sent_to_all(c, pack_boxes(_sent(c), c.source, tuple(boxes), c.source_shape), sent, got)


def _sent_to_all(c: ReshardContext, pack: Copy, sent: Sequence[int], got: Sequence[int]) -> list[Instruction]:
    packed, flat = pack.target, _flat(c)
    text = f"all_to_all({flat}, {packed}, {[*got]}, {[*sent]})"
    return [
        pack,
        Allocate(flat, (sum(got),), c.type.dtype),
        c.collective("all_to_all", [packed], [flat], text, sum(sent)),
    ]


def _sent(c: ReshardContext) -> str:
    """The name of the buffer that is sent."""
    return f"{c.target}_sent"


def _flat(c: ReshardContext) -> str:
    """The name of the receive buffer, in the order of the peers."""
    return f"{c.target}_flat"


def _issue(c: ReshardContext, traffic: Traffic) -> list[Instruction]:
    """One all-to-all of exact pieces."""
    boxes = [c.source_box(box) for peer in traffic.sent for box in peer]
    return _all_to_all(c, boxes, [*map(numel, traffic.sent)], [*map(numel, traffic.received)])


def _swap(c: ReshardContext, traffic: Traffic) -> list[Instruction]:
    """One all-to-all of exact pieces, and the copies to their places."""
    received = [box for peer in traffic.received for box in peer]
    return [
        *_issue(c, traffic),
        *begun(c, traffic.kept, arrives=_is_target(c, received)),
        Wait(c.work),
        *_unpack(c, _flat(c), received),
    ]


def begun(c: ReshardContext, kept: Sequence[Sequence[Runs]], arrives: bool = False) -> list[Instruction]:
    """The memory of the target with what the rank keeps; nothing if the received buffer is the target."""
    copies = [
        put(c.target, local_box(c.wanted, box), c.target_shape, c.source,
            box_text(c.source_box(box), c.source_shape))
        for box in kept
    ]  # fmt: skip
    return [*([] if arrives else _make_target(c)), *copies]


def _unpack(c: ReshardContext, flat: str, boxes: Sequence[Sequence[Runs]]) -> list[Instruction]:
    """Copy the boxes in a flat buffer to their places; a view if the buffer is the target."""
    if _is_target(c, boxes):
        return [unflatten(c.target, flat, 0, numel(boxes), c.target_shape)]
    return [put_flat(c, flat, start, box) for start, box in zip(starts(boxes), boxes, strict=False)]


def put_flat(c: ReshardContext, flat: str, start: int, box: Sequence[Runs]) -> Copy:
    """Copy a box, which begins at `start` in a flat buffer, to its place."""
    shape = list(local_shape(box))
    part = f"[{start}:{start + math.prod(shape)}].view({shape})"
    return put(c.target, local_box(c.wanted, box), c.target_shape, flat, part)


def _is_target(c: ReshardContext, boxes: Sequence[Sequence[Runs]]) -> bool:
    """Whether these boxes, one after the other, are the whole target in memory order, and it is still to be made."""
    if c.placed or not boxes or numel(boxes) != math.prod(c.target_shape):
        return False
    places = [local_box(c.wanted, box) for box in boxes]
    return all(
        is_dense(place, c.target_shape) and _first(place, c.target_shape) == start
        for start, place in zip(starts(boxes), places, strict=False)
    )


def starts(boxes: Sequence[Sequence[Runs]]) -> Iterator[int]:
    """Where each box begins in a flat buffer, and where the last one ends."""
    return itertools.accumulate((box_numel(box) for box in boxes), initial=0)


def _first(box: Box, shape: Sequence[int]) -> int:
    """The place of a box's first element in the memory of a contiguous tensor of this shape."""
    return functools.reduce(lambda place, dim: place * dim[1] + dim[0][0][0], zip(box, shape, strict=True), 0)


def _reduce_scatter(c: ReshardContext) -> list[Instruction]:
    """An all-to-all that sends each rank the terms of its part, and their reduction."""
    if _in_rows(c):
        return _scatter_rows(c)
    return [*_issue(c, scattered(c)), Wait(c.work), *_folded(c, len(c.group) - 1, own_term(c))]


def own_term(c: ReshardContext) -> str:
    """Python text that takes the rank's own term of its part from the source."""
    return box_text(local_box(c.held, c.wanted), c.source_shape)


def _folded(c: ReshardContext, terms: int, own: str | None = None) -> list[Instruction]:
    """Reduce the received terms and the rank's own to the target."""
    made = f"{c.target}_new" if c.placed else c.target
    mine = (c.source, own) if own is not None else ("", "")
    fold = Reduce(made, _flat(c), terms, c.target_shape, c.step.src.reduce, *mine)
    return [fold, put(c.target, whole_box(c.target_shape), c.target_shape, made)] if c.placed else [fold]


def _in_rows(c: ReshardContext) -> bool:
    """Whether the ranks' parts are, in order, equal slices of the outermost dim: then the tensor is sent as it lies."""
    parts = [local_box(c.held, c.step.wanted(c.type.shape, rank)) for rank in c.group]
    rows = c.source_shape[0] // len(c.group) if c.source_shape else 0
    rest = whole_box(c.source_shape[1:])
    return all(part == (((i * rows, (i + 1) * rows),), *rest) for i, part in enumerate(parts)) and rows > 0


def _scatter_rows(c: ReshardContext) -> list[Instruction]:
    sizes = [math.prod(c.target_shape)] * len(c.group)
    issued = _all_to_all(c, [whole_box(c.source_shape)], sizes, sizes)
    return [*issued, Wait(c.work), *_folded(c, len(c.group))]


def _exchange(c: ReshardContext) -> list[Instruction]:
    traffic = exchanged(c)
    return _swap(c, traffic) if traffic.any else _stay(c, traffic.kept)


def exchanged(c: ReshardContext) -> Traffic:
    """The communication that an exchange of exact pieces is."""
    some = any(arriving(c.step, c.type.shape, rank) for rank in c.group)
    return Traffic.of(rank_pieces(c.step, c.type.shape, c.rank), c.rank, c.group, some)


def scattered(c: ReshardContext) -> Traffic:
    """The communication that a reduce-scatter by an exchange is: each rank gets a term from every other."""
    wanted = {rank: c.step.wanted(c.type.shape, rank) for rank in c.group}
    sent = [Piece(c.rank, rank, box) for rank, box in wanted.items() if all(box)]
    received = [Piece(rank, c.rank, wanted[c.rank]) for rank in c.group if rank != c.rank and all(wanted[c.rank])]
    return Traffic.of([*sent, *received], c.rank, c.group, len(c.group) > 1 and any(map(all, wanted.values())))


def _stay(c: ReshardContext, kept: Sequence[Sequence[Runs]]) -> list[Instruction]:
    """The target, if each rank of the group already has all of its part."""
    if list(kept) == [c.wanted] and not c.placed:
        return [view_box(c.target, c.source, c.source_box(c.wanted), c.source_shape)]
    return begun(c, kept)


def _transfer(c: ReshardContext) -> list[Instruction]:
    """Messages between the ranks of two meshes, all issued before the first wait.

    Messages are ordered by sender, then receiver, so that all ranks have the same order.
    """
    group, shape = c.group, c.type.shape
    members = _talking(pieces(c.step, shape, group))
    traffic = Traffic.of(rank_pieces(c.step, shape, c.rank), c.rank, group, bool(members))
    held = c.held if c.rank in c.step.src.mesh else ()
    issued: list[tuple[tuple[int, int], list[Instruction]]] = []
    waits: list[Instruction] = []
    for peer, boxes in zip(group, traffic.sent, strict=True):
        if boxes:
            name = f"{c.target}_to_{peer}"
            pack = pack_boxes(name, c.source, tuple(local_box(held, box) for box in boxes), c.source_shape)
            issued.append(((c.rank, peer), [pack, _message(c, members, "send", peer, name, numel(boxes))]))
            waits.append(Wait(f"{name}_work"))
    for peer, boxes in zip(group, traffic.received, strict=True):
        if boxes:
            name = f"{c.target}_from_{peer}"
            buffer = Allocate(name, (numel(boxes),), c.type.dtype)
            issued.append(((peer, c.rank), [buffer, _message(c, members, "recv", peer, name, numel(boxes))]))
            waits += [Wait(f"{name}_work"), *_unpack(c, name, boxes)]
    there: list[Instruction] = []
    if c.rank in c.step.dst.mesh:
        arrives = any(_is_target(c, boxes) for boxes in traffic.received)
        there = begun(c, traffic.kept, arrives)
    messages = [ins for _, part in sorted(issued, key=lambda entry: entry[0]) for ins in part]
    return [*messages, *there, *waits]


def _talking(moved: Sequence[Piece]) -> tuple[int, ...]:
    """The ranks that send or receive something.

    A group connects when all of its ranks reach their first message, so it must have no other ranks.
    """
    return tuple(sorted({rank for p in moved if p.source != p.target for rank in (p.source, p.target)}))


def _message(
    c: ReshardContext, members: tuple[int, ...], kind: MessageKind, peer: int, name: str, size: int
) -> SendRecv:
    return SendRecv(f"{name}_work", members, kind, peer, name, c.about, (size, c.type.dtype.value))
