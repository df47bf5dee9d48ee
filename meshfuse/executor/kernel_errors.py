"""Errors of torch in a kernel, in terms of the user's op and line."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from types import FrameType, TracebackType

import torch

from ..errors import KernelError, MeshfuseError, SourceLine, error_text, user_error
from ..host_ir import HostProgram
from ..kernels.indices import IndexOutOfRange
from ..lowering.instructions import CommunicationCall, Instruction, Kernel, Launch
from .bind import BoundProgram, instruction_at


class OutOfMemoryError(MeshfuseError, torch.OutOfMemoryError):
    """There is no memory for what an op makes, or for a communication's buffer.

    Torch's own class, with the user's line.
    """


@contextlib.contextmanager
def kernel_errors(bound: BoundProgram, program: HostProgram) -> Iterator[None]:
    """Turn torch's errors in the program that runs inside this context into errors of the user's op and line.

    An error in a kernel's line becomes a KernelError that names the op and its operands; a lack of memory becomes an
    OutOfMemoryError. Other errors pass as they are.
    """
    try:
        yield
    except KernelError as error:
        frame = _kernel_frame(bound, error.__traceback__)
        place = _kernel_line(program, *frame) if frame else None
        error.where = error.where or (place[0].origins[place[1]][1] if place else None)
        raise
    except MeshfuseError:
        raise
    except Exception as error:
        # A generator, as the programs of simulated ranks are, gives a StopIteration from inside another class.
        cause = error.__cause__ if isinstance(error.__cause__, StopIteration) else error
        frame = _kernel_frame(bound, cause.__traceback__)
        if _is_out_of_memory(cause):
            raise _out_of_memory(bound, program, cause, frame) from cause
        found = _kernel_error(program, cause, *frame) if frame else None
        if found is None:
            raise
        raise found from cause


def _is_out_of_memory(error: BaseException) -> bool:
    """Whether torch had no memory: on a device it has a class for that, on the host a text."""
    return isinstance(error, torch.OutOfMemoryError) or (
        type(error) is RuntimeError
        and any(text in str(error) for text in ("can't allocate memory", "not enough memory"))
    )


def _out_of_memory(
    bound: BoundProgram, program: HostProgram, error: Exception, frame: tuple[FrameType, int] | None
) -> MeshfuseError:
    """The error of a lack of memory: for what, in which line, and what the user can do."""
    place = _kernel_line(program, *frame) if frame else None
    what, where = (
        _purpose(program, instruction_at(bound, error.__traceback__)) if place is None else _op_and_line(*place)
    )
    return user_error(
        f"no memory for {what} on rank {program.rank}", error_text(error), "less at once",
        "print(fd.memory()) tells what a rank holds, and in which op most; split more of it, or bound it: "
        "FusionDefinition(max_memory=...).", where, OutOfMemoryError,
    )  # fmt: skip


def _op_and_line(kernel: Kernel, place: int) -> tuple[str, SourceLine | None]:
    """(the op in a kernel's line, with the user's name for it; the user's line)."""
    op, where = kernel.origins[place]
    return where.label(op), where


def _purpose(program: HostProgram, instruction: Instruction | None) -> tuple[str, SourceLine | None]:
    """(what an instruction is for, the user's line): a kernel's last op, else this or the next communication."""
    if isinstance(instruction, Launch) and instruction.kernel.origins:
        return _op_and_line(instruction.kernel, -1)
    start = program.instructions.index(instruction) if instruction in program.instructions else 0
    following = program.instructions[start:] if instruction is not None else ()
    about = next((i.about for i in following if isinstance(i, CommunicationCall)), None)
    return ("a step", None) if about is None else (about.description, about.line)


def _kernel_frame(bound: BoundProgram, trace: TracebackType | None) -> tuple[FrameType, int] | None:
    """The innermost frame of the program's own text in which the error was raised, and its line; None for none."""
    found = None
    while trace is not None:
        if trace.tb_frame.f_code.co_filename == bound.file:
            found = (trace.tb_frame, trace.tb_lineno)
        trace = trace.tb_next
    return found


def _kernel_line(program: HostProgram, frame: FrameType, line: int) -> tuple[Kernel, int] | None:
    """(kernel, index of the op's line in it) for a line of a frame; None for a line of no kernel."""
    kernel = next((k for k in program.kernels if k.name == frame.f_code.co_name), None)
    if kernel is None:
        return None
    place = line - frame.f_code.co_firstlineno - kernel.before
    return (kernel, place) if 0 <= place < len(kernel.origins) else None


def _kernel_error(program: HostProgram, error: Exception, frame: FrameType, line: int) -> MeshfuseError | None:
    """The error of an op's kernel; None where it was raised outside of any op's line."""
    found = _kernel_line(program, frame, line)
    if found is None:
        return None
    kernel, place = found
    op, where = kernel.origins[place]
    if isinstance(error, IndexOutOfRange):
        return _out_of_range(program, error, frame, where.label(op), where)
    return user_error(
        f"{where.label(op)} cannot be computed on rank {program.rank}",
        f"{error_text(error)} (in `{kernel.lines[place]}`; {_operands(frame, kernel.lines[place])})",
        "operands that torch has a kernel for", "Cast them with fd.ops.cast, or pass other values.", where, KernelError,
    )  # fmt: skip


def _out_of_range(
    program: HostProgram, error: IndexOutOfRange, frame: FrameType, label: str, where: SourceLine
) -> MeshfuseError:
    tensors = {n: v for n, v in frame.f_locals.items() if isinstance(v, torch.Tensor) and v is error.index}
    inside = "".join(f" in {name}: {_kind(value)}" for name, value in list(tensors.items())[:1])
    return user_error(
        f"{label}: an index is out of range on rank {program.rank}", f"{error.value}{inside}",
        f"{error.low} to {error.size - 1}, as the dim has size {error.size}", "Pass indices that the dim has.", where,
        KernelError,
    )  # fmt: skip


def _kind(value: torch.Tensor) -> str:
    return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"


def _operands(frame: FrameType, text: str) -> str:
    """Names, dtypes and shapes of the local tensors that a line mentions."""
    tensors = {name: value for name, value in frame.f_locals.items() if isinstance(value, torch.Tensor)}
    found = [f"{n}: {_kind(t)}" for n, t in tensors.items() if n in text]
    return ", ".join(found) or "no operands"
