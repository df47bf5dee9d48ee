"""Host programs that a user writes or edits: results beside plain torch, and errors of broken ones."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

import meshfuse as mf
from meshfuse.host_ir import HostProgram
from meshfuse.host_programs import HostProgramBuilder, HostPrograms
from meshfuse.lowering.instructions import Collective, Free, Instruction, Wait

RANKS = [0, 1, 2]
GIVEN = [torch.randn(6, 2, generator=torch.Generator().manual_seed(rank)) for rank in RANKS]
STACK = torch.stack(GIVEN)


def ran(write: Callable[[HostProgramBuilder, Any], Any]) -> list[Any]:
    """By rank the first result of the program that `write` makes of a rank's tensor."""

    def program(rank: int) -> HostProgram:
        builder = HostProgramBuilder(rank)
        return builder.program(write(builder, builder.input("x", [6, 2])))

    found = HostPrograms(program(rank) for rank in RANKS).simulate({rank: [GIVEN[rank]] for rank in RANKS})
    return [found[rank][0] for rank in RANKS]


def parts(rank: int) -> slice:
    return slice(2 * rank, 2 * rank + 2)


CALLS: dict[str, tuple[Callable[..., Any], Callable[[int], torch.Tensor]]] = {
    "all-reduce": (lambda b, x: b.all_reduce(x, RANKS), lambda rank: STACK.sum(0)),
    "largest": (lambda b, x: b.all_reduce(x, RANKS, "max"), lambda rank: STACK.amax(0)),
    "all-gather": (lambda b, x: b.all_gather(x, RANKS), lambda rank: torch.cat(GIVEN)),
    "reduce-scatter": (lambda b, x: b.reduce_scatter(x, RANKS), lambda rank: STACK.sum(0)[parts(rank)]),
    "least part": (lambda b, x: b.reduce_scatter(x, RANKS, "min"), lambda rank: STACK.amin(0)[parts(rank)]),
    "all-to-all": (lambda b, x: b.all_to_all(x, RANKS), lambda rank: torch.cat([x[parts(rank)] for x in GIVEN])),
    "broadcast": (lambda b, x: b.broadcast(x, RANKS, 1), lambda rank: GIVEN[1]),
    "another order": (lambda b, x: b.all_gather(x, [2, 0, 1]), lambda rank: torch.cat([GIVEN[i] for i in (2, 0, 1)])),
}


@pytest.mark.parametrize("name", CALLS)
def test_a_collective(name: str) -> None:
    issue, wanted = CALLS[name]
    for rank, found in enumerate(ran(lambda b, x: b.wait(issue(b, x)))):
        torch.testing.assert_close(found, wanted(rank), rtol=1e-6, atol=1e-6)


def test_messages_go_around_while_a_kernel_runs() -> None:
    def write(b: HostProgramBuilder, x: Any) -> Any:
        sent = b.send(x, 1, RANKS) if b.rank == 0 else None
        got = b.recv([6, 2], torch.float32, (b.rank - 1) % 3, RANKS)
        sent = sent or b.send(x, (b.rank + 1) % 3, RANKS)
        own = b.kernel("own", "a = x.exp()\nb = a + x", ["a", "b"], x=x)[1]
        assert b.wait(sent) is None
        return b.kernel("total", "t = x + y", "t", x=own, y=b.wait(got))

    for rank, found in enumerate(ran(write)):
        torch.testing.assert_close(found, GIVEN[rank].exp() + GIVEN[rank] + GIVEN[rank - 1])


