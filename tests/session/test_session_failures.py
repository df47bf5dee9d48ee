"""What users see when something fails: who, why and where; and that nothing is left behind."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import meshfuse.session as di
from meshfuse.errors import ArgumentError
from meshfuse.session.nodes import Node
from meshfuse.session.wire import Connection

from . import functions

REPEAT = int(os.environ.get("SESSION_REPEAT", "1"))


@pytest.fixture(scope="module")
def mortal() -> Iterator[di.ProcessSession]:
    """A session whose workers tests may kill: each leaves it restarted."""
    with di.ProcessSession(4, timeout=3) as session:
        session.get_global_func("runtime.disco.worker_id")
        yield session


def pids(session: di.Session) -> list[int]:
    found = session.call(os.getpid)
    return [found[worker] for worker in range(session.num_workers)]


def is_alive(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def await_end(processes: list[int], seconds: float) -> list[int]:
    """Those of the processes that still run after so many seconds."""
    until = time.monotonic() + seconds
    while time.monotonic() < until and any(map(is_alive, processes)):
        time.sleep(0.02)
    return [pid for pid in processes if is_alive(pid)]


@pytest.mark.parametrize(("kind", "cls"), [("key", KeyError), ("value", ValueError), ("os", OSError)])
def test_an_exception_is_of_its_class_and_names_worker_call_and_line(
    session: di.Session, kind: str, cls: type[Exception]
) -> None:
    session.call(functions.raise_on, 2, kind)
    with pytest.raises(cls) as caught:
        session.sync()
    error = caught.value
    assert isinstance(error, di.WorkerError) and error.worker == 2 and error.args == ("told", 2)
    assert f"worker 2 raised {cls.__name__}" in str(error) and "raise_on at test_session_failures.py:" in str(error)
    assert "functions.py" in error.trace and list(error.failures) == [2]
    session.sync()
    assert session.call(int, 5)[2] == 5, "the worker lives"


def test_classes_that_pickle_cannot_make_and_exits(session: di.Session) -> None:
    session.call(functions.raise_on, 1, "odd")
    with pytest.raises(functions.OddError, match="7: seven") as caught:
        session.sync()
    assert caught.value.code == 7
    session.call(functions.raise_on, 3, "exit")
    with pytest.raises(di.WorkerError, match="worker 3 raised SystemExit: 3"):
        session.sync()
    session.sync()


def test_the_first_failure_is_raised_and_later_calls_are_skipped(session: di.Session) -> None:
    def note(text: str) -> None:
        import builtins

        vars(builtins).setdefault("_told", []).append(text)

    def fail() -> None:
        raise ValueError(f"worker {di.worker_id()}")

    session.call(fail)
    empty = session.call(note, "skipped")
    with pytest.raises(ValueError, match=r"worker \d") as caught:
        session.sync()
    assert (
        caught.value.worker in caught.value.failures
        and caught.value.call == caught.value.failures[caught.value.worker].call
    )
    assert session.call(lambda: __import__("builtins").__dict__.get("_told"))[3] is None
    with pytest.raises(ArgumentError, match=r"register .* of worker 1 is empty"):
        empty.debug_get_from_remote(1)


def test_a_failure_elsewhere_ends_waits_for_worker_0_and_collectives(session: di.Session) -> None:
    x = session.call(torch.ones, 4)
    for _ in range(REPEAT):
        start = time.monotonic()
        session.call(functions.raise_on, 3, "value")
        session.allreduce(x, in_group=False)
        with pytest.raises(ValueError, match="told"):
            session.sync_worker_0()
        assert time.monotonic() - start < 3
        assert torch.equal(session.allreduce(x, in_group=False)[1], torch.full((4,), 4.0))


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_killed_worker_is_named_at_once_and_a_restart_mends_it(
    mortal: di.ProcessSession, number: signal.Signals
) -> None:
    for _ in range(REPEAT):
        victim = pids(mortal)[2]
        mortal.call(time.sleep, 0.6)
        os.kill(victim, number)
        start = time.monotonic()
        with pytest.raises(di.WorkerLost, match=f"worker 2 is gone: its process was killed by {number.name}") as caught:
            mortal.sync()
        assert time.monotonic() - start < 0.5 and caught.value.worker == 2
        with pytest.raises(di.WorkerLost, match="worker 2 is gone"):
            mortal.call(int)
        old = mortal._crew.links
        mortal.restart()
        assert mortal.call(int, 3)[2] == 3 and mortal._crew.links is not old
        assert not await_end([victim], 1)


def test_a_worker_that_dies_in_a_collective_releases_the_others(mortal: di.ProcessSession) -> None:
    def die_or_wait() -> None:
        if di.worker_id() == 1:
            os._exit(9)

    x = mortal.call(torch.ones, 4)
    mortal.allreduce(x)
    mortal.sync()
    start = time.monotonic()
    mortal.call(die_or_wait)
    with pytest.raises(di.WorkerLost, match="worker 1 is gone: its process exited with code 9"):
        mortal.allreduce(x)  # which says it where the worker has ended by then
        mortal.sync()
    mortal.restart()
    assert time.monotonic() - start < 5
    with pytest.raises(ArgumentError, match="a DRef from before the session's restart"):
        mortal.call(int, x)
    x = mortal.call(torch.ones, 4)
    assert torch.equal(mortal.allreduce(x)[3], torch.full((4,), 4.0))


def test_how_a_worker_ended_is_said_by_whichever_call_finds_it(mortal: di.ProcessSession) -> None:
    """How long ago its end was makes no difference: it is not known before its process has been looked at."""

    def die() -> None:
        if di.worker_id() == 1:
            os._exit(9)

    for seconds in (0.0, 0.003, 0.005, 0.01, 0.02, 0.1):
        mortal.call(die)
        time.sleep(seconds)
        with pytest.raises(di.WorkerLost, match="worker 1 is gone: its process exited with code 9"):
            mortal.call(int)
            mortal.sync()
        mortal.restart()
    assert torch.equal(mortal.allreduce(mortal.call(torch.ones, 4))[3], torch.full((4,), 4.0))


def test_a_stopped_worker_is_named_and_the_others_go_on(mortal: di.ProcessSession) -> None:
    for _ in range(REPEAT):
        x = mortal.call(torch.ones, 4)
        victim = pids(mortal)[3]
        os.kill(victim, signal.SIGSTOP)
        try:
            mortal.allreduce(x)
            start = time.monotonic()
            with pytest.raises(di.WorkerTimeout, match="worker 3 does not answer at all") as caught:
                mortal.sync()
            assert 3 in caught.value.workers and time.monotonic() - start < 6
        finally:
            os.kill(victim, signal.SIGCONT)
        assert torch.equal(mortal.allreduce(x)[3], torch.full((4,), 4.0)), "it goes on where it was stopped for a while"


def test_a_long_call_is_named_with_its_line(mortal: di.ProcessSession) -> None:
    def long() -> None:
        if di.worker_id() == 1:
            time.sleep(4)

    mortal.call(long)
    with pytest.raises(di.WorkerTimeout, match=r"worker 1 runs call \d+ for [34]\.\d s at test_session_failures.py:"):
        mortal.sync()
    time.sleep(1.2)
    mortal.sync()


def test_interrupts_end_the_call_and_not_the_session(session: di.Session) -> None:
    before = signal.signal(signal.SIGALRM, lambda *_: signal.raise_signal(signal.SIGINT))
    try:

        def wait() -> None:
            for _ in range(10_000):
                time.sleep(0.01)

        start = time.monotonic()
        session.call(wait)
        with pytest.raises(KeyboardInterrupt):
            signal.setitimer(signal.ITIMER_REAL, 0.3)
            session.sync()
        session.sync()
        assert time.monotonic() - start < 50 and session.call(int, 4)[3] == 4
    finally:
        signal.signal(signal.SIGALRM, before)


CONTROLLER = """
    import os, sys, time
    import meshfuse.session as di

    if __name__ == "__main__":
        session = di.ProcessSession(3)
        pid = session.call(os.getpid)
        print(*[pid[worker] for worker in (1, 2)], flush=True)
        session.call(time.sleep, 100)
        {rest}
