"""Kernels do the copies beside them: which, what stays outside, and that numbers and orders are what they were."""

from __future__ import annotations

import contextlib
import traceback
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from torch.utils._pytree import tree_leaves

import meshfuse as mf
from copy_programs import COLUMNS, LINE, MOVED, ROWS, WHOLE, copies
from meshfuse.compiler import CompiledProgram
from meshfuse.executor.simulate import Simulation
from meshfuse.host_ir import HostProgram, lower_to_host_ir, verify, verify_together
from meshfuse.lowering import rank_lowering as lower
from meshfuse.lowering.fusable_copies import Fusible
from meshfuse.lowering.fuse_copies import fuse_copies
from meshfuse.lowering.instructions import (
    Allocate,
    Collective,
    CommunicationCall,
    Copy,
    Free,
    Instruction,
    Launch,
    Wait,
)  # fmt: skip
from meshfuse.lowering.schedule import IN_FLIGHT
from meshfuse.ops.values import ScalarRef, TensorRef
from meshfuse.runtime.buffers import Plain
from meshfuse.sharding.data import shard
from meshfuse.testing import annotations, definitions, inputs_for


def outside() -> Any:
    """Programs whose copies all stay outside of kernels."""
    return mock.patch.object(lower, "fuse_copies", lambda body, *_: list(body))


def programs(fd: mf.FusionDefinition) -> list[HostProgram]:
    compiled = fd.compile()
    return [compiled.host_program(rank) for rank in compiled.ranks]


@pytest.mark.parametrize("name", MOVED)
def test_no_copy_is_left_between_kernels_and_communications(name: str) -> None:
    moved = MOVED[name]
    for program in programs(moved.define()):
        assert [c.kind for c in program.communications] == [moved.kind]
        assert copies(program) == []
    with outside():
        found = [copies(program) for program in programs(moved.define())]
    assert all(found) or name == "a gather of turned rows"  # A copy where the source lies so, else none.


def test_what_lies_in_another_order_is_packed_by_its_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    callers: list[str] = []
    clone = Plain.clone

    def counted(self: Plain, x: torch.Tensor) -> torch.Tensor:
        stack = traceback.extract_stack()
        callers.append(next(f.name for f in reversed(stack) if f.filename.startswith("<meshfuse")))
        return clone(self, x)

    monkeypatch.setattr(Plain, "clone", counted)
    moved = MOVED["a gather of turned rows"]
    for patch, caller in ((outside(), "main"), (contextlib.nullcontext(), "segment_0")):
        callers.clear()
        with patch:
            moved.define().simulate(moved.inputs())
        assert callers == [caller] * 2


@pytest.mark.parametrize("name", MOVED)
def test_numbers_are_those_of_torch_and_bits_those_of_copies_outside(name: str) -> None:
    moved = MOVED[name]
    (found,) = moved.define().simulate(moved.inputs(), check_streams=True)
    torch.testing.assert_close(found, moved.expected())
    with outside():
        (same,) = moved.define().simulate(moved.inputs(), check_streams=True)
    assert torch.equal(found, same)


