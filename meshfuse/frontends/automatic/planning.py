"""`mf.plan`: where a model's weights and inputs lie best on a mesh, and which stages and micro-batches its step has.

The joint graph of forward and backward becomes a definition whose inputs are open, and the planner's own optimisation
places them: data, tensor, sequence, expert and fully sharded parallelism, and what is between them, come out of it.
Stages, micro-batches and what is computed again are searched around it (`search`).
"""

from __future__ import annotations

import functools
import inspect
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import nn

from ...argument_checks import as_int
from ...definition.checks import checked_mesh
from ...errors import MeshfuseError, SourceLine, caller_line, located, shown, user_error
from ...long_work import saying
from ...mesh import DeviceMesh
from ...number_text import duration, number
from ..calls import Arguments, read_call
from ..captured_graph import Captured
from ..experts import exchangeable, exchanging
from ..open_sizes import with_open_sizes
from ..patterns import matches
from ..pipeline.with_loss import TARGET, WithLoss, captured_loss
from ..plan_value import Alternative, Plan, axes_in
from ..plans import ModulePlan, Spec, checked_specs, module_plan
from .few_layers import FewLayers
from .pricing import Model, Pricer
from .roles import PIPELINE, checked_roles
from .search import Found, Passed, Search

# Times that differ by less than this factor are said to be the same.
_SAME = 1.001
MODES = ("explore", "config", "rule")


def plan(
    module: nn.Module, mesh: Any, *args: Any, inputs: Mapping[str, Sequence[Any]] | None = None,
    keep: Mapping[str, Any] | None = None, loss: Callable[[Any, Any], torch.Tensor] | None = None,
    max_memory: float | None = None, states: int = 2, roles: Mapping[str, str] | None = None,
    microbatches: int | None = None, mode: str = "explore", example: Mapping[str, Any] | None = None, **kwargs: Any,
) -> Plan:  # fmt: skip
    """Where a model's weights and inputs lie best on a mesh: a step of forward and backward then takes the least time.

    The model may be on meta. `args` and `kwargs` are those of its forward for the whole batch, of which only shapes and
    types are read; with `loss` the last of `args`, or `target`, is the target. Layers that are equal have equal plans:
    three of a kind are planned. Over which axis there are stages, how many micro-batches a step has, and whether layers
    are computed again is chosen as well (as Alpa does, Zheng et al. 2022, with exact plans inside of stages).

    inputs: by name of an argument how it is cut, where that is given; others are open.
    keep: a plan as of `mf.parallelize`, of parameters that are given; others are open.
    max_memory: bytes that a rank may hold of weights, gradients, an optimiser's states and activations.
    states: how many tensors of a parameter's size the optimiser keeps: 2 for Adam, 1 for SGD with momentum.
    roles: by axis what it is for, where that is given: "data", "fully sharded", "tensor", "sequence", "expert" or
        "pipeline".
    microbatches: how many a step has; None for as many as are best.
    mode: "explore"; "config", where all axes have roles that are given; or "rule", where weights and arguments lie as
        `keep` and `inputs` say, and are whole otherwise.
    example: the arguments by name, as of `mf.parallelize`; the same as `kwargs`.

    Raises DefinitionError for names that do not exist, for a model that is not one graph or has no loss, and where no
    plan holds as little as `max_memory`.
    """
    line = caller_line()
    with located(line):
        if not isinstance(module, nn.Module):
            raise user_error("plan: module", shown(module), "an nn.Module", "Pass a model.", line)
        found = checked_mesh(mesh, line)
        asked = checked_roles(roles, found, line)
        _check(mode, asked, found, states, microbatches, line)
        if not isinstance(example, Mapping | None):
            raise user_error("plan: example", shown(example), "a dict of arguments by name", "", line)
        given = args, {**(example or {}), **kwargs}
        model = model_of(module, found, given, inputs, keep, loss, line, rule=mode == "rule", states=states)
        _check_parts(model, asked, found, microbatches, line)
        limit = math.inf if max_memory is None else float(max_memory)
        return _found(Search(Pricer(model, found, asked), limit, microbatches, mode != "rule"), line)


