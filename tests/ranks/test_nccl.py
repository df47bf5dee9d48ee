"""Ranks over NCCL, on one GPU: collectives in every dtype, programs, nvFuser's kernels, CUDA graphs, ranks that end.

NCCL refuses two ranks on one device of one machine. With a NCCL_HOSTID each, ranks count as machines, and talk by way
of sockets: slow, but with NCCL's kernels, streams and graphs.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import test_chunks
import torch
from rank_pool import START, RankPool, run_bare
from rank_programs import CASES
from test_collectives import DTYPES, GATHERED, SIZES, reduced, reducible, values

import meshfuse as mf
from meshfuse.sharding.data import shard

sys.path.insert(0, str(Path(__file__).parents[1] / "nvfuser"))

from whole_programs import PROGRAMS  # pyright: ignore[reportMissingImports]

pytestmark = pytest.mark.gpu

APART = {"NCCL_SOCKET_IFNAME": "lo", "NCCL_NET": "Socket", "NCCL_DEBUG": "WARN"}
LIMITS = {torch.float64: 1e-10, torch.float32: 1e-4}
DTYPE = {torch.float64: mf.DataType.Double, torch.float32: mf.DataType.Float}


@pytest.fixture(scope="session")
def pool() -> Iterator[RankPool]:
    """Two ranks: they take turns on the GPU, which more of them make too slow."""
    made = RankPool(2, timeout=40.0)
    yield made
    made.close()


def stand_apart() -> None:
    """Be a machine of one's own to NCCL."""
    os.environ.update(APART, NCCL_HOSTID=f"rank {os.environ['RANK']}")


def is_nccl(device: str) -> bool:
    from meshfuse.runtime.nccl import Nccl

    world = mf.World.current()
    made = world.group(world.all_ranks, "all")._device
    return device == "cpu" or isinstance(made, Nccl)


# collectives ------------------------------------------------------------------------------------------------------


def on_rank_reduce(device: str) -> list[str]:
    """What is wrong of all-reduces and reduce-scatters in every dtype."""
    world, wrong = mf.World.current(), []
    group = world.group(world.all_ranks, "all")
    stand_apart()
    with torch.device(device):
        for dtype, n in ((dtype, n) for dtype in DTYPES for n in SIZES):
            for op in reducible(dtype):
                whole = values(world.rank, n, dtype)
                group.all_reduce(whole, op).wait()
                part = torch.empty(n, dtype=dtype)
                group.reduce_scatter(part, values(world.rank, n * world.size, dtype), op).wait()
                expected = reduced(world.size, n * world.size, dtype, op).chunk(world.size)[world.rank]
                if not torch.equal(whole, reduced(world.size, n, dtype, op)):
                    wrong.append(f"all_reduce {dtype} {op} {n}")
                if not torch.equal(part, expected):
                    wrong.append(f"reduce_scatter {dtype} {op} {n}")
    assert is_nccl(device)
    return wrong


def on_rank_move(device: str) -> list[str]:
    """What is wrong of all-gathers, exchanges of unequal parts, broadcasts, and messages in a ring."""
    world, wrong = mf.World.current(), []
    group, rank, size = world.group(world.all_ranks, "all"), world.rank, world.size
    stand_apart()
    with torch.device(device):
        for dtype in DTYPES:
            made, works, sent = {}, [], []
            for n in GATHERED:
                made[f"gathered {n}"] = (
                    torch.empty(size * n, dtype=dtype), torch.cat([values(r, n, dtype) for r in range(size)])
                )  # fmt: skip
                works.append(group.all_gather(made[f"gathered {n}"][0], values(rank, n, dtype)))
            counts = [rank * peer for peer in range(size)]
            sent.append(torch.cat([values(rank * size + to, rank * to, dtype) for to in range(size)]))
            exchanged = torch.empty(sum(counts), dtype=dtype)
            works.append(group.all_to_all(exchanged, sent[-1], counts, counts))
            made["exchanged"] = exchanged, torch.cat([values(r * size + rank, rank * r, dtype) for r in range(size)])
            copied = values(rank, 9, dtype)
            works.append(group.broadcast(copied, size - 1))
            made["copied"] = copied, values(size - 1, 9, dtype)
            received = torch.empty(5, dtype=dtype)
            sent.append(values(rank, 5, dtype))
            first, last = (group.send, sent[-1], (rank + 1) % size), (group.recv, received, (rank - 1) % size)
            for call, tensor, peer in (first, last) if rank % 2 else (last, first):
                works.append(call(tensor, peer))
            made["received"] = received, values((rank - 1) % size, 5, dtype)
            for work in works:
                work.wait()
            wrong += [f"{name} {dtype}" for name, (a, b) in made.items() if not torch.equal(a, b)]
    assert is_nccl(device)
    return wrong


@pytest.mark.parametrize("function", [on_rank_reduce, on_rank_move])
def test_collectives(pool: RankPool, function: Any) -> None:
    assert pool.run(function, "cuda", timeout=90) == [[], []]


# programs ---------------------------------------------------------------------------------------------------------


