"""The verifier of host programs: it accepts what the compiler makes and catches every broken program."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import meshfuse as mf
from meshfuse.host_ir import HostProgram, verify, verify_together
from meshfuse.lowering.effects import mentioned
from meshfuse.lowering.instructions import Collective, Free, Instruction, Launch, SendRecv, View, Wait
from meshfuse.testing import annotations, definitions

MESH = mf.DeviceMesh((2, 2), ("dp", "tp"))
LINE = mf.DeviceMesh((4,), ("tp",))
OTHER = mf.DeviceMesh((2,), ("pp",), ranks=[4, 5])


def layer() -> list[HostProgram]:
    """A layer whose reduction, gather and transfer are all there: collectives, messages, frees."""
    fd = mf.FusionDefinition()
    x = fd.define_tensor([8, 8], dtype=mf.DataType.Double)
    w1, w2 = (fd.define_tensor([8, 8], dtype=mf.DataType.Double) for _ in range(2))
    h = fd.ops.matmul(fd.ops.tanh(fd.ops.matmul(x, w1)), w2)
    y = fd.ops.set(h)
    whole = fd.ops.tanh(y)
    fd.add_output(whole)
    z = fd.ops.set(h)
    fd.add_output(z)
    fd.mesh_split(x, MESH, ["dp", None])
    fd.mesh_split(w1, MESH, [None, "tp"])
    fd.mesh_split(w2, MESH, ["tp", None])
    fd.mesh_split(h, MESH, ["dp", None])
    for t in (y, whole):
        fd.mesh_split(t, MESH, [None, None])
    fd.mesh_split(z, OTHER, ["pp", None])
    compiled = fd.compile()
    return [compiled.host_program(rank) for rank in compiled.ranks]


def chunked(ring: bool = False) -> list[HostProgram]:
    """A product whose rows are reduced, or gathered in a ring, chunk by chunk, into parts of one buffer."""
    fd = mf.FusionDefinition()
    x, w = (fd.define_tensor([8, 8], dtype=mf.DataType.Double) for _ in range(2))
    y = fd.ops.matmul(x, w)
    fd.add_output(y)
    fd.add_output(fd.ops.tanh(y))
    fd.mesh_split(x, LINE, ["tp", None] if ring else [None, "tp"])
    fd.mesh_split(w, LINE, [None, "tp"] if ring else ["tp", None])
    fd.mesh_split(y, LINE, [None, "tp" if ring else None])
    fd.overlap(y, 4, ring=ring)
    compiled = fd.compile()
    return [compiled.host_program(rank) for rank in compiled.ranks]


PROGRAMS = layer()
CHUNKED = chunked()


def place_of(program: HostProgram, kind: type, number: int = 0) -> int:
    return [i for i, ins in enumerate(program.instructions) if isinstance(ins, kind)][number]


def with_body(program: HostProgram, body: Sequence[Instruction]) -> HostProgram:
    return dataclasses.replace(program, instructions=tuple(body))


def without(program: HostProgram, kind: type, number: int = 0) -> HostProgram:
    place = place_of(program, kind, number)
    return with_body(program, [*program.instructions[:place], *program.instructions[place + 1 :]])


def test_the_programs_have_what_the_mutations_break() -> None:
    for program in PROGRAMS:
        verify(program)
    verify_together(PROGRAMS)
    kinds = {type(ins) for ins in PROGRAMS[0].instructions}
    assert {Collective, SendRecv, Wait, Free, Launch} <= kinds
    assert len([ins for ins in PROGRAMS[0].instructions if isinstance(ins, Collective)]) >= 2


# one rank -----------------------------------------------------------------------------------------------------


def never_waited(program: HostProgram) -> HostProgram:
    return without(program, Wait)


def waited_twice(program: HostProgram) -> HostProgram:
    body, place = list(program.instructions), place_of(program, Wait)
    return with_body(program, [*body[: place + 1], *body[place:]])


def waited_before_issued(program: HostProgram) -> HostProgram:
    body = list(program.instructions)
    wait = body.pop(place_of(program, Wait))
    body.insert(place_of(program, Collective), wait)
    return with_body(program, body)


def read_before_the_wait(program: HostProgram) -> HostProgram:
    body = list(program.instructions)
    place = place_of(program, Wait)
    call = next(ins for ins in body if isinstance(ins, Collective) and ins.work == body[place].work)
    reader = next(i for i in range(place, len(body)) if mentioned([body[i]]) & set(call.writes))
    body.insert(place, body.pop(reader))
    return with_body(program, body)


def freed_twice(program: HostProgram) -> HostProgram:
    body, place = list(program.instructions), place_of(program, Free)
    return with_body(program, [*body[: place + 1], *body[place:]])


def used_after_free(program: HostProgram) -> HostProgram:
    body = list(program.instructions)
    launch = body[place_of(program, Launch, -1)]
    free = Free(tuple(name for name in launch.inputs if name.startswith("v"))[:1])
    body.insert(place_of(program, Launch, -1), free)
    return with_body(program, body)


def freed_while_in_flight(program: HostProgram) -> HostProgram:
    body, place = list(program.instructions), place_of(program, Collective)
    return with_body(program, [*body[: place + 1], Free(body[place].writes), *body[place + 1 :]])


def output_freed(program: HostProgram) -> HostProgram:
    return with_body(program, [*program.instructions, Free((program.outputs[0],))])


def never_made(program: HostProgram) -> HostProgram:
    return without(program, Launch)


def leaked(program: HostProgram) -> HostProgram:
    return without(program, Free)


def written_while_in_flight(program: HostProgram) -> HostProgram:
    """The launch that made what a collective reads, again before the collective is over."""
    body, place = list(program.instructions), place_of(program, SendRecv)
    maker = next(ins for ins in body[:place] if getattr(ins, "target", None) == body[place].buffer)
    return with_body(program, [*body[: place + 1], maker, *body[place + 1 :]])


ALONE = (
    never_waited, waited_twice, waited_before_issued, read_before_the_wait, freed_twice, used_after_free,
    freed_while_in_flight, output_freed, never_made, leaked, written_while_in_flight,
)  # fmt: skip


@pytest.mark.parametrize("mutation", ALONE, ids=lambda f: f.__name__)
def test_a_broken_program_is_refused(mutation: Callable[[HostProgram], HostProgram]) -> None:
    with pytest.raises(AssertionError):
        verify(mutation(PROGRAMS[0]))


def parts_that_overlap(program: HostProgram) -> HostProgram:
    body = list(program.instructions)
    first, second, *_ = (i for i, ins in enumerate(body) if isinstance(ins, View) and ins.box is not None)
    body[second] = dataclasses.replace(body[second], box=body[first].box)
    return with_body(program, body)


def a_chunk_left_out(program: HostProgram) -> HostProgram:
    """Its part of the whole is never written."""
    return without(program, Launch, 1)


def read_before_the_last_chunk(program: HostProgram) -> HostProgram:
    body = list(program.instructions)
    reader = body.pop(place_of(program, Launch, -1))
    body.insert(place_of(program, Wait, -1), reader)
    return with_body(program, body)


def written_after_it_was_read(program: HostProgram) -> HostProgram:
    body = list(program.instructions)
    last = max(i for i, ins in enumerate(body) if isinstance(ins, Collective))
    reader = body.pop(place_of(program, Launch, -1))
    body.insert(last - 1, reader)
    return with_body(program, body)


def a_chunk_written_in_flight(program: HostProgram) -> HostProgram:
    body, place = list(program.instructions), place_of(program, Collective)
    maker = body[place_of(program, Launch)]
    return with_body(program, [*body[: place + 1], maker, *body[place + 1 :]])


IN_CHUNKS = (
    never_waited, waited_twice, freed_twice, freed_while_in_flight, output_freed, leaked, parts_that_overlap,
    a_chunk_left_out, read_before_the_last_chunk, written_after_it_was_read, a_chunk_written_in_flight,
)  # fmt: skip


@pytest.mark.parametrize("mutation", IN_CHUNKS, ids=lambda f: f.__name__)
def test_a_broken_loop_over_chunks_is_refused(mutation: Callable[[HostProgram], HostProgram]) -> None:
    verify(CHUNKED[0])
    with pytest.raises(AssertionError):
        verify(mutation(CHUNKED[0]))


# all ranks ----------------------------------------------------------------------------------------------------


def missing_member(programs: list[HostProgram]) -> None:
    programs[1] = without(programs[1], Collective)


def missing_in_all_but_one(programs: list[HostProgram]) -> None:
    for place in (1, 2, 3):
        body = [ins for ins in programs[place].instructions if not isinstance(ins, Collective)]
        programs[place] = with_body(programs[place], body)


def a_rank_that_is_not_there(programs: list[HostProgram]) -> None:
    del programs[1]


def another_collective(programs: list[HostProgram]) -> None:
    change(programs, kind="all_gather" if first_call(programs).kind != "all_gather" else "all_reduce")


def another_dtype(programs: list[HostProgram]) -> None:
    change(programs, payload=(first_call(programs).payload[0], "float32"))


def another_size(programs: list[HostProgram]) -> None:
    change(programs, payload=(first_call(programs).payload[0] + 1, first_call(programs).payload[1]))


def first_place(program: HostProgram) -> int:
    """The first collective of equal blocks: an all-to-all has another size on every rank."""
    calls = enumerate(program.instructions)
    return next(i for i, ins in calls if isinstance(ins, Collective) and ins.kind != "all_to_all")


def first_call(programs: list[HostProgram]) -> Collective:
    return programs[1].instructions[first_place(programs[1])]  # type: ignore[return-value]


def change(programs: list[HostProgram], **facts: object) -> None:
    body = list(programs[1].instructions)
    body[first_place(programs[1])] = dataclasses.replace(first_call(programs), **facts)  # type: ignore[arg-type]
    programs[1] = with_body(programs[1], body)


def a_group_without_the_rank_itself(programs: list[HostProgram]) -> None:
    group = first_call(programs).group
    others = tuple(rank for rank in range(4) if rank not in group)
    change(programs, group=others)


def message_not_sent(programs: list[HostProgram]) -> None:
    programs[0] = without(programs[0], SendRecv)


def message_of_another_size(programs: list[HostProgram]) -> None:
    place = place_of(programs[0], SendRecv)
    body = list(programs[0].instructions)
    old = body[place]
    body[place] = dataclasses.replace(old, payload=(old.payload[0] + 1, old.payload[1]))
    programs[0] = with_body(programs[0], body)


def another_digest(programs: list[HostProgram]) -> None:
    programs[2] = dataclasses.replace(programs[2], digest="another")


TOGETHER = (
    missing_member, missing_in_all_but_one, a_rank_that_is_not_there, another_collective, another_dtype, another_size,
    a_group_without_the_rank_itself, message_not_sent, message_of_another_size, another_digest,
)  # fmt: skip


@pytest.mark.parametrize("mutation", TOGETHER, ids=lambda f: f.__name__)
def test_ranks_that_do_not_fit_together_are_refused(mutation: Callable[[list[HostProgram]], None]) -> None:
    programs = list(PROGRAMS)
    mutation(programs)
    with pytest.raises(AssertionError):
        verify_together(programs)


def swapped(program: HostProgram, a: int, b: int) -> HostProgram:
    """The program with two of its collectives issued in the other order."""
    body = list(program.instructions)
    first, second = place_of(program, Collective, a), place_of(program, Collective, b)
    body[first], body[second] = body[second], body[first]
    return with_body(program, body)


def test_collectives_of_a_group_in_another_order_on_one_rank_are_refused() -> None:
    fd = mf.FusionDefinition()
    x, y = (fd.define_tensor([8, 4], dtype=dtype) for dtype in (mf.DataType.Double, mf.DataType.Float))
    for t in (x, y):
        out = fd.ops.set(t)
        fd.add_output(out)
        fd.mesh_split(t, MESH, [["dp", "tp"], None])
        fd.mesh_split(out, MESH, [None, None])
    compiled = fd.compile()
    programs = [compiled.host_program(rank) for rank in compiled.ranks]
    verify_together(programs)
    programs[2] = swapped(programs[2], 0, 1)
    with pytest.raises(AssertionError, match="differ in group"):
        verify_together(programs)


def crossed() -> list[HostProgram]:
    """A collective of rows and one of columns of the mesh, on one rank in the other order: a ring of waits."""
    fd = mf.FusionDefinition()
    x, y = (fd.define_tensor([8, 8], dtype=mf.DataType.Double) for _ in range(2))
    for t, axis in ((x, "dp"), (y, "tp")):
        out = fd.ops.set(t)
        fd.add_output(out)
        fd.mesh_split(t, MESH, [axis, None])
        fd.mesh_split(out, MESH, [None, None])
    compiled = fd.compile()
    programs = [compiled.host_program(rank) for rank in compiled.ranks]
    verify_together(programs)
    return [swapped(p, 0, 1) if p.rank in (0, 3) else p for p in programs]


def transferred() -> list[HostProgram]:
    """From two ranks that both hold everything to one: only one of the two sends."""
    fd = mf.FusionDefinition()
    x = fd.define_tensor([8, 8], dtype=mf.DataType.Double)
    y = fd.ops.set(x)
    fd.add_output(y)
    fd.mesh_split(x, mf.DeviceMesh((2,), ("tp",)), [None, None])
    fd.mesh_split(y, mf.DeviceMesh((1,), ("tp",), ranks=[2]), [None, None])
    compiled = fd.compile()
    return [compiled.host_program(rank) for rank in compiled.ranks]


def test_a_group_of_messages_with_a_rank_that_has_none_is_refused() -> None:
    """Its ranks connect at their first message in it: the others would wait for that one."""
    programs = transferred()
    verify_together(programs)

    def widened(program: HostProgram) -> HostProgram:
        body = [dataclasses.replace(i, group=(0, 1, 2)) if isinstance(i, SendRecv) else i for i in program.instructions]
        return dataclasses.replace(program, instructions=tuple(body))

    with pytest.raises(AssertionError, match="wait for each other"):
        verify_together([widened(p) for p in programs])


def test_waits_that_go_round_in_a_ring_over_two_groups_are_refused() -> None:
    """Each group agrees on its own order, and yet rank 0 waits for a rank that waits for rank 0."""
    with pytest.raises(AssertionError, match="wait for each other"):
        verify_together(crossed())


def test_messages_that_go_round_in_a_ring_are_refused() -> None:
    """Every rank sends before it receives: where a send lasts until it is received, nobody goes on."""
    programs = chunked(ring=True)
    verify_together(programs)
    with pytest.raises(AssertionError, match="wait for each other"):
        verify_together([sends_first(p) for p in programs])


def sends_first(program: HostProgram) -> HostProgram:
    body = list(program.instructions)
    messages = [i for i, ins in enumerate(body) if isinstance(ins, SendRecv)]
    for a, b in zip(messages[::2], messages[1::2], strict=True):
        if body[a].kind == "recv":
            body[a], body[b] = body[b], body[a]
    return with_body(program, body)


@pytest.mark.slow
@settings(max_examples=30)
@given(definitions(min_ops=3, max_ops=8).flatmap(annotations), st.data())
def test_no_instruction_of_any_program_is_idle(fd: mf.FusionDefinition, data: st.DataObject) -> None:
    """A Wait left out of any program, or an instruction that makes what is read later, is noticed."""
    compiled = fd.compile()
    program = compiled.host_program(data.draw(st.sampled_from(compiled.ranks)))
    vital = [i for i, ins in enumerate(program.instructions) if isinstance(ins, (Wait, Collective, SendRecv, Free))]
    if vital:
        place = data.draw(st.sampled_from(vital))
        with pytest.raises(AssertionError):
            verify(with_body(program, [*program.instructions[:place], *program.instructions[place + 1 :]]))


@pytest.mark.slow
@settings(max_examples=30, deadline=None)
@given(definitions(("shapes", "pointwise"), open_sizes=False).flatmap(annotations))
def test_no_collective_is_issued_in_which_nothing_travels(fd: mf.FusionDefinition) -> None:
    """Such as for the parts of a fused dim that is split inside each of them."""
    compiled = fd.compile()
    carried: dict[tuple[tuple[int, ...], int], int] = {}
    for rank in compiled.ranks:
        issued: dict[tuple[int, ...], int] = {}
        for call in compiled.host_program(rank).instructions:
            if isinstance(call, Collective):
                place = issued[call.group] = issued.get(call.group, 0) + 1
                carried[call.group, place] = carried.get((call.group, place), 0) + call.payload[0]
    assert all(carried.values()), carried
    assert len(fd.bill().entries) == 0 or carried or any(e.collective == "send-recv" for e in fd.bill().entries)
