"""What a step of a pipeline costs: bytes that ranks send, and what they hold."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace

from ...errors import SourceLine
from ...report.bill import Bill, BillEntry, bill_of
from ...report.memory import modelled_memory
from ...resharding import shard_bytes
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
            for half in program.step.halves:
                found += [_times(entry, count) for entry in bill_of(half.fd.latest()).entries]
            if program.summing is not None:
                found += bill_of(program.summing.fd.latest()).entries
            found += [_times(entry, count) for entry in _sends(assignment, program, stage, line)]
    return Bill(tuple(found))


def _sends(assignment: Assignment, program: StageProgram, stage: int, line: SourceLine) -> Iterator[BillEntry]:
    """Sends to stages on other ranks."""
    schedule, mesh = assignment.schedule, assignment.mesh
    for crossing in program.stage.sent:
        local = _local_bytes(crossing, program)
        for target in crossing.targets:
            if schedule.rank_of(target) != schedule.rank_of(stage):
                seconds = mesh.link((assignment.axis,)).seconds(1, local)
                yield BillEntry(
                    "send", assignment.axis, crossing.name, local, f"stage {target} reads it", str(line),
                    f"stage {stage} -> stage {target}", seconds, "", "", "", (), (),
                )  # fmt: skip


def _local_bytes(crossing: Crossing, program: StageProgram) -> int:
    sharding = sharding_of(crossing, program.specs, program.mesh)
    return sharding.max_local_numel(crossing.shape) * crossing.dtype.itemsize


def _times(entry: BillEntry, count: int) -> BillEntry:
    if count == 1:
        return entry
    name = f"{entry.collective} x{count}"
    return replace(entry, collective=name, wire=entry.wire * count, seconds=entry.seconds * count)


def step_memory(assignment: Assignment, last: Sequence[Planned]) -> str:
    """By stage here what a rank holds, as modelled, in bytes."""
    return "\n".join(f"stage {stage}: {_held(assignment, last, stage)}" for stage in assignment.stages_here())


def _held(assignment: Assignment, last: Sequence[Planned], stage: int) -> str:
    program, schedule = last[0].programs[stage], assignment.schedule
    flight = schedule.in_flight(schedule.rank_of(stage), stage)
    saved = _kept_bytes(program)
    peak = max(modelled_memory(half.fd.latest()).peak for half in program.step.halves)
    return (
        f"{saved:,} bytes kept of each micro-batch, {flight} at once, and at most {peak:,} in a program: "
        f"{saved * max(flight - 1, 0) + peak:,}"
    )


def _kept_bytes(program: StageProgram) -> int:
    """What a stage's forward keeps of a micro-batch for its backward."""
    compiled, count = program.step.forward.fd.latest(), program.step.saved
    graph, shardings = compiled.graph, compiled.output_shardings()
    pairs = list(zip(graph.outputs, shardings, strict=True))[len(shardings) - count :]
    return sum(shard_bytes(sharding, graph.tensors[tensor].type) for tensor, sharding in pairs)
