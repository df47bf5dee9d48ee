"""Propagation: forward, backward and forward again over the ops, each decision by modelled time.

The first sweep finds what every tensor would be if all ops followed the annotations on the inputs. The second carries
that back from results to operands, as wishes. The third decides every op for good, with a beam of plans. Annotated
tensors never change. (The factor form of the rules is GSPMD's and Shardy's; deciding by modelled time is our own.)
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import itertools
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass

from .graph import Graph, Node, depth_first, reordered
from .mesh import DeviceMesh
from .ops.opdef import Call
from .ops.rules import Rule
from .ops.values import TensorType
from .placement.beam import Beam, BeamSettings, Decision, greedy
from .placement.consumer_layouts import wishes
from .placement.factors import following
from .placement.growth import Roles
from .placement.op_meshes import node_meshes
from .placement.operand_layouts import Available
from .placement.options import Choice, Option, RunnerUp, cheapest
from .placement.repeated_layers import Folded, repeated_layers
from .reshard.search import plan
from .sharding import layout as lay
from .sharding.layout import Split
from .sharding.value import Sharding
from .traversal import inner_first


@dataclass(frozen=True, slots=True)
class ShardedDefinition:
    """A graph with a sharding for every tensor and a placement for every op.

    `shardings[t]` is the sharding that tensor t has after its op: its annotation, if it has one. It may be partial.
    """

    graph: Graph
    choices: tuple[Choice, ...]
    shardings: Mapping[int, Sharding]

    def verify(self) -> None:
        """Assert that every tensor has a sharding, annotated ones their own, and that every placement fits its op."""
        graph = self.graph
        made = {i for node in graph.nodes for i in node.outputs}
        assert set(self.shardings) == made | set(graph.input_tensors)
        assert all(self.shardings[i] == sharding for i, sharding in graph.annotations.items())
        for node, choice in zip(graph.nodes, self.choices, strict=True):
            assert len(choice.placement.operands) == len(node.inputs)
            assert len(choice.placement.results) == len(node.outputs)

    def __str__(self) -> str:
        lines = []
        for i in self.graph.input_tensors:
            lines.append(f"{self.graph.tensors[i].label}: {self.graph.tensors[i].type} {self.shardings[i]}")
        for node, choice in zip(self.graph.nodes, self.choices, strict=True):
            made = ", ".join(
                f"{self.graph.tensors[i].label}: {self.graph.tensors[i].type} {self.shardings[i]}" for i in node.outputs
            )
            taken = ", ".join(f"t{i} {s}" for i, s in zip(node.inputs, choice.placement.operands, strict=True))
            lines.append(f"{made} = {node.name}({taken})")
        return "\n".join(lines)


def followed(known: Mapping[int, Sharding], node: Node) -> tuple[Sharding | None, ...]:
    """The shardings of an op's results where they follow its operands, None where they cannot be laid out so."""
    return _followed(node.call, node.rule, tuple([known[i] for i in node.inputs]))


@functools.lru_cache(maxsize=1 << 13)
def _followed(call: Call, rule: Rule, operands: tuple[Sharding, ...]) -> tuple[Sharding | None, ...]:
    if not operands or any(s.mesh != operands[0].mesh for s in operands):
        return (None,) * len(call.results)
    made = following(call, rule, operands)
    return tuple(Sharding(operands[0].mesh, dims) if dims is not None else None for dims in made)


def all_followed(
    graph: Graph, inputs: Mapping[int, Sharding], otherwise: Callable[[int], Sharding]
) -> dict[int, Sharding]:
    """Every op's results if all ops followed the annotations and nothing were reduced or moved.

    `otherwise` gives the sharding of those that cannot be laid out so.
    """
    known, made = dict(inputs), dict[int, Sharding]()
    for node in graph.nodes:
        for i, sharding in zip(node.outputs, followed(known, node), strict=True):
            known[i] = made[i] = graph.annotations.get(i) or sharding or otherwise(i)
    return made


def ends(sharded: ShardedDefinition) -> dict[int, Sharding]:
    """For every output where it is left: where its op makes it, reduced.

    A free output that is a sum may be scattered to where the ops that carry it would follow their operands, if that
    takes less time: rows that are looked up in a split table by split indices stay split, by a reduce-scatter.
    """
    shardings = sharded.shardings
    done = {i: shardings[i].reduced() for i in sharded.graph.outputs}
    if any(shardings[i].partial for i in done):
        tracer = _Tracer(sharded)
        done = {i: tracer.end(i) if shardings[i].partial else end for i, end in done.items()}
    return done


