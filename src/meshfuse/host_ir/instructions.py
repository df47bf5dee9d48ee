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

    Results go to new tensors, but for those that it writes into parameters of its own (`written`: their places).
    `functions` are those of registered ops that its lines call as OP.name. `work` has of every op the operations of one
    call, and the bytes that it reads and writes at least. `origins` tells of every line the op and the user's line.
    Before its lines it does `unpacks`, which make values that these read out of what was received, and after them
    `packs`, which make what is sent.
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
        """The line that its text begins with."""
        return f"def {self.name}({', '.join(self.params)}):"

    @property
    def before(self) -> int:
        """How many lines of its text come before those of its ops."""
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
    """Run a kernel. `note` says for a reader which part of a loop it is."""

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
    """A name for a part of a buffer that one chunk of a loop writes: parts of one buffer share no element."""

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
    """Boxes of a tensor behind each other in a flat buffer."""

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
    """Equal blocks of a tensor along one dim, behind each other in a flat buffer: what a `Join` puts together again."""

    target: str
    source_name: str
    blocks: int
    shape: tuple[int, ...]
    dim: int

    @property
    def is_view(self) -> bool:
        """True where the blocks lie one behind the other already."""
        return math.prod(self.shape[: self.dim]) == 1

    def source(self) -> str:
        cut = (*self.shape[: self.dim], self.blocks, self.shape[self.dim] // self.blocks, *self.shape[self.dim + 1 :])
        return f"{self.target} = M.dense({self.source_name}.view({_tuple(cut)}).movedim({self.dim}, 0)).view(-1)"


@dataclass(frozen=True, slots=True)
class Put:
    """Write a part of a tensor or of a flat buffer into a box of the target.

    `part` is the Python text that takes the part of the source.
    """

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
class Fold:
    """Terms of a reduction behind each other in a flat buffer reduced, with the rank's own if one is given.

    `part` is the Python text that takes the rank's own term from the tensor `own`. `among`: see `_blocks`.
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
    """The blocks of a gathered flat buffer put together along one dim. `among`: see `_blocks`."""

    target: str
    source_name: str
    blocks: int
    block_shape: tuple[int, ...]
    dim: int
    among: tuple[int, int] | None = None

    @property
    def is_view(self) -> bool:
        """True where the blocks one behind the other are the joined tensor."""
        return self.among is None and (self.dim == 0 or self.block_shape[: self.dim].count(1) == self.dim)

    @property
    def text(self) -> str:
        """Python text that makes of the flat buffer the joined tensor."""
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
    """Tensors behind each other in a new flat buffer, or of each the part that a Python text takes."""

    target: str
    source_names: tuple[str, ...]
    parts: tuple[str, ...] = ()

    def source(self) -> str:
        taken = map(str.__add__, self.source_names, self.parts) if self.parts else self.source_names
        return f"{self.target} = M.cat([{', '.join(taken)}])"


@dataclass(frozen=True, slots=True)
class Unflatten:
    """A tensor of this shape that is a part of a flat buffer."""

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
    """Where a collective comes from and what it costs: the ring-counted bytes of this rank. `kind` is that of the move,
    and `move` its text; `why` and `line` say who asked for it. `parts` are those that one call does together.
    """

    kind: str
    axes: str
    tensor: str
    wire: float
    why: str
    line: SourceLine
    move: str
    parts: tuple[Communication, ...] = ()

    @property
    def said(self) -> str:
        """What it moves, and for whom, as errors say it."""
        return f"{self.kind} of {self.tensor} over {self.axes or 'two meshes'} ({self.why})"


# As the methods of groups are called.
CollectiveKind = Literal["all_reduce", "all_gather", "all_to_all", "broadcast"]
MessageKind = Literal["send", "recv"]


@dataclass(frozen=True, slots=True)
class Collective:
    """A collective of a group, issued; its Wait, for `work`, comes later. `text` is the call on the group, and
    `payload` how many elements a rank gives, with their dtype.
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
    """A message to (send) or from (recv) one rank of a group, issued. `payload`: its elements, and their dtype."""

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
        """From which rank to which the message goes that this rank issues."""
        return (rank, self.peer) if self.kind == "send" else (self.peer, rank)


# What issues a communication, which a `Wait` ends.
CommunicationCall = Collective | SendRecv
# The n-th collective of a group, or the n-th message from one rank to another.
Meeting = tuple[object, int]


def meeting_place(rank: int, call: CommunicationCall) -> tuple[object, int]:
    """Among what a rank's call is counted, as the n-th calls of all meet: a group's collectives, or the messages from
    one rank to another; and how many ranks meet there.
    """
    if isinstance(call, Collective):
        return call.group, len(call.group)
    return (call.group, call.ends(rank)), 2


@dataclass(frozen=True, slots=True)
class Wait:
    """Until the work is done, what it writes must not be read, nor what it reads be written."""

    work: str

    def source(self) -> str:
        return f"{self.work}.wait()"


@dataclass(frozen=True, slots=True)
class Free:
    """The last use of these buffers is over."""

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
    | Fold
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
    """Python text that takes blocks of a shape from a flat buffer: one behind the other, or each `among` others in a
    row (where it begins there, how long a row is).
    """
    rows = "" if among is None else f".view({count}, {among[1]})[:, {_part(shape, among)[1:]}"
    return f"{rows}.view({_tuple((count, *shape))})"


def _tuple(values: Sequence[int]) -> str:
    return f"({values[0]},)" if len(values) == 1 else f"({', '.join(map(str, values))})"


def group_name(group: tuple[int, ...]) -> str:
    """The name of a group in programs."""
    return "group_" + "_".join(map(str, group))
