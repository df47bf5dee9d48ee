"""The instructions of a host program. Each is a value, and prints as the Python that runs it."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from ..dtypes import DataType
from ..errors import SourceLine
from ..sharding.layout import Runs

# Per dim the positions within a local tensor.
Box = tuple[Runs, ...]


@dataclass(frozen=True, slots=True)
class Kernel:
    """A segment on one rank: a local function of tensors and scalars, one line of torch code per op.

    `functions` are those of registered ops that its lines call as OP.name.
    """

    name: str
    params: tuple[str, ...]
    lines: tuple[str, ...]
    results: tuple[str, ...]
    functions: tuple[tuple[str, Callable[..., Any]], ...] = ()

    def source(self) -> list[str]:
        returned = ", ".join(self.results)
        return [
            f"def {self.name}({', '.join(self.params)}):",
            *(f"    {line}" for line in self.lines),
            f"    return {returned}",
        ]


@dataclass(frozen=True, slots=True)
class Launch:
    """Run a kernel."""

    kernel: Kernel
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]

    def source(self) -> str:
        call = f"{self.kernel.name}({', '.join(self.inputs)})"
        return f"{', '.join(self.outputs)} = {call}" if self.outputs else call


@dataclass(frozen=True, slots=True)
class View:
    """A part of a tensor: what a rank keeps when a replicated dim becomes sharded."""

    target: str
    source_name: str
    box: Box
    shape: tuple[int, ...]

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
        make = f"torch.full({_tuple(self.shape)}, {self.fill}" if self.fill else f"torch.empty({_tuple(self.shape)}"
        return f"{self.target} = {make}, dtype=torch.{self.dtype.value}, device=device)"


@dataclass(frozen=True, slots=True)
class Own:
    """A contiguous tensor that may be written to: a copy, unless the source is fresh and dies here."""

    target: str
    source_name: str
    fresh: bool

    def source(self) -> str:
        call = "contiguous()" if self.fresh else "clone(memory_format=torch.contiguous_format)"
        return f"{self.target} = {self.source_name}.{call}"


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
            return f"{self.target} = {self.source_name}{box}.reshape(-1).contiguous()"
        parts = ", ".join(f"{self.source_name}{box_text(box, self.shape)}.reshape(-1)" for box in self.boxes)
        return (
            f"{self.target} = torch.cat([{parts}])"
            if self.boxes
            else f"{self.target} = {self.source_name}.new_empty(0)"
        )


@dataclass(frozen=True, slots=True)
class Put:
    """Write a part of a tensor or of a flat buffer into a box of the target."""

    target: str
    box: Box
    shape: tuple[int, ...]
    value: str

    def source(self) -> str:
        return f"{self.target}{box_text(self.box, self.shape, assign=True)} = {self.value}"


@dataclass(frozen=True, slots=True)
class Fold:
    """Terms of a reduction behind each other in a flat buffer, and the rank's own (Python text) if given, reduced."""

    target: str
    source_name: str
    terms: int
    shape: tuple[int, ...]
    reduce: str
    own: str = ""

    def source(self) -> str:
        if self.own and self.terms == 1:
            term = f"{self.source_name}.view({_tuple(self.shape)})"
            return f"{self.target} = K.combine({self.own}, {term}, {self.reduce!r})"
        folded = f"K.fold({self.source_name}.view({_tuple((self.terms, *self.shape))}), {self.reduce!r})"
        return f"{self.target} = " + (f"K.combine({self.own}, {folded}, {self.reduce!r})" if self.own else folded)


@dataclass(frozen=True, slots=True)
class Join:
    """The blocks of a gathered flat buffer put together along one dim."""

    target: str
    source_name: str
    blocks: int
    block_shape: tuple[int, ...]
    dim: int

    def source(self) -> str:
        shape = list(self.block_shape)
        shape[self.dim] *= self.blocks
        if self.dim == 0 or self.block_shape[: self.dim].count(1) == self.dim:
            return f"{self.target} = {self.source_name}.view({_tuple(tuple(shape))})"
        text = f"{self.source_name}.view({_tuple((self.blocks, *self.block_shape))}).movedim(0, {self.dim})"
        return f"{self.target} = {text}.reshape({_tuple(tuple(shape))})"


@dataclass(frozen=True, slots=True)
class Communication:
    """Where a collective comes from and what it costs: the ring-counted bytes of this rank."""

    kind: str
    axes: str
    tensor: str
    wire: float
    why: str
    line: SourceLine
    move: str


@dataclass(frozen=True, slots=True)
class Collective:
    """A collective of a group, issued; its Wait comes later. `text` is the call on the group."""

    work: str
    group: tuple[int, ...]
    kind: str
    reads: tuple[str, ...]
    writes: tuple[str, ...]
    text: str
    about: Communication
    payload: tuple[int, str]

    def source(self) -> str:
        return f"{self.work} = {group_name(self.group)}.{self.text}"


@dataclass(frozen=True, slots=True)
class SendRecv:
    """A message to (send) or from (recv) one rank of a group, issued."""

    work: str
    group: tuple[int, ...]
    kind: str
    peer: int
    buffer: str
    about: Communication
    payload: tuple[int, str]

    def source(self) -> str:
        return f"{self.work} = {group_name(self.group)}.{self.kind}({self.buffer}, {self.group.index(self.peer)})"


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


Instruction = Launch | View | Allocate | Own | Pack | Put | Fold | Join | Collective | SendRecv | Wait | Free


def _tuple(values: Sequence[int]) -> str:
    return f"({values[0]},)" if len(values) == 1 else f"({', '.join(map(str, values))})"


def group_name(group: tuple[int, ...]) -> str:
    """The name of a group in programs."""
    return "group_" + "_".join(map(str, group))


def box_text(box: Box, shape: Sequence[int], assign: bool = False) -> str:
    """Python index text of a box; nothing where it is the whole tensor."""
    parts = [_part_text(part, n) for part, n in zip(box, shape, strict=True)]
    lists = sum(part.startswith("K.") for part in parts)
    if not lists:
        while parts and parts[-1] == ":":
            parts.pop()
        return f"[{', '.join(parts)}]" if parts else "[...]" if assign else ""
    return f"[K.grid({', '.join(f'K.positions({part!r})' for part in box)})]"


def _part_text(part: Runs, n: int) -> str:
    if part == ((0, n),):
        return ":"
    if len(part) == 1:
        return f"{part[0][0]}:{part[0][1]}"
    if not part:
        return "0:0"
    step = _stride(part)
    return step if step else f"K.positions({part!r})"


def _stride(part: Runs) -> str:
    """Slice text where the runs are single steps at equal distances."""
    if any(b - a != 1 for a, b in part):
        return ""
    step = part[1][0] - part[0][0]
    if any(b[0] - a[0] != step for a, b in itertools.pairwise(part)):
        return ""
    return f"{part[0][0]}:{part[-1][1]}:{step}"
