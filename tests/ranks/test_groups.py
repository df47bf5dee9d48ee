"""Groups of ranks that run definitions of their own, beside each other and with all others in between."""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from rank_pool import RankPool, run_bare

import meshfuse as mf
from meshfuse.frontends.placing import join_default_group

pytestmark = pytest.mark.ranks

ROWS, COLUMNS = (0, 1), (0, 2)
# The rows and columns of two by two ranks, all of them, a rank alone, three, and two groups that share one.
GROUPS: tuple[tuple[int, ...], ...] = ((0, 1), (2, 3), (0, 2), (1, 3), (0, 1, 2, 3), (3,), (1, 2, 3))


def layer(ranks: Sequence[int], kind: str) -> tuple[mf.FusionDefinition, Any, Any]:
    """A product whose sum over the ranks is reduced ("tanh"), or one whose result stays with them ("relu")."""
    mesh = mf.DeviceMesh((len(ranks),), ("x",), ranks=list(ranks))
    with mf.FusionDefinition() as fd:
        x = fd.define_tensor([-1, 24], dtype=mf.DataType.Double)
        w = fd.define_tensor([12, 24], dtype=mf.DataType.Double)
        y = getattr(fd.ops, kind)(fd.ops.linear(x, w))
        fd.add_output(y)
        fd.mesh_split(x, mesh, [None, "x"] if kind == "tanh" else ["x", None])
        fd.mesh_split(w, mesh, [None, "x"] if kind == "tanh" else [None, None])
        fd.mesh_split(y, mesh, [None, None] if kind == "tanh" else ["x", None])
    return fd, x, w


def schedule(seed: int, count: int) -> list[tuple[tuple[int, ...], str, int, int]]:
    """One order of calls of all ranks: by which ranks, which op, how many rows, and the seed of the numbers."""
    draw = random.Random(seed)
    groups = draw.sample(GROUPS, 4)
    kinds = ("tanh", "relu")
    return [(draw.choice(groups), draw.choice(kinds), draw.choice((12, 24)), n) for n in range(count)]


def on_rank_in_groups(seed: int, count: int) -> list[str]:
    """Each rank makes its own calls only; what is wrong with them, against torch on whole tensors."""
    world, made, wrong = mf.World.current(), {}, []
    for ranks, kind, rows, number in schedule(seed, count):
        if world.rank not in ranks:
            continue
        if (ranks, kind) not in made:
            made[ranks, kind] = layer(ranks, kind)
        fd, x, w = made[ranks, kind]
        generator = torch.Generator().manual_seed(number)
        given = [torch.randn(n, 24, generator=generator, dtype=torch.float64) for n in (rows, 12)]
        (found,) = fd.execute([mf.shard_tensor(t, v) for t, v in zip(given, (x, w), strict=True)], idle_ranks=True)
        expected = mf.shard_tensor(getattr(torch, kind)(F.linear(*given)), fd.fusion.outputs()[0])
        if not torch.allclose(found, expected):
            wrong.append(f"call {number} of {ranks}")
    return wrong


@pytest.mark.parametrize("seed", range(4))
def test_groups_run_their_own_definitions(ranks4: RankPool, seed: int) -> None:
    """Other ranks run others at the same time, and not as many; some are on all ranks, or on ranks of both groups."""
    assert len({ranks for ranks, *_ in schedule(seed, 80)}) == 4
    assert ranks4.run(on_rank_in_groups, seed, 80, timeout=120.0) == [[]] * 4


def on_rank_of_torch_mesh() -> list[str]:
    """Each row of torch's mesh runs its own definition, on DTensors of its sub-mesh; then both run one together."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Replicate, Shard

    world = mf.World.current()
    if not dist.is_initialized():
        join_default_group(world, torch.device("cpu"))
    both = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    row, wrong = both["tp"], []
    for step in range(6 + 5 * both.get_local_rank("dp")):
        x = torch.arange(8.0).reshape(2, 4) + step + both.get_local_rank("dp")
        with mf.FusionDefinition() as fd:
            given = fd.from_pytorch(DTensor.from_local(x.chunk(2, 1)[row.get_local_rank()], row, [Shard(1)]))
            y = fd.ops.sum(given, [both.get_local_rank("dp")])  # another op in each row
            fd.add_output(y)
        (found,) = fd.execute(
            [DTensor.from_local(x.chunk(2, 1)[row.get_local_rank()], row, [Shard(1)])], idle_ranks=True
        )
        if not torch.equal(found.full_tensor(), x.sum(both.get_local_rank("dp"))):
            wrong.append(f"row step {step}: {found}")
    with mf.FusionDefinition() as fd:
        t = DTensor.from_local(torch.full((1, 1), float(world.rank)), both, [Shard(0), Shard(1)])
        y = fd.ops.sum(fd.from_pytorch(t), [0, 1])
        fd.add_output(y)
    (found,) = fd.execute([t])
    assert Replicate() in found.placements or found.shape == ()
    return wrong if found.full_tensor() == 6 else [*wrong, f"all: {found}"]


def test_each_row_of_torchs_mesh_runs_its_own(ranks4: RankPool) -> None:
    assert ranks4.run(on_rank_of_torch_mesh, timeout=60.0) == [[]] * 4


# Ranks of a group that differ.


def on_rank_that_differs(odd: int) -> tuple[str, list[int]]:
    """Two groups, one of which has a rank with another op: what each rank gets, and the calls that worked."""
    world, worked = mf.World.current(), []
    ranks = (0, 1) if world.rank < 2 else (2, 3)
    try:
        for step in range(3):
            fd, x, w = layer(ranks, "tanh" if step < 2 or world.rank != odd else "relu")
            fd.execute([mf.shard_tensor(torch.ones(n, 24).double(), v) for n, v in ((4, x), (12, w))], idle_ranks=True)
            worked.append(step)
    except mf.RankError as error:
        return str(error), worked
    return "no error", worked


def test_only_ranks_of_a_group_that_differ_get_the_error(ranks4: RankPool) -> None:
    found = ranks4.run(on_rank_that_differs, 3)
    assert found[:2] == [("no error", [0, 1, 2])] * 2
    for text, worked in found[2:]:
        assert worked == [0, 1]
        assert re.match(r"ranks disagree on the program: found rank 2 '.*tanh.*'; rank 3 '.*relu.*', needed one", text)


BEGIN = """
import os, sys, time
import torch
import meshfuse as mf
world = mf.World.current()
rank = world.rank