def over_whole_axes(graph: Graph, left: Mapping[int, Sharding], parts: Collection[str]) -> dict[int, Sharding]:
    """Places of outputs, but over all of an axis where one is over a part of it, if that divides the dim.

    `parts` are axes that are parts of one.
    """
    return {i: _over_whole_axes(end, graph.shape(i), parts) for i, end in left.items()}


def _over_whole_axes(end: Sharding, shape: tuple[int, ...], parts: Collection[str]) -> Sharding:
    sizes = dict(zip(end.mesh.names, end.mesh.shape, strict=True))
    on = [dict.fromkeys(split.axis for split in lay.axes(layout)) for layout in end.dims]
    on = [names if names.keys().isdisjoint(parts) else names | dict.fromkeys(parts) for names in on]
    used = Counter(itertools.chain.from_iterable(on))
    dims = list(end.dims)
    for d, (names, n) in enumerate(zip(on, shape, strict=True)):
        whole = tuple([Split(sizes[name], name) for name in sizes if name in names])
        grows = lay.extent(whole) > lay.extent(lay.axes(dims[d])) and not n % lay.extent(whole)
        if grows and all(used[name] == 1 for name in names):
            dims[d] = whole
    return Sharding.make(end.mesh, dims, shape)


def first_reduced(sharded: ShardedDefinition, left: Mapping[int, Sharding]) -> dict[int, Sharding]:
    """Where outputs are first reduced on their way to where they are left."""
    makers = {i: made for node, choice in zip(sharded.graph.nodes, sharded.choices, strict=True)
              for i, made in zip(node.outputs, choice.placement.results, strict=True)}  # fmt: skip
    types = sharded.graph.tensors
    return {i: _first_reduced(makers.get(i, end), end, types[i].type) for i, end in left.items()}


def _first_reduced(made: Sharding, end: Sharding, ttype: TensorType) -> Sharding:
    path = plan(made, end, ttype.shape, ttype.dtype.itemsize) if made.mesh == end.mesh else None
    passed = [step.dst for step in path.steps] if path is not None else []
    return next((place for place in passed if not place.partial), end)


def written_out(layers: Folded, short: ShardedDefinition) -> ShardedDefinition:
    """The plan of a program of repeated layers, from that of the same program with most layers left out."""
    found = ShardedDefinition(layers.whole, *layers.written_out(short.choices, short.shardings))
    found.verify()
    return found


class _Tracer:
    """Follows unreduced sums back through the ops that make them."""

    def __init__(self, sharded: ShardedDefinition):
        self.graph, self.shardings = sharded.graph, sharded.shardings
        self.makers = {i: (node, place) for node in self.graph.nodes for place, i in enumerate(node.outputs)}
        self._known: dict[int, Sharding] = {}

    def end(self, output: int) -> Sharding:
        sharding, ttype = self.shardings[output], self.graph.tensors[output].type
        targets = [sharding.reduced(), self._follow(output)]
        plans = [plan(sharding, target, ttype.shape, ttype.dtype.itemsize) for target in targets]
        seconds = [p.seconds if p is not None else float("inf") for p in plans]
        return targets[1] if seconds[1] < seconds[0] else targets[0]

    def _follow(self, tensor: int) -> Sharding:
        """Where a sum would be if its op, and all ops that it carries sums from, followed their operands."""
        for i in inner_first(tensor, self._unknown_sums):
            self._known[i] = self._followed(i) if self._is_followed(i) else self.shardings[i]
        return self._known[tensor]

    def _is_followed(self, tensor: int) -> bool:
        return bool(self.shardings[tensor].partial) and tensor in self.makers

    def _unknown_sums(self, tensor: int) -> list[int]:
        inputs = self.makers[tensor][0].inputs if self._is_followed(tensor) else ()
        return [i for i in inputs if i not in self._known]

    def _followed(self, tensor: int) -> Sharding:
        sharding, (node, place) = self.shardings[tensor], self.makers[tensor]
        found = followed({i: self._known[i] for i in node.inputs}, node)[place]
        return sharding.reduced() if found is None or found.mesh != sharding.mesh else found


# Beyond the end of any program: no choice is final before that.
_NO_HORIZON = 1 << 30
FAST = BeamSettings(width=24, horizon=32)
# The first search, all that long programs get.
FIRST = BeamSettings(width=6, horizon=16)
THOROUGH = BeamSettings(width=16, horizon=32, thorough=1)
# Several of these go on from one another: with more plans each takes longer, and they find no more together.
NARROW = THOROUGH._replace(width=8)
# Products with an axis less crowd out others, so that is one search more.
SPARING = THOROUGH._replace(width=32, thorough=2)
# Small programs are searched a second time, for choices that pay off late. Each search finds what the other drops.
_LONG = BeamSettings(width=32, horizon=_NO_HORIZON)
# What pays in the backward only is far behind for most of the forward.
LATE = BeamSettings(width=64, horizon=_NO_HORIZON)
# Programs of so many ops are searched without a horizon.
SMALL = 256
# Of many programs that differ in one place each.
LOOK = BeamSettings(width=12, horizon=32, sums=True)
_NOWHERE: Mapping[int, Sharding] = {}


