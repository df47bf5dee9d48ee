"""Calls of simulated ranks that follow one which an error ended, or that come while another is under way."""

from __future__ import annotations

import contextlib
import functools
import threading
from typing import Any

import pytest
import torch

import meshfuse as mf
from interrupts import interrupted, places
from meshfuse.backends import Task
from meshfuse.definition.recording import Recording
from meshfuse.executor import segments, simulate

MESH = mf.DeviceMesh((2, 4), ("dp", "tp"))
TABLE = torch.randn(16, 4)
PARTS = torch.randn(8, 4)
OURS = ("/meshfuse/", "<meshfuse")


def looked_up() -> mf.FusionDefinition:
    """Communications before and after a look-up; of one kind, so that those of two calls could meet."""
    with mf.FusionDefinition() as fd:
        parts, ids = fd.define_tensor([8, 4]), fd.define_tensor([8], dtype=mf.DataType.Int)
        table = fd.define_tensor([16, 4])
        total = fd.ops.sum(parts, [0])
        found = fd.ops.sum(fd.ops.mul(fd.ops.index_select(table, ids, 0), total), [0])
        fd.add_output(found)
        fd.mesh_split(parts, MESH, [("dp", "tp"), None])
        fd.mesh_split(ids, MESH, [("dp", "tp")])
    return fd


def wanted(ids: torch.Tensor, parts: torch.Tensor = PARTS) -> torch.Tensor:
    return (TABLE[ids] * parts.sum(0)).sum(0)


@pytest.mark.parametrize("place", range(8))
def test_a_call_after_one_that_failed_starts_anew(place: int) -> None:
    """What ranks had sent when another one failed must not be taken for the next call's."""
    fd, good = looked_up(), torch.arange(8)
    bad = good.clone()
    bad[place] = 99
    for _ in range(2):
        with pytest.raises(mf.KernelError, match="out of range"):
            fd.simulate([PARTS, bad, TABLE])
        torch.testing.assert_close(fd.simulate([PARTS * 2, good, TABLE])[0], wanted(good, PARTS * 2))


def test_a_call_after_one_that_was_interrupted_anywhere_starts_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """And what it binds, as the interrupted one has lost something, it binds for all calls to come."""
    fd, ids = looked_up(), torch.arange(8)
    fd.simulate([PARTS, ids, TABLE])
    bound, bind = [], simulate.bind_program
    monkeypatch.setattr(simulate, "bind_program", lambda *args: (bound.append(args), bind(*args))[1])
    counts = places(lambda: fd.simulate([PARTS, ids, TABLE]), *OURS)
    assert len(counts) > 100
    for count in counts:
        with contextlib.suppress(KeyboardInterrupt), interrupted(count, *OURS):
            fd.simulate([PARTS, ids, TABLE])
        for factor in (2, 3):
            bound.clear()
            torch.testing.assert_close(fd.simulate([PARTS * factor, ids, TABLE])[0], wanted(ids, PARTS * factor))
        assert not bound and torch.is_grad_enabled(), count


class Compiled:
    """A backend whose code is the text."""

    name = "inductor"

    def prepare(self, task: Task) -> Any:
        assert not isinstance(task.eager, functools.partial), "compiled already"
        return functools.partial(self._run, task.eager)

    def _run(self, text: Any, *arguments: Any) -> Any:
        return text(*arguments)


def test_compiling_that_ends_at_any_moment_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """From the text, at the next call."""
    monkeypatch.setenv("MESHFUSE_BACKEND", "inductor")
    monkeypatch.setitem(segments.MAKERS, "inductor", Compiled)
    ids = torch.arange(8)

    def planned() -> mf.FusionDefinition:
        fd = looked_up()
        fd.compile()  # Outside of what is watched, which takes several times as long.
        return fd

    first = planned()
    for count in places(lambda: first.simulate([PARTS, ids, TABLE]), "/executor/segments.py"):
        fd = planned()
        with contextlib.suppress(KeyboardInterrupt), interrupted(count, "/executor/segments.py"):
            fd.simulate([PARTS, ids, TABLE])
        torch.testing.assert_close(fd.simulate([PARTS * 2, ids, TABLE])[0], wanted(ids, PARTS * 2))
        assert fd.backends().count("compiled") == len(fd.backends().splitlines()) - 1, count


