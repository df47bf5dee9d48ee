"""`execute(cuda_graph=True)` with a stand-in for CUDA's graphs: what is captured, replayed, copied and refused."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from rank_pool import RankPool

import meshfuse as mf
from meshfuse.backends import assignment
from meshfuse.executor import graphs
from meshfuse.executor.segments import Segments
from meshfuse.runtime.group import Group

pytestmark = pytest.mark.ranks


class FakeGraphs:
    """A graph that runs its function again, and writes into the memory of what was captured."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def warm_up(self, run: Callable[[], object]) -> None:
        self.calls.append("warm up")
        run()

    def capture(self, run: Callable[[], Sequence[Any]]) -> tuple[Sequence[Any], Callable[[], object]]:
        self.calls.append("capture")
        made = [None if out is None else out.clone() for out in run()]

        def replay() -> None:
            self.calls.append("replay")
            for mine, out in zip(made, run(), strict=True):
                if mine is not None:
                    mine.copy_(out)

        return made, replay

    def mark(self) -> Callable[[], bool]:
        return lambda: True


@pytest.fixture
def fakes(monkeypatch: pytest.MonkeyPatch) -> FakeGraphs:
    return faked(monkeypatch)


def faked(patch: pytest.MonkeyPatch) -> FakeGraphs:
    """Graphs of tensors on the host."""
    made = FakeGraphs()
    patch.setattr(graphs, "Cuda", lambda: made)
    patch.setattr(graphs, "DEVICE", "cpu")
    return made


def normed(mesh: mf.DeviceMesh, drop: float = 0.0, scaled: bool = False) -> mf.FusionDefinition:
    """A softmax over a sharded dim, with a program that has collectives."""
    with mf.FusionDefinition() as fd:
        x = fd.define_tensor([6, 8], dtype=mf.DataType.Double)
        y = fd.ops.softmax(x, 1)
        y = y * fd.define_scalar(dtype=mf.DataType.Double) if scaled else y
        out = fd.ops.dropout(y, drop) if drop else y
        fd.add_output(out)
        for t in (x, out):
            fd.mesh_split(t, mesh, [None, "tp"])
    return fd


def steps(backend: str) -> tuple[list[str], list[bool], list[bool]]:
    """What was called, whether results were right, and whether those of before stayed so."""
    world = mf.World.current()
    with pytest.MonkeyPatch.context() as patch:
        made, fd = faked(patch), normed(mf.DeviceMesh((world.size,), ("tp",)))
        right, outputs, expected = [], [], []
        buffer = torch.empty(6, 8 // world.size, dtype=torch.float64)
        for step in range(4):
            whole = torch.randn(6, 8, generator=torch.Generator().manual_seed(step), dtype=torch.float64)
            buffer.copy_(whole.chunk(world.size, 1)[world.rank])
            (out,) = fd.execute([buffer], cuda_graph=True, backend=backend)
            wanted = torch.softmax(whole, 1)
            expected.append(wanted if out.shape == whole.shape else wanted.chunk(world.size, 1)[world.rank])
            outputs.append(out)
            right.append(torch.allclose(out, expected[-1]))
        kept = [torch.allclose(out, wanted) for out, wanted in zip(outputs, expected, strict=True)]
    return made.calls, right, kept


@pytest.mark.parametrize("backend", ["eager", "auto"])
def test_a_step_is_captured_once_and_replayed_with_new_arguments(ranks2: RankPool, backend: str) -> None:
    for calls, right, kept in ranks2.run(steps, backend, timeout=120):
        assert calls[:2] == ["warm up", "capture"]
        assert calls.count("capture") == 1
        assert calls.count("replay") >= 3
        assert right == kept == [True] * 4


LINE = mf.DeviceMesh([0])
X = torch.zeros(6, 8, dtype=torch.float64)


def refused(text: str, action: Callable[[], object]) -> None:
    with pytest.raises(mf.ArgumentError) as caught:
        action()
    assert f"cuda_graph=True: found {text}" in str(caught.value)
    assert "Leave out cuda_graph." in str(caught.value)


def test_what_a_graph_cannot_do_is_refused(fakes: FakeGraphs, monkeypatch: pytest.MonkeyPatch) -> None:
    mesh = mf.DeviceMesh((1,), ("tp",))
    drawing, scaled, plain = normed(mesh, drop=0.5), normed(mesh, scaled=True), normed(mesh)
    refused("random numbers, drawn in segment_0, needed a", lambda: drawing.execute([X], cuda_graph=True))
    refused("1 scalar inputs, needed tensors alone", lambda: scaled.execute([X, 2.0], cuda_graph=True))
    monkeypatch.setattr(graphs, "DEVICE", "cuda")
    refused("arguments on cpu, needed tensors on a cuda device", lambda: plain.execute([X], cuda_graph=True))
    monkeypatch.setattr(Group, "is_staged", True)
    group, line = Group(mf.World.current(), (0,), "of ranks"), plain.recording.tensors[0].line
    shared = "group of ranks (ranks 0) of ranks that share a device, needed a device for each rank"
    refused(shared, lambda: graphs.check_groups([group], line))
    assert fakes.calls == []


@pytest.mark.parametrize("backend", ["eager", "auto", "inductor"])
def test_it_is_refused_at_every_call_before_anything_is_compiled(monkeypatch: pytest.MonkeyPatch, backend: str) -> None:
    """And not when segments are due, by then in the midst of a job."""
    monkeypatch.setattr(Segments, "compile_next", lambda _: pytest.fail("compiled"))
    monkeypatch.setattr(assignment, "_LEAST", 0.0)
    fd = normed(mf.DeviceMesh((1,), ("tp",)))
    for _ in range(3):
        refused("arguments on cpu", lambda: fd.execute([X], cuda_graph=True, backend=backend))
