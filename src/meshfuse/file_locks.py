"""Locks on open files and folders, which end with the process that has them."""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator


@contextlib.contextmanager
def exclusive(handle: int) -> Iterator[bool]:
    """Whether the lock is this process's from now to the end, when the handle is closed.

    All that ends it is written here: Ctrl-C where a function of ours begins would leave the lock.
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
    """Whether the lock is this process's now, or there are none on this file system, as on some NFS."""
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        pass
    return True