"""


def run_controller(tmp_path: Path, rest: str) -> tuple[subprocess.Popen[str], list[int]]:
    script = tmp_path / "controller.py"
    script.write_text(textwrap.dedent(CONTROLLER).format(rest=rest))
    process = subprocess.Popen(
        [sys.executable, str(script)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env={**os.environ, "PYTHONPATH": os.getcwd()},
    )  # fmt: skip
    assert process.stdout is not None
    return process, [int(pid) for pid in process.stdout.readline().split()]


def test_a_killed_controller_leaves_no_worker(tmp_path: Path) -> None:
    process, workers = run_controller(tmp_path, "time.sleep(100)")
    assert len(workers) == 2 and all(map(is_alive, workers))
    process.kill()
    process.communicate()
    assert not await_end(workers, 5)


def test_a_script_that_ends_without_shutdown_leaves_nothing(tmp_path: Path) -> None:
    process, workers = run_controller(tmp_path, "raise RuntimeError('the script')")
    _, errors = process.communicate(timeout=30)
    assert "the script" in errors and "meshfuse" not in errors.partition("RuntimeError")[2]
    assert process.returncode == 1 and not await_end(workers, 5)


def test_a_shutdown_leaves_no_process_file_or_thread(started_servers: None) -> None:
    import gc
    import threading

    def held() -> tuple[int, set[str]]:
        gc.collect()
        names = {thread.name for thread in threading.enumerate() if thread.name.startswith("meshfuse")}
        return len(os.listdir("/proc/self/fd")), names

    with di.ProcessSession(3, timeout=20) as session:  # what torch keeps open from the first use on
        session.allreduce(session.call(torch.ones, 3))
        session.sync()
    before = held()
    session = di.ProcessSession(3, timeout=20)
    processes = [*pids(session)[1:], session._engine.server.process.pid]
    session.allreduce(session.call(torch.ones, 100_000))
    session.sync()
    session.shutdown()
    assert not await_end(processes, 2)
    until = time.monotonic() + 3
    while held() != before and time.monotonic() < until:
        time.sleep(0.05)
    after = held()
    assert after[1] == before[1] and after[0] <= before[0] + 1, (before, after)


def test_output_has_names_and_equal_lines_come_once(
    capfd: pytest.CaptureFixture[str], mortal: di.ProcessSession
) -> None:
    mortal.call(lambda: print("the same") if di.worker_id() else None)
    mortal.call(lambda: print(f"own {di.worker_id()}") if di.worker_id() else None)
    mortal.sync()
    time.sleep(0.4)
    out = capfd.readouterr().out
    assert out.count("the same") == 1 and "[workers 1-3] the same" in out and "[worker 2] own 2" in out


def test_a_host_that_has_ended_is_known_by_its_connection() -> None:
    """So that a restart says so, and waits for none of its workers."""
    ours, theirs = socket.socketpair()
    node = Node(Connection(ours))
    assert not node.is_gone()
    theirs.close()
    assert node.is_gone()
    node.connection.close()
    assert node.is_gone()
