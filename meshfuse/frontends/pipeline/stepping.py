"""`model.step`: a training step of micro-batches, worked off as a schedule says, with the loss and gradients of the
whole batch."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from ...runtime.world import World
from ..captured_graph import Source
from ..forward_reads import NOTHING_READ, ForwardReads
from .assignment import Assignment
from .borders import Borders
from .normalizers import Normalized
from .program import StageProgram
from .schedule import BACKWARD, FORWARD, OF_INPUTS, OF_WEIGHTS, Action
from .transport import BetweenRanks, Expected, InProcess, Message, Route, Transport, messages_of, needs_of, route_of

_SEEDS = 2**62
_SPREAD = 0x9E3779B97F4A7C15


@dataclass(frozen=True, slots=True, eq=False)
class Planned:
    """Stages for micro-batches of one shape.

    borders: by stage, of all, what crosses them.
    programs: by stage, of this rank's, what it runs.
    constants: the module that has tensors which the stages read and no user knows; None where there are none.
    reads: what the forward read beside its arguments.
    loss: what the loss is divided by; None where nobody looked. counting: computes what that is added up of.
    routes: of steps that begin with this one, by whether they have gradients, and the plans of all micro-batches.
    """

    borders: tuple[Borders, ...]
    programs: Mapping[int, StageProgram]
    loss_dtype: torch.dtype
    constants: Any = None
    reads: ForwardReads = NOTHING_READ
    loss: Normalized | None = None
    counting: StageProgram | None = None
    routes: dict[tuple[bool, tuple[Planned, ...]], Route] = field(default_factory=dict)


class Values(Protocol):
    """What stages read that nobody sends them."""

    def of(self, source: Source, microbatch: int) -> Any:
        """An argument, or what a weight, buffer or constant is now; a DTensor, or a rank's own part."""
        ...

    def needs_gradient(self, name: str) -> bool:
        """Whether a weight gets a gradient."""
        ...


@dataclass(frozen=True, slots=True)
class Work:
    """What a step needs to know.

    planned: by micro-batch.
    shares: by micro-batch its share of the rows.
    """

    assignment: Assignment
    planned: Sequence[Planned]
    values: Values
    shares: Sequence[float]
    device: torch.device
    backend: str | None
    seed: int


def stepped(work: Work, with_gradients: bool) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """(the loss of the batch, by parameter this rank's part of its gradient)."""
    step = _Step(work)
    step.run(with_gradients)
    return step.loss(), step.gradients() if with_gradients else {}


def normalizers_of(
    planned: Sequence[Planned], values: Values, shares: Sequence[float], backend: str | None
) -> list[list[torch.Tensor]]:
    """By micro-batch what its loss is divided by; nothing on ranks without the last stage."""
    counted = [_counted(part, values, place, backend) for place, part in enumerate(planned)]
    normalizers = planned[0].loss.normalizers if planned[0].loss is not None and counted[0] else ()
    columns = [one.of_batch([parts[i] for parts in counted], shares) for i, one in enumerate(normalizers)]
    return [[column[place] for column in columns] for place in range(len(planned))]


def _counted(planned: Planned, values: Values, microbatch: int, backend: str | None) -> list[torch.Tensor]:
    """What a micro-batch has of each normalizer."""
    program = planned.counting
    if program is None:
        return []
    half = program.step.forward
    taken = {source: values.of(source, microbatch) for source in half.inputs}
    local = {source: getattr(value, "_local_tensor", value) for source, value in taken.items()}
    made = program.run(half, local, None, backend)
    return [made[source] for source in half.outputs]


