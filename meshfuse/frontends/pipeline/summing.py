"""Gradients of a step's micro-batches, summed over ranks once: a stage's programs leave them as terms."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from ...dtypes import from_torch
from ...runtime.world import World
from ..capture import Captured
from ..steps import Setting, Step
from ..traced import TracedDefinition


@dataclass(frozen=True, slots=True)
class Summing:
    """The definition that sums terms over ranks: its inputs are terms of these parameters' gradients."""

    fd: TracedDefinition
    names: tuple[str, ...]

    def __call__(self, terms: Mapping[str, torch.Tensor], backend: str | None) -> dict[str, torch.Tensor]:
        """The gradients of these terms, as the parameters lie; where ranks are simulated terms are sums already."""
        if World.current().size == 1:
            return dict(terms)
        with torch.no_grad():
            found = self.fd.execute([terms[name] for name in self.names], idle_ranks=True, backend=backend)
        return dict(zip(self.names, found, strict=True))


def summing(step: Step, graph: Captured, setting: Setting) -> Summing | None:
    """What sums the gradients that a step leaves as terms; None where it leaves none."""
    if not step.left:
        return None
    fd, nodes = TracedDefinition(), {source.name: node for node, source in graph.of_kind("parameter")}
    fd.at = setting.line
    for name, axes in step.left.items():
        value = nodes[name].meta["val"]
        kept, spec = setting.dtypes.get(name, value.dtype), setting.plan.spec(name, value.ndim)
        terms = fd.new_input(list(value.shape), from_torch(kept), setting.named(f"{name}.grad"))
        setting.annotate(fd, terms, spec, axes)
        wide = terms if setting.reduce is None else fd.ops.cast(terms, from_torch(setting.reduce))
        made = fd.ops.set(wide)
        setting.annotate(fd, made, spec)
        fd.add_output(made if wide is terms else fd.ops.cast(made, terms.dtype))
    return Summing(fd, tuple(step.left))
