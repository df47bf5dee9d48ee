"""Checks of host programs that turn a hang or a read of garbage into a compile-time error."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from .instructions import Collective, Free, Instruction, SendRecv, Wait
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
    if hasattr(instruction, "outputs"):
        return set(instruction.outputs)
    if isinstance(instruction, (Collective, SendRecv)):
        return {instruction.work}
    return {instruction.target}  # type: ignore[union-attr]


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


def _collective_orders(program: HostProgram) -> dict[tuple[int, ...], list[tuple[object, ...]]]:
    orders: dict[tuple[int, ...], list[tuple[object, ...]]] = {}
    for instruction in program.instructions:
        if isinstance(instruction, Collective):
            orders.setdefault(instruction.group, []).append(
                (instruction.kind, instruction.work, instruction.payload[1])
            )
    return orders


def _verify_members(orders: Mapping[tuple[int, ...], object], programs: Sequence[HostProgram]) -> None:
    groups_of = {program.rank: set(_collective_orders(program)) for program in programs}
    for group in orders:
        assert all(group in groups_of[rank] for rank in group if rank in groups_of), f"a rank is missing in {group}"
