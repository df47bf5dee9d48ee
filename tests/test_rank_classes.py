"""Classes of ranks that do the same, against all ranks one by one: programs, their verification and modelled runs."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import meshfuse as mf
from meshfuse.compiler import CompiledProgram
from meshfuse.host_ir import HostProgram, verify_together
from meshfuse.lowering.instructions import Collective, Instruction, SendRecv
from meshfuse.lowering.rank_classes import RankClasses, rank_classes
from meshfuse.report.timeline import timeline
from meshfuse.testing import annotations, definitions, shapes_for
from meshfuse.testing.blocks import FAMILIES

MESH = mf.DeviceMesh((4, 2), ("dp", "tp"), links=mf.Link(1e9, 1e-6), flops=1e12, memory=1e12)


def every_program(compiled: CompiledProgram) -> list[HostProgram]:
    return [compiled.host_program(rank) for rank in compiled.ranks]


def check(compiled: CompiledProgram) -> RankClasses | None:
    """Each rank's program is that of its class; the classes are verified, and played, as all ranks are."""
    found, programs = compiled.rank_classes(), every_program(compiled)
    verify_together(programs)
    compiled.verify()
    if found is not None:
        shapes = {p.rank: found.shape_of(p.rank, p.instructions) for p in programs}
        assert all(shapes[rank] == shapes[found.representative(rank)] for rank in compiled.ranks)
        few, channel = compiled.programs_of_classes()
        times = {time.rank: time for time in timeline(few, channel=channel).ranks}
        for time in timeline(programs).ranks:
            alike = dataclasses.replace(times[found.representative(time.rank)], rank=time.rank)
            assert dataclasses.astuple(time) == pytest.approx(dataclasses.astuple(alike), abs=1e-15)
    return found


@pytest.mark.parametrize("family", FAMILIES)
def test_random_programs_of_all_ranks_are_those_of_their_classes(family: str) -> None:
    @settings(max_examples=6)
    @given(definitions((family, "pointwise"), sizes=(4, 6, 8)).flatmap(annotations))
    def run(fd: mf.FusionDefinition) -> None:
        check(fd.compile(*shapes_for(fd)))

    run()


def step_of_two_axes(mesh: mf.DeviceMesh = MESH) -> CompiledProgram:
    """Two layers, split over tp, of rows split over dp, forward and gradients: groups along either axis."""
    fd = mf.FusionDefinition()
    x = fd.define_tensor([4 * mesh.axis_size("dp"), 8])
    up, down = fd.define_tensor([32, 8]), fd.define_tensor([8, 32])
    y = fd.ops.linear(fd.ops.relu(fd.ops.linear(x, up)), down)
    loss = fd.ops.mean(fd.ops.mul(y, y), [0, 1])
    fd.add_output(loss)
    for gradient in fd.grad(loss, [up, down]):
        fd.add_output(gradient)
    for tensor, spec in ((x, ["dp", None]), (up, ["tp", None]), (down, [None, "tp"])):
        fd.mesh_split(tensor, mesh, spec)
    return fd.compile()


def test_ranks_of_an_even_step_are_one_class() -> None:
    compiled = step_of_two_axes()
    found = check(compiled)
    assert found is not None and found.alike == ("dp", "tp") and found.representatives == (0,) and found.size == 8
    groups = {len(i.group) for i in compiled.host_program(0).instructions if isinstance(i, Collective)}
    assert groups >= {4, 2}


def test_a_thousand_ranks_are_verified_by_a_few_programs() -> None:
    compiled = step_of_two_axes(mf.DeviceMesh((128, 8), ("dp", "tp")))
    compiled.verify()
    assert len(compiled._programs) == 3  # of the class, and at the end of each axis


def test_ranks_that_hold_unequally_much_are_told_apart() -> None:
    fd = mf.FusionDefinition()
    x = fd.define_tensor([8, 5])
    y = fd.ops.sum(x, [0, 1])
    fd.add_output(y)
    fd.mesh_split(x, MESH, ["dp", "tp"])
    fd.mesh_split(y, MESH, [])
    found = check(fd.compile())
    assert found is not None and found.alike == ("dp",) and found.representatives == (0, 1)


def moved(mesh: mf.DeviceMesh, shape: list[int], before: list[Any], after: list[Any]) -> CompiledProgram:
    fd = mf.FusionDefinition()
    x = fd.define_tensor(shape)
    y = fd.ops.set(x)
    fd.add_output(y)
    fd.mesh_split(x, mesh, before)
    fd.mesh_split(y, mesh, after)
    return fd.compile()


@pytest.mark.parametrize(("before", "after", "classes"), [(["tp"], ["dp"], 16), (["tp"], [("dp", "tp")], 16)])
def test_of_axes_that_change_places_the_parts_that_do_are_told_apart(
    before: list[Any], after: list[Any], classes: int
) -> None:  # fmt: skip
    """Of 64 ranks dp takes the place of the 4 of tp by a part of 4; the other one cuts more finely."""
    for dp in (16, 256):
        compiled = moved(mf.DeviceMesh((dp, 4), ("dp", "tp"), links="bytes"), [4096], before, after)
        if dp == 16:
            found = check(compiled)
        else:
            compiled.verify()
            found = compiled.rank_classes()
        assert found is not None and len(found.representatives) <= classes