@dataclass(slots=True)
class _Step:
    """A step under way.

    kept: by stage and micro-batch what its backward will read.
    sums: by stage's program and parameter the gradients so far.
    """

    work: Work
    kept: dict[tuple[int, int], dict[Source, Any]] = field(default_factory=dict)
    sums: dict[StageProgram, dict[str, torch.Tensor]] = field(default_factory=dict)
    losses: list[torch.Tensor] = field(default_factory=list)

    def run(self, with_gradients: bool) -> None:
        """Work off this rank's actions; where ranks are simulated those of all, in the order of time."""
        assignment = self.work.assignment
        transport: Transport = InProcess()
        wanted = set("FBIW") if with_gradients else {FORWARD}
        if World.current().size == 1:
            timed = sorted((t.begin, rank, n, t.action) for rank, row in enumerate(assignment.schedule.played())
                           for n, t in enumerate(row) if t.action.kind in wanted)  # fmt: skip
            mine: Sequence[Action] = [action for *_, action in timed]
        else:
            route = self._route(with_gradients, wanted)
            mine, transport = route.order, BetweenRanks(assignment, route, self.work.device)
        for action in mine:
            self._act(action, transport, with_gradients)
        transport.finish()

    def _route(self, with_gradients: bool, wanted: Collection[str]) -> Route:
        assignment, planned = self.work.assignment, self.work.planned
        key = with_gradients, tuple(planned)
        known = planned[0].routes
        if key not in known:
            orders = [[action for action in order if action.kind in wanted] for order in assignment.schedule.orders]
            known[key] = route_of(assignment, orders, {n: p.borders for n, p in enumerate(planned)}, self._expected)
        return known[key]

    def _expected(self, message: Message) -> Expected:
        program = self.work.planned[message.microbatch].programs[message.target]
        crossing = next(c for c in program.stage.received if c.place == message.place)
        kind = "backward" if crossing.back else "forward"
        what = f"{crossing.name} for the {kind} of stage {message.target}, micro-batch {message.microbatch}"
        return Expected(program.local_shape(crossing), crossing.dtype, what)

    def _act(self, action: Action, transport: Transport, with_gradients: bool) -> None:
        planned = self.work.planned[action.microbatch]
        program = planned.programs[action.stage]
        arrived = {program.received_of(c): transport.take(m, action) for m, c in needs_of(action, planned.borders)}
        act = {
            FORWARD: self._forward,
            BACKWARD: self._backward,
            OF_INPUTS: self._of_inputs,
            OF_WEIGHTS: self._of_weights,
        }
        made = act[action.kind](action, program, arrived)
        if action.kind == FORWARD and not with_gradients:
            self.kept.pop((action.stage, action.microbatch))
        given = {crossing.place: crossing for crossing in program.stage.sent}
        for message in messages_of(action, planned.borders):
            transport.send(message, made[program.sent_of(given[message.place])])

    def _forward(self, action: Action, program: StageProgram, arrived: dict[Source, Any]) -> dict[Source, Any]:
        half, here = program.step.forward, (action.stage, action.microbatch)
        values = {s: self._input(s, action.microbatch, arrived) for s in half.inputs}
        kept = {s: self._input(s, action.microbatch, arrived) for s in program.read_later()}
        changed = {s.of_input() for s in half.outputs if s.kind == "mutation"}
        self.kept[here] = {s: value.detach().clone() if s in changed else value for s, value in kept.items()}
        made = program.run(half, values, self._seed(action), self.work.backend)
        for source, value in made.items():
            if source.kind == "mutation":
                with torch.no_grad():
                    values[source.of_input()].copy_(value)
            elif source.kind == "saved":
                self.kept[here][source] = value
        if self._is_last(action):
            self.losses.append(made[program.loss] * self.work.shares[action.microbatch])
        return made

    def _is_last(self, action: Action) -> bool:
        return action.stage == len(self.work.planned[0].borders) - 1

    def _input(self, source: Source, microbatch: int, arrived: Mapping[Source, Any]) -> Any:
        """An input of a forward: what arrived, or a value of the step; a rank's own part of it."""
        value = arrived[source] if source in arrived else self.work.values.of(source, microbatch)
        return getattr(value, "_local_tensor", value)

    def _seed(self, action: Action) -> int:
        """Random numbers of their own for each stage and micro-batch; the backward reads those of the forward."""
        return (self.work.seed + _SPREAD * (action.stage << 20 | action.microbatch)) % _SEEDS

    # the backward

    def _backward(self, action: Action, program: StageProgram, arrived: dict[Source, Any]) -> dict[Source, Any]:
        made = self._of_inputs(action, program, arrived)
        if program.step.rest is not None:
            self._of_weights(action, program, {})
        self.kept.pop((action.stage, action.microbatch), None)
        return made

    def _of_inputs(self, action: Action, program: StageProgram, arrived: dict[Source, Any]) -> dict[Source, Any]:
        """The first part of a backward; all of it where it has one."""
        half, kept = program.step.backward, self.kept[action.stage, action.microbatch]
        if half is None:
            return {}
        kept.update(arrived)
        if self._is_last(action):
            kept[Source("tangent", place=program.loss.place)] = self._share(action, program)
        made = program.run(half, kept, None, self.work.backend)
        kept.update((source, value) for source, value in made.items() if source.kind == "held")
        self._add(program, made)
        return made

    def _of_weights(self, action: Action, program: StageProgram, arrived: dict[Source, Any]) -> dict[Source, Any]:
        kept = self.kept.pop((action.stage, action.microbatch))
        if program.step.rest is not None:
            self._add(program, program.run(program.step.rest, kept, None, self.work.backend))
        return {}

    def _share(self, action: Action, program: StageProgram) -> torch.Tensor:
        """The gradient of the batch's loss by a micro-batch's: its share of the rows."""
        loss = self.losses[0]
        return torch.full((), self.work.shares[action.microbatch], dtype=loss.dtype, device=loss.device)

    def _add(self, program: StageProgram, made: Mapping[Source, torch.Tensor]) -> None:
        sums = self.sums.setdefault(program, {})
        for source, gradient in made.items():
            if source.kind == "gradient" and source.name:
                sums[source.name] = sums[source.name].add_(gradient) if source.name in sums else gradient

    # results

    def loss(self) -> torch.Tensor:
        """The loss of the batch, on every rank."""
        assignment, world = self.work.assignment, World.current()
        total = torch.stack(self.losses).sum() if self.losses else torch.zeros((), device=self.work.device)
        if world.size > 1 and assignment.axis:
            total = total.to(self.work.planned[0].loss_dtype)
            assignment.reduce(total)
        return total

    def gradients(self) -> dict[str, torch.Tensor]:
        """By parameter its gradient; those of a parameter that several stages hold are added up."""
        found: dict[str, torch.Tensor] = {}
        for program, sums in self.sums.items():
            for name, gradient in program.summed(sums, self.work.backend).items():
                found[name] = found[name] + gradient if name in found else gradient
        if World.current().size > 1:
            for name in self._shared():
                self._add_up(name, found)
        return found

    def _shared(self) -> list[str]:
        """The parameters that this rank holds together with others, in an order that is the same on all."""
        assignment, rank = self.work.assignment, World.current().rank
        row = assignment.row_of(rank)
        owners = {name: {assignment.schedule.rank_of(s) for s in held} for name, held in assignment.owners.items()}
        return [name for name, rows in owners.items() if row in rows and len(rows) > 1]

    def _add_up(self, name: str, found: dict[str, torch.Tensor]) -> None:
        if not self.work.values.needs_gradient(name):
            return
        parameter = self.work.values.of(Source("parameter", name), 0)
        local = getattr(parameter, "_local_tensor", parameter)
        given = found.get(name, torch.zeros_like(local, requires_grad=False)).contiguous()
        self.work.assignment.reduce(given, stages=self.work.assignment.owners[name])
        found[name] = given
