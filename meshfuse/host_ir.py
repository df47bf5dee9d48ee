"""The program of one rank, and its lowering from segments and reshards."""

from __future__ import annotations

import hashlib
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from .errors import file_name
from .graph import Graph
from .html_text import html_lines
from .layer_folding import fold_rows, layer_key, repeats
from .lowering.buffer_checker import BufferChecker
from .lowering.effects import Effects, effects, mentioned
from .lowering.instructions import (
    CallKey,
    Channel,
    Collective,
    Communication,
    CommunicationCall,
    Free,
    Instruction,
    Kernel,
    Launch,
    SendRecv,
    View,
    Wait,
    call_channel,
    group_name,
)
from .lowering.rank_lowering import RankLowering
from .lowering.schedule import IN_FLIGHT
from .lowering.segments import SegmentedDefinition
from .ops.values import TensorRef

ChannelOf = Callable[[int, CommunicationCall], Channel]

# Names of values, work and kernels, which programs number throughout.
_NUMBERED = re.compile(r"\b(v|w|segment_)\d+")


@dataclass(frozen=True, slots=True)
class HostProgram:
    """The program of one rank.

    `params` are the names of the inputs, `outputs` the names that are returned (None where this rank holds no part of
    an output). `digest` identifies the definition and its shapes, and is equal on all ranks. `notes` are pairs of a
    kernel's name and a comment on what computes it and why. `names` are pairs of a parameter and what the script calls
    it.
    """

    rank: int
    params: tuple[str, ...]
    instructions: tuple[Instruction, ...]
    outputs: tuple[str | None, ...]
    digest: str
    notes: tuple[tuple[str, str], ...] = field(default=(), compare=False, repr=False)
    names: tuple[tuple[str, str], ...] = field(default=(), compare=False, repr=False)

    @property
    def kernels(self) -> tuple[Kernel, ...]:
        """Every kernel once, in the order of the first launches."""
        return tuple(dict.fromkeys(i.kernel for i in self.instructions if isinstance(i, Launch)))

    @property
    def functions(self) -> Mapping[str, Callable[..., Any]]:
        """The functions of registered ops that the kernels call as OP.name."""
        return {name: function for kernel in self.kernels for name, function in kernel.functions}

    @property
    def communications(self) -> tuple[Communication, ...]:
        """The communications of this rank in order; a call that does several counts as several."""
        calls = [i.about for i in self.instructions if isinstance(i, CommunicationCall)]
        return tuple(part for about in calls for part in about.parts or (about,))

    @property
    def groups(self) -> tuple[tuple[int, ...], ...]:
        """The groups that the program communicates in, in the order of their first use."""
        return tuple(dict.fromkeys(i.group for i in self.instructions if isinstance(i, CommunicationCall)))

    def source(self, simulated: bool = False) -> str:
        """The program as a Python function `main`; with `simulated`, a generator that yields instead of waiting."""
        return "\n".join(self.lines(simulated)[0])

    def lines(self, simulated: bool = False) -> tuple[list[str], Mapping[int, Instruction]]:
        """The lines of `source`, and the instruction of each line by its number, counted from 1."""
        out: list[str] = []
        where: dict[int, Instruction] = {}
        for kernel in self.kernels:
            out += [*kernel.source(), ""]
        out.append(f"def main({', '.join([*self.params, 'seed=0', 'offset=0'])}):")
        for instruction in self.instructions:
            out.append("    " + _text(instruction, simulated))
            where[len(out)] = instruction
        out.append(f"    return ({''.join(f'{name}, ' for name in self.outputs)})")
        if simulated and not any(isinstance(i, Wait) for i in self.instructions):
            out.append("    yield")
        return out, where

    def __str__(self) -> str:
        out = [
            f"# rank {self.rank}",
            *_inputs(self.names),
            "import torch",
            "import torch.nn.functional as F",
            "import meshfuse.kernels as K",
        ]
        out.append("M = meshfuse.runtime.buffers.device_memory(device)")
        for group in self.groups:
            out.append(f"{group_name(group)} = world.group({group})")
        out += [f"# OP.{name}: {_where(function)}" for name, function in self.functions.items()]
        out.append("")
        lines, where = self.lines()
        known = dict(self.notes)
        notes = {kernel.head: f"  # {known[kernel.name]}" for kernel in self.kernels if kernel.name in known}
        for number, line in enumerate(lines, 1):
            out.append(line + (notes.get(line) or _comment(where.get(number))))
        return "\n".join(out)

    def __repr__(self) -> str:
        many = f"{len(self.instructions)} instructions, {len(self.communications)} communications"
        return f"<HostProgram of rank {self.rank}: {many}; print shows it>"

    def folded(self) -> str:
        """The text of the program, in which lines that equal layers repeat stand once: to read, not to run."""
        lines = str(self).split("\n")
        out, place = list[str](), 0
        for start, period, count in repeats([_layer_line(line) for line in lines]):
            once = lines[start : start + period]
            indent = min((line[: len(line) - len(line.lstrip())] for line in once if line), default="")
            out += [*lines[place:start], *once, f"{indent}# {count - 1} more times these {period} lines"]
            place = start + period * count
        return "\n".join([*out, *lines[place:]])

    def _repr_html_(self) -> str:
        many = f"{len(self.instructions)} instructions, {len(self.communications)} communications"
        return html_lines(self.folded(), f"rank {self.rank}: {many}")


