"""Running a definition: on this process' rank, on simulated ranks, or as its user's launcher says."""

from __future__ import annotations

import functools
import hashlib
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

import torch

from .argument_checks import check_flags
from .backends.assignment import Chosen, assigned, requested
from .compiler import CompiledProgram
from .default_machine import default_machine, described
from .definition.recording import Recording
from .errors import RankError, SourceLine, caller_line
from .executor.argument_guards import ArgumentGuards, Options
from .executor.argument_shapes import check_global_shapes, global_shapes
from .executor.arguments import Inputs, check_count, check_numbers, split_arguments
from .executor.dtensor import GivenDTensor, dtensors_of, local_parts, output_specs, wrap_outputs
from .executor.graphs import Captured, check_capturable, check_groups, watched
from .executor.segments import Segments
from .executor.simulate import SimulatedProgram, Simulation
from .executor.spmd import RankProgram, check_same_arguments, check_world, named_ranks, scalar_lines
from .host_ir import HostProgram, verify_together
from .kernels import in_stride_order
from .lowering.segments import Segment
from .mesh import DeviceMesh
from .ops.values import TensorRef
from .plans.shape_reuse import nearness
from .programs import Programs
from .report.bill import table
from .runtime.world import World
from .sharding.data import shard
from .sharding.value import Sharding

_numbers = itertools.count(1)  # Of definitions without a seed.
_SHOWN = 6  # How many ops of a segment are named.


class Runnable(Protocol):
    """The definition that is run."""

    recording: Recording

    def _complete(self) -> None: ...
    def _random_state(self, device: torch.device, step: int) -> tuple[int, int]: ...
    def _output_orders(self) -> list[tuple[int, ...] | None]: ...


