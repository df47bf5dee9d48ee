"""What `parallelize` is asked for, made whole: by a plan, by what FSDP says, and by where the module is."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from ..definition.fsdp import FSDP
from ..errors import SourceLine, shown, user_error
from ..mesh import DeviceMesh
from ..runtime.world import World
from .pipeline.assign import assigned
from .pipeline.assignment import Assignment
from .pipeline.assignment import whole as on_all_ranks
from .pipeline.options import Pipeline
from .pipeline.orders import named
from .plan_value import Plan
from .precision import Precision


def completed_by(plan: Plan, inputs: Any, pipeline: Any, checkpoint: Any) -> tuple[Any, Any, Any]:
    """What a user passes beside a plan, and where that is nothing what the plan says."""
    stages = pipeline
    if pipeline is None and plan.pipeline_axis:
        stages = Pipeline(
            plan.pipeline_axis, plan.schedule, plan.microbatches, virtual=plan.virtual, cut=plan.cut
        )  # fmt: skip
    again = plan.checkpoint if checkpoint is None else checkpoint
    return plan.inputs if inputs is None else inputs, stages, again


def precision_of(given: Precision | None, fsdp: Any) -> Precision | None:
    """The types to compute in, which may be said with FSDP."""
    said = isinstance(fsdp, FSDP) and (fsdp.param_dtype or fsdp.reduce_dtype)
    return Precision(fsdp.param_dtype, fsdp.reduce_dtype) if said and given is None else given


def assignment_of(
    module: nn.Module, mesh: DeviceMesh, pipeline: Any, microbatches: int, loss: Any, line: SourceLine
) -> Assignment:  # fmt: skip
    """The stages of a model; one on all ranks without a pipeline, with so many micro-batches in turn."""
    if loss is not None and not callable(loss):
        raise user_error("parallelize: loss", shown(loss), "a function of the model's result and a target", "", line)
    if pipeline is None:
        return on_all_ranks(module, mesh, named("1f1b", 1, microbatches))
    if not isinstance(pipeline, Pipeline):
        raise user_error("parallelize: pipeline", shown(pipeline), "an mf.Pipeline, or None",
                         'Pass mf.Pipeline("pp", "1f1b", microbatches=8).', line)  # fmt: skip
    return assigned(module, mesh, pipeline, line)


def device_of(module: nn.Module, mesh: Any) -> torch.device:
    """Where the module is; where it is on meta, that of torch's mesh, or a GPU if there is one for this rank."""
    real = next((p.device for p in module.parameters() if not p.is_meta), None)
    if real is not None:
        return real
    kind = getattr(mesh, "device_type", "cuda" if torch.cuda.is_available() else "cpu")
    return torch.device("cuda", World.current().local_rank) if kind == "cuda" else torch.device(kind)
