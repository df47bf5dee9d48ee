"""What a parallel model has for training by `step`: its stages, programs for micro-batches, and what they cost."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from ...errors import ArgumentError, SourceLine, located, user_error
from ...report.bill import Bill
from ..accumulating import Sync
from ..attentions import check_attends
from ..calls import Arguments, Call, read_call
from ..captured_graph import Captured, Source
from ..hugging_face import with_shared_heads
from ..options import Options
from ..placing import Place, Places, show_unset
from ..plans import ModulePlan
from ..recompute import mark_recomputed
from ..steps import Setting
from .assignment import Assignment
from .costs import step_bill, step_memory
from .elsewhere import Elsewhere
from .few_stages import FewStages, all_stages, few_stages, fit
from .micro_batches import MicroBatches, micro_batches
from .normalizers import Normalized, normalized
from .program import StageProgram, counting_program, stage_program
from .schedule import Schedule
from .stages import StageGraph, check_weights, stage_graphs
from .stepping import Planned, Work, normalizers_of, stepped
from .whole_step import WholeStep
from .with_loss import TARGET, WithLoss, captured_loss


@dataclass(frozen=True, slots=True)
class StepOptions:
    """What `parallelize` was told that matters here. names: of the forward's arguments, and of the target."""

    names: tuple[str, ...]
    asked: Options
    loss: Callable[[Any, Any], torch.Tensor] | None
    line: SourceLine


@dataclass(frozen=True, slots=True)
class _ModelValues:
    """What stages of a model read; `leaves` are the arguments of each micro-batch."""

    module: nn.Module
    planned: Sequence[Planned]
    leaves: Sequence[Sequence[Any]]

    def of(self, source: Source, microbatch: int) -> Any:
        """An argument, a parameter, a buffer or a constant of the captured graph."""
        if source.kind == "argument":
            return self.leaves[microbatch][source.place]
        if source.kind == "constant":
            return getattr(self.planned[microbatch].constants, source.name)
        path, _, name = source.name.rpartition(".")
        owner = self.module.get_submodule(path)
        return (owner._parameters if source.kind == "parameter" else owner._buffers)[name]

    def needs_gradient(self, name: str) -> bool:
        """Whether a parameter requires a gradient."""
        return self.of(Source("parameter", name), 0).requires_grad


@dataclass(frozen=True, slots=True)
class _CutModel:
    """A captured model as stages, and what they are planned with."""

    loss: Normalized
    stages: Sequence[StageGraph]
    setting: Setting

    @property
    def loss_dtype(self) -> torch.dtype:
        return self.stages[-1].graph.of_kind("result")[-1][0].meta["val"].dtype


