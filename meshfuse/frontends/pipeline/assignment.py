"""Which ranks of a mesh have which stages, and who talks to whom."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import nn

from ...mesh import DeviceMesh
from ...runtime.world import World
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


def whole(module: nn.Module, mesh: DeviceMesh, schedule: Schedule) -> Assignment:
    """A model as one stage on all ranks."""
    return Assignment(mesh, "", schedule, (), {name: (0,) for name, _ in module.named_parameters()})