def _inputs(names: Sequence[tuple[str, str]]) -> list[str]:
    """Comments that say what the parameters are called, those of equal layers in one line."""
    rows = fold_rows([(label,) for _, label in names], (0,))
    return [f"# {row.cells[0]}{row.times}: {_few([names[i][0] for i in row.places])}" for row in rows]


def _few(names: Sequence[str]) -> str:
    return ", ".join(names if len(names) < 5 else [*names[:2], "...", names[-1]])


def _layer_line(line: str) -> str:
    """Equal for lines of a program that differ only in the layer that they belong to."""
    code, mark, comment = line.partition("  # ")
    return _NUMBERED.sub(r"\1*", code) + mark + layer_key(comment)


def _text(instruction: Instruction, simulated: bool) -> str:
    if simulated and isinstance(instruction, Wait):
        return f"yield {instruction.work}"
    return instruction.source()


def _comment(instruction: Instruction | None) -> str:
    if isinstance(instruction, (Launch, View)) and instruction.note:
        return f"  # {instruction.note}"
    if not isinstance(instruction, CommunicationCall):
        return ""
    about = instruction.about
    return f"  # {about.tensor}: {about.step}; {about.wire:.0f} bytes; {about.why} {about.line}"


def _where(function: Callable[..., Any]) -> str:
    """File and line of a registered op's function."""
    code = getattr(function, "__code__", None)
    return f"{file_name(code.co_filename)}:{code.co_firstlineno}" if code else repr(function)


def digest_of(text: str) -> str:
    """A short hash of a text."""
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def verify(program: HostProgram) -> None:
    """Check one program: names exist when they are used and are freed once, and memory is written before it is read.

    Each communication is waited for exactly once, before its result is read and before its operands are written or
    freed (`buffer_checker.BufferChecker`). Raises AssertionError.
    """
    for _ in checked(program):
        pass


def checked(program: HostProgram) -> Iterator[Instruction | None]:
    """`verify`, instruction by instruction: each is given before it is checked, and None before the end is."""
    tensors = [name for name in program.params if name.startswith("v")]
    alive, book = set(tensors), BufferChecker(tensors)
    for instruction in program.instructions:
        yield instruction
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
    yield None
    _verify_end(program, alive, book)


def _verify_end(program: HostProgram, alive: set[str], book: BufferChecker) -> None:
    outputs = set(filter(None, program.outputs))
    assert not book.in_flight, f"never waited for: {book.in_flight}"
    assert alive.issuperset(outputs), f"returned, and not there: {sorted(outputs - alive)}"
    book.read_all(outputs)
    left = (alive & mentioned(program.instructions)).difference(outputs)
    assert not left, f"never freed: {sorted(left)}"


def _verify_names(instruction: Instruction, found: Effects, alive: set[str]) -> None:
    needed = {*found.reads, *found.writes, *([found.shares] if found.shares else [])}
    assert alive.issuperset(needed), f"reads what is not there: {instruction}"
    assert alive.isdisjoint(found.makes), f"made twice: {instruction}"
    alive.update(found.makes)


