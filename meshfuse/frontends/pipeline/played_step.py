"""A modelled run of a step on all ranks of a mesh, as a value: what it takes, what ranks wait for, and its page."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from ...errors import ArgumentError, caller_line, shown, user_error
from ...number_text import duration, number
from ...report.failures import Job, PlayedFailures, play_failures
from ...report.shown_page import ShownPage, show_text
from .page_of_step import page_of_step
from .step_figures import Row, StepFigures

# Parts of the best interval between checkpoints that are compared with it.
_AROUND = (0.25, 0.5, 1, 2, 4)


class PlayedStep(StepFigures):
    """A modelled run of a step of forward and backward on all ranks; `print` shows it, `show` makes a page of it."""

    __slots__ = ()

    def show(self, path: Any = None) -> ShownPage:
        """One page, for a browser: the timeline of all stages, bubble, exposed communication, memory and peak share."""
        return show_text(page_of_step(self), path, caller_line())

    def failures(
        self, mtbf: float, *, checkpoint: float, restart: float, ranks_per_host: int = 8,
        every: Sequence[float] | None = None, days: float = 1000, seed: int = 0,
    ) -> PlayedFailures:  # fmt: skip
        """Failures of hosts, and restarts from the last checkpoint, played: lost work per day over its interval.

        mtbf: seconds after which one host fails, on average. checkpoint: seconds for which writing one stops the job.
        restart: seconds from a failure until the job goes on.
        every: steps between checkpoints to compare; None for some around the best by Daly's estimate.

        Raises ArgumentError for numbers that are not positive.
        """
        line = caller_line()
        given = [("mtbf", mtbf), ("checkpoint", checkpoint), ("restart", restart), ("ranks_per_host", ranks_per_host),
                 ("days", days), *(("every", steps) for steps in every or ())]  # fmt: skip
        for name, value in given:
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < math.inf:
                raise user_error(f"failures: {name}", shown(value), "a positive number", "", line, ArgumentError)
        job = Job(-(-self.ranks // ranks_per_host), mtbf, checkpoint, restart)
        steps = [max(round(job.best_interval * k / self.seconds), 1) for k in _AROUND] if every is None else every
        return play_failures(job, [n * self.seconds for n in dict.fromkeys(steps)], days, seed)

    def __str__(self) -> str:
        mesh = " x ".join(f"{name} {number(size)}" for name, size in self.axes)
        return "\n".join([
            f"{number(self.ranks)} ranks ({mesh}): {number(self.programs)} programs verified, for "
            f"{number(self.in_all)} of ranks",
            f"{self.schedule.name}: {self.schedule.stages} stages, {self.schedule.microbatches} micro-batches",
            f"a step takes {duration(self.seconds)}: {self.bubble:.1%} bubble, {self.exposed:.1%} exposed "
            f"communication, {self.peak:.1%} of peak operations",
            *_rows(self.rows, self.seconds),
        ])  # fmt: skip

    def _repr_html_(self) -> str:
        return page_of_step(self)


def _rows(rows: Sequence[Row], seconds: float) -> list[str]:
    """A line for each row of ranks, equal neighbours in one."""
    lines = [_line(row, seconds) for row in rows]
    found, start = list[str](), 0
    for end in range(1, len(lines) + 1):
        if end == len(lines) or lines[end] != lines[start]:
            name = f"{start}" if end - start == 1 else f"{start} to {end - 1}"
            found.append(f"ranks at {name}: {lines[start]}")
            start = end
    return found


def _line(row: Row, seconds: float) -> str:
    return (
        f"{1 - row.busy / seconds:.0%} idle, {row.exposed / seconds:.0%} exposed communication, "
        f"{row.memory / 1e9:,.1f} GB"
    )
