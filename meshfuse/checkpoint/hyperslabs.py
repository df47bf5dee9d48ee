"""A rank's shard of a tensor as boxes of the global tensor: what torch.distributed.checkpoint stores and finds."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from ..sharding.layout import Runs
from ..sharding.value import Sharding


@dataclass(frozen=True, slots=True)
class Hyperslab:
    """A box of elements: where it begins in the global tensor and in the shard, and its size in each dim."""

    offsets: tuple[int, ...]
    local: tuple[int, ...]
    sizes: tuple[int, ...]


def boxes(sharding: Sharding | None, shape: Sequence[int], rank: int) -> tuple[Hyperslab, ...]:
    """The rank's shard as boxes; without a sharding, the whole tensor. None is empty, unless the tensor is.

    A dim that is split inside has several runs of indices, and each combination of runs is a box.
    """
    if sharding is None:
        runs: tuple[Runs, ...] = tuple(((0, n),) for n in shape)
    elif rank not in sharding.mesh:
        return ()
    else:
        runs = sharding.runs(shape, rank)
    return tuple(_box(parts) for parts in itertools.product(*map(_placed, runs)))


def _placed(runs: Runs) -> list[tuple[int, int, int]]:
    """Each run as (global start, local start, length)."""
    starts = itertools.accumulate((stop - start for start, stop in runs), initial=0)
    return [(start, local, stop - start) for (start, stop), local in zip(runs, starts, strict=False)]


def _box(parts: Sequence[tuple[int, int, int]]) -> Hyperslab:
    offsets, local, sizes = zip(*parts, strict=True) if parts else ((), (), ())
    return Hyperslab(tuple(offsets), tuple(local), tuple(sizes))


class Shard:
    """A rank's shard, in the form that torch's planners take (their `_Checkpointable` protocol)."""

    def __init__(self, local: torch.Tensor, shape: Sequence[int], parts: tuple[Hyperslab, ...]):
        self.local, self.shape, self.parts = local, torch.Size(shape), parts
        self._places = {part.offsets: part for part in parts}

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    def __create_write_items__(self, name: str, _: Any) -> list[WriteItem]:
        properties = TensorProperties(dtype=self.local.dtype)
        return [
            WriteItem(
                index=MetadataIndex(name, torch.Size(part.offsets)),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk=_chunk(part), properties=properties, size=self.shape),
            )
            for part in self.parts
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [_chunk(part) for part in self.parts]

    def __get_tensor_shard__(self, index: MetadataIndex) -> torch.Tensor:
        """The box that begins at these offsets, as a view of the shard."""
        part = self._places[tuple(index.offset or ())]
        found = self.local
        for dim, (start, length) in enumerate(zip(part.local, part.sizes, strict=True)):
            found = found.narrow(dim, start, length)
        return found


def _chunk(part: Hyperslab) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(offsets=torch.Size(part.offsets), sizes=torch.Size(part.sizes))