def top_two(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    values, places = x.topk(2, 0)
    return values, places


def test_functions_and_kernels_of_equal_names() -> None:
    def write(b: HostProgramBuilder, x: Any) -> Any:
        values, places = b.call(top_two, x)
        assert (values.shape, places.dtype) == ((2, 2), torch.int64)
        made = [
            b.kernel("scaled", f"y = x * {factor}", {"y": ([2, 2], torch.float32)}, x=values) for factor in (2, 3, 2)
        ]
        return b.kernel("last", "z = a + b + c + p", "z", a=made[0], b=made[1], c=made[2], p=places)

    for x, found in zip(GIVEN, ran(write), strict=True):
        torch.testing.assert_close(found, 7 * x.topk(2, 0)[0] + x.topk(2, 0)[1])


def test_a_program_of_a_definition_is_edited() -> None:
    """A wait is put in front of the kernel that it stood behind."""
    mesh = mf.DeviceMesh([0, 1])
    fd = mf.FusionDefinition()
    x, w = fd.define_tensor([4, 6]), fd.define_tensor([6, 4])
    y = fd.ops.add(fd.ops.matmul(x, w), fd.ops.exp(fd.ops.sum(x, [1], True)))
    fd.add_output(y)
    fd.mesh_split(y, mesh, [None, None])
    fd.mesh_split(x, mesh, [None, "x"])
    fd.mesh_split(w, mesh, ["x", None])

    def early(program: HostProgram) -> HostProgram:
        body = [i for i in program.instructions if not isinstance(i, Wait)]
        issued = [i for i in body if isinstance(i, Collective)]
        for call in issued:
            body.insert(body.index(call) + 1, Wait(call.work))
        return dataclasses.replace(program, instructions=tuple(body))

    programs = HostPrograms(early(fd.host_program(rank)) for rank in range(2))
    whole = torch.randn(4, 6), torch.randn(6, 4)
    given = {r: [whole[0][:, 3 * r : 3 * r + 3], whole[1][3 * r : 3 * r + 3]] for r in range(2)}
    wanted = whole[0] @ whole[1] + whole[0].sum(1, True).exp()
    for found in programs.simulate(given).values():
        torch.testing.assert_close(found[0], wanted)


# errors


def error_of(call: Callable[[], Any], kind: type[Exception] = mf.DefinitionError) -> str:
    with pytest.raises(kind) as error:
        call()
    return str(error.value)


def test_a_broken_program_names_its_instruction() -> None:
    (program, *others) = [_reduced(rank) for rank in RANKS]

    def of(body: Sequence[Instruction]) -> str:
        edited = dataclasses.replace(program, instructions=tuple(body))
        return error_of(lambda: HostPrograms([edited, *others]))

    body = list(program.instructions)
    wait = next(i for i in body if isinstance(i, Wait))
    free = next(i for i in body if isinstance(i, Free))
    start = "the host program of rank 0 is broken at "
    unfreed = [i for i in body if not isinstance(i, Free)]
    assert of([i for i in body if i is not wait]).startswith(f"{start}`del ")
    assert of([i for i in unfreed if i is not wait]).startswith(
        f"{start}`v_z = last(v_x_reduced)`: found reads before the wait, needed names that are made once"
    )
    assert of([*body, wait]).startswith(f"{start}`w0.wait()`: found waited for twice, or before it was issued: w0")
    assert of([*body, free]).startswith(f"{start}`{free.source()}`: found freed twice, needed names")
    assert of(unfreed).startswith(f"{start}its end: found never freed: [")
    assert of([*body, "w0.wait()"]).startswith(  # type: ignore[list-item]
        "the host program of rank 0: found 'w0.wait()', needed instructions. They are classes of "
    )
    fit = error_of(lambda: HostPrograms([program, others[0]]))
    assert fit.startswith("the host programs of these ranks do not fit together: found a rank is missing in (0, 1, 2)")


def _reduced(rank: int) -> HostProgram:
    b = HostProgramBuilder(rank)
    return b.program(b.kernel("last", "z = y + 1", "z", y=b.wait(b.all_reduce(b.input("x", [2]), RANKS))))


def builder() -> tuple[HostProgramBuilder, Any]:
    b = HostProgramBuilder(0)
    return b, b.input("x", [3, 2])


def waits_twice(b: Any, x: Any) -> Any:
    pending = b.all_reduce(x, [0, 1])
    b.wait(pending)
    return b.wait(pending)


def never_waits(b: Any, x: Any) -> Any:
    b.all_reduce(x, [0, 1])
    return b.program(x)


WRONG: dict[str, tuple[Callable[..., Any], str]] = {
    "rank": (lambda b, x: HostProgramBuilder(-1), "HostProgramBuilder: rank: found -1, needed the number of a rank"),
    "input": (lambda b, x: b.input("x", [1]), "input: name: found 'x', needed a name of Python's that is free"),
    "shape": (lambda b, x: b.input("y", [-1]), "shape: found [-1], needed a list of sizes. Give this rank's own sizes"),
    "dtype": (lambda b, x: b.input("y", [1], "float"), "dtype: found 'float', needed a dtype of torch's"),
    "syntax": (lambda b, x: b.kernel("k", "y =", "y", x=x), "kernel k: text: found SyntaxError: invalid syntax"),
    "names": (
        lambda b, x: b.kernel("k", "y = x + z", ["y", "u"], x=x),
        "kernel k: names that are not there: found u, z, needed inputs, what earlier lines assign, torch and F",
    ),
    "torch": (
        lambda b, x: b.kernel("k", "y = x @ x", "y", x=x),
        "kernel k cannot run on tensors of these shapes: found",
    ),
    "results": (lambda b, x: b.call(len, x), "kernel len: results: found 3, needed a tensor, or a tuple of them"),
    "function": (lambda b, x: b.call("exp", x), "call: found 'exp', needed a function of tensors"),
    "another": (
        lambda b, x: b.call(torch.exp, builder()[1]),
        "call: found v_x of another program, needed a buffer of this program. Pass what this builder returned.",
    ),
    "no wait": (
        lambda b, x: b.call(torch.exp, b.all_reduce(x, [0, 1])),
        "needed a buffer of this program. Wait for the communication first.",
    ),
    "ranks": (
        lambda b, x: b.all_gather(x, [1, 2]),
        "all_gather: ranks: found [1, 2], needed distinct ranks, with 0 among them. List the ranks that take part.",
    ),
    "reduce": (
        lambda b, x: b.all_reduce(x, [0, 1], "mean"),
        "all_reduce: reduce: found 'mean', needed one of sum, prod",
    ),
    "uneven": (
        lambda b, x: b.reduce_scatter(x, [0, 1]),
        "reduce_scatter of v_x: found shape [3, 2] on 2 ranks, needed a dim 0 that the ranks divide. Pad it first.",
    ),
    "root": (lambda b, x: b.broadcast(x, [0, 1], 2), "broadcast: root: found 2, needed one of [0, 1]"),
    "beside": (lambda b, x: b.send(x, 1, [0, 2]), "send: rank: found 1, needed one of [0, 2]. Pass a rank that takes"),
    "to itself": (lambda b, x: b.send(x, 0), "send: rank: found 0, needed a rank other than 0. Pass the other end."),
    "twice": (waits_twice, "needed a communication of this program, once"),
    "never": (never_waits, "the host program of rank 0: communication that nothing waits for: found w0, needed a wait"),
}


@pytest.mark.parametrize("name", WRONG)
def test_calls_that_no_program_has(name: str) -> None:
    call, message = WRONG[name]
    assert message in error_of(lambda: call(*builder()))


def test_arguments_that_do_not_fit() -> None:
    programs, x = HostPrograms([_reduced(rank) for rank in RANKS]), torch.ones(2)
    found = error_of(lambda: programs.simulate({0: [x]}), mf.ArgumentError)
    assert "needed a list of arguments for each of [0, 1, 2]. Pass {rank: [tensor, ...], ...}." in found
    found = error_of(lambda: programs.simulate({0: [x], 1: [x, x], 2: [x]}), mf.ArgumentError)
    assert (
        found.startswith("the arguments of rank 1: found [") and "needed a list of v_x. Pass this rank's own" in found
    )
    found = error_of(lambda: programs.execute([x]), mf.ArgumentError)
    assert found.startswith("execute on rank 0 of 1: found programs of ranks [0, 1, 2], needed a program of this rank")
    assert "HostPrograms: no program of that rank: found 3" in error_of(lambda: programs[3], mf.ArgumentError)
    assert "found programs of ranks [0, 0]" in error_of(lambda: HostPrograms([_reduced(0), _reduced(0)]))
    assert "HostPrograms: found 1, needed host programs." in error_of(lambda: HostPrograms([1]))  # type: ignore[list-item]


def test_a_kernel_that_fails_is_named() -> None:
    b = HostProgramBuilder(0)
    x = b.input("x", [2])
    programs = HostPrograms([b.program(b.kernel("last", "z = y @ y", "z", y=x))])
    with pytest.raises(
        mf.KernelError, match=r"\(last\) cannot be computed on rank 0.*in `z = y @ y`.*test_host_programs"
    ):
        programs.simulate({0: [torch.ones(2, 3)]})


def test_two_ends_that_all_wait_to_connect() -> None:
    """Each message has a group of its own, in a ring."""

    def program(rank: int) -> HostProgram:
        b = HostProgramBuilder(rank)
        pending = [b.send(b.input("x", [2]), (rank + 1) % 3), b.recv([2], torch.float32, (rank - 1) % 3)]
        return b.program([b.wait(p) for p in pending][1])

    assert "found ranks wait for each other" in error_of(lambda: HostPrograms(map(program, RANKS)))
