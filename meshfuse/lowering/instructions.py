"""The instructions of a host program. Each is a value, and prints as the Python that runs it."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from ..dtypes import DataType
from ..errors import SourceLine
from .boxes import Box, box_text


@dataclass(frozen=True, slots=True)
class Kernel:
    """A segment on one rank: a local function of tensors and scalars, one line of torch code per op.

    written: the places of parameters that it writes results into; all other results are new tensors.
    functions: of registered ops, which lines call as OP.name.
    work: for every op its operations, and the bytes that it reads and writes at least.
    origins: for every line the op, and the user's line.
    unpacks: done first: they make values that the lines read from what was received.
    packs: done last: they make what is sent of the results.
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
    def before(self) -> int:
        """How many lines of its text stand before those of its ops."""
        return bool(self.written) + 1 + len(self.unpacks)

    def source(self) -> list[str]:
        # torch refuses to write into an existing tensor what gradients could be asked of.
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
    """Run a kernel. `note` tells a reader which part of a loop this is."""

    kernel: Kernel
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    note: str = ""

    @property
    def written(self) -> tuple[str, ...]:
        """The buffers among its inputs that it writes into."""
        return tuple(self.inputs[place] for place in self.kernel.written)

    def source(self) -> str:
        call = f"{self.kernel.name}({', '.join(self.inputs)})"
        return f"{', '.join(self.outputs)} = {call}" if self.outputs else call


@dataclass(frozen=True, slots=True)
class Slice:
    """A part of a tensor: what a rank keeps when a replicated dim becomes sharded."""

    target: str
    source_name: str
    box: Box
    shape: tuple[int, ...]

    def source(self) -> str:
        return f"{self.target} = {self.source_name}{box_text(self.box, self.shape)}"


@dataclass(frozen=True, slots=True)
class BufferPart:
    """A name for the part of a buffer that one chunk of a loop writes. Parts of a buffer share no element."""

    target: str
    source_name: str
    box: Box
    shape: tuple[int, ...]
    note: str = ""

    def source(self) -> str:
        return f"{self.target} = {self.source_name}{box_text(self.box, self.shape)}"


@dataclass(frozen=True, slots=True)
class Allocate:
    """A new buffer, filled with a number (Python text) if one is given."""

    target: str
    shape: tuple[int, ...]
    dtype: DataType
    fill: str = ""

    def source(self) -> str:
        make = f"M.full({_tuple(self.shape)}, {self.fill}" if self.fill else f"M.empty({_tuple(self.shape)}"
        return f"{self.target} = {make}, torch.{self.dtype.value})"


@dataclass(frozen=True, slots=True)
class Own:
    """A contiguous tensor that may be written to: a copy, unless the source is fresh and dies here."""

    target: str
    source_name: str
    fresh: bool

    def source(self) -> str:
        return f"{self.target} = M.{'dense' if self.fresh else 'clone'}({self.source_name})"


@dataclass(frozen=True, slots=True)
class Pack:
    """Copy boxes of a tensor into a flat buffer, one after the other."""

    target: str
    source_name: str
    boxes: tuple[Box, ...]
    shape: tuple[int, ...]

    def source(self) -> str:
        if len(self.boxes) == 1:
            box = box_text(self.boxes[0], self.shape)
            return f"{self.target} = M.dense({self.source_name}{box}).view(-1)"
        parts = ", ".join(f"{self.source_name}{box_text(box, self.shape)}" for box in self.boxes)
        return f"{self.target} = M.cat([{parts}])" if self.boxes else f"{self.target} = {self.source_name}.new_empty(0)"