SPECS = [
    None,
    "dp",
    "tp",
    ("dp", "tp"),
    ("tp", "dp"),
    mf.Split(2, "dp"),
    mf.Split(4, "dp", 2),
    (mf.Split(4, "dp", 2), "tp"),
]


@settings(max_examples=25)
@given(st.lists(st.sampled_from(SPECS), min_size=4, max_size=4), st.sampled_from([16, 64, 24]))
def test_moves_between_any_two_layouts(specs: list[Any], n: int) -> None:
    mesh = mf.DeviceMesh((8, 4), ("dp", "tp"), links="bytes")
    try:
        compiled = moved(mesh, [n, 64], specs[:2], specs[2:])
    except mf.DefinitionError:
        return  # An axis on both dims.
    check(compiled)


def test_ranks_with_neighbours_are_told_apart() -> None:
    fd = mf.FusionDefinition()
    x, w = (fd.define_tensor([16, 16]) for _ in range(2))
    y = fd.ops.matmul(x, w)
    fd.add_output(y)
    for tensor, spec in ((x, ["tp", None]), (w, [None, "tp"]), (y, [None, "tp"])):
        fd.mesh_split(tensor, MESH, spec)
    fd.overlap(y, 4, 0, ring=True)
    compiled = fd.compile()
    assert any(isinstance(i, SendRecv) for i in compiled.host_program(0).instructions)
    found = check(compiled)
    assert found is not None and "tp" in found.apart


Body = tuple[Instruction, ...]


def _calls(body: Body) -> list[int]:
    return [n for n, i in enumerate(body) if isinstance(i, Collective)]


def lacks_a_call(body: Body) -> Body:
    return tuple(i for n, i in enumerate(body) if n != _calls(body)[0])


def swaps_two_calls(body: Body) -> Body:
    made, (a, b, *_) = list(body), _calls(body)
    made[a], made[b] = made[b], made[a]
    return tuple(made)


def sends_less(body: Body) -> Body:
    made, (a, *_) = list(body), _calls(body)
    call = made[a]
    assert isinstance(call, Collective)
    made[a] = dataclasses.replace(call, payload=(call.payload[0] - 1, call.payload[1]))
    return tuple(made)


def in_a_group_of_too_few(body: Body) -> Body:
    def cut(i: Instruction) -> Instruction:
        return dataclasses.replace(i, group=i.group[:-1]) if isinstance(i, Collective) else i

    return tuple(map(cut, body))


PLACES: dict[str, Callable[[tuple[int, ...]], bool]] = {
    "the first rank": lambda place: place == (0, 0),
    "the last of dp": lambda place: place[0] == 3,
    "the last of tp": lambda place: place[1] == 1,
    "every other rank": lambda place: sum(place) % 2 == 1,
}
# Here groups along dp are whole: all of their ranks leave out the same, or nobody waits for another in a circle.
HARMLESS = {
    (lacks_a_call, "the last of tp"), (sends_less, "the last of tp"), (swaps_two_calls, "the last of tp"),
    (swaps_two_calls, "the last of dp"), (swaps_two_calls, "the first rank"),
}  # fmt: skip


@pytest.mark.parametrize("where", PLACES)
@pytest.mark.parametrize("broken", [lacks_a_call, swaps_two_calls, sends_less, in_a_group_of_too_few])
def test_programs_that_do_not_fit_are_refused_by_classes_as_rank_by_rank(
    broken: Callable[[Body], Body], where: str
) -> None:
    compiled = gathers_along_both_axes()
    hit = {rank for rank in compiled.ranks if PLACES[where](MESH.coordinate(rank))}
    made = [dataclasses.replace(p, instructions=broken(p.instructions)) if p.rank in hit else p
            for p in every_program(compiled)]  # fmt: skip
    found = rank_classes(compiled.segmented, lambda rank: made[rank].instructions)
    assert found is not None
    both = refuses(made), refuses([made[rank] for rank in found.representatives], found)
    assert both == ((broken, where) not in HARMLESS,) * 2


def refuses(programs: Sequence[HostProgram], classes: RankClasses | None = None) -> bool:
    try:
        verify_together(programs) if classes is None else verify_together(programs, classes.channel)
    except AssertionError:
        return True
    return False


def gathers_along_both_axes() -> CompiledProgram:
    """A collective along dp, and then one along tp."""
    fd = mf.FusionDefinition()
    x, y = (fd.define_tensor([8, 8], dtype=mf.DataType.Double) for _ in range(2))
    for tensor, axis in ((x, "dp"), (y, "tp")):
        out = fd.ops.set(tensor)
        fd.add_output(out)
        fd.mesh_split(tensor, MESH, [axis, None])
        fd.mesh_split(out, MESH, [None, None])
    compiled = fd.compile()
    found = check(compiled)
    assert found is not None and found.alike == ("dp", "tp")
    return compiled
