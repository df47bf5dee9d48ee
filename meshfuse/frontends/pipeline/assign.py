"""Which stage has which modules and weights, as far as a model says so before it has run."""

from __future__ import annotations

import bisect
from collections.abc import Mapping, Sequence

from torch import nn

from ...errors import SourceLine, user_error
from ...mesh import DeviceMesh
from ..patterns import longest_list, matching, nearest
from .assignment import Assignment
from .options import Pipeline
from .partition import even_parts


def assigned(module: nn.Module, mesh: DeviceMesh, pipeline: Pipeline, line: SourceLine) -> Assignment:
    """A model's stages. Raises DefinitionError for axes and modules that do not exist, and cuts that do not fit."""
    if pipeline.axis not in mesh.names:
        raise user_error("pipeline: axis", repr(pipeline.axis), f"one of {list(mesh.names)}", "", line)
    ranks = mesh.axis_size(pipeline.axis)
    schedule = pipeline.scheduled(ranks)
    schedule.verify()
    if schedule.ranks != ranks:
        raise user_error(
            f"pipeline: schedule {schedule.name}", f"{schedule.ranks} ranks", f"the {ranks} of axis {pipeline.axis}",
            "Write a list of actions for each rank of the axis.", line,
        )  # fmt: skip
    cuts = _cuts(module, pipeline.cut, schedule.stages, line)
    return Assignment(
        mesh, pipeline.axis, schedule, cuts, _owners(module, cuts, pipeline.modules, schedule.stages, line)
    )


def _cuts(module: nn.Module, given: str | tuple[str, ...], stages: int, line: SourceLine) -> tuple[str, ...]:
    if isinstance(given, str):
        return _even_cuts(module, stages, line)
    if len(given) != stages - 1:
        raise user_error(
            f"pipeline: cut for {stages} stages", f"{len(given)} modules: {list(given)}", f"{stages - 1}",
            'Name the module before which each stage but the first begins, or pass cut="auto".', line,
        )  # fmt: skip
    names = [name for name, _ in module.named_modules() if name]
    return tuple(_one(pattern, names, line) for pattern in given)


def _one(pattern: str, names: Sequence[str], line: SourceLine) -> str:
    found = matching(pattern, names)
    exact = [name for name in found if name == pattern]
    if len(exact or found) == 1:
        return (exact or found)[0]
    near = nearest(pattern, names)
    raise user_error(
        f"pipeline: cut at {pattern!r}", f"{len(found)} modules{f', such as {found[:3]}' if found else ''}"
        f"{f'; near to it {near}' if near and not found else ''}", "one module", "Write its full name.", line,
    )  # fmt: skip


def _even_cuts(module: nn.Module, stages: int, line: SourceLine) -> tuple[str, ...]:
    """Cuts between layers so that the stage with the most weights has as few as can be: products take most of the time.

    A table that is only looked up in counts nothing.
    """
    layers = longest_list(module)
    if len(layers) < stages:
        raise user_error(
            f'pipeline: cut="auto" for {stages} stages', f"{len(layers)} layers in the longest list of modules",
            f"at least {stages}", "Take fewer stages, or name modules to cut at.", line,
        )  # fmt: skip
    costs = [sum(p.numel() for p in module.get_submodule(layer).parameters()) for layer in layers]
    costs[-1] += _behind(module, layers[-1])
    return tuple(layers[end] for end in even_parts(costs, stages))


def _behind(module: nn.Module, layer: str) -> int:
    """The weights of what is made after a layer, such as a model's head."""
    order = [name for name, _ in module.named_modules(remove_duplicate=False)]
    last = max(i for i, name in enumerate(order) if name == layer or name.startswith(f"{layer}."))
    later = set(order[last + 1 :])
    return sum(p.numel() for n, p in module.named_parameters(remove_duplicate=False) if n.rpartition(".")[0] in later)


def _owners(
    module: nn.Module, cuts: Sequence[str], given: Mapping[str, int], stages: int, line: SourceLine
) -> dict[str, tuple[int, ...]]:
    """By parameter the stages that hold it: those of the modules that have it, in the order in which these are made."""
    order = {name: i for i, (name, _) in enumerate(module.named_modules(remove_duplicate=False))}
    starts = [order[name] for name in cuts]
    names = dict(module.named_parameters(remove_duplicate=False))
    said = _said(module, names, given, stages, line)
    first = {id(p): name for name, p in module.named_parameters()}
    found: dict[str, set[int]] = {}
    for name, parameter in names.items():
        path = name.rpartition(".")[0]
        stage = said.get(name, bisect.bisect_right(starts, order[path]))
        found.setdefault(first[id(parameter)], set()).add(stage)
    return {name: tuple(sorted(held)) for name, held in found.items()}


def _said(
    module: nn.Module, names: Mapping[str, nn.Parameter], given: Mapping[str, int], stages: int, line: SourceLine
) -> dict[str, int]:
    """The stage of each parameter for which the user says it."""
    found: dict[str, int] = {}
    for pattern, stage in given.items():
        modules = matching(pattern, [name for name, _ in module.named_modules() if name])
        inside = [n for n in names if any(n.startswith(f"{m}.") for m in modules)]
        parameters = [*matching(pattern, names), *inside]
        if not parameters or not isinstance(stage, int) or not 0 <= stage < stages:
            raise user_error(
                f"pipeline: modules[{pattern!r}]", repr(stage) if parameters else "no such parameter or module",
                f"a stage from 0 to {stages - 1} for parameters of the model", "", line,
            )  # fmt: skip
        found.update(dict.fromkeys(parameters, stage))
    return found