def layer(ranks, rows=4, reduced=False):
    with mf.FusionDefinition() as fd:
        x = fd.define_tensor([-1])
        y = fd.ops.sum(x, [0]) if reduced else fd.ops.relu(x)
        fd.add_output(y)
        fd.mesh_split(x, mf.DeviceMesh((len(ranks),), ("x",), ranks=list(ranks)), ["x"])
    return lambda dtype=torch.float32: fd.execute([torch.ones(rows, dtype=dtype)], idle_ranks=True)

row = (0, 1) if rank < 2 else (2, 3)
"""


@pytest.mark.parametrize("swapped", [1, 2, 5])
def test_another_order_of_calls_of_a_group_and_of_all(tmp_path, swapped: int) -> None:
    """Only the ranks of one row differ, and they say it; the other row hears of it, as all are needed for what follows.

    Nothing here communicates but what is compared.
    """
    script = f"""
own, every = layer(row), layer((0, 1, 2, 3))
for step in range(10):
    for call in (every, own) if (rank, step) == (1, {swapped}) else (own, every):
        call()
"""
    results = run_bare(BEGIN + script, tmp_path, 4)
    assert [code for code, _ in results] == [1] * 4, results
    message = (
        r"ranks disagree on the order of calls: found rank 0 'call \d+: .*'; rank 1 'call \d+: .*', needed one value"
    )
    for _, text in results:
        assert re.search(message, text) and "(at script.py:" in text and "Timeout" not in text, text


CROSSED = {
    "other ranks of a mesh": "layer((0, 1) if rank == 1 else (0, 1, 2, 3))()",
    "another group first": "layer((0, 1) if rank < 1 else (1, 2) if rank == 1 else (0, 1, 2))(); layer((0, 1, 2))()",
}


@pytest.mark.parametrize("what", CROSSED)
def test_ranks_that_wait_for_each_other_in_other_places(tmp_path, what: str) -> None:
    """Long before the time limit: each compares with ranks of which one compares with others first."""
    results = run_bare(BEGIN + CROSSED[what], tmp_path, 4 if "mesh" in what else 3, limit=35)
    assert all(code == 1 for code, _ in results), results
    for rank, (_, text) in enumerate(results):
        assert re.search(
            r"ranks disagree on what comes next: found rank \d 'comparing the program of ranks \d, .*'; rank \d "
            r"'comparing the program of ranks .*', needed one value on all of them\. Make every rank run the same", text
        ), (rank, text)  # fmt: skip
        assert "Timeout" not in text and "(at script.py:" in text, (rank, text)


def test_a_rank_that_joins_late_hears_of_a_failure_before_it(tmp_path) -> None:
    """Rank 0, which serves the store, has failed by then; without it, rank 2 would wait for it to its time limit."""
    late = 'import os, time\nif os.environ["RANK"] == "2":\n    time.sleep(2)\n'
    results = run_bare(late + BEGIN + CROSSED["other ranks of a mesh"], tmp_path, 4, limit=35)
    assert all(code == 1 and "ranks disagree on what comes next" in text for code, text in results), results


def test_a_group_that_ends_first_leaves_the_other_its_job(tmp_path) -> None:
    """Rank 0 serves the store through which the others meet: it stays as long as they live, whatever the time limit."""
    script = """
world.limit = 1.0
layer(row, reduced=True)()
if rank > 1:
    for step in range(8):
        time.sleep(0.5)
        layer((3, 2), rows=4 + step, reduced=True)()
    print("all steps")
"""
    results = run_bare(BEGIN + script, tmp_path, 4)
    assert [code for code, _ in results] == [0] * 4, results
    assert all("all steps" in text for _, text in results[2:])


@pytest.mark.parametrize("catches", ["both", "one"])
def test_an_error_that_ranks_of_a_group_catch(tmp_path, catches: str) -> None:
    """Where both catch it they go on, with no other rank; where one does, the group's next call is an error."""
    script = f"""
world.limit = 2.0 if {catches!r} == "one" else 20.0
own, every = layer(row, reduced=True), layer((0, 1, 2, 3), reduced=True)
own(), every()
if rank < 2:
    try:
        own(torch.float32 if {catches!r} == "one" and rank else torch.int32)
    except ValueError as error:
        print("caught", error)
    for step in range(3):
        own()
every()
print("all steps")
"""
    results = run_bare(BEGIN + script, tmp_path, 4)
    if catches == "both":
        assert [code for code, _ in results] == [0] * 4 and all("all steps" in text for _, text in results), results
    else:
        assert [code for code, _ in results] == [1] * 4 and not any("all steps" in text for _, text in results), results
