"""The order of host programs: communications early, waits late, within bounds; and what a model says it is worth."""

from __future__ import annotations

import dataclasses
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import meshfuse as mf
from meshfuse.host_ir import HostProgram, verify, verify_together
from meshfuse.lowering.durations import CostModel, payload_bytes
from meshfuse.lowering.instructions import Collective, CommunicationCall, Free, Instruction, Launch, Wait
from meshfuse.lowering.schedule import schedule, with_frees
from meshfuse.report.timeline import timeline
from meshfuse.reshard.bucketing import LARGEST_COPIED
from meshfuse.reshard.hoist_reshards import hoist_reshards
from meshfuse.resharding import insert_resharding
from meshfuse.testing import annotations, definitions

HALF, FLOAT = mf.DataType.BFloat16, mf.DataType.Float
FAST = CostModel(flops=600e12, network=mf.Link(150e9, 5e-6))


def programs(fd: mf.FusionDefinition) -> list[HostProgram]:
    compiled = fd.compile()
    return [compiled.host_program(rank) for rank in compiled.ranks]


def line(size: int) -> mf.DeviceMesh:
    return mf.DeviceMesh((size,), ("tp",))


def in_order(program: HostProgram) -> list[Instruction]:
    """A body as the lowering makes it: each wait directly after its communication."""
    body = [i for i in program.instructions if not isinstance(i, (Free, Wait))]
    out: list[Instruction] = []
    for ins in body:
        out.append(ins)
        if isinstance(ins, CommunicationCall):
            out.append(Wait(ins.work))
    return out


def with_body(program: HostProgram, body: list[Instruction]) -> HostProgram:
    kept = {name for name in program.outputs if name}
    return dataclasses.replace(program, instructions=tuple(with_frees(body, kept)))


@pytest.mark.slow
@settings(max_examples=30)
@given(definitions(min_ops=3, max_ops=8).flatmap(annotations), st.sampled_from([0, 64, 1 << 30]))
def test_any_program_is_as_good_in_another_order(fd: mf.FusionDefinition, bound: int) -> None:
    """Every instruction once, kernels and communications in their order, and the verifier is content."""
    made = programs(fd)
    for program in made:
        before = in_order(program)
        after = schedule(before, in_flight=bound)
        assert sorted(map(id, before)) == sorted(map(id, after))
        for kinds in (Launch, CommunicationCall):
            assert [i for i in before if isinstance(i, kinds)] == [i for i in after if isinstance(i, kinds)]
        verify(with_body(program, after))
    verify_together(made)


