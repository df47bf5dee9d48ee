"""The checks of host programs, as errors for those who wrote them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..errors import MeshfuseError, SourceLine, shown, user_error
from ..host_ir import HostProgram, checked, verify_together
from ..lowering.instructions import Instruction

_NEEDED = "names that are made once, read while they are there and freed once, and one wait for each communication"


def check_program(program: Any, line: SourceLine) -> None:
    """Raises DefinitionError for what is no host program, or a broken one; names the instruction."""
    if not isinstance(program, HostProgram):
        raise user_error("HostPrograms", shown(program), "host programs",
                         "Pass fd.host_program(rank), or builder.program(...).", line)  # fmt: skip
    for instruction in program.instructions:
        if not isinstance(instruction, Instruction):
            raise user_error(f"the host program of rank {program.rank}", shown(instruction), "instructions",
                             "They are classes of meshfuse.lowering.instructions.", line)  # fmt: skip
    last: Instruction | None = None
    try:
        for instruction in checked(program):
            last = instruction
    except AssertionError as error:
        raise _broken(program, last, str(error), line) from None


def _broken(program: HostProgram, last: Instruction | None, problem: str, line: SourceLine) -> MeshfuseError:
    """The error of a program whose check ended behind an instruction; None for its end."""
    where = "its end" if last is None else f"`{last.source()}`"
    return user_error(
        f"the host program of rank {program.rank} is broken at {where}", problem.replace(f": {last}", ""), _NEEDED,
        "print(program) shows what runs.", line,
    )  # fmt: skip


def check_together(programs: Sequence[HostProgram], line: SourceLine) -> None:
    """Raises DefinitionError where ranks do not issue the same communication in an order in which all of it ends."""
    try:
        verify_together(programs)
    except AssertionError as error:
        raise user_error(
            "the host programs of these ranks do not fit together", str(error),
            "the same collectives with equal sizes in each group, and a receive for each send, in one order",
            "Write the programs of all ranks with one function of the rank.", line,
        ) from None  # fmt: skip
