"""`fd.pipeline`: a plain definition in stages, whose steps give the loss and the gradients of a batch."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from ...definition.recording import Recording
from ...definition.tensor_view import TensorView
from ...dtypes import Category
from ...errors import ArgumentError, SourceLine, caller_line, located, shown, user_error
from ...graph import specialize
from ...mesh import DeviceMesh
from ...report.bill import Bill
from ...runtime.world import World
from ..captured_graph import Source
from .assignment import Assignment
from .costs import step_bill, step_memory
from .definition_cut import Asked, owners_of, stages_of
from .definition_stages import StageSetting, definition_stage, weight_name
from .micro_batches import micro_batches
from .played_step import PlayedStep
from .schedule import Schedule
from .stepping import Planned, Work, stepped
from .whole_step import WholeStep

Shapes = dict[int, tuple[int, ...]]


@dataclass(slots=True, eq=False)
class PipelinedDefinition:
    """A definition in stages over an axis of a mesh, made by `fd.pipeline`.

    made: the stages' programs, by the global shapes of a micro-batch. last: those of the latest step.
    """

    asked: Asked
    assignment: Assignment
    max_memory: float | None
    search: str
    made: dict[Any, Planned] = field(default_factory=dict)
    last: list[Planned] = field(default_factory=list)
    _steps: int = 0

    @classmethod
    def made_of(
        cls, fd: Any, mesh: DeviceMesh, axis: str, schedule: Schedule, views: Sequence[Sequence[TensorView]],
        line: SourceLine,
    ) -> PipelinedDefinition:  # fmt: skip
        """The stages of a definition; `views` are (the loss, weights, cuts, the batch's inputs)."""
        (loss,), weights, cuts, batch = ([view.id for view in some] for some in views)
        recording = Recording(fd.recording.seed)
        fd.recording.write_into(recording)
        recording.outputs[:] = [loss]
        asked = Asked(recording, loss, tuple(cuts), tuple(weights), tuple(batch), line)
        _check(asked, mesh, axis, schedule)
        owners = {weight_name(i): stages for i, stages in owners_of(asked).items()}
        assignment = Assignment(mesh, axis, schedule, (), owners)
        return cls(asked, assignment, fd.max_memory, fd._programs.effort.value)

    def simulate(self, inputs: Sequence[torch.Tensor]) -> list[Any]:
        """[the loss, the list of gradients] by all ranks' programs in this process, from global tensors.

        Inputs are those of the definition in their order, with the whole batch in the place of a micro-batch. Raises
        ArgumentError for what does not fit, or in a job of several ranks.
        """
        line = caller_line()
        self._check_simulated("simulate", line)
        return self._run(inputs, None, line)

    def execute(self, inputs: Sequence[Any], *, backend: str | None = None) -> list[Any]:
        """[the loss, the list of gradients] on this process' rank: its shards of inputs, and of gradients.

        Weights of other ranks' stages may be None, and so are their gradients. The loss is that of the whole batch.
        Raises ArgumentError for what does not fit, and RankError as `fd.execute`.
        """
        return self._run(inputs, backend, caller_line())

    def play(self, inputs: Sequence[torch.Tensor], *, states: float = 2) -> PlayedStep:
        """A modelled run of a step on all ranks of the mesh, and what it takes; nothing is computed.

        Inputs are those of `simulate`; they may be on meta. states: how many tensors of a weight's size the optimiser
        keeps. Raises ArgumentError as `simulate`.
        """
        line = caller_line()
        self._check_simulated("play", line)
        return WholeStep(self.assignment, self._planned_of(self._values(inputs, line)[0], line)).played(states)

    def schedule(self) -> Schedule:
        """The order in which ranks work off a step; printing it shows a picture, and how much of it is idle."""
        return self.assignment.schedule

    def bill(self) -> Bill:
        """What a rank of each stage sent in the latest step."""
        return step_bill(self.assignment, self._ran(), self.asked.line)

    def memory(self) -> str:
        """By stage what a rank held in the latest step, as modelled, in bytes."""
        return step_memory(self.assignment, self._ran())

    def _check_simulated(self, what: str, line: SourceLine) -> None:
        if (size := World.current().size) > 1:
            raise user_error(f"pipeline: {what}", f"a job of {size} ranks", "one process",
                             "Call execute with this rank's shards.", line, ArgumentError)  # fmt: skip

    def _ran(self) -> list[Planned]:
        if not self.last:
            raise user_error("the pipeline has not run a step yet", "", "a call of simulate or execute",
                             "Plans depend on shapes.", caller_line())  # fmt: skip
        return self.last

    def _run(self, inputs: Sequence[Any], backend: str | None, line: SourceLine) -> list[Any]:
        values, shares = self._values(inputs, line)
        self.last = planned = self._planned_of(values, line)
        self._steps += 1
        device = next(t.device for t in values.given.values() if t is not None)
        work = Work(self.assignment, planned, values, shares, device, backend, self._seed())
        loss, gradients = stepped(work, True)
        return [loss, [gradients.get(weight_name(i)) for i in self.asked.weights]]

    def _values(self, inputs: Sequence[Any], line: SourceLine) -> tuple[_Values, Sequence[float]]:
        """What stages read, and by micro-batch its share of the loss."""
        given, order = self._by_tensor(inputs, line), list(self.asked.batch)
        parts = micro_batches(tuple(given[i] for i in order), {}, self.schedule().microbatches,
                              set(range(len(order))), line)  # fmt: skip
        batches = [dict(zip(order, part, strict=True)) for part, _ in parts.parts]
        return _Values(self.asked, given, batches), parts.shares

    def _planned_of(self, values: _Values, line: SourceLine) -> list[Planned]:
        """By micro-batch the programs of its stages."""
        with located(line):
            return [self._planned(self._shapes(part, values.given, line)) for part in values.parts]

    def _seed(self) -> int:
        return (self.asked.recording.seed or 0) + self._steps

    def _by_tensor(self, inputs: Sequence[Any], line: SourceLine) -> dict[int, Any]:
        """By input tensor what was passed; None for a weight of other stages."""
        tensors = self.asked.recording.input_tensors()
        if not isinstance(inputs, (list, tuple)) or len(inputs) != len(tensors):
            found = f"{len(inputs)}" if isinstance(inputs, (list, tuple)) else shown(inputs)
            raise user_error("pipeline: inputs", found, f"a list of {len(tensors)}, those of the definition", "", line,
                             ArgumentError)  # fmt: skip
        held = self.assignment.held_here()
        for i, value in zip(tensors, inputs, strict=True):
            needed = i not in self.asked.weights or weight_name(i) in held
            if not isinstance(value, torch.Tensor) and (needed or value is not None):
                raise user_error(f"pipeline: {self.asked.label(i)}", shown(value), "a tensor", "", line, ArgumentError)
        return dict(zip(tensors, inputs, strict=True))

    def _shapes(self, part: dict[int, torch.Tensor], given: dict[int, Any], line: SourceLine) -> Shapes:
        """The global shapes of inputs, for one micro-batch."""
        recording, found = self.asked.recording, Shapes()
        for i in recording.input_tensors():
            defined = recording.tensors[i].type.shape
            value = part.get(i, given[i])
            sizes = [
                n if n != -1 else self._global_size(i, d, value, line) for d, n in enumerate(defined)
            ]  # fmt: skip
            if i in part:
                self._check_rows(i, part[i].shape[0] * self._parts(i, 0), sizes[0], line)
            found[i] = tuple(sizes)
        return found

    def _check_rows(self, tensor: int, found: int, needed: int, line: SourceLine) -> None:
        if found != needed:
            raise user_error(
                f"pipeline: {self.asked.label(tensor)}", f"{found} rows in a micro-batch", f"{needed}, as defined",
                "Pass other rows, or define the tensor with -1 of them.", line, ArgumentError,
            )  # fmt: skip

    def _global_size(self, tensor: int, dim: int, value: Any, line: SourceLine) -> int:
        if value is None:
            raise user_error(f"pipeline: {self.asked.label(tensor)}", "an open size, and no tensor", "its size",
                             "Give it in define_tensor.", line, ArgumentError)  # fmt: skip
        return value.shape[dim] * self._parts(tensor, dim)

    def _parts(self, tensor: int, dim: int) -> int:
        """Into how many shards a dim of an input is cut, where tensors are shards."""
        return (
            1 if World.current().size == 1 else math.prod(map(self.assignment.mesh.axis_size, self._axes(tensor, dim)))
        )

    def _axes(self, tensor: int, dim: int) -> list[str]:
        found = self.asked.recording.own_annotations.get(tensor)
        return [split.axis for split in found.named()[dim] if split.axis] if found is not None and found.mesh else []

    def _planned(self, shapes: Shapes) -> Planned:
        key = tuple(sorted(shapes.items()))
        if key not in self.made:
            graph = specialize(self.asked.recording, shapes, {})
            stages, schedule = stages_of(self.asked, graph), self.schedule()
            first = self.asked.batch[0]
            axes = self._axes(first, 0)
            rows = (shapes[first][0], axes) if axes else None
            programs = {
                stage: definition_stage(stages[stage], stages, StageSetting(
                    self.asked, graph, self.assignment.mesh_of(stage), rows, self.max_memory, self.search,
                    schedule.is_split, schedule.microbatches,
                )) for stage in self.assignment.stages_here()
            }  # fmt: skip
            dtype = getattr(torch, graph.tensors[self.asked.loss].type.dtype.value)
            self.made[key] = Planned(tuple(stage.borders for stage in stages), programs, dtype)
        return self.made[key]


@dataclass(frozen=True, slots=True)
class _Values:
    """What stages of a definition read; `parts` are the batch's inputs of each micro-batch."""

    asked: Asked
    given: dict[int, Any]
    parts: list[dict[int, torch.Tensor]]

    def of(self, source: Source, microbatch: int) -> Any:
        """An input, whole or of a micro-batch."""
        if source.kind == "parameter":
            return self.given[next(i for i in self.asked.weights if weight_name(i) == source.name)]
        ref = self.asked.recording.inputs[source.place]
        return self.parts[microbatch].get(ref.id, self.given[ref.id])

    def needs_gradient(self, name: str) -> bool:
        """Whether it is a weight: all have gradients."""
        return True


def _check(asked: Asked, mesh: DeviceMesh, axis: str, schedule: Schedule) -> None:
    """Raises DefinitionError for a definition that cannot be cut so."""
    for what, found, needed in (*_misfits_of_schedule(asked, mesh, axis, schedule), *_misfits(asked)):
        if found:
            raise user_error(f"pipeline: {what}", found, needed, "", asked.line)
    for i, annotation in asked.recording.annotations.items():
        named = {split.axis for layout in annotation.named() for split in layout}
        if annotation.mesh != mesh or axis in named:
            raise user_error(
                f"pipeline: {asked.label(i)}", f"annotated as {annotation}", f"on {mesh}, cut over no {axis}",
                "Each stage has these annotations on its own ranks.", annotation.line,
            )  # fmt: skip


# What it is about, what was found where that is wrong, and what is needed.
_Misfit = tuple[str, str | None, str]


def _misfits_of_schedule(asked: Asked, mesh: DeviceMesh, axis: str, schedule: Schedule) -> Iterator[_Misfit]:
    ranks, cuts, stages = mesh.axis_size(axis), len(asked.cuts), schedule.stages
    yield f"schedule {schedule.name}", None if schedule.ranks == ranks else f"{schedule.ranks} ranks", f"{ranks}"
    found = None if cuts == stages - 1 else f"{cuts} tensors for {stages} stages"
    yield "cut", found, f"{stages - 1}, the last of each stage but the last"


def _misfits(asked: Asked) -> Iterator[_Misfit]:
    recording = asked.recording
    inputs, loss = set(recording.input_tensors()), recording.tensors[asked.loss].type
    is_number = not loss.ndim and loss.dtype.category >= Category.FLOAT
    yield "loss", None if is_number else str(loss), "a floating point number, without dims"
    made = [asked.label(i) for i in (*asked.weights, *asked.batch) if i not in inputs]
    yield "wrt and batch", ", ".join(made), "inputs of the definition"
    both = [asked.label(i) for i in asked.batch if i in asked.weights]
    yield "batch", "none" if not asked.batch else ", ".join(both), "inputs that are no weights"
    yield "wrt", None if asked.weights else "none", "weights whose gradients are wanted"
    scalars = len(recording.inputs) > len(inputs)
    yield "the definition", "scalar inputs" if scalars else None, "tensors alone"
    yield "the definition", "gradients by fd.grad" if recording.sweeps else None, "the forward and the loss alone"
