"""`HostProgram`: everything one rank does, in order; its text is the Python that is run."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from ..errors import file_name
from .instructions import (
    BufferPart,
    Communication,
    CommunicationCall,
    Instruction,
    Kernel,
    Launch,
    Wait,
    group_name,
)


@dataclass(frozen=True, slots=True)
class HostProgram:
    """The program of one rank.

    `params` are the inputs' names, `outputs` the names returned (None for an output that this rank has no part of).
    `digest` names the definition and the shapes that it was made from, and is equal on all ranks. `notes` are (kernel,
    what computes it and why), for a reader.
    """

    rank: int
    params: tuple[str, ...]
    instructions: tuple[Instruction, ...]
    outputs: tuple[str | None, ...]
    digest: str
    notes: tuple[tuple[str, str], ...] = field(default=(), compare=False, repr=False)

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
        """This rank's communications, in order: each message of a transfer, each part of a call that does several."""
        calls = [i.about for i in self.instructions if isinstance(i, CommunicationCall)]
        return tuple(part for about in calls for part in about.parts or (about,))

    @property
    def groups(self) -> tuple[tuple[int, ...], ...]:
        """The groups that the program communicates in, in the order of their first use."""
        return tuple(dict.fromkeys(i.group for i in self.instructions if isinstance(i, CommunicationCall)))

    def source(self, simulated: bool = False) -> str:
        """The program as Python: a function `main`; with `simulated` a generator that yields where it would wait."""
        return "\n".join(self.lines(simulated)[0])

    def lines(self, simulated: bool = False) -> tuple[list[str], Mapping[int, Instruction]]:
        """(the lines of `source`, by line number from 1 the instruction that the line belongs to)."""
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
        out = [f"# rank {self.rank}", "import torch", "import torch.nn.functional as F", "import meshfuse.kernels as K"]
        out.append("M = meshfuse.executor.buffers.device_memory(device)")
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


def _text(instruction: Instruction, simulated: bool) -> str:
    if simulated and isinstance(instruction, Wait):
        return f"yield {instruction.work}"
    return instruction.source()


def _comment(instruction: Instruction | None) -> str:
    if isinstance(instruction, (Launch, BufferPart)) and instruction.note:
        return f"  # {instruction.note}"
    if not isinstance(instruction, CommunicationCall):
        return ""
    about = instruction.about
    return f"  # {about.tensor}: {about.move}; {about.wire:.0f} bytes; {about.why} {about.line}"


def _where(function: Callable[..., Any]) -> str:
    """Where a registered op's function is written."""
    code = getattr(function, "__code__", None)
    return f"{file_name(code.co_filename)}:{code.co_firstlineno}" if code else repr(function)


def digest_of(text: str) -> str:
    """A short name for a text."""
    return hashlib.sha256(text.encode()).hexdigest()[:16]
