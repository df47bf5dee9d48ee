"""Plans of a step's layers with open weights and arguments, and what each layer takes then."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from ...automatic_plan import without, without_implied
from ...definition.annotation import spec_of
from ...errors import SourceLine
from ...graph import Graph
from ...mesh import DeviceMesh
from ...planner.op_labels import KnownLabels
from ...planner.open_inputs import OpenInputs
from ...planner.place_inputs import place_inputs
from ...planner.prices import Prices
from ...planner.reshard_costs import whole_axes
from ...propagation import ShardedDefinition
from ...resharding import insert_resharding
from ...sharding.layout import extent
from ...sharding.value import Sharding
from ..accumulating import Sync
from ..calls import Arguments
from ..captured_graph import Captured, Source
from ..joint import JointWriter
from ..pipeline.assignment import mesh_at
from ..plan_value import Spec, axes_in
from ..plans import ModulePlan
from ..recompute import recomputing
from ..steps import Setting
from .few_layers import FewLayers
from .layer_costs import LayerCosts, Shared, layer_costs, made_gradients
from .roles import fitting
from .step_cost import Arrangement


@dataclass(frozen=True, slots=True)
class Model:
    """A model that was captured, with a few of its layers.

    given: the arguments, and how those lie of which a user has said so.
    batch: by place the arguments that have the rows of the batch, and `rows` how many these are.
    is_elastic: whether the graph is right for fewer rows.
    parameters: how those lie, by full name, of which a user has said so.
    experts: the modules whose experts rows may be sent to.
    states: how many tensors of a weight's size the optimiser keeps.
    names: of all parameters.
    """

    graph: Captured
    given: Arguments
    few: FewLayers
    batch: frozenset[int]
    rows: int
    is_elastic: bool
    parameters: Mapping[str, Spec]
    experts: tuple[str, ...]
    states: float
    names: tuple[str, ...]
    line: SourceLine

    def shapes(self, microbatches: int) -> dict[int, tuple[int, ...]]:
        """Those of the arguments of one of so many micro-batches."""
        part = self.rows // microbatches
        return {i: (part, *shape[1:]) if i in self.batch else shape for i, shape in self.given.shapes.items()}

    def fits(self, microbatches: int) -> bool:
        """Whether the forward treats so many micro-batches as the graph does."""
        return microbatches == 1 or self.graph.sizes.hold(self.shapes(microbatches))

    @property
    def named_axes(self) -> set[str]:
        """The axes that a user has put tensors on."""
        return axes_in([*self.parameters.values(), *self.given.specs.values()])


@dataclass(frozen=True, slots=True)
class Layered:
    """What layers take in the best plan.

    parameters, arguments: how these lie. gap: by which part a better plan may take less time, None if not known.
    """

    costs: LayerCosts
    parameters: Mapping[str, Spec]
    arguments: Mapping[str, Spec]
    gap: float | None


@dataclass(frozen=True, slots=True)
class Pricer:
    """Prices arrangements of a model on a mesh, under roles of axes that are said."""

    model: Model
    mesh: DeviceMesh
    roles: Mapping[str, str]
    prices: Prices = field(default_factory=lambda: Prices(whole_axes))
    steps: dict[Arrangement, OpenStep] = field(default_factory=dict)
    known: dict[tuple[Arrangement, float], Layered] = field(default_factory=dict)

    def under(self, roles: Mapping[str, str]) -> Pricer:
        """The same under other roles of axes."""
        return dataclasses.replace(self, roles=roles, known={})

    def stage_mesh(self, axis: str) -> DeviceMesh:
        """The ranks of one stage."""
        return mesh_at(self.mesh, axis, 0)

    def layered(self, arrangement: Arrangement, price: float = 0.0) -> Layered:
        """What layers take in the best plan of one micro-batch on a stage's ranks, at a price of memory."""
        asked = dataclasses.replace(arrangement, schedule="", virtual=1)
        if asked not in self.steps:
            self.steps[asked] = self._opened(asked)
        if (asked, price) not in self.known:
            self.known[asked, price] = self.steps[asked].placed(price, self)
        return self.known[asked, price]

    def _opened(self, asked: Arrangement) -> OpenStep:
        """The step with its inputs open."""
        mesh, model = self.stage_mesh(asked.axis), self.model
        shapes = model.shapes(asked.microbatches)
        plan, names = ModulePlan(mesh, model.parameters), dict(enumerate(model.given.names))
        sync = Sync(asked.microbatches > 1, asked.microbatches)
        setting = Setting(plan, names, shapes, model.given.specs, model.line, {}, free=True, sync=sync)
        again = model.few.names if asked.recomputes else ()
        with recomputing(model.graph, again):
            return OpenWriter(model.graph, setting).opened(self)

    def fitting(self, source: Source, places: tuple[Sharding, ...]) -> tuple[Sharding, ...]:
        """Of the places of an input those that go with the roles of axes; one that is given stays."""
        if len(places) == 1:
            return places
        is_expert = source.name.rpartition(".")[0] in self.model.experts
        is_argument = source.kind == "argument"
        here = {axis: role for axis, role in self.roles.items() if axis in places[0].mesh.names}
        return fitting(places, here, is_argument, is_argument and source.place in self.model.batch, is_expert)


