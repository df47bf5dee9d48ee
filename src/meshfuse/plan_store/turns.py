"""One of several processes plans a program, and the others wait for its plan: ranks of one machine begin together."""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from collections.abc import Iterator
from pathlib import Path

from ..runtime.environment import time_limit

_STEP = 0.005  # seconds between two looks


@contextlib.contextmanager
def in_turn(path: Path) -> Iterator[None]:
    """Begins at once for the process that has this file from then to its end; for those that come meanwhile, then.

    They wait half of MESHFUSE_TIMEOUT at most, lest peers that have gone ahead give them up, and go on beside each
    other. Nobody waits where files cannot be made or locked. The file goes with the process that has it.
    """
    handle, is_first = _opened(path), False
    try:
        if handle is not None:
            is_first = _locked(handle)
            if not is_first:
                _wait(handle)
        yield
    finally:
        if is_first:
            with contextlib.suppress(OSError):
                path.unlink()
        if handle is not None:
            _close(handle)


def _opened(path: Path) -> int | None:
    try:
        return os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK, 0o600)
    except OSError:
        return None  # A disk that is full, or may only be read: whoever writes there will say so.


def _wait(handle: int) -> None:
    end = time.monotonic() + time_limit() / 2
    while not _locked(handle) and time.monotonic() < end:
        time.sleep(_STEP)
    _unlock(handle)


def _locked(handle: int) -> bool:
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        pass  # This file system has no such locks.
    return True


def _unlock(handle: int) -> None:
    with contextlib.suppress(OSError):
        fcntl.flock(handle, fcntl.LOCK_UN)  # A process that was forked meanwhile has the handle, too.


def _close(handle: int) -> None:
    try:
        _unlock(handle)
    finally:
        os.close(handle)
