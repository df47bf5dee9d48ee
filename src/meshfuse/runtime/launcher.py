"""`meshfuse run`: ranks as processes on this machine, ended together, none left behind. Imports no torch."""

from __future__ import annotations

import argparse
import ctypes
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import IO

from ..errors import ArgumentError, user_error
from .environment import LOOPBACK
from .exits import FOLLOWER

FOLLOWER_CODE = 117
TIMED_OUT_CODE = 124
_GRACE = 3.0
_POLL = 0.02
_KEEPER = os.path.join(os.path.dirname(os.path.abspath(__file__)), "keeper.py")
_PR_SET_PDEATHSIG = 1


@dataclass(slots=True)
class Rank:
    """A started rank; its pid is also its process group's."""

    rank: int
    process: subprocess.Popen[bytes]
    readers: list[threading.Thread] = field(default_factory=list)


class _Interrupted(Exception):
    """The launcher was asked to stop by a signal."""

    def __init__(self, number: int):
        self.number = number


def run(
    ranks: int,
    argv: Sequence[str],
    *,
    timeout: float | None = None,
    max_restarts: int = 0,
    all_output: bool = False,
) -> int:
    """Run `python argv...` as `ranks` processes of this machine and return the exit code of the job.

    Rank 0's output passes through; the other ranks' stderr is prefixed with their number, and so is their
    stdout with `all_output` (else dropped). The first rank to fail ends all; the code is its own, 128 + n for
    signal n, and 124 after `timeout` seconds. Up to `max_restarts` times a failed job starts anew,
    TORCHELASTIC_RESTART_COUNT telling.
    """
    if ranks < 1:
        raise user_error("wrong number of ranks", str(ranks), "1 or more", cls=ArgumentError)
    deadline = None if timeout is None else time.monotonic() + timeout
    with _signals(), _keeper() as register:
        try:
            for attempt in range(max_restarts + 1):
                code = _attempt(ranks, list(argv), attempt, deadline, all_output, register)
                if code in (0, TIMED_OUT_CODE):
                    break
        except _Interrupted as stop:
            _say(f"stopped by {signal.Signals(stop.number).name}")
            return 128 + stop.number
    return code


def _attempt(
    ranks: int,
    argv: list[str],
    attempt: int,
    deadline: float | None,
    all_output: bool,
    register: Callable[[int], None],
) -> int:
    started: list[Rank] = []
    try:
        with _listener() as listener:
            base = _job_variables(ranks, attempt, listener.getsockname()[1])
            for rank in range(ranks):
                started.append(_start(rank, argv, base, listener, all_output))
                register(started[-1].process.pid)
        return _watch(started, deadline)
    finally:
        _end(started)


def _listener() -> socket.socket:
    return socket.create_server((LOOPBACK, 0), backlog=512)


def _free_port() -> int:
    with _listener() as probe:
        return probe.getsockname()[1]


def _job_variables(ranks: int, attempt: int, store_port: int) -> dict[str, str]:
    """torchrun's variables, and a store of meshfuse's own beside MASTER_PORT, the script's."""
    variables = dict(os.environ)
    variables.pop("TORCHELASTIC_USE_AGENT_STORE", None)
    variables.setdefault("OMP_NUM_THREADS", "1")
    # When the rank that serves the store dies, torch logs C++ stacks in all others, on top of the error
    # itself.
    variables.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    return variables | {
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
        "MASTER_ADDR": LOOPBACK,
        "MASTER_PORT": str(_free_port()),
        "MESHFUSE_STORE_PORT": str(store_port),
        "TORCHELASTIC_RESTART_COUNT": str(attempt),
        FOLLOWER: str(FOLLOWER_CODE),
    }


def _start(rank: int, argv: list[str], base: Mapping[str, str], listener: socket.socket, all_output: bool) -> Rank:
    variables = dict(base) | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
    handed: tuple[int, ...] = ()
    if rank == 0:
        variables["MESHFUSE_STORE_FD"] = str(listener.fileno())
        handed = (listener.fileno(),)
    process = subprocess.Popen(
        [sys.executable, *argv],
        env=variables,
        pass_fds=handed,
        stdin=None if rank == 0 else subprocess.DEVNULL,
        stdout=None if rank == 0 else subprocess.PIPE if all_output else subprocess.DEVNULL,
        stderr=None if rank == 0 else subprocess.PIPE,
        start_new_session=True,
        preexec_fn=_die_with_parent(),
    )
    pairs = ((process.stdout, sys.stdout), (process.stderr, sys.stderr))
    return Rank(rank, process, [_forward(rank, pipe, out) for pipe, out in pairs if pipe is not None])


def _die_with_parent() -> Callable[[], None] | None:
    """What a child calls before exec so that the kernel kills it when the launcher dies; Linux only."""
    if not sys.platform.startswith("linux"):
        return None
    prctl = ctypes.CDLL(None).prctl
    parent = os.getpid()

    def prepare() -> None:
        prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(1)

    return prepare


