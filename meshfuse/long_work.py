"""Long work says what it does: planning, capturing, compiling, loading and saving that take more than a second."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

VARIABLE = "MESHFUSE_QUIET"
_AFTER, _EVERY = 1.0, 0.5  # Seconds until work is long, and between two looks at the clock on a terminal.


@contextmanager
def saying(what: str) -> Iterator[None]:
    """In this context, if it lasts, stderr says what is done: rank 0's, unless MESHFUSE_QUIET is set.

    On a terminal it is one line with the seconds so far, which goes when the work is done. Elsewhere it is a line of
    its own, after the first second.
    """
    if os.environ.get(VARIABLE, "") not in ("", "0") or os.environ.get("RANK", "0") != "0" or sys.stderr is None:
        yield
        return
    done, begin = threading.Event(), time.monotonic()
    teller = threading.Thread(target=_tell, args=(what, done, begin), name="meshfuse long work", daemon=True)
    teller.start()
    try:
        yield
    finally:
        done.set()
        if time.monotonic() - begin >= _AFTER:
            teller.join(_EVERY)


def _tell(what: str, done: threading.Event, begin: float) -> None:
    if done.wait(_AFTER) and time.monotonic() - begin < _AFTER:
        return
    if is_terminal():
        _on_terminal(what, done, begin)
        return
    _write(f"meshfuse: {what} ...\n")


def _on_terminal(what: str, done: threading.Event, begin: float) -> None:
    line = Line()
    while not done.wait(_EVERY):
        line.show(f"meshfuse: {what}, {time.monotonic() - begin:.0f} s")
    line.wipe()


class Line:
    """A line of stderr's terminal that is written again and again, and wiped out at its end."""

    def __init__(self) -> None:
        self._shown = 0

    def show(self, text: str) -> None:
        """Write the text in the place of the one before."""
        _write(f"\r{text.ljust(self._shown)}")
        self._shown = len(text)

    def wipe(self) -> None:
        """Leave an empty line."""
        if self._shown:
            _write(f"\r{' ' * self._shown}\r")


def is_terminal() -> bool:
    """Whether stderr is a terminal."""
    with suppress(OSError, ValueError, AttributeError):
        return sys.stderr.isatty()
    return False


def _write(text: str) -> None:
    with suppress(OSError, ValueError, AttributeError):
        sys.stderr.write(text)
        sys.stderr.flush()
