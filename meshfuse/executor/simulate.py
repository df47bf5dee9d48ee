"""Simulated ranks in one process: programs run on plain tensors and take turns at their waits."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import reduce
from typing import Any

import torch

from .. import kernels
from ..compiler import CompiledProgram
from ..definition.recording import Recording
from ..errors import RankError
from ..host_ir import HostProgram
from ..long_work import saying
from ..lowering.segments import SegmentedDefinition
from ..ops.values import TensorRef
from ..sharding.data import shard, unshard
from ..sharding.value import Sharding
from .arguments import Inputs
from .bind import BoundProgram, bind_program
from .kernel_errors import kernel_errors
from .modes import without_modes
from .segments import Segments
from .stream_order import Streams


@dataclass(slots=True, eq=False)
class SimulatedWork:
    """A collective; it is done when all ranks of its group have issued it."""

    what: str
    done: bool = False


@dataclass(slots=True)
class _Arrivals:
    """The ranks that have issued one collective, with their arguments."""

    size: int
    calls: dict[int, tuple[str, tuple[Any, ...], SimulatedWork]] = field(default_factory=dict)


class Hub:
    """The simulated network. It matches the n-th collectives of the ranks of a group, and messages in order."""

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        """Drop what a failed run has issued."""
        self._issued: dict[tuple[tuple[int, ...], int], int] = {}
        self._arrivals: dict[tuple[tuple[int, ...], int], _Arrivals] = {}
        self._sent: dict[tuple[tuple[int, ...], int, int], list[torch.Tensor]] = {}
        self._expected: dict[tuple[tuple[int, ...], int, int], list[tuple[torch.Tensor, SimulatedWork]]] = {}

    def next(self, group: SimulatedGroup) -> int:
        """The number of a rank's next collective in a group, from 0."""
        place = (group.ranks, group.index)
        self._issued[place] = self._issued.get(place, 0) + 1
        return self._issued[place]

    def arrive(self, group: SimulatedGroup, number: int, kind: str, arguments: tuple[Any, ...]) -> SimulatedWork:
        """Record the arguments of one rank; the last rank of the group runs the collective."""
        work = SimulatedWork(f"{kind} #{number} of ranks {group.ranks}")
        arrivals = self._arrivals.setdefault((group.ranks, number), _Arrivals(group.size))
        arrivals.calls[group.index] = (kind, arguments, work)
        if len(arrivals.calls) == arrivals.size:
            del self._arrivals[group.ranks, number]
            _complete([arrivals.calls[i] for i in range(arrivals.size)])
        return work

    def send(self, group: SimulatedGroup, tensor: torch.Tensor, target: int) -> SimulatedWork:
        """Send a copy to the rank at index `target` of the group; the work is done at once."""
        self._sent.setdefault((group.ranks, group.index, target), []).append(tensor.clone())
        self._match((group.ranks, group.index, target))
        return SimulatedWork("send", True)

    def receive(self, group: SimulatedGroup, tensor: torch.Tensor, source: int) -> SimulatedWork:
        """Fill `tensor` from the next message of the rank at index `source`, once it is sent."""
        work = SimulatedWork(f"message from rank {group.ranks[source]} to rank {group.ranks[group.index]}")
        self._expected.setdefault((group.ranks, source, group.index), []).append((tensor, work))
        self._match((group.ranks, source, group.index))
        return work

    def _match(self, key: tuple[tuple[int, ...], int, int]) -> None:
        sent, expected = self._sent.get(key, []), self._expected.get(key, [])
        while sent and expected:
            tensor, work = expected.pop(0)
            tensor.view(-1).copy_(sent.pop(0).view(-1))
            work.done = True


def _complete(calls: Sequence[tuple[str, tuple[Any, ...], SimulatedWork]]) -> None:
    kinds = {kind for kind, _, _ in calls}
    assert len(kinds) == 1, f"ranks of one group issue different collectives: {sorted(kinds)}"
    _COLLECTIVES[kinds.pop()]([arguments for _, arguments, _ in calls])
    for _, _, work in calls:
        work.done = True


def _all_reduce(calls: Sequence[tuple[Any, ...]]) -> None:
    op = calls[0][1]
    total = reduce(lambda a, b: kernels.combine(a, b, op), [tensor for tensor, _ in calls])
    for tensor, _ in calls:
        tensor.copy_(total)


def _all_gather(calls: Sequence[tuple[Any, ...]]) -> None:
    gathered = torch.cat([tensor.reshape(-1) for _, tensor in calls])
    for out, _ in calls:
        out.view(-1).copy_(gathered)


