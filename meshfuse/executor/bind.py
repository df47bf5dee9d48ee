"""A host program as a Python function: its text compiled once, its groups and helpers bound."""

from __future__ import annotations

import itertools
import linecache
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import FrameType, TracebackType
from typing import Any

import torch

from ..backends.eager import text_scope
from ..host_ir import HostProgram
from ..lowering.instructions import Communication, CommunicationCall, Instruction, Wait, group_name
from ..runtime.buffers import device_memory

GroupOf = Callable[[tuple[int, ...]], Any]
_numbers = itertools.count(1)


@dataclass(frozen=True, slots=True)
class BoundProgram:
    """A program as a function.

    main: the function that runs the program.
    where: the instruction that each line of its text belongs to.
    scope: the text's globals, the kernels' functions among them, whose places compiled code takes later.
    """

    main: Callable[..., Any]
    where: Mapping[int, Instruction]
    file: str
    scope: dict[str, Any]


def bind_program(
    program: HostProgram, group_of: GroupOf, device: torch.device, simulated: bool = False
) -> BoundProgram:
    """Compile a program's text. `group_of` gives the communication group of some ranks."""
    lines, where = program.lines(simulated)
    text = "\n".join(lines) + "\n"
    # Numbered: the text goes when its program goes, even if another program has the same digest.
    file = f"<meshfuse rank {program.rank} {program.digest}{' simulated' if simulated else ''} {next(_numbers)}>"
    scope = text_scope(program.functions, device)
    scope["M"] = device_memory(device, simulated)
    scope.update({group_name(group): group_of(group) for group in program.groups})
    exec(compile(text, file, "exec"), scope)
    _show_text(file, text, scope["main"])
    return BoundProgram(scope["main"], where, file, scope)


def _show_text(file: str, text: str, main: Callable[..., Any]) -> None:
    """Let tracebacks show the lines of the text for as long as `main` or one of its frames exists."""
    linecache.cache[file] = (len(text), None, text.splitlines(keepends=True), file)
    weakref.finalize(main, linecache.cache.pop, file, None).atexit = False


def instruction_at(bound: BoundProgram, trace: TracebackType | None) -> Instruction | None:
    """The instruction of the program in which an error was raised."""
    found: Instruction | None = None
    while trace is not None:
        if trace.tb_frame.f_code.co_filename == bound.file and trace.tb_lineno in bound.where:
            found = bound.where[trace.tb_lineno]
        trace = trace.tb_next
    return found


def line_in_main(bound: BoundProgram, trace: TracebackType | None) -> int:
    """The line of the program's main function in which an error was raised; 0 where it was not raised in there."""
    found = 0
    while trace is not None:
        if trace.tb_frame.f_code is bound.main.__code__:
            found = trace.tb_lineno
        trace = trace.tb_next
    return found


def instruction_of(bound: BoundProgram, frame: FrameType | None) -> Instruction | None:
    """The instruction of the program that a thread with this innermost frame is in."""
    while frame is not None and frame.f_code.co_filename != bound.file:
        frame = frame.f_back
    return None if frame is None else bound.where.get(frame.f_lineno)


def communication_of(program: HostProgram, instruction: Instruction | None) -> Communication | None:
    """What a communication, or the wait for one, is about; None for any other instruction."""
    works = [i for i in program.instructions if isinstance(i, CommunicationCall)]
    if isinstance(instruction, Wait):
        instruction = next(work for work in works if work.work == instruction.work)
    return instruction.about if isinstance(instruction, CommunicationCall) else None
