"""The programs of one stage for micro-batches of one shape."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from ...definition.annotation import layouts_of_spec
from ...errors import SourceLine
from ...mesh import DeviceMesh
from ...runtime.world import World
from ...sharding.value import Sharding
from ..accumulating import SYNCED
from ..captured_graph import Source
from ..joint import planned
from ..plans import Spec
from ..steps import Half, Setting, Step
from .borders import Borders, Crossing
from .normalizers import Normalized
from .stages import StageGraph
from .summing import summing

Values = dict[Source, torch.Tensor]
NOWHERE = SourceLine("<pipeline>", 0)  # Of what no user has written.


@dataclass(frozen=True, slots=True, eq=False)
class StageProgram:
    """What a stage runs: what crosses its borders, and the definitions planned of it.

    specs: by place of a crossing tensor how it lies.
    summing: sums the gradients of all micro-batches over ranks; None where each does so itself.
    """

    stage: Borders
    step: Step
    mesh: DeviceMesh
    specs: Mapping[int, Spec]
    summing: Half | None = None

    def run(self, half: Half, values: Mapping[Source, torch.Tensor], seed: int | None, backend: str | None) -> Values:
        """Run a half on a rank's parts, or where ranks are simulated on whole tensors, by what they are."""
        inputs = [values[source] for source in half.inputs]
        if seed is not None and any(node.draws for node in half.fd.recording.nodes):
            half.fd.seed_with(seed)
        with torch.no_grad():  # The backward is a program of its own.
            if World.current().size == 1:
                outputs = half.fd.simulate(inputs)
            else:
                outputs = half.fd.execute(inputs, idle_ranks=True, backend=backend)
        return dict(zip(half.outputs, outputs, strict=True))

    def summed(self, sums: Mapping[str, torch.Tensor], backend: str | None) -> dict[str, torch.Tensor]:
        """By parameter the gradient of all micro-batches, summed over ranks where these have terms of it."""
        if self.summing is None:
            return dict(sums)
        terms = {source: sums[source.name] for source in self.summing.inputs}
        made = self.run(self.summing, terms, None, backend)
        return {**sums, **{source.name: value for source, value in made.items()}}

    def read_later(self) -> list[Source]:
        """What the backward reads beside what is saved, and what arrives for it."""
        back = {self.received_of(crossing) for crossing in self.stage.taken(back=True)}
        inputs = dict.fromkeys(s for half in self.step.halves[1:] for s in half.inputs)
        return [s for s in inputs if s.kind in ("parameter", "buffer", "constant", "argument") and s not in back]

    def received_of(self, crossing: Crossing) -> Source:
        """What the stage calls a tensor that it received."""
        return Source("argument", place=crossing.place)

    def sent_of(self, crossing: Crossing) -> Source:
        """What the stage calls a tensor that it sends."""
        if crossing.back:
            return Source("gradient", place=crossing.place, of="argument")
        return Source("result", place=self.stage.given(back=False).index(crossing))

    @property
    def loss(self) -> Source:
        """What the last stage calls the loss, and with the kind "tangent" its gradient."""
        return Source("result", place=len(self.stage.given(back=False)))

    def local_shape(self, crossing: Crossing) -> tuple[int, ...]:
        """The shape of this rank's part of a tensor that crosses."""
        if World.current().size == 1:
            return crossing.shape
        return sharding_of(crossing, self.specs, self.mesh).local_shape(crossing.shape, World.current().rank)


def sharding_of(crossing: Crossing, specs: Mapping[int, Spec], mesh: DeviceMesh) -> Sharding:
    """How a crossing tensor lies on a stage's mesh."""
    layouts = layouts_of_spec(crossing.name, mesh, specs[crossing.place], len(crossing.shape), NOWHERE)
    return Sharding.make(mesh, layouts, crossing.shape)


def stage_program(stage: StageGraph, setting: Setting, is_split: bool) -> StageProgram:
    """Plan a stage. The setting is that of the whole graph, on the stage's mesh."""
    specs = {c.place: border_spec(c, setting) for c in (*stage.received, *stage.sent)}
    made = replace(
        setting,
        names={**setting.names, **{c.place: c.name for c in (*stage.received, *stage.sent)}},
        shapes={**setting.shapes, **{c.place: c.shape for c in stage.received}},
        specs={**setting.specs, **specs},
        ends={i: specs[c.place] for i, c in enumerate(stage.given(back=False))},
        is_split=is_split,
    )
    step = planned(stage.graph, made)
    return StageProgram(stage, step, setting.mesh, specs, summing(step, stage.graph, made))


def counting_program(loss: Normalized, setting: Setting) -> StageProgram | None:
    """Plan what a loss's normalizers are added up of; None where it has none."""
    if loss.counts is None:
        return None
    alone = replace(setting, context=None, ends={}, sync=SYNCED)
    return StageProgram(StageGraph((), (), loss.counts), planned(loss.counts, alone), setting.mesh, {})


def border_spec(crossing: Crossing, setting: Setting) -> Spec:
    """How a tensor lies that crosses a border: in as many parts as there are ranks, so that each sends one.

    Rows are cut as the batch is, and the first other dim that they divide over the axes that are left, as Megatron's
    scatter-gather optimisation does (Narayanan et al. 2021).
    """
    return spec_of_border(crossing.shape, setting.mesh, setting.batch)


def spec_of_border(shape: Sequence[int], mesh: DeviceMesh, of_batch: tuple[int, Any] | None) -> Spec:
    """The spec of a tensor of this shape that crosses a border; `of_batch` are the rows of the batch and their axes."""
    rows, batch = of_batch or (None, None)
    spec = list[Any]([None] * len(shape))
    if shape and shape[0] == rows:
        spec[0] = batch
    taken = {batch} if isinstance(batch, str) else set(batch or ())
    left = [axis for axis in mesh.names if axis not in taken and mesh.axis_size(axis) > 1]
    ranks = math.prod(mesh.axis_size(axis) for axis in left)
    place = next((d for d, n in enumerate(shape) if d > 0 and n % ranks == 0), None)
    if left and place is not None:
        spec[place] = left
    return tuple(spec)
