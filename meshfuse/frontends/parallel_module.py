"""`parallelize`: a module whose forward and backward run as programs over a mesh of ranks."""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from ..backends.assignment import requested
from ..definition.checks import checked_mesh
from ..errors import ArgumentError, SourceLine, caller_line, line_in_script, located, shown, user_error
from ..mesh import DeviceMesh
from ..report.bill import Bill, bill_of
from ..report.memory import modelled_memory
from ..report.shown_page import ShownPage, show_page
from ..runtime.world import World
from .accumulating import SYNCED, Sync, terms_held
from .asked import assignment_of, completed_by, device_of, precision_of
from .attentions import check_attends
from .autograd import Runner
from .automatic.planning import plan as automatic
from .automatic.stage_cuts import cut_by_time
from .call_graphs import graph_of_call
from .calls import Arguments, Call, read_call, shards_of_arguments
from .context import Context, checked_context
from .experts import checked_experts, exchanging
from .explaining import explained
from .forward_changes import check_counts
from .hugging_face import with_static_cache
from .joint import planned
from .loading import init_weights, load
from .module_state import STATE, KeptModule, State
from .options import Options
from .pipeline.assignment import Assignment
from .pipeline.clipping import clip_grad_norm
from .pipeline.door import StepOptions, Stepper
from .pipeline.elsewhere import Elsewhere, take_out
from .pipeline.options import Pipeline
from .pipeline.played_step import PlayedStep
from .pipeline.schedule import Schedule
from .pipeline.with_loss import TARGET
from .placing import (
    Places,
    check_placed,
    check_same_weights,
    check_world,
    connect_again,
    place_mesh_of,
    place_parameters,
    show_unset,
)
from .plan_value import Plan
from .plans import ModulePlan, checked_specs, module_plan
from .precision import Precision
from .recompute import recomputed_modules
from .steps import Half, Step


def parallelize(
    module: nn.Module, mesh: Any, plan: Any = None, *, inputs: Mapping[str, Sequence[Any]] | None = None,
    fsdp: Any = None, dynamic: Mapping[str, Sequence[int]] | None = None, precision: Precision | None = None,
    backend: str | None = None, max_memory: float | None = None, fallback: str | None = None,
    pipeline: Pipeline | None = None, loss: Callable[[Any, Any], torch.Tensor] | None = None,
    checkpoint: str | Sequence[str] | None = None, experts: Any = None, context: Context | None = None,
    example: Mapping[str, Any] | None = None,
) -> Any:  # fmt: skip
    """Have a module's forward and backward run as programs over a mesh; returns the module itself.

    Its tree, the names of its parameters and its state dict stay. On ranks that a launcher started parameters become
    DTensors, and so do their gradients: torch's optimisers, gradient clipping, state dicts and checkpoints work with
    them. Without a launcher ranks are simulated in this process, and all tensors are whole and plain.

    mesh: an `mf.DeviceMesh`, or torch's.
    plan: where weights lie: a dict of patterns of full names (`{"layers.*.fc1": "colwise", "head.weight": ["tp", None],
        "layers.*.mlp:output": ["dp", None, "tp"]}`), with specs as `fd.mesh_split` takes them, Hugging Face's styles by
        name, or torch's ParallelStyle objects; "hf" for the plan of a model of transformers; or what `mf.plan` has
        found, which says how inputs are cut as well; "auto" for what it finds for `example`, within `max_memory`.
    inputs: by name of the forward's arguments how they are cut. A plain tensor is this rank's shard; a DTensor says its
        own placements. Arguments that are not named are whole on every rank.
    fsdp: how every parameter is cut as well, to be gathered for its use alone: an `mf.FSDP`, or the axes of one.
    dynamic: by name of an argument the dims whose sizes change from call to call: others sizes are not captured anew.
    precision: types to compute and to reduce gradients in (`mf.Precision`).
    backend, max_memory: as of `fd.execute` and `FusionDefinition`.
    fallback: "replicate" has ops that meshfuse lacks computed whole on every rank.
    pipeline: stages over an axis of the mesh, and micro-batches (`mf.Pipeline`): the model then runs by `step`. On
        ranks that a launcher started, parameters that other stages have are None.
    checkpoint: patterns of modules whose activations are computed again in the backward: of each its result is kept.
    experts: axes that the experts of each layer are cut over (`mf.Experts`): rows of tokens then go to them and back.
    context: attention over a sequence whose rows are cut over axes of the mesh (`mf.Context`).
    loss: for `step`: a function of the model's result and a target; None where the model returns a loss itself.
    example: the arguments of a step by name, of which shapes and types are read: for the plan "auto", and for stages
        that take about as long.

    Raises DefinitionError for a plan, mesh or names that do not fit the module, ArgumentError for a mesh of other ranks
    than the job has, and RankError where ranks pass different parameters.
    """
    line = caller_line()
    with located(line):
        _check(module, precision, fallback, line)
        whole = checked_mesh(mesh, line)
        check_world(whole, line)
        if not isinstance(example, Mapping | None):
            raise user_error("parallelize: example", shown(example), "a dict of arguments by name", "", line)
        if isinstance(plan, str) and plan == "auto" and example is not None:
            plan = automatic(module, whole, example=example, inputs=inputs, loss=loss, max_memory=max_memory)
            max_memory = None  # It is what the plan was made for.
        microbatches = 1
        if isinstance(plan, Plan):
            plan.check_mesh(whole, line)
            inputs, pipeline, checkpoint = completed_by(plan, inputs, pipeline, checkpoint)
            microbatches = plan.microbatches
        pipeline = cut_by_time(module, whole, pipeline, plan=plan, inputs=inputs, example=example, loss=loss, line=line)
        stages = assignment_of(module, whole, pipeline, microbatches, loss, line)
        here, names = stages.mesh_here(), _argument_names(module)
        specs = checked_specs("inputs", inputs, [*names, *([TARGET] if loss is not None else [])], here, line)
        sizes = checked_specs("dynamic", dynamic, names, here, line)
        requested(backend, line)
        options = Options(
            specs, sizes, precision_of(precision, fsdp), backend, max_memory, fallback == "replicate",
            recomputed_modules(module, checkpoint, line), checked_context(context, here, line),
        )  # fmt: skip
        where = module_plan(module, here, plan, fsdp, specs, line, checked_experts(experts, here, line))
        state = _placed(module, options, where, stages, whole, mesh, loss, line)
    object.__setattr__(module, STATE, state)
    module.__class__ = parallel_class(type(module))
    return module


