"""Processes that want the same plan at once: one of them makes it, and whatever becomes of that one, all have it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from meshfuse import disk_cache
from meshfuse.planner.process_lock import in_turn

SOURCE = Path(__file__).resolve().parents[1]
# Says when its planning begins, which takes as many seconds as it is told.
SCRIPT = """
import sys, time
import meshfuse as mf
from meshfuse import compiler
from meshfuse.planner import plan_cache

plan_cache.WORTH = float(sys.argv[2])
real = compiler.apply_distributed_forms

def slow(*args):
    print("plans", flush=True)
    time.sleep(float(sys.argv[1]))
    return real(*args)

compiler.apply_distributed_forms = slow
with mf.FusionDefinition() as fd:
    x = fd.define_tensor([8, 8])
    fd.add_output(fd.ops.sum(fd.ops.relu(x), [0]))
    fd.mesh_split(x, mf.DeviceMesh((2,), ("a",)), ["a", None])
print("ready", flush=True)
sys.stdin.readline()
print(fd.compile().digest, flush=True)
"""


class Starter:
    """Processes of one job, each with a definition ready to be planned."""

    def __init__(self, folder: Path):
        self.script, self.cache = folder / "script.py", folder / "cache"
        self.script.write_text(SCRIPT)
        self.started: list[subprocess.Popen[str]] = []

    def __call__(self, seconds: float, worth: float = 0.0, limit: float = 120.0) -> subprocess.Popen[str]:
        env = os.environ | {
            "PYTHONPATH": str(SOURCE), "MESHFUSE_CACHE": str(self.cache), "MESHFUSE_TIMEOUT": str(limit)
        }  # fmt: skip
        command = [sys.executable, str(self.script), str(seconds), str(worth)]
        made = subprocess.Popen(command, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.started.append(made)
        assert made.stdout is not None and made.stdout.readline() == "ready\n"
        return made

    def left(self) -> list[str]:
        """What is in the folder of plans, but plans."""
        return [path.name for path in (self.cache / "plans").iterdir() if path.suffix != ".plan"]


@pytest.fixture
def start(tmp_path: Path):
    starter = Starter(tmp_path)
    yield starter
    for process in starter.started:
        process.kill()
        process.communicate()


def go(process: subprocess.Popen[str]) -> None:
    assert process.stdin is not None
    process.stdin.write("\n")
    process.stdin.flush()


def lines_of(process: subprocess.Popen[str]) -> list[str]:
    return process.communicate(timeout=120)[0].split()


def begins(process: subprocess.Popen[str]) -> None:
    """Waits until a process plans."""
    assert process.stdout is not None and process.stdout.readline() == "plans\n"


def test_of_processes_that_begin_together_one_plans(start: Starter) -> None:
    processes = [start(1.0) for _ in range(3)]
    for process in processes:
        go(process)
    texts = [lines_of(process) for process in processes]
    assert sorted(map(len, texts)) == [1, 1, 2] and len({text[-1] for text in texts}) == 1
    assert not start.left()


def test_what_is_not_worth_a_file_each_plans(start: Starter) -> None:
    processes = [start(0.0, worth=1e9) for _ in range(2)]
    for process in processes:
        go(process)
    texts = [lines_of(process) for process in processes]
    assert [text[0] for text in texts] == ["plans", "plans"] and texts[0] == texts[1]
    assert not [*(start.cache / "plans").iterdir()]


def test_where_the_one_that_plans_is_killed_another_does(start: Starter) -> None:
    first, other = start(1000.0), start(0.0, limit=1e6)
    go(first)
    begins(first)
    go(other)
    time.sleep(0.5)
    first.kill()
    assert lines_of(other)[0] == "plans"


def test_the_others_wait_as_long_as_the_one_that_plans_runs(start: Starter) -> None:
    """However short the time limit is: only where that process cannot be seen do they go by the clock."""
    first, other = start(4.0), start(0.0, limit=1.0)
    go(first)
    begins(first)
    go(other)
    assert len(lines_of(other)) == 1 and len(lines_of(first)) == 1 and not start.left()


def test_of_a_process_that_cannot_be_seen_they_wait_half_of_the_limit(tmp_path: Path, monkeypatch: Any) -> None:
    """As of one on another machine, whose identity says nothing here, or of an older version, which signs nothing."""

    def enter(path: Path) -> None:
        with in_turn(path):
            pass

    monkeypatch.setenv("MESHFUSE_TIMEOUT", "1.0")
    for name, text in (("elsewhere", "another-boot 1 1"), ("older", ""), ("other", "\xff" * 2000)):
        with in_turn(tmp_path / name):
            (tmp_path / name).write_text(text)
            begun = time.monotonic()
            thread = threading.Thread(target=enter, args=(tmp_path / name,))
            thread.start()
            thread.join(60)
            assert time.monotonic() - begun >= 0.5


def test_where_the_one_that_plans_stands_still_the_others_go_on(start: Starter) -> None:
    first, other = start(1000.0), start(0.0, limit=2000.0)
    go(first)
    begins(first)
    first.send_signal(signal.SIGSTOP)
    go(other)
    assert lines_of(other)[0] == "plans"


def test_threads_wait_for_each_other_too(tmp_path: Path) -> None:
    order: list[str] = []

    def later() -> None:
        with in_turn(tmp_path / "a"):
            order.append("later")

    with in_turn(tmp_path / "a"):
        thread = threading.Thread(target=later)
        thread.start()
        thread.join(0.3)
        order.append("first")
    thread.join(60)
    assert order == ["first", "later"] and not [*tmp_path.iterdir()]


def test_an_error_in_a_turn_ends_it(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt), in_turn(tmp_path / "a"):
        raise KeyboardInterrupt
    assert not [*tmp_path.iterdir()]
    with in_turn(tmp_path / "a"):
        assert [*tmp_path.iterdir()]


@pytest.mark.parametrize("there", ["nothing", "a folder", "a link"])
def test_where_no_file_can_be_made_nobody_waits(tmp_path: Path, there: str) -> None:
    place = tmp_path / ("none/a" if there == "nothing" else "a")
    {"nothing": lambda: None, "a folder": place.mkdir, "a link": lambda: place.symlink_to("b")}[there]()
    with in_turn(place), in_turn(place):
        pass


def test_what_killed_processes_leave_goes_in_the_end(tmp_path: Path) -> None:
    old, new = tmp_path / f"a{disk_cache.TURN}", tmp_path / f"b{disk_cache.TURN}"
    for path, when in ((old, 1000), (new, 10000)):
        path.touch()
        os.utime(path, (when, when))
    disk_cache._evict(tmp_path)
    assert [*tmp_path.iterdir()] == [new]
