"""Gradients of a step's micro-batches, summed over ranks once: a stage's programs leave them as terms."""

from __future__ import annotations

from ...definition import annotating
from ...dtypes import from_torch
from ..captured_graph import Captured, Source
from ..steps import Half, Setting, Step
from ..traced import TracedDefinition


def summing(step: Step, graph: Captured, setting: Setting) -> Half | None:
    """The definition that brings gradients to their weights from where a step leaves them; None where all are there."""
    if not step.left:
        return None
    fd, nodes = (
        TracedDefinition(),
        {source.name: node for node, source in graph.of_kind("parameter")},
    )
    fd.at = setting.line
    for name, left in step.left.items():
        value = nodes[name].meta["val"]
        kept, spec = setting.dtypes.get(name, value.dtype), setting.plan.spec(name, value.ndim)
        terms = fd.new_input(list(value.shape), from_torch(kept), setting.named(f"{name}.grad"))
        annotating.leave_as_made(fd.recording, terms.id, left, setting.line)
        wide = terms if setting.reduce is None else fd.ops.cast(terms, from_torch(setting.reduce))
        made = fd.ops.set(wide)
        setting.annotate(fd, made, spec)
        fd.add_output(made if wide is terms else fd.ops.cast(made, terms.dtype))
    kinds = ("terms", "gradient")
    inputs, outputs = (tuple(Source(kind, name) for name in step.left) for kind in kinds)
    return Half(fd, inputs, outputs)