def _argument_names(module: nn.Module) -> list[str]:
    return list(inspect.signature(module.forward).parameters)


def _placed(
    module: nn.Module, options: Options, plan: ModulePlan, stages: Assignment, whole: DeviceMesh, mesh: Any, loss: Any,
    line: SourceLine,
) -> State:  # fmt: skip
    """Put the parameters where the plan has them; `mesh` is `whole` as the user passed it."""
    device = device_of(module, mesh)
    check_same_weights(module, World.current().all_ranks, "every rank")
    elsewhere = take_out(module, stages.held_here())
    places = Places(plan, device, place_mesh_of(whole, mesh, device, stages.axis), line)
    state = State(plan, options, places, place_parameters(module, places), line)
    state.names, state.parts = _argument_names(module), 1 if places.is_simulated else _tensor_ranks(plan)
    state.tables = list(module.modules()), list(module.parameters())
    state.stepper = _stepper(module, state, stages, elsewhere, loss)
    return state


def _stepper(module: nn.Module, state: State, assignment: Assignment, elsewhere: Elsewhere, loss: Any) -> Stepper:
    options = StepOptions(tuple(state.names), state.options, loss, state.line)
    return Stepper(
        module, assignment, options, state.plan, state.places, state.parameters, elsewhere,
        functools.partial(as_plain, module), state.draws,
    )  # fmt: skip


def rejoin(module: nn.Module) -> None:
    """Let a parallel module, its parameters and their gradients use the groups of this thread's world from here on.

    Those of before are gone, as in a session whose workers go on after an error. All ranks call this.
    """
    state: State = getattr(module, STATE)
    connect_again(state.places)
    for runner in state.runners.values():
        for half in runner.step.halves:
            half.fd.leave_ranks()


def seed_draws(module: nn.Module, generator: torch.Generator) -> None:
    """Let a parallel module's random numbers follow this generator, which ranks must have seeded alike."""
    state: State = getattr(module, STATE)
    state.draws.generator = generator


