"""What a step of all ranks takes, as figures: by place on the pipeline's axis, and over all."""

from __future__ import annotations

import math
from dataclasses import dataclass

from .schedule import Schedule, Timed


@dataclass(frozen=True, slots=True)
class Sums:
    """When gradients are summed over ranks, after the last micro-batch."""

    begin: float
    end: float


@dataclass(frozen=True, slots=True)
class Row:
    """What each rank at one place of the pipeline's axis does in a step.

    busy: seconds in programs. exposed: seconds of those in which a rank waits for a communication inside of a stage.
    flops: operations of a rank, on average. memory: the most bytes that it holds.
    """

    stages: tuple[int, ...]
    sums: Sums
    busy: float
    exposed: float
    flops: float
    memory: float


@dataclass(frozen=True, slots=True)
class StepFigures:
    """A modelled run of a step of forward and backward on all ranks.

    axes: of the mesh, with their sizes. pipeline_axis: "" where there is one stage.
    timed: by place on the pipeline's axis its actions in time. rows: what ranks there do and hold.
    flops: a rank's operations per second.
    programs: how many programs were made and verified; in_all: for how many of ranks they stand.
    """

    axes: tuple[tuple[str, int], ...]
    pipeline_axis: str
    schedule: Schedule
    timed: tuple[tuple[Timed, ...], ...]
    rows: tuple[Row, ...]
    flops: float
    programs: int
    in_all: int

    @property
    def ranks(self) -> int:
        """How many ranks there are."""
        return math.prod(size for _, size in self.axes)

    @property
    def seconds(self) -> float:
        """Of a step, until the last rank has ended."""
        return max(row.sums.end for row in self.rows)

    @property
    def bubble(self) -> float:
        """The part of the step in which a rank has nothing to do, over all ranks: it waits for another stage."""
        return 1 - sum(row.busy for row in self.rows) / (self.seconds * len(self.rows))

    @property
    def exposed(self) -> float:
        """The part of the step in which a rank waits for a communication inside of its stage, over all ranks."""
        return sum(row.exposed for row in self.rows) / (self.seconds * len(self.rows))

    @property
    def peak(self) -> float:
        """The expected share of ranks' peak operations per second; what is computed again counts as well."""
        return sum(row.flops for row in self.rows) / (self.seconds * self.flops * len(self.rows))

    @property
    def memory(self) -> float:
        """The most bytes that a rank holds."""
        return max(row.memory for row in self.rows)
