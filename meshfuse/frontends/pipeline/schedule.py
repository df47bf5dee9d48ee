"""A pipeline's schedule as a value: for every rank the order in which it works off stages and micro-batches.

A stage is a stretch of layers, counted from the input. Of a stage and a micro-batch there is a forward `F`, and either
a whole backward `B`, or its two parts: `I` for the gradients of what the stage received, which the stage before waits
for, and `W` for those of its weights, for which nobody waits (Qi et al. 2024, "Zero Bubble Pipeline Parallelism").
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ...errors import MeshfuseError, user_error

FORWARD, BACKWARD, OF_INPUTS, OF_WEIGHTS = "F", "B", "I", "W"
KINDS = {FORWARD: "forward", BACKWARD: "backward", OF_INPUTS: "input gradient", OF_WEIGHTS: "weight gradient"}
UNIT = {FORWARD: 1.0, BACKWARD: 2.0, OF_INPUTS: 1.0, OF_WEIGHTS: 1.0}


class Action(NamedTuple):
    """One piece of work: a kind of `KINDS`, of a stage, for a micro-batch.

    A tuple, as a step has thousands, and playing one looks each up several times.
    """

    kind: str
    stage: int
    microbatch: int

    def __str__(self) -> str:
        return f"{self.kind}{self.stage}.{self.microbatch}"

    def in_words(self) -> str:
        """What an error calls it."""
        return f"the {KINDS[self.kind]} of stage {self.stage}, micro-batch {self.microbatch}"


# How long actions last: by kind, or a function of the action.
Durations = Mapping[str, float] | Callable[[Action], float]


# How long what the first action makes is on its way to the second.
Passing = Callable[[Action, Action], float]


def at_once(made: Action, read: Action) -> float:
    """As if ranks had each other's tensors."""
    return 0.0


@dataclass(frozen=True, slots=True)
class Timed:
    """An action with the times at which it begins and ends, in the units of the durations it was played with."""

    action: Action
    begin: float
    end: float


@dataclass(frozen=True, slots=True)
class Schedule:
    """What each rank of a pipeline does, in order.

    orders: by rank its actions.
    Printing one shows a picture: a row for each rank, a column for each unit of time, with a forward of one unit and a
    whole backward of two; small letters are of odd micro-batches where a stage is not the only one of its rank.
    """

    name: str
    orders: tuple[tuple[Action, ...], ...]

    @property
    def ranks(self) -> int:
        """How many ranks work."""
        return len(self.orders)

    @property
    def actions(self) -> list[Action]:
        """All actions."""
        return [action for order in self.orders for action in order]

    @property
    def stages(self) -> int:
        """How many stages there are."""
        return 1 + max(action.stage for action in self.actions)

    @property
    def microbatches(self) -> int:
        """How many micro-batches a step has."""
        return 1 + max(action.microbatch for action in self.actions)

    @property
    def is_split(self) -> bool:
        """Whether backwards come in two parts."""
        return any(action.kind == OF_INPUTS for action in self.actions)

    def rank_of(self, stage: int) -> int:
        """The rank that has a stage."""
        return next(r for r, order in enumerate(self.orders) if any(a.stage == stage for a in order))

    def stages_of(self, rank: int) -> list[int]:
        """The stages of a rank, from the first."""
        return sorted({action.stage for action in self.orders[rank]})

    def verify(self) -> None:
        """Raises DefinitionError, naming the action, if it cannot be worked off.

        Every stage needs one rank, with one forward and one backward (or both of its parts) for each micro-batch, and
        no rank may wait for itself, over however many others.
        """
        _check_complete(self)
        self.played()

    def played(self, durations: Durations = UNIT, passing: Passing = at_once) -> tuple[tuple[Timed, ...], ...]:
        """By rank its actions in time, each as early as its order and what it needs allow.

        durations: by kind of action, or a function of an action.
        passing: how long what one action makes is on its way to another, of which nobody is kept from working.

        Raises DefinitionError where ranks wait for each other in a circle.
        """
        found, places, ends = self._played(durations, passing)
        if len(ends) < len(self.actions):
            raise self._circle(places, ends)
        return tuple(map(tuple, found))

    def is_free_of_circles(self) -> bool:
        """Whether no rank waits for itself, over however many others."""
        return len(self._played(UNIT)[2]) == len(self.actions)

    def _played(
        self, durations: Durations, passing: Passing = at_once
    ) -> tuple[list[list[Timed]], list[int], dict[Action, float]]:  # fmt: skip
        """(by rank its actions in time, by rank how many it did, when each ended) as far as ranks can go on."""
        ends: dict[Action, float] = {}
        all_needs, lasts = self._needs(), _function(durations)
        places, clocks = [0] * self.ranks, [0.0] * self.ranks
        found: list[list[Timed]] = [[] for _ in self.orders]
        moved = True
        while moved:
            moved = False
            for rank, order in enumerate(self.orders):
                while places[rank] < len(order) and all(n in ends for n in all_needs[order[places[rank]]]):
                    action = order[places[rank]]
                    begin = max([clocks[rank], *(ends[n] + passing(n, action) for n in all_needs[action])])
                    clocks[rank] = ends[action] = begin + lasts(action)
                    found[rank].append(Timed(action, begin, clocks[rank]))
                    places[rank], moved = places[rank] + 1, True
        return found, places, ends

    def _needs(self) -> dict[Action, list[Action]]:
        """By action what must be done before it, on whichever rank."""
        last = self.stages - 1
        split = {(action.stage, action.microbatch) for action in self.actions if action.kind == OF_INPUTS}

        def of(action: Action) -> list[Action]:
            stage, number = action.stage, action.microbatch
            if action.kind == FORWARD:
                return [Action(FORWARD, stage - 1, number)] if stage else []
            if action.kind == OF_WEIGHTS:
                return [Action(OF_INPUTS if (stage, number) in split else BACKWARD, stage, number)]
            after = OF_INPUTS if (stage + 1, number) in split else BACKWARD
            return [Action(FORWARD, stage, number), *([Action(after, stage + 1, number)] if stage < last else [])]

        return {action: of(action) for action in self.actions}

    def _circle(self, places: Sequence[int], ends: Mapping[Action, float]) -> MeshfuseError:
        needs = self._needs()
        waits = [
            f"rank {rank} waits with {order[at]} for {next(str(n) for n in needs[order[at]] if n not in ends)}"
            for rank, (order, at) in enumerate(zip(self.orders, places, strict=True))
            if at < len(order)
        ]
        return user_error(
            f"schedule {self.name}: ranks wait for each other in a circle", "; ".join(waits),
            "an order in which each action comes after what it needs", "Move what is waited for to the front.",
        )  # fmt: skip

    def makespan(self, durations: Durations = UNIT) -> float:
        """How long a step takes, in the units of the durations."""
        return max(rank[-1].end for rank in self.played(durations) if rank)

    def bubble(self, durations: Durations = UNIT) -> float:
        """The share of the step in which a rank has nothing to do, over all ranks."""
        whole = self.makespan(durations) * self.ranks
        return 1 - sum(map(_function(durations), self.actions)) / whole

    def in_flight(self, rank: int, stage: int | None = None) -> int:
        """The most forwards, of one of its stages or of all, that a rank holds at once, whose backward is not done."""
        held = most = 0
        for action in (action for action in self.orders[rank] if stage in (None, action.stage)):
            held += {FORWARD: 1, BACKWARD: -1, OF_WEIGHTS: -1, OF_INPUTS: 0}[action.kind]
            most = max(most, held)
        return most

    def __str__(self) -> str:
        whole = self.makespan()
        rows = [f"rank {rank} {_row(timed, self)}" for rank, timed in enumerate(self.played())]
        held = ", ".join(str(self.in_flight(rank)) for rank in range(self.ranks))
        head = f"{self.name}: {self.stages} stages on {self.ranks} ranks, {self.microbatches} micro-batches"
        tail = f"{self.bubble():.0%} of {whole:g} units idle; forwards held at once, by rank: {held}"
        return "\n".join([head, *rows, tail])


