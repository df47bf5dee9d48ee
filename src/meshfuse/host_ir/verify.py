"""Checks of host programs that turn a hang or a read of garbage into a compile-time error."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from .buffer_book import Book
from .effects import Effects, effects, mentioned
from .instructions import Collective, CommunicationCall, Free, Instruction, Meeting, SendRecv, Wait, meeting_place
from .program import HostProgram


def verify(program: HostProgram) -> None:
    """Check one program: names exist when they are used and are freed once; memory is written, then read.

    In particular each work is waited for exactly once, before what it writes is read and before what it reads is
    written or freed (`buffer_book.Book`). Raises AssertionError.
    """
    tensors = [name for name in program.params if name.startswith("v")]
    alive, book = set(tensors), Book(tensors)
    for instruction in program.instructions:
        if isinstance(instruction, Free):
            assert alive.issuperset(instruction.names), f"freed twice: {instruction}"
            book.free(instruction.names)
            alive.difference_update(instruction.names)
        elif isinstance(instruction, Wait):
            book.finish(instruction.work)
        else:
            found = effects(instruction)
            _verify_names(instruction, found, alive)
            book.step(instruction, found)
    assert not book.in_flight, f"never waited for: {book.in_flight}"
    outputs = set(filter(None, program.outputs))
    assert alive.issuperset(outputs)
    book.read_all(outputs)
    assert not (alive & mentioned(program.instructions)).difference(outputs), "never freed"


def _verify_names(instruction: Instruction, found: Effects, alive: set[str]) -> None:
    needed = {*found.reads, *found.writes, *([found.shares] if found.shares else [])}
    assert alive.issuperset(needed), f"reads what is not there: {instruction}"
    assert alive.isdisjoint(found.makes), f"made twice: {instruction}"
    alive.update(found.makes)


def verify_together(programs: Sequence[HostProgram]) -> None:
    """Check that all ranks agree on the order of their communications, in every group and across groups.

    A group's collectives come in one order, with equal kinds and sizes. Every message is received. And no rank comes to
    a communication that another reaches only after one that waits for this rank, even if each waits for all of its
    ranks.
    """
    orders: dict[tuple[int, ...], tuple[int, list[tuple[object, ...]]]] = {}
    sent: dict[tuple[int, int], list[tuple[int, str]]] = {}
    received: dict[tuple[int, int], list[tuple[int, str]]] = {}
    assert len({p.digest for p in programs}) == 1
    for program in programs:
        for group, order in _collective_orders(program).items():
            first = orders.setdefault(group, (program.rank, order))
            assert first[1] == order, f"ranks {first[0]} and {program.rank} differ in group {group}"
        for message in (i for i in program.instructions if isinstance(i, SendRecv)):
            ends = message.ends(program.rank)
            (sent if message.kind == "send" else received).setdefault(ends, []).append(message.payload)
    assert sent == received, "a message is sent and not received, or the other way round"
    _verify_members(orders, programs)
    _verify_meetings(programs)


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


def _meetings(program: HostProgram) -> list[tuple[Meeting, int]]:
    """All that a rank takes part in, in order, and how many ranks come to each.

    Before the first message in a group all of its ranks connect, which is a meeting, too.
    """
    numbers: Counter[object] = Counter()
    known: set[tuple[int, ...]] = set()
    found: list[tuple[Meeting, int]] = []
    for i in program.instructions:
        if isinstance(i, CommunicationCall):
            place, size = meeting_place(program.rank, i)
            if i.group not in known and isinstance(i, SendRecv):
                found.append(((("connecting", i.group), 1), len(i.group)))
            known.add(i.group)
            numbers[place] += 1
            found.append(((place, numbers[place]), size))
    return found


def _verify_meetings(programs: Sequence[HostProgram]) -> None:
    """Let all ranks go through their meetings, each of which is over when all have come: all must get to their ends."""
    left = {program.rank: _meetings(program)[::-1] for program in programs}
    waiting: dict[object, list[int]] = {}
    moving = [program.rank for program in programs]
    while moving:
        rank = moving.pop()
        if not left[rank]:
            continue
        meeting, size = left[rank][-1]
        there = waiting.setdefault(meeting, [])
        there.append(rank)
        if len(there) == size:
            for member in waiting.pop(meeting):
                left[member].pop()
                moving.append(member)
    assert not waiting, f"ranks wait for each other: {waiting}"
