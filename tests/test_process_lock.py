"""Processes that want the same plan at once: one of them makes it, and whatever becomes of that one, all have it."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent / "ranks"))

import forked

from meshfuse import disk_cache
from meshfuse.plans.process_lock import in_turn

# Prints when its planning begins, which takes the given seconds.
SCRIPT = """
import os, sys, time
import meshfuse as mf
from meshfuse import compiler
from meshfuse.plans import plan_cache

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
while not os.path.exists(sys.argv[3]):
    time.sleep(0.01)
print(fd.compile().digest, flush=True)
"""


@dataclass(frozen=True, slots=True)
class Planning:
    """A process that plans its definition when it may; what it prints is in `log`."""

    process: ForkServerProcess
    log: Path
    may_begin: Path

    def printed(self, line: str) -> None:
        """Wait until the process has printed a line."""
        assert wait_until(lambda: line in self.lines())

    def lines(self) -> list[str]:
        return self.log.read_text().split() if self.log.exists() else []

    def at_the_end(self) -> list[str]:
        """What the process has printed, once it has ended, but that it was ready."""
        self.process.join(120)
        assert self.process.exitcode == 0
        return self.lines()[1:]


def wait_until(is_so: Callable[[], bool], seconds: float = 120.0) -> bool:
    end = time.monotonic() + seconds
    while not is_so() and time.monotonic() < end:
        time.sleep(0.01)
    return is_so()


class Starter:
    """Processes of one job, each with a definition ready to be planned."""

    def __init__(self, folder: Path):
        self.folder, self.cache = folder, folder / "cache"
        (folder / "script.py").write_text(SCRIPT)
        self.started: list[Planning] = []

    def __call__(self, seconds: float, worth: float = 0.0, limit: float = 120.0) -> Planning:
        env = os.environ | {"MESHFUSE_CACHE": str(self.cache), "MESHFUSE_TIMEOUT": str(limit)}
        log, may_begin = (self.folder / f"{name}{len(self.started)}" for name in ("log", "go"))
        words = (str(seconds), str(worth), str(may_begin))
        made = Planning(forked.start(self.folder / "script.py", env, log, args=words), log, may_begin)
        self.started.append(made)
        made.printed("ready")
        return made

    def left(self) -> list[str]:
        """What is in the folder of plans, but plans."""
        return [path.name for path in (self.cache / "plans").iterdir() if path.suffix != ".plan"]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Starter]:
    starter = Starter(tmp_path)
    yield starter
    for made in starter.started:
        made.process.kill()
        made.process.join(60)


@pytest.mark.slow
def test_of_processes_that_begin_together_one_plans(start: Starter) -> None:
    processes = [start(1.0) for _ in range(3)]
    for process in processes:
        process.may_begin.touch()
    texts = [process.at_the_end() for process in processes]
    assert sorted(map(len, texts)) == [1, 1, 2] and len({text[-1] for text in texts}) == 1
    assert not start.left()


@pytest.mark.slow
def test_what_is_not_worth_a_file_each_plans(start: Starter) -> None:
    processes = [start(0.0, worth=1e9) for _ in range(2)]
    for process in processes:
        process.may_begin.touch()
    texts = [process.at_the_end() for process in processes]
    assert [text[0] for text in texts] == ["plans", "plans"] and texts[0] == texts[1]
    assert not [*(start.cache / "plans").iterdir()]


@pytest.mark.slow
def test_where_the_one_that_plans_is_killed_another_does(start: Starter) -> None:
    first, other = start(1000.0), start(0.0, limit=1e6)
    first.may_begin.touch()
    first.printed("plans")
    other.may_begin.touch()
    time.sleep(0.5)
    first.process.kill()
    assert other.at_the_end()[0] == "plans"


@pytest.mark.slow
def test_the_others_wait_as_long_as_the_one_that_plans_runs(start: Starter) -> None:
    """However short the time limit is: only where that process cannot be seen do they go by the clock."""
    first, other = start(4.0), start(0.0, limit=1.0)
    first.may_begin.touch()
    first.printed("plans")
    other.may_begin.touch()
    assert len(other.at_the_end()) == 1 and len(first.at_the_end()) == 2 and not start.left()


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


@pytest.mark.slow
def test_where_the_one_that_plans_stands_still_the_others_go_on(start: Starter) -> None:
    first, other = start(1000.0), start(0.0, limit=2000.0)
    first.may_begin.touch()
    first.printed("plans")
    assert first.process.pid is not None
    os.kill(first.process.pid, signal.SIGSTOP)
    other.may_begin.touch()
    assert other.at_the_end()[0] == "plans"


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
