"""One of several processes makes a plan, and the others wait for it: the ranks of one machine begin together."""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from collections.abc import Iterator
from pathlib import Path

from ..file_locks import exclusive, try_lock
from ..runtime.environment import time_limit

_STEP = 0.005  # seconds between two looks


@contextlib.contextmanager
def in_turn(path: Path) -> Iterator[None]:
    """A context that the first process to come is in alone; those that come meanwhile enter when it has left.

    They wait half of MESHFUSE_TIMEOUT at most, so that peers which are ahead do not give them up. Nobody waits where
    files cannot be made or locked. The first process removes the file.
    """
    handle = _opened(path)
    if handle is None:
        yield
        return
    with exclusive(handle) as is_first:
        try:
            if not is_first:
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


def _wait(handle: int) -> None:
    end = time.monotonic() + time_limit() / 2
    while not try_lock(handle) and time.monotonic() < end:
        time.sleep(_STEP)
    with contextlib.suppress(OSError):
        fcntl.flock(handle, fcntl.LOCK_UN)  # Others that wait go on, too.
