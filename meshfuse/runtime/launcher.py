"""`meshfuse run`: starts ranks as processes of this machine and ends them together. Imports no torch."""

from __future__ import annotations

import argparse
import contextlib
import math
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from ..errors import ArgumentError, user_error
from . import exit_page
from .output import complete_standard_files, say
from .processes import STOPPED, goes_on, identity_of, state_of
from .spawn import FOLLOWER_CODE, WAITED_CODE, JobSpec, RankProcess, job_variables, listening, start, startable

_OF_OTHERS = (FOLLOWER_CODE, WAITED_CODE)
TIMED_OUT_CODE = 124  # As the command `timeout` has it.
# Seconds: from SIGTERM to SIGKILL, between two polls of the ranks, and the longest pause before a restart.
_GRACE, _POLL, _LONGEST_PAUSE = 3.0, 0.02, 30.0
_REMIND = 60.0  # Seconds after the first rank has ended: then those that still run are named.
_PATIENCE = 1.0  # Seconds without output after which the pipe of an ended rank is abandoned.
_MOST_RANKS = 4096  # On one machine; more is taken for a mistake.
_came: list[int] = []  # The signal that stops the job, once it has come.
# Signals that end a job, and signals that are passed on to a script with a handler: batch systems send one of these
# before they take the machine away.
_STOPS = (signal.SIGINT, signal.SIGTERM)
_NOTICES = (signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2, signal.SIGXCPU)
_REAPER = os.path.join(os.path.dirname(os.path.abspath(__file__)), "orphan_reaper.py")


class _Interrupted(Exception):
    """A signal stops the launcher."""

    def __init__(self, number: int):
        self.number = number


def run(
    ranks: int,
    argv: Sequence[str],
    *,
    timeout: float | None = None,
    max_restarts: int = 0,
    all_output: bool = False,
    pause: float = 1.0,
) -> int:
    """Run `python argv...` as `ranks` processes of this machine and return the exit code of the job.

    Rank 0's output passes through; the other ranks' stderr is prefixed with their number, and so is their
    stdout with `all_output` (else dropped). The first rank to fail ends all; the code is its own, 128 + n for
    signal n, and 124 after `timeout` seconds.

    Up to `max_restarts` times a failed job starts anew, after `pause` seconds that double each time, with new
    processes and a new store; TORCHELASTIC_RESTART_COUNT and `World.attempt` tell the script which attempt it is. An
    error of the script's definitions or arguments would come again and is final.
    """
    if not 1 <= ranks <= _MOST_RANKS:
        needed = "1 or more" if ranks < 1 else f"at most {_MOST_RANKS} on one machine"
        raise user_error("wrong number of ranks", str(ranks), needed, cls=ArgumentError)
    if max_restarts < 0:
        raise user_error("wrong number of restarts", str(max_restarts), "0 or more", cls=ArgumentError)
    deadline = None if timeout is None else time.monotonic() + timeout
    job = JobSpec(ranks, list(argv), max_restarts, deadline, all_output)
    complete_standard_files()
    try:
        with _signals() as notified, _orphan_reaper() as keep:

            def register(rank: RankProcess) -> None:
                notified.append(rank)
                keep(rank.process.pid)

            return _run_attempts(job, register, pause)
    except _Interrupted as stop:
        say(f"stopped by {_name(stop.number)}")
        return 128 + stop.number


def _run_attempts(job: JobSpec, register: Callable[[RankProcess], None], pause: float) -> int:
    """Start the job until an attempt succeeds or another one would be useless; the exit code of the last attempt."""
    for attempt in range(job.max_restarts + 1):
        page = exit_page.make()
        try:
            code = _attempt(job, attempt, page, register)
            final = exit_page.first_user_error(page)
        finally:
            if page is not None:
                os.close(page)
        if code in (0, TIMED_OUT_CODE) or not job.max_restarts:
            return code
        if final is not None:
            say(f"not restarted: rank {final[0]} raised {final[1]}, which follows from the script and would come again")
            return code
        if attempt == job.max_restarts:
            break
        if job.deadline is not None and time.monotonic() + pause >= job.deadline:
            say(f"not restarted: the time limit is over before the next attempt, which would be in {pause:g} s")
            return TIMED_OUT_CODE
        say(f"restart {attempt + 1} of {job.max_restarts} in {pause:g} s")
        _sleep(pause)
        pause = min(2 * pause, _LONGEST_PAUSE)
    say(f"gave up: all {job.max_restarts} restarts are used up")
    return code