def _function(durations: Durations) -> Callable[[Action], float]:
    return durations if callable(durations) else lambda action: durations[action.kind]


def _row(timed: Sequence[Timed], schedule: Schedule) -> str:
    """A rank's actions over time: for each unit three letters, the kind and the micro-batch."""
    cells: list[str] = []
    several = len({t.action.stage for t in timed}) > 1
    for one in timed:
        cells += ["   "] * (round(one.begin) - len(cells))
        chunk = "abcdefgh"[schedule.stages_of(schedule.rank_of(one.action.stage)).index(one.action.stage) % 8]
        text = f"{one.action.kind}{one.action.microbatch}{chunk if several else ''}"
        cells += [f"{text:<3}", *["== "] * (round(one.end - one.begin) - 1)]
    return "".join(f"|{cell}" for cell in cells) + "|"


def _check_complete(schedule: Schedule) -> None:
    """Raises DefinitionError for actions that lack, come twice, or stand on two ranks."""
    name, found = schedule.name, schedule.actions
    if not found:
        raise user_error(f"schedule {name}", "no actions", "an order of actions for each rank", "")
    seen: set[Action] = set()
    for action in found:
        if action in seen:
            raise user_error(f"schedule {name}: {action.in_words()}", "there twice", "once", "Leave one out.")
        seen.add(action)
    ranks: dict[int, int] = {}
    for rank, order in enumerate(schedule.orders):
        for action in order:
            if ranks.setdefault(action.stage, rank) != rank:
                raise user_error(
                    f"schedule {name}: stage {action.stage}", f"on ranks {ranks[action.stage]} and {rank}",
                    "one rank for each stage", "A rank may have several stages, a stage has one rank.",
                )  # fmt: skip
    for missing in _missing(schedule, seen):
        what = missing.in_words().removeprefix("the ")
        needed = "a forward and a backward for every stage and micro-batch"
        raise user_error(f"schedule {name}", f"no {what}", needed, f"Add {missing}.")


def _missing(schedule: Schedule, seen: set[Action]) -> Iterator[Action]:
    for stage in range(schedule.stages):
        for number in range(schedule.microbatches):
            parts = [kind for kind in (OF_INPUTS, OF_WEIGHTS) if Action(kind, stage, number) in seen]
            wanted = [FORWARD, *([OF_INPUTS, OF_WEIGHTS] if parts else [BACKWARD])]
            if parts and Action(BACKWARD, stage, number) in seen:
                raise user_error(
                    f"schedule {schedule.name}: stage {stage}, micro-batch {number}",
                    f"a whole backward and its {KINDS[parts[0]]}", "one or the other", "Leave one out.",
                )  # fmt: skip
            yield from (Action(k, stage, number) for k in wanted if Action(k, stage, number) not in seen)
