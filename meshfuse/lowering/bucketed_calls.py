"""Neighbouring collectives of one kind as one call on a flat buffer."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterator, Sequence

from ..reshard.bucketing import bucket_key
from ..reshard.steps import StepKind
from ..resharding import Reshard, ReshardedDefinition
from .boxes import box_text
from .collectives import (
    ReshardContext,
    Traffic,
    begun,
    exchanged,
    lower_reshard,
    numel,
    own_term,
    put_flat,
    scattered,
    sent_block,
    sent_part,
    starts,
)
from .copies import join, pack_all, unflatten
from .instructions import (
    Allocate,
    Collective,
    CollectiveKind,
    Communication,
    Instruction,
    Reduce,
    Wait,
)
from .overlapped import ChunkLoop
from .segments import Segment

# What DistributedDataParallel takes: starting a call no longer matters beside moving so much.
_BUCKET_BYTES = 25 << 20


def buckets(
    resharded: ReshardedDefinition, parts: Sequence[Segment | Reshard | ChunkLoop]
) -> Iterator[Segment | ChunkLoop | list[Reshard]]:
    """The parts of a program with its reshards in lists: those that can be one call together, all others alone."""
    open_: list[Reshard] = []
    for part in parts:
        if open_ and not _fits(resharded, open_, part):
            yield open_
            open_ = []
        if isinstance(part, Reshard):
            open_.append(part)
        else:
            yield part
    if open_:
        yield open_


def _fits(resharded: ReshardedDefinition, bucket: list[Reshard], part: Segment | Reshard | ChunkLoop) -> bool:
    if not isinstance(part, Reshard):
        return False
    key = bucket_key(resharded, part)
    if key is None or key != bucket_key(resharded, bucket[0]) or any([part.source == s.target for s in bucket]):
        return False
    return sum([resharded.nbytes(s.source) for s in (*bucket, part)]) <= _BUCKET_BYTES


def lower_bucket(contexts: Sequence[ReshardContext]) -> list[Instruction]:
    """The instructions of reshards of one kind over one group, as one call where that can be."""
    kind = contexts[0].step.kind
    if kind is StepKind.ALL_REDUCE:
        return _reduced(contexts)
    if kind is StepKind.ALL_GATHER:
        dims = [c.gathered_dim for c in contexts]
        together = [(c, dim) for c, dim in zip(contexts, dims, strict=True) if dim is not None]
        made = _gathered(together) if len(together) > 1 else []
    elif all(c.is_fusable and c.block_exchange_dims for c in contexts):
        return _blocks_exchanged(contexts)
    else:
        traffic_of = scattered if kind is StepKind.REDUCE_SCATTER else exchanged
        together = [(c, traffic) for c in contexts if (traffic := traffic_of(c)).any]
        made = _swapped(together) if len(together) > 1 else []
    done = {c.target for c, _ in together} if made else set[str]()
    return [*(i for c in contexts if c.target not in done for i in lower_reshard(c)), *made]


def _reduced(contexts: Sequence[ReshardContext]) -> list[Instruction]:
    first, counts = contexts[0], [math.prod(c.source_shape) for c in contexts]
    flat = f"{first.target}_flat"
    text = f"all_reduce({flat}, {first.step.src.reduce!r})"
    return [
        pack_all(flat, [(c.source, "") for c in contexts]),
        _call(contexts, "all_reduce", flat, flat, text, sum(counts)),
        Wait(first.work),
        *(
            unflatten(c.target, flat, end - n, end, c.target_shape)
            for c, n, end in zip(contexts, counts, itertools.accumulate(counts), strict=True)
        ),
    ]


def _gathered(together: Sequence[tuple[ReshardContext, int]]) -> list[Instruction]:
    """All-gathers as one, in which each rank sends the blocks of all reshards, one after the other."""
    contexts = [c for c, _ in together]
    first, counts = contexts[0], [math.prod(c.source_shape) for c in contexts]
    mine, flat, row, n = f"{first.target}_mine", f"{first.target}_flat", sum(counts), len(first.group)
    starts = itertools.accumulate(counts, initial=0)
    return [
        pack_all(mine, [(c.source, "") for c in contexts]),
        Allocate(flat, (row * n,), first.type.dtype),
        _call(contexts, "all_gather", mine, flat, f"all_gather({flat}, {mine})", row),
        Wait(first.work),
        *(join(c.target, flat, n, c.source_shape, dim, (start, row))
          for (c, dim), start in zip(together, starts, strict=False)),
    ]  # fmt: skip


def _blocks_exchanged(contexts: Sequence[ReshardContext]) -> list[Instruction]:
    """All-to-alls of equal blocks as one, in which each rank gets its blocks of all reshards, one after the other."""
    first, n = contexts[0], len(contexts[0].group)
    dims = [c.block_exchange_dims or (0, 0) for c in contexts]
    blocks = [sent_block(c, cut) for c, (cut, _) in zip(contexts, dims, strict=True)]
    counts = list(map(math.prod, blocks))
    packed, flat, row = f"{first.target}_sent", f"{first.target}_flat", sum(counts)
    starts, sizes = itertools.accumulate(counts, initial=0), [row] * n
    parts = [(c.source, sent_part(c, cut, r)) for r in range(n) for c, (cut, _) in zip(contexts, dims, strict=True)]
    text = f"all_to_all({flat}, {packed}, {sizes}, {sizes})"
    return [
        pack_all(packed, parts),
        Allocate(flat, (row * n,), first.type.dtype),
        _call(contexts, "all_to_all", packed, flat, text, row * n),
        Wait(first.work),
        *(join(c.target, flat, n, block, joined, (start, row))
          for c, (_, joined), block, start in zip(contexts, dims, blocks, starts, strict=False)),
    ]  # fmt: skip


def _swapped(together: Sequence[tuple[ReshardContext, Traffic]]) -> list[Instruction]:
    """Exchanges, or reduce-scatters by exchanges, as one, in which each peer gets its pieces of all reshards."""
    contexts = [c for c, _ in together]
    first = contexts[0]
    sent = [sum(numel(traffic.sent[r]) for _, traffic in together) for r in range(len(first.group))]
    got = [sum(numel(traffic.received[r]) for _, traffic in together) for r in range(len(first.group))]
    packed, flat = f"{first.target}_sent", f"{first.target}_flat"
    text = f"all_to_all({flat}, {packed}, {got}, {sent})"
    return [
        _packed(together, packed),
        Allocate(flat, (sum(got),), first.type.dtype),
        _call(contexts, "all_to_all", packed, flat, text, sum(sent)),
        *(i for c, traffic in together if c.step.kind is not StepKind.REDUCE_SCATTER for i in begun(c, traffic.kept)),
        Wait(first.work),
        *(_folds(contexts, flat) if first.step.kind is StepKind.REDUCE_SCATTER else _puts(together, flat)),
    ]


def _packed(moved: Sequence[tuple[ReshardContext, Traffic]], name: str) -> Instruction:
    entries = [(c.source, box_text(c.source_box(box), c.source_shape))
               for r in range(len(moved[0][0].group)) for c, traffic in moved for box in traffic.sent[r]]  # fmt: skip
    if not entries:
        return Allocate(name, (0,), moved[0][0].type.dtype)
    return pack_all(name, entries)


def _puts(moved: Sequence[tuple[ReshardContext, Traffic]], flat: str) -> Iterator[Instruction]:
    """Put the pieces that came into their places."""
    came = [(c, box) for r in range(len(moved[0][0].group)) for c, traffic in moved for box in traffic.received[r]]
    for (c, box), start in zip(came, starts([box for _, box in came]), strict=False):
        yield put_flat(c, flat, start, box)


def _folds(contexts: Sequence[ReshardContext], flat: str) -> Iterator[Instruction]:
    """Reduce the terms that every other rank sent with the rank's own."""
    counts = [math.prod(c.target_shape) for c in contexts]
    starts = itertools.accumulate(counts, initial=0)
    for c, start in zip(contexts, starts, strict=False):
        among, n = (start, sum(counts)), len(c.group) - 1
        yield Reduce(c.target, flat, n, c.target_shape, c.step.src.reduce, c.source, own_term(c), among)


def _call(
    contexts: Sequence[ReshardContext], kind: CollectiveKind, read: str, written: str, text: str, size: int
) -> Collective:
    first = contexts[0]
    call = first.collective(kind, [read], [written], text, size)
    return dataclasses.replace(call, about=joined_communication([c.about for c in contexts]))


def joined_communication(parts: Sequence[Communication]) -> Communication:
    """What a call that does the work of several reshards is about."""
    names = ", ".join(part.tensor for part in parts)
    return dataclasses.replace(parts[0], tensor=names, wire=sum(part.wire for part in parts), parts=tuple(parts))
