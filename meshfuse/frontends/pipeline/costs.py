"""What a step of a pipeline costs: bytes that ranks send, and what they hold."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from ...errors import SourceLine
from ...report.bill import Bill, BillEntry, bill_of
from ...report.memory import modelled_memory
from ...resharding import shard_bytes
from ..captured_graph import Source
from ..steps import Half
from .assignment import Assignment
from .borders import Crossing
from .program import StageProgram, sharding_of
from .stepping import Planned


def step_bill(assignment: Assignment, last: Sequence[Planned], line: SourceLine) -> Bill:
    """What a rank of each stage here sends: collectives of each program, times micro-batches, and sends."""
    found: list[BillEntry] = []
    for stage in assignment.stages_here():
        for planned, count in Counter(last).items():
            program = planned.programs[stage]
            is_last = stage == assignment.schedule.stages - 1
            counting = planned.counting.step.halves if is_last and planned.counting is not None else []
            for half in (*counting, *program.step.halves):
                found += [_times(entry, count) for entry in bill_of(half.fd.latest()).entries]
            if program.summing is not None:
                found += bill_of(program.summing.fd.latest()).entries
            found += [_times(entry, count) for entry in _sends(assignment, program, stage, line)]
    return Bill(tuple(found))


def _sends(assignment: Assignment, program: StageProgram, stage: int, line: SourceLine) -> Iterator[BillEntry]:
    """Sends to stages on other ranks."""
    schedule, mesh = assignment.schedule, assignment.mesh
    for crossing in program.stage.sent:
        local = local_bytes(crossing, program)
        for target in crossing.targets:
            if schedule.rank_of(target) != schedule.rank_of(stage):
                seconds = mesh.link((assignment.axis,)).seconds(1, local)
                yield BillEntry(
                    "send", assignment.axis, crossing.name, local, f"stage {target} reads it", str(line),
                    f"stage {stage} -> stage {target}", seconds, "", "", "", (), (),
                )  # fmt: skip


def local_bytes(crossing: Crossing, program: StageProgram) -> int:
    """What a rank sends of a tensor that crosses a border."""
    sharding = sharding_of(crossing, program.specs, program.mesh)
    return sharding.max_local_numel(crossing.shape) * crossing.dtype.itemsize


def _times(entry: BillEntry, count: int) -> BillEntry:
    if count == 1:
        return entry
    name = f"{entry.collective} x{count}"
    return replace(entry, collective=name, wire=entry.wire * count, seconds=entry.seconds * count)


def step_memory(assignment: Assignment, last: Sequence[Planned]) -> str:
    """By stage here what a rank holds, as modelled, in bytes."""
    return "\n".join(str(held) for held in stages_held(assignment, last))


@dataclass(frozen=True, slots=True)
class StageHeld:
    """What a rank holds for one of its stages, as modelled, in bytes.

    kept: of a micro-batch, from its forward to its backward; at_once: of how many.
    weights: its parameters. sums: gradients so far.
    working: beside these in the program that holds most, while that runs.
    travelling: received ahead, or sent and not yet known to have come.
    """

    stage: int
    kept: int
    at_once: int
    weights: int
    sums: int
    working: int
    travelling: int

    @property
    def resting(self) -> int:
        """What is there while a program of another stage runs."""
        return self.kept * self.at_once + self.weights + self.sums + self.travelling

    @property
    def total(self) -> int:
        """All of it, while the program that holds most runs."""
        return self.resting + self.working

    def __str__(self) -> str:
        return (
            f"stage {self.stage}: {self.kept:,} bytes kept of each micro-batch, {self.at_once} at once, "
            f"{self.weights:,} of weights, {self.sums:,} in sums of gradients, {self.travelling:,} on their way, and "
            f"at most {self.working:,} more in a program: {self.total:,}"
        )


def stages_held(assignment: Assignment, last: Sequence[Planned]) -> list[StageHeld]:
    """What ranks hold for their stages here."""
    schedule, known, found = assignment.schedule, dict[int, StageHeld](), list[StageHeld]()
    for stage in assignment.stages_here():
        program = last[0].programs[stage]
        key = id(program.step)  # Stages that do the same have one.
        if key not in known:
            known[key] = _held(assignment, program, stage, len(last))
        flight = schedule.in_flight(schedule.rank_of(stage), stage)
        found.append(replace(known[key], stage=stage, at_once=flight))
    return found


def _held(assignment: Assignment, program: StageProgram, stage: int, microbatches: int) -> StageHeld:
    schedule = assignment.schedule
    flight = schedule.in_flight(schedule.rank_of(stage), stage)
    kept = _kept_bytes(program)
    halves = [(modelled_memory(half.fd.latest()).total, _weight_bytes(half)) for half in program.step.halves]
    working = max(total - sum(weights.values()) for total, weights in halves) - kept
    sums = sum(_gradient_bytes(program)) if microbatches > 1 else 0
    moves = [local_bytes(c, program) for c in (*program.stage.taken(back=False), *program.stage.given(back=False))]
    return StageHeld(stage, kept, flight, _all_weights(program), sums, max(working, 0), 2 * sum(moves))


def _all_weights(program: StageProgram) -> int:
    return sum({source: n for half in program.step.halves for source, n in _weight_bytes(half).items()}.values())


def _weight_bytes(half: Half) -> dict[Source, int]:
    """Of each parameter that a half reads the bytes that a rank has."""
    compiled = half.fd.latest()
    types, shardings = compiled.graph.tensors, compiled.planned.shardings
    rows = zip(half.inputs, compiled.graph.input_tensors, strict=True)
    return {s: shard_bytes(shardings[i], types[i].type) for s, i in rows if s.kind == "parameter"}


def _gradient_bytes(program: StageProgram) -> Iterator[int]:
    """The bytes of each weight's gradient, or of a rank's terms of it."""
    for half in program.step.halves[1:]:
        compiled = half.fd.latest()
        rows = zip(half.outputs, compiled.graph.outputs, compiled.output_shardings(), strict=True)
        yield from (shard_bytes(lies, compiled.graph.tensors[i].type) for source, i, lies in rows
                    if source.kind == "gradient" and source.name)  # fmt: skip


def _kept_bytes(program: StageProgram) -> int:
    """What a stage keeps of a micro-batch for its backward: what its forward saves, and what came in."""
    forward, later = program.step.forward, program.read_later()
    compiled = forward.fd.latest()
    graph, shardings, count = compiled.graph, compiled.output_shardings(), program.step.saved
    pairs = list(zip(graph.outputs, shardings, strict=True))[len(shardings) - count :]
    saved = sum(shard_bytes(sharding, graph.tensors[tensor].type) for tensor, sharding in pairs)
    taken = {program.received_of(crossing): crossing for crossing in program.stage.taken(back=False)}
    return saved + sum(local_bytes(crossing, program) for source, crossing in taken.items() if source in later)
