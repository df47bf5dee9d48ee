"""`mf.compile`: a function of tensors, and of parallel modules, as one program over a mesh."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from ..backends.assignment import requested
from ..definition.checks import checked_mesh
from ..errors import SourceLine, caller_line, located, shown, user_error
from .module_state import STATE, State
from .options import Options
from .parallel_module import ParallelModule, parallel_class
from .placing import Places, check_world, place_mesh_of
from .plans import ModulePlan, checked_specs


def compile(
    function: Callable[..., Any], mesh: Any = None, *, inputs: Mapping[str, Sequence[Any]] | None = None,
    dynamic: Mapping[str, Sequence[int]] | None = None, backend: str | None = None,
    max_memory: float | None = None, fallback: str | None = None,
) -> Any:  # fmt: skip
    """A function of tensors as one program over a mesh; the parallel modules that it uses are part of it.

    For a loss, a step of generation under torch.no_grad(), or anything else that calls modules which `mf.parallelize`
    has returned. These must be global names or variables around the function. What is returned is called as the
    function is; it has the `bill()` and `explain()` of a parallel module.

    mesh: None for that of the modules in the function.
    inputs, dynamic, backend, max_memory, fallback: as of `mf.parallelize`.

    Raises DefinitionError for what is no function, for modules on different meshes, and without a mesh.
    """
    line = caller_line()
    with located(line):
        if not callable(function) or isinstance(function, nn.Module):
            raise user_error("compile: function", shown(function), "a function", "For a module call mf.parallelize.")
        names = _parameters_of(function)
        modules = _modules_of(function)
        states = {name: getattr(module, STATE) for name, module in modules.items()}
        found = _mesh(mesh, states, line)
        check_world(found, line)
        specs = checked_specs("inputs", inputs, names, found, line)
        sizes = checked_specs("dynamic", dynamic, names, found, line)
        requested(backend, line)
        options = Options(specs, sizes, None, backend, max_memory, fallback == "replicate")
        made = _Function(function, modules)
        object.__setattr__(made, STATE, _state(made, states, found, options, line))
        _share_names(made, names)
    made.__class__ = parallel_class(_Function)
    return made


def _parameters_of(function: Callable[..., Any]) -> list[str]:
    """The names of a function's parameters. Raises DefinitionError for one that Python cannot tell them of."""
    do = "Write a function of Python that calls it: lambda x: f(x)."
    if inspect.iscoroutinefunction(function) or inspect.isgeneratorfunction(function):
        raise user_error("compile: function", "one that is awaited or yields", "one that returns its results", do)
    try:
        return list(inspect.signature(function).parameters)
    except ValueError as error:
        raise user_error("compile: function", f"{shown(function)}, whose parameters have no names",
                         "a function of Python", do) from error  # fmt: skip


class _Function(nn.Module):
    """A function as the forward of a module, which has the modules that it uses under their names."""

    def __init__(self, function: Callable[..., Any], modules: Mapping[str, nn.Module]) -> None:
        super().__init__()
        self._function = function
        for name, module in modules.items():
            self.add_module(name, module)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self._function(*args, **kwargs)


def _modules_of(function: Any) -> dict[str, ParallelModule]:
    """The parallel modules that a function names, by the names."""
    try:
        seen = inspect.getclosurevars(inspect.unwrap(function))
    except TypeError:  # an object that is called, such as a partial
        return {}
    return {
        name: value for name, value in {**seen.globals, **seen.nonlocals}.items() if isinstance(value, ParallelModule)
    }


def _mesh(given: Any, states: Mapping[str, State], line: SourceLine) -> Any:
    meshes = {state.plan.mesh for state in states.values()} | (
        {checked_mesh(given, line)} if given is not None else set()
    )
    if len(meshes) != 1:
        raise user_error(
            "compile: the mesh", f"{len(meshes)} meshes: {sorted(map(str, meshes))}" if meshes else "none",
            "one mesh, given or that of the modules in the function", "Pass mesh.", line,
        )  # fmt: skip
    return meshes.pop()


def _state(made: nn.Module, states: Mapping[str, State], mesh: Any, options: Options, line: SourceLine) -> State:
    """What the function knows of its modules' parameters, under their longer names."""
    specs = {f"{head}.{name}": spec for head, s in states.items() for name, spec in s.plan.parameters.items()}
    placed = {f"{head}.{name}": place for head, s in states.items() for name, place in s.parameters.items()}
    axes = [s.plan.tensor_axis for s in states.values() if s.plan.tensor_axis is not None]
    outputs = {f"{head}.{name}": spec for head, s in states.items() for name, spec in s.plan.outputs.items()}
    units = {f"{head}.{name}": f"{head}.{unit}" for head, s in states.items() for name, unit in s.plan.units.items()}
    sharding = next((s.plan.sharding for s in states.values() if s.plan.sharding is not None), None)
    plan = ModulePlan(mesh, specs, outputs, sharding, axes[0] if axes else None, units)
    first = next(iter(states.values()), None)
    device = first.places.device if first is not None else torch.device("cpu")
    given = first.places.torch_mesh if first is not None else None
    places = Places(plan, device, place_mesh_of(mesh, given, device), line)
    for head, state in states.items():
        places.shapes.update((f"{head}.{name}", shape) for name, shape in state.places.shapes.items())
    parts = max((s.parts for s in states.values()), default=1)
    return State(plan, options, places, placed, line, parts=parts)


def _share_names(made: nn.Module, names: list[str]) -> None:
    state: State = getattr(made, STATE)
    state.names = names
    state.tables = list(made.modules()), list(made.parameters())
