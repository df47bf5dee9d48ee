"""Every collective over real gloo ranks, in every dtype, against what unsharded torch says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

HERE = Path(__file__).resolve()
pytestmark = pytest.mark.ranks

INTEGERS = [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64]
FLOATS = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
DTYPES = [torch.bool, *INTEGERS, *FLOATS, torch.complex64, torch.complex128]
OPS = ["sum", "prod", "max", "min"]
# The last one is beyond the size up to which all-reduce gathers, in every dtype.
SIZES = [1, 12, 140_000]
# The last one is beyond the size up to which an all-gather is an exchange, in every dtype.
GATHERED = [6, 270_000]


def values(rank: int, n: int, dtype: torch.dtype) -> torch.Tensor:
    """Small whole numbers, exact in every dtype under sum and product; other ones on every rank."""
    numbers = (torch.arange(n) * 7 + rank * 5) % 4 - int(dtype.is_signed)
    if dtype == torch.bool:
        return numbers > 1
    if dtype.is_complex:
        return torch.complex(numbers.double(), (numbers + rank).double()).to(dtype)
    return numbers.to(dtype)


def reduced(size: int, n: int, dtype: torch.dtype, op: str) -> torch.Tensor:
    """The reduction of all ranks' values by unsharded torch, in a wide dtype."""
    stack = torch.stack([values(rank, n, dtype) for rank in range(size)])
    if dtype == torch.bool:
        return stack.any(0) if op in ("sum", "max") else stack.all(0)
    wide = stack.to(torch.complex128) if dtype.is_complex else stack.double()
    result = {"sum": wide.sum, "prod": wide.prod}.get(op, getattr(wide, "a" + op, None))(0)
    return result.to(dtype)


def reducible(dtype: torch.dtype) -> list[str]:
    return ["sum", "prod"] if dtype.is_complex else OPS


def _world_group():
    from meshfuse.runtime.world import World

    world = World.current()
    return world, world.group(world.all_ranks, "all")


def on_rank_all_reduce(dtype: torch.dtype) -> list[torch.Tensor]:
    world, group = _world_group()
    results = []
    for n in SIZES:
        for op in reducible(dtype):
            tensor = values(world.rank, n, dtype)
            group.all_reduce(tensor, op).wait()
            results.append(tensor)
    return results


def on_rank_reduce_scatter(dtype: torch.dtype) -> list[torch.Tensor]:
    world, group = _world_group()
    results = []
    for n in SIZES:
        for op in reducible(dtype):
            out = torch.empty(n, dtype=dtype)
            group.reduce_scatter(out, values(world.rank, n * world.size, dtype), op).wait()
            results.append(out)
    return results


def on_rank_move(dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """All-gather, uneven all-to-all with empty parts, broadcast, and a ring of send/receive."""
    world, group = _world_group()
    rank, size = world.rank, world.size
    gathered = [torch.empty(size * n, dtype=dtype) for n in GATHERED]
    works = [group.all_gather(g, values(rank, n, dtype).view(2, -1)) for g, n in zip(gathered, GATHERED, strict=True)]
    sent = torch.cat([values(rank * size + to, rank * to, dtype) for to in range(size)])
    exchanged = torch.empty(sum(rank * of for of in range(size)), dtype=dtype)
    counts = [rank * peer for peer in range(size)]
    works.append(group.all_to_all(exchanged, sent, counts, counts))
    copied = values(rank, 9, dtype)
    works.append(group.broadcast(copied, size - 1))
    received = torch.empty(5, dtype=dtype)
    works.append(group.recv(received, (rank - 1) % size))
    works.append(group.send(values(rank, 5, dtype), (rank + 1) % size))
    for work in works:
        work.wait()
    return {"all_gather": torch.cat(gathered), "all_to_all": exchanged, "broadcast": copied, "recv": received}


def on_rank_by_the_host(function: str, dtype: torch.dtype, devices: list[str]) -> Any:
    """A function of this file whose tensors count as those of these ranks' devices."""
    from meshfuse.runtime import group as module
    from meshfuse.runtime.host_staging import Staged

    world, group = _world_group()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "_is_of_host", lambda tensor: False)
        patch.setattr(module, "device_name", lambda device: devices[world.rank])
        found = globals()[function](dtype)
    assert isinstance(group._device, Staged)
    return found


