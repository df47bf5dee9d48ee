"""Runs the program of one rank on a real process group."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Sequence
from enum import Enum
from types import FrameType
from typing import TYPE_CHECKING, Any

import torch

from ..compiler import CompiledProgram
from ..errors import RankError, SourceLine, user_error
from ..host_ir import HostProgram, digest_of
from ..long_work import saying
from ..lowering.instructions import CommunicationCall
from ..lowering.segments import Segment
from ..mesh import DeviceMesh
from ..ops.values import ScalarRef
from ..plans.shape_reuse import RENEWED
from ..runtime.reductions import dense
from ..runtime.world import World
from ..sharding.data import INTEGERS, unshard
from ..sharding.value import Sharding
from .arguments import Inputs
from .bind import bind_program, communication_of, instruction_at, instruction_of, line_in_main
from .graphs import Main
from .kernel_errors import kernel_errors
from .modes import modes_are_on, without_modes
from .record import Recorder, recorder, unwatch
from .segments import Segments

if TYPE_CHECKING:
    from ..definition.recording import Recording

# Called with every program that has run on this rank, for profilers.
finished: list[Callable[[RankProgram], None]] = []


def check_world(recording: Recording, size: int, idle_ranks: bool, line: SourceLine) -> None:
    """Raises DefinitionError if the meshes do not fit the number of ranks."""
    ranks = named_ranks(recording, size)
    if max(ranks) >= size:
        largest = max(_meshes(recording), key=lambda mesh: max(mesh.ranks))
        raise user_error(
            f"the mesh is larger than the world: {largest}", f"{size} rank{'s' if size > 1 else ''}",
            f"{max(ranks) + 1} ranks",
            f"Start them with 'meshfuse run --ranks {max(ranks) + 1} script.py', or use fd.simulate.", line,
        )  # fmt: skip
    if len(ranks) < size and not idle_ranks:
        raise user_error(
            "the world is larger than the mesh", f"{size} ranks, of which the meshes use {list(ranks)}",
            "a mesh of all ranks", f"Start {len(ranks)} ranks, or pass idle_ranks=True to execute.", line,
        )  # fmt: skip


def named_ranks(recording: Recording, size: int) -> tuple[int, ...]:
    """The ranks of the meshes that a definition names; all of them where it names none."""
    return tuple(sorted({rank for mesh in _meshes(recording) for rank in mesh.ranks})) or tuple(range(size))


def _meshes(recording: Recording) -> list[DeviceMesh]:
    return [a.mesh for a in recording.annotations.values() if a.mesh is not None]


def check_same_arguments(recording: Recording, given: Inputs, world: World) -> None:
    """Raises RankError on every rank if ranks have different global arguments; reads each argument once."""
    lines = [f"{recording.tensors[i].label}: a sum of bits of {sum_of_bits(t)}" for i, t in given.tensors.items()]
    text = "\n".join([*lines, *scalar_lines(given)])
    world.rendezvous.check_same(digest_of(text), "the global arguments", world.all_ranks, lambda: text, _SAME_ARGUMENTS)


def scalar_lines(given: Inputs) -> list[str]:
    """A line of text for each scalar of a call, to compare over ranks."""
    return [f"scalar s{i}: {value!r}" for i, value in given.scalars.items()]


_SAME_ARGUMENTS = (
    "fd(...) takes whole tensors, the same on all ranks: seed torch alike (torch.manual_seed(0)), or pass each rank "
    "its own shards with fd.execute."
)


def sum_of_bits(tensor: torch.Tensor) -> int:
    """A checksum: the sum of the elements' bits as integers, each times an odd number that depends on its position.

    It depends on the order of the elements, too: a data set that is shuffled differently has another checksum.
    """
    flat = dense(tensor.detach().contiguous().reshape(-1))
    bits, found = flat.view(INTEGERS[min(tensor.element_size(), 8)]), 0
    for start in range(0, bits.numel(), _AT_ONCE):
        part = bits[start : start + _AT_ONCE]
        places = torch.arange(start, start + part.numel(), device=part.device)
        found += int((part * (places * _SPREAD | 1)).sum(dtype=torch.int64))
    return found


_AT_ONCE = 1 << 20
_SPREAD = 0x5851F42D4C957F2D


class _Phase(Enum):
    """The phase of a call: before anything, compiling segments, running, gathering whole outputs, or over."""

    BEFORE, COMPILING, RUNNING, GATHERING, OVER = range(5)


class RankProgram:
    """A compiled program, bound to the process groups of this rank.

    Raises RankError on every rank of its meshes if their programs differ. On other ranks it does nothing.

    source: the text of the definition. The ranks compare it, and the plan, before the first execution.
    backend: what runs the segments, one of `backends.assignment.NAMES`.
    ranks: the ranks of the meshes in the definition.
    renew: makes a program with its own plan, for a program that reuses the plan of other shapes and runs often; told
        whether its outputs must be sharded as before.
    capture: replaces the main function by a captured one, once the segments are compiled.

    State of a call, which a rank reports to others: `step` is its number, `running` whether the program is running,
    `_phase` its phase, `_gathered` which output is being gathered.

    `ranks` are those that compare the program and its calls; empty if this rank does not take part.

    `_main` is the main function; `_run` is what a step calls: `_main` or its captured form. `_calls` counts the steps
    of this plan. Segments are compiled before step `_due` (None: done, or there are none). The plan is renewed before
    step `_renewal` (None: never).
    """

    def __init__(
        self, compiled: CompiledProgram, world: World, device: torch.device, source: str, backend: str,
        ranks: Sequence[int], renew: Callable[[bool], CompiledProgram] | None = None,
        capture: Callable[[HostProgram, Main], Main] | None = None,
    ):  # fmt: skip
        self.world, self.device, self._source, self._backend = world, device, source, backend
        self.step, self.running, self._phase, self._gathered = 0, False, _Phase.OVER, 0
        self._capture, self._compiling = capture, threading.Lock()
        self._renew, self._named, self.ranks = renew, ranks, ()
        with world.order_lock:
            self._bind(compiled)
        self._renewal = RENEWED if self.compiled.taken_from is not None else None

    def _bind(self, compiled: CompiledProgram) -> None:
        """Use this program, if all of its ranks have the same one. Raises RankError if they differ."""
        world, graph = self.world, compiled.graph
        together = tuple(sorted({*self._named, *compiled.ranks}))
        self.ranks = together if world.rank in together else ()
        compiled = self._agreed(compiled)
        active = world.rank in compiled.ranks
        if active:
            with World.planning(graph.in_words()):
                self._bind_program(compiled)
        self.compiled, self.active = compiled, active
        self._scalars = [(i, ref.id) for i, ref in enumerate(graph.inputs) if isinstance(ref, ScalarRef)]
        made = graph.tensors[graph.outputs[0]]
        self.line = made.line
        self.name = f"the definition of {made.label} at {made.line} (plan {compiled.digest})"
        self._calls, self._due = 0, self.segments.due if active else None

    def _agreed(self, compiled: CompiledProgram) -> CompiledProgram:
        """The program, once all of its ranks have the same. Raises RankError if they differ.

        Ranks that have run different calls, as after an error that one of them met alone, may know different plans of
        near sizes. They then all plan for these very sizes.
        """
        text, check = agreed_text(compiled, self._source, self._backend), self.world.rendezvous.check_same
        mine = f"{digest_of(text)} {compiled.taken_from is not None}"
        found = [value.split() for value in self.world.rendezvous.compared(mine, "the program", self.ranks)]
        if len({digest for digest, _ in found}) < 2:
            return compiled
        if self._renew is not None and any(taken == "True" for _, taken in found):
            compiled = self._renew(False)
            text = agreed_text(compiled, self._source, self._backend)
        check(digest_of(text), "the program", self.ranks, lambda: text)
        return compiled

    def _bind_program(self, compiled: CompiledProgram) -> None:
        program = compiled.host_program(self.world.rank)
        labels = group_labels(program)
        bound = bind_program(program, lambda ranks: self.world.group(ranks, labels[ranks]), self.device)
        segments = Segments(bound, program, compiled.segmented, self.device, self._backend)
        self._recorder: Recorder | None = None
        self.world.recorder = self.world.recorder or recorder(self.world.rank)
        run = bound.main
        if self._capture is not None:
            # What no graph can do is refused here, also where segments are compiled before the capture.
            captured = self._capture(program, run)
            run = captured if segments.due is None else run
        self.program, self.bound, self.segments, self._main, self._run = program, bound, segments, bound.main, run

    def run(self, arguments: Sequence[Any], state: tuple[int, int], step: int, whole: bool = False) -> list[Any]:
        """This rank's results, or with `whole` the global outputs, which every rank gets.

        state: (seed, offset), from which random numbers follow.
        step: how many steps came before.

        No gradients are recorded: a definition's own come from `fd.grad`. The error of a collective that fails names
        its tensor, the step and the user's line.
        """
        self.step, outer = step + 1, self._phase  # An op's function may call the definition that it is in.
        try:
            self._phase = _Phase.BEFORE
            with self.world.order_lock:
                if not modes_are_on():
                    out = self._run_step(arguments, *state)
                else:
                    with without_modes(self.device):
                        out = self._run_step(arguments, *state)
                self._phase = _Phase.GATHERING if whole else _Phase.OVER
                return self._gather(out) if whole else out
        except BaseException as error:
            if isinstance(error, RankError):
                self._locate(error)
            self._leave_off(error)
            raise
        finally:
            self._phase = outer

    def _run_step(self, arguments: Sequence[Any], seed: int, offset: int) -> list[Any]:
        self.running, recording = True, torch.is_grad_enabled()
        try:
            torch._C._set_grad_enabled(False)
            if self._calls == self._renewal:
                self._plan_anew()
            before = self._calls
            self._calls += 1
            self.world.begin(self, self.ranks, self._numbers(arguments) if self._scalars else "")
            if not self.active:
                return self._report_finished([None] * len(self.compiled.graph.outputs))
            if self._due is not None and before >= self._due:
                self._compile_once(arguments, seed, offset)
            if self._recorder is not None or self.world.recorder is not None:
                self._watch()
            self._phase = _Phase.RUNNING
            try:
                out = list(self._run(*arguments, seed, offset))
            except Exception:
                with kernel_errors(self.bound, self.program):  # Entered at every step it would take a microsecond.
                    raise
            self._phase = _Phase.OVER
            return self._report_finished(out)
        finally:
            self.running = False
            torch._C._set_grad_enabled(recording)

    def _compile_once(self, arguments: Sequence[Any], seed: int, offset: int) -> None:
        """Compile, unless it is being done: threads of a process without peers, and functions of ops, may run the
        program meanwhile.
        """
        if self._compiling.acquire(blocking=False):
            try:
                self._compile(arguments, seed, offset)
            finally:
                self._compiling.release()

    def _watch(self) -> None:
        """Let the recorder that the world has now, if any, see what runs."""
        if self._recorder is not self.world.recorder:
            unwatch(self.bound.scope)
            self._recorder = self.world.recorder
        if self._recorder is not None:
            self._recorder.watch(self.bound.scope, self.program)

    def _numbers(self, arguments: Sequence[Any]) -> str:
        """The scalars of a call as text, which all ranks of the program must have alike."""
        return f"with {', '.join(f's{number} = {arguments[i]!r}' for i, number in self._scalars)}: "

    def _plan_anew(self) -> None:
        """Plan for these very sizes; all ranks do so at the same call."""
        assert self._renew is not None
        self._renewal = None
        compiled = self._renew(True)
        if compiled.digest != self.compiled.digest:
            self._bind(compiled)
        else:
            self.compiled = compiled

    def _report_finished(self, out: list[Any]) -> list[Any]:
        for tell in finished:
            tell(self)
        return out

    def _compile(self, arguments: Sequence[Any], seed: int, offset: int) -> None:
        """Compile the segments, all ranks one segment at a time, so that no rank waits long for another's compiler.

        An extra execution with the same random numbers first finds the arguments of each segment. Where an error ends
        that execution, the next call compiles. Nothing where another thread has just done it.
        """
        if self._due is None:
            return
        with self.segments.recorded(), kernel_errors(self.bound, self.program):
            self._main(*arguments, seed, offset)
        self._phase = _Phase.COMPILING
        waits = any(not isinstance(part, Segment) for part in self.compiled.segmented.parts)
        ranks = self.compiled.ranks if waits else ()
        with saying(f"compiling the kernels of {self.name}"):
            while self.world.rendezvous.any(self.segments.compile_next, "compiling segments", ranks):
                pass
        self._due = None
        if self._capture is not None:
            self._run = self._capture(self.program, self._main)

    def _locate(self, error: RankError) -> None:
        """Add to an error the collective that it came from, its tensor, what that is for, and the user's line."""
        found = instruction_at(self.bound, error.__traceback__) if self.active else None
        about = communication_of(self.program, found) if self.active else None
        if error.where is None:
            place = f"{self.name if about is None else about.description} in step {self.step}: "
            error.where = self.line if about is None else about.line
            error.args, error.ended = (place + error.args[0], *error.args[1:]), place + error.ended

    def _leave_off(self, error: BaseException) -> None:
        """Tell the world of an error that ended a call.

        The script may catch it, and go on with this step or the next.
        """
        phase, lock = self._phase, self.world.order_lock
        if self.world.size == 1:
            return
        if phase is _Phase.GATHERING:
            lock.leave_off(f"step {self.step} of {self.name}, output {self._gathered}", self.world.all_ranks, error)
        elif self.active:
            traces = (error.__traceback__, getattr(error.__cause__, "__traceback__", None))  # a KernelError has a cause
            line = max(line_in_main(self.bound, trace) for trace in traces)
            if not line and isinstance(error, Exception if phase is _Phase.COMPILING else RankError):
                return  # All ranks have this error, from the same meeting.
            sent = [place for place, i in self.bound.where.items() if isinstance(i, CommunicationCall)]
            end = {_Phase.RUNNING: line, _Phase.OVER: math.inf}.get(phase, 0)
            if sent:
                before = sum(place < end for place in sent)
                where = f"step {self.step} of {self.name}, after {before} of {len(sent)} communications"
                lock.leave_off(where, self.compiled.ranks, error)

    def place(self, frame: FrameType | None) -> str:
        """Where in the program a thread with this innermost frame is, in words: for other ranks, and for last words."""
        about = communication_of(self.program, instruction_of(self.bound, frame)) if self.active else None
        when = f"{'in' if self.running else 'after'} step {self.step}"
        return when if about is None else f"{about.description} {when} at {about.line}"

    def _gather(self, outputs: Sequence[Any]) -> list[torch.Tensor]:
        """The global outputs on every rank, from every rank's shards."""
        graph, out = self.compiled.graph, []
        rows = zip(graph.outputs, self.compiled.output_shardings(), outputs, strict=True)
        for self._gathered, (tensor, sharding, local) in enumerate(rows):
            ttype = graph.tensors[tensor].type
            dtype = getattr(torch, ttype.dtype.value)
            with torch.no_grad():
                out.append(gather_output(self.world, local, sharding, ttype.shape, dtype, self.device))
        return out


