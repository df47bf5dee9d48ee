"""The timeline of the page: ops at the peak rate, collectives at the speed of their links, and what overlaps of them.

Its bars are the page's rows and the bill's entries. A rank computes one op after the other; a collective begins once
all of its ranks have the tensor and the links of its axes are free, beside ops that do not wait for it. Chunks of loops
are bars of their own. `report/timeline.py` plays the host programs themselves.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from ..compiler import CompiledProgram
from ..lowering.overlapped import ChunkLoop
from ..placement.exchanges import exchange_seconds
from ..placement.roofline import computing_seconds, stored_by, stored_tensors
from ..resharding import Compute, Reshard, Statement
from ..sharding.layout import Split


@dataclass(frozen=True, slots=True)
class Bar:
    """From `start` on, for so many `seconds`, a rank computes a node or takes part in a collective.

    collective: its place in the bill; -1 for a node.
    node: the node's number; None for a collective.
    critical: whether the step takes longer if this does.
    """

    start: float
    seconds: float
    node: int | None
    collective: int = -1
    critical: bool = False

    @property
    def end(self) -> float:
        return self.start + self.seconds


Lane = tuple[tuple[int, ...], tuple[Bar, ...]]
_Value = tuple[int, int | None]  # A value, or a chunk of it.
_NEVER = -np.inf
_COMPUTING = "computing"


def lanes(compiled: CompiledProgram) -> list[Lane]:
    """The ranks that do the same at the same times, with their bars."""
    return _Play(compiled).lanes()


@dataclass(slots=True)
class _Event:
    """What some ranks do at once: when, by place of a rank (never: -inf), and what came before.

    groups: by rank those that begin together, by number. before: events that it may have waited for, by rank.
    """

    seconds: float
    node: int | None
    collective: int
    starts: np.ndarray
    groups: np.ndarray
    before: list[np.ndarray] = field(default_factory=list)

    @property
    def ends(self) -> np.ndarray:
        return self.starts + self.seconds


class _Play:
    """The statements of a program, played in order on all of its ranks at once."""

    def __init__(self, compiled: CompiledProgram):
        self.compiled, self.graph = compiled, compiled.graph
        self.place = {rank: i for i, rank in enumerate(compiled.ranks)}
        self.in_bill = {s.outputs: i for i, s in enumerate(compiled.resharded.sends)}
        self.stored = stored_tensors(compiled.graph)
        self.events: list[_Event] = []
        self.made: dict[_Value, int] = {}
        self.last: dict[Hashable, np.ndarray] = {}
        for part in compiled.segmented.overlapped.parts:
            self._play(part)

    def _play(self, part: Statement | ChunkLoop) -> None:
        if not isinstance(part, ChunkLoop):
            self._step(part, 1, None)
            return
        for chunk in range(part.chunks):
            for statement in part.statements:
                self._step(statement, part.chunks, chunk)
        for value in part.outputs:
            self.made[value, None] = self.made[value, part.chunks - 1]

    def _step(self, statement: Statement, parts: int, chunk: int | None) -> None:
        """Play a statement, or one of so many parts of it."""
        read = {self.made.get((v, chunk), self.made.get((v, None), -1)) for v in statement.inputs} - {-1}
        if isinstance(statement, Compute):
            found = self._computed(statement, parts, read)
        else:
            found = self._sent(statement, parts, read)
        if found is not None:
            self.made.update({(v, chunk): found for v in statement.outputs})
        elif read:
            self.made.update({(v, chunk): max(read) for v in statement.outputs})

    def _computed(self, statement: Compute, parts: int, read: set[int]) -> int:
        node, placement = self.graph.nodes[statement.node], statement.placement
        places = self._places(placement.results[0].mesh.ranks)
        if placement.exchange:
            seconds = exchange_seconds(node.call, placement) / parts
            together = np.zeros(len(self.place), int)
            event = _Event(seconds, None, self.in_bill[statement.outputs], self._never(), together)
            read = {self._add(event, places, read, _links(placement.exchange))}
        seconds = computing_seconds(node.call, placement, stored_by(node, self.stored)) / parts
        event = _Event(seconds, statement.node, -1, self._never(), np.arange(len(self.place)))
        return self._add(event, places, read, [_COMPUTING])

    def _sent(self, reshard: Reshard, parts: int, read: set[int]) -> int | None:
        """The event of a collective; None where ranks send nothing, which takes no time."""
        if reshard.outputs not in self.in_bill:
            return None
        ranks = sorted({*reshard.step.src.mesh.ranks, *reshard.step.dst.mesh.ranks})
        numbers: dict[tuple[int, ...], int] = {}
        groups = np.full(len(self.place), -1)
        groups[self._places(ranks)] = [numbers.setdefault(reshard.step.group(rank), len(numbers)) for rank in ranks]
        seconds = self.compiled.resharded.seconds(reshard) / parts
        event = _Event(seconds, None, self.in_bill[reshard.outputs], self._never(), groups)
        return self._add(event, self._places(ranks), read, _links(reshard.step.axes))

    def _add(self, event: _Event, places: np.ndarray, read: set[int], busy: Sequence[Hashable]) -> int:
        """Let an event begin when what it reads is there, and what it keeps busy is free, on all ranks of its group."""
        unused = np.full(len(self.place), -1)
        event.before = [self.last.get(what, unused).copy() for what in busy]
        event.before += [np.full(len(self.place), found) for found in read]
        issued = np.zeros(len(self.place))
        for before in event.before:
            issued = np.maximum(issued, self._ends(before))
        first = np.zeros(int(event.groups.max()) + 1)
        np.maximum.at(first, event.groups[places], issued[places])
        event.starts[places] = first[event.groups[places]]
        self.events.append(event)
        for what in busy:
            self.last.setdefault(what, unused)[places] = len(self.events) - 1
        return len(self.events) - 1

    def _ends(self, events: np.ndarray) -> np.ndarray:
        """By rank when its event ends; never where there is none."""
        found = self._never()
        for number in np.unique(events[events >= 0]):
            here = events == number
            found[here] = self.events[number].ends[here]
        return found

    def _places(self, ranks: Sequence[int]) -> np.ndarray:
        return np.array([self.place[rank] for rank in ranks])

    def _never(self) -> np.ndarray:
        return np.full(len(self.place), _NEVER)

    # the path that decides when the last rank ends

    def _critical(self) -> set[tuple[int, int]]:
        """Events and ranks, from the last to end back to one that waited for nothing."""
        if not self.events:
            return set()
        event = max(range(len(self.events)), key=lambda number: self.events[number].ends.max())
        step: tuple[int, int] | None = (event, int(self.events[event].ends.argmax()))
        found = set[tuple[int, int]]()
        while step is not None:
            found |= {(step[0], rank) for rank in self._together(*step)}
            step = self._waited_for(*step)
        return found

    def _together(self, event: int, rank: int) -> list[int]:
        """The ranks that are in a rank's group in an event."""
        made = self.events[event]
        return [int(r) for r in np.flatnonzero((made.groups == made.groups[rank]) & (made.starts > _NEVER))]

    def _waited_for(self, event: int, rank: int) -> tuple[int, int] | None:
        start = self.events[event].starts[rank]
        for before in self.events[event].before:
            for other in self._together(event, rank):
                if before[other] >= 0 and self.events[before[other]].ends[other] == start:
                    return int(before[other]), other
        return None

    # lanes

    def lanes(self) -> list[Lane]:
        """Ranks by what they do when."""
        critical, alike = self._critical(), dict[tuple[float, ...], list[int]]()
        for place in self.place.values():
            alike.setdefault(tuple([event.starts[place] for event in self.events]), []).append(place)
        ranks = self.compiled.ranks
        return [(tuple(ranks[i] for i in places), tuple(self._bars(places, critical))) for places in alike.values()]

    def _bars(self, places: Sequence[int], critical: set[tuple[int, int]]) -> Iterator[Bar]:
        for number, event in enumerate(self.events):
            if event.starts[places[0]] > _NEVER:
                decides = any((number, place) in critical for place in places)
                start = float(event.starts[places[0]])
                yield Bar(start, event.seconds, event.node, event.collective, decides)


def _links(axes: Sequence[Split]) -> Sequence[Hashable]:
    """The links that a collective over these axes keeps busy."""
    return list(dict.fromkeys(split.axis for split in axes if split.bound)) or [""]