WIDTH = math.isqrt(LARGEST_COPIED // 4) + 8
GATHERED = 4 * WIDTH**2


def gathers(count: int) -> mf.FusionDefinition:
    """A chain of products whose weights are gathered, `GATHERED` bytes each: too many for them to be one call."""
    fd = mf.FusionDefinition()
    x = fd.define_tensor([8192, WIDTH], dtype=FLOAT)
    fd.mesh_split(x, line(2), ["tp", None])
    for _ in range(count):
        w = fd.define_tensor([WIDTH, WIDTH], dtype=FLOAT)
        fd.mesh_split(w, line(2), ["tp", None])
        x = fd.ops.matmul(x, w)
        fd.mesh_split(x, line(2), ["tp", None])
    fd.add_output(x)
    return fd


def most_in_flight(body: list[Instruction]) -> int:
    """How many communications are in flight at most."""
    flying = most = 0
    for ins in body:
        flying += isinstance(ins, CommunicationCall) - isinstance(ins, Wait)
        most = max(most, flying)
    return most


@pytest.mark.parametrize(("bound", "wanted"), [(1 << 30, 6), (3 * (GATHERED + GATHERED // 2), 3), (0, 1)])
def test_no_more_is_in_flight_than_the_bound_says(bound: int, wanted: int) -> None:
    """A gather holds the flat buffer, and the half of it that is sent."""
    assert most_in_flight(schedule(in_order(programs(gathers(6))[0]), in_flight=bound)) == wanted


def test_a_wait_stands_before_the_first_reader_and_a_call_after_its_source() -> None:
    fd = mf.FusionDefinition()
    x, w = fd.define_tensor([8, 8], dtype=FLOAT), fd.define_tensor([8, 8], dtype=FLOAT)
    z = fd.define_tensor([64], dtype=FLOAT)
    y = fd.ops.matmul(x, w)
    other = fd.ops.set(z)
    for t in (y, other):
        made = fd.ops.tanh(t)
        fd.add_output(made)
        fd.mesh_split(made, line(2), [None] * len(t.type.shape))
    fd.mesh_split(x, line(2), [None, "tp"])
    fd.mesh_split(w, line(2), ["tp", None])
    fd.mesh_split(y, line(2), [None, None])
    fd.mesh_split(z, line(2), ["tp"])
    fd.mesh_split(other, line(2), [None])
    for program in programs(fd):
        kinds = [type(i) for i in program.instructions if isinstance(i, (Launch, Collective, Wait))]
        assert kinds.index(Collective) < kinds.index(Wait)
        assert most_in_flight(list(program.instructions)) == 2


def layers(count: int, size: int, sharded: bool) -> mf.FusionDefinition:
    """Products and relus with their backward, data parallel over 4 ranks; weights whole or sharded."""
    mesh, fd = mf.DeviceMesh((4,), ("dp",)), mf.FusionDefinition()
    x = fd.define_tensor([4 * size, size], dtype=HALF)
    fd.mesh_split(x, mesh, ["dp", None])
    weights, y = [fd.define_tensor([size, size], dtype=HALF) for _ in range(count)], x
    for w in weights:
        y = fd.ops.relu(fd.ops.linear(y, w))
    fd.add_output(y)
    for w, gradient in zip(weights, fd.grad(y, weights), strict=True):
        for t in (w, gradient):
            fd.mesh_split(t, mesh, ["dp" if sharded else None, None])
        if gradient is not y:
            fd.add_output(gradient)
    return fd


@pytest.mark.slow
@pytest.mark.parametrize("sharded", [False, True])
def test_large_gradients_are_reduced_while_the_backward_goes_on(sharded: bool) -> None:
    made = programs(layers(6, 4096, sharded))
    together, apart = timeline(made, FAST), timeline(made, FAST, overlapped=False)
    assert apart.hidden_share == pytest.approx(0.0, abs=1e-9)
    assert together.hidden_share > 0.6
    assert together.makespan < 0.85 * apart.makespan


def test_small_moves_stay_where_they_are() -> None:
    resharded = insert_resharding(layers(6, 16, False).compile().sharded)
    assert hoist_reshards(resharded) == resharded


# the model --------------------------------------------------------------------------------------------------------


def mlp(ranks: int, tokens: int, width: int, chunks: int, ring: bool) -> list[HostProgram]:
    """Sequence-parallel: rows gathered, two products, rows scattered."""
    mesh, fd = line(ranks), mf.FusionDefinition()
    x = fd.define_tensor([tokens, width], dtype=HALF)
    w1, w2 = fd.define_tensor([4 * width, width], dtype=HALF), fd.define_tensor([width, 4 * width], dtype=HALF)
    a = fd.ops.linear(x, w1)
    y = fd.ops.linear(fd.ops.relu(a), w2)
    fd.add_output(y)
    for t, spec in ((x, ["tp", None]), (w1, ["tp", None]), (a, [None, "tp"]), (w2, [None, "tp"]), (y, ["tp", None])):
        fd.mesh_split(t, mesh, spec)
    for t in (a, y) if chunks else ():
        fd.overlap(t, chunks, ring=ring)
    return programs(fd)


def test_chunks_and_rings_beat_the_whole_where_links_are_slow() -> None:
    whole = timeline(mlp(4, 8192, 8192, 0, False), FAST)
    assert whole.hidden_share < 0.05
    for ring in (False, True):
        chunked = timeline(mlp(4, 8192, 8192, 8, ring), FAST)
        assert chunked.hidden_share > 0.7
        assert chunked.makespan < 0.85 * whole.makespan
        assert chunked.makespan > max(rank.computing for rank in chunked.ranks) * 0.999


def test_chunks_do_not_pay_where_starting_a_message_takes_longest() -> None:
    slow_start = CostModel(flops=600e12, network=mf.Link(1e12, 1e-3))
    assert timeline(mlp(4, 512, 512, 8, False), slow_start).makespan > (
        2 * timeline(mlp(4, 512, 512, 0, False), slow_start).makespan
    )


def test_the_times_of_a_program_of_two_kernels_and_one_reduction() -> None:
    """By hand: 1 s per kernel start, 8 bytes on the wire at 4 bytes per second, and 2 messages of 1 s to start."""
    fd = mf.FusionDefinition()
    x, w = fd.define_tensor([2, 4], dtype=FLOAT), fd.define_tensor([4, 1], dtype=FLOAT)
    y = fd.ops.matmul(x, w)
    fd.add_output(fd.ops.tanh(y))
    fd.mesh_split(x, line(2), [None, "tp"])
    fd.mesh_split(w, line(2), ["tp", None])
    fd.mesh_split(y, line(2), [None, None])
    model = CostModel(flops=1e30, memory=1e30, start=1.0, axes={"tp": mf.Link(4.0, 1.0)})
    found = timeline(programs(fd), model, traced=[0])
    assert found.makespan == pytest.approx(1 + 4 + 1)
    assert [(s.kind, s.start, s.end) for s in found.spans[0]] == [
        ("kernel", 0, 1), ("communication", 1, pytest.approx(5)), ("wait", 1, pytest.approx(5)),
        ("kernel", pytest.approx(5), pytest.approx(6)),
    ]  # fmt: skip
    assert "2 ranks" in str(found) and "hidden: 0%" in str(found)


@pytest.mark.slow
def test_a_thousand_ranks_are_played() -> None:
    mesh, fd = mf.DeviceMesh((32, 32), ("dp", "tp")), mf.FusionDefinition()
    x, w = fd.define_tensor([4096, 256], dtype=FLOAT), fd.define_tensor([256, 256], dtype=FLOAT)
    y = fd.ops.linear(x, w)
    fd.add_output(y)
    for t, spec in ((x, ["dp", "tp"]), (w, [None, "tp"]), (y, ["dp", None])):
        fd.mesh_split(t, mesh, spec)
    fd.overlap(y, 4)
    made = programs(fd)
    verify_together(made)
    found = timeline(made)
    assert len(found.ranks) == 1024 and len({rank.end for rank in found.ranks}) == 1
    assert found.makespan < timeline(made, overlapped=False).makespan


def test_the_links_of_a_mesh_are_the_models() -> None:
    slow, fast = mf.Link(1e9, 1e-4), mf.Link(1e11, 1e-6)
    mesh = mf.DeviceMesh((2, 2), ("dp", "tp"), links={"dp": slow, "tp": fast}, flops=1e14)
    model = CostModel.of([mesh, line(2)])
    assert model.flops == 1e14
    assert model.speed("tp") == fast
    assert model.speed("dp:(2)2,tp") == slow
    assert CostModel.of([line(2)]) == CostModel()


def test_what_a_communication_holds_is_counted_in_bytes() -> None:
    call = next(i for i in programs(gathers(1))[0].instructions if isinstance(i, Collective))
    assert payload_bytes(call) == GATHERED // 2
