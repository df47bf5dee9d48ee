"""torch's placements that cut chunks of a dim (`_StridedShard`), against cutting indices placement by placement."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

import meshfuse as mf
from meshfuse.executor.dtensor import placeable, placements_of, sharding_of

MESH = mf.DeviceMesh((2, 3, 2), ("a", "b", "c"))
SIZE = 2 * 3 * 2 * 4 * 3
ONE: list[Any] = [Replicate(), Shard(0), *(_StridedShard(0, split_factor=k) for k in (2, 3, 4, 6, 12))]


def cut(placements: tuple[Any, ...], rank: int) -> list[int]:
    """The indices of a rank: each placement in turn cuts every one of its chunks, and the rank has a part of each."""
    held = torch.arange(SIZE)
    for size, at, placement in zip(MESH.shape, MESH.coordinate(rank), placements, strict=True):
        if not placement.is_replicate():
            chunks = held.chunk(getattr(placement, "split_factor", 1))
            held = torch.cat([chunk.chunk(size)[at] for chunk in chunks])
    return held.tolist()


@pytest.mark.parametrize("first", ONE, ids=str)
def test_ranks_hold_what_torch_cuts(first: Any) -> None:
    for placements in itertools.product([first], ONE, ONE):
        found = sharding_of(MESH, placements, (SIZE,))
        chunks = [getattr(p, "split_factor", 1) for p in placements if not p.is_replicate()]
        assert found is not None or (len(chunks) > 1 and max(chunks) > 1)
        for rank in MESH.ranks if found is not None else ():
            (runs,) = found.runs((SIZE,), rank)
            assert [i for low, high in runs for i in range(low, high)] == cut(placements, rank)


@pytest.mark.parametrize("axes", [p for n in (1, 2, 3) for p in itertools.permutations("abc", n)], ids="".join)
def test_every_order_of_axes_has_placements(axes: tuple[str, ...]) -> None:
    layout = tuple(mf.Split(MESH.axis_size(axis), axis) for axis in axes)
    sharding, shape = mf.Sharding(MESH, (layout, ())), (SIZE, 5)
    told = placements_of(sharding, shape)
    assert told is not None and sharding_of(MESH, told, shape) == sharding
    assert (axes == tuple(sorted(axes))) == (_StridedShard not in map(type, told))


def test_free_outputs_have_orders_that_inputs_have() -> None:
    strided = (mf.Split(2, "c"), mf.Split(2, "a"))
    sharding, shape = mf.Sharding(MESH, (strided, ())), (SIZE, 5)
    assert placeable(sharding, shape, {strided}) == sharding
    plain = placements_of(placeable(sharding, shape, set()), shape)
    assert plain is not None and _StridedShard not in map(type, plain)


def test_annotated_by_strided_placements() -> None:
    placements = [_StridedShard(0, split_factor=2), Replicate(), Shard(0)]
    with mf.FusionDefinition() as fd:
        x = fd.define_tensor([SIZE, 5])
        fd.shard(x, placements, MESH)
        fd.mesh_split(x, MESH, [("c", "a"), None])  # which says the same
        fd.add_output(fd.ops.neg(x))
    assert str(fd.latest().output_shardings()[0]) == "[(c, a), -]"
