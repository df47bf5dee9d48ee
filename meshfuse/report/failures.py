"""Failures of hosts and restarts from the last checkpoint, played: what a job loses over the checkpoint's interval.

Each host fails by itself, after times that are distributed exponentially with the mean `mtbf`; a job of n hosts then
stops every mtbf / n seconds on average, and loses what it has done since its last checkpoint. Closed forms are J. W.
Young's ("A first order approximation to the optimum checkpoint interval", 1974) and J. T. Daly's ("A higher order
estimate of the optimum checkpoint interval for restart dumps", 2006), for the same model.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass

from ..number_text import duration, number

DAY = 86400.0


@dataclass(frozen=True, slots=True)
class Job:
    """A job's hosts and what a failure costs it; all in seconds.

    hosts: how many there are, each of which fails after `mtbf` on average.
    checkpoint: how long writing a checkpoint stops the job. restart: from a failure until it goes on.
    """

    hosts: int
    mtbf: float
    checkpoint: float
    restart: float

    @property
    def mean(self) -> float:
        """Seconds between failures of any host."""
        return self.mtbf / self.hosts

    @property
    def best_interval(self) -> float:
        """Seconds of work between checkpoints at which least is lost, by Young's and Daly's estimate."""
        return max(math.sqrt(2 * self.checkpoint * self.mean) - self.checkpoint, self.checkpoint)


@dataclass(frozen=True, slots=True)
class PlayedInterval:
    """What a day of the job loses with a checkpoint after so many seconds of work: all in seconds.

    lost: work that is done again. checkpoints: writing them. restarts: until the job goes on.
    expected: the share of useful work by Daly's closed form.
    """

    interval: float
    failures: float
    lost: float
    checkpoints: float
    restarts: float
    expected: float

    @property
    def useful(self) -> float:
        """The share of the time in which work is done that stays."""
        return 1 - (self.lost + self.checkpoints + self.restarts) / DAY


@dataclass(frozen=True, slots=True)
class PlayedFailures:
    """A job with failures, by interval between checkpoints, as it was played; `print` shows a table."""

    job: Job
    intervals: tuple[PlayedInterval, ...]

    @property
    def best(self) -> PlayedInterval:
        """The interval with most useful work."""
        return max(self.intervals, key=lambda each: each.useful)

    def __str__(self) -> str:
        job = self.job
        head = (
            f"{number(job.hosts)} hosts, one fails every {duration(job.mean)}; a checkpoint takes "
            f"{duration(job.checkpoint)}, a restart {duration(job.restart)}"
        )
        return "\n".join([head, *map(_line, self.intervals)])


def _line(each: PlayedInterval) -> str:
    return (
        f"checkpoint after {duration(each.interval)}: {each.failures:.1f} failures a day, "
        f"{duration(each.lost)} of lost work, {duration(each.checkpoints)} of checkpoints, "
        f"{duration(each.restarts)} of restarts; {each.useful:.1%} useful ({each.expected:.1%} by Daly)"
    )


def play_failures(job: Job, intervals: Sequence[float], days: float, seed: int) -> PlayedFailures:
    """Play so many days of the job with each interval, with the same failures."""
    return PlayedFailures(job, tuple(_played(job, interval, days, seed) for interval in intervals))


def _played(job: Job, interval: float, days: float, seed: int) -> PlayedInterval:
    """Stretches from one failure to the next: a restart first, and then work and checkpoints in turns."""
    draw, end = random.Random(seed), days * DAY
    clock = lost = checkpoints = restarts = 0.0
    failures, restarting = 0, 0.0
    while clock < end:
        until = draw.expovariate(1 / job.mean)
        stretch = min(until, end - clock)
        restarts += min(restarting, stretch)
        working = max(stretch - restarting, 0.0)
        done, rest = divmod(working, interval + job.checkpoint)
        checkpoints += done * job.checkpoint + max(rest - interval, 0.0)
        lost += min(rest, interval) if until <= end - clock else 0.0
        failures += until <= end - clock
        restarting, clock = job.restart, clock + stretch
    per_day = DAY / end
    return PlayedInterval(
        interval, failures * per_day, lost * per_day, checkpoints * per_day, restarts * per_day, expected(job, interval)
    )  # fmt: skip


def expected(job: Job, interval: float) -> float:
    """The share of useful work by Daly's closed form (2006), in which restarts may fail as well."""
    mean = job.mean
    return interval / (mean * math.exp(job.restart / mean) * math.expm1((interval + job.checkpoint) / mean))
