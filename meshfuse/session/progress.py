"""A line on the terminal that says what a long wait waits for."""

from __future__ import annotations

import time

from ..long_work import Line, is_terminal

_AFTER = 2.0  # Seconds after which a wait is long.
_EVERY = 0.5


class Progress(Line):
    """The line of one wait: shown from two seconds on where stderr is a terminal."""

    def __init__(self) -> None:
        super().__init__()
        self._start, self._is_first = time.monotonic(), True

    def until(self, deadline: float) -> float:
        """Until when to wait before the line is shown again."""
        if self._is_first:
            return min(deadline, self._start + _AFTER)
        return min(deadline, time.monotonic() + _EVERY) if is_terminal() else deadline

    def show(self, text: str) -> None:
        """Write the text, with the seconds so far, in the place of the one before."""
        self._is_first = False
        if is_terminal():
            super().show(f"meshfuse: {time.monotonic() - self._start:.0f} s, {text}")