class Execution:
    """Runs a definition's programs.

    steps: runs so far, counted apart: a simulation on one rank must not change that rank's random numbers.
    simulated, bound: programs by shapes, scalars that sizes follow, device and options.
    pinned_draw: the seed and step by which the next run draws random numbers; None for its own.
    latest_draw: those of the latest run.
    """

    def __init__(self, fd: Runnable, programs: Programs) -> None:
        self.fd, self.recording, self.programs = fd, fd.recording, programs
        self.seed = Seed(fd.recording)
        self.steps = {"ranks": 0, "simulated": 0}
        self.simulated: dict[Any, SimulatedProgram] = {}
        self.bound: dict[Any, RankProgram] = {}
        self.pinned_draw: tuple[int, int] | None = None
        self.latest_draw = (0, 0)
        # Those of `execute` by arguments that were found to fit: such are not checked again.
        self._guards = ArgumentGuards[RankProgram]()
        # The stride orders of outputs, from the first run on, and whether any is not row-major.
        self._orders: list[tuple[int, ...] | None] | None = None
        self._ordered = False

    def share(self, other: Execution) -> None:
        """Use the programs of an equal definition, and go on with its random numbers."""
        self.bound, self.simulated, self.steps = other.bound, other.simulated, other.steps
        self.programs.compiled = other.programs.compiled

    def leave_ranks(self) -> None:
        """Forget what was bound to this rank's groups. Programs stay planned and compiled."""
        self.bound, self._guards = {}, ArgumentGuards[RankProgram]()

    def execute(self, inputs: Sequence[Any], options: Options) -> list[Any]:
        """The outputs of this rank, from its shards of the inputs."""
        program, outputs, specs, step = None, None, None, self.steps["ranks"]
        try:
            program = self._guards.find(inputs, options)
            if program is None:
                program, inputs, specs = self._fitted(inputs, options)
            self.programs.last_run = program
            step = self._next_step("ranks")
            outputs = program.run(inputs, self.fd._random_state(program.device, step), step)
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
        self.fd._complete()
        check_count(self.recording, inputs, line)
        name = requested(backend, line)
        locals_, dtensors = local_parts(inputs), dtensors_of(self.recording, inputs, line)
        given = split_arguments(self.recording, locals_, line)
        key = self._key(given, idle_ranks, name, cuda_graph, *dtensors.items())
        program = self.bound.get(key)
        if program is None:
            program = self.bound[key] = self._bind_rank(given, dtensors, idle_ranks, line, None, name, cuda_graph)
        if not any(self.recording.tensors[i].stride_order for i in given.tensors):
            self._guards.learn(inputs, options, program)
        specs = output_specs(program.compiled, inputs, line) if dtensors else None
        return program, given.in_order(self.recording.inputs), specs

    def _leave_off(self, program: RankProgram | None, step: int, outputs: Any, error: BaseException) -> None:
        """Tell the world of an error at a step, outside of this rank's program: other ranks may not have met it.

        An error about other ranks is known to all of them already; it gets the user's line if it has none.
        """
        if isinstance(error, RankError):
            error.where = error.where or caller_line()
        before = program is None or program.step <= step
        if (before or outputs is not None) and not isinstance(error, RankError):
            begins = f" that begins at {self.recording.tensors[0].line}" if self.recording.tensors else ""
            when = "before" if before else "after"
            where = f"step {step + 1} of the definition{begins}, {when} its program"
            World.leave_off(where, lambda size: named_ranks(self.recording, size), error)

    def simulate(self, inputs: Sequence[Any], check_replicas: bool, check_streams: bool) -> list[torch.Tensor]:
        """The global outputs, by all ranks' programs in this process."""
        line = caller_line()
        check_flags(line, check_replicas=check_replicas, check_streams=check_streams)
        self.fd._complete()
        given = split_arguments(self.recording, inputs, line)
        if check_replicas:
            check_numbers(self.recording, given, "check_replicas", line)
        name = requested(None, line)
        key = self._key(given, name, check_streams)
        if key not in self.simulated:
            compiled = self.programs.program(
                given, check_global_shapes(self.recording, given, line), DeviceMesh([0]), line
            )
            programs = [compiled.host_program(rank) for rank in compiled.ranks]
            verify_together(programs)  # All of them are there: no need to tell classes of ranks.
            simulation = Simulation(programs, given.device, compiled.segmented, name, check_streams)
            self.simulated[key] = SimulatedProgram(compiled, simulation)
        made = self.programs.last_run = self.simulated[key]
        with torch.no_grad():
            arguments = made.arguments(self.recording, given)
            draw = self.random_state(self._next_step("simulated"))
            return self._laid_out(made.run(arguments, *draw, check_replicas))

    def on_launched_ranks(self, inputs: Sequence[Any]) -> list[torch.Tensor]:
        """The global outputs, by the ranks that a launcher started."""
        world = World.current()
        program, outputs, step = None, None, self.steps["ranks"]
        try:
            program, args = self._fitted_whole(inputs, world)
            self.programs.last_run = program
            step = self._next_step("ranks")
            outputs = program.run(args, self.fd._random_state(program.device, step), step, whole=True)
            return self._laid_out(outputs)
        except BaseException as error:
            self._leave_off(program, step, outputs, error)
            raise

    def _fitted_whole(self, inputs: Sequence[Any], world: World) -> tuple[RankProgram, list[Any]]:
        """The program for global tensors, and this rank's parts of them."""
        line = caller_line()
        self.fd._complete()
        given = split_arguments(self.recording, inputs, line)
        shapes = check_global_shapes(self.recording, given, line)
        shardings = self._input_shardings(shapes)
        values = zip(self.recording.inputs, given.in_order(self.recording.inputs), strict=True)
        with torch.no_grad():
            args = [self._local(ref, value, shardings, world.rank) for ref, value in values]
        key = (self._key(given), "global")
        if key not in self.bound:
            program = self._bind_rank(given, {}, False, line, whole=shapes)
            check_same_arguments(self.recording, given, world)
            self.bound[key] = program
        return self.bound[key], args

    def _local(self, ref: Any, value: Any, shardings: Mapping[int, Sharding], rank: int) -> Any:
        if not isinstance(ref, TensorRef) or ref.id not in shardings or rank not in shardings[ref.id].mesh:
            return value
        return shard(value, shardings[ref.id], rank)

    def _input_shardings(self, shapes: Mapping[int, tuple[int, ...]]) -> dict[int, Sharding]:
        annotated = self.recording.annotations
        return {i: annotated[i].sharding(self.recording.tensors[i].name, shape).placement(shape)
                for i, shape in shapes.items() if i in annotated}  # fmt: skip

    def _laid_out(self, outputs: list[Any]) -> list[Any]:
        """The outputs with the strides that allocation domains and stride_order ask for."""
        if self._orders is None:
            self._orders = self.fd._output_orders()
            self._ordered = any(order is not None for order in self._orders)
        if not self._ordered:
            return outputs
        return [
            out if order is None or out is None else in_stride_order(out, list(order))
            for out, order in zip(outputs, self._orders, strict=True)
        ]

    def random_state(self, step: int) -> tuple[int, int]:
        """The seed and the offset by which step number `step` draws random numbers."""
        self.latest_draw = self.pinned_draw or (self.seed.value(), step)
        return self.latest_draw

    def _next_step(self, where: str) -> int:
        step = self.steps[where]
        self.steps[where] = step + 1
        return step

    def _key(self, given: Inputs, *more: Any) -> Any:
        sizes = tuple(given.scalars[i] for i in sorted(self.programs.sized_by()))
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

        `known` is what DTensors say of their inputs. The shapes of plain shards are completed from the ranks' local
        shapes; `whole` are the global shapes, if the arguments were whole.
        """
        world = World.current()
        check_world(self.recording, world.size, idle_ranks, line)
        if world.size > 1:
            check_numbers(self.recording, given, "on several ranks", line)
        cut = {i: found.cut for i, found in known.items() if found.cut is not None}
        wholes = {i: found.shape for i, found in known.items()}
        shapes = global_shapes(self.recording, given, world.rank, wholes, cut, line) if whole is None else dict(whole)
        mesh = DeviceMesh(list(range(world.size)))
        sizes = Inputs({}, given.scalars, given.device, tuple(cut.items()) if known else None)
        near = nearness(line)
        # Whole arguments are compared, numbers among them, once the program has been.
        source = "\n".join([repr(self.fd), *self._settings(near), *([] if whole is not None else scalar_lines(given))])
        named = named_ranks(self.recording, world.size)
        compiled = self.programs.program(sizes, shapes, mesh, line, near)

        renewed = functools.partial(self.programs.renewed, compiled, sizes, shapes, mesh)
        capture = functools.partial(_captured, world, sizes, line) if cuda_graph else None
        made = RankProgram(compiled, world, given.device, source, requested(backend, line), named, renewed, capture)
        self.seed.agree(world)
        return made

    def _settings(self, near: float) -> list[str]:
        """A line of text for each setting that plans depend on, to compare over ranks."""
        return [
            f"search={self.programs.effort.value!r} (its own, or MESHFUSE_SEARCH)", f"MESHFUSE_NEAR={near:g}",
            f"max_memory={self.programs.max_memory} (its own, or MESHFUSE_MAX_MEMORY)",
            f"MESHFUSE_LINKS={described(default_machine())}",
        ]  # fmt: skip

    # what was bound

    def host_program(self, compiled: CompiledProgram, rank: int) -> HostProgram:
        """The program of a rank, with notes of what computes each kernel, and why, once the rank has bound it."""
        program = compiled.host_program(rank)
        for segments in self._segments_of(compiled):
            if segments.rank == program.rank:
                notes = tuple((name, f"{c.backend}: {c.why}") for name, c in segments.chosen.items())
                program = replace(program, notes=notes)
        return program

    def backends(self, compiled: CompiledProgram, line: SourceLine) -> str:
        """A table of what computes each segment; what would compute it on the CPU where no rank has bound it yet."""
        bound = self._segments_of(compiled)
        if bound:
            return backends_table(compiled, bound[-1].chosen)
        chosen = assigned(compiled.segmented, requested(None, line), torch.device("cpu")).chosen
        return backends_table(compiled, {f"segment_{number}": what for number, what in chosen.items()})

    def _segments_of(self, compiled: CompiledProgram) -> list[Segments]:
        """What runs a program's segments: on simulated ranks that compile them, and on this process' rank."""
        simulated = [made.simulation.segments for made in self.simulated.values() if made.compiled is compiled]
        bound = [program for program in self.bound.values() if program.compiled is compiled and program.active]
        return [*itertools.chain(*simulated), *(program.segments for program in bound)]


def backends_table(compiled: CompiledProgram, chosen: Mapping[str, Chosen]) -> str:
    """One row per segment: its name and ops, which backend computes it from which call on, and why."""
    nodes = compiled.graph.nodes
    rows = [("segment", "backend", "why", "ops")]
    for part in compiled.segmented.parts:
        if isinstance(part, Segment) and part.name in chosen:
            names = [nodes[c.node].name for c in part.computes]
            rows.append((part.name, chosen[part.name].backend, chosen[part.name].why, _shortened(names)))
    return table(rows) if len(rows) > 1 else "no segments: what loops over chunks compute runs in eager torch"


def _shortened(names: list[str]) -> str:
    left = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + left


def _captured(world: World, given: Inputs, line: SourceLine, program: HostProgram, main: Any) -> Captured:
    """The program's `main`, to be captured as a CUDA graph. Raises ArgumentError for one that cannot be."""
    check_capturable(program, given, line)
    groups = [world.group(ranks) for ranks in program.groups if world.rank in ranks]
    return Captured(main, lambda: check_groups(groups, line), watched(world, groups))


