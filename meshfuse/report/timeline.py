"""A modelled run of all ranks' host programs: when each kernel and communication runs, and what waits for it.

A discrete-event simulation (as in Astra-sim: Rashidi et al., ISPASS 2020, at the level of collectives). A rank runs its
kernels one after another, and issues communications without waiting. A communication begins when all of its ranks have
issued it and the links that it takes are free, and lasts as long as the cost model says. A wait lasts until its end.
"""

from __future__ import annotations

import heapq
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from ..executor.spans import RankTime, Span, SpanKind, call_name, hidden_share, microseconds, rank_text
from ..host_ir import ChannelOf, HostProgram
from ..lowering.durations import CostModel, axis_names, directions
from ..lowering.instructions import CallKey, CommunicationCall, Instruction, Launch, Wait, call_channel


@dataclass(frozen=True, slots=True)
class Timeline:
    """The times of all ranks, and the `spans` of those ranks that were requested."""

    ranks: tuple[RankTime, ...]
    spans: dict[int, list[Span]]

    @property
    def makespan(self) -> float:
        """Seconds until the last rank has ended."""
        return max(rank.end for rank in self.ranks)

    @property
    def hidden_share(self) -> float:
        """The part of all communication that was hidden; 1.0 where there was none."""
        return hidden_share(self.ranks)

    def __str__(self) -> str:
        worst = max(self.ranks, key=lambda rank: rank.end)
        lines = [f"{len(self.ranks)} ranks, {microseconds(self.makespan)} until the last has ended"]
        for name, rank in (("the last", worst), ("the first", self.ranks[0])):
            lines.append(f"{name} (rank {rank.rank}): {rank_text(rank)}")
        lines.append(f"hidden: {self.hidden_share:.0%} of all communication")
        return "\n".join(lines)


def timeline(
    programs: Sequence[HostProgram],
    model: CostModel | None = None,
    overlapped: bool = True,
    traced: Sequence[int] = (),
    channel: ChannelOf = call_channel,
) -> Timeline:
    """Play the programs of all ranks. Without `overlapped` every communication is waited for at once.

    `traced` are the ranks whose spans are kept. With the `channel` of classes (`CompiledProgram.programs_of_classes`)
    a rank stands for all of its class, which are at the same place at the same time. Raises AssertionError where ranks
    wait for each other in a circle.
    """
    return _Play(programs, model or CostModel(), overlapped, set(traced), channel).run()


@dataclass(slots=True)
class _PlayedRank:
    """The state of one rank: instructions left (the next one last), its clock, and when each of its links is free."""

    number: int
    left: list[Instruction]
    clock: float = 0.0
    spans: list[Span] = field(default_factory=list)
    free: dict[tuple[str, str], float] = field(default_factory=dict)
    meetings: dict[str, CallKey] = field(default_factory=dict)
    names: dict[str, str] = field(default_factory=dict)
    numbers: Counter[object] = field(default_factory=Counter)

    def advance(self, kind: SpanKind, name: str, until: float, about: str = "") -> None:
        """Do something until a moment at which the rank goes on."""
        self.spans.append(Span(kind, name, self.clock, until, about))
        self.clock = until


class _Play:
    """All ranks' programs, played side by side.

    By meeting (a communication in which some ranks take part): `arrived` has the ranks that have issued it and when,
    `ends` when it ends, `sleeping` the ranks that wait for it.
    """

    def __init__(
        self, programs: Sequence[HostProgram], model: CostModel, overlapped: bool, traced: set[int], channel: ChannelOf
    ) -> None:  # fmt: skip
        self.channel, self.model, self.overlapped, self.traced = channel, model, overlapped, traced
        self.ranks = {p.rank: _PlayedRank(p.rank, list(_played(p, overlapped))[::-1]) for p in programs}
        self.arrived: dict[CallKey, list[tuple[_PlayedRank, CommunicationCall, float]]] = {}
        self.ends: dict[CallKey, float] = {}
        self.sleeping: dict[CallKey, list[_PlayedRank]] = {}

    def run(self) -> Timeline:
        moving = [(0.0, number) for number in self.ranks]
        heapq.heapify(moving)
        while moving:
            rank = self.ranks[heapq.heappop(moving)[1]]
            until = moving[0][0] if moving else math.inf
            for woken in self._advance(rank, until):
                heapq.heappush(moving, (woken.clock, woken.number))
        stuck = [rank.number for rank in self.ranks.values() if rank.left]
        assert not stuck, f"ranks wait for each other: {stuck}"
        done = [RankTime.of(rank.number, rank.spans) for rank in self.ranks.values()]
        return Timeline(tuple(done), {rank: self.ranks[rank].spans for rank in sorted(self.traced)})

    def _advance(self, rank: _PlayedRank, until: float) -> list[_PlayedRank]:
        """Play a rank until another rank is behind it, or until it waits for a meeting that has not begun.

        Returns the ranks that can go on then. So meetings begin in the order of time, and take the links in that order.
        """
        woken: list[_PlayedRank] = []
        while rank.left:
            if rank.clock > until:
                return [*woken, rank]
            ins = rank.left[-1]
            if isinstance(ins, Wait):
                meeting = rank.meetings[ins.work]
                if meeting not in self.ends:
                    self.sleeping.setdefault(meeting, []).append(rank)
                    break
                if self.ends[meeting] > rank.clock:
                    rank.advance("wait", rank.names[ins.work], self.ends[meeting])
            elif isinstance(ins, Launch):
                until_done = rank.clock + self.model.kernel(ins.kernel)
                rank.advance("kernel", ins.kernel.name, until_done, ins.kernel.about)
            elif isinstance(ins, CommunicationCall):
                woken += self._issue(rank, ins)
            rank.left.pop()
        return woken

    def _issue(self, rank: _PlayedRank, call: CommunicationCall) -> list[_PlayedRank]:
        place, members = self.channel(rank.number, call)
        rank.numbers[place] += 1
        meeting = rank.meetings[call.work] = (place, rank.numbers[place])
        rank.names[call.work] = call_name(call.kind, call.about.tensor, call.work)
        there = self.arrived.setdefault(meeting, [])
        there.append((rank, call, rank.clock))
        if len(there) < len(members):
            return []
        self._complete(meeting, self.arrived.pop(meeting))
        return self.sleeping.pop(meeting, [])

    def _complete(self, meeting: CallKey, there: list[tuple[_PlayedRank, CommunicationCall, float]]) -> None:
        """Begin a meeting to which all have come: when the last rank has issued it and all of its links are free."""
        start = max(max(issued, *(r.free.get(way, 0.0) for way in _ways(call))) for r, call, issued in there)
        seconds = max(self.model.communication(call) for _, call, _ in there)
        self.ends[meeting] = start + seconds
        for rank, call, _ in there:
            rank.free.update(dict.fromkeys(_ways(call), start + seconds))
            rank.spans.append(Span("communication", rank.names[call.work], start, start + seconds))


def _ways(call: CommunicationCall) -> list[tuple[str, str]]:
    """The links of a rank that a communication takes: those of every axis, in one direction or in both."""
    return [(axis, way) for axis in axis_names(call.about.axes) or [""] for way in directions(call)]


def _played(program: HostProgram, overlapped: bool) -> Iterator[Instruction]:
    """The instructions that take time, in order. Unless they overlap, each communication is followed by its wait."""
    for ins in program.instructions:
        if isinstance(ins, Launch) or (isinstance(ins, Wait) and overlapped):
            yield ins
        elif isinstance(ins, CommunicationCall):
            yield ins
            if not overlapped:
                yield Wait(ins.work)
