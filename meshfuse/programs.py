"""The compiled programs of a definition, one per set of shapes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import torch

from .automatic_plan import AutoPlan, automatic_plan
from .compiler import CompiledProgram, compile_definition
from .definition.recording import Recording
from .errors import DefinitionError, SourceLine, caller_line, located, user_error
from .executor.argument_shapes import compile_shapes, with_open_sizes
from .executor.arguments import Inputs, scalar_values
from .executor.dtensor import as_dtensor, placeable
from .graph import shape_scalars
from .mesh import DeviceMesh
from .planner.effort import effort_of
from .report.memory import check_memory
from .report.plan_warning import MAX_MEMORY, MAX_WIRE, bound, watch
from .reshard.borders import Borders
from .sharding.layout import Layout
from .sharding.value import Sharding

Shapes = Mapping[int, tuple[int, ...]]  # Global shapes by input tensor.


class Compilable(Protocol):
    """The definition that programs are compiled of."""

    recording: Recording

    def _complete(self) -> None: ...
    def _before_compiling(self, shapes: Shapes, scalars: Mapping[int, Any]) -> None: ...


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


class Programs:
    """Compiles a definition, and keeps its programs in `compiled`.

    last_run: what ran last, unless something was compiled since.
    near: by which factor sizes may differ for a plan to be taken over, whoever asks for a program; 1 for none.
    """

    def __init__(self, fd: Compilable, max_wire: float | None, max_memory: float | None, search: str | None) -> None:
        self.fd = fd
        self.max_wire = bound(MAX_WIRE, max_wire, caller_line())
        self.max_memory = bound(MAX_MEMORY, max_memory, caller_line())
        self.effort = effort_of(search, caller_line())
        self.compiled: dict[ProgramKey, CompiledProgram] = {}
        self.last_run: Holder | None = None
        self.near = 1.0
        self._shape_scalars: frozenset[int] | None = None

    def sized_by(self) -> frozenset[int]:
        """The scalar inputs whose values sizes depend on. Asking for them closes the definition."""
        if self._shape_scalars is None:
            self.fd.recording.is_open = False
            self._shape_scalars = shape_scalars(self.fd.recording)
        return self._shape_scalars

    def latest(self, shapes: Sequence[Any], line: SourceLine) -> CompiledProgram:
        """The program that ran or was compiled last, for these shapes if any are given; compiled if there is none."""
        if self.last_run is not None and not shapes:
            return self.last_run.compiled
        wanted = tuple(sorted(self._shapes(shapes, line).items())) if shapes else None
        for key, compiled in reversed(self.compiled.items()):
            if wanted in (None, key.shapes):
                return compiled
        return self.compile(shapes, None, line)

    def compile(
        self, shapes: Sequence[Any], scalars: Mapping[Any, Any] | None, line: SourceLine
    ) -> CompiledProgram:  # fmt: skip
        """The program for shapes and scalars as a user passes them."""
        self.fd._complete()
        given = Inputs({}, scalar_values(self.fd.recording, scalars, line), torch.device("cpu"))
        return self.program(given, self._shapes(shapes, line), DeviceMesh([0]), line)

    def automatic(
        self, mesh: DeviceMesh, shapes: Sequence[Any], max_memory: float | None, updates: Mapping[int, int],
        line: SourceLine,
    ) -> tuple[Mapping[int, Sharding], AutoPlan]:  # fmt: skip
        """Where the inputs without an annotation lie best on a mesh, and the plan then (`automatic_plan`)."""
        recording, limit = self.fd.recording, self.max_memory
        limit = limit if max_memory is None else bound(MAX_MEMORY, max_memory, line)
        others = {a.mesh: i for i, a in recording.annotations.items() if a.mesh not in (None, mesh)}
        if others or not recording.outputs:
            found = "a definition without outputs"
            for other, i in others.items():
                found = f"{recording.tensors[i].label} on {other}"
            raise user_error("fd.auto", found, f"outputs, and annotations on {mesh} alone",
                             "Call it when all is written, with the mesh of the annotations.", line)  # fmt: skip
        with located(line):
            found = automatic_plan(recording, self._shapes(shapes, line), mesh, updates, limit, self.effort, line)
        self.max_memory = limit
        return found

    def _shapes(self, shapes: Sequence[Any], line: SourceLine) -> dict[int, tuple[int, ...]]:
        self.fd._complete()
        return compile_shapes(self.fd.recording, shapes, line)

    def program(
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
                return self._watched(given, shapes, default_mesh, line, near_factor)
        except DefinitionError as error:
            raise with_open_sizes(self.fd.recording, shapes, error) from None

    def _watched(
        self, given: Inputs, shapes: Shapes, default_mesh: DeviceMesh, line: SourceLine, near_factor: float
    ) -> CompiledProgram:
        """The program; where a new one moves more than the bound there is a warning, where it holds more an error."""
        key, near_factor = self.key(given, shapes, default_mesh), max(near_factor, self.near)
        if not self.compiled:
            self.fd._before_compiling(shapes, dict(key.scalars))
        if key not in self.compiled:
            compiled = self._planned(key, near_factor)
            check_memory(compiled, self.max_memory, line)
            self.compiled[key], self.last_run = compiled, None
            watch(compiled, self.max_wire, line)
        return self.compiled[key]

    def _planned(self, key: ProgramKey, near_factor: float = 1.0) -> CompiledProgram:
        shapes, scalars = dict(key.shapes), dict(key.scalars)
        borders = None if key.dtensors is None else Borders(placeable, as_dtensor, dict(key.dtensors))
        return compile_definition(
            self.fd.recording, shapes, scalars, key.default_mesh, self.max_memory, near_factor, self.effort, borders
        )

    def key(self, given: Inputs, shapes: Shapes, default_mesh: DeviceMesh) -> ProgramKey:
        """What the program of these shapes is kept under."""
        scalars = {i: given.scalars[i] for i in self.sized_by()}
        return ProgramKey(tuple(sorted(shapes.items())), tuple(sorted(scalars.items())), default_mesh, given.dtensors)

    def renewed(
        self, old: CompiledProgram, given: Inputs, shapes: Shapes, default_mesh: DeviceMesh, keeps_outputs: bool
    ) -> CompiledProgram:  # fmt: skip
        """A program with a plan of its own, in the place of `old`, whose plan was taken over from other shapes.

        With `keeps_outputs` it is `old` itself if the outputs would be sharded otherwise.
        """
        key = self.key(given, shapes, default_mesh)
        new = self._planned(key)
        self.compiled[key] = old if keeps_outputs and new.output_shardings() != old.output_shardings() else new
        return self.compiled[key]
