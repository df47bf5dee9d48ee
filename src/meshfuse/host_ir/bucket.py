"""Neighbouring all-reduces of one kind as one call on a flat buffer."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence

from ..resharding.insert import ReshardedDefinition, Set
from ..resharding.postpone import bucket_key
from ..segmentation import Segment
from ..streams.overlap import ChunkLoop
from .communicate import MoveContext
from .instructions import Collective, Communication, Flatten, Instruction, Unflatten, Wait

# What DistributedDataParallel takes: starting a call no longer matters beside moving so much.
_BUCKET_BYTES = 25 << 20


def buckets(
    resharded: ReshardedDefinition, parts: Sequence[Segment | Set | ChunkLoop]
) -> Iterator[Segment | ChunkLoop | list[Set]]:
    """The parts with their moves in lists, of one move each but for all-reduces that are one call."""
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
    size = sum(resharded.nbytes(s.source) for s in (*bucket, part))
    made = {s.target for s in bucket}
    return (
        key is not None
        and key == bucket_key(resharded, bucket[0])
        and size <= _BUCKET_BYTES
        and part.source not in made
    )


def lower_bucket(moves: Sequence[MoveContext]) -> list[Instruction]:
    """All-reduces over one group as one, on a rank that takes part in all of them."""
    first = moves[0]
    flat, counts = f"{first.target}_flat", [math.prod(c.source_shape) for c in moves]
    text = f"all_reduce({flat}, {first.move.src.reduce!r})"
    payload = (sum(counts), first.type.dtype.value)
    about = joined([c.about for c in moves])
    ends = [sum(counts[: i + 1]) for i in range(len(counts))]
    return [
        Flatten(flat, tuple(c.source for c in moves)),
        Collective(first.work, first.group, "all_reduce", (flat,), (flat,), text, about, payload),
        Wait(first.work),
        *(
            Unflatten(c.target, flat, end - n, end, c.target_shape)
            for c, n, end in zip(moves, counts, ends, strict=True)
        ),
    ]


def joined(parts: Sequence[Communication]) -> Communication:
    """What a call that does the work of several is about."""
    names = ", ".join(part.tensor for part in parts)
    return dataclasses.replace(parts[0], tensor=names, wire=sum(part.wire for part in parts), parts=tuple(parts))
