"""A definition cut in two: what follows from some inputs alone, such as weights, and the rest."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence

from .compiler import CompiledProgram, compile_definition, decided_without
from .definition.recording import Recording
from .errors import SourceLine, user_error
from .mesh import DeviceMesh
from .plans.binding_times import HalvedPlan
from .plans.halves import write_halves
from .plans.keeping import Keeping
from .plans.plan_cost import PlanCost, plan_cost
from .programs import Programs
from .propagation import ShardedDefinition
from .reshard.rematerialize import peak
from .sharding.value import Sharding


def prepared(
    programs: Programs, inputs: Sequence[int], shapes: Sequence[Sequence[int]], gathered: bool, line: SourceLine
) -> HalvedPlan:
    """The plan for the latest (or the given) shapes cut in two, by input tensors.

    A rank keeps no more of what follows from an input than it was given of it, unless what is `gathered` is to be kept;
    and no more than `max_memory` leaves room for.

    There are two plans to cut: the definition's own, and the one in which these inputs have no annotations. The one
    whose second half takes less time is cut; but the latter only if a rank then keeps no more than by the former, or
    than the inputs. Raises DefinitionError for anything that is no input, and where sizes depend on scalar inputs.
    """
    recording = programs.fd.recording
    _check(programs, inputs, line)
    compiled = programs.latest(shapes, line)
    given = {i: compiled.planned.shardings[i] for i in inputs}
    keeping, found = _cut(compiled.planned, given, gathered)
    if not found.handed_on:
        read = ", ".join(recording.tensors[i].label for i in inputs)
        raise user_error("prepared: nothing follows", f"no reader of {read}", "inputs that are read", "", line)
    free = _freed(programs, compiled, inputs)
    if free is not None:
        other = _cut(free, given, gathered)
        if _is_better(programs, other[1], found):
            keeping, found = other
    if programs.max_memory is not None:
        found = keeping.within(programs.max_memory, lambda cut: _peak(programs, cut))
    return found


def _is_better(programs: Programs, other: HalvedPlan, found: HalvedPlan) -> bool:
    """Whether another cut takes less time in its second half, and keeps no more than this one, or than the inputs."""
    ours, theirs = (_each(programs, cut).seconds for cut in (found, other))
    return other.kept <= max(found.kept, found.taken) and theirs < ours


def _check(programs: Programs, inputs: Sequence[int], line: SourceLine) -> None:
    recording = programs.fd.recording
    wrong = [recording.tensors[i].label for i in inputs if i not in recording.input_tensors()]
    if wrong or not inputs or len(set(inputs)) < len(inputs):
        found = f"{', '.join(wrong)}, made by ops" if wrong else "one twice" if inputs else "none"
        raise user_error("prepared", found, "input tensors, each once", "Pass what define_tensor returned.", line)
    sized = ", ".join(f"s{i}" for i in sorted(programs.sized_by()))
    if sized:
        needed = "sizes that depend on no scalar inputs"
        raise user_error("prepared: sizes are fixed", f"some that follow {sized}", needed, "Pass ints.", line)


def _cut(plan: ShardedDefinition, given: Mapping[int, Sharding], gathered: bool) -> tuple[Keeping, HalvedPlan]:
    """A plan cut in two, and what leaves more of it to the second half."""
    keeping = Keeping(plan, given)
    return keeping, keeping.cut() if gathered else keeping.within_given()


def _freed(programs: Programs, compiled: CompiledProgram, inputs: Sequence[int]) -> ShardedDefinition | None:
    """The plan in which these inputs have no annotations; None where no annotation is left then."""
    shapes = {i: compiled.graph.shape(i) for i in programs.fd.recording.input_tensors()}
    default_mesh = compiled.resharded.values[0].sharding.mesh
    return decided_without(programs.fd.recording, shapes, default_mesh, inputs, programs.effort)


def _each(programs: Programs, found: HalvedPlan) -> PlanCost:
    """What the second definition takes."""
    return plan_cost(_halves(programs, found)[1]().planned)


def _peak(programs: Programs, found: HalvedPlan) -> float:
    """The most bytes that a rank holds in either definition."""
    return max([peak(compile_half().resharded).nbytes for compile_half in _halves(programs, found)])


def _halves(programs: Programs, found: HalvedPlan) -> list[Callable[[], CompiledProgram]]:
    """What compiles the two definitions, written as recordings alone, which `observers` do not see."""
    halves = Recording(), Recording()
    write_halves(programs.fd.recording, found, *halves)
    return [functools.partial(_compiled, programs, half) for half in halves]


def _compiled(programs: Programs, half: Recording) -> CompiledProgram:
    shapes = {i: half.tensors[i].type.shape for i in half.input_tensors()}
    return compile_definition(half, shapes, {}, DeviceMesh([0]), programs.max_memory, effort=programs.effort)