class Seed:
    """What a definition draws random numbers by: the seed that it is given, or one of its own.

    A definition without a seed draws by the number that it has among those made without one, in the process of its
    first rank. That process gives no number twice, so that no two definitions with the same first rank draw alike; the
    rank is part of the seed, for those that share no rank. A rank whose script makes other definitions beside it has
    other numbers: all go by the first one's.
    """

    def __init__(self, recording: Recording):
        self._recording, self.given = recording, recording.seed
        self._number = next(_numbers) if self.given is None else 0
        self._is_agreed, self._own = False, None

    def value(self) -> int:
        """The seed. A definition's own follows from its first rank, and so from its annotations."""
        if self.given is not None:
            return self.given
        if self._own is None:
            self._own = _own(self._number, min(_ranks(self._recording), default=0))
        return self._own

    def agree(self, world: World) -> None:
        """Take the number of the first rank, if the definition draws; all of its ranks do so at their first call."""
        ranks = _ranks(self._recording) or world.all_ranks
        draws = self.given is None and any(node.draws for node in self._recording.nodes)
        if draws and not self._is_agreed and world.rank in ranks and len(ranks) > 1:
            self._number, self._own = int(world.rendezvous.exchange_among(ranks, "seeds", str(self._number))[0]), None
        self._is_agreed = True


def _own(number: int, first_rank: int) -> int:
    """A seed of 63 bits: those that users give are hardly ever among them."""
    digest = hashlib.blake2b(f"{first_rank} {number}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


def _ranks(recording: Recording) -> list[int]:
    """The ranks of a definition's meshes, in order; none where it has no mesh, and is computed on every rank."""
    meshes = {id(a.mesh): a.mesh for a in recording.annotations.values() if a.mesh is not None}
    return sorted({rank for mesh in meshes.values() for rank in mesh.ranks})
