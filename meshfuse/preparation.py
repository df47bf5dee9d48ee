"""A definition cut in two: what follows from some inputs alone, such as weights, and the rest."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

from .compiler import CompiledProgram, compile_definition, decided_without
from .definition.builder import DefinitionBuilder
from .errors import SourceLine, user_error
from .mesh import DeviceMesh
from .planned_definition import PlannedDefinition
from .planner.binding_times import HalvedPlan
from .planner.halves import write_halves
from .planner.keeping import Keeping
from .planner.plan_cost import PlanCost, plan_cost
from .propagation import ShardedDefinition
from .reshard.rematerialize import peak
from .sharding.value import Sharding

Definition = TypeVar("Definition", bound=PlannedDefinition)


def prepared(
    fd: PlannedDefinition, inputs: Sequence[int], shapes: Sequence[Sequence[int]], make: Callable[[], Definition],
    gathered: bool, line: SourceLine,
) -> tuple[Definition, Definition]:  # fmt: skip
    """The two definitions for the latest (or the given) shapes; `make` gives empty definitions of `fd`'s kind.

    A rank keeps no more of what follows from an input than it was given of it, unless what is `gathered` is to be kept;
    and no more than `fd.max_memory` leaves room for.

    There are two plans to cut: `fd`'s own, and the one in which these inputs have no annotations. The one whose second
    definition takes less time is cut; but the latter only if a rank then keeps no more than by the former, or than the
    inputs. Raises DefinitionError for anything that is no input, and where sizes depend on scalar inputs.
    """
    _check(fd, inputs, line)
    compiled = fd.latest(shapes)
    given = {i: compiled.planned.shardings[i] for i in inputs}
    keeping, found = _cut(compiled.planned, given, gathered)
    if not found.handed_on:
        read = ", ".join(fd.tensors[i].label for i in inputs)
        raise user_error("prepared: nothing follows", f"no reader of {read}", "inputs that are read", "", line)
    free = _freed(fd, compiled, inputs)
    if free is not None:
        others, other = _cut(free, given, gathered)
        if other.kept <= max(found.kept, found.taken) and _each(fd, other).beats(_each(fd, found)):
            keeping, found = others, other
    if fd.max_memory is not None:
        found = keeping.within(fd.max_memory, lambda cut: _peak(fd, cut))
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


def _cut(plan: ShardedDefinition, given: Mapping[int, Sharding], gathered: bool) -> tuple[Keeping, HalvedPlan]:
    """A plan cut in two, and what leaves more of it to the second half."""
    keeping = Keeping(plan, given)
    return keeping, keeping.cut() if gathered else keeping.within_given()


def _freed(fd: PlannedDefinition, compiled: CompiledProgram, inputs: Sequence[int]) -> ShardedDefinition | None:
    """The plan in which these inputs have no annotations; None where no annotation is left then."""
    shapes = {i: compiled.graph.shape(i) for i in fd.input_tensors()}
    default_mesh = compiled.resharded.values[0].sharding.mesh
    return decided_without(fd, shapes, default_mesh, inputs, fd.effort)


def _each(fd: PlannedDefinition, found: HalvedPlan) -> PlanCost:
    """What the second definition takes."""
    return plan_cost(_halves(fd, found)[1]().planned)


def _peak(fd: PlannedDefinition, found: HalvedPlan) -> float:
    """The most bytes that a rank holds in either definition."""
    return max([peak(compile_half().resharded).nbytes for compile_half in _halves(fd, found)])


def _halves(fd: PlannedDefinition, found: HalvedPlan) -> list[Callable[[], CompiledProgram]]:
    """What compiles the two definitions, written as plain DefinitionBuilders, which `observers` do not see."""
    halves = DefinitionBuilder(), DefinitionBuilder()
    write_halves(fd, found, *halves)
    return [functools.partial(_compiled, fd, half) for half in halves]


def _compiled(fd: PlannedDefinition, half: DefinitionBuilder) -> CompiledProgram:
    shapes = {i: half.tensors[i].type.shape for i in half.input_tensors()}
    return compile_definition(half, shapes, {}, DeviceMesh([0]), fd.max_memory, effort=fd.effort)
