"""Definitions on real gloo ranks, with shards and with global tensors, against unsharded torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import forked
import pytest
import torch
from rank_pool import base_environment
from rank_programs import CASES, DOUBLE, GRID, MLP, PIPELINE, Tensors, mlp, mlp_torch, pipeline, reduce_scatter_linear

import meshfuse as mf
from meshfuse.sharding.data import shard, unshard

pytestmark = pytest.mark.ranks


@dataclass(frozen=True)
class Found:
    """What a rank has: its outputs from its shards, the global ones, and how the outputs are split."""

    shards: list[torch.Tensor | None]
    whole: list[torch.Tensor]
    simulated: list[torch.Tensor]
    shardings: list[mf.Sharding]


def input_views(fd: mf.FusionDefinition) -> list[Any]:
    return [value for value in fd.fusion.inputs() if isinstance(value, mf.TensorView)]


def cut(fd: mf.FusionDefinition, tensors: Tensors) -> list[torch.Tensor]:
    return [mf.shard_tensor(t, tv) for t, tv in zip(tensors, input_views(fd), strict=True)]


def on_rank_case(size: int, name: str) -> Found:
    case = CASES[size][name]
    fd, tensors = case.define(), case.inputs()
    shards = fd.execute([*cut(fd, tensors), *case.scalars])
    shardings = fd.output_shardings()
    return Found(shards, fd(*tensors, *case.scalars), fd.simulate([*tensors, *case.scalars]), shardings)


def check_case(size: int, name: str, found: list[Found]) -> None:
    expected = CASES[size][name].expected()
    for rank, has in enumerate(found):
        for whole, simulated, wanted in zip(has.whole, has.simulated, expected, strict=True):
            torch.testing.assert_close(whole, wanted, rtol=1e-12, atol=1e-12)
            torch.testing.assert_close(simulated, wanted, rtol=1e-12, atol=1e-12)
        for local, sharding, wanted in zip(has.shards, has.shardings, expected, strict=True):
            assert (local is None) == (rank not in sharding.mesh)
            if local is not None:
                torch.testing.assert_close(local, shard(wanted, sharding, rank), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", CASES[2])
def test_on_two_ranks(ranks2, name):
    check_case(2, name, ranks2.run(on_rank_case, 2, name))


@pytest.mark.parametrize("name", CASES[4])
def test_on_four_ranks(ranks4, name):
    check_case(4, name, ranks4.run(on_rank_case, 4, name))


def test_an_output_on_one_mesh_is_none_elsewhere(ranks4):
    found = ranks4.run(on_rank_case, 4, "two meshes")
    missing = [[local is None for local in has.shards] for has in found]
    assert missing == [[True, False]] * 2 + [[False, True]] * 2
    assert [has.shardings[0].mesh.ranks for has in found] == [(2, 3)] * 4


def test_the_expected_collectives():
    """What the layouts above are known for, whatever is cheapest elsewhere."""
    names = ("mlp", "nvfuser mlp", "sequence parallel")
    bills = {name: CASES[4][name].define().bill(*CASES[4][name].shapes) for name in names}
    bills["reduced rows"] = reduce_scatter_linear(4, ((6, 64), (12, 64))).bill()
    kinds = {name: [entry.collective for entry in bill.entries] for name, bill in bills.items()}
    assert kinds["mlp"] == kinds["nvfuser mlp"] == ["all-reduce"]
    assert kinds["sequence parallel"] == ["all-gather", "reduce-scatter"]
    assert kinds["reduced rows"] == ["reduce-scatter"]


def on_rank_sizes(batches: list[int]) -> list[torch.Tensor]:
    """One definition called with batch after batch; known sizes are planned once."""
    fd, results = mlp(True), []
    for batch in batches:
        tensors = [torch.randn(s, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
                   for s in ((batch, *MLP[0][1:]), *MLP[1:])]  # fmt: skip
        results.append(fd.execute(cut(fd, tensors))[0])
    assert len(fd._programs.compiled) == len(set(batches))
    return results


def test_an_open_size_changes_from_call_to_call(ranks4):
    batches = [4, 2, 8, 4]
    found = ranks4.run(on_rank_sizes, batches)
    for place, batch in enumerate(batches):
        tensors = [torch.randn(s, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
                   for s in ((batch, *MLP[0][1:]), *MLP[1:])]  # fmt: skip
        expected = mlp_torch(*tensors)
        for rank in range(4):
            half = expected[batch // 2 * (rank // 2) :][: batch // 2]
            torch.testing.assert_close(found[rank][place], half, rtol=1e-12, atol=1e-12)


def on_rank_pipeline_sizes(batches: list[int]) -> list[list[torch.Tensor | None]]:
    fd = pipeline()
    made = torch.Generator().manual_seed(5)
    weights = [torch.randn(s, generator=made, dtype=torch.float64) for s in PIPELINE[1:]]
    return [fd.execute(cut(fd, [torch.ones(batch, 6, dtype=torch.float64), *weights])) for batch in batches]


def test_an_open_size_is_known_to_ranks_outside_the_mesh(ranks4):
    """Ranks 2 and 3 hold nothing of the batch, and get its size from what mf.shard_tensor gives them."""
    found = ranks4.run(on_rank_pipeline_sizes, [3, 5, 3])
    assert [out[0].shape[0] for out in found[2]] == [out[0].shape[0] for out in found[3]] == [3, 5, 3]
    assert all(out[0] is None for out in found[0] + found[1])


AXES = mf.DeviceMesh((2, 2), ("a", "b"))
LAYOUTS: list[list[Any]] = [
    [None, None], ["a", None], [None, "b"], ["a", "b"], ["b", "a"], [("a", "b"), None], [("b", "a"), None],
    [None, ("a", "b")], [[mf.Split(3), mf.Split(2, "a")], "b"], ["b", [mf.Split(None), mf.Split(2, "a")]],
]  # fmt: skip
SUMMED: list[list[Any]] = [["a", None, None], [("a", "b"), None, None], ["b", "a", None]]


def on_rank_reshard(shape: tuple[int, int], after_sum: bool) -> list[str]:
    """All pairs of layouts; returns those that give this rank other elements than its part of the whole."""
    wrong = []
    rank = mf.World.current().rank
    x = torch.arange(shape[0] * shape[1] * 4, dtype=torch.float64).view(4, *shape)
    for source in SUMMED if after_sum else LAYOUTS:
        for target in LAYOUTS:
            with mf.FusionDefinition() as fd:
                t = fd.define_tensor(list(x.shape if after_sum else shape), dtype=DOUBLE)
                out = fd.ops.sum(t, dims=[0]) if after_sum else fd.ops.set(t)
                fd.add_output(out)
                fd.mesh_split(t, AXES, source)
                fd.mesh_split(out, AXES, target)
            given = x if after_sum else x[0]
            found = fd.execute([mf.shard_tensor(given, t)])[0]
            wanted = mf.shard_tensor(x.sum(0) if after_sum else x[0], out)
            if not torch.equal(found, wanted):
                wrong.append(f"rank {rank}: {source} -> {target}: {found} is not {wanted}")
    return wrong


@pytest.mark.sampled(2)
@pytest.mark.parametrize("after_sum", [False, True])
@pytest.mark.parametrize("shape", [(12, 8), (5, 3)])
def test_reshard_between_all_pairs_of_layouts(ranks4, shape, after_sum):
    assert ranks4.run(on_rank_reshard, shape, after_sum) == [[]] * 4


def noisy(mesh: mf.DeviceMesh | None) -> mf.FusionDefinition:
    """Dropout by uniform numbers, and normal noise."""
    with mf.FusionDefinition(seed=7) as fd:
        x = fd.define_tensor([6, 5], dtype=DOUBLE)
        keep = fd.ops.lt(fd.ops.uniform(0.0, 1.0, [6, 5], dtype=DOUBLE), 0.5)
        y = fd.ops.where(keep, x, 0.0) + fd.ops.normal(0.0, 1.0, [6, 5], dtype=DOUBLE)
        fd.add_output(y)
        if mesh is not None:
            fd.mesh_split(x, mesh, ["dp", "tp"])
    return fd


def on_rank_noise() -> list[torch.Tensor]:
    """Two steps; in between, one rank simulates, which must not change its numbers."""
    fd = noisy(GRID)
    local = cut(fd, [torch.ones(6, 5, dtype=torch.float64)])
    first = fd.execute(local)[0]
    if mf.World.current().rank == 1:
        fd.simulate([torch.ones(6, 5, dtype=torch.float64)])
    return [first, fd.execute(local)[0]]


def test_random_numbers_do_not_depend_on_the_ranks(ranks4):
    ones = torch.ones(6, 5, dtype=torch.float64)
    simulated, single = noisy(GRID), noisy(None)
    found = ranks4.run(on_rank_noise)
    steps = []
    for step in range(2):
        sharding = simulated.output_shardings((6, 5))[0]
        whole = unshard({rank: found[rank][step] for rank in range(4)}, sharding, (6, 5))
        assert torch.equal(whole, simulated.simulate([ones])[0])
        assert torch.equal(whole, single(ones)[0])
        steps.append(whole)
    assert not torch.equal(*steps)


class ByteCounter:
    """Stands in Group's methods and adds up what this rank sends, an all-reduce counted as a ring's."""

    def __init__(self, group_class: Any):
        self.total = 0.0
        self._class = group_class
        methods = ("all_reduce", "all_gather", "all_to_all", "send")
        self._before = {name: getattr(group_class, name) for name in methods}

    def __enter__(self) -> ByteCounter:
        counts = {
            "all_reduce": lambda g, t, op: 2 * (g.size - 1) / g.size * t.nbytes,
            "all_gather": lambda g, out, t: (g.size - 1) * t.nbytes,
            "all_to_all": lambda g, out, t, outs, ins: (sum(ins) - ins[g.index]) * t.itemsize,
            "send": lambda g, t, peer: t.nbytes,
        }
        for name, count in counts.items():
            setattr(self._class, name, self._counted(self._before[name], count))
        return self

    def _counted(self, method: Callable[..., Any], count: Callable[..., float]) -> Callable[..., Any]:
        def call(group: Any, *args: Any) -> Any:
            self.total += count(group, *args)
            return method(group, *args)

        return call

    def __exit__(self, *_: object) -> None:
        for name, method in self._before.items():
            setattr(self._class, name, method)


def on_rank_bytes(name: str) -> tuple[float, dict[tuple[str, str], float], list[float]]:
    """(bytes counted, what this rank's program says of each collective's tensor and move, the bill)."""
    from meshfuse.runtime.group import Group

    case = CASES[4][name]
    fd, world = case.define(), mf.World.current()
    shards = cut(fd, case.inputs())
    with ByteCounter(Group) as counter:
        fd.execute([*shards, *case.scalars])
    modelled = {(c.tensor, c.step): c.wire for c in fd.host_program(world.rank).communications}
    return counter.total, modelled, [entry.wire for entry in fd.bill().entries]


@pytest.mark.parametrize("name", [name for name in CASES[4] if not name.startswith("column")])
def test_the_bill_is_what_goes_over_the_wire(ranks4, name):
    found = ranks4.run(on_rank_bytes, name)
    everyone: dict[tuple[str, str], list[float]] = {}
    for counted, modelled, _ in found:
        assert counted == pytest.approx(sum(modelled.values()))
        for move, wire in modelled.items():
            everyone.setdefault(move, []).append(wire)
    assert everyone
    means = [_mean_of_senders(move[1], wires) for move, wires in everyone.items()]
    for _, _, bill in found:
        assert sorted(bill) == pytest.approx(sorted(means))


def _mean_of_senders(move: str, wires: list[float]) -> float:
    """Messages go from a mesh of half the ranks that tell of them; collectives are among all of theirs."""
    return sum(wires) / (len(wires) / 2 if move.startswith("send-recv") else len(wires))


ROOT = Path(__file__).resolve().parents[2]
# What the ranks do, on four of them, is the same whoever starts them.
LAUNCHERS = {
    "meshfuse run": ("meshfuse.runtime.launcher --ranks 4", 4, "dp=2,tp=2"),
    "torchrun": ("torch.distributed.run --nproc-per-node=2 --master-addr=127.0.0.1 --standalone", 2, "tp=2"),
}


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_the_gpt_example(launcher, tmp_path):
    words, ranks, mesh = LAUNCHERS[launcher]
    script = [str(ROOT / "examples/gpt/run.py"), "--mesh", mesh, "--steps", "2", "--generate", "2"]
    # torchrun leaves its folder for logs behind.
    done = forked.finished(["-m", *words.split(), *script], base_environment(TMPDIR=str(tmp_path)), tmp_path, 280)
    assert done.returncode == 0, done.stderr
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("largest difference")]
    assert float(line.split()[5]) <= 1e-5
    assert f"{ranks} gloo ranks" in done.stdout and "In the beginning" in done.stdout
