"""A definition and its compiled programs, one per set of shapes, and questions about them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import torch

from .argument_checks import check_flags
from .compiler import CompiledProgram, compile_definition
from .definition.builder import DefinitionBuilder
from .definition.tensor_view import TensorView
from .errors import DefinitionError, SourceLine, caller_line, located, user_error
from .executor.arguments import Inputs, compile_shapes, scalar_values, with_open_sizes
from .executor.dtensor import as_dtensor, placeable
from .graph import shape_scalars
from .host_ir import HostProgram
from .mesh import DeviceMesh
from .planner.effort import effort_of
from .report.bill import Bill, bill_of
from .report.explain import explain_all, explain_tensor
from .report.memory import Memory, modelled_memory, watch_memory
from .report.plan_warning import MAX_MEMORY, MAX_WIRE, bound, watch
from .reshard.borders import Borders
from .sharding.layout import Layout
from .sharding.value import Sharding


class Holder(Protocol):
    """Something that runs a program, and may replace it by another after some runs."""

    @property
    def compiled(self) -> CompiledProgram: ...


class ProgramKey(NamedTuple):
    """What a definition is compiled for.

    shapes: global shapes by input tensor, in order.
    scalars: by number the scalars that sizes depend on, in order.
    default_mesh: the mesh where no annotation names one.
    dtensors: as in `Inputs`.
    """

    shapes: tuple[tuple[int, tuple[int, ...]], ...]
    scalars: tuple[tuple[int, Any], ...]
    default_mesh: DeviceMesh
    dtensors: tuple[tuple[int, tuple[Layout, ...]], ...] | None


class PlannedDefinition(DefinitionBuilder):
    """The part of `FusionDefinition` that compiles, and answers questions about plans.

    `max_wire`, `max_memory` and `search` are those of FusionDefinition. The methods that ask about a plan take global
    `shapes`, one per input tensor, and without them mean the latest program: the one that ran or was compiled last.
    """

    def __init__(self, max_wire: float | None, max_memory: float | None, search: str | None) -> None:
        super().__init__()
        self.max_wire = bound(MAX_WIRE, max_wire, caller_line())
        self.max_memory = bound(MAX_MEMORY, max_memory, caller_line())
        self.effort = effort_of(search, caller_line())
        self._compiled: dict[ProgramKey, CompiledProgram] = {}
        self._latest: Holder | None = None  # What ran last, unless something was compiled since.
        self._shape_scalars: frozenset[int] | None = None

    def sized_by(self) -> frozenset[int]:
        """The scalar inputs whose values sizes depend on. Asking for them closes the definition."""
        if self._shape_scalars is None:
            self._open = False
            self._shape_scalars = shape_scalars(self)
        return self._shape_scalars

    def _compile(
        self,
        given: Inputs,
        shapes: dict[int, tuple[int, ...]],
        default_mesh: DeviceMesh,
        line: SourceLine,
        near_factor: float = 1.0,
    ) -> CompiledProgram:
        """The program for these shapes.

        With a `near_factor` over 1 it may take over the plan of other shapes, all of whose sizes are within that
        factor.
        """
        missing = [f"s{i}" for i in sorted(self.sized_by()) if i not in given.scalars]
        if missing:
            raise user_error(
                "compile needs the scalars that sizes depend on", "none", ", ".join(missing),
                "Pass scalars={val: number}.",
                line,
            )  # fmt: skip
        try:
            with located(line):
                return self._compile_sizes(given, shapes, default_mesh, line, near_factor)
        except DefinitionError as error:
            raise with_open_sizes(self, shapes, error) from None

    def _compile_sizes(
        self,
        given: Inputs,
        shapes: dict[int, tuple[int, ...]],
        default_mesh: DeviceMesh,
        line: SourceLine,
        near_factor: float,
    ) -> CompiledProgram:
        key = self._program_key(given, shapes, default_mesh)
        if key not in self._compiled:
            self._compiled[key] = self._planned(key, near_factor)
            self._latest = None
            watch(self._compiled[key], self.max_wire, line)
            watch_memory(self._compiled[key], self.max_memory, line)
        return self._compiled[key]

    def _planned(self, key: ProgramKey, near_factor: float = 1.0) -> CompiledProgram:
        shapes, scalars = dict(key.shapes), dict(key.scalars)
        borders = None if key.dtensors is None else Borders(placeable, as_dtensor, dict(key.dtensors))
        return compile_definition(
            self, shapes, scalars, key.default_mesh, self.max_memory, near_factor, self.effort, borders
        )

    def _program_key(
        self, given: Inputs, shapes: Mapping[int, tuple[int, ...]], default_mesh: DeviceMesh
    ) -> ProgramKey:
        scalars = {i: given.scalars[i] for i in self.sized_by()}
        return ProgramKey(tuple(sorted(shapes.items())), tuple(sorted(scalars.items())), default_mesh, given.dtensors)

    def _renewed(
        self, old: CompiledProgram, given: Inputs, shapes: dict[int, tuple[int, ...]], default_mesh: DeviceMesh
    ) -> CompiledProgram:
        """A program with a plan of its own, in the place of `old`, whose plan was taken over from other shapes.

        It is `old` itself if the outputs would be sharded otherwise.
        """
        key = self._program_key(given, shapes, default_mesh)
        new = self._planned(key)
        self._compiled[key] = new if new.output_shardings() == old.output_shardings() else old
        return self._compiled[key]

    def compile(self, *shapes: Sequence[int], scalars: Mapping[int, Any] | None = None) -> CompiledProgram:
        """Compile for these global shapes, one per input tensor; without shapes, for the sizes in the definition.

        `scalars` gives the values of scalar inputs that sizes depend on, by Val. Raises DefinitionError where a size is
        left open, and at the user's line where an op cannot take the sizes.
        """
        line = caller_line()
        given = Inputs({}, scalar_values(self, scalars, line), torch.device("cpu"))
        return self._compile(given, compile_shapes(self, shapes, line), DeviceMesh([0]), line)

    # asking

    def latest(self, shapes: Sequence[Sequence[int]] = ()) -> CompiledProgram:
        """The program that ran or was compiled last, for these shapes if any are given; compiled if there is none."""
        if self._latest is not None and not shapes:
            return self._latest.compiled
        wanted = tuple(sorted(compile_shapes(self, shapes, caller_line()).items())) if shapes else None
        for key, compiled in reversed(self._compiled.items()):
            if wanted in (None, key.shapes):
                return compiled
        return self.compile(*shapes)

    def explain(self, tensor: TensorView | None = None, *shapes: Sequence[int]) -> str:
        """Why a tensor is sharded as it is, and what is communicated for it; without a tensor a table of them all."""
        line = caller_line()
        if tensor is None:
            return explain_all(self.latest(shapes))
        return explain_tensor(self.latest(shapes), self._own(tensor, "explain", line).id)

    def bill(self, *shapes: Sequence[int], alternatives: bool = False) -> Bill:
        """The bytes that each rank sends, and their modelled seconds, by collective, mesh axis and source line.

        With `alternatives` each collective also has its runner-up: the best plan in which one of the annotations behind
        it is another one. That takes as long as some compilations; `print(bill.details())` shows them.
        """
        check_flags(caller_line(), alternatives=alternatives)
        return bill_of(self.latest(shapes), alternatives)

    def memory(self, *shapes: Sequence[int]) -> Memory:
        """The most bytes that a rank holds at once, as modelled, and in what; `print(fd.memory())` shows it."""
        return modelled_memory(self.latest(shapes))

    def host_program(self, rank: int, *shapes: Sequence[int]) -> HostProgram:
        """The program of a rank. Raises DefinitionError for a rank that the program does not have."""
        return self.latest(shapes).host_program(rank)

    def output_shardings(self, *shapes: Sequence[int]) -> list[Sharding]:
        """The sharding of every output, in the order of the outputs."""
        return self.latest(shapes).output_shardings()
