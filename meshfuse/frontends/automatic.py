"""`mf.plan`: where a model's weights and inputs lie best on a mesh, found with the plan of its training step.

The joint graph of forward and backward becomes a definition whose inputs are open, and the planner's own optimisation
places them (`automatic_plan`): data, tensor and fully sharded parallelism, and what is between them, come out of it.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from ..definition.checks import checked_mesh
from ..errors import SourceLine, caller_line, located, shown, user_error
from ..mesh import DeviceMesh
from ..sharding.layout import axes
from ..sharding.value import Sharding
from .calls import Arguments, read_call
from .captured_graph import Source
from .joint import JointWriter
from .patterns import matches
from .pipeline.with_loss import TARGET, WithLoss, captured_loss
from .plan_value import Plan, axes_in
from .plans import ModulePlan, Spec, checked_specs, module_plan
from .steps import Setting


def plan(
    module: nn.Module, mesh: Any, *args: Any, inputs: Mapping[str, Sequence[Any]] | None = None,
    keep: Mapping[str, Any] | None = None, loss: Callable[[Any, Any], torch.Tensor] | None = None,
    max_memory: float | None = None, **kwargs: Any,
) -> Plan:  # fmt: skip
    """Where a model's weights and inputs lie best on a mesh: a step of forward and backward then takes the least time.

    The model may be on meta. `args` and `kwargs` are those of its forward for the whole batch, of which only shapes and
    types are read; with `loss` the last of `args` is the target.

    inputs: by name of an argument how it is cut, where that is given; others are open.
    keep: a plan as of `mf.parallelize`, of parameters that are given; others are open.
    max_memory: bytes that a rank may hold of weights, gradients and activations.

    Raises DefinitionError for names that do not exist, for a model that is not one graph or has no loss, and where no
    plan holds as little as `max_memory`.
    """
    line = caller_line()
    with located(line):
        if not isinstance(module, nn.Module):
            raise user_error("plan: module", shown(module), "an nn.Module", "Pass a model.", line)
        found = checked_mesh(mesh, line)
        whole = WithLoss(module, loss)
        names = whole.argument_names(list(inspect.signature(module.forward).parameters), len(args))
        specs = checked_specs("inputs", inputs, [*names, TARGET], found, line)
        given = module_plan(module, found, keep, None, specs, line)
        kept = {name: spec for name, spec in given.parameters.items() if axes_in(spec) or _is_kept(name, keep)}
        return _planned(whole, found, (args, kwargs), names, specs, kept, max_memory, line)


def _is_kept(name: str, keep: Any) -> bool:
    """Whether a user has said that a parameter is whole."""
    return isinstance(keep, Mapping) and any(matches(pattern, name) for pattern in keep)


def _planned(
    whole: WithLoss, mesh: DeviceMesh, given: tuple[tuple[Any, ...], dict[str, Any]], names: list[str],
    specs: Mapping[str, Spec], kept: Mapping[str, Spec], max_memory: float | None, line: SourceLine,
) -> Plan:  # fmt: skip
    parts = ModulePlan(mesh, kept)
    tables = list(whole.modules()), list(whole.parameters())
    with torch.enable_grad():
        call = read_call(whole, tables, 1, *given)
    arguments = Arguments(names, specs, parts, True, call, line)
    graph = captured_loss(whole, arguments, torch.device("cpu"), None, line)
    setting = Setting(parts, dict(enumerate(arguments.names)), arguments.shapes, arguments.specs, line, {}, free=True)
    return _OpenWriter(graph, setting).plan(max_memory)


class _OpenWriter(JointWriter):
    """Writes a joint definition whose inputs are open, but for those that are given."""

    def _spec(self, source: Source, ndim: int) -> Spec | None:
        if source.kind == "parameter" or (source.kind == "gradient" and source.name):
            return self.setting.plan.parameters.get(source.name)
        if source.kind == "argument":
            return self.setting.specs.get(source.place)
        return (None,) * ndim if source.kind in ("buffer", "constant") else None

    def plan(self, max_memory: float | None) -> Plan:
        """The plan of the step."""
        made, _ = self.written()
        views = {source: made.values[node] for node, source in self.graph.inputs if node in made.values}
        ends = zip(self.ends(), made.fd.recording.outputs, strict=True)
        pairs = {end: views[source.of_input()].id for source, end in ends if source.kind == "gradient"}
        mesh, line = self.setting.mesh, self.setting.line
        found, auto = made.fd._programs.automatic(mesh, (), max_memory, pairs, line)
        shardings = {source: found.get(view.id) for source, view in views.items() if hasattr(view, "id")}
        parameters = {s.name: self._said(s, shardings[s]) for s in shardings if s.kind == "parameter"}
        inputs = {self._name(s): self._said(s, shardings[s]) for s in shardings if s.kind == "argument"}
        axes = tuple(zip(mesh.names, mesh.shape, strict=True))
        return Plan(axes, parameters, inputs, auto.seconds, auto.memory)

    def _said(self, source: Source, sharding: Sharding | None) -> Spec:
        if sharding is None:
            node = next(node for node, each in self.graph.inputs if each == source)
            return self._spec(source, node.meta["val"].ndim) or (None,) * node.meta["val"].ndim
        return tuple(_entry([split.axis or "" for split in axes(layout)]) for layout in sharding.dims)


def _entry(names: list[str]) -> Any:
    return None if not names else names[0] if len(names) == 1 else names
