"""The arrangement of a step that takes least time: which axis has stages, how many micro-batches, what is computed
again.

Each is priced by an exact plan of its layers (`pricing`). Those whose stages idle for longer than the best step so far
takes are never planned.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

from ...plans.within_memory import fastest_within
from .pricing import Layered, Pricer
from .roles import PIPELINE
from .step_cost import Arrangement, StepCost, expanded, step_cost

# The schedules that are compared: those that are in use for large models. Others are asked for by `mf.Pipeline`.
_SCHEDULES = (("1f1b", 1), ("interleaved", 2))
# Halvings of the price of memory: an arrangement that has to save memory is one of many.
_HALVINGS = 2


@dataclass(frozen=True, slots=True)
class Found:
    """A priced arrangement."""

    arrangement: Arrangement
    layered: Layered
    cost: StepCost

    @property
    def seconds(self) -> float:
        return self.cost.seconds

    @property
    def memory(self) -> float:
        return self.cost.memory


@dataclass(frozen=True, slots=True)
class Passed:
    """An axis that was not taken for stages: because with any number of micro-batches a step takes this long."""

    axis: str
    seconds: float


@dataclass(slots=True)
class Search:
    """Looks for the fastest arrangement within a limit of memory.

    microbatches: how many there have to be, if it is said. has_stages: whether axes may have stages.
    others: the best arrangement of each axis for stages that was priced, and `passed` those that were not.
    """

    pricer: Pricer
    limit: float
    microbatches: int | None = None
    has_stages: bool = True
    best: Found | None = None
    others: list[Found] = field(default_factory=list)
    passed: list[Passed] = field(default_factory=list)
    least: float = math.inf

    def run(self) -> Found | None:
        """The best arrangement; None where none was found within the limit."""
        for axis in self._axes():
            self._try(axis)
        return self.best

    def _axes(self) -> Iterator[str]:
        """The axes that may have stages, "" for none. Of axes that are alike the first one."""
        mesh, roles = self.pricer.mesh, self.pricer.roles
        said = next((axis for axis, role in roles.items() if role == PIPELINE), None)
        if said is not None:
            yield said
            return
        yield ""
        if not self.has_stages:
            return
        seen, taken = set[object](), {*roles, *self.pricer.model.named_axes}
        for axis, size, link in zip(mesh.names, mesh.shape, mesh.links, strict=True):
            fits = 1 < size <= len(self.pricer.model.few.names) and axis not in taken
            if fits and self._counts(size) and (size, link) not in seen:
                yield axis
            seen.add((size, link))

    def _counts(self, ranks: int) -> list[int]:
        """The numbers of micro-batches that are considered: powers of two that divide the rows."""
        if self.microbatches is not None:
            return [self.microbatches]
        model = self.pricer.model
        rows = model.rows if model.is_elastic else 1
        every = [1 << k for k in range(rows.bit_length()) if not rows % (1 << k)]
        return [m for m in every if m >= min(ranks, every[-1])]

    def _try(self, axis: str) -> None:
        ranks = self.pricer.mesh.axis_size(axis) if axis else 1
        counts = self._counts(ranks)
        before = self.best
        if axis and not any(self._may_win(ranks, m) for m in counts):
            self.passed.append(Passed(axis, self._idling(ranks, counts[-1])))
            return
        found = self._fastest(Arrangement(axis, ranks, microbatches=counts[0]), counts) if axis else self._flat(counts)
        if found is not None and found.memory <= self.limit and (before is None or found.seconds < before.seconds):
            self.best = found
        if found is not None:
            self.others.append(found)

    def _idling(self, ranks: int, microbatches: int) -> float:
        """Seconds of a step at the least: no tensor moves, and stages wait for the first micro-batch alone."""
        return self._ideal() * (microbatches + ranks - 1) / microbatches

    def _ideal(self) -> float:
        """Seconds of a step's computation, spread evenly over all ranks."""
        model = self.pricer.model
        (costs, *_) = self.pricer.layered(Arrangement()).ways
        return sum(cost.ideal for cost in (costs.before, *expanded(costs, model.few), costs.behind))

    def _may_win(self, ranks: int, microbatches: int) -> bool:
        return self.best is None or self._idling(ranks, microbatches) < self.best.seconds

    def _flat(self, counts: Sequence[int]) -> Found:
        """All ranks at all layers: the whole batch at once, or in ever smaller parts as long as that holds too much."""
        found = self._of(Arrangement(microbatches=counts[0]))
        for microbatches in counts[1:]:
            if found.memory <= self.limit:
                return found
            smaller = self._of(Arrangement(microbatches=microbatches))
            if smaller.memory >= found.memory:
                return found
            found = smaller
        return found

    def _fastest(self, start: Arrangement, counts: Sequence[int]) -> Found | None:
        """With the number of micro-batches at which a step takes least time, going up or down from four per stage.

        More of them idle less and start more work that is smaller: times fall and then rise.
        """
        at = min(range(len(counts)), key=lambda i: abs(math.log2(counts[i] / (4 * start.ranks))))
        tried: dict[int, Found | None] = {}

        def better(place: int, other: int) -> bool:
            for i in (place, other):
                if i not in tried and 0 <= i < len(counts):
                    may = self._may_win(start.ranks, counts[i])
                    tried[i] = self._of(replace(start, microbatches=counts[i])) if may else None
            new, old = tried.get(place), tried.get(other)
            return new is not None and (old is None or self._key(new) < self._key(old))

        for step in (1, -1):
            while better(at + step, at):
                at += step
        return tried.get(at)

    def _key(self, found: Found) -> tuple[float, float]:
        """What is less for a better arrangement: how much too much it holds, and then its seconds."""
        over = max(found.memory - self.limit, 0.0)
        return (over, found.seconds)

    def _of(self, arrangement: Arrangement) -> Found:
        """The fastest plan of an arrangement within the limit, or else one that holds least."""
        found = list[Found]()
        for again in (False, True) if self.pricer.model.few.names else (False,):
            asked = replace(arrangement, recomputes=again)
            free = self._priced(asked)
            if free.memory > self.limit:
                free = fastest_within(self.limit, free, functools.partial(self._priced, asked), _HALVINGS)
            found.append(free)
            self.least = min(self.least, free.memory)
            if free.memory <= self.limit:
                break
        return min(found, key=self._key)

    def _priced(self, asked: Arrangement, price: float = 0.0) -> Found:
        """The best schedule, and way to hold what is gathered, of an arrangement at a price of memory."""
        layered, mesh = self.pricer.layered(asked, price), self.pricer.stage_mesh(asked.axis)
        link = self.pricer.mesh.link((asked.axis,) if asked.axis else ())
        found = list[Found]()
        for name, virtual in _SCHEDULES if asked.axis else _SCHEDULES[:1]:
            made = replace(asked, schedule=name, virtual=virtual)
            if made.stages <= max(len(self.pricer.model.few.names), 1) and _is_possible(made):
                costs = [step_cost(way, self.pricer.model.few, made, link, mesh.size) for way in layered.ways]
                found += [Found(made, layered, cost) for cost in costs]
        return min(found, key=self._key)


def _is_possible(arrangement: Arrangement) -> bool:
    """Interleaved schedules go in rounds of as many micro-batches as there are ranks."""
    return arrangement.virtual == 1 or not arrangement.microbatches % arrangement.ranks
