"""What a whole step takes and holds: layers on stages, worked off in micro-batches by a schedule."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ...costs import Link
from ..pipeline.orders import named
from ..pipeline.partition import even_parts
from ..pipeline.schedule import FORWARD, Action, Schedule
from .few_layers import FewLayers
from .layer_costs import LayerCost, LayerCosts, total


@dataclass(frozen=True, slots=True)
class Arrangement:
    """How a step is worked off.

    axis: that of the pipeline; "" for a single stage on all ranks. ranks: how many stages' ranks there are along it.
    schedule, virtual, microbatches: as of `mf.Pipeline`.
    recomputes: whether each layer is computed again in the backward.
    """

    axis: str = ""
    ranks: int = 1
    schedule: str = "1f1b"
    virtual: int = 1
    microbatches: int = 1
    recomputes: bool = False

    @property
    def stages(self) -> int:
        """How many stages there are."""
        return self.ranks * self.virtual


@dataclass(frozen=True, slots=True)
class StepCost:
    """seconds: of a step. memory: bytes of the rank that holds most, by stage in `held`.

    idle: the part of the time in which ranks wait for stages. moving: seconds in which tensors move inside of a stage.
    peak: the part of the operations that ranks could do in this time that a step has.
    cuts: the number of the layer that each stage but the first begins with. loads: seconds of each stage's work on a
        micro-batch.
    """

    seconds: float
    memory: float
    idle: float
    moving: float
    peak: float
    cuts: tuple[int, ...]
    loads: tuple[float, ...]
    held: tuple[float, ...]


def step_cost(costs: LayerCosts, few: FewLayers, arrangement: Arrangement, link: Link, stage_ranks: int) -> StepCost:
    """What a step takes. The costs are of one micro-batch, and of the layers that stand for all.

    link: between stages. stage_ranks: over how many ranks of a stage what crosses a border is cut.
    """
    schedule = named(arrangement.schedule, arrangement.ranks, arrangement.microbatches, arrangement.virtual)
    layers = expanded(costs, few)
    cuts = even_parts(layer_loads(costs, layers), arrangement.stages) if arrangement.stages > 1 else []
    stages = _stages(costs, layers, cuts)
    lasts = _durations(schedule, stages, [link.seconds(1, stage.handed / stage_ranks) for stage in stages])
    once = [sum(stages[s].once for s in schedule.stages_of(rank)) for rank in range(schedule.ranks)]
    held = tuple(_held(schedule, rank, stages) + costs.working for rank in range(schedule.ranks))
    makespan = schedule.makespan(lasts)
    seconds, parts = makespan + max(once), arrangement.microbatches
    work = sum(stage.peak for stage in stages) * parts / arrangement.ranks
    busy = sum(map(lasts, schedule.actions)) / schedule.ranks
    return StepCost(
        seconds, max(held), (makespan - busy) / seconds,
        max(stage.moving for stage in stages) * parts + max(once), work / seconds, tuple(cuts),
        tuple(stage.seconds for stage in stages), held,
    )  # fmt: skip


def expanded(costs: LayerCosts, few: FewLayers) -> list[LayerCost]:
    """The costs of all layers, those that others stand for among them."""
    place = {layer: at for at, layer in enumerate(few.kept)}
    return [costs.layers[place[i]] for i in few.stands]


def layer_loads(costs: LayerCosts, layers: Sequence[LayerCost]) -> list[int]:
    """Picoseconds of each layer, with what stands before the first and behind the last."""
    seconds = [layer.seconds for layer in layers]
    seconds[0] += costs.before.seconds
    seconds[-1] += costs.behind.seconds
    return [round(1e12 * each) for each in seconds]


def _stages(costs: LayerCosts, layers: Sequence[LayerCost], cuts: Sequence[int]) -> list[LayerCost]:
    ends = [0, *cuts, len(layers)]
    parts = [list(layers[a:b]) for a, b in itertools.pairwise(ends)]
    parts[0].insert(0, costs.before)
    parts[-1].append(costs.behind)
    return [total(part) for part in parts]


def _durations(
    schedule: Schedule, stages: Sequence[LayerCost], passed: Sequence[float]
) -> Callable[[Action], float]:  # fmt: skip
    """Seconds of actions, each with what it has to receive from another rank first.

    passed: by stage the seconds of sending what it hands on.
    """
    owners = [schedule.rank_of(stage) for stage in range(len(stages))]
    borders = [at if a != b else 0.0 for at, a, b in zip(passed, owners, owners[1:], strict=False)]
    forward = [stage.forward + at for stage, at in zip(stages, [0.0, *borders], strict=True)]
    backward = [stage.backward + at for stage, at in zip(stages, [*borders, 0.0], strict=True)]
    return lambda action: (forward if action.kind == FORWARD else backward)[action.stage]


def _held(schedule: Schedule, rank: int, stages: Sequence[LayerCost]) -> float:
    """Bytes of a rank's stages: what is always there, and what each micro-batch in flight keeps."""
    own = schedule.stages_of(rank)
    return sum(stages[s].held + stages[s].kept * schedule.in_flight(rank, s) for s in own)
