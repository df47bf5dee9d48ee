"""One of several processes makes a plan, and the others wait for it: the ranks of one machine begin together."""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from collections.abc import Iterator
from pathlib import Path

from ..file_locks import exclusive, try_lock
from ..runtime import processes
from ..runtime.environment import time_limit

_STEP = 0.005  # seconds between two looks
_LONGEST = 1000  # bytes of a process' identity


@contextlib.contextmanager
def in_turn(path: Path) -> Iterator[None]:
    """A context that the first process to come is in alone; those that come meanwhile enter when it has left.

    They wait as long as the first one runs: not where it is stopped, and half of MESHFUSE_TIMEOUT at most where that
    cannot be known, as of a process on another machine that shares the folder. Nobody waits where files cannot be made
    or locked. The first process removes the file.
    """
    handle = _opened(path)
    if handle is None:
        yield
        return
    with exclusive(handle) as is_first:
        try:
            if is_first:
                _sign(handle)
            else:
                _wait(handle)
            yield
        finally:
            if is_first:
                with contextlib.suppress(OSError):
                    path.unlink()


def _opened(path: Path) -> int | None:
    try:
        return os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK, 0o600)
    except OSError:
        return None  # A disk that is full, or may only be read: whoever writes there will say so.


def _sign(handle: int) -> None:
    """Write into the file which process this is."""
    with contextlib.suppress(OSError):
        os.ftruncate(handle, 0)
        os.pwrite(handle, processes.identity_of(os.getpid()).encode(), 0)


def _wait(handle: int) -> None:
    end = time.monotonic() + time_limit() / 2
    while not try_lock(handle) and _is_worth_waiting(handle, end):
        time.sleep(_STEP)
    with contextlib.suppress(OSError):
        fcntl.flock(handle, fcntl.LOCK_UN)  # Others that wait go on, too.


def _is_worth_waiting(handle: int, end: float) -> bool:
    """Whether the process that has signed the file may come to an end: it runs, or it is not `end` yet."""
    try:
        state = processes.state_of(os.pread(handle, _LONGEST, 0).decode(errors="replace"))
    except (OSError, ValueError):
        state = None  # The text is none of ours.
    return state != processes.STOPPED and (state == processes.RUNNING or time.monotonic() < end)
