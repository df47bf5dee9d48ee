"""One move on one rank, as instructions: the named collective where the blocks fit, exact pieces otherwise."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from ..ops.base import TensorType
from ..resharding.moves import Move, MoveKind, Piece, pieces
from ..sharding import layout as lay
from ..sharding.layout import Runs
from .instructions import (
    Allocate,
    Box,
    Collective,
    Communication,
    Fold,
    Instruction,
    Join,
    Own,
    Pack,
    Put,
    SendRecv,
    View,
    Wait,
    box_text,
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class MoveContext:
    """A move as one rank sees it: the names of what it reads and makes, and whether it may write to what it reads."""

    rank: int
    move: Move
    type: TensorType
    source: str
    target: str
    about: Communication
    fresh: bool
    work: str

    @property
    def group(self) -> tuple[int, ...]:
        return self.move.group(self.rank)

    @property
    def held(self) -> tuple[Runs, ...]:
        return self.move.held(self.type.shape, self.rank)

    @property
    def wanted(self) -> tuple[Runs, ...]:
        return self.move.wanted(self.type.shape, self.rank)

    @property
    def source_shape(self) -> tuple[int, ...]:
        return tuple(map(lay.count, self.held))

    @property
    def target_shape(self) -> tuple[int, ...]:
        return tuple(map(lay.count, self.wanted))

    def source_box(self, box: Sequence[Runs]) -> Box:
        """Where a box of the target's global indices stands in the local source."""
        window = self.move.window
        return local_box(self.held, window.to_source(tuple(box)) if window else box)

    def collective(self, kind: str, reads: Sequence[str], writes: Sequence[str], text: str, count: int) -> Collective:
        payload = (count, self.type.dtype.value)
        return Collective(self.work, self.group, kind, tuple(reads), tuple(writes), text, self.about, payload)


def lower_move(c: MoveContext) -> list[Instruction]:
    """The instructions of a move on its rank."""
    kind = c.move.kind
    if kind is MoveKind.TRANSFER:
        return _transfer(c)
    if kind is MoveKind.WINDOW:
        return _exchange(c)
    if kind is MoveKind.SLICE or len(c.group) == 1:
        return [View(c.target, c.source, local_box(c.held, c.wanted), c.source_shape)]
    if kind is MoveKind.ALL_REDUCE:
        return _all_reduce(c)
    if kind is MoveKind.REDUCE_SCATTER:
        return _reduce_scatter(c)
    if kind is MoveKind.ALL_GATHER and (dim := joined_dim(c)) is not None:
        return _all_gather(c, dim)
    return _exchange(c)


def local_box(held: Sequence[Runs], part: Sequence[Runs]) -> Box:
    """Where a box of global indices stands in a local tensor that holds `held`."""
    return tuple(lay.positions(lay.intersect(p, h), h) for h, p in zip(held, part, strict=True))


def _all_reduce(c: MoveContext) -> list[Instruction]:
    reduce = c.move.src.reduce
    count = math.prod(c.source_shape)
    call = c.collective("all_reduce", [c.target], [c.target], f"all_reduce({c.target}, {reduce!r})", count)
    return [Own(c.target, c.source, c.fresh), call, Wait(c.work)]


def joined_dim(c: MoveContext) -> int | None:
    """The dim along which the equal blocks of the group, in order, make up the gathered tensor; None if none does."""
    shapes = {c.move.src.local_shape(c.type.shape, rank) for rank in c.group}
    if len(shapes) != 1 or not math.prod(next(iter(shapes))):
        return None
    boxes = [local_box(c.wanted, c.move.src.runs(c.type.shape, rank)) for rank in c.group]
    changed = [d for d in range(len(c.target_shape)) if len({box[d] for box in boxes}) > 1]
    if len(changed) != 1:
        return None
    (dim,) = changed
    size = c.source_shape[dim]
    in_order = all(box[dim] == ((i * size, (i + 1) * size),) for i, box in enumerate(boxes))
    return dim if in_order else None