def _forward(rank: int, pipe: IO[bytes], out: IO[str]) -> threading.Thread:
    def copy() -> None:
        for line in pipe:
            out.write(f"[rank {rank}] {line.decode(errors='replace')}")
            out.flush()

    thread = threading.Thread(target=copy, name=f"rank-{rank}-output", daemon=True)
    thread.start()
    return thread


def _watch(started: list[Rank], deadline: float | None) -> int:
    """Wait for all ranks, or for the first failure; the job's exit code."""
    while True:
        codes = {r.rank: r.process.poll() for r in started}
        failed = {rank: code for rank, code in codes.items() if code}
        if failed:
            return _report(_first_failure(started, failed))
        if None not in codes.values():
            return 0
        if deadline is not None and time.monotonic() > deadline:
            running = [rank for rank, code in codes.items() if code is None]
            _say(f"the time limit is over and ranks {running} still run")
            return TIMED_OUT_CODE
        time.sleep(_POLL)


def _first_failure(started: list[Rank], failed: dict[int, int]) -> tuple[int, int]:
    """The rank that failed by itself; those that follow a peer's failure may have ended before it."""
    until = time.monotonic() + _GRACE
    while set(failed.values()) == {FOLLOWER_CODE} and time.monotonic() < until:
        time.sleep(_POLL)
        codes = {r.rank: r.process.poll() for r in started}
        failed = {rank: code for rank, code in codes.items() if code}
    return next(((rank, code) for rank, code in failed.items() if code != FOLLOWER_CODE), next(iter(failed.items())))


def _report(failure: tuple[int, int]) -> int:
    rank, code = failure
    if code < 0:
        _say(f"rank {rank} was killed by {signal.Signals(-code).name}; stopped the other ranks")
        return 128 - code
    if code == FOLLOWER_CODE:
        _say(f"rank {rank} lost its peers; stopped all ranks")
        return 1
    _say(f"rank {rank} exited with code {code}; stopped the other ranks")
    return code


def _say(text: str) -> None:
    print(f"meshfuse run: {text}", file=sys.stderr, flush=True)


def _end(started: list[Rank]) -> None:
    """SIGTERM to every rank's process group, SIGKILL after a grace period; then the rest of their output."""
    _signal_all(started, signal.SIGTERM)
    until = time.monotonic() + _GRACE
    while any(r.process.poll() is None for r in started) and time.monotonic() < until:
        time.sleep(_POLL)
    _signal_all(started, signal.SIGKILL)
    for r in started:
        r.process.wait()
        for reader in r.readers:
            reader.join(1.0)


def _signal_all(started: list[Rank], number: signal.Signals) -> None:
    for r in started:
        try:
            os.killpg(r.process.pid, number)
            if number == signal.SIGTERM:
                os.killpg(r.process.pid, signal.SIGCONT)
        except (ProcessLookupError, PermissionError):
            pass  # The whole group has ended.


@contextmanager
def _signals() -> Iterator[None]:
    """SIGINT, SIGTERM and SIGHUP raise, so that the ranks are ended on the way out."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    caught = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

    def stop(number: int, frame: object) -> None:
        for other in caught:
            signal.signal(other, signal.SIG_IGN)  # Ending the ranks takes seconds and must not be cut short.
        raise _Interrupted(number)

    before = {number: signal.signal(number, stop) for number in caught}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def _keeper() -> Iterator[Callable[[int], None]]:
    """A process that outlives the launcher only to end the ranks if the launcher is killed."""
    read, write = os.pipe()
    keeper = subprocess.Popen([sys.executable, "-S", "-I", _KEEPER, str(read)], pass_fds=(read,))
    os.close(read)
    try:
        yield lambda pid: _write_line(write, str(pid))
        _write_line(write, "done")
    finally:
        os.close(write)
        keeper.wait()


def _write_line(fd: int, text: str) -> None:
    os.write(fd, f"{text}\n".encode())


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of `meshfuse run`."""
    parser.add_argument("--ranks", "-n", type=int, required=True, help="number of processes to start on this machine")
    parser.add_argument("--timeout", type=float, help="end the job after this many seconds (exit code 124)")
    parser.add_argument("--max-restarts", type=int, default=0, help="start a failed job anew, this often at most")
    parser.add_argument(
        "--all-output", action="store_true", help="show every rank's stdout, prefixed (else rank 0's alone)"
    )
    parser.add_argument("-m", dest="module", action="store_true", help="SCRIPT is a module's name, as in python -m")
    parser.add_argument("script", help="the Python script that every rank runs")
    parser.add_argument("script_args", nargs=argparse.REMAINDER, help="its arguments")


def main(args: argparse.Namespace) -> int:
    """Run what `add_arguments` parsed; returns the exit code."""
    argv = ["-m", args.script] if args.module else [args.script]
    return run(
        args.ranks,
        [*argv, *args.script_args],
        timeout=args.timeout,
        max_restarts=args.max_restarts,
        all_output=args.all_output,
    )


if __name__ == "__main__":
    _parser = argparse.ArgumentParser(prog="python -m meshfuse.runtime.launcher", description=__doc__)
    add_arguments(_parser)
    sys.exit(main(_parser.parse_args()))
