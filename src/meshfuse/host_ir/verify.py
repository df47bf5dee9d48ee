"""Checks of host programs that turn a hang or a read of garbage into a compile-time error."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from .instructions import Collective, Free, Instruction, Launch, SendRecv, Wait
from .liveness import reads_of
from .program import HostProgram


def verify(program: HostProgram) -> None:
    """Every name is there when it is read and freed once; each work is waited for once, before its result is read."""
    alive = {name for name in program.params if name.startswith("v")}
    pending: dict[str, set[str]] = {}
    for instruction in program.instructions:
        if isinstance(instruction, Free):
            assert alive.issuperset(instruction.names), f"freed twice: {instruction}"
            assert not {n for names in pending.values() for n in names}.intersection(instruction.names)
            alive.difference_update(instruction.names)
        elif isinstance(instruction, Wait):
            assert instruction.work in pending, f"waited twice: {instruction}"
            del pending[instruction.work]
        else:
            _verify_reads(instruction, alive, pending)
    assert not pending, f"never waited for: {sorted(pending)}"
    assert alive.issuperset(filter(None, program.outputs))
    used = {name for instruction in program.instructions for name in reads_of(instruction)}
    assert not (alive & used).difference(program.outputs), "never freed"


def _verify_reads(instruction: Instruction, alive: set[str], pending: dict[str, set[str]]) -> None:
    made = _made_by(instruction)
    assert alive.issuperset(reads_of(instruction) - made), f"reads what is not there: {instruction}"
    in_flight = {name for names in pending.values() for name in names}
    assert not in_flight.intersection(reads_of(instruction)), f"reads before the wait: {instruction}"
    alive.update(made)
    if isinstance(instruction, Collective):
        pending[instruction.work] = set(instruction.writes)
    elif isinstance(instruction, SendRecv):
        pending[instruction.work] = {instruction.buffer} if instruction.kind == "recv" else set()


def _made_by(instruction: Instruction) -> set[str]:
    if isinstance(instruction, Launch):
        return set(instruction.outputs)
    if isinstance(instruction, (Collective, SendRecv)):
        return {instruction.work}
    assert not isinstance(instruction, (Wait, Free))
    return {instruction.target}


def verify_together(programs: Sequence[HostProgram]) -> None:
    """All ranks agree on the order of collectives in each group, and every message sent is received in order."""
    orders: dict[tuple[int, ...], tuple[int, list[tuple[object, ...]]]] = {}
    sent: dict[tuple[int, int], list[tuple[int, str]]] = {}
    received: dict[tuple[int, int], list[tuple[int, str]]] = {}
    for program in programs:
        assert len({p.digest for p in programs}) == 1
        for group, order in _collective_orders(program).items():
            first = orders.setdefault(group, (program.rank, order))
            assert first[1] == order, f"ranks {first[0]} and {program.rank} differ in group {group}"
        for message in (i for i in program.instructions if isinstance(i, SendRecv)):
            ends = (program.rank, message.peer) if message.kind == "send" else (message.peer, program.rank)
            (sent if message.kind == "send" else received).setdefault(ends, []).append(message.payload)
    assert sent == received, "a message is sent and not received, or the other way round"
    _verify_members(orders, programs)
    _verify_progress(programs)


def _collective_orders(program: HostProgram) -> dict[tuple[int, ...], list[tuple[object, ...]]]:
    orders: dict[tuple[int, ...], list[tuple[object, ...]]] = {}
    for instruction in program.instructions:
        if isinstance(instruction, Collective):
            count, dtype = instruction.payload
            agreed = () if instruction.kind == "all_to_all" else (count,)
            orders.setdefault(instruction.group, []).append((instruction.kind, instruction.work, dtype, *agreed))
    return orders


def _verify_members(orders: Mapping[tuple[int, ...], object], programs: Sequence[HostProgram]) -> None:
    groups_of = {program.rank: set(_collective_orders(program)) for program in programs}
    for group in orders:
        assert all(group in groups_of.get(rank, ()) for rank in group), f"a rank is missing in {group}"


def _verify_progress(programs: Sequence[HostProgram]) -> None:
    """Let all ranks run to their ends: no rank may wait for what comes after the wait of another for it."""
    waits = {program.rank: _Progress(program) for program in programs}
    issued: Counter[object] = Counter()
    moved = True
    while moved:
        moved = any([progress.advance(issued) for progress in waits.values()])
    stuck = {rank: progress.left[-1] for rank, progress in waits.items() if progress.left}
    assert not stuck, f"ranks wait for each other: {stuck}"


class _Progress:
    """What a rank has still to issue and to wait for, the next last.

    A meeting is the n-th collective of a group, or the n-th message between two ranks; it is over when all who take
    part in it have come.
    """

    def __init__(self, program: HostProgram):
        self.rank = program.rank
        kinds = (Collective, SendRecv, Wait)
        self.left = [i for i in reversed(program.instructions) if isinstance(i, kinds)]
        self._numbers: Counter[object] = Counter()
        self._meetings: dict[str, tuple[object, int]] = {}

    def advance(self, issued: Counter[object]) -> bool:
        """Go on as far as what the ranks have issued lets this one; True where that was anywhere."""
        before = len(self.left)
        while self.left:
            instruction = self.left[-1]
            if isinstance(instruction, Wait):
                meeting, size = self._meetings[instruction.work]
                if issued[meeting] < size:
                    break
            else:
                self._issue(instruction, issued)
            self.left.pop()
        return len(self.left) < before

    def _issue(self, call: Collective | SendRecv, issued: Counter[object]) -> None:
        if isinstance(call, Collective):
            place, size = (call.group,), len(call.group)
        else:
            ends = (self.rank, call.peer) if call.kind == "send" else (call.peer, self.rank)
            place, size = (call.group, ends), 2
        self._numbers[place] += 1
        meeting = (place, self._numbers[place])
        self._meetings[call.work] = (meeting, size)
        issued[meeting] += 1
