"""The schedules that have names, and those that users write.

Whole backwards go in turn: each rank does some forwards to begin with, then a forward and a backward alternately, then
the backwards that are left. Split ones follow a rule: a rank that is free takes, of what is ready, first an input
gradient, then a forward if it may hold one more, then a weight gradient.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from ...errors import SourceLine, shown, user_error
from .schedule import BACKWARD, FORWARD, OF_INPUTS, OF_WEIGHTS, UNIT, Action, Schedule

_WRITTEN = re.compile(r"^(?P<kind>[FBIW])(?P<stage>\d+)\.(?P<microbatch>\d+)$")


@dataclass(frozen=True, slots=True)
class Kind:
    """What distinguishes a named schedule.

    chunks: how many stages a rank has; 0 for as many as the user says, at least two.
    is_v: whether the last stage is on the first rank (Qi et al. 2024, "Pipeline Parallelism with Controllable Memory"),
        rather than stages dealt out in turn (Narayanan et al. 2021).
    is_split: whether input and weight gradients are apart.
    held: (ranks, rank, chunks, micro-batches) -> how many forwards a rank may hold.
    """

    chunks: int
    is_v: bool
    is_split: bool
    held: Callable[[int, int, int, int], int]


def _one_each(p: int, rank: int, chunks: int, m: int) -> int:
    return p - rank


def _interleaved(p: int, rank: int, chunks: int, m: int) -> int:
    return 2 * (p - rank - 1) + (chunks - 1) * p + 1


KINDS = {
    "gpipe": Kind(1, False, False, lambda p, rank, chunks, m: m),  # Huang et al. 2019
    "1f1b": Kind(1, False, False, _one_each),  # Narayanan et al. 2019, PipeDream-Flush
    "interleaved": Kind(0, False, False, _interleaved),  # Narayanan et al. 2021
    "interleaved-zero-bubble": Kind(0, False, True, _interleaved),
    "zero-bubble": Kind(1, False, True, _one_each),  # ZB-H1: the memory of 1F1B
    "zbv": Kind(2, True, True, lambda p, rank, chunks, m: 2 * p),
    "dualpipe-v": Kind(2, True, True, lambda p, rank, chunks, m: 2 * p + 1),  # DeepSeek-AI 2025
}

NAMES = sorted(KINDS)


@functools.lru_cache(maxsize=64)
def named(name: str, ranks: int, microbatches: int, virtual: int = 1) -> Schedule:
    """A schedule by its name.

    virtual: how many stages a rank has where the schedule leaves that open.
    """
    kind = KINDS[name]
    chunks = stages_of(name, ranks, virtual) // ranks
    for more in range(chunks * microbatches + 1):  # Fewer forwards than some rank needs to go on would be a circle.
        if kind.is_split:
            found = _Players(kind, ranks, microbatches, chunks, more).orders()
        else:
            found = _in_turn(kind, ranks, microbatches, chunks, more)
        if found is not None:
            return Schedule(name, found)
    raise AssertionError(name)


def _in_turn(kind: Kind, p: int, m: int, chunks: int, more: int) -> tuple[tuple[Action, ...], ...] | None:
    """By rank its actions; None where ranks would wait for each other in a circle."""
    orders: list[tuple[Action, ...]] = []
    for rank in range(p):
        forwards = [Action(FORWARD, c * p + rank, n) for c, n in _dealt(p, m, chunks)]
        backwards = [Action(BACKWARD, (chunks - 1 - c) * p + rank, n) for c, n in _dealt(p, m, chunks)]
        first = min(kind.held(p, rank, chunks, m) - 1 + more, len(forwards))
        pairs = zip(forwards[first:], backwards, strict=False)
        order = [*forwards[:first], *(action for pair in pairs for action in pair)]
        orders.append((*order, *backwards[len(forwards) - first :]))
    found = Schedule("in turn", tuple(orders))
    return found.orders if found.is_free_of_circles() else None


def _dealt(p: int, m: int, chunks: int) -> list[tuple[int, int]]:
    """(chunk, micro-batch) in the order of forwards: as many micro-batches as there are ranks, chunk by chunk."""
    groups = [range(first, min(first + p, m)) for first in range(0, m, p)]
    return [(chunk, number) for group in groups for chunk in range(chunks) for number in group]


def stages_of(name: str, ranks: int, virtual: int) -> int:
    """How many stages a named schedule has."""
    return ranks * (KINDS[name].chunks or max(2, virtual))


@dataclass(slots=True)
class _Players:
    """Ranks that work off a step by the rule, in units of time."""

    kind: Kind
    ranks: int
    microbatches: int
    chunks: int
    more: int
    ends: dict[Action, float] = field(default_factory=dict)

    def orders(self) -> tuple[tuple[Action, ...], ...] | None:
        """By rank its actions; None where none can go on."""
        found: list[list[Action]] = [[] for _ in range(self.ranks)]
        nexts = [self._first(rank) for rank in range(self.ranks)]
        clocks, held = [0.0] * self.ranks, [0] * self.ranks
        while any(nexts):
            tried = [self._move(rank, nexts[rank], clocks[rank], held[rank]) for rank in range(self.ranks)]
            moves = [move for move in tried if move is not None]
            if not moves:
                return None
            begin, _, rank, action = min(moves, key=lambda move: move[:3])
            clocks[rank] = self.ends[action] = begin + UNIT[action.kind]
            held[rank] += {FORWARD: 1, OF_WEIGHTS: -1, OF_INPUTS: 0}[action.kind]
            found[rank].append(action)
            nexts[rank].discard(action)
            if action.microbatch + 1 < self.microbatches:
                nexts[rank].add(Action(action.kind, action.stage, action.microbatch + 1))
        return tuple(map(tuple, found))

    def _first(self, rank: int) -> set[Action]:
        """What a rank does first of each kind and stage: micro-batches go in order."""
        stages = [stage for stage in range(self.ranks * self.chunks) if self._rank_of(stage) == rank]
        return {Action(kind, stage, 0) for kind in (FORWARD, OF_INPUTS, OF_WEIGHTS) for stage in stages}

    def _rank_of(self, stage: int) -> int:
        place, chunk = stage % self.ranks, stage // self.ranks
        return self.ranks - 1 - place if self.kind.is_v and chunk % 2 else place

    def _move(self, rank: int, nexts: set[Action], clock: float, held: int) -> tuple[float, Any, int, Action] | None:
        """(begin, preference, rank, action) of what a rank does next; None while nothing that it needs is done."""
        limit = self.kind.held(self.ranks, rank, self.chunks, self.microbatches) + self.more
        ready = [(max(clock, at), action) for action in nexts if (at := self._ready(action)) is not None]
        ready = [(at, action) for at, action in ready if action.kind != FORWARD or self._may_begin(action, held, limit)]
        if not ready:
            return None
        first = min(at for at, _ in ready)
        chosen = min((action for at, action in ready if at == first), key=self._preference)
        return first, self._preference(chosen), rank, chosen

    def _may_begin(self, action: Action, held: int, limit: int) -> bool:
        """Whether a rank may hold one more; the last stage on it leads to a backward, and may always go on."""
        is_way_back = self.kind.is_v and action.stage >= self.ranks
        return held < limit or is_way_back

    def _ready(self, action: Action) -> float | None:
        """When what an action needs is done; None while it is not."""
        ends, stage, number = self.ends, action.stage, action.microbatch
        last = self.ranks * self.chunks - 1
        if action.kind == FORWARD:
            return ends.get(Action(FORWARD, stage - 1, number)) if stage else 0.0
        if action.kind == OF_WEIGHTS:
            return ends.get(Action(OF_INPUTS, stage, number))
        after = ends.get(Action(OF_INPUTS, stage + 1, number)) if stage < last else 0.0
        own = ends.get(Action(FORWARD, stage, number))
        return None if after is None or own is None else max(after, own)

    def _preference(self, action: Action) -> tuple[Any, ...]:
        stage, number = action.stage, action.microbatch
        order = {OF_INPUTS: 0, FORWARD: 1, OF_WEIGHTS: 2}[action.kind]
        if self.kind.is_v:  # The way back first: it ends in a backward.
            return (order, -stage, number) if action.kind == FORWARD else (order, number, stage)
        turn = stage // self.ranks if action.kind == FORWARD else -stage // self.ranks
        return order, number // self.ranks, turn, number


def written(orders: Any, line: SourceLine) -> Schedule:
    """A user's own schedule: for each rank a list of actions such as "F0.3", (kind, stage, micro-batch)."""
    if not isinstance(orders, Sequence) or not all(isinstance(order, Sequence) for order in orders):
        raise user_error(
            "schedule", shown(orders), f"one of {sorted(KINDS)}, or a list of actions for each rank", "", line
        )
    found = Schedule("of your own", tuple(tuple(_action(one, line) for one in order) for order in orders))
    found.verify()
    return found


def _action(given: Any, line: SourceLine) -> Action:
    if isinstance(given, Action):
        return given
    match = _WRITTEN.match(given) if isinstance(given, str) else None
    if match is None:
        raise user_error("schedule: an action", shown(given), '"F0.3": F, B, I or W, the stage and the micro-batch',
                         "B is a whole backward; I and W are its input and weight gradients.", line)  # fmt: skip
    return Action(match["kind"], int(match["stage"]), int(match["microbatch"]))
