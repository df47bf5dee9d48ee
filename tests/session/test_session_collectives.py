"""Collectives of groups and of all workers, even and uneven, of every dtype (TVM Disco's test_ccl)."""

from __future__ import annotations

import pytest
import torch

import meshfuse.session as di
from meshfuse.errors import ArgumentError


def part(worker: int, rows: int = 3, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """What worker number `worker` holds."""
    return (torch.arange(rows * 2).reshape(rows, 2) + 10 * worker).to(dtype)


def on_each(session: di.Session, dtype: torch.dtype = torch.float32, uneven: bool = False) -> di.DRef:
    rows = 1 if uneven else 0
    return session.call(
        lambda: (torch.arange((3 + rows * di.worker_id()) * 2).reshape(-1, 2) + 10 * di.worker_id()).to(dtype)
    )


def members(worker: int, in_group: bool) -> list[int]:
    return [worker // 2 * 2, worker // 2 * 2 + 1] if in_group else [0, 1, 2, 3]


@pytest.mark.parametrize("in_group", [True, False])
@pytest.mark.parametrize("op", ["sum", "prod", "min", "max", "avg"])
def test_allreduce(session: di.Session, op: str, in_group: bool) -> None:
    src, dst = on_each(session), session.empty((3, 2))
    session.allreduce(src, dst, op, in_group)
    reduce = {"sum": lambda x: x.sum(0), "prod": lambda x: x.prod(0), "min": lambda x: x.amin(0),
              "max": lambda x: x.amax(0), "avg": lambda x: x.mean(0)}[op]  # fmt: skip
    for worker in range(4):
        assert torch.equal(dst[worker], reduce(torch.stack([part(w) for w in members(worker, in_group)])))
        assert torch.equal(src[worker], part(worker)), "the source stays"


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16, torch.int8, torch.int64, torch.bool,
                                   torch.complex64, torch.float8_e4m3fn])  # fmt: skip
def test_dtypes(processes: di.Session, dtype: torch.dtype) -> None:
    src = on_each(processes, dtype)
    gathered = processes.allgather(src, in_group=False)
    whole = torch.cat([part(w, dtype=dtype) for w in range(4)])
    assert gathered[2].dtype == dtype and torch.equal(gathered[2].view(torch.uint8), whole.view(torch.uint8))
    back = processes.empty((3, 2), dtype)
    processes.scatter(whole, back, in_group=False)
    assert all(torch.equal(back[w].view(torch.uint8), part(w, dtype=dtype).view(torch.uint8)) for w in range(4))
    if dtype not in (torch.bool, torch.float8_e4m3fn):
        reduced = processes.allreduce(src, in_group=False)
        assert torch.equal(reduced[1], torch.stack([part(w, dtype=dtype) for w in range(4)]).sum(0, dtype=dtype))


@pytest.mark.parametrize("uneven", [False, True])
@pytest.mark.parametrize("in_group", [True, False])
def test_gathers_and_scatters(session: di.Session, in_group: bool, uneven: bool) -> None:
    def piece(worker: int) -> torch.Tensor:
        return part(worker, 3 + worker * uneven)

    src = on_each(session, uneven=uneven)
    gathered, first = session.allgather(src, None, in_group), session.gather_to_worker0(src, None, in_group)
    for worker in range(4):
        whole = torch.cat([piece(w) for w in members(worker, in_group)])
        assert torch.equal(gathered[worker], whole)
        if worker == members(worker, in_group)[0]:
            assert torch.equal(first[worker], whole)
        else:
            assert first[worker] is None
    dst = session.call(lambda x: torch.empty_like(x), src)
    session.scatter_from_worker0(first, dst, in_group)
    assert all(torch.equal(dst[worker], piece(worker)) for worker in range(4))


def test_broadcasts(session: di.Session) -> None:
    host = torch.arange(6)
    for in_group in (True, False):
        dst = session.empty((2, 3), "int64")
        session.broadcast(host, dst, in_group)
        new = session.broadcast(host, None, in_group)
        src = on_each(session)
        copied = session.broadcast_from_worker0(src, None, in_group)
        for worker in range(4):
            assert torch.equal(dst[worker], host.reshape(2, 3)) and torch.equal(new[worker], host)
            assert torch.equal(copied[worker], part(members(worker, in_group)[0]))


def test_sends_between_groups_and_workers(session: di.Session) -> None:
    src = on_each(session)
    after, before, one = (session.call(torch.zeros, (3, 2)) for _ in range(3))
    session.send_to_next_group(src, after)
    session.send_to_previous_group(src, before)
    session.send_to_worker(src, 1, one, 3)
    zero = torch.zeros(3, 2)
    assert [torch.equal(after[w], x) for w, x in enumerate([zero, zero, part(0), part(1)])] == [True] * 4
    assert [torch.equal(before[w], x) for w, x in enumerate([part(2), part(3), zero, zero])] == [True] * 4
    assert [torch.equal(one[w], x) for w, x in enumerate([zero, zero, zero, part(1)])] == [True] * 4


def test_init_ccl_and_names_of_disco(session: di.Session) -> None:
    session.init_ccl("gloo")
    src = on_each(session)
    reduced = session.get_global_func("runtime.disco.allreduce")(src, "sum", False)
    assert torch.equal(reduced[3], torch.stack([part(w) for w in range(4)]).sum(0))
    with pytest.raises(ArgumentError, match=r'init_ccl: found .mpi. with 0 devices, needed "gloo" or "nccl"'):
        session.init_ccl("mpi")


def test_wrong_arguments(session: di.Session) -> None:
    src = on_each(session)
    with pytest.raises(ArgumentError, match="allreduce: op: found 'xor', needed one of sum, prod, min, max, avg"):
        session.allreduce(src, None, "xor")
    session.allreduce(src, session.empty((2, 2)))
    with pytest.raises(ArgumentError, match=r"allreduce: found 4 elements of torch.float32, needed 6 elements"):
        session.sync()
    session.allgather(session.call(int, 3))
    with pytest.raises(ArgumentError, match="a collective on worker 0: found 3, needed a tensor in the DRef"):
        session.sync()
    session.sync()
