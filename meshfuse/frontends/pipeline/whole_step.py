"""A step of all ranks without running it: its programs made once for stages and ranks that do the same, verified and
played."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from ...compiler import CompiledProgram
from ...lowering.durations import CostModel
from ...lowering.instructions import Launch
from ...report.timeline import timeline
from ..steps import Half
from .assignment import Assignment
from .borders import Crossing
from .costs import StageHeld, local_bytes, stages_held
from .played_step import PlayedStep
from .program import StageProgram, sharding_of
from .schedule import FORWARD, OF_WEIGHTS, Action, Schedule, Timed
from .step_figures import Row, Sums
from .stepping import Planned


@dataclass(frozen=True, slots=True)
class ProgramTime:
    """Seconds of a program, of which its slowest rank computes and waits for communications; operations of a rank."""

    seconds: float = 0.0
    computing: float = 0.0
    exposed: float = 0.0
    flops: float = 0.0

    def __add__(self, other: ProgramTime) -> ProgramTime:
        return ProgramTime(
            self.seconds + other.seconds, self.computing + other.computing, self.exposed + other.exposed,
            self.flops + other.flops,
        )  # fmt: skip


def program_time(compiled: CompiledProgram) -> ProgramTime:
    """A modelled run of a program on all of its ranks, by one of each class."""
    programs, channel = compiled.programs_of_classes()
    model = CostModel.of(dict.fromkeys(v.sharding.mesh for v in compiled.resharded.values))
    worst = max(timeline(programs, model, channel=channel).ranks, key=lambda rank: rank.end)
    flops = sum(ops for p in programs for i in p.instructions if isinstance(i, Launch) for ops, _ in i.kernel.work)
    return ProgramTime(worst.end, worst.computing, worst.exposed, flops / len(programs))


@dataclass(frozen=True, slots=True, eq=False)
class WholeStep:
    """The programs of all stages, by micro-batch. Stages that do the same share their programs."""

    assignment: Assignment
    planned: Sequence[Planned]

    @property
    def schedule(self) -> Schedule:
        return self.assignment.schedule

    def verify(self) -> None:
        """Check that all ranks' programs, and what they send each other, fit together; nothing grows with the ranks.

        Ranks of a row have equal orders of actions, and a program's groups lie inside of a row: each program is
        verified by classes of its ranks, and what follows one another in each group then agrees. Between rows there are
        messages alone, from a rank to the one at the same place of the other row. Both have equal parts of what
        crosses, if stages' meshes and the tensors' specs are equal; receives are posted in the order of the sender's
        actions. So it is enough that every message has one reader of its type, and that the schedule ends.

        Raises AssertionError, and DefinitionError for a schedule that does not end.
        """
        self.schedule.verify()
        for half in self._halves():
            half.fd.latest().verify()
        for planned in dict.fromkeys(self.planned):
            _verify_borders(planned)

    def _halves(self) -> Iterator[Half]:
        """All programs, each once."""
        yield from {id(half): half for half in self._every()}.values()

    def played(self, states: float) -> PlayedStep:
        """A modelled run. states: how many tensors of a weight's size the optimiser keeps."""
        self.verify()
        times = {id(half): program_time(half.fd.latest()) for half in self._halves()}
        player = _Player(self, times)
        timed = self.schedule.played(player.seconds, player.passing)
        held = stages_held(self.assignment, self.planned)
        rows = [player.row(rank, row, held, states) for rank, row in enumerate(timed)]
        mesh = self.assignment.mesh
        return PlayedStep(
            tuple(zip(mesh.names, mesh.shape, strict=True)), self.assignment.axis, self.schedule, timed, tuple(rows),
            mesh.flops, len(times), sum(len(half.fd.latest().ranks) for half in self._every()),
        )  # fmt: skip

    def _every(self) -> Iterator[Half]:
        """The programs of all stages, those that stages share once for each."""
        for planned in dict.fromkeys(self.planned):
            for program in planned.programs.values():
                yield from program.step.halves
                yield from [program.summing] if program.summing is not None else []


