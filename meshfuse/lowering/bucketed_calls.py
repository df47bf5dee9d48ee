"""Neighbouring collectives of one kind as one call on a flat buffer."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterator, Sequence

from ..reshard.bucketing import bucket_key
from ..reshard.steps import MoveKind
from ..resharding import ReshardedDefinition, Set
from .boxes import box_text
from .collectives import (
    MoveContext,
    Traffic,
    begun,
    dealt_block,
    dealt_part,
    exchanged,
    lower_move,
    numel,
    own_term,
    put,
    scattered,
    starts,
)
from .instructions import (
    Allocate,
    Collective,
    CollectiveKind,
    Communication,
    Flatten,
    Instruction,
    Join,
    Reduce,
    Unflatten,
    Wait,
)
from .overlapped import ChunkLoop
from .segments import Segment

# What DistributedDataParallel takes: starting a call no longer matters beside moving so much.
_BUCKET_BYTES = 25 << 20


def buckets(
    resharded: ReshardedDefinition, parts: Sequence[Segment | Set | ChunkLoop]
) -> Iterator[Segment | ChunkLoop | list[Set]]:
    """The parts of a program with its moves in lists: those that can be one call together, all others alone."""
    open_: list[Set] = []
    for part in parts:
        if open_ and not _fits(resharded, open_, part):
            yield open_
            open_ = []
        if isinstance(part, Set):
            open_.append(part)
        else:
            yield part
    if open_:
        yield open_


def _fits(resharded: ReshardedDefinition, bucket: list[Set], part: Segment | Set | ChunkLoop) -> bool:
    if not isinstance(part, Set):
        return False
    key = bucket_key(resharded, part)
    if key is None or key != bucket_key(resharded, bucket[0]) or any([part.source == s.target for s in bucket]):
        return False
    return sum([resharded.nbytes(s.source) for s in (*bucket, part)]) <= _BUCKET_BYTES


def lower_bucket(moves: Sequence[MoveContext]) -> list[Instruction]:
    """The instructions of moves of one kind over one group, as one call where that can be."""
    kind = moves[0].move.kind
    if kind is MoveKind.ALL_REDUCE:
        return _reduced(moves)
    if kind is MoveKind.ALL_GATHER:
        dims = [c.gathered_dim for c in moves]
        together = [(c, dim) for c, dim in zip(moves, dims, strict=True) if dim is not None]
        made = _gathered(together) if len(together) > 1 else []
    elif all(c.is_spared and c.dealt_dims for c in moves):
        return _dealt(moves)
    else:
        traffic_of = scattered if kind is MoveKind.REDUCE_SCATTER else exchanged
        together = [(c, traffic) for c in moves if (traffic := traffic_of(c)).any]
        made = _swapped(together) if len(together) > 1 else []
    done = {c.target for c, _ in together} if made else set[str]()
    return [*(i for c in moves if c.target not in done for i in lower_move(c)), *made]


def _reduced(moves: Sequence[MoveContext]) -> list[Instruction]:
    first, counts = moves[0], [math.prod(c.source_shape) for c in moves]
    flat = f"{first.target}_flat"
    text = f"all_reduce({flat}, {first.move.src.reduce!r})"
    return [
        Flatten(flat, tuple(c.source for c in moves)),
        _call(moves, "all_reduce", flat, flat, text, sum(counts)),
        Wait(first.work),
        *(
            Unflatten(c.target, flat, end - n, end, c.target_shape)
            for c, n, end in zip(moves, counts, itertools.accumulate(counts), strict=True)
        ),
    ]


def _gathered(together: Sequence[tuple[MoveContext, int]]) -> list[Instruction]:
    """All-gathers as one, in which each rank sends the blocks of all moves, one after the other."""
    moves = [c for c, _ in together]
    first, counts = moves[0], [math.prod(c.source_shape) for c in moves]
    mine, flat, row, n = f"{first.target}_mine", f"{first.target}_flat", sum(counts), len(first.group)
    starts = itertools.accumulate(counts, initial=0)
    return [
        Flatten(mine, tuple(c.source for c in moves)),
        Allocate(flat, (row * n,), first.type.dtype),
        _call(moves, "all_gather", mine, flat, f"all_gather({flat}, {mine})", row),
        Wait(first.work),
        *(Join(c.target, flat, n, c.source_shape, dim, (start, row))
          for (c, dim), start in zip(together, starts, strict=False)),
    ]  # fmt: skip


def _dealt(moves: Sequence[MoveContext]) -> list[Instruction]:
    """All-to-alls of equal blocks as one, in which each rank gets its blocks of all moves, one after the other."""
    first, n = moves[0], len(moves[0].group)
    dims = [c.dealt_dims or (0, 0) for c in moves]
    blocks = [dealt_block(c, cut) for c, (cut, _) in zip(moves, dims, strict=True)]
    counts = list(map(math.prod, blocks))
    packed, flat, row = f"{first.target}_sent", f"{first.target}_flat", sum(counts)
    starts, sizes = itertools.accumulate(counts, initial=0), [row] * n
    parts = [dealt_part(c, cut, r) for r in range(n) for c, (cut, _) in zip(moves, dims, strict=True)]
    text = f"all_to_all({flat}, {packed}, {sizes}, {sizes})"
    return [
        Flatten(packed, tuple(c.source for c in moves) * n, tuple(parts)),
        Allocate(flat, (row * n,), first.type.dtype),
        _call(moves, "all_to_all", packed, flat, text, row * n),
        Wait(first.work),
        *(Join(c.target, flat, n, block, joined, (start, row))
          for c, (_, joined), block, start in zip(moves, dims, blocks, starts, strict=False)),
    ]  # fmt: skip


def _swapped(together: Sequence[tuple[MoveContext, Traffic]]) -> list[Instruction]:
    """Exchanges, or reduce-scatters by exchanges, as one, in which each peer gets its pieces of all moves."""
    moves = [c for c, _ in together]
    first = moves[0]
    sent = [sum(numel(traffic.sent[r]) for _, traffic in together) for r in range(len(first.group))]
    got = [sum(numel(traffic.received[r]) for _, traffic in together) for r in range(len(first.group))]
    packed, flat = f"{first.target}_sent", f"{first.target}_flat"
    text = f"all_to_all({flat}, {packed}, {got}, {sent})"
    return [
        _packed(together, packed),
        Allocate(flat, (sum(got),), first.type.dtype),
        _call(moves, "all_to_all", packed, flat, text, sum(sent)),
        *(i for c, traffic in together if c.move.kind is not MoveKind.REDUCE_SCATTER for i in begun(c, traffic.kept)),
        Wait(first.work),
        *(_folds(moves, flat) if first.move.kind is MoveKind.REDUCE_SCATTER else _puts(together, flat)),
    ]


def _packed(moved: Sequence[tuple[MoveContext, Traffic]], name: str) -> Instruction:
    entries = [(c.source, box_text(c.source_box(box), c.source_shape))
               for r in range(len(moved[0][0].group)) for c, traffic in moved for box in traffic.sent[r]]  # fmt: skip
    if not entries:
        return Allocate(name, (0,), moved[0][0].type.dtype)
    sources, parts = zip(*entries, strict=True)
    return Flatten(name, sources, parts)


def _puts(moved: Sequence[tuple[MoveContext, Traffic]], flat: str) -> Iterator[Instruction]:
    """Put the pieces that came into their places."""
    came = [(c, box) for r in range(len(moved[0][0].group)) for c, traffic in moved for box in traffic.received[r]]
    for (c, box), start in zip(came, starts([box for _, box in came]), strict=False):
        yield put(c, flat, start, box)


def _folds(moves: Sequence[MoveContext], flat: str) -> Iterator[Instruction]:
    """Reduce the terms that every other rank sent with the rank's own."""
    counts = [math.prod(c.target_shape) for c in moves]
    starts = itertools.accumulate(counts, initial=0)
    for c, start in zip(moves, starts, strict=False):
        among, n = (start, sum(counts)), len(c.group) - 1
        yield Reduce(c.target, flat, n, c.target_shape, c.move.src.reduce, c.source, own_term(c), among)


def _call(
    moves: Sequence[MoveContext], kind: CollectiveKind, read: str, written: str, text: str, size: int
) -> Collective:
    first = moves[0]
    call = first.collective(kind, [read], [written], text, size)
    return dataclasses.replace(call, about=joined_communication([c.about for c in moves]))


def joined_communication(parts: Sequence[Communication]) -> Communication:
    """What a call that does the work of several moves is about."""
    names = ", ".join(part.tensor for part in parts)
    return dataclasses.replace(parts[0], tensor=names, wire=sum(part.wire for part in parts), parts=tuple(parts))
