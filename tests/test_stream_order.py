"""`simulate(check_streams=True)`: ranks' work as a GPU's streams and events order it, and what they do not order."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings

import meshfuse as mf
from meshfuse.executor.simulate import Simulation
from meshfuse.executor.stream_order import COMPUTE, Streams
from meshfuse.host_ir import HostProgram
from meshfuse.lowering.instructions import Free, Instruction, SendRecv, Wait
from meshfuse.sharding.data import shard
from meshfuse.testing import annotations, definitions, inputs_for

RANKS = 4
Made = tuple[mf.FusionDefinition, list[torch.Tensor]]


def made(shapes: Sequence[Sequence[int]], body: Callable[..., Any]) -> Made:
    generator = torch.Generator().manual_seed(2)
    with mf.FusionDefinition() as fd:
        tensors = [fd.define_tensor(list(shape), dtype=mf.DataType.Double) for shape in shapes]
        for output in body(fd, mf.DeviceMesh((RANKS,), ("r",)), *tensors):
            fd.add_output(output)
    return fd, [torch.randn(tuple(shape), generator=generator, dtype=torch.float64) for shape in shapes]


def trained(fd: Any, mesh: Any, x: Any, up: Any, down: Any) -> Any:
    """Sums and their gradients, of hidden columns over the ranks."""
    out = fd.ops.linear(fd.ops.tanh(fd.ops.linear(x, up)), down)
    fd.mesh_split(up, mesh, ["r", None])
    fd.mesh_split(down, mesh, [None, "r"])
    return [out, *fd.grad(fd.ops.sum(fd.ops.mul(out, out)), [x, up, down])]


def moved(fd: Any, mesh: Any, x: Any) -> Any:
    """Gathered, sent from all to all, and sums that are read before and after they are reduced."""
    fd.mesh_split(x, mesh, ["r", None])
    turned, total = fd.ops.set(x), fd.ops.sum(x, [0])
    fd.mesh_split(turned, mesh, [None, "r"])
    whole = fd.ops.set(x)
    fd.mesh_split(whole, mesh, [None, None])
    return [turned, whole, fd.ops.add(fd.ops.exp(total), total)]


def chunked(ring: bool) -> Callable[..., Any]:
    def body(fd: Any, mesh: Any, x: Any, w: Any) -> Any:
        out = fd.ops.linear(x, w)
        for tensor, spec in ((x, ["r", None]), (w, ["r", None]), (out, [None, "r"])):
            fd.mesh_split(tensor, mesh, spec)
        fd.overlap(out, RANKS, ring=ring)
        return [out]

    return body


def two_meshes(fd: Any, mesh: Any, x: Any) -> Any:
    """A pipeline of two stages: messages from one mesh to the other."""
    fd.mesh_split(x, mf.DeviceMesh([0, 1], ("a",)), ["a", None])
    y = fd.ops.exp(x)
    z = fd.ops.set(y)
    fd.mesh_split(z, mf.DeviceMesh([2, 3], ("b",)), [None, "b"])
    return [fd.ops.neg(z)]


PROGRAMS: dict[str, tuple[Sequence[Sequence[int]], Callable[..., Any]]] = {
    "trained": (((8, 6), (12, 6), (6, 12)), trained),
    "moved": (((8, 12),), moved),
    "in chunks": (((8, 6), (8, 6)), chunked(False)),
    "in a ring": (((8, 6), (8, 6)), chunked(True)),
    "of two meshes": (((8, 6),), two_meshes),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_programs_need_no_order_but_their_events(name: str) -> None:
    fd, inputs = made(*PROGRAMS[name])
    for found, expected in zip(fd.simulate(inputs, check_streams=True), fd.simulate(inputs), strict=True):
        assert torch.equal(found, expected)


@pytest.mark.slow
@settings(max_examples=20)
@given(definitions(min_ops=3, max_ops=10).flatmap(annotations))
def test_random_programs_need_no_order_but_their_events(fd: mf.FusionDefinition) -> None:
    fd.simulate(inputs_for(fd), check_streams=True)


def simulation(fd: mf.FusionDefinition, change: Callable[[HostProgram], HostProgram]) -> Callable[..., Simulation]:
    """The ranks' programs, changed, ready to run on inputs that are whole on all ranks."""
    compiled = fd.compile()
    programs = [change(compiled.host_program(rank)) for rank in compiled.ranks]

    def run(inputs: Sequence[torch.Tensor]) -> Simulation:
        made = Simulation(programs, torch.device("cpu"), check_streams=True)
        shardings = [compiled.sharded.shardings[i] for i in compiled.graph.input_tensors]
        pairs = list(zip(inputs, shardings, strict=True))
        made.run({p.rank: [_shard(t, sharding, p.rank) for t, sharding in pairs] for p in programs}, 0, 0)
        return made

    return run


