"""Locks on open files and folders, which end with the process that has them."""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator


@contextlib.contextmanager
def exclusive(handle: int) -> Iterator[bool]:
    """A context that closes the handle at its end; gives whether this process has the lock on it until then.

    All cleaning up is in this one function: between two functions, Ctrl-C could leave the lock.
    """
    try:
        yield try_lock(handle)
    finally:
        try:
            with contextlib.suppress(OSError):
                fcntl.flock(handle, fcntl.LOCK_UN)  # A process that was forked meanwhile has the handle, too.
        finally:
            os.close(handle)


def try_lock(handle: int) -> bool:
    """Whether this process now has the lock; also True where the file system has no locks, as some NFS."""
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        pass
    return True