def propagate(graph: Graph, default_mesh: DeviceMesh, twice: bool = True) -> ShardedDefinition:
    """A sharding for every tensor and a placement for every op.

    `default_mesh` is the mesh of a program in which no annotation names one. `twice`: search small programs a second
    time. Long programs of equal layers are planned by few of their layers (`folding`).
    """
    fold = repeated_layers(graph)
    if fold is not None:
        found = Propagation(fold.short, default_mesh).first(twice)
        if fold.is_steady(found.choices):
            return written_out(fold, found)
    return Propagation(graph, default_mesh).first(twice)


def total_seconds(done: ShardedDefinition) -> float:
    """The modelled time of a plan, and of the reductions that its outputs still need."""
    left = [(done.shardings[i], end, done.graph.tensors[i].type) for i, end in ends(done).items()]
    owed = [cheapest((sharding,), end, t.shape, t.dtype.itemsize) for sharding, end, t in left]
    return sum(choice.seconds for choice in done.choices) + sum(owed)


def _choice(decision: Decision) -> Choice:
    option, other = decision
    return Choice(option.placement, option.source, option.seconds, _runner_up(other) if other is not None else None)


def _runner_up(other: Option) -> RunnerUp:
    return RunnerUp(other.source, other.seconds, other.placement.operands, other.placement.results)


