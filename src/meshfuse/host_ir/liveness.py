"""Where the life of each buffer ends."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from .instructions import Collective, Free, Instruction, Launch, SendRecv, Wait

_NAME = re.compile(r"\b(?:v|w)\d+(?:_\w+)?\b")


def reads_of(instruction: Instruction) -> set[str]:
    """Every buffer or work that an instruction mentions."""
    if isinstance(instruction, Launch):
        return {name for name in (*instruction.inputs, *instruction.outputs) if name.startswith("v")}
    return set(_NAME.findall(instruction.source()))


def with_frees(body: Sequence[Instruction], keep: Iterable[str]) -> list[Instruction]:
    """The instructions with a Free after the last use of every name; what a work reads lives until its Wait."""
    last: dict[str, int] = {}
    held_by_work: dict[str, set[str]] = {}
    for place, instruction in enumerate(body):
        names = reads_of(instruction)
        if isinstance(instruction, (Collective, SendRecv)):
            held_by_work[instruction.work] = names
        if isinstance(instruction, Wait):
            names |= held_by_work[instruction.work]
        last.update(dict.fromkeys(sorted(names), place))
    kept = set(keep)
    out: list[Instruction] = []
    for place, instruction in enumerate(body):
        out.append(instruction)
        dead = tuple(name for name, end in last.items() if end == place and name not in kept)
        if dead:
            out.append(Free(dead))
    return out
