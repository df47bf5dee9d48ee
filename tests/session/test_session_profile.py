"""What a session shows: its trace, its line of progress, and how its objects print."""

from __future__ import annotations

import io
import json
import re
import sys
import time
from pathlib import Path

import pytest
import torch

import meshfuse as mf
import meshfuse.session as di
from meshfuse.errors import ArgumentError

MESH = mf.DeviceMesh((4,), ("tp",))


def feed_forward() -> mf.FusionDefinition:
    with mf.FusionDefinition() as fd:
        x, up, down = fd.define_tensor([-1, 16]), fd.define_tensor([32, 16]), fd.define_tensor([8, 32])
        fd.add_output(fd.ops.linear(fd.ops.gelu(fd.ops.linear(x, up)), down))
        fd.mesh_split(up, MESH, ["tp", None])
        fd.mesh_split(down, MESH, [None, "tp"])
    return fd


def test_one_trace_of_controller_and_workers(session: di.Session, tmp_path: Path) -> None:
    step = session.load_definition(feed_forward())
    arguments = torch.randn(4, 16), torch.randn(32, 16), torch.randn(8, 32)
    step(*arguments)
    session.sync()
    before = time.perf_counter()
    with session.profile(tmp_path / "trace.json"):
        session.call(time.sleep, 0.05)
        step(*arguments)
        session.sync()
    seconds = time.perf_counter() - before
    step(*arguments)  # Nothing is recorded any more.
    session.sync()
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    names = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert names == {0: "controller", **{w + 1: f"worker {w}" for w in range(4)}}
    spans = [e for e in events if e["ph"] == "X"]
    assert all(e["ts"] >= -1e4 and e["ts"] + e["dur"] <= seconds * 1e6 + 1e4 for e in spans)
    issued = next(e for e in spans if e["pid"] == 0 and e["name"] == "sleep")
    for worker in range(4):
        own = [e for e in spans if e["pid"] == worker + 1]
        assert {e["cat"] for e in own} == {"call", "kernel", "communication", "wait"}
        slept = next(e for e in own if e["name"] == "sleep")
        assert slept["dur"] >= 5e4 and slept["ts"] >= issued["ts"] - 2e3
        assert slept["args"]["call"] == issued["args"]["call"]
        # Within the call that runs the definition.
        call = next(e for e in own if e["name"] == "load_definition")
        for e in own:
            if e["cat"] == "kernel":
                assert call["ts"] <= e["ts"] and e["ts"] + e["dur"] <= call["ts"] + call["dur"]
    assert [e for e in spans if e["pid"] == 0 and e["cat"] == "wait"]


def test_wrong_profiles(threaded: di.Session, tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match="profile: path: found 3, needed a file to write to"):
        threaded.profile(3)  # type: ignore[arg-type]
    with threaded.profile(tmp_path / "a"), pytest.raises(ArgumentError, match="profile inside of another"):
        threaded.profile(tmp_path / "b").__enter__()


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_long_wait_says_for_what(threaded: di.Session, monkeypatch: pytest.MonkeyPatch) -> None:
    for terminal in (Terminal(), io.StringIO()):
        monkeypatch.setattr(sys, "stderr", terminal)
        threaded.call(lambda: time.sleep(2.6) if di.worker_id() == 2 else None)
        threaded.sync()
        text = terminal.getvalue()
        if terminal.isatty():
            shown = text.split("\r")
            assert re.match(
                r"meshfuse: 2 s, waiting for worker 2 and the calls up to <lambda> at test_session_profile\.py:\d+",
                shown[1],
            )
            assert text.endswith("\r") and not shown[-2].strip()
        else:
            assert not text


def test_reprs(threaded: di.Session) -> None:
    assert repr(threaded) == "<ThreadedSession of 4 workers in 2 groups>"
    found = repr(threaded.call(int, 3))
    assert re.fullmatch(r"<DRef \d+ of int on 4 workers>", found)
    sharding = mf.Sharding.make(MESH, [(mf.Split(4, "tp"),), ()], (8, 2))
    found = repr(threaded.distribute_tensor(torch.ones(8, 2), sharding))
    assert re.fullmatch(r"<DRef \d+ of distribute_tensor on 4 workers, \[8, 2\] as .*tp.*>", found)
