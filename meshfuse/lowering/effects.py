"""What each instruction reads, writes and makes: what frees, the schedule and the checks go by."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from .instructions import (
    Allocate,
    Collective,
    Copy,
    Free,
    Instruction,
    Launch,
    Reduce,
    SendRecv,
    View,
    Wait,
)


class Effects(NamedTuple):
    """Names of buffers and works.

    `shares` is the buffer in whose memory what is made may lie. A communication reads and writes from its issue to the
    end of its wait.
    """

    reads: tuple[str, ...] = ()
    writes: tuple[str, ...] = ()
    makes: tuple[str, ...] = ()
    shares: str = ""

    @property
    def names(self) -> tuple[str, ...]:
        return (*self.reads, *self.writes, *self.makes)


def effects(instruction: Instruction) -> Effects:
    """The effects of an instruction; names of scalars and of other things outside memory are left out."""
    return _EFFECTS[type(instruction)](instruction)


def _launch(i: Launch) -> Effects:
    written = i.written
    reads = tuple([n for n in i.inputs if n[0] == "v" and n not in written])
    return Effects(reads, written, i.outputs)


def _send_recv(i: SendRecv) -> Effects:
    buffer = (i.buffer,)
    return Effects(buffer, (), (i.work,)) if i.kind == "send" else Effects((), buffer, (i.work,))


def _view(i: View) -> Effects:
    # A part that is written through its name is not read yet.
    return Effects(() if i.box is not None else (i.source_name,), (), (i.target,), i.source_name)


def _copy(i: Copy) -> Effects:
    if i.box is not None:
        return Effects(i.reads, (i.target,))
    return Effects(i.reads, (), (i.target,), i.reads[0] if i.aliases else "")


_EFFECTS: dict[type, Callable[[Any], Effects]] = {
    Launch: _launch,
    View: _view,
    Allocate: lambda i: Effects((), (), (i.target,)),
    Copy: _copy,
    Reduce: lambda i: Effects((i.source_name, i.own) if i.own else (i.source_name,), (), (i.target,)),
    Collective: lambda i: Effects(tuple(n for n in i.reads if n not in i.writes), i.writes, (i.work,)),
    SendRecv: _send_recv,
    Wait: lambda i: Effects((i.work,)),
    Free: lambda i: Effects(),
}


def mentioned(instructions: Iterable[Instruction]) -> set[str]:
    """All buffers and works in these instructions, but for frees."""
    found: set[str] = set()
    for instruction in instructions:
        made = effects(instruction)
        found.update(made.names)
        if made.shares:
            found.add(made.shares)
    return found
