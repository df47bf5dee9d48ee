"""Compiled segments on real ranks: the numbers of eager ones, whatever a rank's constants, at the call that is due."""

from __future__ import annotations

import contextlib
from unittest import mock

import pytest
import torch

import meshfuse as mf
from meshfuse.backends import assignment
from meshfuse.executor.segments import Segments

pytestmark = pytest.mark.ranks
COMPILING = 280.0


def places(size: int, seed: int = 3) -> mf.FusionDefinition:
    """Pointwise ops of each rank's own constants and random numbers, then a reduction and what follows it."""
    mesh = mf.DeviceMesh((size,), ("tp",))
    with mf.FusionDefinition(seed=seed) as fd:
        x = fd.define_tensor([8, 5])
        fd.mesh_split(x, mesh, ["tp", None])
        rows = fd.ops.broadcast(fd.ops.iota(8), [False, True])
        y = fd.ops.relu(x + rows) * fd.ops.uniform(0.0, 1.0, [8, 5])
        fd.add_output(y)
        fd.add_output(fd.ops.sum(y, [0]) * 2.0)
        fd.mesh_split(y, mesh, ["tp", None])
    return fd


def on_rank_backends(steps: int) -> tuple[list[list[torch.Tensor]], list[list[torch.Tensor]], str]:
    """Every step's results, eager and by Inductor, and what ran the latter."""
    world = mf.World.current()
    found = []
    for backend in ("eager", "inductor"):
        fd = places(world.size)
        shard = torch.arange(40.0).reshape(8, 5).chunk(world.size)[world.rank].contiguous()
        found.append([fd.execute([shard], backend=backend) for _ in range(steps)])
    return *found, fd.backends()


def test_compiled_segments_have_each_ranks_constants_and_each_steps_random_numbers(ranks2):
    for eager, compiled, table in ranks2.run(on_rank_backends, 3, timeout=COMPILING):
        assert table.count("inductor  compiled") == len(table.splitlines()) - 1 > 0
        for expected, found in zip(eager, compiled, strict=True):
            torch.testing.assert_close(found, expected)
        assert not torch.equal(eager[0][0], eager[1][0])


def on_rank_auto() -> tuple[list[list[torch.Tensor]], list[str]]:
    world = mf.World.current()
    with mock.patch.multiple(assignment, _PATIENCE=2, _COMPILE=0.0, _COMPILE_OP=0.0, _LEAST=0.0):
        fd = places(world.size)
        shard = torch.arange(40.0).reshape(8, 5).chunk(world.size)[world.rank].contiguous()
        results, tables = [], []
        for _ in range(4):
            results.append(fd.execute([shard], backend="auto"))
            tables.append(fd.backends())
    return results, tables


def test_auto_compiles_at_the_same_call_on_all_ranks(ranks2):
    found = ranks2.run(on_rank_auto, timeout=COMPILING)
    eager = [results for results, _, _ in ranks2.run(on_rank_backends, 4, timeout=COMPILING)]
    for (results, tables), expected in zip(found, eager, strict=True):
        assert ["compiled" in table for table in tables] == [False, False, True, True]
        torch.testing.assert_close(results, expected)


def on_rank_that_cannot_compile() -> tuple[str, list[torch.Tensor], list[torch.Tensor]]:
    """The error of a rank at the call that compiles, which rank 1 cannot; then what it computes, and what is right."""
    world, message = mf.World.current(), ""
    failing = mock.patch.object(Segments, "compile_next", side_effect=OSError("no compiler here"))
    fd, plain = places(world.size), places(world.size)
    shard = torch.arange(40.0).reshape(8, 5).chunk(world.size)[world.rank].contiguous()
    with failing if world.rank == 1 else contextlib.nullcontext():
        try:
            fd.execute([shard], backend="inductor")
        except (OSError, mf.RankError) as error:
            message = str(error)
    plain.execute([shard], backend="eager")
    return message, fd.execute([shard], backend="inductor"), plain.execute([shard], backend="eager")


def test_a_rank_that_cannot_compile_tells_the_others_at_once(ranks2):
    (first, *results), (second, *others) = ranks2.run(on_rank_that_cannot_compile, timeout=COMPILING)
    assert "compiling segments cannot finish on rank 0: found rank 1 failed" in first and second == "no compiler here"
    assert "OSError: no compiler here" in first
    for found, expected in (results, others):
        torch.testing.assert_close(found, expected)


def on_rank_different() -> str:
    world = mf.World.current()
    fd = places(world.size)
    try:
        fd.execute([torch.zeros(4, 5)], backend=("eager", "inductor")[world.rank])
    except mf.RankError as error:
        return str(error)
    return ""


def test_different_backends_on_ranks_are_an_error(ranks2):
    for text in ranks2.run(on_rank_different):
        assert "backend eager" in text and "backend inductor" in text
