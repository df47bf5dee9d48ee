"""Ends what a launcher started, if the launcher is killed. Run by path: `orphan_reaper.py FD`.

The launcher holds the other end of the pipe FD. It writes the process group of each rank, one per line, and `done` once
it has ended them itself. If the pipe ends without that word, the launcher was killed.
"""

import contextlib
import os
import signal
import sys


def main(fd: int) -> None:
    """Read until the launcher ends, and end what it has left."""
    os.setsid()
    for name in ("INT", "TERM", "HUP", "QUIT", "USR1", "USR2", "XCPU"):  # a batch system may tell all processes
        signal.signal(getattr(signal, f"SIG{name}"), signal.SIG_IGN)
    with os.fdopen(fd) as pipe:
        lines = pipe.read().split()
    if lines[-1:] == ["done"]:
        return
    for line in lines:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(int(line), signal.SIGKILL)


if __name__ == "__main__":
    main(int(sys.argv[1]))