def _tensor_ranks(plan: ModulePlan) -> int:
    return plan.mesh.axis_size(plan.tensor_axis) if plan.tensor_axis is not None else 1


def _check(module: Any, precision: Any, fallback: Any, line: SourceLine) -> None:
    if not isinstance(module, nn.Module):
        raise user_error("parallelize: module", shown(module), "an nn.Module", "Pass a model.", line)
    if isinstance(module, ParallelModule):
        raise user_error("parallelize: the module is parallel already", type(module).__name__, "a plain module",
                         "Make it anew for another plan.", line)  # fmt: skip
    if any(nn.parameter.is_lazy(p) for p in module.parameters()):
        raise user_error("parallelize: parameters without a shape", "lazy modules that have not run", "others",
                         "Call the module once before, with an example.", line)  # fmt: skip
    if any(hasattr(p, "placements") for p in module.parameters()):
        raise user_error("parallelize: parameters are DTensors already", "", "plain ones, or ones on meta",
                         "Parallelize the module before anything else does.", line)  # fmt: skip
    if precision is not None and not isinstance(precision, Precision):
        raise user_error("parallelize: precision", shown(precision), "an mf.Precision, or None",
                         "Pass mf.Precision(param=torch.bfloat16).", line)  # fmt: skip
    if fallback not in (None, "replicate"):
        raise user_error("parallelize: fallback", shown(fallback), 'None or "replicate"', "", line)