@dataclass(frozen=True, slots=True)
class _Player:
    """How long actions take. times: by program, by its id."""

    step: WholeStep
    times: Mapping[int, ProgramTime]

    def seconds(self, action: Action) -> float:
        return self.time(action).seconds

    def time(self, action: Action) -> ProgramTime:
        """What an action takes; a whole backward has both of its parts."""
        made = self._program(action).step
        if action.kind == FORWARD:
            halves = [made.forward]
        elif action.kind == OF_WEIGHTS:
            halves = [made.rest]
        else:
            split = self.step.schedule.is_split and action.kind != "B"
            halves = [made.backward, None if split else made.rest]
        return sum((self.times[id(half)] for half in halves if half is not None), ProgramTime())

    def _program(self, action: Action) -> StageProgram:
        return self.step.planned[action.microbatch].programs[action.stage]

    def passing(self, made: Action, read: Action) -> float:
        """Seconds in which what crosses from one stage to another is on its way."""
        owners = self.step.schedule.rank_of
        if made.stage == read.stage or owners(made.stage) == owners(read.stage):
            return 0.0
        program = self._program(made)
        crossings = [c for c in program.stage.given(made.kind != FORWARD) if read.stage in c.targets]
        link = self.step.assignment.mesh.link((self.step.assignment.axis,))
        return link.seconds(len(crossings), sum(local_bytes(c, program) for c in crossings))

    def row(self, rank: int, timed: Sequence[Timed], held: Sequence[StageHeld], states: float) -> Row:
        """What the ranks of a row do in the step."""
        stages = self.step.schedule.stages_of(rank)
        total = sum((self.time(each.action) for each in timed), ProgramTime())
        sums = sum((self._sums(stage) for stage in stages), ProgramTime())
        all_ = total + sums
        end = timed[-1].end if timed else 0.0
        own = [held[stage] for stage in stages]
        memory = sum(h.resting + states * h.weights for h in own) + max(h.working for h in own)
        return Row(tuple(stages), Sums(end, end + sums.seconds), all_.seconds, all_.exposed, all_.flops, memory)

    def _sums(self, stage: int) -> ProgramTime:
        """Gradients of a stage's weights, summed over ranks when all micro-batches are done."""
        programs = [planned.programs[stage] for planned in dict.fromkeys(self.step.planned)]
        summing = programs[0].summing
        return self.times[id(summing)] if summing is not None else ProgramTime()


def _verify_borders(planned: Planned) -> None:
    """Assert that stages take what others send them: the same tensors, in equal parts."""
    for stage, program in planned.programs.items():
        for crossing in program.stage.sent:
            for target in crossing.targets:
                reader = planned.programs[target]
                found = [c for c in reader.stage.received if _is_same(c, crossing, target)]
                assert found, f"stage {target} does not take {crossing.name} of stage {stage}"
                assert any(_part(c, reader) == _part(crossing, program) for c in found), (
                    f"stages {stage} and {target} have unequal parts of {crossing.name}"
                )
        for crossing in program.stage.received:
            made = planned.programs[crossing.source].stage.sent
            assert any(_is_same(crossing, c, stage) for c in made), f"nobody sends stage {stage} its {crossing.name}"


def _is_same(received: Crossing, sent: Crossing, target: int) -> bool:
    """Whether a stage takes what another one sends. Numbers are those of the stages that stand for them."""
    return (
        target in sent.targets
        and (received.source, received.back, received.shape, received.dtype)
        == (sent.source, sent.back, sent.shape, sent.dtype)
    )  # fmt: skip


def _part(crossing: Crossing, program: StageProgram) -> object:
    """What a rank has of a crossing tensor, by its place on the mesh."""
    sharding = sharding_of(crossing, program.specs, program.mesh)
    return program.mesh.shape, program.mesh.names, sharding.dims
