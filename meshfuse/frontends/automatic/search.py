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
from .roles import DATA, FULLY_SHARDED, PIPELINE, TENSOR, ranks_of_rows
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

    def under_roles(self, best: Found) -> Iterator[tuple[str, Found]]:
        """The best arrangement with one axis in another role, in words and as it is priced."""
        mesh = self.pricer.stage_mesh(best.arrangement.axis)
        for axis in (a for a, n in zip(mesh.names, mesh.shape, strict=True) if n > 1 and a not in self.pricer.roles):
            for role in (DATA, FULLY_SHARDED, TENSOR):
                pricer = self.pricer.under({**self.pricer.roles, axis: role})
                found = replace(self, pricer=pricer)._priced(best.arrangement)
                if found.cost != best.cost:
                    yield f"{axis}: {role}", found

    def _axes(self) -> Iterator[str]:
        """The axes that may have stages, "" for none. Of axes that are alike the first one.

        Stages come first: the ranks of one stage have fewer axes, and are planned sooner, than all ranks together. What
        takes less time than all of these is then soon known.
        """
        said = next((axis for axis, role in self.pricer.roles.items() if role == PIPELINE), None)
        if said is not None:
            yield said
            return
        yield from self._axes_for_stages() if self.has_stages else ()
        yield ""

    def _axes_for_stages(self) -> Iterator[str]:
        mesh, roles = self.pricer.mesh, self.pricer.roles
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
        every = [1 << k for k in range(rows.bit_length()) if not rows % (1 << k) and model.fits(1 << k)]
        cut = ranks_of_rows(self.pricer.roles, self.pricer.mesh)
        every = [m for m in every if not (rows // m) % cut] or every[:1]
        return [m for m in every if m >= min(ranks, every[-1])]

    def _try(self, axis: str) -> None:
        ranks = self.pricer.mesh.axis_size(axis) if axis else 1
        every = self._counts(ranks)
        counts = [m for m in every if not axis or self._may_win(ranks, m)]
        if not counts:
            assert self.best is not None
            self.passed.append(Passed(axis, self._idling(self.best, ranks, every[-1])))
            return
        found = self._fastest(Arrangement(axis, ranks), counts) if axis else self._as_few_as_fit(Arrangement(), counts)
        self.others.append(found)
        if found.memory <= self.limit and (self.best is None or found.seconds < self.best.seconds):
            self.best = found

    def _idling(self, best: Found, ranks: int, microbatches: int) -> float:
        """Seconds of a step at the least: no tensor moves, and stages wait for the first micro-batch alone."""
        return self._ideal(best) * (microbatches + ranks - 1) / microbatches

    def _ideal(self, best: Found) -> float:
        """Seconds of a step's computation, spread evenly over all ranks: as of the best step so far."""
        how = replace(best.arrangement, recomputes=False)
        costs, few = self.pricer.layered(how).costs, self.pricer.model.few
        alone = sum(cost.ideal for cost in (costs.before, *expanded(costs, few), costs.behind))
        return alone * how.microbatches / how.ranks

    def _may_win(self, ranks: int, microbatches: int) -> bool:
        return self.best is None or self._idling(self.best, ranks, microbatches) < self.best.seconds

    def _as_few_as_fit(self, start: Arrangement, counts: Sequence[int]) -> Found:
        """With as few micro-batches as fit into memory: more of them hold less.

        If a step is slower than the best so far, and would only be slower with more of them, no more are tried.
        """
        found = self._of(replace(start, microbatches=counts[0]))
        if found.memory <= self.limit or len(counts) == 1:
            return found
        if self._is_slower(found) and (not start.axis or self._is_slower_with(start, counts[1], found)):
            return found
        over, fits = 0, len(counts) - 1
        found = self._of(replace(start, microbatches=counts[fits]))
        while found.memory <= self.limit and fits - over > 1:
            middle = (over + fits) // 2
            tried = self._of(replace(start, microbatches=counts[middle]))
            if tried.memory <= self.limit:
                found, fits = tried, middle
            else:
                over = middle
        return found

    def _is_slower_with(self, start: Arrangement, microbatches: int, than: Found) -> bool:
        return self._of(replace(start, microbatches=microbatches)).seconds >= than.seconds

    def _fastest(self, start: Arrangement, counts: Sequence[int]) -> Found:
        """With the number of micro-batches at which a step takes least time, going up or down from four per stage.

        More of them idle less and start more work that is smaller: times fall and then rise, on either side of where
        rows are too few for an axis.
        """
        at = min(range(len(counts)), key=lambda i: abs(math.log2(counts[i] / (4 * start.ranks))))
        first = self._as_few_as_fit(start, counts[at:])
        if first.memory > self.limit:
            return first
        at = counts.index(first.arrangement.microbatches)
        tried = {at: first}

        def better(place: int, other: int) -> bool:
            if place not in tried and 0 <= place < len(counts):
                tried[place] = self._of(replace(start, microbatches=counts[place]))
            return place in tried and self._key(tried[place]) < self._key(tried[other])

        ends = []
        for step in (1, -1):
            place = at
            while better(place + step, place):
                place += step
            ends.append(tried[place])
        return min(ends, key=self._key)

    def _key(self, found: Found) -> tuple[float, float]:
        """What is less for a better arrangement: how much too much it holds, and then its seconds."""
        over = max(found.memory - self.limit, 0.0)
        return (over, found.seconds)

    def _of(self, arrangement: Arrangement) -> Found:
        """The fastest plan of an arrangement within the limit, or else one that holds least.

        One that is slower than the best so far is not made to hold less: no plan that holds less is faster.
        """
        found = list[Found]()
        for again in (False, True) if self.pricer.model.few.names else (False,):
            asked = replace(arrangement, recomputes=again)
            free = self._priced(asked)
            is_slower = self._is_slower(free)
            if free.memory > self.limit and not is_slower:
                free = fastest_within(self.limit, free, functools.partial(self._priced, asked), _HALVINGS, False)
            found.append(free)
            self.least = min(self.least, free.memory)
            if free.memory <= self.limit or is_slower:
                break
        return min(found, key=self._key)

    def _is_slower(self, found: Found) -> bool:
        return self.best is not None and found.seconds >= self.best.seconds

    def _priced(self, asked: Arrangement, price: float = 0.0) -> Found:
        """The best schedule of an arrangement at a price of memory."""
        layered, mesh = self.pricer.layered(asked, price), self.pricer.stage_mesh(asked.axis)
        link = self.pricer.mesh.link((asked.axis,) if asked.axis else ())
        found = list[Found]()
        for name, virtual in _SCHEDULES if asked.axis else _SCHEDULES[:1]:
            made = replace(asked, schedule=name, virtual=virtual)
            if made.stages <= max(len(self.pricer.model.few.names), 1) and _is_possible(made):
                cost = step_cost(layered.costs, self.pricer.model.few, made, link, mesh.size)
                found.append(Found(made, layered, cost))
        return min(found, key=self._key)


def _is_possible(arrangement: Arrangement) -> bool:
    """Interleaved schedules go in rounds of as many micro-batches as there are ranks."""
    return arrangement.virtual == 1 or not arrangement.microbatches % arrangement.ranks
