"""The instructions of a host program: values that print as the Python code that runs."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from ..dtypes import DataType
from ..errors import SourceLine
from .boxes import Box, box_text


@dataclass(frozen=True, slots=True)
class Kernel:
    """A segment on one rank: a local function of tensors and scalars, one line of torch code per op.

    written: indices of the parameters that results are written into. All other results are new tensors.
    functions: the functions of registered ops, which lines call as OP.name.
    work: per op, its operations and the least bytes that it reads and writes.
    origins: per line, the op and the user's line.
    unpacks: run first; they make values that the lines read from received buffers.
    packs: run last; they make the buffers to send from the results.
    """

    name: str
    params: tuple[str, ...]
    lines: tuple[str, ...]
    results: tuple[str, ...]
    functions: tuple[tuple[str, Callable[..., Any]], ...] = ()
    work: tuple[tuple[float, float], ...] = ()
    written: tuple[int, ...] = ()
    origins: tuple[tuple[str, SourceLine], ...] = field(default=(), compare=False, repr=False)
    unpacks: tuple[Instruction, ...] = ()
    packs: tuple[Instruction, ...] = ()

    @property
    def head(self) -> str:
        """The first line of its text."""
        return f"def {self.name}({', '.join(self.params)}):"

    @property
    def about(self) -> str:
        """Its ops, and what the script calls the last tensor that they make: `add, linear (h0.mlp.up)`."""
        ops = list(dict.fromkeys(op for op, _ in self.origins))
        shown = ", ".join([*ops[:3], *(["..."] if len(ops) > 3 else [])])
        called = next((line.called for _, line in reversed(self.origins) if line.called), "")
        return f"{shown} ({called})" if called else shown

    @property
    def before(self) -> int:
        """The number of lines before those of the ops."""
        return bool(self.written) + 1 + len(self.unpacks)

    def source(self) -> list[str]:
        # torch refuses to write a tensor that requires gradients into an existing one.
        marks = ["@torch.no_grad()"] if self.written else []
        returned = [f"    return {', '.join(self.results)}"] if self.results or not self.lines else []
        return [
            *marks,
            self.head,
            *(f"    {step.source()}" for step in self.unpacks),
            *(f"    {line}" for line in self.lines),
            *(f"    {step.source()}" for step in self.packs),
            *returned,
        ]


@dataclass(frozen=True, slots=True)
class Launch:
    """Run a kernel. `note` says which part of a loop this is."""

    kernel: Kernel
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    note: str = ""

    @property
    def written(self) -> tuple[str, ...]:
        """The input buffers that it writes into."""
        return tuple(self.inputs[place] for place in self.kernel.written)

    def source(self) -> str:
        call = f"{self.kernel.name}({', '.join(self.inputs)})"
        return f"{', '.join(self.outputs)} = {call}" if self.outputs else call


@dataclass(frozen=True, slots=True)
class View:
    """A name for a part of a tensor, which Python text, `part`, takes. Nothing is copied where torch has views.

    box: set for memory that is written through this name: the part of a buffer of `shape` that one chunk of a loop
        makes. Such parts of a buffer share no element.
    note: tells a reader which chunk it is.
    """

    target: str
    source_name: str
    part: str
    box: Box | None = None
    shape: tuple[int, ...] = ()
    note: str = ""

    def source(self) -> str:
        return f"{self.target} = {self.source_name}{self.part}"


@dataclass(frozen=True, slots=True)
class Allocate:
    """A new buffer; `fill` is the Python text of a number to fill it with."""

    target: str
    shape: tuple[int, ...]
    dtype: DataType
    fill: str = ""

    def source(self) -> str:
        make = f"M.full({tuple_text(self.shape)}, {self.fill}" if self.fill else f"M.empty({tuple_text(self.shape)}"
        return f"{self.target} = {make}, torch.{self.dtype.value})"


@dataclass(frozen=True, slots=True)
class Copy:
    """Copy parts of tensors into new memory, or into a box of a buffer. `copies.py` has the ways in which this is used.

    sources: of each the tensor, and Python text that takes a part of it; one after the other in a flat buffer if there
        are several.
    how: the method of M that makes the new memory: "dense" copies only what is not contiguous.
    result: Python text that gives the new memory its shape.
    box: where the source goes in a buffer of `shape`, which exists already.
    aliases: the target may lie in the source's memory, which is contiguous already.
    takes: the source is not used after this, so that the target may be written to.
    """

    target: str
    sources: tuple[tuple[str, str], ...]
    how: Literal["dense", "clone", "cat", ""]
    result: str = ""
    box: Box | None = None
    shape: tuple[int, ...] = ()
    aliases: bool = False
    takes: bool = False

    @property
    def reads(self) -> tuple[str, ...]:
        return tuple([name for name, _ in self.sources])

    def source(self) -> str:
        parts = ", ".join(map("".join, self.sources))
        if self.box is not None:
            return f"{self.target}{box_text(self.box, self.shape, assign=True)} = {parts}"
        if not self.how:
            return f"{self.target} = {parts}"
        return f"{self.target} = M.{self.how}({f'[{parts}]' if self.how == 'cat' else parts}){self.result}"


@dataclass(frozen=True, slots=True)
class Reduce:
    """Reduce terms that follow each other in a flat buffer.

    `own` is a tensor with this rank's term, if that is not in the buffer; `part` is Python text that takes it.
    `among`: see `blocks_text`.
    """

    target: str
    source_name: str
    terms: int
    shape: tuple[int, ...]
    reduce: str
    own: str = ""
    part: str = ""
    among: tuple[int, int] | None = None

    def source(self) -> str:
        own = self.own + self.part
        if own and self.terms == 1:
            term = f"{self.source_name}{_part(self.shape, self.among)}.view({tuple_text(self.shape)})"
            return f"{self.target} = M.combine({own}, {term}, {self.reduce!r})"
        folded = f"M.fold({self.source_name}{blocks_text(self.terms, self.shape, self.among)}, {self.reduce!r})"
        return f"{self.target} = " + (f"M.combine({own}, {folded}, {self.reduce!r})" if own else folded)


@dataclass(frozen=True, slots=True)
class Communication:
    """Why a collective is there, and what it costs.

    `kind` is the kind of the step, `step` its text. `wire` is the bytes that this rank sends, for ring algorithms.
    `why` and `line` say which op or annotation needs it. `parts` are the steps that one call does together.
    """

    kind: str
    axes: str
    tensor: str
    wire: float
    why: str
    line: SourceLine
    step: str
    parts: tuple[Communication, ...] = ()

    @property
    def description(self) -> str:
        """How errors name it."""
        return f"{self.kind} of {self.tensor} over {self.axes or 'two meshes'} ({self.why})"


# The methods of groups.
CollectiveKind = Literal["all_reduce", "all_gather", "all_to_all", "broadcast"]
MessageKind = Literal["send", "recv"]


@dataclass(frozen=True, slots=True)
class Collective:
    """Issue a collective of a group; a later `Wait` for `work` completes it.

    `text` is the call on the group. `payload` is the number of elements that this rank passes, and their dtype.
    """

    work: str
    group: tuple[int, ...]
    kind: CollectiveKind
    reads: tuple[str, ...]
    writes: tuple[str, ...]
    text: str
    about: Communication
    payload: tuple[int, str]

    def source(self) -> str:
        return f"{self.work} = {group_name(self.group)}.{self.text}"


@dataclass(frozen=True, slots=True)
class SendRecv:
    """Issue a message to ("send") or from ("recv") a rank. `payload`: the number of elements, and their dtype."""

    work: str
    group: tuple[int, ...]
    kind: MessageKind
    peer: int
    buffer: str
    about: Communication
    payload: tuple[int, str]

    def source(self) -> str:
        return f"{self.work} = {group_name(self.group)}.{self.kind}({self.buffer}, {self.group.index(self.peer)})"

    def ends(self, rank: int) -> tuple[int, int]:
        """The sending and the receiving rank, where `rank` issues it."""
        return (rank, self.peer) if self.kind == "send" else (self.peer, rank)


# Instructions that issue a communication, which a `Wait` completes.
CommunicationCall = Collective | SendRecv
# The n-th call in a channel.
CallKey = tuple[object, int]


class Channel(NamedTuple):
    """The collectives of a group, or the messages from one rank to another: n-th calls of its members are one."""

    key: object
    members: tuple[int, ...]


def call_channel(rank: int, call: CommunicationCall) -> Channel:
    """The channel of a call, rank by rank."""
    if isinstance(call, Collective):
        return Channel(call.group, call.group)
    ends = call.ends(rank)
    return Channel((call.group, ends), ends)


@dataclass(frozen=True, slots=True)
class Wait:
    """Wait for a communication. Before, its result must not be read nor its operands written."""

    work: str

    def source(self) -> str:
        return f"{self.work}.wait()"


@dataclass(frozen=True, slots=True)
class Free:
    """Drop buffers that are no longer used."""

    names: tuple[str, ...]

    def source(self) -> str:
        return f"del {', '.join(self.names)}"


Instruction = Launch | View | Allocate | Copy | Reduce | CommunicationCall | Wait | Free


def _part(shape: Sequence[int], among: tuple[int, int] | None) -> str:
    """Python text that takes one block out of a flat buffer."""
    return "" if among is None else f"[{among[0]}:{among[0] + math.prod(shape)}]"


def blocks_text(count: int, shape: Sequence[int], among: tuple[int, int] | None) -> str:
    """Python text that takes blocks of a shape from a flat buffer, where they follow each other.

    With `among`, a pair of an offset and a row length, each block starts at the offset in a row of its own.
    """
    rows = "" if among is None else f".view({count}, {among[1]})[:, {_part(shape, among)[1:]}"
    return f"{rows}.view({tuple_text((count, *shape))})"


def tuple_text(values: Sequence[int]) -> str:
    """Python text of a tuple."""
    return f"({values[0]},)" if len(values) == 1 else f"({', '.join(map(str, values))})"


def group_name(group: tuple[int, ...]) -> str:
    """The name of a group in programs."""
    return "group_" + "_".join(map(str, group))