def verify_together(programs: Sequence[HostProgram], channel: ChannelOf = call_channel) -> None:
    """Check that all ranks agree on the order of their communications, within every group and across groups.

    The ranks of a group issue the same collectives in the same order, with equal sizes. Every message is received.
    There is no deadlock, even if every communication waits for all ranks that take part.

    channel: for programs that stand for classes of ranks, `RankClasses.channel`; then all of their ranks are checked.
    """
    orders: dict[object, tuple[int, list[tuple[object, ...]]]] = {}
    sent: dict[object, list[tuple[int, str]]] = {}
    received: dict[object, list[tuple[int, str]]] = {}
    assert len({p.digest for p in programs}) == 1
    for program in programs:
        for group, (_, order) in _collective_orders(program, channel).items():
            first = orders.setdefault(group, (program.rank, order))
            assert first[1] == order, f"ranks {first[0]} and {program.rank} differ in group {group}"
        for message in (i for i in program.instructions if isinstance(i, SendRecv)):
            key = channel(program.rank, message).key
            (sent if message.kind == "send" else received).setdefault(key, []).append(message.payload)
    assert sent == received, "a message is sent and not received, or the other way round"
    _verify_members(programs, channel)
    _verify_no_deadlock(programs, channel)


def _collective_orders(
    program: HostProgram, channel: ChannelOf
) -> dict[object, tuple[tuple[int, ...], list[tuple[object, ...]]]]:
    """By group its ranks, and what is issued in it in order."""
    orders: dict[object, tuple[tuple[int, ...], list[tuple[object, ...]]]] = {}
    for instruction in program.instructions:
        if isinstance(instruction, Collective):
            key, members = channel(program.rank, instruction)
            count, dtype = instruction.payload
            agreed = () if instruction.kind == "all_to_all" else (count,)
            _, order = orders.setdefault(key, (members, []))
            order.append((instruction.kind, instruction.work, dtype, *agreed))
    return orders


def _verify_members(programs: Sequence[HostProgram], channel: ChannelOf) -> None:
    groups_of = {program.rank: _collective_orders(program, channel) for program in programs}
    for group, members in {group: found[0] for all_ in groups_of.values() for group, found in all_.items()}.items():
        assert all(group in groups_of.get(rank, ()) for rank in members), f"a rank is missing in {group}"


def _call_keys(program: HostProgram, channel: ChannelOf) -> list[tuple[CallKey, int]]:
    """The communications of a rank in order, and how many ranks take part in each.

    Before the first message in a group all of its ranks connect; that counts as a communication.
    """
    numbers: Counter[object] = Counter()
    known: set[tuple[int, ...]] = set()
    found: list[tuple[CallKey, int]] = []
    for i in program.instructions:
        if isinstance(i, CommunicationCall):
            key, members = channel(program.rank, i)
            if i.group not in known and isinstance(i, SendRecv):
                found.append(((("connecting", i.group), 1), len(i.group)))
            known.add(i.group)
            numbers[key] += 1
            found.append(((key, numbers[key]), len(members)))
    return found


def _verify_no_deadlock(programs: Sequence[HostProgram], channel: ChannelOf) -> None:
    """Play all programs, with every communication waiting for all its ranks: all programs must reach their ends."""
    left = {program.rank: _call_keys(program, channel)[::-1] for program in programs}
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


def lower_to_host_ir(segmented: SegmentedDefinition, rank: int, digest: str, in_flight: int = IN_FLIGHT) -> HostProgram:
    """Lower a program for one rank: kernels, its part in every collective, and frees of buffers.

    `in_flight` limits the bytes of communications that are issued ahead of their use.
    """
    program = HostProgram(rank, *RankLowering(segmented, rank).run(in_flight), digest)
    return replace(program, names=tuple(_labels(segmented.resharded.graph, program.params)))


def _labels(graph: Graph, params: Sequence[str]) -> Iterator[tuple[str, str]]:
    """The parameters that the script has names for, with these."""
    for ref, param in zip(graph.inputs, params, strict=True):
        tensor = graph.tensors[ref.id] if isinstance(ref, TensorRef) else None
        if tensor is not None and tensor.label != tensor.name:
            yield param, tensor.label