def agreed_text(compiled: CompiledProgram, source: str, backend: str) -> str:
    """The text that must be equal on all ranks of a program: the definition, the shapes and the plan made for them."""
    graph = compiled.graph
    shapes = [f"{graph.tensors[i].label}: global shape {list(graph.shape(i))}" for i in graph.input_tensors]
    return "\n".join([source, *shapes, f"backend {backend}", f"plan {compiled.digest}"])


def group_labels(program: HostProgram) -> dict[tuple[int, ...], str]:
    """By group of a program, the mesh axes of the first communication in it."""
    labels: dict[tuple[int, ...], str] = {}
    for instruction in program.instructions:
        if isinstance(instruction, CommunicationCall):
            labels.setdefault(instruction.group, instruction.about.axes or "of two meshes")
    return labels


def gather_output(
    world: World,
    local: torch.Tensor | None,
    sharding: Sharding,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    device: torch.device,
    ranks: tuple[int, ...] = (),
) -> torch.Tensor:
    """A global tensor on every rank of the world, from the shards on its mesh; shards are padded to one size.

    ranks: those that call this and get it, all of the mesh among them; without any, those of the world.
    """
    everywhere = ranks or world.all_ranks
    count = sharding.max_local_numel(shape)
    mine = torch.zeros(count, dtype=dtype, device=device)
    if local is not None:
        mine[: local.numel()] = local.reshape(-1)
    everyone = torch.empty(count * len(everywhere), dtype=dtype, device=device)
    world.group(everywhere, "outputs").all_gather(everyone, mine).wait()
    shards: dict[int, torch.Tensor] = {}
    for rank in sharding.mesh.ranks:
        part, place = sharding.local_shape(shape, rank), everywhere.index(rank)
        shards[rank] = everyone[place * count : place * count + math.prod(part)].view(part)
    return unshard(shards, sharding, shape)
