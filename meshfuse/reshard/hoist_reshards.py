"""Large reshards put where they can begin: right after what makes their source, or ahead of their reader.

Reshards are inserted just before their first readers, and those of outputs last. There they would run alone, if the ops
that they could run beside are in the same segment as their reader: so the segment is cut, if both the reshard and the
work beside it take long enough to be worth a launch more.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Sequence
from dataclasses import replace

from ..costs import DEVICE_FLOPS, DEVICE_LINK, DEVICE_MEMORY
from ..graph import Graph
from ..placement.roofline import local_cost
from ..resharding import Compute, Reshard, ReshardedDefinition, Statement
from .steps import Step, StepKind

# Modelled seconds of a reshard, and of the work beside it, that are worth a launch more.
WORTH_A_LAUNCH = 20e-6
# An input is gathered as much work ahead of its reader as the reshard takes, times this.
_AHEAD = 2.0


class Seconds:
    """Modelled seconds of statements on one rank, looked up for equal ones."""

    def __init__(self, resharded: ReshardedDefinition):
        self.resharded = resharded
        self.graph: Graph = resharded.graph
        self._known: dict[object, float] = {}

    def of(self, statement: Statement) -> float:
        """Seconds of an op's computation, or of a reshard."""
        if isinstance(statement, Compute):
            call = self.graph.nodes[statement.node].call
            key: object = (id(call), id(statement.placement))
            if key not in self._known:
                flops, nbytes = local_cost(call, statement.placement)
                self._known[key] = max(flops / DEVICE_FLOPS, nbytes / DEVICE_MEMORY)
            return self._known[key]
        ttype = self.resharded.type_of(statement.source)
        key = (statement.step, ttype)
        if key not in self._known:
            self._known[key] = _moved(statement.step, ttype.shape) * ttype.dtype.itemsize / DEVICE_LINK.bandwidth
        return self._known[key]


def _moved(step: Step, shape: Sequence[int]) -> float:
    """Elements of the largest shard that a reshard sends or receives."""
    if step.kind is StepKind.SLICE:
        return 0.0
    sizes = step.src.max_local_numel(shape), step.dst.max_local_numel(shape)
    return float(2 * sizes[0] if step.kind is StepKind.ALL_REDUCE else max(sizes))


def hoist_reshards(resharded: ReshardedDefinition) -> ReshardedDefinition:
    """The same statements, with reshards that are worth it earlier. The order is the same on all ranks."""
    seconds = Seconds(resharded)
    if not any(
        isinstance(statement, Reshard) and seconds.of(statement) >= WORTH_A_LAUNCH for statement in resharded.statements
    ):
        return resharded
    costs = [seconds.of(statement) for statement in resharded.statements]
    keys = _places(resharded, costs)
    order = sorted(range(len(keys)), key=keys.__getitem__)
    return replace(resharded, statements=tuple([resharded.statements[place] for place in order]))


def _places(resharded: ReshardedDefinition, costs: Sequence[float]) -> list[tuple[int, int]]:
    """For each statement a key to sort by: the place that it comes after, and its turn there."""
    work = [c if isinstance(s, Compute) else 0.0 for s, c in zip(resharded.statements, costs, strict=True)]
    until = list(itertools.accumulate(work, initial=0.0))
    made_at: dict[int, int] = dict.fromkeys(resharded.inputs, -1)
    keys: list[tuple[int, int]] = []
    for place, statement in enumerate(resharded.statements):
        base = place
        if isinstance(statement, Reshard) and statement.node is None and costs[place] >= WORTH_A_LAUNCH:
            first = made_at[statement.source]
            if first < 0:
                first = _ahead(until, place, _AHEAD * costs[place])
            if until[place] - until[first + 1] >= WORTH_A_LAUNCH:
                base = first
        keys.append((base, -1 if base == place else place))
        for value in statement.outputs:
            made_at[value] = base
    return keys


def _ahead(until: Sequence[float], place: int, seconds: float) -> int:
    """The last place with `seconds` of work between it and this one; the first place where there is not so much."""
    return bisect.bisect_right(until, until[place] - seconds) - 2
