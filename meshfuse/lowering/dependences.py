"""Which instructions must stay behind which: by the names that they make and the memory that they touch."""

from __future__ import annotations

from collections.abc import Sequence

from .effects import Effects, effects
from .instructions import CommunicationCall, Instruction, View, Wait


class _BufferAccesses:
    """The last write to a buffer, or to a part of it, and the reads since."""

    __slots__ = ("parts", "reads", "whole", "write")

    def __init__(self, whole: _BufferAccesses | None = None):
        self.write = -1
        self.reads: list[int] = []
        self.whole = whole
        self.parts: list[_BufferAccesses] = []

    def related(self) -> list[_BufferAccesses]:
        """The accesses to the buffers that share elements with it."""
        return [self, *self.parts] if self.whole is None else [self, self.whole]


def dependences(body: Sequence[Instruction]) -> list[tuple[int, ...]]:
    """By place the earlier places that it must stay behind."""
    return _Dependences(body).run()


class _Dependences:
    """The instructions so far.

    `maker` is the place that makes a name, `memory` the accesses to its buffer (one object for all names of a buffer),
    and `works` what each communication in flight reads and writes.
    """

    def __init__(self, body: Sequence[Instruction]):
        self.body = body
        self.maker: dict[str, int] = {}
        self.memory: dict[str, _BufferAccesses] = {}
        self.works: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {}

    def run(self) -> list[tuple[int, ...]]:
        return [tuple(self._before(place, ins)) for place, ins in enumerate(self.body)]

    def _before(self, place: int, ins: Instruction) -> set[int]:
        found = effects(ins)
        if isinstance(ins, Wait):
            found = Effects(*self.works[ins.work], (), ins.work)
        before = {self.maker[n] for n in (*found.reads, *found.writes, found.shares) if n in self.maker}
        for name in found.reads:
            self._read(name, place, before)
        for name in found.writes:
            self._write(name, place, before)
        if isinstance(ins, CommunicationCall):
            self.works[ins.work] = found.reads, found.writes
        else:
            self._share(ins, found)
        for name in found.makes:
            self.maker[name] = place
        before.discard(place)
        return before

    def _share(self, ins: Instruction, facts: Effects) -> None:
        """Note that a name lies in another buffer's memory; a part is memory of its own."""
        if not facts.shares or not facts.makes:
            return
        source = self._of(facts.shares)
        if isinstance(ins, View) and ins.box is not None:
            memory = _BufferAccesses(source)
            source.parts.append(memory)
            source = memory
        self.memory[facts.makes[0]] = source

    def _of(self, name: str) -> _BufferAccesses:
        found = self.memory.get(name)
        if found is None:
            found = self.memory[name] = _BufferAccesses()
        return found

    def _read(self, name: str, place: int, before: set[int]) -> None:
        memory = self._of(name)
        for other in memory.related():
            if other.write >= 0:
                before.add(other.write)
        memory.reads.append(place)

    def _write(self, name: str, place: int, before: set[int]) -> None:
        memory = self._of(name)
        for other in memory.related():
            if other.write >= 0:
                before.add(other.write)
            before.update(other.reads)
            if other is memory or memory.whole is None:
                other.reads = []
        memory.write = place
