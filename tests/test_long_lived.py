"""A process that makes definitions without end, and drops them, keeps a bounded number of what was made for them."""

from __future__ import annotations

import gc
import linecache
import threading
import traceback
from collections import deque
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import meshfuse as mf
from meshfuse import fusion_definition
from meshfuse.backends import inductor
from meshfuse.executor.bind import bind_program
from meshfuse.sharding import Sharding, Split


def program(n: int, mesh: mf.DeviceMesh) -> mf.FusionDefinition:
    with mf.FusionDefinition() as fd:
        x = fd.define_tensor([n, n])
        fd.mesh_split(x, mesh, ["tp", None])
        y = fd.ops.relu(x)
        fd.mesh_split(y, mesh, [None, "tp"])
        fd.add_output(y)
    return fd


def texts() -> set[str]:
    return {file for file in linecache.cache if file.startswith("<meshfuse")}


def test_the_texts_of_programs_go_with_them(monkeypatch: pytest.MonkeyPatch) -> None:
    # Ctrl-C at any place of `meshfuse bill` (test_cli.py) leaves what collects a script's definitions.
    monkeypatch.setattr(fusion_definition, "observers", [])
    mesh = mf.DeviceMesh((2,), ("tp",))
    gc.collect()
    before = texts()
    for n in range(2, 12):
        program(n, mesh).simulate([torch.ones(n, n)])
    gc.collect()
    assert texts() <= before


def test_a_program_keeps_its_text_when_another_of_the_same_goes() -> None:
    mesh = mf.DeviceMesh((1,), ("tp",))
    kept, gone = program(7, mesh).compile(), program(7, mesh).compile()
    bound = bind_program(kept.host_program(0), lambda _: None, torch.device("cpu"), simulated=True)
    bind_program(gone.host_program(0), lambda _: None, torch.device("cpu"), simulated=True)
    gc.collect()
    lines = {linecache.getline(bound.file, n) for n in bound.where}
    assert lines and "" not in lines


def test_a_traceback_of_a_program_that_is_gone_shows_its_lines() -> None:
    fd = program(3, mf.DeviceMesh((1,), ("tp",)))
    bound = bind_program(fd.compile().host_program(0), lambda _: None, torch.device("cpu"), simulated=True)
    with pytest.raises((TypeError, AttributeError)) as caught:
        next(bound.main(None))
    file = bound.file
    del bound, fd
    gc.collect()
    inside = [frame for frame in traceback.extract_tb(caught.value.__traceback__) if frame.filename == file]
    assert inside and all(frame.line for frame in inside)


def test_shardings_that_nothing_holds_are_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Sharding, "_recent", deque(maxlen=8))
    mesh = mf.DeviceMesh((2,), ("tp",))
    kept = [Sharding(mesh, ((Split(2, "tp"), Split(10**6 + n)),)) for n in range(3)]
    gc.collect()
    before = len(Sharding._interned)
    for n in range(1000):
        Sharding(mesh, ((Split(2, "tp"), Split(10**7 + n)),))
    gc.collect()
    assert len(Sharding._interned) <= before + 8
    assert [Sharding(mesh, s.dims) for s in kept] == kept


def test_equal_shardings_are_one_object_whoever_makes_them_at_once() -> None:
    mesh, found = mf.DeviceMesh((2,), ("tp",)), list[list[Sharding]]()

    def make() -> None:
        barrier.wait(10)
        found.append([Sharding(mesh, ((Split(2, "tp"), Split(2 * 10**7 + n)),)) for n in range(2000)])

    barrier = threading.Barrier(4)
    threads = [threading.Thread(target=make) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(found) == 4
    assert all(len(set(map(id, same))) == 1 for same in zip(*found, strict=True))


@pytest.mark.slow
def test_compiled_segments_are_few(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those used last are kept, and shared by equal kernels."""
    made = list[str]()

    def compile_(task: Any) -> Any:
        made.append(task.kernel.source()[0])
        return lambda arguments: arguments

    monkeypatch.setattr(inductor, "_compile", compile_)
    monkeypatch.setattr(inductor, "_compiled", {})
    monkeypatch.setattr(inductor, "MOST_KERNELS", 4)

    def prepare(text: str) -> None:
        kernel = SimpleNamespace(source=lambda: [text], functions=(), params=["v0"], results=["v1"])
        arguments = (torch.ones(2),)
        inductor.Inductor().prepare(SimpleNamespace(  # type: ignore[arg-type]
            kernel=kernel, arguments=arguments, device=torch.device("cpu"), rank=0, eager=lambda *a: a[0]))  # fmt: skip

    for n in range(20):
        prepare("often")
        prepare(f"once {n}")
        assert len(inductor._compiled) <= 4
    assert made == ["often", *(f"once {n}" for n in range(20))]
