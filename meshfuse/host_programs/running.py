"""`HostPrograms`: the programs of some ranks, checked each and together; on simulated ranks, or on the own one."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from types import FrameType
from typing import Any

import torch

from ..argument_checks import as_int
from ..errors import ArgumentError, RankError, SourceLine, caller_line, shown, user_error
from ..executor.bind import BoundProgram, bind_program, communication_of, instruction_at, instruction_of
from ..executor.kernel_errors import kernel_errors
from ..executor.modes import without_modes
from ..executor.simulate import Simulation
from ..executor.spmd import group_labels
from ..host_ir import HostProgram, digest_of
from ..runtime.world import World
from .checking import check_program, check_together


class HostPrograms:
    """The host programs of some ranks: those that a builder wrote, or a definition's, as they are or edited.

    A program is a value: `dataclasses.replace(program, instructions=...)` edits it. Each is checked as meshfuse's own
    are, and all of them together: no read before its wait, no wait without its communication, no rank that waits for
    another for ever.

    Raises DefinitionError for a broken program, and for programs that do not fit together.
    """

    def __init__(self, programs: Iterable[HostProgram]) -> None:
        line, given = caller_line(), list(programs)
        for program in given:
            check_program(program, line)
        _check_ranks(given, line)
        digest = digest_of("\n".join(map(str, given)))
        self.programs = tuple([replace(program, digest=digest) for program in given])
        check_together(self.programs, line)
        self.digest, self.ranks, self._line = digest, tuple([program.rank for program in given]), line
        self._simulations: dict[torch.device, Simulation] = {}
        self._bound: dict[torch.device, RankRun] = {}

    def __getitem__(self, rank: int) -> HostProgram:
        """The program of a rank. Raises ArgumentError for one that has none."""
        number = as_int(rank)
        if number is None or number not in self.ranks:
            raise user_error("HostPrograms: no program of that rank", shown(rank), f"one of {list(self.ranks)}", "",
                             caller_line(), ArgumentError)  # fmt: skip
        return self.programs[self.ranks.index(number)]

    def __iter__(self) -> Iterator[HostProgram]:
        return iter(self.programs)

    def __len__(self) -> int:
        return len(self.programs)

    def __str__(self) -> str:
        return "\n\n".join(map(str, self.programs))

    def simulate(
        self, inputs: Mapping[int, Sequence[Any]], *, seed: int = 0, offset: int = 0
    ) -> dict[int, list[torch.Tensor | None]]:
        """Run all ranks' programs in this process: by rank its results, from each rank's own arguments.

        seed, offset: what kernels of definitions draw random numbers by.

        Raises ArgumentError where a rank's arguments are missing or too many.
        """
        line = caller_line()
        given = dict(inputs) if isinstance(inputs, Mapping) else {}
        if sorted(given) != sorted(self.ranks):
            raise user_error("simulate: inputs", shown(inputs), f"a list of arguments for each of {list(self.ranks)}",
                             "Pass {rank: [tensor, ...], ...}.", line, ArgumentError)  # fmt: skip
        for program in self.programs:
            _check_arguments(program, given[program.rank], line)
        device = _device([x for values in given.values() for x in values])
        if device not in self._simulations:
            self._simulations[device] = Simulation(self.programs, device)
        found = self._simulations[device].run(given, seed, offset)
        return {rank: list(found[rank]) for rank in self.ranks}

    def execute(self, inputs: Sequence[Any], *, seed: int = 0, offset: int = 0) -> list[torch.Tensor | None]:
        """Run this process' rank on its arguments; all ranks that have a program must call this.

        Raises ArgumentError for a rank without a program and for arguments that do not fit, RankError where ranks have
        other programs or one of them fails, and RankTimeout where one does not answer.
        """
        line, world = caller_line(), World.current()
        if max(self.ranks) >= world.size or world.rank not in self.ranks:
            raise user_error(
                f"execute on rank {world.rank} of {world.size}", f"programs of ranks {list(self.ranks)}",
                "a program of this rank, and no rank that does not exist",
                f"Start {max(self.ranks) + 1} ranks with 'meshfuse run --ranks {max(self.ranks) + 1} script.py', or "
                "call simulate.", line, ArgumentError,
            )  # fmt: skip
        _check_arguments(self[world.rank], inputs, line)
        device = _device(inputs)
        if device not in self._bound:
            self._bound[device] = RankRun(self, world, device, self._line)
        return self._bound[device].run(inputs, seed, offset)


class RankRun:
    """One rank's program, bound to its process groups. Raises RankError where the ranks have other programs."""

    def __init__(self, programs: HostPrograms, world: World, device: torch.device, line: SourceLine) -> None:
        self.world, self.device, self.line, self.ranks = world, device, line, programs.ranks
        self.program, self.step = programs[world.rank], 0
        self.name = f"the host programs at {line} ({programs.digest})"
        with world.order_lock:
            world.rendezvous.check_same(
                programs.digest, "the host programs", self.ranks, lambda: str(programs), _SAME_PROGRAMS
            )
            labels = group_labels(self.program)
            self.bound: BoundProgram = bind_program(
                self.program, lambda ranks: world.group(ranks, labels[ranks]), device
            )

    def run(self, arguments: Sequence[Any], seed: int, offset: int) -> list[torch.Tensor | None]:
        self.step += 1
        try:
            with self.world.order_lock, without_modes(self.device), torch.no_grad():
                self.world.begin(self, self.ranks)
                with kernel_errors(self.bound, self.program):
                    return list(self.bound.main(*arguments, seed, offset))
        except RankError as error:
            self._locate(error)
            raise
        except BaseException as error:
            World.leave_off(f"step {self.step} of {self.name}", lambda _: self.ranks, error)
            raise

    def place(self, frame: FrameType | None) -> str:
        """Where in the program a thread with this innermost frame is, in words: for other ranks."""
        about = communication_of(self.program, instruction_of(self.bound, frame))
        return f"in step {self.step}" if about is None else f"{about.description} in step {self.step} at {about.line}"

    def _locate(self, error: RankError) -> None:
        """Add to an error the communication that it came from, and its line."""
        about = communication_of(self.program, instruction_at(self.bound, error.__traceback__))
        if error.where is None:
            place = f"{self.name if about is None else about.description} in step {self.step}: "
            error.where = self.line if about is None else about.line
            error.args, error.ended = (place + error.args[0], *error.args[1:]), place + error.ended


_SAME_PROGRAMS = "Write them on every rank, those of all ranks and all alike."


def _check_ranks(programs: Sequence[HostProgram], line: SourceLine) -> None:
    ranks = [program.rank for program in programs]
    if not ranks or len(set(ranks)) != len(ranks):
        raise user_error("HostPrograms", f"programs of ranks {ranks}", "one program for each of some ranks",
                         "Write the program of each rank once.", line)  # fmt: skip


def _check_arguments(program: HostProgram, given: Any, line: SourceLine) -> None:
    """Raises ArgumentError unless there is one argument for each parameter, a tensor for each tensor."""
    params = program.params
    fits = isinstance(given, (list, tuple)) and len(given) == len(params)
    if not fits or any(
        name[0] == "v" and not isinstance(x, torch.Tensor) for name, x in zip(params, given, strict=True)
    ):
        raise user_error(f"the arguments of rank {program.rank}", shown(given), f"a list of {', '.join(params)}",
                         "Pass this rank's own tensors.", line, ArgumentError)  # fmt: skip


def _device(values: Iterable[Any]) -> torch.device:
    """Where the program runs: where its first tensor is, on the CPU where it takes none."""
    return next((x.device for x in values if isinstance(x, torch.Tensor)), torch.device("cpu"))