def _all_gather(c: MoveContext, dim: int) -> list[Instruction]:
    flat, mine, count = f"{c.target}_flat", f"{c.target}_mine", math.prod(c.source_shape)
    call = c.collective("all_gather", [mine], [flat], f"all_gather({flat}, {mine})", count)
    return [
        Own(mine, c.source, True),
        Allocate(flat, (count * len(c.group),), c.type.dtype),
        call,
        Wait(c.work),
        Join(c.target, flat, len(c.group), c.source_shape, dim),
    ]  # fmt: skip


@dataclass(frozen=True, slots=True)
class _Traffic:
    """Per peer of the group, the boxes that this rank sends and gets (in global indices), and those it keeps."""

    sent: tuple[tuple[tuple[Runs, ...], ...], ...]
    received: tuple[tuple[tuple[Runs, ...], ...], ...]
    kept: tuple[tuple[Runs, ...], ...]

    @classmethod
    def of(cls, found: Sequence[Piece], rank: int, group: Sequence[int]) -> _Traffic:
        mine = [p for p in found if rank in (p.source, p.target)]
        sent = tuple(tuple(p.box for p in mine if p.source == rank and p.target == r != rank) for r in group)
        received = tuple(tuple(p.box for p in mine if p.target == rank and p.source == r != rank) for r in group)
        return cls(sent, received, tuple(p.box for p in mine if p.source == p.target == rank))


def numel(boxes: Sequence[Sequence[Runs]]) -> int:
    """Elements in some boxes."""
    return sum(math.prod(map(lay.count, box)) for box in boxes)


def _terms(c: MoveContext) -> list[Piece]:
    """The pieces of a reduce-scatter: from every rank of the group the terms of each rank's part."""
    wanted = {rank: c.move.dst.runs(c.type.shape, rank) for rank in c.group}
    return [Piece(source, target, wanted[target]) for source in c.group for target in c.group if all(wanted[target])]


def _swap(c: MoveContext, traffic: _Traffic) -> list[Instruction]:
    """One all-to-all of exact pieces, and the pieces put into their places."""
    packed, flat = f"{c.target}_sent", f"{c.target}_flat"
    boxes = tuple(c.source_box(box) for peer in traffic.sent for box in peer)
    out_sizes, in_sizes = [numel(peer) for peer in traffic.received], [numel(peer) for peer in traffic.sent]
    text = f"all_to_all({flat}, {packed}, {out_sizes}, {in_sizes})"
    return [
        Pack(packed, c.source, boxes, c.source_shape),
        Allocate(flat, (sum(out_sizes),), c.type.dtype),
        c.collective("all_to_all", [packed], [flat], text, sum(in_sizes)),
        Allocate(c.target, c.target_shape, c.type.dtype, c.move.window.fill if c.move.window else ""),
        *_keep(c, traffic.kept),
        Wait(c.work),
        *_unpack(c, flat, [box for peer in traffic.received for box in peer]),
    ]


def _keep(c: MoveContext, kept: Sequence[Sequence[Runs]]) -> list[Instruction]:
    return [
        Put(c.target, local_box(c.wanted, box), c.target_shape,
            View("", c.source, c.source_box(box), c.source_shape).source().removeprefix(" = "))
        for box in kept
    ]  # fmt: skip


def _unpack(c: MoveContext, flat: str, boxes: Sequence[Sequence[Runs]]) -> list[Instruction]:
    out: list[Instruction] = []
    start = 0
    for box in boxes:
        place, stop = local_box(c.wanted, box), start + numel([box])
        shape = tuple(map(lay.count, place))
        out.append(Put(c.target, place, c.target_shape, f"{flat}[{start}:{stop}].view({list(shape)})"))
        start = stop
    return out