# Two ranks of four on one device are enough for NCCL to refuse.
@pytest.mark.sampled(2)
@pytest.mark.parametrize("devices", [["a", "a", "a", "a"], ["a", "b", "c", "a"]], ids="".join)
@pytest.mark.parametrize("function", ["on_rank_all_reduce", "on_rank_reduce_scatter", "on_rank_move"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.bool, torch.int64], ids=str)
def test_ranks_that_share_a_device_go_by_way_of_the_host(ranks4, function, dtype, devices):
    """The same results as of tensors of the host, which the tests below compare with torch's."""
    wanted = ranks4.run(f"{HERE}:{function}", dtype)
    for found, right in zip(ranks4.run(on_rank_by_the_host, function, dtype, devices), wanted, strict=True):
        both = [list(each.values()) if isinstance(each, dict) else each for each in (found, right)]
        assert all(torch.equal(a, b) for a, b in zip(*both, strict=True))


def on_rank_of_devices(devices: list[str]) -> tuple[str, int]:
    """What connects ranks with these devices, and how many buffers of the host three all-reduces took."""
    from meshfuse.runtime import group as module
    from meshfuse.runtime.host_staging import Staged
    from meshfuse.runtime.world import World

    class Known:
        def __init__(self, group, store, device):
            pass

        def all_reduce(self, tensor, op):
            return module.DONE

    world = World.current()
    group = module.Group(world, world.all_ranks, "of a test")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "_is_of_host", lambda tensor: False)
        patch.setattr(module, "device_name", lambda device: devices[world.rank])
        patch.setattr(module, "Nccl", Known)
        for _ in range(3):
            group.all_reduce(torch.ones(5)).wait()
    made = group._device
    return type(made).__name__, made._scratch.free if isinstance(made, Staged) else 0


def on_rank_groups_of_the_same_ranks(count: int) -> list[float]:
    """What ranks sum in groups that are made anew each time, while the ones before are still there."""
    from meshfuse.runtime.group import Group

    world, _ = _world_group()
    groups = [Group(world, world.all_ranks, f"number {number}") for number in range(count)]
    sums = []
    for number, group in enumerate(groups):
        tensor = torch.full((3,), float(number + world.rank))
        group.all_reduce(tensor).wait()
        sums.append(tensor[0].item())
    return sums


def test_groups_of_the_same_ranks_find_each_other(ranks4):
    """Not the addresses that an earlier group has left in the store."""
    assert ranks4.run(on_rank_groups_of_the_same_ranks, 12) == [[4.0 * n + 6 for n in range(12)]] * 4


@pytest.mark.parametrize(("devices", "kind"), [("aa", ("Staged", 1)), ("ab", ("Known", 0))])
def test_nccl_is_for_ranks_with_devices_of_their_own(ranks2, devices, kind):
    assert ranks2.run(on_rank_of_devices, list(devices)) == [kind, kind]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_all_reduce(ranks4, dtype):
    expected = [reduced(4, n, dtype, op) for n in SIZES for op in reducible(dtype)]
    for results in ranks4.run(on_rank_all_reduce, dtype):
        for result, reference in zip(results, expected, strict=True):
            assert torch.equal(result, reference)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_all_reduce_of_two(ranks2, dtype):
    expected = [reduced(2, n, dtype, op) for n in SIZES for op in reducible(dtype)]
    for results in ranks2.run(on_rank_all_reduce, dtype):
        for result, reference in zip(results, expected, strict=True):
            assert torch.equal(result, reference)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_reduce_scatter(ranks4, dtype):
    expected = [reduced(4, n * 4, dtype, op).chunk(4) for n in SIZES for op in reducible(dtype)]
    for rank, results in enumerate(ranks4.run(on_rank_reduce_scatter, dtype)):
        for result, chunks in zip(results, expected, strict=True):
            assert torch.equal(result, chunks[rank])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_moves(ranks4, dtype):
    gathered = torch.cat([values(rank, n, dtype) for n in GATHERED for rank in range(4)])
    for rank, results in enumerate(ranks4.run(on_rank_move, dtype)):
        assert torch.equal(results["all_gather"], gathered)
        parts = [values(of * 4 + rank, of * rank, dtype) for of in range(4)]
        assert torch.equal(results["all_to_all"], torch.cat(parts))
        assert torch.equal(results["broadcast"], values(3, 9, dtype))
        assert torch.equal(results["recv"], values((rank - 1) % 4, 5, dtype))