def model_of(
    module: nn.Module, mesh: DeviceMesh, given: tuple[tuple[Any, ...], dict[str, Any]],
    inputs: Mapping[str, Sequence[Any]] | None, keep: Any, loss: Callable[[Any, Any], torch.Tensor] | None,
    line: SourceLine, *, rule: bool, states: int = 2, all_layers: bool = False,
) -> Model:  # fmt: skip
    """A model captured for arguments; all but `line` and `rule` are as of `plan`.

    rule: whether weights and arguments lie as `keep` and `inputs` say, and are whole otherwise; else others are open.
    all_layers: whether layers that are equal count each for themselves: their arguments may differ in size.
    """
    whole, (args, kwargs) = WithLoss(module, loss), given
    args = (*args, kwargs.pop(TARGET)) if loss is not None and TARGET in kwargs else args
    names = whole.argument_names(list(inspect.signature(module.forward).parameters), len(args))
    specs = checked_specs("inputs", inputs, [*names, TARGET], mesh, line)
    lie = module_plan(module, mesh, keep, None, specs, line).parameters
    kept = {n: spec for n, spec in lie.items() if rule or axes_in(spec) or _is_kept(n, keep)}
    few = FewLayers.of(module)
    choices = [few.all()] if all_layers or not few.is_shorter else [few, few.all()]
    model = _model(whole, module, mesh, (args, kwargs), names, specs, kept, choices, states, line)
    if rule:
        _give_all(model.given)
    return model


def _check(
    mode: Any, roles: Mapping[str, str], mesh: DeviceMesh, states: Any, microbatches: Any, line: SourceLine
) -> None:  # fmt: skip
    if mode not in MODES:
        raise user_error("plan: mode", shown(mode), f"one of {list(MODES)}", "", line)
    without = [axis for axis, size in zip(mesh.names, mesh.shape, strict=True) if size > 1 and axis not in roles]
    if mode == "config" and without:
        raise user_error('plan: mode="config"', f"no role of axis {without[0]!r}", "one of each axis",
                         'Pass roles={"dp": "data", ...}.', line)  # fmt: skip
    if mode == "rule" and roles:
        raise user_error('plan: mode="rule"', f"roles {dict(roles)}", "none: keep= and inputs= say it all",
                         'Leave roles out, or pass mode="config".', line)  # fmt: skip
    for name, value, least in (("states", states, 0), ("microbatches", microbatches, 1)):
        if value is not None and (as_int(value) is None or value < least):
            raise user_error(f"plan: {name}", shown(value), f"a number from {least} on", "", line)


def _check_parts(
    model: Model, roles: Mapping[str, str], mesh: DeviceMesh, microbatches: int | None, line: SourceLine
) -> None:  # fmt: skip
    rows = model.rows if model.is_elastic else 1
    for axis in (axis for axis, role in roles.items() if role == PIPELINE):
        if len(model.few.names) < mesh.axis_size(axis):
            raise user_error(
                f"plan: a pipeline over axis {axis}", f"{len(model.few.names)} layers",
                f"one of each of its {mesh.axis_size(axis)} ranks at least", "Give the axis another role.", line,
            )  # fmt: skip
    if microbatches is not None and rows % microbatches:
        raise user_error(
            f"plan: {microbatches} micro-batches of a batch", f"{rows} rows" if model.is_elastic else
            "a graph for this batch alone", "rows that they divide", "Take another number.", line,
        )  # fmt: skip


def _is_kept(name: str, keep: Any) -> bool:
    """Whether a user has said that a parameter is whole."""
    return isinstance(keep, Mapping) and any(matches(pattern, name) for pattern in keep)


def _give_all(arguments: Arguments) -> None:
    """Have arguments of which nothing is said be whole."""
    for i, shape in arguments.shapes.items():
        arguments.specs.setdefault(i, (None,) * len(shape))


def _model(
    whole: WithLoss, module: nn.Module, mesh: DeviceMesh, given: tuple[tuple[Any, ...], dict[str, Any]],
    names: list[str], specs: Mapping[str, Spec], kept: Mapping[str, Spec], choices: Sequence[FewLayers], states: int,
    line: SourceLine,
) -> Model:  # fmt: skip
    """The model captured with few of its layers and for any number of rows; with all, or for these rows, where that
    fails."""
    error: MeshfuseError | None = None
    for layers, is_elastic in itertools.product(choices, (True, False)):
        with layers.alone(module):
            experts = exchangeable(module)
            tables = list(whole.modules()), list(whole.parameters())
            with torch.enable_grad():
                call = read_call(whole, tables, 1, *given)
            arguments = Arguments(names, specs, ModulePlan(mesh, kept), True, call, line)
            batch, rows = arguments.of_batch()
            try:
                graph = _captured(whole, module, arguments, experts, batch if is_elastic else frozenset(), line)
            except MeshfuseError as found:
                error = found
                continue
        return Model(
            graph, arguments, layers, batch, rows, is_elastic and rows > 1, kept, tuple(experts), states,
            tuple(name for name, _ in module.named_parameters()), line,
        )  # fmt: skip
    assert error is not None
    raise error