def _reduce_scatter(c: MoveContext) -> list[Instruction]:
    """One all-to-all, by which each rank gets all terms of its part, and their reduction."""
    if _in_rows(c):
        return _scatter_rows(c)
    traffic = _Traffic.of(_terms(c), c.rank, c.group)
    packed, flat = f"{c.target}_sent", f"{c.target}_flat"
    boxes = tuple(c.source_box(box) for peer in traffic.sent for box in peer)
    out_sizes, in_sizes = [numel(peer) for peer in traffic.received], [numel(peer) for peer in traffic.sent]
    text = f"all_to_all({flat}, {packed}, {out_sizes}, {in_sizes})"
    own = c.source + box_text(local_box(c.held, c.wanted), c.source_shape)
    return [
        Pack(packed, c.source, boxes, c.source_shape),
        Allocate(flat, (sum(out_sizes),), c.type.dtype),
        c.collective("all_to_all", [packed], [flat], text, sum(in_sizes)),
        Wait(c.work),
        Fold(c.target, flat, len(c.group) - 1, c.target_shape, c.move.src.reduce, own),
    ]


def _in_rows(c: MoveContext) -> bool:
    """Whether the ranks' parts, in order, are equal slices of the outermost dim: the tensor is sent as it lies."""
    parts = [local_box(c.held, c.move.dst.runs(c.type.shape, rank)) for rank in c.group]
    count = c.source_shape[0] // len(c.group) if c.source_shape else 0
    whole = tuple(((0, n),) for n in c.source_shape[1:])
    return all(part == (((i * count, (i + 1) * count),), *whole) for i, part in enumerate(parts)) and count > 0


def _scatter_rows(c: MoveContext) -> list[Instruction]:
    packed, flat, count = f"{c.target}_sent", f"{c.target}_flat", math.prod(c.target_shape)
    sizes = [count] * len(c.group)
    text = f"all_to_all({flat}, {packed}, {sizes}, {sizes})"
    return [
        Pack(packed, c.source, (tuple(((0, n),) for n in c.source_shape),), c.source_shape),
        Allocate(flat, (sum(sizes),), c.type.dtype),
        c.collective("all_to_all", [packed], [flat], text, sum(sizes)),
        Wait(c.work),
        Fold(c.target, flat, len(c.group), c.target_shape, c.move.src.reduce),
    ]


def _exchange(c: MoveContext) -> list[Instruction]:
    group = c.group
    mine = [p for p in pieces(c.move, c.type.shape) if p.source in group]
    return _swap(c, _Traffic.of(mine, c.rank, group))


def _transfer(c: MoveContext) -> list[Instruction]:
    """Messages between the ranks of two meshes: all are issued before any is waited for."""
    group = c.group
    traffic = _Traffic.of(pieces(c.move, c.type.shape), c.rank, group)
    held = c.held if c.rank in c.move.src.mesh else ()
    issued: list[Instruction] = []
    waits: list[Instruction] = []
    for place, boxes in enumerate(traffic.sent):
        if boxes:
            name = f"{c.target}_to_{group[place]}"
            issued.append(Pack(name, c.source, tuple(local_box(held, box) for box in boxes), c.source_shape))
            issued.append(_message(c, "send", group[place], name, numel(boxes)))
            waits.append(Wait(f"{name}_work"))
    if c.rank in c.move.dst.mesh:
        issued.append(Allocate(c.target, c.target_shape, c.type.dtype))
        issued.extend(_keep(c, traffic.kept))
    for place, boxes in enumerate(traffic.received):
        if boxes:
            name = f"{c.target}_from_{group[place]}"
            issued.append(Allocate(name, (numel(boxes),), c.type.dtype))
            issued.append(_message(c, "recv", group[place], name, numel(boxes)))
            waits += [Wait(f"{name}_work"), *_unpack(c, name, boxes)]
    return [*issued, *waits]


def _message(c: MoveContext, kind: str, peer: int, name: str, count: int) -> SendRecv:
    return SendRecv(f"{name}_work", c.group, kind, peer, name, c.about, (count, c.type.dtype.value))