def test_threads_may_share_a_definition() -> None:
    fd, wrong = looked_up(), []

    def work(seed: int) -> None:
        draw = torch.Generator().manual_seed(seed)
        try:
            for _ in range(10):
                ids, parts = torch.randint(0, 16, (8,), generator=draw), torch.randn(8, 4, generator=draw)
                torch.testing.assert_close(fd.simulate([parts, ids, TABLE])[0], wanted(ids, parts))
        except BaseException as error:
            wrong.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong, wrong[0]


def test_an_op_may_call_the_definition_that_it_is_in() -> None:
    inside: list[torch.Tensor] = []
    left = [3]

    @mf.torch_op("a b -> a b", name="asking")
    def asking(x: torch.Tensor) -> torch.Tensor:
        if left[0]:
            left[0] -= 1
            inside.append(fd.simulate([PARTS])[0])
        return x * 2

    op = mf.register_op(asking)
    try:
        with mf.FusionDefinition() as fd:
            x = fd.define_tensor([8, 4])
            fd.add_output(fd.ops.sum(fd.ops.asking(fd.ops.add(x, fd.ops.sum(x, [0]))), [0]))
            fd.mesh_split(x, MESH, [("dp", "tp"), None])
        outside = fd.simulate([PARTS])[0]
        for found in (outside, *inside):
            torch.testing.assert_close(found, (2 * (PARTS + PARTS.sum(0))).sum(0))
        assert len(inside) == 3
    finally:
        mf.unregister_op(op)


def looks(layers: int, monkeypatch: pytest.MonkeyPatch) -> int:
    """How often a step of so many layers, with a gradient each, works out where all annotated tensors are."""
    with mf.FusionDefinition() as fd:
        x, weights = fd.define_tensor([8, 4]), [fd.define_tensor([4, 4]) for _ in range(layers)]
        y = x
        for weight in weights:
            y = fd.ops.matmul(y, weight)
        for made in fd.grad(fd.ops.sum(y), weights):
            fd.add_output(made)
        fd.mesh_split(x, MESH, ["dp", "tp"])
    given, counted, all_of = [torch.ones(8, 4), *[torch.ones(4, 4)] * layers], [], Recording.annotations
    fd.simulate(given)
    with monkeypatch.context() as patch:
        noted = property(lambda self: counted.append(1) or all_of.__get__(self))
        patch.setattr(Recording, "annotations", noted)
        fd.simulate(given)
    return len(counted)


def test_a_step_of_more_layers_works_out_annotations_no_oftener(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of each gradient it takes a look at what made it: for every weight and rank that would be most of a step."""
    assert looks(2, monkeypatch) == looks(5, monkeypatch)


@pytest.mark.parametrize("run", ["simulate", "execute", "__call__"])
def test_questions_without_shapes_are_about_the_program_that_ran_last(run: str) -> None:
    """Sizes that were met before compile nothing new; shardings and bills are of what ran all the same."""
    mesh = mf.DeviceMesh((2,), ("tp",)) if run == "simulate" else mf.DeviceMesh((1,), ("tp",))
    with mf.FusionDefinition() as fd:
        x = fd.define_tensor([-1, 4])
        fd.add_output(fd.ops.sum(x, [0]))
        fd.mesh_split(x, mesh, ["tp", None])
    for rows in (8, 16, 8, 8, 16):
        getattr(fd, run)([torch.ones(rows, 4)]) if run != "__call__" else fd(torch.ones(rows, 4))
        assert fd.latest().graph.shape(x.id) == (rows, 4)
        assert fd.latest([[8, 4]]).graph.shape(x.id) == (8, 4)
        assert fd.output_shardings() == fd.latest([[rows, 4]]).output_shardings()
    fd.compile([32, 4])
    assert fd.latest().graph.shape(x.id) == (32, 4)