@dataclass(frozen=True, slots=True)
class Deal:
    """Copy equal blocks of a tensor along one dim into a flat buffer, one after the other: a `Join` undoes it."""

    target: str
    source_name: str
    blocks: int
    shape: tuple[int, ...]
    dim: int

    @property
    def is_view(self) -> bool:
        """Whether the blocks lie one after the other already, so that nothing is copied."""
        return math.prod(self.shape[: self.dim]) == 1

    def source(self) -> str:
        cut = (*self.shape[: self.dim], self.blocks, self.shape[self.dim] // self.blocks, *self.shape[self.dim + 1 :])
        return f"{self.target} = M.dense({self.source_name}.view({_tuple(cut)}).movedim({self.dim}, 0)).view(-1)"


@dataclass(frozen=True, slots=True)
class Put:
    """Copy a tensor, or a flat buffer, into a box of the target; `part` is Python text that takes a part of it."""

    target: str
    box: Box
    shape: tuple[int, ...]
    source_name: str
    part: str = ""

    @property
    def value(self) -> str:
        return self.source_name + self.part

    def source(self) -> str:
        return f"{self.target}{box_text(self.box, self.shape, assign=True)} = {self.value}"


@dataclass(frozen=True, slots=True)
class Reduce:
    """Reduce terms that stand one after the other in a flat buffer.

    `own` is a tensor with the rank's own term, if that is not among them; `part` is Python text that takes it. `among`:
    see `_blocks`.
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
            term = f"{self.source_name}{_part(self.shape, self.among)}.view({_tuple(self.shape)})"
            return f"{self.target} = M.combine({own}, {term}, {self.reduce!r})"
        folded = f"M.fold({self.source_name}{_blocks(self.terms, self.shape, self.among)}, {self.reduce!r})"
        return f"{self.target} = " + (f"M.combine({own}, {folded}, {self.reduce!r})" if own else folded)


@dataclass(frozen=True, slots=True)
class Join:
    """Put the blocks of a flat buffer together along one dim. `among`: see `_blocks`."""

    target: str
    source_name: str
    blocks: int
    block_shape: tuple[int, ...]
    dim: int
    among: tuple[int, int] | None = None

    @property
    def is_view(self) -> bool:
        """Whether the blocks, one after the other, are the joined tensor already."""
        return self.among is None and (self.dim == 0 or self.block_shape[: self.dim].count(1) == self.dim)

    @property
    def text(self) -> str:
        """Python text that makes the joined tensor."""
        if self.is_view:
            return f".view({_tuple(self._shape)})"
        return f"{self._in_place}.reshape({_tuple(self._shape)})"

    @property
    def _in_place(self) -> str:
        return f"{_blocks(self.blocks, self.block_shape, self.among)}.movedim(0, {self.dim})"

    @property
    def _shape(self) -> tuple[int, ...]:
        return tuple(n * self.blocks if d == self.dim else n for d, n in enumerate(self.block_shape))

    def source(self) -> str:
        if self.is_view:
            return f"{self.target} = {self.source_name}{self.text}"
        return f"{self.target} = M.clone({self.source_name}{self._in_place}).view({_tuple(self._shape)})"


@dataclass(frozen=True, slots=True)
class Flatten:
    """Copy tensors, or of each the part that a Python text takes, into a new flat buffer, one after the other."""

    target: str
    source_names: tuple[str, ...]
    parts: tuple[str, ...] = ()

    def source(self) -> str:
        taken = map(str.__add__, self.source_names, self.parts) if self.parts else self.source_names
        return f"{self.target} = M.cat([{', '.join(taken)}])"


@dataclass(frozen=True, slots=True)
class Unflatten:
    """A part of a flat buffer as a tensor of this shape."""

    target: str
    source_name: str
    start: int
    stop: int
    shape: tuple[int, ...]

    def source(self) -> str:
        part = f"{self.source_name}[{self.start}:{self.stop}]"
        return f"{self.target} = {part}.view({_tuple(self.shape) if self.shape else '()'})"


@dataclass(frozen=True, slots=True)
class Communication:
    """What a collective is for, and what it costs: `wire` is this rank's bytes, counted as rings.

    `kind` is the kind of the move, `move` its text. `why` and `line` tell who asked for it. `parts` are those moves
    that one call does together.
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
        """What is moved and for whom, as errors say it."""
        return f"{self.kind} of {self.tensor} over {self.axes or 'two meshes'} ({self.why})"


# As the methods of groups are called.
CollectiveKind = Literal["all_reduce", "all_gather", "all_to_all", "broadcast"]
MessageKind = Literal["send", "recv"]


@dataclass(frozen=True, slots=True)
class Collective:
    """A collective of a group, issued; its Wait, for `work`, comes later.

    `text` is the call on the group; `payload` is how many elements the rank passes, and their dtype.
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
    """A message to ("send") or from ("recv") a rank of a group, issued; `payload` is its elements and their dtype."""

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
        """(rank that sends, rank that receives), if this rank issues it."""
        return (rank, self.peer) if self.kind == "send" else (self.peer, rank)


# What issues a communication, which a `Wait` ends.
CommunicationCall = Collective | SendRecv
# The n-th collective of a group, or the n-th message from one rank to another.
CallKey = tuple[object, int]


def call_channel(rank: int, call: CommunicationCall) -> tuple[object, int]:
    """(what a call is counted among, how many ranks meet there): the n-th calls of all ranks in one place meet.

    A place is a group's collectives, or the messages from one rank to another.
    """
    if isinstance(call, Collective):
        return call.group, len(call.group)
    return (call.group, call.ends(rank)), 2


@dataclass(frozen=True, slots=True)
class Wait:
    """Wait for a work. Until then what it writes must not be read, nor what it reads be written."""

    work: str

    def source(self) -> str:
        return f"{self.work}.wait()"


@dataclass(frozen=True, slots=True)
class Free:
    """These buffers are not used any more."""

    names: tuple[str, ...]

    def source(self) -> str:
        return f"del {', '.join(self.names)}"


Instruction = (
    Launch
    | Slice
    | BufferPart
    | Allocate
    | Own
    | Pack
    | Deal
    | Put
    | Reduce
    | Join
    | Flatten
    | Unflatten
    | CommunicationCall
    | Wait
    | Free
)


def _part(shape: Sequence[int], among: tuple[int, int] | None) -> str:
    """Python text that takes one block out of a flat buffer of several."""
    return "" if among is None else f"[{among[0]}:{among[0] + math.prod(shape)}]"


def _blocks(count: int, shape: Sequence[int], among: tuple[int, int] | None) -> str:
    """Python text that takes blocks of a shape from a flat buffer: they stand one after the other.

    With `among`, (where it begins there, how long a row is), each block stands in a row among others.
    """
    rows = "" if among is None else f".view({count}, {among[1]})[:, {_part(shape, among)[1:]}"
    return f"{rows}.view({_tuple((count, *shape))})"


def _tuple(values: Sequence[int]) -> str:
    return f"({values[0]},)" if len(values) == 1 else f"({', '.join(map(str, values))})"


def group_name(group: tuple[int, ...]) -> str:
    """The name of a group in programs."""
    return "group_" + "_".join(map(str, group))