def on_rank_nan(dtype: torch.dtype, n: int, place: int) -> dict[str, torch.Tensor]:
    world, group = _world_group()
    results = {}
    for op in ("max", "min"):
        tensor = torch.linspace(-3, 3, n).to(dtype) * (world.rank + 1)
        if world.rank == place:
            tensor[0] = float("nan")
        tensor[1] = float("-inf") if world.rank == 1 else tensor[1]
        group.all_reduce(tensor, op).wait()
        results[op] = tensor
    return results


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("n", [8, 140_000])
def test_max_and_min_keep_nan_and_infinity(ranks4, dtype, n):
    stack = torch.stack([torch.linspace(-3, 3, n).to(dtype) * (rank + 1) for rank in range(4)])
    stack[2, 0], stack[1, 1] = float("nan"), float("-inf")
    for results in ranks4.run(on_rank_nan, dtype, n, 2):
        assert torch.equal(results["max"].nan_to_num(99), stack.amax(0).nan_to_num(99))
        assert torch.equal(results["min"].nan_to_num(99), stack.amin(0).nan_to_num(99))
        assert results["max"][0].isnan() and results["min"][0].isnan()


def on_rank_empty() -> list[tuple[int, ...]]:
    world, group = _world_group()
    nothing, out = torch.empty(0, 3), torch.empty(0)
    group.all_reduce(nothing).wait()
    group.all_gather(out, nothing).wait()
    group.reduce_scatter(out, nothing).wait()
    group.broadcast(nothing, 0).wait()
    group.all_to_all(out, nothing, [0] * world.size, [0] * world.size).wait()
    group.send(nothing, (world.rank + 1) % world.size).wait()
    group.recv(out, (world.rank - 1) % world.size).wait()
    return [tuple(nothing.shape), tuple(out.shape)]


def test_tensors_without_elements_are_communicated(ranks4):
    assert ranks4.run(on_rank_empty) == [[(0, 3), (0,)]] * 4


def on_rank_subgroups() -> tuple[list[float], str]:
    from meshfuse.runtime.world import World

    world = World.current()
    # In orders that no program has: a group keeps the label of who made it first, and the ranks run many tests.
    rows = world.group((1, 0) if world.rank < 2 else (3, 2), "tp")
    columns = world.group((world.rank % 2, world.rank % 2 + 2), "dp")
    alone = world.group((world.rank,), "one")
    tensor = torch.tensor([float(2**world.rank)])
    rows.all_reduce(tensor).wait()
    first = tensor.item()
    columns.all_reduce(tensor).wait()
    alone.all_reduce(tensor).wait()
    gathered = torch.empty(1)
    alone.all_gather(gathered, tensor).wait()
    assert world.group(rows.ranks, "other label") is rows
    return [first, tensor.item(), gathered.item()], str(rows)


def test_subgroups_have_only_their_members(ranks4):
    results = ranks4.run(on_rank_subgroups)
    assert [numbers for numbers, _ in results] == [[3, 15, 15], [3, 15, 15], [12, 15, 15], [12, 15, 15]]
    assert [text for _, text in results][::2] == ["group tp (ranks 1, 0)", "group tp (ranks 3, 2)"]