class ParallelModule(KeptModule):
    """What `parallelize` adds to a module's class. The forward is captured at its first call with new shapes."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return super().__call__(*args, **kwargs)

    def step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """The loss of a batch; where gradients are enabled they are added to those of the parameters.

        The arguments are those of the forward, and with `loss=` the target behind them or as `target=`. Tensors of the
        batch are cut along their first dim into micro-batches, worked off as the pipeline's schedule says; the loss is
        that of the whole batch, on every rank, if it is a sum of means over rows, sums, and quotients of sums.

        Raises ArgumentError for fewer rows than micro-batches, DefinitionError where the model cannot be cut, and
        RankError naming the stage, micro-batch and action where a rank has failed.
        """
        return _stepper_of(self).step(args, kwargs, caller_line())

    def play(self, *args: Any, states: float = 2, **kwargs: Any) -> PlayedStep:
        """A modelled run of `step` on all ranks of the mesh, and what it takes; nothing is computed.

        The arguments are those of `step` for the whole batch, of which shapes and types are read; they and the model
        may be on meta. Programs of stages and ranks that do the same are made and verified once. states: how many
        tensors of a weight's size the optimiser keeps. Raises ArgumentError in a job of several ranks, and as `step`.
        """
        line = caller_line()
        if (size := World.current().size) > 1:
            raise user_error("play", f"a job of {size} ranks", "one process: ranks are simulated",
                             "Play the step without a launcher.", line, ArgumentError)  # fmt: skip
        with located(line):
            return _stepper_of(self).whole_step(args, kwargs, line).played(states)

    def shard_inputs(self, **whole: torch.Tensor) -> dict[str, torch.Tensor]:
        """Of whole arguments what this rank passes, by name, as `inputs` or the plan say; all of it without a launcher.

        Raises DefinitionError for names that the forward does not have, ArgumentError for a tensor of other dims.
        """
        state: State = getattr(self, STATE)
        return shards_of_arguments(state.plan, state.options.inputs, [*state.names, TARGET], whole, caller_line())

    def schedule(self) -> Schedule:
        """The order in which ranks work off a step; printing it shows a picture, and how much of it is idle."""
        return _stepper_of(self).schedule

    def memory(self) -> str:
        """What a rank holds in the latest step, as modelled: of each micro-batch, and in its programs."""
        stepper = _stepper_of(self)
        if stepper.last:
            return stepper.memory()
        halves = _ran(self).step.halves
        return "\n".join(str(modelled_memory(half.fd.latest())) for half in halves)

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
        """Scale all gradients so that their norm, over all stages, is at most `max_norm`; returns the norm before."""
        return clip_grad_norm(self, _stepper_of(self).assignment, max_norm, norm_type)

    def bill(self) -> Bill:
        """The bytes that each rank sends in the latest step, forward and backward, by collective and module."""
        state: State = getattr(self, STATE)
        if state.stepper is not None and state.stepper.last:
            return state.stepper.bill()
        step = _ran(self).step
        halves = [step.forward, *([step.backward] if step.backward is not None else [])]
        return Bill(tuple(entry for half in halves for entry in bill_of(half.fd.latest()).entries))

    def load(self, path: Any, *, strict: bool = True) -> None:
        """Read weights from safetensors: a file, an index of several, or a folder. Each rank reads its slices only.

        Buffers that no file has, such as those of rotary embeddings, are made as `init_weights` makes them if they are
        on meta. With `strict` every name must be there. Raises CheckpointError for what is missing or of another shape.
        """
        state: State = getattr(self, STATE)
        if any(buffer.is_meta for buffer in self.buffers()):
            self.init_weights(0)
        load(self, state.parameters, path, strict, caller_line())

    def init_weights(self, seed: int | None = None) -> None:
        """Initialise parameters and buffers, with the same numbers on every mesh.

        By the model's own `_init_weights(module)` if it has one, else by each module's `reset_parameters()`. seed: None
        for the one of torch's generator. Raises DefinitionError for a module with parameters that has neither.
        """
        state: State = getattr(self, STATE)
        chosen = torch.initial_seed() if seed is None else seed
        stepper = state.stepper
        with as_plain(self), stepper.elsewhere.there() if stepper is not None else nullcontext():
            init_weights(self, state.parameters, state.places.device, chosen, caller_line())

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """For the micro-batches of a step but the last: their gradients are not summed over ranks yet.

        `.grad` is then a DTensor that is `Partial` over the axes of the data. The first call after it sums all of it
        over ranks, together with its own gradients. Forward and backward of a micro-batch both belong in the context.
        """
        state: State = getattr(self, STATE)
        before, state.accumulates = state.accumulates, True
        try:
            yield
        finally:
            state.accumulates = before

    def show(self, path: Any = None) -> ShownPage:
        """One page with the ops of the latest step, forward and backward, for a browser; as `fd.show`."""
        halves = _halves(self)
        return show_page([half.fd.latest() for half in halves.values()], path, False, caller_line(), list(halves))

    def explain(self, name: str | None = None) -> str:
        """Why a parameter or an activation lies as it does, forward and backward; without a name a table of all.

        A name is a parameter's or module's full name, or a part at its end. Raises DefinitionError for one that no
        tensor has.
        """
        attention = {f"{head}{at}": how for head, step in _steps(self).items() for at, how in step.attention.items()}
        return explained(_halves(self), attention, name, caller_line())


def _steps(module: nn.Module) -> dict[str, Step]:
    """The programs of the latest step, by the stage that they belong to; "" where there is one alone."""
    state: State = getattr(module, STATE)
    if state.stepper is None or not state.stepper.last:
        return {"": _ran(module).step}
    programs = state.stepper.last[0].programs
    return {f"stage {stage}, " if len(programs) > 1 else "": made.step for stage, made in programs.items()}


def _halves(module: nn.Module) -> dict[str, Half]:
    """The programs of the latest step, by what to call them."""
    titles = ("forward", "backward", "backward of weights")
    return {f"{head}{title}": half for head, step in _steps(module).items()
            for title, half in zip(titles, step.halves, strict=False)}  # fmt: skip


def _stepper_of(module: nn.Module) -> Stepper:
    state: State = getattr(module, STATE)
    if state.stepper is None:
        raise user_error("step", "a function of mf.compile", "a model of mf.parallelize", "", caller_line())
    return state.stepper


def _ran(module: nn.Module) -> Runner:
    state: State = getattr(module, STATE)
    if state.last is None:
        raise user_error("the module has not run yet", "", "a call of it", "Call it first: its plan depends on shapes.",
                         caller_line())  # fmt: skip
    return state.last


_CLASSES: dict[type, type] = {}


def parallel_class(plain: type) -> type:
    """The module's class with `ParallelModule` in front, under the same name."""
    if plain not in _CLASSES:
        names = {
            "forward": torch.compiler.disable(_forward),  # torch.compile leaves it as it is.
            "__module__": plain.__module__,
            "__qualname__": plain.__qualname__,
            "_plain": plain,
        }
        if hasattr(plain, "generate") and hasattr(plain, "can_generate"):
            names["generate"] = _generate
        _CLASSES[plain] = type(plain.__name__, (ParallelModule, plain), names)
    return _CLASSES[plain]