def _attempt(job: JobSpec, attempt: int, page: int | None, register: Callable[[RankProcess], None]) -> int:
    """Start all ranks, wait, and end them all; the exit code."""
    started: list[RankProcess] = []
    try:
        with startable(f"a job of {job.ranks} ranks"), listening() as listener:
            base = job_variables(job, attempt, listener.getsockname()[1], page)
            for rank in range(job.ranks):
                _raise_if_signalled()
                start(rank, job, base, listener, page, started)
                register(started[-1])
        code = _watch(started, job.deadline, page)
        _end(started)
        _raise_if_signalled()
        return code
    except BaseException as error:
        if isinstance(error, _Interrupted):
            _tell_all(started, page, f"is ended by the launcher, which got {_name(error.number)}")
        _end(started, _PATIENCE)
        raise


def _watch(started: list[RankProcess], deadline: float | None, page: int | None) -> int:
    """Wait for all ranks, or for the first failure; the job's exit code."""
    finished: set[int] = set()
    remind = math.inf
    while True:
        _raise_if_signalled()
        codes = {r.rank: r.process.poll() for r in started}
        for rank in [rank for rank, code in codes.items() if code == 0 and rank not in finished]:
            finished.add(rank)
            remind = time.monotonic() + _REMIND
            exit_page.tell(page, rank, exit_page.FINISHED)
        failed = {rank: code for rank, code in codes.items() if code}
        if failed:
            rank, code = _first_failure(started, failed)
            exit_page.tell(page, rank, _how(code))
            return _report(rank, code, [r.rank for r in started if state_of(identity_of(r.process.pid)) == STOPPED])
        if None not in codes.values():
            return 0
        if deadline is not None and time.monotonic() > deadline:
            running = [rank for rank, code in codes.items() if code is None]
            say(f"the time limit is over and ranks {running} still run")
            _tell_all(started, page, "is ended by the launcher, whose time limit is over")
            return TIMED_OUT_CODE
        if time.monotonic() > remind:
            say(_waited_for([r for r in started if codes[r.rank] is None]))
            remind = math.inf
        time.sleep(_POLL)


def _raise_if_signalled() -> None:
    """Raise the signal that has come, if one has. The handler itself does not raise.

    An exception in the middle of the standard library would leave its locks held: `Popen.poll` has one.
    """
    if _came:
        raise _Interrupted(_came[0])


def _sleep(duration: float) -> None:
    """Sleep until the time is over or a signal comes, which is raised."""
    until = time.monotonic() + duration
    while time.monotonic() < until:
        _raise_if_signalled()
        time.sleep(_POLL)


def _waited_for(running: list[RankProcess]) -> str:
    """A line that names the ranks that still run when the others have ended: a stopped one never ends by itself."""
    states = {r.rank: state_of(identity_of(r.process.pid)) for r in running}
    names = ", ".join(f"rank {rank} ({state or 'running'})" for rank, state in states.items())
    return f"the other ranks have ended {_REMIND:g} s ago; waiting for {names}, for as long as --timeout allows"


def _first_failure(started: list[RankProcess], failed: dict[int, int]) -> tuple[int, int]:
    """The rank that failed first, and its exit code: ranks that fail because of it may end before it."""
    until = time.monotonic() + _GRACE
    codes: dict[int, int | None] = {r.rank: failed.get(r.rank) for r in started}
    while set(failed.values()) == {FOLLOWER_CODE} and None in codes.values() and time.monotonic() < until:
        _sleep(_POLL)
        codes = {r.rank: r.process.poll() for r in started}
        failed = {rank: code for rank, code in codes.items() if code}
    return next(((rank, code) for rank, code in failed.items() if code not in _OF_OTHERS), next(iter(failed.items())))


def _how(code: int) -> str:
    """How a rank ended, by its exit code."""
    if code < 0:
        return f"was killed by {_name(-code)}"
    texts = {FOLLOWER_CODE: "lost its peers", WAITED_CODE: "waited for its peers in vain"}
    return texts.get(code, f"exited with code {code}")