def _all_to_all(calls: Sequence[tuple[Any, ...]]) -> None:
    blocks = [tensor.split(list(in_sizes)) for _, tensor, _, in_sizes in calls]
    for place, (out, _, out_sizes, _) in enumerate(calls):
        for target, source in zip(out.split(list(out_sizes)), blocks, strict=True):
            target.copy_(source[place])


def _broadcast(calls: Sequence[tuple[Any, ...]]) -> None:
    source = calls[calls[0][1]][0]
    for tensor, _ in calls:
        if tensor is not source:
            tensor.copy_(source)


_COLLECTIVES: Mapping[str, Callable[[Sequence[tuple[Any, ...]]], None]] = {
    "all_reduce": _all_reduce, "all_gather": _all_gather, "all_to_all": _all_to_all,
    "broadcast": _broadcast,
}  # fmt: skip


class SimulatedGroup:
    """A group as one simulated rank sees it; it has those methods of `runtime.group.Group` that programs call."""

    def __init__(self, hub: Hub, ranks: tuple[int, ...], rank: int):
        self.hub, self.ranks, self.size, self.index = hub, ranks, len(ranks), ranks.index(rank)

    def _issue(self, kind: str, *arguments: Any) -> SimulatedWork:
        return self.hub.arrive(self, self.hub.next(self), kind, arguments)

    def all_reduce(self, tensor: torch.Tensor, op: str) -> SimulatedWork:
        return self._issue("all_reduce", tensor, op)

    def all_gather(self, out: torch.Tensor, tensor: torch.Tensor) -> SimulatedWork:
        return self._issue("all_gather", out, tensor)

    def all_to_all(self, out: torch.Tensor, tensor: torch.Tensor, out_sizes: Any, in_sizes: Any) -> SimulatedWork:
        return self._issue("all_to_all", out, tensor, out_sizes, in_sizes)

    def broadcast(self, tensor: torch.Tensor, source: int) -> SimulatedWork:
        return self._issue("broadcast", tensor, source)

    def send(self, tensor: torch.Tensor, target: int) -> SimulatedWork:
        return self.hub.send(self, tensor, target)

    def recv(self, tensor: torch.Tensor, source: int) -> SimulatedWork:
        return self.hub.receive(self, tensor, source)


RankArguments = Sequence[Any]


class Simulation:
    """The programs of all ranks, bound once; `run` may be called any number of times.

    If another call is under way, in another thread or around an op's function that calls this, the new call binds
    programs of its own: ranks of two calls must not meet.

    `backend` compiles the segments of `definition` before the first run; "auto" never does so here. With
    `check_streams` each rank's launches are recorded in `streams`, and AssertionError says where a GPU's streams would
    race.
    """

    def __init__(
        self,
        programs: Sequence[HostProgram],
        device: torch.device,
        definition: SegmentedDefinition | None = None,
        backend: str = "eager",
        check_streams: bool = False,
    ):
        self.hub = Hub()
        self._idle: list[Simulation] = [self]
        self.device, self.programs = device, {program.rank: program for program in programs}
        self._again = lambda: Simulation(programs, device, definition, backend, check_streams)
        self.streams = {rank: Streams(rank) for rank in self.programs} if check_streams else {}
        self.bound: dict[int, BoundProgram] = {p.rank: self._bind(p, device) for p in programs}
        self.segments: list[Segments] = []
        if definition is not None and backend != "auto":
            self.segments = [Segments(self.bound[p.rank], p, definition, device, backend) for p in programs]

    def _bind(self, program: HostProgram, device: torch.device) -> BoundProgram:
        return bind_program(program, lambda ranks: SimulatedGroup(self.hub, ranks, program.rank), device, True)

    def run(self, arguments: Mapping[int, RankArguments], seed: int, offset: int) -> dict[int, tuple[Any, ...]]:
        """Every rank's results from every rank's arguments. RankError where ranks wait for each other in a circle."""
        try:
            free = self._idle.pop()
        except IndexError:  # None is idle; an interrupt may have lost one, which this one replaces.
            free = self._again()
        try:
            with without_modes(self.device):
                return free._run_compiled(arguments, seed, offset)
        finally:
            if free is self or not self._idle:
                self._idle[:] = [free]

    def _run_compiled(
        self, arguments: Mapping[int, RankArguments], seed: int, offset: int
    ) -> dict[int, tuple[Any, ...]]:
        if any(segments.due == 0 for segments in self.segments):
            self._compile(arguments, seed, offset)
        return self._run(arguments, seed, offset)

    def _compile(self, arguments: Mapping[int, RankArguments], seed: int, offset: int) -> None:
        with contextlib.ExitStack() as stack:
            for segments in self.segments:
                stack.enter_context(segments.recorded())
            self._run(arguments, seed, offset)
        with saying("compiling the kernels of simulated ranks"):
            for segments in self.segments:
                while segments.compile_next():
                    pass

    def _run(self, arguments: Mapping[int, RankArguments], seed: int, offset: int) -> dict[int, tuple[Any, ...]]:
        self.hub.clear()  # left by a call that an error ended
        for rank, streams in self.streams.items():
            streams.clear()
            streams.watch(self.bound[rank].scope, self.programs[rank])
        running = {rank: bound.main(*arguments[rank], seed, offset) for rank, bound in self.bound.items()}
        waiting: dict[int, SimulatedWork | None] = dict.fromkeys(running)
        results: dict[int, tuple[Any, ...]] = {}
        while waiting:
            ready = [rank for rank, work in waiting.items() if work is None or work.done]
            if not ready:
                stuck = "; ".join(f"rank {rank} waits for {work.what}" for rank, work in waiting.items() if work)
                raise RankError(f"the simulated ranks wait for each other: {stuck}")
            for rank in ready:
                watched = (
                    self.streams[rank].until_next_wait(waiting[rank]) if self.streams else contextlib.nullcontext()
                )
                with torch.no_grad(), kernel_errors(self.bound[rank], self.programs[rank]), watched:
                    _advance(rank, running[rank], waiting, results)
        for rank, streams in self.streams.items():
            streams.end(results[rank])
        return results