def on_rank_order() -> list[float]:
    """A reversed member order, many works at once, and 0-dim tensors."""
    from meshfuse.runtime.world import World

    world = World.current()
    group = world.group(tuple(reversed(world.all_ranks)), "reversed")
    gathered = torch.empty(world.size)
    tensors = [torch.tensor(float(i + world.rank)) for i in range(50)]
    works = [group.all_reduce(tensor) for tensor in tensors]
    works.append(group.all_gather(gathered, torch.tensor(float(world.rank))))
    for work in reversed(works):
        work.wait()
    world.barrier()
    return [*gathered.tolist(), *(tensor.item() for tensor in tensors)]


def test_order_of_members_and_of_waits(ranks4):
    expected = [3, 2, 1, 0, *(4 * i + 6 for i in range(50))]
    assert ranks4.run(on_rank_order) == [expected] * 4


def on_rank_complex_max() -> str:
    from meshfuse.errors import ArgumentError

    _, group = _world_group()
    try:
        group.all_reduce(torch.ones(2, dtype=torch.complex64), "max")
    except ArgumentError as error:
        return str(error)
    return "no error"


def test_complex_max_is_an_error(ranks2):
    text = "complex numbers have no max: found torch.complex64, needed sum or prod, or a real dtype."
    assert ranks2.run(on_rank_complex_max) == [text] * 2


def on_rank_digest(same: bool) -> str:
    from meshfuse.errors import RankError
    from meshfuse.runtime.world import World

    world = World.current()
    try:
        world.rendezvous.check_same("abc" if same or world.rank != 2 else "def", "the program", world.all_ranks)
    except RankError as error:
        return str(error)
    return "same"


def test_different_programs_are_an_error_on_every_rank(ranks4):
    assert ranks4.run(on_rank_digest, True) == ["same"] * 4
    (text,) = set(ranks4.run(on_rank_digest, False))
    assert text.startswith(
        "ranks disagree on the program: found ranks 0, 1, 3 'abc'; rank 2 'def', needed one value on all of them."
    )


def on_rank_bad_group(ranks: tuple[int, ...]) -> str:
    from meshfuse.errors import ArgumentError
    from meshfuse.runtime.world import World

    try:
        World.current().group(ranks, "tp")
    except ArgumentError as error:
        return str(error)
    return "no error"


def test_groups_of_wrong_ranks_are_errors(ranks2):
    text = ranks2.run(on_rank_bad_group, (0, 1, 2))[0]
    assert text.startswith("the group has ranks that do not exist: found ranks [0, 1, 2] in a world of 2, needed")
    assert "meshfuse run --ranks 3" in text
    assert ranks2.run(on_rank_bad_group, (0,))[1].startswith("no group for this rank: found rank 1 and a group of")
    assert ranks2.run(on_rank_bad_group, (0, 0, 1))[0].startswith("no group for this rank: found rank 0 and a group")


def on_rank_again() -> tuple[list[float], list[int]]:
    """All-reduces and all-gathers, two of each in flight, three times over; and the buffers that are kept for them."""
    world, group = _world_group()
    results: list[float] = []
    kept: list[int] = []
    for step in range(3):
        tensors = [torch.full((10,), float(world.rank + step + i)) for i in range(2)]
        gathered = [torch.empty(10 * world.size) for _ in tensors]
        works = [group.all_gather(g, t.clone()) for g, t in zip(gathered, tensors, strict=True)]
        works += [group.all_reduce(t) for t in tensors]
        for work in reversed(works):
            work.wait()
        results += [t[0].item() for t in tensors] + [g.sum().item() for g in gathered]
        kept.append(group._gloo._scratch.free)
    return results, kept


def test_buffers_are_used_again_and_not_while_a_call_runs(ranks4):
    expected = [
        float(sum(rank + step + i for rank in range(4)) * n) for step in range(3) for n in (1, 10) for i in (0, 1)
    ]
    for results, kept in ranks4.run(on_rank_again):
        assert results == expected
        assert kept[0] > 0 and kept == [kept[0]] * 3
