"""Where a pipeline is cut so that its stages take about as long."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from ...errors import SourceLine
from ...mesh import DeviceMesh
from ..pipeline.options import Pipeline
from ..pipeline.partition import even_parts
from .few_layers import FewLayers
from .planning import model_of
from .pricing import Pricer
from .roles import PIPELINE
from .step_cost import Arrangement, expanded, layer_loads


def cut_by_time(
    module: nn.Module, mesh: DeviceMesh, pipeline: Any, *, plan: Any, inputs: Mapping[str, Sequence[Any]] | None,
    example: Mapping[str, Any] | None, loss: Callable[[Any, Any], torch.Tensor] | None, line: SourceLine,
) -> Any:  # fmt: skip
    """A pipeline cut between layers so that its longest stage takes least time, by the plan of a micro-batch.

    All are as of `mf.parallelize`. One whose cuts are named stays, and so does one without an `example`, of which no
    sizes are known, or which cannot be cut so, as will be said.
    """
    if not isinstance(pipeline, Pipeline) or pipeline.cut != "auto" or example is None:
        return pipeline
    if pipeline.axis not in mesh.names:
        return pipeline
    ranks = mesh.axis_size(pipeline.axis)
    stages = pipeline.scheduled(ranks).stages
    if not 1 < stages <= len(FewLayers.of(module).names):
        return pipeline
    model = model_of(module, mesh, ((), dict(example)), inputs, plan, loss, line, rule=True, all_layers=True)
    fits = model.is_elastic and model.fits(pipeline.microbatches)
    micro = Arrangement(pipeline.axis, ranks, microbatches=pipeline.microbatches if fits else 1)
    costs = Pricer(model, mesh, {pipeline.axis: PIPELINE}).layered(micro).costs
    ends = even_parts(layer_loads(costs, expanded(costs, model.few)), stages)
    return replace(pipeline, cut=[model.few.names[end] for end in ends])
