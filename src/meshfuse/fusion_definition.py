"""`FusionDefinition`: define, annotate, run on real or simulated ranks, and ask what was decided."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from .backends.assignment import assigned, requested
from .collector import no_collection
from .compiler import CompiledProgram
from .definition.attributes import calling_ours, check_attribute
from .definition.tensor_view import TensorView
from .errors import RankError, SourceLine, caller_line, shown, user_error
from .executor.arguments import (
    Inputs,
    check_count,
    check_global_shapes,
    check_numbers,
    global_shapes,
    outline,
    split_arguments,
)
from .executor.dtensor import dtensor_shapes, local_parts, output_homes, wrap_outputs
from .executor.graphs import Captured, check_capturable, check_groups
from .executor.segments import Segments
from .executor.simulate import Simulation, check_equal_replicas
from .executor.spmd import RankProgram, check_same_arguments, check_world, said_of_scalars
from .gradients.reverse import gradients
from .host_ir.program import HostProgram
from .kernels import in_stride_order
from .mesh import DeviceMesh
from .ops.base import TensorRef
from .plan_store.nearby import nearness
from .planned_definition import PlannedDefinition
from .preparation import prepared
from .report.backends import backends_table
from .report.reprint import definition_source
from .runtime.world import World
from .sharding.data import shard, unshard
from .sharding.value import Sharding
from .user_values import as_int, check_flags

# Called with every definition that is made: how the command line finds those of a script.
observers: list[Callable[[FusionDefinition], None]] = []


@dataclass(frozen=True, slots=True)
class _Simulated:
    """A compiled program with all its ranks' programs bound."""

    compiled: CompiledProgram
    simulation: Simulation


