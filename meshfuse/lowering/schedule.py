"""When communications are issued and waited for: early and late, so that kernels run meanwhile.

A list scheduler in one pass. Kernels keep their order, and so do communications, all of them: as every rank has
them in the order of the definition's steps, no rank ever waits for one that waits for it, in whichever groups.
A communication is issued once its input is there; its wait, and what unpacks its result, stand before the first
reader. A modelled clock decides only what may be decided differently on each rank: whether to issue something that
would have to wait for an earlier communication first, and which works to end when too much is in flight.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Sequence

from .dependences import dependences
from .durations import CostModel, directions, payload_bytes
from .effects import effects
from .instructions import Allocate, Collective, CommunicationCall, Copy, Free, Instruction, Launch, SendRecv, Wait

# Bytes of buffers that communications in flight may hold before another one is issued ahead of its need.
IN_FLIGHT = 1 << 30
# Sends that are not waited for: what they read cannot be freed.
_SENDS = 8


def schedule(
    body: Sequence[Instruction], model: CostModel | None = None, in_flight: int = IN_FLIGHT, waits: bool = False
) -> list[Instruction]:
    """The instructions in a better order, with the same results. At most `in_flight` bytes are issued ahead.

    waits: whether the oldest is waited for where more would be, rather than the next one put off: what is put off keeps
        its operands.
    """
    if not any(isinstance(i, Wait) for i in body):
        return list(body)
    return _Scheduler(body, model or CostModel(), in_flight, waits).run()


class _Scheduler:
    """Goes through the instructions of `body` by their places; a place is done once its instruction is in `out`.

    depends: for every place those that it must stay behind; after_launch: the last kernel among these, -1 for none.
    follow: the writes that go right behind a place; ending: those behind a wait.
    clock: the modelled time on this rank; free: when each direction of its link is; finish: when each work is over.
    holding, held: the bytes of each work in flight, and of all.
    """

    def __init__(self, body: Sequence[Instruction], model: CostModel, in_flight: int, waits: bool):
        self.body, self.model, self.limit, self.waits = body, model, in_flight, waits
        self.depends = dependences(body)
        self.done = bytearray(len(body))
        self.out: list[Instruction] = []
        self.launches = [i for i, ins in enumerate(body) if isinstance(ins, Launch)]
        self.calls = [i for i, ins in enumerate(body) if isinstance(ins, CommunicationCall)]
        self.next_call = 0
        self.after_launch: list[int] = []
        self.follow: dict[int, list[int]] = {}
        self.ending: dict[int, list[int]] = {}
        self.wait_of: dict[str, int] = {}
        self._classify()
        self.sizes = _buffer_bytes(body)
        self.costs = {i: self._cost(self.body[i]) for i in (*self.launches, *self.calls)}
        self.work_left = sum(self.costs[i] for i in self.launches)
        self.wire_left = sum(self.costs[i] for i in self.calls)
        self.next_launch = 0
        self.clock = 0.0
        self.free = {"in": 0.0, "out": 0.0}
        self.finish: dict[str, float] = {}
        self.holding: dict[str, int] = {}
        self.held = 0
        self.sends: deque[str] = deque()

    def _cost(self, ins: Instruction) -> float:
        if isinstance(ins, Launch):
            return self.model.kernel(ins.kernel)
        assert isinstance(ins, CommunicationCall)
        return self.model.communication(ins)

    def _classify(self) -> None:
        """Find for every place the last kernel that it comes after, and which writes go with which kernel or wait."""
        late: dict[int, int] = {}
        driver = -1
        for place, ins in enumerate(self.body):
            before = self.depends[place]
            launch = isinstance(ins, Launch)
            self.after_launch.append(place if launch else max((self.after_launch[d] for d in before), default=-1))
            if launch or isinstance(ins, CommunicationCall):
                driver = place
            elif isinstance(ins, Wait):
                self.wait_of[ins.work] = late[place] = place
            else:
                wait = max((late[d] for d in before if d in late), default=-1)
                if wait >= 0:
                    late[place] = wait
                    self.ending.setdefault(wait, []).append(place)
                elif isinstance(ins, Copy) and ins.box is not None:
                    self.follow.setdefault(driver, []).append(place)

    def run(self) -> list[Instruction]:
        self._follow(-1)
        for launch in self.launches:
            self._issue_ready()
            self._emit_all(self._missing(launch)[:-1])
            self._issue_ready()  # What the kernel had to wait for may be what the next communication sends.
            self._need(launch)
        self._issue_ready()
        while self.next_call < len(self.calls):
            self._issue_next()
        for place in range(len(self.body)):
            self._need(place)
        return self.out

    # what is needed

    def _need(self, place: int) -> None:
        """Emit an instruction, after all that it must stay behind, in their original order."""
        self._emit_all(self._missing(place))

    def _missing(self, place: int) -> list[int]:
        """What is not done yet of the instructions that this one must stay behind, and this one last."""
        if self.done[place]:
            return []
        missing, stack = {place}, [place]
        while stack:
            for d in self.depends[stack.pop()]:
                if not self.done[d] and d not in missing:
                    missing.add(d)
                    stack.append(d)
        return sorted(missing)

    def _emit_all(self, places: Sequence[int]) -> None:
        for place in places:
            if not self.done[place]:
                self._emit(place)

    def _emit(self, place: int) -> None:
        ins = self.body[place]
        if isinstance(ins, CommunicationCall) and self.calls[self.next_call] != place:
            while self.calls[self.next_call] != place:
                self._issue_next()
        self.done[place] = 1
        self.out.append(ins)
        if isinstance(ins, Launch):
            self.next_launch += 1
            self.clock += self.costs[place]
            self.work_left -= self.costs[place]
        elif isinstance(ins, CommunicationCall):
            self.next_call += 1
            self.wire_left -= self.costs[place]
            self._issued(ins, self.costs[place])
        elif isinstance(ins, Wait):
            self.clock = max(self.clock, self.finish[ins.work])
            self.held -= self.holding.pop(ins.work)
        self._follow(place)

    def _follow(self, place: int) -> None:
        """Emit the writes that go right behind this instruction."""
        for found in self.follow.get(place, ()):
            kernel = self.after_launch[found]
            if kernel >= 0 and not self.done[kernel]:
                self.follow.setdefault(kernel, []).append(found)
            else:
                self._need(found)

    # communications

    def _issue_ready(self) -> None:
        """Issue communications, until one needs a kernel that has not run, a long wait or too much memory."""
        while self.next_call < len(self.calls):
            place = self.calls[self.next_call]
            kernel = self.after_launch[place]
            if (kernel >= 0 and not self.done[kernel]) or self._would_wait(place) or not self._has_room(place):
                return
            self._issue_next()

    def _issue_next(self) -> None:
        self._need(self.calls[self.next_call])

    def _would_wait(self, place: int) -> bool:
        stack = [place]
        while stack:
            for d in self.depends[stack.pop()]:
                ins = self.body[d]
                if self.done[d]:
                    continue
                if isinstance(ins, Wait) and self.finish.get(ins.work, math.inf) > self.clock + self._patience():
                    return True
                stack.append(d)
        return False

    def _patience(self) -> float:
        """How long to wait, in seconds, to issue the next communication: as a kernel takes, if they take longest."""
        if self.wire_left <= self.work_left or self.next_launch >= len(self.launches):
            return self.model.start
        return self.costs[self.launches[self.next_launch]]

    def _has_room(self, place: int) -> bool:
        """Whether one more may be in flight, once works that should be over by now have been waited for."""
        wanted = self._bytes(place)
        while self.held and self.held + wanted > self.limit:
            work = next(iter(self.holding))
            if self.finish[work] > self.clock and not self.waits:
                return False
            self._end(work)
        return True

    def _issued(self, call: CommunicationCall, seconds: float) -> None:
        ways = directions(call)
        end = max(self.clock, *(self.free[way] for way in ways)) + seconds
        self.free.update(dict.fromkeys(ways, end))
        self.finish[call.work] = end
        self.holding[call.work] = held = self._call_bytes(call)
        self.held += held
        if isinstance(call, SendRecv) and call.kind == "send":
            self.sends.append(call.work)
            if len(self.sends) > _SENDS:
                self._end(self.sends.popleft())

    def _end(self, work: str) -> None:
        """Wait for a work, and unpack what it brought."""
        wait = self.wait_of[work]
        self._need(wait)
        for place in self.ending.get(wait, ()):
            self._need(place)

    def _bytes(self, place: int) -> int:
        call = self.body[place]
        assert isinstance(call, CommunicationCall)
        return self._call_bytes(call)

    def _call_bytes(self, call: CommunicationCall) -> int:
        buffers = {*call.reads, *call.writes} if isinstance(call, Collective) else {call.buffer}
        default = payload_bytes(call)
        return sum(self.sizes.get(name, default) for name in buffers)


def _buffer_bytes(body: Sequence[Instruction]) -> dict[str, int]:
    return {i.target: math.prod(i.shape) * i.dtype.itemsize for i in body if isinstance(i, Allocate)}


def with_frees(body: Sequence[Instruction], keep: Iterable[str]) -> list[Instruction]:
    """The instructions with a Free after the last use of every name; a work uses what it reads until its Wait."""
    dying: dict[int, list[str]] = {}
    for name, end in _last_uses(body, set(keep)).items():
        dying.setdefault(end, []).append(name)
    out: list[Instruction] = []
    for place, instruction in enumerate(body):
        out.append(instruction)
        if place in dying:
            out.append(Free(tuple(sorted(dying[place]))))
    return out


def _last_uses(body: Sequence[Instruction], kept: set[str]) -> dict[str, int]:
    """By name that is not kept, the place of the last instruction that uses it."""
    last: dict[str, int] = {}
    held_by_work: dict[str, tuple[str, ...]] = {}
    for place, instruction in enumerate(body):
        found = effects(instruction)
        names = found.names
        if isinstance(instruction, CommunicationCall):
            held_by_work[instruction.work] = names
        elif isinstance(instruction, Wait):
            names = (*names, *held_by_work[instruction.work])
        for name in names:
            last[name] = place
        if found.shares:
            last[found.shares] = place
    return {name: end for name, end in last.items() if name not in kept}
