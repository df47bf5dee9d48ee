"""What ranks print, passed on by their launcher line by line. Imports no torch."""

from __future__ import annotations

import contextlib
import errno
import os
import sys
import threading
import time
from collections.abc import Callable
from typing import IO, TextIO

_POLL = 0.02


class Forwarder:
    """Passes a rank's output on in whole lines, with its number before those of all ranks but 0.

    If a line cannot be passed on, the rank's next write fails, as if it wrote there itself.
    """

    def __init__(self, rank: int, pipe: IO[bytes], out: TextIO, refused: Callable[[str], None]):
        self._prefix, self._pipe, self._out = f"[rank {rank}] " if rank else "", pipe, out
        self._refused = refused
        self._writing, self._moved = False, 0.0
        self._thread = threading.Thread(target=self._copy, name=f"rank-{rank}-output", daemon=True)
        self._thread.start()

    def _copy(self) -> None:
        with self._pipe:
            try:
                for line in self._pipe:
                    self._write(self._prefix + line.decode(errors="replace"))
            except (OSError, ValueError) as error:
                if getattr(error, "errno", None) != errno.EPIPE:  # The reader may have gone away, as `head` does.
                    self._refused(str(getattr(error, "strerror", None) or error))

    def _write(self, text: str) -> None:
        encoding = self._out.encoding or "utf-8"
        self._writing = True
        self._out.write(text.encode(encoding, "backslashreplace").decode(encoding))
        self._out.flush()
        self._moved, self._writing = time.monotonic(), False

    def drain(self, patience: float, over: Callable[[], bool]) -> None:
        """Wait until all that was printed has been passed on, or until `over()`.

        A pipe in which nothing moves for `patience` seconds is given up: a process that has left its rank's group holds
        it.
        """
        start = time.monotonic()
        while self._thread.is_alive() and not over():
            self._thread.join(_POLL)
            if not self._writing and time.monotonic() - max(self._moved, start) > patience:
                return


def complete_standard_files() -> None:
    """Open those of the files 0, 1 and 2 that are closed.

    Else the next file to be opened would be a rank's input or output.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)


def say(text: str) -> None:
    """Print a line of the launcher's own to stderr, if there is one."""
    if sys.stderr is not None:
        with contextlib.suppress(OSError, ValueError):  # Its reader may have gone.
            print(f"meshfuse run: {text}", file=sys.stderr, flush=True)