class FusionDefinition(PlannedDefinition):
    """A program for one big imaginary device, and how a few of its tensors split over a mesh.

    Use it as a context manager, define inputs, apply `fd.ops`, mark outputs and annotate; then `execute` runs it on
    this process' rank (shards in, shards out) and `simulate` on all ranks in this process (global tensors in and
    out). Compiling happens at the first call for a set of shapes; later calls with the same shapes plan nothing.
    `seed` is that of its random numbers, which depend on no mesh.

    A plan that moves more than `max_wire` bytes per rank (MESHFUSE_MAX_WIRE, where it is None) gives a PlanWarning
    that names the annotation to change; without a bound, only one that another annotation would halve.

    Where a rank would hold more than `max_memory` bytes (MESHFUSE_MAX_MEMORY), what was gathered is dropped after one
    use and gathered again for the next; where that is not enough, a PlanWarning says what takes the memory.

    `search` (MESHFUSE_SEARCH): "fast" plans every program once; "auto", the default, those of up to 400 ops several
    times, which takes a tenth of a second to some seconds, and longer ones by few of their layers where that takes
    about a second: on one mesh axis, or of few different ops; "thorough" all of them, in seconds.
    """

    _state: frozenset[str] = frozenset()  # The names of a made definition's own attributes.

    def __init__(
        self, seed: int = 0, *, max_wire: float | None = None, max_memory: float | None = None,
        search: str | None = None,
    ) -> None:  # fmt: skip
        if as_int(seed) is None:
            needed, do = "an int", "Pass the seed of its random numbers."
            raise user_error("FusionDefinition: seed", shown(seed), needed, do, caller_line())
        super().__init__(max_wire, max_memory, search)
        self._seed = seed
        self._constants: set[int] = set()  # Tensors that no gradient passes.
        # Runs so far. Apart, as a simulation on one rank must not change its random numbers.
        self._steps = {"ranks": 0, "simulated": 0}
        # Programs by `_key`: shapes, scalars that sizes follow, device and options.
        self._simulated: dict[Any, _Simulated] = {}
        self._bound: dict[Any, RankProgram] = {}
        # Those of `execute` by what `outline` tells of arguments, too: such arguments are not checked again.
        self._ready: dict[Any, RankProgram] = {}
        # The stride orders of outputs, once they are asked for, and whether any is not row-major.
        self._orders: list[tuple[int, ...] | None] | None = None
        self._ordered = False
        self._state = frozenset(vars(self))
        for observe in observers:
            observe(self)

    def __setattr__(self, name: str, value: Any) -> None:
        """Scripts keep their tensors as attributes. DefinitionError for a name that the definition uses itself."""
        check_attribute(name, value, self._state, caller_line)
        super().__setattr__(name, value)

    def __init_subclass__(cls) -> None:
        """A script's class whose `__init__` has not called this one's is told so where it is made."""
        super().__init_subclass__()
        if "__init__" in vars(cls):
            setattr(cls, "__init__", calling_ours(cls.__init__))  # noqa: B010  # no type of a method fits

    def __enter__(self) -> FusionDefinition:
        return self

    def __repr__(self) -> str:
        return definition_source(self)

    # gradients --------------------------------------------------------------------------------------------------

    def grad(self, outputs: Any, wrt: Any, grad_outputs: Any = None) -> Any:
        """Append the backward of this definition; the gradients by `wrt`, one TensorView or a list as `wrt` is.

        Each has its primal's shape and dtype: the derivative of the sum of output * grad_output over all outputs
        (grad_outputs of None are ones), zeros where nothing depends on it. A gradient that is an output lies as its
        primal is annotated (whole, where that is an input of which nothing is said) unless it is annotated itself.
        Raises DefinitionError for tensors without gradients and where an op on the way has no derivative.
        """
        line = self._changing()
        sources = [self._own(t, "grad: outputs", line) for t in _listed(outputs)]
        targets = [self._own(t, "grad: wrt", line) for t in _listed(wrt)]
        given = [None] * len(sources) if grad_outputs is None else _listed(grad_outputs)
        if len(given) != len(sources):
            raise user_error(
                "grad: grad_outputs", f"{len(given)} for {len(sources)} outputs", "one per output, or None", "", line
            )
        seeds = [None if g is None else self._own(g, "grad: grad_outputs", line) for g in given]
        with no_collection():
            made = gradients(self, sources, targets, seeds, self._constants, line)
        self.primals.update((grad.id, primal.id) for grad, primal in zip(made, targets, strict=True))
        return made if isinstance(wrt, (list, tuple)) else made[0]

    def stop_gradient(self, tensor: TensorView) -> TensorView:
        """Let no gradient pass through this tensor; the same tensor. `fd.ops.set` makes another to do it to."""
        self._constants.add(self._own(tensor, "stop_gradient", self._changing()).id)
        return tensor

    # what is done once ------------------------------------------------------------------------------------------

    def prepared(self, inputs: Any, *shapes: Sequence[int]) -> tuple[FusionDefinition, FusionDefinition]:
        """This program in two definitions: what follows from these inputs alone, and the rest.

        For weights that stay as they are between many calls, as in inference: the first brings them where they are read
        (a re-layout, a gather, a cast, a product of two), and the second takes what it returns behind the inputs that
        are left. Both have the sizes of the latest (or the given) shapes, and the plan for them is cut in two::

            once, each = fd.prepared([w])
            kept = once.execute([w_shard])
            out = each.execute([x_shard, *kept])

        Random numbers of the second are others than this definition's. Raises DefinitionError for what is no input.
        """
        line = caller_line()
        given = [self._own(t, "prepared", line).id for t in _listed(inputs)]
        return prepared(self, given, shapes, self._like, line)

    def _like(self) -> FusionDefinition:
        bounds = {"max_wire": self.max_wire, "max_memory": self.max_memory}
        return FusionDefinition(self._seed, **bounds, search=self.effort.value)

    # running --------------------------------------------------------------------------------------------------

    def execute(
        self, inputs: Sequence[Any], *, idle_ranks: bool = False, backend: str | None = None, cuda_graph: bool = False
    ) -> list[Any]:  # fmt: skip
        """Run on this rank: `inputs` are the rank's shards (or DTensors), in the order of definition.

        Returns the rank's shards of the outputs, DTensors if an input was one; None for an output on a mesh that the
        rank is not part of. Raises ArgumentError for arguments that do not fit, RankError where a peer fails or
        disagrees and RankTimeout where one does not answer. `idle_ranks` allows a mesh smaller than the world.
        `backend` says what computes the segments between communications: "eager" (torch, op by op), "inductor",
        "nvfuser", or "auto" (eager, and compiled once that pays); for None MESHFUSE_BACKEND, else "auto". With
        `cuda_graph` a step on a GPU is captured once and replayed: for programs of tensors that draw no random numbers.
        """
        program, outputs, homes, step = None, None, None, self._steps["ranks"]
        try:
            # What once was found to fit is told by these facts alone.
            known = (outline(inputs), idle_ranks, backend, cuda_graph)
            program = self._known_to_fit(known)
            if program is None:
                program, inputs, homes = self._fitted(known, inputs)
            object.__setattr__(self, "_latest", program)  # Past our own __setattr__, which takes a microsecond.
            step = self._next_step("ranks")
            outputs = program.run(inputs, self.random_state(program.device, step), step)
            laid_out = self._laid_out(outputs)
            return laid_out if homes is None else wrap_outputs(laid_out, homes)
        except BaseException as error:
            self._leave_off(program, step, outputs, error)
            raise

    def _known_to_fit(self, known: Any) -> RankProgram | None:
        try:
            return self._ready.get(known)
        except TypeError:  # no name of a backend, or no bool
            return None

    def _fitted(self, known: Any, inputs: Sequence[Any]) -> tuple[RankProgram, list[Any], Any]:
        """The program for arguments of which nothing is known, these as it takes them, and what makes DTensors of its
        outputs if they are to be some.
        """
        line, (_, idle_ranks, backend, cuda_graph) = caller_line(), known
        World.current()  # What is wrong with the arguments of one rank its peers learn.
        check_flags(line, idle_ranks=idle_ranks, cuda_graph=cuda_graph)
        check_count(self, inputs, line)
        name = requested(backend, line)
        locals_, dtensors = local_parts(inputs), dtensor_shapes(self, inputs, line)
        given = split_arguments(self, locals_, line)
        key = self._key(given, idle_ranks, name, cuda_graph, *dtensors.items())
        program = self._bound.get(key)
        if program is None:
            program = self._bound[key] = self._bind_rank(given, dtensors, idle_ranks, line, False, name, cuda_graph)
        if known[0] is not None and not any(self.tensors[i].stride_order for i in given.tensors):
            self._ready[known] = program
        homes = output_homes(program.compiled, inputs, line) if dtensors else None
        return program, given.in_order(self.inputs), homes

    def _leave_off(self, program: RankProgram | None, step: int, outputs: Any, error: BaseException) -> None:
        """Tell the world of an error that came before this rank's program ran at a step, or after it: others may not
        have got it.

        What is wrong with other ranks is told to all, where they meet: by the user's line, if by no other.
        """
        if isinstance(error, RankError):
            error.where = error.where or caller_line()
        before = program is None or program.step <= step
        if (before or outputs is not None) and not isinstance(error, RankError):
            begins = f" that begins at {self.tensors[0].line}" if self.tensors else ""
            when = "before" if before else "after"
            World.leave_off(f"step {step + 1} of the definition{begins}, {when} its program", error)

    def simulate(
        self, inputs: Sequence[Any], *, check_replicas: bool = False, check_streams: bool = False
    ) -> list[torch.Tensor]:
        """Run all ranks in this process: `inputs` and the results are global tensors.

        With `check_replicas` every replica of every output is compared with the first. With `check_streams` every
        rank's kernels and communications are ordered as on a GPU, by streams and events alone: where two of them would
        use the same memory with no order between them, AssertionError. Raises ArgumentError for arguments that do not
        fit.
        """
        line = caller_line()
        check_flags(line, check_replicas=check_replicas, check_streams=check_streams)
        given = split_arguments(self, inputs, line)
        if check_replicas:
            check_numbers(self, given, "check_replicas", line)
        name = requested(None, line)
        key = self._key(given, name, check_streams)
        if key not in self._simulated:
            compiled = self._compile(given, check_global_shapes(self, given, line), DeviceMesh([0]), line)
            programs = [compiled.host_program(rank) for rank in compiled.ranks]
            compiled.verify()
            simulation = Simulation(programs, given.device, compiled.segmented, name, check_streams)
            self._simulated[key] = _Simulated(compiled, simulation)
        self._latest = self._simulated[key]
        with torch.no_grad():
            return self._run_simulation(self._simulated[key], given, check_replicas)

    def __call__(self, *inputs: Any) -> list[torch.Tensor]:
        """Global tensors in and out, on the ranks that there are: simulated ones unless a launcher started several.

        On real ranks each must pass the same tensors: RankError at the first call, with shapes that are new, where they
        do not.
        """
        world = World.current()
        if world.size == 1:
            return self.simulate(inputs)
        program, outputs, step = None, None, self._steps["ranks"]
        try:
            program, args = self._fitted_whole(inputs, world)
            object.__setattr__(self, "_latest", program)  # Past our own __setattr__, which takes a microsecond.
            step = self._next_step("ranks")
            outputs = program.run(args, self.random_state(program.device, step), step, whole=True)
            return self._laid_out(outputs)
        except BaseException as error:
            self._leave_off(program, step, outputs, error)
            raise

    def _fitted_whole(self, inputs: Sequence[Any], world: World) -> tuple[RankProgram, list[Any]]:
        """The program for global tensors, and this rank's parts of them."""
        line = caller_line()
        given = split_arguments(self, inputs, line)
        shapes = check_global_shapes(self, given, line)
        shardings = self._input_shardings(shapes)
        values = zip(self.inputs, given.in_order(self.inputs), strict=True)
        with torch.no_grad():
            args = [self._local(ref, value, shardings, world.rank) for ref, value in values]
        key = (self._key(given), "global")
        if key not in self._bound:
            program = self._bind_rank(given, shapes, False, line, whole=True)
            check_same_arguments(self, given, world)
            self._bound[key] = program
        return self._bound[key], args

    def _local(self, ref: Any, value: Any, shardings: Mapping[int, Sharding], rank: int) -> Any:
        if not isinstance(ref, TensorRef) or ref.id not in shardings or rank not in shardings[ref.id].mesh:
            return value
        return shard(value, shardings[ref.id], rank)

    def _input_shardings(self, shapes: Mapping[int, tuple[int, ...]]) -> dict[int, Sharding]:
        annotated = self.annotations
        return {i: annotated[i].sharding(self.tensors[i].name, shape).placement(shape)
                for i, shape in shapes.items() if i in annotated}  # fmt: skip

    def _run_simulation(self, made: _Simulated, given: Inputs, check: bool) -> list[torch.Tensor]:
        compiled = made.compiled
        arguments = {rank: self._simulated_arguments(compiled, given, rank) for rank in compiled.ranks}
        results = made.simulation.run(arguments, self._seed, self._next_step("simulated"))
        graph = compiled.graph
        out = []
        for place, sharding in enumerate(compiled.output_shardings()):
            shape = graph.shape(graph.outputs[place])
            shards = {rank: results[rank][place] for rank in sharding.mesh.ranks}
            out.append(unshard(shards, sharding, shape))
            if check:
                check_equal_replicas(graph.tensors[graph.outputs[place]].label, shards, sharding)
        return self._laid_out(out)

    def _laid_out(self, outputs: list[Any]) -> list[Any]:
        """The outputs with the strides that allocation domains and stride_order ask for."""
        if self._orders is None:
            self._orders = self.output_orders()
            self._ordered = any(order is not None for order in self._orders)
        if not self._ordered:
            return outputs
        return [
            out if order is None or out is None else in_stride_order(out, list(order))
            for out, order in zip(outputs, self._orders, strict=True)
        ]

    def _simulated_arguments(self, compiled: CompiledProgram, given: Inputs, rank: int) -> list[Any]:
        homes = compiled.sharded.homes
        out: list[Any] = []
        for ref in self.inputs:
            if not isinstance(ref, TensorRef):
                out.append(given.scalars[ref.id])
            elif self.placed(ref.id) is not None and rank in homes[ref.id].mesh:
                out.append(shard(given.tensors[ref.id], homes[ref.id], rank))
            else:
                out.append(given.tensors[ref.id])
        return out

    def random_state(self, device: torch.device, step: int) -> tuple[int, int]:
        """The seed and the offset by which a step on this device draws random numbers."""
        return self._seed, step

    def _next_step(self, where: str) -> int:
        step = self._steps[where]
        self._steps[where] = step + 1
        return step

    def _key(self, given: Inputs, *more: Any) -> Any:
        sizes = tuple(given.scalars[i] for i in sorted(self.sized_by()))
        return (tuple(t.shape for t in given.tensors.values()), sizes, given.device, more)

    def _bind_rank(
        self,
        given: Inputs,
        known: Mapping[int, tuple[int, ...]],
        idle_ranks: bool,
        line: SourceLine,
        whole: bool = False,
        backend: str | None = None,
        cuda_graph: bool = False,
    ) -> RankProgram:
        """The program for such arguments, compiled and bound to this rank. `known` are the global shapes that they
        tell, all of them where they are `whole` and no shards; of shards ranks tell each other the rest.
        """
        world = World.current()
        check_world(self, world.size, idle_ranks, line)
        if world.size > 1:
            check_numbers(self, given, "on several ranks", line)
        shapes = dict(known) if whole else global_shapes(self, given, world.rank, known, line)
        mesh, sizes = DeviceMesh(list(range(world.size))), Inputs({}, given.scalars, given.device)
        compiled = self._compile(sizes, shapes, mesh, line, nearness(line))

        def renewed() -> CompiledProgram:
            return self._renewed(compiled, sizes, shapes, mesh)

        def captured(program: HostProgram, main: Any) -> Captured:
            check_capturable(program, sizes, line)
            groups = [world.group(ranks) for ranks in program.groups if world.rank in ranks]
            return Captured(main, lambda: check_groups(groups, line))

        capture = captured if cuda_graph else None
        # Whole arguments are compared, numbers among them, once the program has been.
        source = "\n".join([repr(self), *([] if whole else said_of_scalars(given))])
        return RankProgram(compiled, world, given.device, source, requested(backend, line), renewed, capture)

    def backends(self, *shapes: Sequence[int]) -> str:
        """What computes each segment, and why: as it is bound to a rank, or as MESHFUSE_BACKEND would have it."""
        compiled = self.latest(shapes)
        bound = self._segments_of(compiled)
        if bound:
            return backends_table(compiled, bound[-1].chosen)
        chosen = assigned(compiled.segmented, requested(None, caller_line())).chosen
        return backends_table(compiled, {f"segment_{number}": what for number, what in chosen.items()})

    def host_program(self, rank: int, *shapes: Sequence[int]) -> HostProgram:
        """The program of a rank for the latest (or the given) shapes.

        Printed, it says what computes each kernel, and why, where the rank has compiled any.
        """
        program = super().host_program(rank, *shapes)
        for segments in self._segments_of(self.latest(shapes)):
            if segments.rank == program.rank:
                notes = tuple((name, f"{c.backend}: {c.why}") for name, c in segments.chosen.items())
                program = replace(program, notes=notes)
        return program

    def _segments_of(self, compiled: CompiledProgram) -> list[Segments]:
        """What runs a program's segments: on simulated ranks that compile them, and on this process' rank."""
        simulated = [made.simulation.segments for made in self._simulated.values() if made.compiled is compiled]
        bound = [program for program in self._bound.values() if program.compiled is compiled and program.active]
        return [*itertools.chain(*simulated), *(program.segments for program in bound)]


def _listed(tensors: Any) -> Sequence[Any]:
    return tensors if isinstance(tensors, (list, tuple)) else (tensors,)