def _generate(self: Any, *args: Any, **kwargs: Any) -> Any:
    """transformers' `generate`; with a static cache where the call says nothing of caches."""
    return type(self)._plain.generate(self, *args, **with_static_cache(self, kwargs))


def _forward(self: Any, *args: Any, **kwargs: Any) -> Any:
    """Run the program for these arguments, which is made at the first call."""
    state: State = getattr(self, STATE)
    if state.stepper is not None and state.stepper.assignment.axis:
        raise user_error(
            "a model with a pipeline is called", "", "model.step(...), which runs its stages over micro-batches",
            "For a loss without gradients call step under torch.no_grad().",
            line_in_script(sys._getframe(1), ("torch",)),
        )  # fmt: skip
    call = read_call(self, state.tables, state.parts, args, kwargs)
    sync = _sync(self, state, call)
    key = call.key if sync == SYNCED else (call.key, sync)
    runner = state.runners.get(key)
    if runner is None or not runner.graph.reads.hold():
        state.forget_changed(self)
        with located(line := line_in_script(sys._getframe(1), ("torch",))):
            before, runner = runner, _made(self, state, call, line, state.all_results, sync)
            check_counts(before.graph.kept if before is not None else (), runner.graph.kept, type(self).__name__)
            state.runners[key] = runner
    state.last = runner
    found = runner(call)
    for cached in call.caches:  # the caller's own, which the program has written to
        if hasattr(found, "keys") and not isinstance(found, torch.Tensor):
            found["past_key_values"] = call.leaves[cached.place]
    return found


def _sync(module: Any, state: State, call: Call) -> Sync:
    """How a call's gradients are to be summed over ranks."""
    if not call.has_gradient or not (state.accumulates or state.has_terms):
        return SYNCED
    if state.accumulates:
        state.has_terms = True
        return Sync(leaves=True)
    found = terms_held(module.named_parameters(), state.plan.mesh)
    state.has_terms = False
    return Sync(taken=tuple(sorted(found.items())))


def _made(
    module: Any, state: State, call: Call, line: SourceLine, all_results: bool, sync: Sync = SYNCED
) -> Runner:  # fmt: skip
    """Capture and plan the module for a call.

    all_results: whether its backward takes gradients of all results, where some are numbers: such a plan is made once a
        script has needed it.
    """
    options, places = state.options, state.places
    show_unset(module, places)
    if not places.is_simulated:
        check_placed(module, state.parameters, line)
    arguments = Arguments(state.names, options.inputs, state.plan, places.is_simulated, call, line)
    graph = graph_of_call(module, state, arguments, line, all_results, lambda: as_plain(module))
    check_attends(graph, options.context, state.line)
    setting = options.setting(module, state.plan, arguments, state.line, graph.numbers_only, sync)

    if states := graph.states():
        shapes = {source.place: node.meta["val"].ndim for node, source in graph.of_kind("result") if node is not None}
        setting = replace(setting, ends={place: (None,) * shapes[place] for place in states if place in shapes})

    def full() -> Runner:
        key = call.key, sync, "all"
        if key not in state.runners:
            state.runners[key] = _made(module, state, call, line, True, sync)
        state.all_results = True
        return state.runners[key]

    return Runner(
        module, graph, planned(graph, setting), places, state.parameters, state.draws, options.backend,
        full if graph.numbers_only else None,
    )  # fmt: skip


@contextmanager
def as_plain(module: Any) -> Iterator[None]:
    """In this context the module, and all in it, have their own classes and forwards, but for experts on ranks."""
    state: State = getattr(module, STATE)
    found = [(part, type(part)) for part in module.modules() if isinstance(part, ParallelModule)]
    for part, parallel in found:
        part.__class__ = parallel._plain  # pyright: ignore[reportAttributeAccessIssue]
    try:
        with exchanging(module, state.plan.experts):
            yield
    finally:
        for part, parallel in found:
            part.__class__ = parallel
