"""Which stage has which modules and weights, as far as a model says so before it has run."""

from __future__ import annotations

import bisect
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from ...errors import SourceLine, user_error
from ...mesh import DeviceMesh
from ...runtime.world import World
from ..patterns import longest_list, matching, nearest
from .options import Pipeline
from .partition import even_parts
from .schedule import Schedule


@dataclass(frozen=True, slots=True)
class Assignment:
    """A model's stages on a mesh.

    cuts: the modules before which the model is cut.
    owners: by parameter the stages that hold it: several have one that is tied.
    axis: that of the pipeline; "" where there is a single stage on all ranks.
    """

    mesh: DeviceMesh
    axis: str
    schedule: Schedule
    cuts: tuple[str, ...]
    owners: Mapping[str, tuple[int, ...]]

    def mesh_of(self, stage: int) -> DeviceMesh:
        """The ranks of a stage, without the pipeline's axis unless it is the only one."""
        return mesh_at(self.mesh, self.axis, self.schedule.rank_of(stage))

    def mesh_here(self) -> DeviceMesh:
        """The ranks of this rank's stages; those of the first stage where ranks are simulated."""
        if World.current().size == 1:
            return self.mesh_of(0)
        return mesh_at(self.mesh, self.axis, self.row_of(World.current().rank))

    def stages_here(self) -> list[int]:
        """The stages of this rank; all where ranks are simulated."""
        world = World.current()
        here = world.size == 1
        return list(range(self.schedule.stages)) if here else self.schedule.stages_of(self.row_of(world.rank))

    def held_here(self) -> set[str]:
        """The parameters of this rank's stages."""
        own = self.stages_here()
        return {name for name, held in self.owners.items() if not {*held}.isdisjoint(own)}

    def peer(self, rank: int, stage: int) -> int:
        """The rank of a stage that has the same coordinates as a rank on all other axes."""
        if not self.axis:
            return rank
        place = self.mesh.names.index(self.axis)
        here = list(self.mesh.coordinate(rank))
        here[place] = self.schedule.rank_of(stage)
        return next(r for r in self.mesh.ranks if list(self.mesh.coordinate(r)) == here)

    def line(self, stages: Iterable[int] | None = None) -> tuple[int, ...]:
        """The ranks of stages, of all by default, that have this rank's coordinates on other axes."""
        rank, wanted = World.current().rank, range(self.schedule.stages) if stages is None else stages
        return tuple(sorted({self.peer(rank, stage) for stage in wanted}))

    def reduce(self, tensor: torch.Tensor, op: str = "sum", stages: Iterable[int] | None = None) -> None:
        """Reduce a tensor over the ranks of stages, in place; each has this rank's coordinates on other axes."""
        World.current().group(self.line(stages), f"of pipeline axis {self.axis}").all_reduce(tensor, op).wait()

    def row_of(self, rank: int) -> int:
        """A rank's place along the pipeline's axis."""
        return self.mesh.coordinate(rank)[self.mesh.names.index(self.axis)] if self.axis else 0


def mesh_at(mesh: DeviceMesh, axis: str, place: int) -> DeviceMesh:
    """The part of a mesh at one coordinate of an axis."""
    if not axis:
        return mesh
    dim = mesh.names.index(axis)
    ranks = [rank for rank in mesh.ranks if mesh.coordinate(rank)[dim] == place]
    kept = [d for d in range(mesh.ndim) if d != dim] or [dim]
    shape = tuple(mesh.shape[d] if d != dim else 1 for d in kept)
    names = tuple(mesh.names[d] for d in kept)
    links = {name: mesh.links[d] for name, d in zip(names, kept, strict=True)} if mesh.linked else None
    costs = {"flops": mesh.flops, "memory": mesh.memory} if mesh.linked else {}
    return DeviceMesh(shape, names, ranks=ranks, links=links, **costs)


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


def whole(module: nn.Module, mesh: DeviceMesh, schedule: Schedule) -> Assignment:
    """A model as one stage on all ranks."""
    return Assignment(mesh, "", schedule, (), {name: (0,) for name, _ in module.named_parameters()})


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
