"""A plain definition cut into stages: which ops each has, and what crosses their borders."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from ...definition.recording import Recording
from ...dtypes import Category
from ...errors import SourceLine, user_error
from ...graph import Graph, Node
from .borders import Borders, Crossing


@dataclass(frozen=True, slots=True)
class Asked:
    """What a user says of a definition's pipeline, in numbers of tensors.

    recording: of the definition, with the loss as its only output.
    cuts: the last tensors of all stages but the last.
    weights: whose gradients are wanted.
    batch: inputs that are cut into micro-batches.
    """

    recording: Recording
    loss: int
    cuts: tuple[int, ...]
    weights: tuple[int, ...]
    batch: tuple[int, ...]
    line: SourceLine

    def label(self, tensor: int) -> str:
        """What errors and bills call a tensor."""
        return self.recording.tensors[tensor].label


@dataclass(frozen=True, slots=True)
class StageOps:
    """What a stage computes.

    nodes: numbers of ops, in order.
    inputs: those of the definition that it reads.
    sent: tensors of the forward.
    gradients: by received tensor the crossing by which its gradient goes back.
    tensors: by place of a crossing of any stage the tensor that it is, or whose gradient.
    """

    nodes: tuple[int, ...]
    inputs: tuple[int, ...]
    sent: tuple[int, ...]
    borders: Borders
    gradients: Mapping[int, Crossing]
    tensors: Mapping[int, int]


def owners_of(asked: Asked) -> dict[int, tuple[int, ...]]:
    """By weight the stages that read it. Raises DefinitionError for cuts that do not fit."""
    stage = _stretches(asked)
    readers: dict[int, set[int]] = {i: set() for i in asked.weights}
    for number, node in enumerate(asked.recording.nodes):
        for i in node.inputs:
            if i in readers and number in stage:
                readers[i].add(stage[number])
    return {i: tuple(sorted(found)) for i, found in readers.items()}


def _stretches(asked: Asked) -> dict[int, int]:
    """By op that the loss needs, by its number, the stage in whose stretch of the definition it stands."""
    recording, nodes = asked.recording, asked.recording.nodes
    needed: set[int] = {asked.loss}
    for node in reversed(nodes):
        if not needed.isdisjoint(node.outputs):
            needed.update(node.inputs)
    ends: list[int] = []
    for cut in asked.cuts:
        place = next((n for n, node in enumerate(nodes) if cut in node.outputs), None)
        if place is None or cut not in needed or cut == asked.loss:
            raise user_error(
                f"pipeline: cut at {recording.tensors[cut].label}", "a tensor that the loss does not follow from by ops"
                if place is not None else "an input", "the result of an op between the inputs and the loss", "",
                asked.line,
            )  # fmt: skip
        ends.append(place)
    if ends != sorted(set(ends)):
        raise user_error("pipeline: cut", ", ".join(map(asked.label, asked.cuts)), "tensors in the order of their ops",
                         "Sort them.", asked.line)  # fmt: skip
    wanted = [n for n, node in enumerate(nodes) if not needed.isdisjoint(node.outputs)]
    return {n: sum(end < n for end in ends) for n in wanted}


def stages_of(asked: Asked, graph: Graph) -> list[StageOps]:
    """The stages of a definition with known sizes."""
    return _Cutter(asked, graph).stages()


class _Cutter:
    """`stage`: by op that makes something of a weight its stage; all others are free: each stage computes them."""

    def __init__(self, asked: Asked, graph: Graph) -> None:
        self.asked, self.graph = asked, graph
        self.count = len(asked.cuts) + 1
        stretch = _stretches(asked)
        self.makers = {i: node for node in graph.nodes for i in node.outputs}
        self.stage: dict[int, int] = {}
        held = set(asked.weights)
        for node in graph.nodes:
            if node.call.op.draws is not None or not held.isdisjoint(node.inputs):
                self.stage[node.id] = stretch[node.origin]
                held.update(node.outputs)

    def stages(self) -> list[StageOps]:
        """All stages, with the crossings between them numbered behind the definition's inputs."""
        found = [self._needed(stage) for stage in range(self.count)]
        targets: dict[int, list[int]] = {}
        for stage, (_, received) in enumerate(found):
            for i in received:
                targets.setdefault(i, []).append(stage)
        forward, back = self._crossings(targets)
        return [self._stage(stage, nodes, forward, back) for stage, (nodes, _) in enumerate(found)]

    def _needed(self, stage: int) -> tuple[list[Node], list[int]]:
        """(a stage's ops, what it receives)."""
        nodes: dict[int, Node] = {}
        received: dict[int, None] = {}
        own = [node for node in self.graph.nodes if self.stage.get(node.id) == stage]
        waiting = list(own)
        while waiting:
            node = waiting.pop()
            if node.id in nodes:
                continue
            nodes[node.id] = node
            for i in node.inputs:
                maker = self.makers.get(i)
                if maker is not None and self.stage.get(maker.id, stage) != stage:
                    received[i] = None
                elif maker is not None:
                    waiting.append(maker)
        return [nodes[n] for n in sorted(nodes)], sorted(received)

    def _crossings(
        self, targets: Mapping[int, Sequence[int]]
    ) -> tuple[dict[int, Crossing], dict[tuple[int, int], Crossing]]:
        """(by tensor its crossing, by tensor and the stage that reads it that of its gradient)."""
        forward: dict[int, Crossing] = {}
        back: dict[tuple[int, int], Crossing] = {}
        place = len(self.asked.recording.inputs)
        for i, stages in sorted(targets.items()):
            source, made = self.stage[self.makers[i].id], self.graph.tensors[i]
            name, dtype = made.label, getattr(torch, made.type.dtype.value)
            forward[i] = Crossing(place, name, made.type.shape, dtype, source, tuple(stages), False)
            place += 1
            for stage in stages if made.type.dtype.category >= Category.FLOAT else ():
                back[i, stage] = Crossing(place, f"{name}.grad", made.type.shape, dtype, stage, (source,), True)
                place += 1
        return forward, back

    def _stage(
        self, stage: int, nodes: Sequence[Node], forward: Mapping[int, Crossing],
        back: Mapping[tuple[int, int], Crossing],
    ) -> StageOps:  # fmt: skip
        crossings = [*forward.values(), *back.values()]
        taken = tuple(c for c in crossings if stage in c.targets)
        given = tuple(c for c in crossings if c.source == stage)
        sent = tuple(i for i, crossing in forward.items() if crossing.source == stage)
        gradients = {i: crossing for (i, reader), crossing in back.items() if reader == stage}
        read = {i for node in nodes for i in node.inputs}
        inputs = tuple(i for i in self.graph.input_tensors if i in read)
        numbers = tuple(node.id for node in nodes)
        tensors = {c.place: i for i, c in forward.items()} | {c.place: i for (i, _), c in back.items()}
        return StageOps(numbers, inputs, sent, Borders(taken, given), gradients, tensors)


def tangents_of(stage: StageOps, ops: Collection[StageOps]) -> Iterator[tuple[int, Crossing]]:
    """What comes back to a stage: (a tensor that it has sent, the crossing of a gradient of it)."""
    for other in ops:
        for i, crossing in other.gradients.items():
            if i in stage.sent:
                yield i, crossing
