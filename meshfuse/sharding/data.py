"""Cutting global tensors into shards and putting shards together again."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence

import torch

from ..kernels.indices import global_index
from ..kernels.tensors import ROWS, stand_in
from .layout import Runs, digits
from .value import Sharding


def take_runs(tensor: torch.Tensor, dim: int, part: Runs) -> torch.Tensor:
    """The indices `part` of one dim; a view where they are one run."""
    if len(part) == 1:
        start, stop = part[0]
        return tensor if stop - start == tensor.shape[dim] else tensor.narrow(dim, start, stop - start)
    if not part:
        return tensor.narrow(dim, 0, 0)
    return torch.cat([tensor.narrow(dim, a, b - a) for a, b in part], dim)


def shard(tensor: torch.Tensor, sharding: Sharding, rank: int) -> torch.Tensor:
    """The rank's shard of a global tensor, contiguous; of the terms of a sum the first is the sum, others are 0."""
    rows = getattr(tensor, ROWS, None)
    if rows is not None:
        return rows[rank]
    out = tensor if not any(digits(sharding.partial, sharding.mesh, rank)) else torch.zeros_like(tensor)
    for dim, part in enumerate(sharding.runs(tensor.shape, rank)):
        out = take_runs(out, dim, part)
    return out.contiguous()


def unshard(shards: Mapping[int, torch.Tensor], sharding: Sharding, shape: Sequence[int]) -> torch.Tensor:
    """The global tensor of shape `shape` from every rank's shard (one replica of each suffices)."""
    first = next(iter(shards.values()))
    if hasattr(first, ROWS):  # rows of experts: what stands for those of all ranks
        return stand_in(first, shape, dict(shards))
    if sharding.partial:
        terms: dict[tuple[int, ...], dict[int, torch.Tensor]] = {}
        for rank, local in shards.items():
            terms.setdefault(digits(sharding.partial, sharding.mesh, rank), {})[rank] = local
        assert sharding.reduce == "sum"
        return functools.reduce(torch.add, [unshard(part, sharding.reduced(), shape) for part in terms.values()])
    out = torch.empty(tuple(shape), dtype=first.dtype, device=first.device)
    done: set[tuple[int, ...]] = set()
    for rank, local in shards.items():
        coordinates = sharding.coordinates(rank)
        if coordinates not in done:
            done.add(coordinates)
            _put(out, local, sharding.runs(shape, rank))
    return out


def _put(out: torch.Tensor, local: torch.Tensor, index: tuple[Runs, ...]) -> None:
    """Write a shard into its place, dim by dim."""
    if all(len(part) == 1 for part in index):
        out[tuple(slice(a, b) for ((a, b),) in index)] = local
    elif all(index):
        grids = [global_index(part, out.device) for part in index]
        _bytes(out)[torch.meshgrid(*grids, indexing="ij")] = _bytes(local)


# By their bytes: torch moves and adds these in any way, but not all of its types.
INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory as integers; complex numbers as they are, which may be conjugated only in name."""
    return tensor if tensor.is_complex() else tensor.view(INTEGERS[tensor.element_size()])
