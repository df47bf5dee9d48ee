"""Copies between kernels and communications, done inside the kernels.

What a communication brings is unpacked by the kernel that reads it first, and what one sends is packed by the kernel
that makes it: a compiler fuses these copies with the ops beside them. Kernels, communications and waits stay in their
order, and no communication is issued after more work than before.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from operator import attrgetter

from .blocks import is_dense
from .dependences import dependences
from .effects import effects
from .fusable_copies import Fusible
from .instructions import Allocate, CommunicationCall, Copy, Instruction, Launch, Reduce, Wait

# A compiler chooses for every element among the pieces that are put into a tensor: more of them, and such as are not
# in one piece of memory, take longer than copying them first (Inductor, on a CPU).
_FEW = 4
# The name of a scalar of the program, which may be no parameter of the kernel.
_SCALAR = re.compile(r"\bs\d+\b")


def fuse_copies(
    body: Sequence[Instruction], fusible: Mapping[str, Fusible], outputs: Collection[str], room: float
) -> list[Instruction]:
    """The instructions in their order, with copies inside the kernels beside them.

    `fusible` is by the names of kernels. What a kernel unpacks is held until it ends: together with what is in flight,
    no more than `room` bytes.
    """
    if not any(isinstance(i, (Copy, Reduce)) for i in body):
        return list(body)
    return _CopyFuser(body, fusible, outputs, room).run()


class _CopyFuser:
    """By name, `makers` are the places that make or write it, `readers` those that read it.

    `inside` goes into kernels.
    """

    def __init__(
        self, body: Sequence[Instruction], fusible: Mapping[str, Fusible], outputs: Collection[str], room: float
    ):
        self.body, self.outputs, self.room = body, outputs, room
        self.read, self.made, self.turned = (
            {kernel: {f"v{v}" for v in values(parts)} for kernel, parts in fusible.items()}
            for values in (attrgetter("read"), attrgetter("made"), attrgetter("turned"))
        )
        self.depends = dependences(body)
        self.makers: dict[str, list[int]] = {}
        self.readers: dict[str, set[int]] = {}
        for place, ins in enumerate(body):
            found = effects(ins)
            for name in (*found.makes, *found.writes):
                self.makers.setdefault(name, []).append(place)
            for name in (*found.reads, *filter(None, [found.shares])):
                self.readers.setdefault(name, set()).add(place)
        self.sizes = {i.target: math.prod(i.shape) * i.dtype.itemsize for i in body if isinstance(i, Allocate)}
        self.flying = _in_flight(body, self.sizes)
        self.inside: set[int] = set()

    def run(self) -> list[Instruction]:
        made = {place: self._launch(place, ins) for place, ins in enumerate(self.body) if self._takes_copies(ins)}
        return [made.get(place, ins) for place, ins in enumerate(self.body) if place not in self.inside]

    def _takes_copies(self, ins: Instruction) -> bool:
        """Whether it launches a segment's kernel, which is compiled; kernels of loops are not."""
        return isinstance(ins, Launch) and ins.kernel.name in self.read

    def _launch(self, place: int, ins: Instruction) -> Launch:
        assert isinstance(ins, Launch)
        unpacks = sorted(self._unpacks(place, ins))
        packs = self._packs(place, ins)
        self.inside.update(unpacks, packs)
        return self._with(ins, place, unpacks, packs) if unpacks or packs else ins

    # unpacking

    def _unpacks(self, place: int, launch: Launch) -> Iterator[int]:
        """The places of instructions that make the kernel's inputs from what was received, and that it can do."""
        left = self.room - self.flying[place]
        for name in launch.inputs:
            group = self.makers.get(name, [])
            if name in self.read[launch.kernel.name] and self._may_wait(group, place):
                held = sum(self.sizes.get(source, 0) for source in self._sources(group) if source != name)
                if held <= left:
                    left -= held
                    yield from group

    def _may_wait(self, group: Sequence[int], launch: int) -> bool:
        """Whether these instructions copy, and nothing before the kernel needs what they make."""
        parts = [self.body[place] for place in group]
        if not group or group[-1] > launch or not _copies(parts):
            return False
        between = [place for place in range(group[0], launch) if place not in group]
        if any(isinstance(self.body[p], Launch) for p in between if p > group[-1]):
            return False
        return all(set(group).isdisjoint(self.depends[p]) for p in between)

    def _sources(self, places: Sequence[int]) -> list[str]:
        found = (effects(self.body[place]) for place in places)
        return list(dict.fromkeys(name for e in found for name in e.reads))

    # packing

    def _packs(self, place: int, launch: Launch) -> list[int]:
        """The places of instructions that pack the kernel's results, before the next launch or communication."""
        found: list[int] = []
        for after in range(place + 1, len(self.body)):
            ins = self.body[after]
            if isinstance(ins, (Launch, CommunicationCall)):
                break
            if isinstance(ins, Copy) and ins.box is None and self._is_pack_of(launch, place, after, ins):
                found.append(after)
        return found

    def _is_pack_of(self, launch: Launch, place: int, after: int, ins: Copy) -> bool:
        kernel = launch.kernel.name
        mine = [name for name in effects(ins).reads if name in launch.outputs]
        if not mine or not self.made[kernel].issuperset(mine) or max(self.depends[after]) > place:
            return False
        if not ins.aliases:
            return True
        # Two results of a kernel in one memory are more than its readers are told of.
        return self.turned[kernel].issuperset(mine) and all(self._only_reader(name, after) for name in mine)

    def _only_reader(self, name: str, place: int) -> bool:
        return self.readers[name] == {place} and name not in self.outputs

    # the kernel

    def _with(self, launch: Launch, place: int, unpacks: Sequence[int], packs: Sequence[int]) -> Launch:
        first, last = ([self.body[p] for p in places] for places in (unpacks, packs))
        unpacked = dict.fromkeys(name for i in first for name in effects(i).makes)
        packed = [name for i in last for name in effects(i).makes]
        local = {*unpacked, *launch.outputs}
        inputs = [n for n in (*launch.inputs, *self._sources([*unpacks, *packs])) if n not in local]
        inside = {place, *unpacks, *packs}
        kept = [n for n in (*launch.outputs, *unpacked) if self._is_read_outside(n, inside)]
        params, results = tuple(dict.fromkeys(inputs)), (*kept, *packed)
        kernel = replace(launch.kernel, params=params, results=results, unpacks=tuple(first), packs=tuple(last))
        return replace(launch, kernel=kernel, inputs=params, outputs=results)

    def _is_read_outside(self, name: str, inside: Collection[int]) -> bool:
        return name in self.outputs or not self.readers.get(name, set()).issubset(inside)


def _copies(parts: Sequence[Instruction]) -> bool:
    """Whether these instructions together make one tensor, by nothing but copying."""
    if len(parts) == 1:
        return isinstance(parts[0], Reduce) or (isinstance(parts[0], Copy) and not parts[0].aliases)
    boxes = [(part.box, part.shape) for part in parts[1:] if isinstance(part, Copy) and part.box is not None]
    if not isinstance(parts[0], Allocate) or len(boxes) != len(parts) - 1 or _SCALAR.search(parts[0].fill):
        return False
    return len(boxes) <= _FEW and all(is_dense(box, shape) for box, shape in boxes)


def _in_flight(body: Sequence[Instruction], sizes: Mapping[str, int]) -> list[int]:
    """By place, the bytes of buffers that communications hold there."""
    held: dict[str, int] = {}
    found: list[int] = []
    for ins in body:
        if isinstance(ins, Wait):
            held.pop(ins.work, None)
        found.append(sum(held.values()))
        if isinstance(ins, CommunicationCall):
            names = effects(ins)
            held[ins.work] = sum(sizes.get(name, 0) for name in {*names.reads, *names.writes})
    return found