@pytest.mark.slow
@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", MOVED)
def test_compiled_kernels_have_the_copies_in_them(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MESHFUSE_BACKEND", "inductor")
    moved = MOVED[name]
    fd = moved.define()
    for _ in range(2):
        torch.testing.assert_close(fd.simulate(moved.inputs(), check_streams=True)[0], moved.expected())
    assert fd.backends().count("compiled") == len(fd.host_program(0).kernels) == 2


def order(program: HostProgram) -> list[tuple[str, str]]:
    """Kernels, communications and waits, in the order of the program."""
    return [named for ins in program.instructions for named in _named(ins)]


def _named(ins: Instruction) -> list[tuple[str, str]]:
    if isinstance(ins, Launch):
        return [("kernel", ins.kernel.name)]
    return [(type(ins).__name__, ins.work)] if isinstance(ins, (CommunicationCall, Wait)) else []


def lowered(compiled: CompiledProgram, in_flight: int = IN_FLIGHT) -> list[HostProgram]:
    made = [lower_to_host_ir(compiled.segmented, rank, compiled.digest, in_flight) for rank in compiled.ranks]
    for program in made:
        verify(program)
    verify_together(made)
    return made


def results(compiled: CompiledProgram, made: Sequence[HostProgram], inputs: Sequence[Any]) -> list[Any]:
    """What the ranks have at the end."""
    refs = compiled.graph.inputs

    def part(ref: TensorRef | ScalarRef, whole: Any, rank: int) -> Any:
        sharding = compiled.sharded.shardings[ref.id] if isinstance(ref, TensorRef) else None
        return shard(whole, sharding, rank) if sharding is not None and rank in sharding.mesh else whole

    given = {p.rank: [part(ref, whole, p.rank) for ref, whole in zip(refs, inputs, strict=True)] for p in made}
    return list(Simulation(made, torch.device("cpu"), check_streams=True).run(given, 0, 0).values())


@pytest.mark.slow
@settings(max_examples=8)
@given(definitions(min_ops=3, max_ops=10).flatmap(annotations))
def test_random_programs_keep_their_orders_and_bits(fd: mf.FusionDefinition) -> None:
    compiled, inputs = fd.compile(), inputs_for(fd)
    with outside():
        before = lowered(compiled)
    after = lowered(compiled)
    assert list(map(order, before)) == list(map(order, after))
    found, expected = (results(compiled, made, inputs) for made in (after, before))
    for a, b in zip(tree_leaves(found), tree_leaves(expected), strict=True):
        assert torch.equal(a.nan_to_num(), b.nan_to_num()) if a is not None else b is None


def defined(shape: Sequence[int], body: Callable[..., Any]) -> mf.FusionDefinition:
    """What `body` makes of a tensor, with its own annotations."""
    with mf.FusionDefinition() as fd:
        for out in body(fd, fd.define_tensor(list(shape))):
            fd.add_output(out)
    return fd


def sharded(fd: mf.FusionDefinition, tensor: Any, dims: Sequence[Any]) -> Any:
    fd.mesh_split(tensor, LINE, list(dims))
    return tensor


def launched(program: HostProgram) -> list[Launch]:
    return [ins for ins in program.instructions if isinstance(ins, Launch)]


def test_the_first_of_several_readers_gives_the_others_what_it_put_together() -> None:
    """One copy, as before."""
    gathered = next(p for p in programs(MOVED["a gather of columns"].define()) if p.rank == 0)
    with outside():
        (program,) = (p for p in programs(MOVED["a gather of columns"].define()) if p.rank == 0)
    body = [ins for ins in program.instructions if not isinstance(ins, Free)]
    (first,) = (i for i in body if isinstance(i, Launch) and i.kernel.name == "segment_1")
    again = replace(first, kernel=replace(first.kernel, name="segment_2"), outputs=("v99",))
    facts = Fusible(frozenset({4}), frozenset(), frozenset())
    *_, made, other = fuse_copies([*body, again], {"segment_1": facts, "segment_2": facts}, {"v6", "v99"}, IN_FLIGHT)
    assert isinstance(made, Launch) and other == again
    assert made.outputs == ("v6", "v4") == made.kernel.results and made.inputs == ("v4_flat",)
    assert made.kernel.source()[:-1] == launched(gathered)[1].kernel.source()[:-1]


def test_a_product_reads_what_was_put_together_before() -> None:
    def body(fd: Any, x: Any) -> Any:
        whole = sharded(fd, fd.ops.set(sharded(fd, x, COLUMNS)), WHOLE)
        return (fd.ops.matmul(whole, fd.ops.permute(whole, [1, 0])),)

    for program in programs(defined((4, 6), body)):
        assert [".movedim(0, 1)" in ins.source() for ins in copies(program)] == [True]


def test_pieces_that_do_not_lie_in_a_row_are_put_together_before() -> None:
    """Of uneven columns; choosing among such pieces for every element takes a compiler longer than copying them."""

    def body(fd: Any, x: Any) -> Any:
        y = sharded(fd, fd.ops.set(sharded(fd, x, COLUMNS)), ROWS)
        return (fd.ops.relu(y),)

    for program in programs(defined((6, 5), body)):
        assert any(isinstance(ins, Copy) and ins.box is not None for ins in copies(program))


def test_what_is_received_is_held_by_a_kernel_as_far_as_there_is_room() -> None:
    compiled = MOVED["columns to rows"].define().compile()
    size = 6 * 8 * 8 // 2
    for room, left in ((size - 1, 1), (size, 0)):
        assert [len(copies(program)) for program in lowered(compiled, room)] == [left, left]


def test_what_is_sent_first_is_not_packed_later() -> None:
    """The second value is packed once the first is on its way, as that would be issued later else."""

    def body(fd: Any, x: Any) -> Any:
        x = sharded(fd, x, ROWS)
        made = [sharded(fd, y, ROWS) for y in (fd.ops.relu(x), fd.ops.neg(x))]
        return [sharded(fd, fd.ops.set(y), COLUMNS) for y in made]

    big = (1024, 1024)  # Apart: no bucket.
    for program in programs(defined(big, body)):
        (launch, *_) = launched(program)
        assert [".movedim(1, 0)" in step.source() for step in launch.kernel.packs] == [True]
        assert [".movedim(1, 0)" in ins.source() for ins in copies(program)] == [True]


def test_moves_that_are_one_call_are_packed_and_unpacked_by_kernels() -> None:
    """Gathers of columns, and all-to-alls, in one buffer each."""
    for target in (WHOLE, ROWS):

        def body(fd: Any, x: Any, target: Any = target) -> Any:
            x = sharded(fd, x, COLUMNS)
            moved = [sharded(fd, fd.ops.set(y), target) for y in (fd.ops.relu(x), fd.ops.neg(x))]
            return [fd.ops.exp(y) for y in moved]

        fd = defined((4, 6), body)
        for program in programs(fd):
            assert len([i for i in program.instructions if isinstance(i, Collective)]) == 1
            assert copies(program) == []
        x = torch.randn(4, 6)
        for found, wanted in zip(fd.simulate([x]), (x.relu().exp(), (-x).exp()), strict=True):
            torch.testing.assert_close(found, wanted)


def test_shifted_rows_are_put_between_their_edges_by_the_kernel() -> None:
    """A pad of a sharded dim: every rank gets exact pieces, beside a number that no rank sends."""

    def body(fd: Any, x: Any) -> Any:
        y = sharded(fd, fd.ops.pad(sharded(fd, x, ROWS), [0, 0, 1, 1], 2.5), ROWS)
        return (sharded(fd, fd.ops.exp(y), ROWS),)

    fd, x = defined((8, 6), body), torch.randn(8, 6)
    (found,) = fd.simulate([x], check_streams=True)
    torch.testing.assert_close(found, torch.nn.functional.pad(x, (0, 0, 1, 1), value=2.5).exp())
    for program in programs(fd):
        assert any(isinstance(i, Allocate) and i.fill == "2.5" for k in program.kernels for i in k.unpacks)
