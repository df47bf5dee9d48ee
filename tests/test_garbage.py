"""Compilation turns Python's garbage collector off, and leaves it, and what a user did with it, as they were."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator

import pytest

import meshfuse as mf
from meshfuse import collector

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