def _shard(tensor: torch.Tensor, sharding: Any, rank: int) -> torch.Tensor:
    return shard(tensor, sharding, rank) if rank in sharding.mesh else tensor


def test_the_record_has_launches_and_events_in_the_order_of_the_host() -> None:
    def summed(fd: mf.FusionDefinition, mesh: mf.DeviceMesh, x: mf.TensorView) -> list[mf.TensorView]:
        total = fd.ops.sum(x, [0])
        fd.mesh_split(x, mesh, ["r", None])
        fd.mesh_split(total, mesh, [None])
        return [total]

    fd, inputs = made(((8, 4),), summed)
    group = "group_0_1_2_3"
    assert simulation(fd, lambda p: p)(inputs).streams[1].record == [
        f"{COMPUTE}: segment_0",
        f"{group}: wait for the event of {COMPUTE}",
        f"{group}: all_reduce #1 of ranks (0, 1, 2, 3)",
        f"{COMPUTE}: wait for the event of all_reduce #1 of ranks (0, 1, 2, 3)",
        f"{COMPUTE}: the user",
    ]


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_wait_without_its_event_is_a_race(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Numbers stay right, as the host waits here: the streams alone say that they need not be."""
    fd, inputs = made(*PROGRAMS[name])
    wait = Streams._wait
    monkeypatch.setattr(Streams, "_wait", lambda self, stream, *rest: stream == COMPUTE or wait(self, stream, *rest))
    with pytest.raises(AssertionError, match=r"rank \d: .* uses, and no event orders them\n"):
        fd.simulate(inputs, check_streams=True)


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_communication_before_its_event_is_a_race(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    fd, inputs = made(*PROGRAMS[name])
    wait = Streams._wait
    monkeypatch.setattr(Streams, "_wait", lambda self, stream, *rest: stream != COMPUTE or wait(self, stream, *rest))
    with pytest.raises(
        AssertionError, match=r"rank \d: .* on group_[\d_]+( with \d)? uses memory of .* that compute uses"
    ):
        fd.simulate(inputs, check_streams=True)


def freed_at_once(program: HostProgram) -> HostProgram:
    """What messages read is freed when they are issued."""
    sent = {i.buffer for i in program.instructions if isinstance(i, SendRecv) and i.kind == "send"}
    out: list[Instruction] = []
    for i in program.instructions:
        out.append(Free(tuple(n for n in i.names if n not in sent)) if isinstance(i, Free) else i)
        out += [Free((i.buffer,))] if isinstance(i, SendRecv) and i.kind == "send" else []
    return dataclasses.replace(program, instructions=tuple(out))


def test_memory_that_is_freed_before_its_wait_is_a_race() -> None:
    fd, inputs = made(*PROGRAMS["of two meshes"])
    simulation(fd, lambda p: p)(inputs)
    with pytest.raises(
        AssertionError, match=r"what takes it once it is freed \(before .*\) on compute uses memory of "
    ):
        simulation(fd, freed_at_once)(inputs)


def test_unordered_uses_of_memory_are_found() -> None:
    fd, inputs = made(*PROGRAMS["moved"])
    with pytest.raises(AssertionError, match=r"nothing waits for all_gather #1 of ranks"):
        simulation(fd, without_waits)(inputs)


def without_waits(program: HostProgram) -> HostProgram:
    """The host goes on at once, as it does on a GPU."""
    works = {i.work for i in program.instructions if isinstance(i, Wait)}
    kept = [i for i in program.instructions if not isinstance(i, Wait)]
    freed = [Free(tuple(n for n in i.names if n not in works)) if isinstance(i, Free) else i for i in kept]
    return dataclasses.replace(program, instructions=tuple(freed))