def _captured(
    whole: WithLoss, module: nn.Module, arguments: Arguments, experts: Sequence[str], batch: frozenset[int],
    line: SourceLine,
) -> Captured:  # fmt: skip
    """The graph for any number of rows of the batch. Raises DefinitionError where the forward fixes it."""

    dynamic = {arguments.names[i]: [0] for i in batch}

    def trace(instead: Mapping[int, int]) -> Captured:
        with exchanging(module, dict.fromkeys(experts)) if experts else nullcontext():
            return captured_loss(whole, arguments, torch.device("cpu"), None, line, dynamic, instead, "left")

    found = with_open_sizes(trace, arguments, [(i, 0) for i in batch])
    if found is None:
        raise user_error("plan: rows of the batch", "a forward that fixes their number", "any number", "", line)
    return found


def _found(search: Search, line: SourceLine) -> Plan:
    with saying("planning the model's step"):
        best = search.run()
    if best is None:
        raise user_error(
            "plan: max_memory", f"{number(search.limit)} bytes", f"{number(search.least)}, the least that was found",
            "Allow a rank more memory, or take a mesh of more ranks.", line,
        )  # fmt: skip
    return _as_plan(search, best)


def _as_plan(search: Search, best: Found) -> Plan:
    pricer, how = search.pricer, best.arrangement
    few, mesh = pricer.model.few, pricer.mesh
    return Plan(
        tuple(zip(mesh.names, mesh.shape, strict=True)), _of_all_layers(pricer, best), best.layered.arguments,
        best.seconds, best.memory, best.cost.idle, best.cost.moving, best.cost.peak, best.cost.held, best.cost.loads,
        how.axis, how.schedule, how.virtual, how.microbatches,
        tuple(few.names[i] for i in best.cost.cuts), how.recomputes, _experts(pricer), best.layered.gap,
        _alternatives(search, best), None if math.isinf(search.limit) else search.limit,
        functools.partial(_again, pricer),
    )  # fmt: skip


def _of_all_layers(pricer: Pricer, best: Found) -> dict[str, Spec]:
    """How parameters lie, in the order of the model."""
    found = pricer.model.few.spread(best.layered.parameters)
    return {name: found[name] for name in pricer.model.names if name in found}


def _experts(pricer: Pricer) -> tuple[str, ...]:
    """The modules whose experts rows are sent to."""
    found = pricer.model.few.spread(dict.fromkeys(pricer.model.experts))
    held = {name.rpartition(".")[0] for name in pricer.model.names}
    return tuple(sorted(held.intersection(found)))


def _again(pricer: Pricer, roles: Mapping[str, str] | None, microbatches: int | None, line: SourceLine) -> Plan:
    """The best plan under roles of axes; what it holds may be over the limit."""
    asked = checked_roles(roles, pricer.mesh, line)
    _check_parts(pricer.model, asked, pricer.mesh, microbatches, line)
    search = Search(pricer.under(asked), math.inf, microbatches)
    found = search.run()
    assert found is not None
    return _as_plan(search, found)


def _alternatives(search: Search, best: Found) -> tuple[Alternative, ...]:
    """The best of other arrangements and roles of axes, and why they were not taken."""
    others = {(f"stages over {f.arrangement.axis}" if f.arrangement.axis else "no stages"): f for f in search.others}
    others |= dict(search.under_roles(best))
    priced = [_alternative(name, found, best, search.limit) for name, found in others.items() if found is not best]
    return (*priced, *(_not_planned(passed) for passed in search.passed))


def _alternative(name: str, found: Found, best: Found, limit: float) -> Alternative:
    if found.memory > limit:
        why = f"holds {number(found.memory - limit)} bytes too much"
    elif found.seconds < best.seconds * _SAME:
        why = "takes as long"
    else:
        idle, moving = found.cost.idle * found.seconds, found.cost.moving
        why = f"{duration(moving)} of moving tensors" if moving > idle else f"{found.cost.idle:.0%} idle"
    return Alternative(name, found.seconds, found.memory, why)


def _not_planned(passed: Passed) -> Alternative:
    why = "idles too long with any number of micro-batches"
    return Alternative(f"stages over {passed.axis}", passed.seconds, None, why)