class Propagation:
    """The searches over one graph, and the tables that they share."""

    def __init__(self, graph: Graph, default_mesh: DeviceMesh):
        self.graph, self.default_mesh, self.order = graph, default_mesh, depth_first(graph)
        ordered = reordered(graph, self.order)
        self.meshes = node_meshes(ordered, default_mesh)
        self.roles = Roles(ordered, self.meshes.nodes)
        self.inputs: dict[int, Available] = {i: (self._input_sharding(i),) for i in graph.input_tensors}
        self.placed: dict[int, Available] = {i: (sharding,) for i, sharding in graph.annotations.items()}
        self._done: list[tuple[BeamSettings, dict[int, Available], Mapping[int, Sharding], ShardedDefinition]] = []

    def _input_sharding(self, tensor: int) -> Sharding:
        """An input's annotation; inputs without one are whole on every rank."""
        return self.graph.annotations.get(tensor) or self._whole(tensor)

    def _whole(self, tensor: int) -> Sharding:
        return Sharding.replicated(self.meshes.of_tensor(tensor), len(self.graph.shape(tensor)))

    def first(self, twice: bool = True) -> ShardedDefinition:
        """A first plan: wishes from what follows the annotations, and in small programs also from a greedy sweep."""
        found = self._searched(FIRST, self._following)
        if twice and FAST.horizon < len(self.graph.nodes) <= SMALL:
            other = self._searched(_LONG, self.greedily)
            found = min(found, other, key=lambda done: round(total_seconds(done), 12))
        return found

    def again(
        self,
        asked: Mapping[int, Sharding] | None,
        search: BeamSettings = FAST,
        starts: Mapping[int, Sharding] = _NOWHERE,
    ) -> ShardedDefinition:
        """A plan whose wishes start from what is `asked` of ops' results; from those of a greedy sweep if that is None.

        A search without a horizon is for small programs; longer ones are then searched with that of `FAST`. `starts`
        are other places for inputs, as if the inputs were there, too, for nothing: what a start saves may come only
        after many ops. Its price is added to the plan where such an input is read.
        """
        if search.horizon > FAST.horizon and len(self.graph.nodes) > SMALL:
            search = search._replace(width=FAST.width, horizon=FAST.horizon)
        return self._searched(search, self.greedily if asked is None else asked, starts)

    def holding(
        self, asked: Mapping[int, Sharding], tensor: int, place: Sharding, search: BeamSettings
    ) -> ShardedDefinition:
        """As `again`, with one tensor held in a place, as if it were annotated."""
        return self._unheld(self._held({tensor: place}).again(asked, search))

    def leaving(self, asked: Mapping[int, Sharding], ends: Mapping[int, Sharding]) -> ShardedDefinition:
        """As `again`, with free outputs left in these places, as if they were annotated."""
        return self._unheld(self._held(ends).again(asked, NARROW), ends)

    def _held(self, places: Mapping[int, Sharding]) -> Propagation:
        """The searches of the same graph with these tensors annotated as well."""
        held = copy.copy(self)
        held.graph = self.graph.annotated(places)
        held.roles = self.roles.holding(places)
        held.placed = self.placed | {i: (place,) for i, place in places.items()}
        held._done = []
        return held

    def _unheld(self, plan: ShardedDefinition, ends: Mapping[int, Sharding] = _NOWHERE) -> ShardedDefinition:
        """A plan that was made with tensors held, as one of the graph itself; outputs in `ends` stay where held."""
        choices = plan.choices
        found = ShardedDefinition(self.graph, choices, self._shardings(list(choices)) | dict(ends))
        found.verify()
        return found

    @functools.cached_property
    def _following(self) -> Mapping[int, Sharding]:
        """By tensor its sharding if all ops follow the annotations; whole where that cannot be laid out."""
        return all_followed(self.graph, {i: available[0] for i, available in self.inputs.items()}, self._whole)

    @functools.cached_property
    def greedily(self) -> Mapping[int, Sharding]:
        """By tensor its sharding in a sweep that decides every op at once."""
        return greedy(self.roles, self.placed, self.inputs)

    def _searched(
        self, search: BeamSettings, asked: Mapping[int, Sharding], starts: Mapping[int, Sharding] = _NOWHERE
    ) -> ShardedDefinition:
        """The plan of one search; searches that start from the same wishes and places are done once."""
        key = (search, self._wanted(asked, search.plainly), starts)
        found = next((plan for *known, plan in self._done if tuple(known) == key), None)
        if found is None:
            inputs = {i: (*available, starts[i]) if i in starts else available for i, available in self.inputs.items()}
            found = self._paid(self._plan(Beam(self.roles, key[1], inputs, search).run()), starts)
            self._done.append((*key, found))
        return found

    def _paid(self, plan: ShardedDefinition, starts: Mapping[int, Sharding]) -> ShardedDefinition:
        """The plan with the price of bringing inputs to their `starts` added, where they are first read there."""
        if not starts:
            return plan
        held, choices = {i: self.inputs[i] for i in starts}, list[Choice]()
        for node, choice in zip(plan.graph.nodes, plan.choices, strict=True):
            owed = 0.0
            for i, need in zip(node.inputs, choice.placement.operands, strict=True):
                if i in held and need not in held[i]:
                    owed += self._saved(i, held[i], starts[i], need)
                    held[i] = (*held[i], need)
            choices.append(dataclasses.replace(choice, seconds=choice.seconds + owed) if owed else choice)
        return dataclasses.replace(plan, choices=tuple(choices))

    def _saved(self, tensor: int, held: Available, start: Sharding, need: Sharding) -> float:
        """The seconds that a tensor takes less to where it is needed if it is at `start`, too."""
        ttype = self.graph.tensors[tensor].type
        slow, fast = (cheapest(there, need, ttype.shape, ttype.dtype.itemsize) for there in (held, (*held, start)))
        return slow - fast

    def _wanted(self, asked: Mapping[int, Sharding], plainly: bool) -> dict[int, Available]:
        """What is wanted of every tensor: what is asked of it or its annotation first, then its readers' wishes."""
        wanted = {i: (sharding.reduced(),) for i, sharding in asked.items()} | self.placed
        fixed = self.placed.keys() | self.inputs.keys()
        for kind, tensors, _ in reversed(self.roles.parts):
            read = tensors[: kind.read]
            asked_for = tuple([wanted.get(i, ()) for i in tensors])
            found = wishes(kind, asked_for, tuple([i not in fixed for i in read]), plainly)
            wanted.update([(i, new) for i, new in zip(read, found, strict=True) if new])
        return wanted

    def _plan(self, ordered: list[Decision]) -> ShardedDefinition:
        decided = dict(zip(self.order, ordered, strict=True))
        choices = [_choice(decided[node.id]) for node in self.graph.nodes]
        found = ShardedDefinition(self.graph, tuple(choices), self._shardings(choices))
        found.verify()
        return found

    def _shardings(self, choices: list[Choice]) -> dict[int, Sharding]:
        """Every tensor's sharding after its op: its annotation, or as the op makes it."""
        shardings = {i: available[0] for i, available in self.inputs.items()}
        for node, choice in zip(self.graph.nodes, choices, strict=True):
            shardings.update(zip(node.outputs, choice.placement.results, strict=True))
        return shardings | dict(self.graph.annotations)
