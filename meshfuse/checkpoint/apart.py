"""Loading into tensors of which some lie in the same memory, such as tied weights: none may overwrite another's."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

import torch

from .entries import wrong
from .hyperslabs import Shard
from .transfer import read


def read_apart(folder: Path, shards: Mapping[str, Shard]) -> None:
    """As `read`. Raises ArgumentError for a name whose memory has another one's values in the end."""
    shared = dict.fromkeys(_in_one_memory(shards))
    made = {name: _like(shard) if name in shared else shard for name, shard in shards.items()}
    read(folder, made)
    for name in shared:
        shards[name].local.copy_(made[name].local)
    for name in shared:
        if not torch.equal(_bits(shards[name].local), _bits(made[name].local)):
            others = ", ".join(repr(other) for other in shared if other != name)
            raise wrong(
                name, f"memory that other values are loaded to, too, of {others}",
                "memory of its own, or the same values", "Pass another tensor, such as t.clone().",
            )  # fmt: skip


def _in_one_memory(shards: Mapping[str, Shard]) -> Iterator[str]:
    """The names whose tensors, from their first element to their last, lie where another one's do."""
    rows = sorted((*_ends(shard.local), name) for name, shard in shards.items() if shard.local.numel())
    reached, last = -1, ""
    for start, end, name in rows:
        if start < reached:
            yield from (last, name)
        if end > reached:
            reached, last = end, name


def _ends(tensor: torch.Tensor) -> tuple[int, int]:
    steps = sum((n - 1) * stride for n, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr(), tensor.data_ptr() + (steps + 1) * tensor.itemsize


def _like(shard: Shard) -> Shard:
    return Shard(torch.empty_like(shard.local), shard.shape, shard.parts)


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().flatten().view(torch.uint8)
