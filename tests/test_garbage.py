"""Compilation turns Python's garbage collector off, and leaves it, and what a user did with it, as they were."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import weakref
from collections.abc import Iterator
from pathlib import Path

import pytest

import meshfuse as mf
from meshfuse import caches as memos
from meshfuse import compiler
from meshfuse import gc_pause as collector

MESH = mf.DeviceMesh((4,), ("tp",))


@pytest.fixture(autouse=True)
def no_frozen_objects(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The suite's own are frozen (conftest.py)."""
    gc.unfreeze()
    monkeypatch.setattr(collector.FROZEN, "found", False)
    yield
    gc.freeze()


def mlp() -> mf.FusionDefinition:
    with mf.FusionDefinition() as fd:
        x, w, v = (fd.define_tensor([64, 64]) for _ in range(3))
        fd.mesh_split(w, MESH, [None, "tp"])
        fd.add_output(fd.ops.matmul(fd.ops.gelu(fd.ops.matmul(x, w)), v))
    return fd


def test_what_a_large_compilation_made_is_old_to_the_collector(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(collector, "MUCH", 0)
    program = mlp().compile()
    old = {id(made) for made in gc.get_objects(generation=2)}
    assert {id(program.planned), id(program.graph.nodes)} <= old
    assert gc.isenabled() and not gc.get_freeze_count()


def test_objects_that_a_user_froze_stay_frozen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(collector, "MUCH", 0)
    gc.freeze()
    frozen = gc.get_freeze_count()
    mlp().compile()
    assert gc.get_freeze_count() > frozen * 0.9


def test_what_a_user_froze_is_counted_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Python counts a million objects one by one, which takes longer than a small program's compilation."""
    monkeypatch.setattr(collector, "MUCH", 0)
    gc.freeze()
    counted, count = list[int](), gc.get_freeze_count
    monkeypatch.setattr(gc, "get_freeze_count", lambda: counted.append(count()) or counted[-1])
    for _ in range(3):
        mlp().compile()
    assert len(counted) == 1 and counted[0] > 0


def test_a_collector_that_a_user_turned_off_stays_off() -> None:
    gc.disable()
    try:
        mlp().compile()
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_a_users_cycles_are_still_found_after_a_large_compilation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(collector, "MUCH", 0)

    class Loop:
        def __init__(self) -> None:
            self.me = self

    gone = weakref.ref(Loop())
    mlp().compile()
    gc.collect()
    assert gone() is None


def held() -> int:
    """The objects that the collector has to look through, beside those that nothing holds any more."""
    gc.collect()
    return len(gc.get_objects())


def deep(rows: int) -> mf.FusionDefinition:
    with mf.FusionDefinition() as fd:
        x, *weights = (fd.define_tensor([rows, rows]) for _ in range(3))
        fd.mesh_split(x, mf.DeviceMesh((2, 4), ("dp", "tp")), ["dp", "tp"])
        y = x
        for w in weights:
            y = fd.ops.softmax(fd.ops.linear(y, w))
        for g in fd.grad(y, weights):
            fd.add_output(g)
    return fd


@pytest.mark.slow
@pytest.mark.parametrize("most", [0, 10_000])
def test_what_plannings_leave_behind_is_little(monkeypatch: pytest.MonkeyPatch, most: int) -> None:
    """A program holds its plan; tables of planning are dropped once they hold so much, whichever module has them."""
    monkeypatch.setattr(memos, "MOST", most)
    monkeypatch.setattr(compiler, "planned", lambda graph, world, decide, effort: decide())  # none that is on disk
    deep(16).compile()  # imports what is needed
    memos.drop()
    gc.collect()
    gc.freeze()  # What other tests hold takes seconds to look through.
    before = held()
    for rows in (24, 40, 56):
        deep(rows).compile()
        assert held() - before < 1000 + 2 * most


AT_EXIT = """
import atexit, gc, sys
def left():
    print(f"{len(gc.get_objects()) - before:d} more", flush=True)
atexit.register(left)  # before meshfuse is imported, and so after all that it does
class Loop:
    def __init__(self):
        self.me, self.file = self, open(sys.argv[1], "w")
        self.file.write("all of it")
    def __del__(self):
        print("the end of a loop")
loop = Loop()
import meshfuse as mf
from test_garbage import deep
deep(16).compile()
from meshfuse import caches
caches.MOST = 1e9
caches.drop()
gc.collect()
before = len(gc.get_objects())
deep(24).compile()
assert len(gc.get_objects()) > before + 2_000, "nothing is left to be dropped"
atexit.register(print, "a function at exit")
sys.exit(3)
"""


@pytest.mark.slow
def test_an_interpreter_ends_without_what_planning_kept_and_with_all_that_the_script_is_owed(tmp_path: Path) -> None:
    """Else the collector looks through it three times: 4 seconds after 8 of planning."""
    written = tmp_path / "file"
    done = subprocess.run(
        [sys.executable, "-c", AT_EXIT, str(written)], capture_output=True, text=True, timeout=140,
        env={**os.environ, "MESHFUSE_CACHE": "off", "PYTHONPATH": str(Path(__file__).parent)},
    )  # fmt: skip
    assert done.returncode == 3, done.stderr
    first, count, last = done.stdout.splitlines()
    assert (first, last) == ("a function at exit", "the end of a loop") and written.read_text() == "all of it"
    assert int(count.removesuffix(" more")) < 1000
