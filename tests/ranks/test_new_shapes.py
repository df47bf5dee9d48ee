"""Shapes that are new run by the plan of one nearby at first, and by one of their own where they come again."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from rank_pool import RankPool

import meshfuse as mf
from meshfuse import compiler
from meshfuse.plans import shape_reuse
from meshfuse.plans.shape_reuse import RENEWED
from meshfuse.sharding.data import shard

pytestmark = pytest.mark.ranks


def mlp(size: int, rows: int) -> mf.FusionDefinition:
    """A layer whose rows lie over the ranks, as do its weights' rows."""
    mesh = mf.DeviceMesh((size,), ("tp",))
    with mf.FusionDefinition() as fd:
        x = fd.define_tensor([rows, 16], dtype=mf.DataType.Double)
        w = fd.define_tensor([24, 16], dtype=mf.DataType.Double)
        fd.add_output(fd.ops.relu(fd.ops.linear(x, w)))
        fd.mesh_split(x, mesh, ["tp", None])
        fd.mesh_split(w, mesh, ["tp", None])
    return fd


def steps(rows: tuple[int, ...], count: int, opened: bool, ranks: int = 2) -> list[tuple[list[bool], list[int]]]:
    """For each number of rows whether the plan was another's, step by step, and which steps gave wrong numbers.

    `ranks` take part, of which there may be more.
    """
    world, found, compiler.PLANS = mf.World.current(), [], shape_reuse.Plans()
    shared = mlp(ranks, -1)
    for number in rows:
        fd = shared if opened else mlp(ranks, number)
        generator = torch.Generator().manual_seed(number)
        x, w = (torch.randn(n, 16, generator=generator, dtype=torch.float64) for n in (number, 24))
        taken, wrong = [], []
        for step in range(count):
            given = [mf.shard_tensor(t, view) for t, view in zip((x, w), views(fd), strict=True)]
            (out,) = fd.execute(given, idle_ranks=True)
            compiled = fd.latest()
            taken.append(compiled.taken_from is not None)
            if world.rank >= ranks:
                wrong += [] if out is None else [step]
                continue
            right = shard(F.relu(F.linear(x, w)), compiled.output_shardings()[0], world.rank)
            if not torch.allclose(out, right):
                wrong.append(step)
        found.append((taken, wrong))
    return found


def views(fd: mf.FusionDefinition) -> list[mf.TensorView]:
    return [view for view in fd.fusion.inputs() if isinstance(view, mf.TensorView)]


@pytest.mark.parametrize("opened", [True, False], ids=["one definition", "a definition each"])
def test_a_new_shape_runs_at_once_and_is_planned_where_it_comes_again(ranks2: RankPool, opened: bool) -> None:
    count = RENEWED + 3
    for first, *others in ranks2.run(steps, (8, 12, 16), count, opened):
        assert first == ([False] * count, [])
        for taken, wrong in others:
            assert taken == [True] * RENEWED + [False] * 3
            assert wrong == []


def test_ranks_outside_the_mesh_plan_anew_with_the_others(ranks4: RankPool) -> None:
    count = RENEWED + 2
    for found in ranks4.run(steps, (8, 12), count, True):
        assert found == [([False] * count, []), ([True] * RENEWED + [False] * 2, [])]


def test_without_a_factor_every_shape_is_planned(ranks2: RankPool) -> None:
    for found in ranks2.run(steps_without, (8, 12), 2, True):
        assert found == [([False] * 2, [])] * 2


def steps_without(*args: object) -> object:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MESHFUSE_NEAR", "1")
        return steps(*args)  # type: ignore[arg-type]