@dataclass(slots=True, eq=False)
class Stepper:
    """Runs steps of a model.

    plan, places, parameters: on the ranks of this rank's stages.
    plain: a context in which the model and all in it have their own forwards.
    draw: makes a seed for each step.
    made: the stages' programs, by what they depend on. last: those of the latest step, by micro-batch.
    whole: the model with its loss.
    """

    module: nn.Module
    assignment: Assignment
    options: StepOptions
    plan: ModulePlan
    places: Places
    parameters: Mapping[str, Place]
    elsewhere: Elsewhere
    plain: Callable[[], AbstractContextManager[None]]
    draw: Callable[[], int]
    made: dict[Any, Planned] = field(default_factory=dict)
    last: list[Planned] = field(default_factory=list)
    whole: WithLoss = field(init=False)

    def __post_init__(self) -> None:
        self.whole = WithLoss(self.module, self.options.loss)

    def copied(self, memo: dict[int, Any]) -> Stepper:
        """That of a deep copy of the module; `memo` as of `copy.deepcopy`."""
        module, elsewhere = copy.deepcopy((self.module, self.elsewhere), memo)
        plain, draw = copy.deepcopy(self.plain, memo), copy.copy(self.draw)
        return replace(self, module=module, elsewhere=elsewhere, plain=plain, draw=draw, made={}, last=[])

    @property
    def schedule(self) -> Schedule:
        """The order of a step."""
        return self.assignment.schedule

    def step(self, args: tuple[Any, ...], kwargs: dict[str, Any], line: SourceLine) -> torch.Tensor:
        """The loss of a batch; with gradients enabled they are added to `.grad` of this rank's parameters."""
        parts = self._micro_batches(args, kwargs, line)
        show_unset(self.module, self.places)
        with located(line):
            with self.elsewhere.there():
                tables = self._tables()
            self.made = {key: found for key, found in self.made.items() if found.reads.hold()}
            planned = [self._planned(*part, tables, line) for part in parts.parts]
        self.last = planned
        loss, gradients = stepped(self._work(parts, planned), torch.is_grad_enabled())
        self._accumulate(gradients)
        return loss

    def _micro_batches(self, args: tuple[Any, ...], kwargs: dict[str, Any], line: SourceLine) -> MicroBatches:
        args, kwargs = self._with_target(args, kwargs, line)
        return micro_batches(args, kwargs, self.schedule.microbatches, self._cut_rows(args, kwargs), line)

    def _tables(self) -> tuple[list[Any], list[Any]]:
        return list(self.module.modules()), list(self.module.parameters())

    def _call(self, args: tuple[Any, ...], kwargs: dict[str, Any], tables: Any) -> Call:
        with torch.enable_grad():
            return read_call(self.whole, tables, 1, args, kwargs)

    def _with_target(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], line: SourceLine
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments with the target as the last positional one."""
        if self.options.loss is None:
            return args, kwargs
        if TARGET in kwargs:
            kwargs = dict(kwargs)
            return (*args, kwargs.pop(TARGET)), kwargs
        if not args:
            raise user_error(
                "step: the target of the loss", "no positional argument", "step(x, y), or target=", "", line,
                ArgumentError,
            )  # fmt: skip
        return args, kwargs

    def _cut_rows(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> set[int]:
        """The leaves of arguments whose first dim `inputs` cuts."""
        leaves, tree = pytree.tree_flatten((args, kwargs))
        call = Call(leaves, tree, (), None, False)
        names = Arguments(self._names(args), {}, self.plan, True, call, self.options.line).names
        specs = self.options.asked.inputs
        return {i for i, name in enumerate(names) if name in specs and specs[name] and specs[name][0] is not None}

    def _names(self, args: tuple[Any, ...]) -> list[str]:
        return self.whole.argument_names(self.options.names, len(args))

    def _work(self, parts: MicroBatches, planned: list[Planned]) -> Work:
        leaves = [pytree.tree_leaves(part) for part in parts.parts]
        values, backend = _ModelValues(self.module, planned, leaves), self.options.asked.backend
        for part, found in zip(leaves, normalizers_of(planned, values, parts.shares, backend), strict=True):
            part += found
        loss = planned[0].loss
        shares = parts.shares if loss is None or not loss.adds_up else (1.0,) * len(parts.shares)
        return Work(self.assignment, planned, values, shares, self.places.device, backend, self.draw())

    def _accumulate(self, gradients: Mapping[str, torch.Tensor]) -> None:
        named = dict(self.module.named_parameters())
        for name, local in gradients.items():
            parameter = named[name]
            found = self.parameters[name].wrapped(local, self.places.shapes[name])
            parameter.grad = found if parameter.grad is None else parameter.grad + found

    # planning

    def _planned(self, args: tuple[Any, ...], kwargs: dict[str, Any], tables: Any, line: SourceLine) -> Planned:
        call = self._call(args, kwargs, tables)
        if call.key not in self.made:
            if not call.has_gradient:
                raise user_error("step: the model's parameters", "none requires a gradient", "some that do", "", line)
            self.made[call.key] = self._plan(call, args, line)
        return self.made[call.key]

    def _plan(self, call: Call, args: tuple[Any, ...], line: SourceLine) -> Planned:
        """Capture the model with its loss, cut it into stages, and plan those of this rank."""
        found = self._cut(call, args, all_stages(self.assignment), line)
        here, last = self.assignment.stages_here(), self.schedule.stages - 1
        programs = {stage: self._program(found, stage, stage) for stage in here}
        setting, graph = replace(found.setting, plan=self._plan_of(last)), found.loss.graph
        counting = counting_program(found.loss, setting) if last in here else None
        return Planned(
            tuple(found.stages), programs, found.loss_dtype, graph.module, graph.reads, found.loss, counting
        )  # fmt: skip

    def whole_step(self, args: tuple[Any, ...], kwargs: dict[str, Any], line: SourceLine) -> WholeStep:
        """The programs of all stages for a step, those of stages that do the same made once; nothing runs."""
        parts, tables = self._micro_batches(args, kwargs, line).parts, self._tables()
        made: dict[Any, Planned] = {}
        planned: list[Planned] = []
        for part in parts:
            call = self._call(*part, tables)
            if call.key not in made:
                made[call.key] = self._plan_once(call, part[0], line)
            planned.append(made[call.key])
        return WholeStep(self.assignment, planned)

    def _plan_once(self, call: Call, args: tuple[Any, ...], line: SourceLine) -> Planned:
        """The programs of all stages, one for each kind of them."""
        few = few_stages(self.module, self.assignment, self.plan)
        found = self._cut(call, args, few, line)
        if not fit(few, found.stages):
            few = all_stages(self.assignment)
            found = self._cut(call, args, few, line)
        programs = [self._program(found, place, stage) for place, stage in enumerate(few.kept)]
        borders = few.borders(found.stages)
        every = {s: replace(programs[place], stage=borders[s]) for s, place in enumerate(few.stands)}
        return Planned(tuple(borders), every, found.loss_dtype)

    def _cut(
        self, call: Call, args: tuple[Any, ...], few: FewStages, line: SourceLine
    ) -> _CutModel:  # fmt: skip
        """The model captured with its loss, as stages."""
        places = self.places
        arguments = Arguments(
            self._names(args), self.options.asked.inputs, self.plan, places.is_simulated, call, self.options.line
        )  # fmt: skip
        with few.layers.alone(self.module):
            graph = self._captured(arguments, line)
        check_attends(graph, self.options.asked.context, self.options.line)
        loss = normalized(graph, *arguments.of_batch(), len(call.leaves))
        stages = stage_graphs(loss.graph, few.cuts, loss.places.stop, self.options.line)
        check_weights(stages, few.owners, self.options.line)
        runs = self.schedule.microbatches
        sync = Sync(runs > 1, runs)
        setting = self.options.asked.setting(self.module, self.plan, arguments, self.options.line, True, sync)
        return _CutModel(loss, stages, loss.taken_into(setting))

    def _program(self, found: _CutModel, place: int, stage: int) -> StageProgram:
        """The program of a captured stage, on the ranks of a stage of the model."""
        return stage_program(
            found.stages[place], replace(found.setting, plan=self._plan_of(stage)), self.schedule.is_split
        )  # fmt: skip

    def _plan_of(self, stage: int) -> ModulePlan:
        return replace(self.plan, mesh=self.assignment.mesh_of(stage))

    def _captured(self, arguments: Arguments, line: SourceLine) -> Captured:
        dtype = self.options.asked.dtype
        shared = with_shared_heads() if self.options.asked.context is not None else nullcontext()
        with self.plain(), shared, self.elsewhere.there():
            found = captured_loss(self.whole, arguments, self.places.device, dtype, line)
        mark_recomputed(found, self.options.asked.recomputed)
        return replace(found, reads=found.reads.again())

    # what it costs

    def bill(self) -> Bill:
        """What a rank of each stage sends in a step: collectives of each program, times micro-batches, and sends."""
        self._check_ran()
        return step_bill(self.assignment, self.last, self.options.line)

    def memory(self) -> str:
        """By stage of this rank (of all where ranks are simulated) what a rank holds, as modelled, in bytes."""
        self._check_ran()
        return step_memory(self.assignment, self.last)

    def _check_ran(self) -> None:
        if not self.last:
            raise user_error("the model has not run a step yet", "", "a call of model.step", "Plans depend on shapes.")
