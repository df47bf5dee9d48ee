"""Values that go from one mesh to another, on real ranks: any number of ranks on either side, whoever has a message."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import pytest
import torch

import meshfuse as mf

pytestmark = pytest.mark.ranks

MESHES: tuple[tuple[int, ...], ...] = ((0, 1), (2,), (3, 1, 0), (1, 2, 3), (0,))
LAYOUTS: tuple[list[Any], ...] = ([None, None], ["x", None], [None, "x"])
SIZES = ((1, 4), (5, 3))


def passed_on(shape: Sequence[int], ends: Sequence[tuple[tuple[int, ...], list[Any]]]) -> tuple[Any, Any]:
    """A definition in which a value goes from mesh to mesh, laid out so on each, and there and back again."""
    with mf.FusionDefinition() as fd:
        x = y = fd.define_tensor(list(shape), dtype=mf.DataType.Double)
        for place, (ranks, layout) in enumerate(ends):
            y = fd.ops.add(y, 1.0) if place else y
            fd.mesh_split(y, mf.DeviceMesh((len(ranks),), ("x",), ranks=list(ranks)), layout)
        fd.add_output(y)
    return fd, x


def on_rank_passed_on(first: int) -> list[str]:
    """From one mesh to every other and back, by way of all pairs of layouts: what came out wrong, or did not come."""
    wrong = []
    here = MESHES[first]
    for there, shape, (one, other) in itertools.product(MESHES, SIZES, itertools.product(LAYOUTS, LAYOUTS)):
        fd, x = passed_on(shape, [(here, one), (there, other), (here, other)])
        whole = torch.arange(float(shape[0] * shape[1])).double().reshape(shape)
        (found,) = fd.execute([mf.shard_tensor(whole, x)], idle_ranks=True)
        (sharding,) = fd.output_shardings()
        rank = mf.World.current().rank
        if rank in here:
            expected = mf.shard_tensor(whole + 2, fd.fusion.outputs()[0])
            if found is None or not torch.equal(found, expected):
                wrong.append(f"{shape} {one} on {here} to {other} on {there}: {found}")
        elif found is not None:
            wrong.append(f"rank {rank} of {sharding} has {found}")
    return wrong


@pytest.mark.parametrize("first", range(len(MESHES)))
def test_a_value_goes_from_mesh_to_mesh_and_back(ranks4, first: int) -> None:
    assert ranks4.run(on_rank_passed_on, first, timeout=120.0) == [[]] * 4
