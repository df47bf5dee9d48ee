"""`fd.auto`: annotations for the inputs that have none, chosen with the plan.

Where the inputs lie is found by the planner's own optimisation (`planner.place_inputs`), and then annotated: the plan
of the definition is made as if the user had written it. Which activations are in memory when a rank holds most is known
once a plan is made: if that is too much these have a price, too, and the inputs are placed again.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from .compiler import compile_sharded, decided, graph_to_plan, made_at_peak
from .definition.annotation import spec_of
from .definition.recording import Recording
from .errors import SourceLine, user_error
from .graph import Graph
from .mesh import DeviceMesh
from .number_text import duration, number
from .planner.effort import Effort
from .planner.op_labels import KnownLabels
from .planner.open_inputs import OpenInputs
from .planner.place_inputs import Placed, place_inputs
from .planner.prices import Prices
from .planner.reshard_costs import whole_axes
from .plans.within_memory import fastest_within
from .sharding.value import Sharding


@dataclass(frozen=True, slots=True)
class AutoPlan:
    """What `fd.auto` has chosen; `print` shows it as calls to paste.

    shardings: by the label of each open input, where it now lies.
    seconds: the modelled time of a step.
    memory: the most bytes that a rank holds at once, as modelled.
    """

    shardings: Mapping[str, Sharding]
    seconds: float
    memory: float

    def __str__(self) -> str:
        calls = [(label.partition(" (")[0], list(spec_of(sharding))) for label, sharding in self.shardings.items()]
        lines = [f"fd.mesh_split({name}, mesh, {spec})" for name, spec in calls]
        lines.append(f"a step takes {duration(self.seconds)} modelled, and a rank holds {number(self.memory)} bytes")
        return "\n".join(lines)


def automatic_plan(
    recording: Recording, shapes: Mapping[int, tuple[int, ...]], mesh: DeviceMesh, updates: Mapping[int, int],
    max_memory: float | None, effort: Effort, line: SourceLine,
) -> tuple[Mapping[int, Sharding], AutoPlan]:  # fmt: skip
    """Where each input without an annotation lies best on a mesh, and the plan then.

    updates: by output the input whose next value it is. max_memory: the bytes that a rank may hold.
    Raises DefinitionError where no plan was found that holds so little.
    """
    graph = graph_to_plan(recording, shapes, {})
    opened = OpenInputs.of(without_implied(graph), mesh, {**recording.primals, **updates})
    graph = dataclasses.replace(graph, annotations=without(graph.annotations, opened.follow))
    search = _Search(graph, mesh, effort, max_memory)
    found = search.best(opened)
    if found.memory > search.limit:
        least = min(each.memory for each in search.known.values())
        raise user_error(
            "fd.auto: max_memory", f"{number(search.limit)} bytes", f"{number(least)}, the least that was found",
            "Allow a rank more memory, or take a mesh of more ranks.", line,
        )  # fmt: skip
    new = {i: found.shardings[of] for i, of in updates.items() if of in found.shardings}
    labels = {graph.tensors[i].label: sharding for i, sharding in found.shardings.items()}
    return found.shardings | new, AutoPlan(labels, found.seconds, found.memory)


@dataclass(frozen=True, slots=True)
class _Found:
    """A plan: where open inputs lie, its seconds, the most bytes that a rank holds, and what ops make of these."""

    shardings: dict[int, Sharding]
    seconds: float
    memory: float
    held: frozenset[int]


@dataclass(frozen=True, slots=True)
class _Search:
    """The fastest plan whose peak is within a limit: of those that are the best at some price of memory.

    The inputs have the price, and what is in memory at the peak of the plan without a limit.
    """

    graph: Graph
    mesh: DeviceMesh
    effort: Effort
    max_memory: float | None
    prices: Prices = field(default_factory=lambda: Prices(whole_axes))
    labels: KnownLabels = field(default_factory=KnownLabels)
    known: dict[tuple[Sharding, ...], _Found] = field(default_factory=dict)

    @property
    def limit(self) -> float:
        return math.inf if self.max_memory is None else self.max_memory

    def best(self, opened: OpenInputs) -> _Found:
        """The fastest plan within the limit; where none is, the fastest of all."""
        free = self._at(opened, 0.0)
        for held in (free.held, frozenset[int]()) if free.memory > self.limit else ():
            priced = functools.partial(self._at, dataclasses.replace(opened, held=held))
            found = fastest_within(self.limit, free, priced)
            if found.memory <= self.limit:
                return found
        return free

    def _at(self, opened: OpenInputs, price: float) -> _Found:
        """The plan at a price of memory."""
        opened = dataclasses.replace(opened, price=price)
        placed = place_inputs(self.graph, self.mesh, opened, self.prices, self.labels)
        key = tuple(placed.inputs.values())
        if key not in self.known:
            self.known[key] = self._planned(placed)
        return self.known[key]

    def _planned(self, placed: Placed) -> _Found:
        plan = decided(self.graph.annotated(placed.inputs | placed.followers), self.mesh, self.effort)
        compiled = compile_sharded(plan, self.max_memory)
        held = made_at_peak(self.graph, compiled) - placed.followers.keys()
        return _Found(placed.inputs, compiled.seconds, compiled.memory, held)


def without_implied(graph: Graph) -> Graph:
    """The graph without annotations that no user has made."""
    return dataclasses.replace(graph, annotations=without(graph.annotations, graph.implied))


def without(annotations: Mapping[int, Sharding], these: Mapping[int, object]) -> dict[int, Sharding]:
    """The annotations but for these."""
    return {i: sharding for i, sharding in annotations.items() if i not in these}