def far(found: torch.Tensor, expected: torch.Tensor) -> float:
    """The largest difference relative to the largest value."""
    difference = (found.double().cpu() - expected.double().cpu()).abs()
    return float(difference.max() / expected.abs().max().clamp_min(1e-3).cpu()) if expected.numel() else 0.0


def on_rank_case(device: str, name: str) -> list[float]:
    """Errors of the global outputs of two calls."""
    case = CASES[2][name]
    stand_apart()
    fd, expected = case.define(), case.expected()
    inputs = [*(t.to(device) for t in case.inputs()), *case.scalars]
    return [far(a, b) for _ in range(2) for a, b in zip(fd(*inputs), expected, strict=True)]


@pytest.mark.parametrize("name", CASES[2])
def test_programs(pool: RankPool, name: str) -> None:
    for errors in pool.run(on_rank_case, "cuda", name, timeout=50):
        assert max(errors) <= 1e-12


def on_rank_steps(device: str, name: str, dtype: torch.dtype, options: dict[str, Any]) -> list[float]:
    """Errors of this rank's outputs in some steps, each with other arguments, looked at when all are done."""
    world, program = mf.World.current(), PROGRAMS[name]
    stand_apart()
    fd = program.definition(mf.DeviceMesh((world.size,), ("r",)), DTYPE[dtype])
    views = [value for value in fd.fusion.inputs() if isinstance(value, mf.TensorView)]
    steps = []
    for turn in range(4):
        inputs = [torch.roll(t, turn, 0) if isinstance(t, torch.Tensor) else t for t in program.inputs(dtype)]
        tensors = [t for t in inputs if isinstance(t, torch.Tensor)]
        local = [mf.shard_tensor(t, view).to(device) for t, view in zip(tensors, views, strict=True)]
        steps.append((fd.execute([*local, *program.scalars], **options), program.expected(inputs)))
    shardings = fd.output_shardings()
    return [far(out, shard(whole, sharding, world.rank)) for outputs, expected in steps
            for out, whole, sharding in zip(outputs, expected, shardings, strict=True)]  # fmt: skip


WAYS: dict[str, dict[str, Any]] = {
    "torch": {"backend": "eager"}, "nvfuser": {"backend": "nvfuser"},
    "torch in a graph": {"backend": "eager", "cuda_graph": True},
    "nvfuser in a graph": {"backend": "nvfuser", "cuda_graph": True},
}  # fmt: skip


# A graph takes no numbers, and draws none: both are refused.
STEPS = [
    (name, way) for name, program in PROGRAMS.items() for way, options in WAYS.items()
    if not (options.get("cuda_graph") and (name == "dropout" or program.scalars))
]  # fmt: skip


@pytest.mark.parametrize("dtype", DTYPE, ids=str)
@pytest.mark.parametrize(("name", "way"), STEPS)
def test_steps(pool: RankPool, name: str, way: str, dtype: torch.dtype) -> None:
    for errors in pool.run(on_rank_steps, "cuda", name, dtype, WAYS[way], timeout=50):
        assert max(errors) <= LIMITS[dtype]


def on_rank_chunks(device: str, case: Any, arguments: tuple[Any, ...]) -> None:
    """Chunks and rings: sends and broadcasts beside products."""
    stand_apart()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(test_chunks, "shard", lambda *given: shard(*given).to(device))
        getattr(test_chunks, case)(*arguments)


@pytest.mark.parametrize(("case", "arguments"), [(case.__name__, given) for case, given in test_chunks.CASES], ids=str)
def test_chunks_and_rings(pool: RankPool, case: str, arguments: tuple[Any, ...]) -> None:
    pool.run(on_rank_chunks, "cuda", case, arguments, timeout=50)


# ranks that end ---------------------------------------------------------------------------------------------------

ON_A_GPU = (
    f"import os\nos.environ.update({APART!r}, NCCL_HOSTID='rank ' + os.environ['RANK'])\n"
    + START.replace("torch.ones(rows, 6)", "torch.ones(rows, 6, device='cuda')")
)  # fmt: skip
ENDS = {
    "dies": "if world.rank == 1: os._exit(3)\n",
    "raises": "if world.rank == 1: raise ValueError('no more')\n",
    "hangs": "if world.rank == 1: time.sleep(300)\n",
}


@pytest.mark.parametrize("graph", [False, True])
@pytest.mark.parametrize("end", ENDS)
def test_a_rank_ends_with_its_peer(end: str, graph: bool, tmp_path: Path) -> None:
    """Though the other one's host waits for its device alone: for what follows from a collective.

    torch's watchdog ends a rank whose connection is lost, without names.
    """
    call = f"fd.execute(shards, cuda_graph={graph})"
    script = ON_A_GPU.replace("fd.execute(shards)", call) + ENDS[end] + f"print('sum', {call}[0].sum().item())\n"
    found = run_bare(script, tmp_path, size=2, limit=8, stopped=1 if end == "hangs" else None)
    code, output = found[0]
    assert code not in (0, None) and "HUNG" not in output and "sum" not in output, found
    assert (code < 0 and not graph and end != "hangs") or ("rank 1" in output and "on rank 0" in output), found
