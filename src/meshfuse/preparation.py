"""A definition cut in two: what follows from some inputs alone, such as weights, and the rest."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

from .compiler import CompiledProgram, compile_definition, decided_without
from .definition.builder import DefinitionBuilder
from .errors import SourceLine, user_error
from .mesh import DeviceMesh
from .planned_definition import PlannedDefinition
from .planning.binding_times import HalvedPlan, halved
from .planning.halves import write_halves
from .planning.spending import Spent, spent

Definition = TypeVar("Definition", bound=PlannedDefinition)


def prepared(
    fd: PlannedDefinition, inputs: Sequence[int], shapes: Sequence[Sequence[int]], make: Callable[[], Definition],
    line: SourceLine,
) -> tuple[Definition, Definition]:  # fmt: skip
    """The two definitions for the latest (or the given) shapes; `make` gives empty definitions of `fd`'s kind.

    There are two plans to cut: `fd`'s own, and the one in which these inputs have no annotations. The one whose second
    definition takes less time is cut; but the latter only if a rank then keeps no more than by the former, or than the
    inputs. Raises DefinitionError for anything that is no input, and where sizes depend on scalar inputs.
    """
    _check(fd, inputs, line)
    compiled = fd.latest(shapes)
    found = halved(compiled.planned, tuple(inputs))
    if not found.handed_on:
        read = ", ".join(fd.tensors[i].label for i in inputs)
        raise user_error("prepared: nothing follows", f"no reader of {read}", "inputs that are read", "", line)
    other = _freed(fd, compiled, found)
    if other is not None and other.kept <= max(found.kept, found.given):
        found = other if _each(fd, other).beats(_each(fd, found)) else found
    first, rest = make(), make()
    write_halves(fd, found, first, rest)
    return first, rest


def _check(fd: PlannedDefinition, inputs: Sequence[int], line: SourceLine) -> None:
    wrong = [fd.tensors[i].label for i in inputs if i not in fd.input_tensors()]
    if wrong or not inputs or len(set(inputs)) < len(inputs):
        found = f"{', '.join(wrong)}, made by ops" if wrong else "one twice" if inputs else "none"
        raise user_error("prepared", found, "input tensors, each once", "Pass what define_tensor returned.", line)
    sized = ", ".join(f"s{i}" for i in sorted(fd.sized_by()))
    if sized:
        needed = "sizes that depend on no scalar inputs"
        raise user_error("prepared: sizes are fixed", f"some that follow {sized}", needed, "Pass ints.", line)


def _freed(fd: PlannedDefinition, compiled: CompiledProgram, found: HalvedPlan) -> HalvedPlan | None:
    """The cut of the plan in which these inputs have no annotations; None where no annotation is left then."""
    shapes = {i: compiled.graph.shape(i) for i in fd.input_tensors()}
    world = compiled.resharded.values[0].sharding.mesh
    free = decided_without(fd, shapes, world, found.inputs, fd.effort)
    return None if free is None else halved(free, found.inputs)


def _each(fd: PlannedDefinition, found: HalvedPlan) -> Spent:
    """What the second definition takes, written as a plain DefinitionBuilder, which `observers` do not see."""
    first, rest = DefinitionBuilder(), DefinitionBuilder()
    write_halves(fd, found, first, rest)
    shapes = {i: rest.tensors[i].type.shape for i in rest.input_tensors()}
    return spent(compile_definition(rest, shapes, {}, DeviceMesh([0]), effort=fd.effort).planned)
