"""What a user says about a pipeline."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ...definition.tensor_view import TensorView
from ...errors import SourceLine, caller_line, shown, user_error
from ...mesh import DeviceMesh
from .definitions import PipelinedDefinition
from .orders import KINDS, named, stages_of, written
from .schedule import Schedule


@dataclass(frozen=True, slots=True, init=False)
class Pipeline:
    """A model cut into stages over an axis of a mesh, and worked off in micro-batches by `model.step`.

    axis: the axis whose ranks have the stages.
    schedule: "gpipe", "1f1b", "interleaved", "interleaved-zero-bubble", "zero-bubble", "zbv", "dualpipe-v", or for each
        rank a list of actions such as "F0.3": F a forward, B a whole backward, I and W the gradients of inputs and of
        weights, each of a stage and a micro-batch.
    microbatches: into how many parts the batch is cut along its first dim.
    virtual: how many stages a rank has, where the schedule leaves that open.
    cut: the full names of the modules (or patterns of one) before which the model is cut, one less than stages; "auto"
        cuts between the layers of the longest nn.ModuleList or nn.Sequential so that stages take about as long, by the
        planner's model, where `mf.parallelize` is given an `example`; else so that they have about as many weights.
    modules: by pattern of parameters or modules the stage that has them, where modules are made in another order than
        they run in.

    Raises DefinitionError for what is none of these.
    """

    axis: str
    schedule: Any
    microbatches: int
    virtual: int
    cut: str | tuple[str, ...]
    modules: Mapping[str, int] = field(default_factory=dict)

    def __init__(
        self, axis: str, schedule: Any = "1f1b", microbatches: int = 1, *, virtual: int = 1,
        cut: str | Sequence[str] = "auto", modules: Mapping[str, int] | None = None,
    ) -> None:  # fmt: skip
        line = caller_line()
        if not isinstance(axis, str):
            raise user_error("Pipeline: axis", shown(axis), "the name of an axis of the mesh", "", line)
        if isinstance(schedule, str) and schedule not in KINDS:
            raise user_error(
                "Pipeline: schedule", shown(schedule), f"one of {sorted(KINDS)}, or lists of actions", "", line
            )
        for name, value in (("microbatches", microbatches), ("virtual", virtual)):
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise user_error(f"Pipeline: {name}", shown(value), "a number from 1 on", "", line)
        is_list = isinstance(cut, (list, tuple)) and all(isinstance(name, str) for name in cut)
        if cut != "auto" and not is_list:
            raise user_error("Pipeline: cut", shown(cut), '"auto", or a list of names of modules', "", line)
        own = schedule if isinstance(schedule, str) else written(schedule, line)
        count = own.microbatches if isinstance(own, Schedule) else microbatches
        values = {
            "axis": axis, "schedule": own, "microbatches": count,
            "virtual": virtual, "cut": cut if isinstance(cut, str) else tuple(cut), "modules": dict(modules or {}),
        }  # fmt: skip
        for name, value in values.items():
            object.__setattr__(self, name, value)

    def of_definition(
        self, fd: Any, mesh: DeviceMesh, views: Sequence[Sequence[TensorView]], line: SourceLine
    ) -> PipelinedDefinition:  # fmt: skip
        """A definition in stages, as `fd.pipeline` says; `views` are (the loss, weights, cuts, the batch's inputs).

        Raises DefinitionError for options that only models have, and for a definition that cannot be cut so.
        """
        if self.cut != "auto" or self.modules:
            raise user_error("fd.pipeline: cut and modules of an mf.Pipeline", shown(self.cut), "none: these are names "
                             "of modules", "Pass tensors as fd.pipeline(..., cut=[...]).", line)  # fmt: skip
        if self.axis not in mesh.names:
            raise user_error("pipeline: axis", repr(self.axis), f"one of {list(mesh.names)}", "", line)
        schedule = self.scheduled(mesh.axis_size(self.axis))
        schedule.verify()
        return PipelinedDefinition.made_of(fd, mesh, self.axis, schedule, views, line)

    def stages(self, ranks: int) -> int:
        """How many stages there are on so many ranks."""
        if isinstance(self.schedule, Schedule):
            return self.schedule.stages
        return stages_of(self.schedule, ranks, self.virtual)

    def scheduled(self, ranks: int) -> Schedule:
        """The schedule of a step."""
        if isinstance(self.schedule, Schedule):
            return self.schedule
        return named(self.schedule, ranks, self.microbatches, self.virtual)
