"""A book of buffers for checks: what is written, what is read, and what a communication in flight still holds."""

from __future__ import annotations

import bisect
import math
from collections.abc import Iterable
from dataclasses import dataclass, field

from ..reshard.steps import box_numel
from .boxes import Box
from .effects import Effects
from .instructions import Allocate, Collective, CommunicationCall, Copy, Instruction, View

# Of memory that some instruction made whole: nothing of it is missing.
_WHOLE = 0


@dataclass(slots=True)
class _Buffer:
    """The memory under one name.

    `missing` elements have not been written yet. It is `sealed` once it has been read. `parts` of it are cut along
    `dim`.
    """

    missing: int
    root: str
    size: int = 0
    sealed: bool = False
    parts: list[str] = field(default_factory=list)
    intervals: list[tuple[int, int]] = field(default_factory=list)
    reading: set[str] = field(default_factory=set)
    writing: set[str] = field(default_factory=set)


class BufferChecker:
    """Every name's memory, while the instructions of a program are gone through; AssertionError where one is wrong.

    A buffer is written whole, then read, and never written again. A write that has come to stand behind a read of it,
    or a read before its write, breaks this.
    """

    def __init__(self, params: Iterable[str]):
        self._buffers = {name: _Buffer(_WHOLE, name, sealed=True) for name in params}
        self._held: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {}
        self._given: set[str] = set()

    def step(self, instruction: Instruction, found: Effects) -> None:
        """Go through an instruction that is neither a wait nor a free."""
        self._check_given((*found.reads, *found.writes, found.shares))
        for name in found.reads:
            self._read(name, instruction)
        for name in found.writes:
            self._write(name, instruction)
        if isinstance(instruction, Collective):
            in_place = [n for n in instruction.reads if n in instruction.writes and self._buffers[n].missing]
            assert not in_place, f"{in_place} are reduced before they are written: {instruction}"
        if isinstance(instruction, CommunicationCall):
            self._hold(instruction.work, found)
        else:
            self._make(instruction, found)

    def _check_given(self, names: Iterable[str]) -> None:
        assert self._given.isdisjoint(names), f"used after its memory was given away: {self._given.intersection(names)}"

    # reading and writing

    def _related(self, name: str) -> list[_Buffer]:
        """The buffer, its parts, and the buffer that it is a part of."""
        buffer = self._buffers[name]
        found = [buffer, *(self._buffers[part] for part in buffer.parts)]
        return found if buffer.root == name else [*found, self._buffers[buffer.root]]

    def _read(self, name: str, what: object) -> None:
        buffer = self._buffers[name]
        assert not buffer.missing, f"{name} is read before it is written: {what}"
        assert not any(b.writing for b in self._related(name)), f"reads before the wait: {what}"
        buffer.sealed = True
        for part in buffer.parts:
            self._buffers[part].sealed = True

    def _write(self, name: str, instruction: Instruction) -> None:
        buffer = self._buffers[name]
        assert not any(b.writing or b.reading for b in self._related(name)), f"writes before the wait: {instruction}"
        assert not buffer.sealed, f"{name} is written after it was read: {instruction}"
        if not isinstance(instruction, CommunicationCall):
            self._fill(buffer, _written(instruction, buffer))

    def _fill(self, buffer: _Buffer, more: int) -> None:
        """Note that so many more elements are written."""
        if not buffer.missing:
            return
        buffer.missing = max(0, buffer.missing - more)
        root = self._buffers.get(buffer.root)
        if not buffer.missing and root is not None and root is not buffer:
            self._fill(root, buffer.size)

    # works

    def _hold(self, work: str, facts: Effects) -> None:
        self._held[work] = (facts.reads, facts.writes)
        for name in facts.reads:
            self._buffers[name].reading.add(work)
        for name in facts.writes:
            self._buffers[name].writing.add(work)

    def finish(self, work: str) -> None:
        """Go through a wait: what the work writes is there, and what it reads may be freed."""
        assert work in self._held, f"waited for twice, or before it was issued: {work}"
        reads, writes = self._held.pop(work)
        for name in reads:
            self._buffers[name].reading.discard(work)
        for name in writes:
            self._buffers[name].writing.discard(work)
            self._fill(self._buffers[name], self._buffers[name].size)

    def read_all(self, names: Iterable[str]) -> None:
        """Check that what the program returns is written whole."""
        for name in names:
            self._read(name, "returned")

    def free(self, names: Iterable[str]) -> None:
        """Go through a free: nothing in flight may read or write the memory."""
        for name in names:
            buffer = self._buffers.get(name)
            assert buffer is None or not (buffer.reading or buffer.writing), f"{name} is freed before the wait"
            assert name not in self._held, f"the work {name} is freed before the wait"

    @property
    def in_flight(self) -> list[str]:
        """The works that have not been waited for."""
        return sorted(self._held)

    # making

    def _make(self, instruction: Instruction, facts: Effects) -> None:
        if isinstance(instruction, View) and instruction.box is not None:
            self._cut(instruction, instruction.box)
            return
        if isinstance(instruction, Allocate):
            size = math.prod(instruction.shape)
            missing = _WHOLE if instruction.fill else size
            self._buffers[instruction.target] = _Buffer(missing, instruction.target, size)
            return
        if isinstance(instruction, Copy) and instruction.takes:
            self._given.update(instruction.reads)
        for name in facts.makes:
            self._buffers[name] = _Buffer(_WHOLE, name)

    def _cut(self, part: View, box: Box) -> None:
        """Note a part of a buffer; it must share no element with other parts."""
        whole, size = self._buffers[part.source_name], box_numel(box)
        for interval in box[_cut_dim(box, part.shape)] if size else ():
            at = bisect.bisect(whole.intervals, interval)
            before, after = whole.intervals[max(at - 1, 0) : at], whole.intervals[at : at + 1]
            assert all(b[1] <= interval[0] for b in before), f"parts overlap: {part}"
            assert all(interval[1] <= a[0] for a in after), f"parts overlap: {part}"
            whole.intervals.insert(at, interval)
        whole.parts.append(part.target)
        self._buffers[part.target] = _Buffer(size, part.source_name, size)


def _cut_dim(box: Box, shape: tuple[int, ...]) -> int:
    """The one dim of a buffer along which a part is cut."""
    cut = [d for d, (runs, n) in enumerate(zip(box, shape, strict=True)) if runs != ((0, n),)]
    assert len(cut) < 2, f"a part that is cut along dims {cut}"
    return cut[0] if cut else 0


def _written(instruction: Instruction, buffer: _Buffer) -> int:
    """Elements that an instruction writes for the first time, if it is the first to write them."""
    if isinstance(instruction, Copy) and instruction.box is not None:
        return box_numel(instruction.box)
    return buffer.size
