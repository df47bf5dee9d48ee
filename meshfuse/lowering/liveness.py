"""Where the life of each buffer ends."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from .effects import effects
from .instructions import CommunicationCall, Free, Instruction, Wait


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