@dataclass(frozen=True, slots=True)
class OpenStep:
    """The graph of a step whose inputs are open, and what of it is what.

    batch: the arguments with the rows of the batch, if a step has several micro-batches.
    said: what an input lies as in words of specs.
    labels: those of the ops, which are the same at every price of memory.
    """

    graph: Graph
    mesh: DeviceMesh
    inputs: OpenInputs
    shared: Shared
    sources: Mapping[int, Source]
    batch: tuple[int, ...]
    said: Callable[[Source, Sharding | None], Spec]
    names: Mapping[int, str]
    labels: KnownLabels = field(default_factory=KnownLabels)

    def placed(self, price: float, pricer: Pricer) -> Layered:
        """The best plan at a price of memory, and what its layers take."""
        places = {i: pricer.fitting(self.sources[i], each) for i, each in self.inputs.places.items()}
        opened = dataclasses.replace(self.inputs, places=places, price=price)
        found = place_inputs(self.graph, self.mesh, opened, pricer.prices, self.labels)
        alike = self._rows_alike(places, found.inputs)
        if alike is not None:
            opened = dataclasses.replace(opened, places={**places, **alike})
            found = place_inputs(self.graph, self.mesh, opened, pricer.prices, self.labels)
        there = found.inputs | found.followers
        graph, plan = self.graph.annotated(there), found.plan
        sharded = ShardedDefinition(graph, plan.choices, {**plan.shardings, **there}, plan.gap)
        costs = layer_costs(insert_resharding(sharded), self.shared)
        specs = {source: self.said(source, found.inputs.get(i)) for i, source in self.sources.items()}
        parameters = {s.name: spec for s, spec in specs.items() if s.kind == "parameter"}
        arguments = {self.names[s.place]: spec for s, spec in specs.items() if s.kind == "argument"}
        return Layered(costs, parameters, arguments, plan.gap)

    def _rows_alike(
        self, places: Mapping[int, tuple[Sharding, ...]], found: Mapping[int, Sharding]
    ) -> Mapping[int, tuple[Sharding, ...]] | None:  # fmt: skip
        """The places where all arguments of a batch have the same rows on a rank; None where they have.

        A rank cuts its own rows into micro-batches. As a given argument, or else the one that is cut most.
        """
        given = [self.graph.annotations[i].dims[0] for i in self.batch if i in self.graph.annotations]
        rows = {*given, *(found[i].dims[0] for i in self.batch if i in found)}
        if len(rows) < 2:
            return None
        lead = given[0] if given else max(rows, key=extent)
        alike = {i: tuple(s for s in places[i] if s.dims[0] == lead) for i in self.batch if i in places}
        return {i: left for i, left in alike.items() if left}


class OpenWriter(JointWriter):
    """Writes a joint definition whose inputs are open. A parameter that is given has one place to lie."""

    def _spec(self, source: Source, ndim: int) -> Spec | None:
        if source.kind == "parameter":
            return self.setting.plan.parameters.get(source.name)
        if source.kind == "argument":
            return self.setting.specs.get(source.place)
        return (None,) * ndim if source.kind in ("buffer", "constant") else None

    def opened(self, pricer: Pricer) -> OpenStep:
        """The step with its inputs open; gradients are summed as the setting says."""
        made, _ = self.written()
        recording, mesh = made.fd.recording, self.setting.mesh
        views = {source: made.values[node] for node, source in self.graph.inputs if node in made.values}
        sources = {view.id: source for source, view in views.items() if hasattr(view, "id")}
        ends = zip(self.ends(), recording.outputs, strict=True)
        pairs = {end: views[source.of_input()].id for source, end in ends if source.kind == "gradient"}
        graph = made.fd.graph(self.setting.line)
        weights = frozenset(i for i, source in sources.items() if source.kind == "parameter")
        given = {i: (graph.annotations[i],) for i in weights if i in graph.annotations}
        inputs = OpenInputs.of(without_implied(graph), mesh, {**recording.primals, **pairs}, given)
        graph = dataclasses.replace(graph, annotations=without(graph.annotations, {**inputs.follow, **given}))
        of_weights = {end: weight for end, weight in pairs.items() if weight in weights}
        states = pricer.model.states
        more = dict.fromkeys(weights, states)
        inputs = dataclasses.replace(inputs, more=more)
        few = pricer.model.few
        shared = Shared(
            tuple(few.names[i] for i in few.kept), self.of_forward, weights, made_gradients(graph, of_weights),
            states, self.setting.sync.leaves,
        )  # fmt: skip
        rows = [i for i, s in sources.items() if s.kind == "argument" and s.place in pricer.model.batch]
        batch = tuple(rows) if self.setting.sync.leaves else ()
        return OpenStep(graph, mesh, inputs, shared, sources, batch, self._said, self.setting.names)

    def _said(self, source: Source, sharding: Sharding | None) -> Spec:
        if sharding is None:
            ndim = self._ndims[source]
            return self._spec(source, ndim) or (None,) * ndim
        return spec_of(sharding)

    @functools.cached_property
    def _ndims(self) -> Mapping[Source, int]:
        tensors = [(node.meta["val"], source) for node, source in self.graph.inputs]
        return {source: value.ndim for value, source in tensors if hasattr(value, "ndim")}
