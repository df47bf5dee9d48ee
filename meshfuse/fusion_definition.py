"""`FusionDefinition`: define, annotate, run on real or simulated ranks, and ask what was decided."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from .argument_checks import as_int, check_flags
from .backends.assignment import assigned, requested
from .compiler import CompiledProgram
from .definition.attributes import calling_ours, check_attribute
from .definition.reverse import gradients
from .definition.seeds import Seed
from .definition.tensor_view import TensorView
from .errors import RankError, SourceLine, caller_line, shown, user_error
from .executor.argument_guards import ArgumentGuards, Options
from .executor.arguments import (
    Inputs,
    check_count,
    check_global_shapes,
    check_numbers,
    global_shapes,
    split_arguments,
)
from .executor.dtensor import GivenDTensor, dtensors_of, local_parts, output_specs, wrap_outputs
from .executor.graphs import Captured, check_capturable, check_groups, watched
from .executor.segments import Segments
from .executor.simulate import SimulatedProgram, Simulation
from .executor.spmd import RankProgram, check_same_arguments, check_world, named_ranks, scalar_lines
from .gc_pause import no_collection
from .host_ir import HostProgram
from .kernels import in_stride_order
from .mesh import DeviceMesh
from .ops.values import TensorRef
from .planned_definition import PlannedDefinition
from .planner.shape_reuse import nearness
from .preparation import prepared
from .report.backends import backends_table
from .report.reprint import definition_source
from .runtime.world import World
from .sharding.data import shard
from .sharding.value import Sharding

# Called with every definition that is made: so the command line finds a script's definitions.
observers: list[Callable[[FusionDefinition], None]] = []


class FusionDefinition(PlannedDefinition):
    """A program written for one large imaginary device, and how a few of its tensors split over a mesh of ranks.

    Use it as a context manager: define inputs, apply `fd.ops`, mark outputs, annotate. Then call it with global
    tensors, `execute` it on this process' rank (shards in, shards out) or `simulate` all ranks here (global tensors in
    and out). The first call with a new set of shapes compiles; later calls with the same shapes plan nothing.

    seed: of the program's random numbers, which are the same on every mesh (None: one that no other definition has,
        which follows from how many were made before).
    max_wire: bytes that a rank may send (None: MESHFUSE_MAX_WIRE, else no bound). A plan that sends more gives a
        PlanWarning that names the annotation to change. Without a bound there is one only for a very large collective,
        where another annotation would halve what the whole plan sends.
    max_memory: bytes that a rank may hold (None: MESHFUSE_MAX_MEMORY, else no bound). Where a plan holds more, gathered
        tensors are dropped after one use and gathered again for the next; where that is not enough, a PlanWarning says
        what takes the memory.
    search: how long to plan (None: MESHFUSE_SEARCH, else "auto"). "fast": every program once. "auto": those of up to
        400 ops several times (a tenth of a second to some seconds), longer ones by a few of their repeated layers where
        that takes about a second: on one mesh axis, or with few different ops. "thorough": every program several times,
        in seconds.

    Raises DefinitionError for a seed, bound or search that is none of these.
    """

    _state: frozenset[str] = frozenset()  # The names of a made definition's own attributes.

    def __init__(
        self, seed: int | None = None, *, max_wire: float | None = None, max_memory: float | None = None,
        search: str | None = None,
    ) -> None:  # fmt: skip
        if seed is not None and as_int(seed) is None:
            needed = "an int or None"
            do = "Pass the seed of its random numbers; its ops are defined by calls of fd.ops."
            raise user_error("FusionDefinition: seed", shown(seed), needed, do, caller_line())
        super().__init__(max_wire, max_memory, search)
        self._seed = Seed(seed)
        self._constants: set[int] = set()  # Tensors that no gradient passes.
        # Runs so far, counted apart: a simulation on one rank must not change that rank's random numbers.
        self._steps = {"ranks": 0, "simulated": 0}
        # Programs by `_key`: shapes, scalars that sizes follow, device and options.
        self._simulated: dict[Any, SimulatedProgram] = {}
        self._bound: dict[Any, RankProgram] = {}
        # Those of `execute` by arguments that were found to fit: such are not checked again.
        self._familiar = ArgumentGuards[RankProgram]()
        # The stride orders of outputs, once they are asked for, and whether any is not row-major.
        self._orders: list[tuple[int, ...] | None] | None = None
        self._ordered = False
        self._state = frozenset(vars(self))
        for observe in observers:
            observe(self)

    def __setattr__(self, name: str, value: Any) -> None:
        """Scripts keep tensors as attributes. Raises DefinitionError for a name that the definition itself uses."""
        check_attribute(type(self), self._state, name, value, caller_line)
        super().__setattr__(name, value)

    def __init_subclass__(cls) -> None:
        """Have a subclass whose `__init__` does not call this one's be told so where it is instantiated."""
        super().__init_subclass__()
        if "__init__" in vars(cls):
            setattr(cls, "__init__", calling_ours(cls.__init__))  # noqa: B010  # no type of a method fits

    def __enter__(self) -> FusionDefinition:
        return self

    def __repr__(self) -> str:
        return definition_source(self)

    # gradients --------------------------------------------------------------------------------------------------

    def grad(self, outputs: Any, wrt: Any, grad_outputs: Any = None) -> Any:
        """Append the backward of this definition; returns the gradients by `wrt`, a list where `wrt` is a list.

        A gradient has its primal's shape and dtype. It is the derivative of the sum of output * grad_output over all
        `outputs`, a grad_output of None standing for ones, and zeros where no output depends on the primal. A gradient
        that is added as an output is sharded as its primal is annotated (whole, where the primal is an input without an
        annotation), unless the gradient is annotated itself.

        Raises DefinitionError for tensors that are no real or complex numbers, and where an op on the way has no
        derivative.
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
        """Let no gradient pass through `tensor`, and return it; for one use of it alone, pass `fd.ops.set(tensor)`."""
        self._constants.add(self._own(tensor, "stop_gradient", self._changing()).id)
        return tensor

    # what is done once ------------------------------------------------------------------------------------------

    def prepared(
        self, inputs: Any, *shapes: Sequence[int], gathered: bool = False
    ) -> tuple[FusionDefinition, FusionDefinition]:
        """Cut this program in two definitions: what follows from `inputs` alone, and everything else.

        For weights that keep their values over many calls, as in inference. The first definition brings them to where
        they are read (a reshard, a cast, a product of two). The second takes the inputs that are left, in their order,
        and then what the first returned::

            once, each = fd.prepared([w])
            kept = once.execute([w_shard])
            out = each.execute([x_shard, *kept])

        gathered: also keep what is more of a tensor than the rank was given, such as a weight gathered from its shards.
            Without it the second definition does what would take more memory (a gather, a broadcast) at every call.

        Neither definition holds more than `max_memory`, as far as leaving more to the second helps.

        Both are for one set of global shapes: `shapes`, one per input tensor, or those of the latest call. The second
        draws other random numbers than this definition. Raises DefinitionError for anything in `inputs` that is no
        input.
        """
        line = caller_line()
        given = [self._own(t, "prepared", line).id for t in _listed(inputs)]
        check_flags(line, gathered=gathered)
        return prepared(self, given, shapes, self._like, gathered, line)

    def _like(self) -> FusionDefinition:
        bounds = {"max_wire": self.max_wire, "max_memory": self.max_memory}
        return FusionDefinition(self._seed.given, **bounds, search=self.effort.value)

    # running --------------------------------------------------------------------------------------------------

    def execute(
        self, inputs: Sequence[Any], *, idle_ranks: bool = False, backend: str | None = None, cuda_graph: bool = False
    ) -> list[Any]:  # fmt: skip
        """Run on this process' rank, on shards.

        `inputs` are this rank's shards of the input tensors (or DTensors), and scalars, in the order of their
        definition. Returns this rank's shard of every output: DTensors if an input was one, None for an output on a
        mesh that this rank is not part of.

        idle_ranks: allow a mesh of fewer ranks than the job has. The others need not call this, and may run
            definitions of their own meanwhile; where they do call it, they get None.
        backend: what computes the segments between communications: "eager" (torch, op by op), "inductor", "nvfuser", or
            "auto" (eager until compiling pays). None is MESHFUSE_BACKEND, else "auto".
        cuda_graph: capture the step on a GPU at its first call, and replay it from then on. The program must take no
            scalars and draw no random numbers.

        Raises ArgumentError for arguments that do not fit, RankError where a peer fails or disagrees, RankTimeout where
        one does not answer, and KernelError or OutOfMemoryError where torch cannot compute an op.
        """
        program, outputs, specs, step = None, None, None, self._steps["ranks"]
        try:
            options = (idle_ranks, backend, cuda_graph)
            program = self._familiar.find(inputs, options)
            if program is None:
                program, inputs, specs = self._fitted(inputs, options)
            object.__setattr__(self, "_latest", program)  # Past our own __setattr__, which takes a microsecond.
            step = self._next_step("ranks")
            outputs = program.run(inputs, self.random_state(program.device, step), step)
            laid_out = self._laid_out(outputs)
            return laid_out if specs is None else wrap_outputs(laid_out, specs)
        except BaseException as error:
            self._leave_off(program, step, outputs, error)
            raise

    def _fitted(self, inputs: Sequence[Any], options: Options) -> tuple[RankProgram, list[Any], Any]:
        """The program for arguments that have not been checked yet.

        Also the arguments in the form that it takes, and how its outputs become DTensors (None where they do not).
        """
        line, (idle_ranks, backend, cuda_graph) = caller_line(), options
        World.current()  # What is wrong with the arguments of one rank its peers learn.
        check_flags(line, idle_ranks=idle_ranks, cuda_graph=cuda_graph)
        check_count(self, inputs, line)
        name = requested(backend, line)
        locals_, dtensors = local_parts(inputs), dtensors_of(self, inputs, line)
        given = split_arguments(self, locals_, line)
        key = self._key(given, idle_ranks, name, cuda_graph, *dtensors.items())
        program = self._bound.get(key)
        if program is None:
            program = self._bound[key] = self._bind_rank(given, dtensors, idle_ranks, line, None, name, cuda_graph)
        if not any(self.tensors[i].stride_order for i in given.tensors):
            self._familiar.learn(inputs, options, program)
        specs = output_specs(program.compiled, inputs, line) if dtensors else None
        return program, given.in_order(self.inputs), specs

    def _leave_off(self, program: RankProgram | None, step: int, outputs: Any, error: BaseException) -> None:
        """Tell the world of an error at a step, outside of this rank's program: other ranks may not have met it.

        An error about other ranks is known to all of them already; it gets the user's line if it has none.
        """
        if isinstance(error, RankError):
            error.where = error.where or caller_line()
        before = program is None or program.step <= step
        if (before or outputs is not None) and not isinstance(error, RankError):
            begins = f" that begins at {self.tensors[0].line}" if self.tensors else ""
            when = "before" if before else "after"
            where = f"step {step + 1} of the definition{begins}, {when} its program"
            World.leave_off(where, lambda size: named_ranks(self, size), error)

    def simulate(
        self, inputs: Sequence[Any], *, check_replicas: bool = False, check_streams: bool = False
    ) -> list[torch.Tensor]:
        """Run all ranks' programs in this process, on global tensors; returns the global outputs.

        check_replicas: compare all replicas of each shard of the outputs; AssertionError where two differ.
        check_streams: follow each rank's kernels and communications as a GPU would order them, by streams and events
            alone; AssertionError where two of them use the same memory and nothing orders them.

        Raises ArgumentError for arguments that do not fit.
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
            self._simulated[key] = SimulatedProgram(compiled, simulation)
        made = self._latest = self._simulated[key]
        with torch.no_grad():
            arguments = made.arguments(self, given)
            return self._laid_out(
                made.run(arguments, self._seed.of(self), self._next_step("simulated"), check_replicas)
            )

    def __call__(self, *inputs: Any) -> list[torch.Tensor]:
        """Global tensors in and out, on the ranks that a launcher started; on simulated ones where it started none.

        On real ranks every rank must pass the same tensors: the first call with new shapes compares them, and raises
        RankError where they differ. Other errors are those of `execute`.
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
            program = self._bind_rank(given, {}, False, line, whole=shapes)
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

    def random_state(self, device: torch.device, step: int) -> tuple[int, int]:
        """The seed and the offset by which step number `step` on this device draws random numbers."""
        return self._seed.of(self), step

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
        known: Mapping[int, GivenDTensor],
        idle_ranks: bool,
        line: SourceLine,
        whole: Mapping[int, tuple[int, ...]] | None = None,
        backend: str | None = None,
        cuda_graph: bool = False,
    ) -> RankProgram:
        """The program for these arguments, compiled and bound to this rank.

        `known` is what DTensors tell. The shapes of plain shards are completed from the ranks' local shapes; `whole`
        are the global shapes, if the arguments were whole.
        """
        world = World.current()
        check_world(self, world.size, idle_ranks, line)
        if world.size > 1:
            check_numbers(self, given, "on several ranks", line)
        cut = {i: found.cut for i, found in known.items() if found.cut is not None}
        told = {i: found.shape for i, found in known.items()}
        shapes = global_shapes(self, given, world.rank, told, cut, line) if whole is None else dict(whole)
        mesh = DeviceMesh(list(range(world.size)))
        sizes = Inputs({}, given.scalars, given.device, tuple(cut.items()) if known else None)
        near = nearness(line)
        # Whole arguments are compared, numbers among them, once the program has been.
        source = "\n".join([repr(self), *self._settings(near), *([] if whole is not None else scalar_lines(given))])
        named = named_ranks(self, world.size)
        compiled = self._compile(sizes, shapes, mesh, line, near)

        def renewed() -> CompiledProgram:
            return self._renewed(compiled, sizes, shapes, mesh)

        def captured(program: HostProgram, main: Any) -> Captured:
            check_capturable(program, sizes, line)
            groups = [world.group(ranks) for ranks in program.groups if world.rank in ranks]
            return Captured(main, lambda: check_groups(groups, line), watched(world, groups))

        capture = captured if cuda_graph else None
        made = RankProgram(compiled, world, given.device, source, requested(backend, line), named, renewed, capture)
        self._seed.agree(self, world)
        return made

    def _settings(self, near: float) -> list[str]:
        """A line of text for each setting that plans depend on, to compare over ranks."""
        return [
            f"search={self.effort.value!r} (its own, or MESHFUSE_SEARCH)", f"MESHFUSE_NEAR={near:g}",
            f"max_memory={self.max_memory} (its own, or MESHFUSE_MAX_MEMORY)",
        ]  # fmt: skip

    def backends(self, *shapes: Sequence[int]) -> str:
        """A table of what computes each segment, and why, for the latest (or the given) shapes.

        Where no rank has bound the program yet it says what MESHFUSE_BACKEND (else "auto") would choose for
        tensors on the CPU.
        """
        compiled = self.latest(shapes)
        bound = self._segments_of(compiled)
        if bound:
            return backends_table(compiled, bound[-1].chosen)
        chosen = assigned(compiled.segmented, requested(None, caller_line()), torch.device("cpu")).chosen
        return backends_table(compiled, {f"segment_{number}": what for number, what in chosen.items()})

    def host_program(self, rank: int, *shapes: Sequence[int]) -> HostProgram:
        """The program of a rank for the latest (or the given) global shapes, one per input tensor.

        Its text says what computes each kernel, and why, once the rank has bound the program. Raises DefinitionError
        for a rank that the program does not have.
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