def _name(number: int) -> str:
    """A signal's name; most real-time ones have none."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _report(rank: int, code: int, stopped: list[int]) -> int:
    """Print which rank ended the job and how; the exit code of the job."""
    if code in _OF_OTHERS:
        why = f": rank {', '.join(map(str, stopped))} is stopped" if stopped else ""
        say(f"rank {rank} {_how(code)}{why}; stopped all ranks")
        return 1
    say(f"rank {rank} {_how(code)}; stopped the other ranks")
    return 128 - code if code < 0 else code


def _tell_all(started: list[RankProcess], page: int | None, text: str) -> None:
    for r in started:
        exit_page.tell(page, r.rank, text)


def _end(started: list[RankProcess], limit: float | None = None) -> None:
    """SIGTERM to the process group of every rank, SIGKILL after a grace period; then the rest of their output.

    Reading the output takes at most `limit` seconds; None: as long as it takes, or until a signal comes.
    """
    _signal_all(started, signal.SIGTERM)
    until = time.monotonic() + _GRACE
    while any(r.process.poll() is None for r in started) and time.monotonic() < until:
        time.sleep(_POLL)
    _signal_all(started, signal.SIGKILL)
    for r in started:
        r.process.wait()
    killed = time.monotonic()
    for reader in [reader for r in started for reader in r.readers]:
        reader.drain(_PATIENCE, lambda: bool(_came) if limit is None else time.monotonic() >= killed + limit)


def _signal_all(started: list[RankProcess], number: signal.Signals) -> None:
    for r in started:
        try:
            os.killpg(r.process.pid, number)
            if number == signal.SIGTERM:
                os.killpg(r.process.pid, signal.SIGCONT)
        except (ProcessLookupError, PermissionError):
            pass  # The whole group has ended.


@contextmanager
def _signals() -> Iterator[list[RankProcess]]:
    """A context in which signals that end a job are noted, for `_raise_if_signalled`: the ranks are ended first.

    Yields a list of ranks to fill. Notices are passed on to those that have a handler, and end the job if none has.
    Ignored signals, as under nohup, stay ignored.
    """
    ranks: list[RankProcess] = []
    if threading.current_thread() is not threading.main_thread():
        yield ranks
        return

    _came.clear()
    launcher = os.getpid()
    caught = [n for n in (*_STOPS, *_NOTICES) if signal.getsignal(n) != signal.SIG_IGN]

    def stop(number: int, frame: object) -> None:
        if os.getpid() != launcher:
            os._exit(128 + number)  # A rank before its exec: its program would inherit what is ignored.
        if not _came and not (number in _NOTICES and _pass_on(ranks, number)):
            _came.append(number)  # The first one: ending the ranks takes seconds and is not cut short by another.

    before = {number: signal.getsignal(number) for number in caught}
    try:
        _handle(dict.fromkeys(caught, stop))
        yield ranks
    finally:
        _handle(before)
    _raise_if_signalled()


def _handle(handlers: Mapping[signal.Signals, Any]) -> None:
    """Install these handlers, by signal."""
    for number, handler in handlers.items():
        signal.signal(number, handler)


def _pass_on(ranks: list[RankProcess], number: int) -> bool:
    """Give a signal to the ranks that go on then; whether there are any.

    A rank without a handler would end, and the job with it, though another has one. The processes that a rank has
    started are its own to tell.
    """
    running = [r.process.pid for r in ranks if r.process.returncode is None]
    notified = [pid for pid in running if goes_on(pid, number) is not False]
    for pid in notified:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)
    return bool(notified)


@contextmanager
def _orphan_reaper() -> Iterator[Callable[[int], None]]:
    """Start a process that ends the ranks if the launcher is killed; gives the function that tells it of a rank."""
    with startable("a job"):
        read, write = os.pipe()
        try:
            reaper = subprocess.Popen([sys.executable, "-S", "-I", _REAPER, str(read)], pass_fds=(read,))
        except BaseException:
            os.close(write)  # A reaper that was started all the same ends by it.
            raise
        finally:
            os.close(read)
    try:
        yield lambda pid: _write_line(write, str(pid))
        _write_line(write, "done")
    finally:
        os.close(write)
        reaper.wait()


def _write_line(fd: int, text: str) -> None:
    with contextlib.suppress(BrokenPipeError):  # Someone has killed the reaper: the job does not fail for that.
        os.write(fd, f"{text}\n".encode())


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of `meshfuse run`."""
    parser.add_argument("--ranks", "-n", type=int, required=True, help="number of processes to start on this machine")
    parser.add_argument("--timeout", type=seconds, help="end the job after this many seconds (exit code 124)")
    parser.add_argument(
        "--max-restarts",
        type=int,
        default=0,
        help="start a failed job anew, this often at most; World.attempt tells the script",
    )
    parser.add_argument(
        "--all-output", action="store_true", help="show every rank's stdout, prefixed (else rank 0's alone)"
    )
    parser.add_argument("-m", dest="module", action="store_true", help="SCRIPT is a module's name, as in python -m")
    parser.add_argument("script", help="the Python script that every rank runs")
    parser.add_argument("script_args", nargs=argparse.REMAINDER, help="its arguments")


def seconds(text: str) -> float:
    """The type of options that are a time: ArgumentTypeError for what is no number above 0."""
    with contextlib.suppress(ValueError):
        if 0 < (value := float(text)) < math.inf:
            return value
    raise argparse.ArgumentTypeError(f"found {text!r}, needed seconds, a number above 0")


def main(args: argparse.Namespace) -> int:
    """Run what `add_arguments` parsed; returns the exit code: 2 where there is no such script."""
    if not args.module and not os.path.exists(args.script):
        say(f"no such script: {args.script}")
        return 2
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