def _advance(
    rank: int, program: Generator[SimulatedWork, None, tuple[Any, ...]],
    waiting: dict[int, SimulatedWork | None], results: dict[int, tuple[Any, ...]],
) -> None:  # fmt: skip
    """Run a rank up to its next wait, or to its end."""
    try:
        waiting[rank] = next(program)
    except StopIteration as end:
        results[rank] = end.value
        del waiting[rank]


def check_equal_replicas(name: str, shards: Mapping[int, torch.Tensor], sharding: Sharding) -> None:
    """Raises AssertionError where two replicas of a shard differ."""
    first: dict[tuple[int, ...], tuple[int, torch.Tensor]] = {}
    for rank, local in shards.items() if not sharding.partial else ():
        held = first.setdefault(sharding.coordinates(rank), (rank, local))
        same = torch.equal(held[1], local) or torch.allclose(held[1], local, equal_nan=True)
        assert same, f"{name}: rank {rank} and rank {held[0]} hold different replicas"


@dataclass(frozen=True, slots=True)
class SimulatedProgram:
    """A compiled program with all its ranks' programs bound."""

    compiled: CompiledProgram
    simulation: Simulation

    def arguments(self, recording: Recording, given: Inputs) -> dict[int, list[Any]]:
        """Every rank's arguments, from global ones."""
        return {rank: self._arguments_of(rank, recording, given) for rank in self.compiled.ranks}

    def _arguments_of(self, rank: int, recording: Recording, given: Inputs) -> list[Any]:
        shardings = self.compiled.sharded.shardings
        out: list[Any] = []
        for ref in recording.inputs:
            if not isinstance(ref, TensorRef):
                out.append(given.scalars[ref.id])
            elif recording.placed(ref.id) is not None and rank in shardings[ref.id].mesh:
                out.append(shard(given.tensors[ref.id], shardings[ref.id], rank))
            else:
                out.append(given.tensors[ref.id])
        return out

    def run(
        self, arguments: Mapping[int, list[Any]], seed: int, step: int, check_replicas: bool
    ) -> list[torch.Tensor]:  # fmt: skip
        """The global outputs for every rank's arguments; random numbers follow from seed and step.

        Raises AssertionError where, with `check_replicas`, two replicas of a shard of an output differ.
        """
        results, graph = self.simulation.run(arguments, seed, step), self.compiled.graph
        out = []
        for place, sharding in enumerate(self.compiled.output_shardings()):
            tensor = graph.outputs[place]
            shards = {rank: results[rank][place] for rank in sharding.mesh.ranks}
            out.append(unshard(shards, sharding, graph.shape(tensor)))
            if check_replicas:
                check_equal_replicas(graph.tensors[tensor].label, shards, sharding)
        return out
