"""A line on the terminal that says what a long wait waits for."""

from __future__ import annotations

import contextlib
import sys
import time

_AFTER = 2.0  # Seconds after which a wait is long.
_EVERY = 0.5


class Progress:
    """The line of one wait: shown from two seconds on where stderr is a terminal, and wiped out at its end."""

    def __init__(self) -> None:
        self._start, self._shown = time.monotonic(), 0
        self._is_terminal = sys.stderr is not None and sys.stderr.isatty()

    def until(self, deadline: float) -> float:
        """Until when to wait before the line is shown again."""
        if not self._is_terminal:
            return deadline
        now = time.monotonic()
        return min(deadline, max(self._start + _AFTER, now + _EVERY))

    def show(self, text: str) -> None:
        """Write the line in the place of the one before."""
        line = f"meshfuse: {time.monotonic() - self._start:.0f} s, {text}"
        self._write(f"\r{line.ljust(self._shown)}")
        self._shown = len(line)

    def wipe(self) -> None:
        """Leave an empty line."""
        if self._shown:
            self._write(f"\r{' ' * self._shown}\r")

    def _write(self, text: str) -> None:
        with contextlib.suppress(OSError, ValueError):
            sys.stderr.write(text)
            sys.stderr.flush()
