"""What a rank's own process decides, its environment and what it has made before, is compared or agreed on."""

from __future__ import annotations

import os
import re
from typing import Any
from unittest import mock

import pytest
import torch

import meshfuse as mf
from meshfuse.runtime.world import World

pytestmark = pytest.mark.ranks


def product(**options: Any) -> mf.FusionDefinition:
    with mf.FusionDefinition(**options) as fd:
        x, w = fd.define_tensor([4, 8]), fd.define_tensor([8, 6])
        fd.add_output(fd.ops.matmul(x, w))
        fd.mesh_split(x, mf.DeviceMesh((World.current().size,), ("tp",)), [None, "tp"])
    return fd


def on_rank_of_other_settings(environment: dict[str, str], options: dict[str, Any], odd: int, calls: int) -> str:
    """The error of a rank, of which one has another environment or other options; all get one program after it."""
    world = World.current()
    mine = world.rank == odd
    with mock.patch.dict(os.environ, environment if mine else {}):
        fd = product(**(options if mine else {}))
        inputs = [torch.ones(4, 8 // world.size), torch.ones(8, 6)]
        try:
            for _ in range(calls):
                fd.execute(inputs)
        except mf.RankError as error:
            found = str(error)
        else:
            found = "no error"
    product().execute(inputs)
    return found


SETTINGS: list[tuple[dict[str, str], dict[str, Any], str, str]] = [
    ({"MESHFUSE_NEAR": "1"}, {}, "MESHFUSE_NEAR=2", "MESHFUSE_NEAR=1"),
    ({"MESHFUSE_SEARCH": "thorough"}, {}, "search='auto' (", "search='thorough' (its own, or MESHFUSE_SEARCH)"),
    ({}, {"search": "fast"}, "search='auto' (", "search='fast' (its own, or MESHFUSE_SEARCH)"),
    ({"MESHFUSE_MAX_MEMORY": "1e9"}, {}, "max_memory=None (", "max_memory=1000000000.0 (its own, or MESHFUSE_MAX_M"),
    ({}, {"max_memory": 5e8}, "max_memory=None (", "max_memory=500000000.0 (its own, or MESHFUSE_MAX_MEMORY)"),
    ({"MESHFUSE_LINKS": "laptop"}, {}, "MESHFUSE_LINKS=bytes", "MESHFUSE_LINKS=laptop"),
    ({"MESHFUSE_BACKEND": "eager"}, {}, "backend auto", "backend eager"),
]


@pytest.mark.parametrize(("environment", "options", "most", "other"), SETTINGS)
def test_a_rank_with_another_setting_is_named_with_it(ranks4, environment, options, most, other):
    """Whether or not the plans that follow are the same, and before any call is made together."""
    for odd in (0, 2):
        others = ", ".join(str(rank) for rank in range(4) if rank != odd)
        for found in ranks4.run(on_rank_of_other_settings, environment, options, odd, 20):
            assert "ranks disagree on the program: found " in found, found
            assert re.search(rf"ranks {others} \"?'?{re.escape(most)}", found), found
            assert re.search(rf"rank {odd} \"?'?{re.escape(other)}", found), found


def on_rank_that_has_made_others(more: list[int]) -> list[list[float]]:
    """What two definitions without a seed draw, after so many others on each rank, some of which have drawn."""
    world = World.current()
    for _ in range(more[world.rank]):
        with mf.FusionDefinition() as own:
            own.add_output(own.ops.dropout(own.define_tensor([30]), 0.5))
        own.simulate([torch.ones(30)])
    found, mesh = [], mf.DeviceMesh((world.size,), ("dp",))
    for _ in range(3):
        with mf.FusionDefinition() as fd:
            x = fd.define_tensor([30])
            fd.add_output(fd.ops.dropout(x, 0.5))
            fd.mesh_split(x, mesh, [None])
        found += [fd.execute([torch.ones(30)])[0].tolist() for _ in range(2)]
    return found


@pytest.mark.parametrize("more", [[0, 0], [0, 3], [2, 0], [1, 1]])
def test_ranks_draw_alike_whatever_else_they_have_made(ranks2, more):
    first, second = ranks2.run(on_rank_that_has_made_others, more)
    assert first == second
    assert len({tuple(drawn) for drawn in first}) == len(first)
