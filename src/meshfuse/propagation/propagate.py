"""Propagation: forward, backward and forward again over the ops, each decision by modelled time.

The first sweep finds what every tensor would be if all ops followed the annotations on the inputs. The second carries
that back from results to operands, as wishes. The third decides every op for good, with a beam of plans. Annotated
tensors never change. (The factor form of the rules is GSPMD's and Shardy's; deciding by modelled time is our own.)
"""

from __future__ import annotations

import copy
import dataclasses
import functools
from collections.abc import Mapping

from ..graph import Graph, depth_first, reordered
from ..mesh import DeviceMesh
from ..sharding.value import Sharding
from .beam import Beam, BeamSettings, Decision, greedy
from .choose import Option, cheapest
from .folding import folded
from .growth import Roles
from .meshes import node_meshes
from .outputs import all_followed, ends
from .sharded import Choice, RunnerUp, ShardedDefinition
from .votes import Available
from .wishes import wishes

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


def propagate(graph: Graph, world: DeviceMesh, twice: bool = True) -> ShardedDefinition:
    """A sharding for every tensor and a placement for every op.

    `world` is the mesh of a program in which no annotation names one. `twice`: search small programs a second time.
    Long programs of equal layers are planned by few of their layers (`folding`).
    """
    fold = folded(graph)
    if fold is not None:
        found = Propagation(fold.short, world).first(twice)
        if fold.is_steady(found):
            return fold.written_out(found)
    return Propagation(graph, world).first(twice)


def total_seconds(done: ShardedDefinition) -> float:
    """The modelled time of a plan, and of the reductions that its outputs still need."""
    left = [(done.homes[i], end, done.graph.tensors[i].type) for i, end in ends(done).items()]
    owed = [cheapest((home,), end, t.shape, t.dtype.itemsize) for home, end, t in left]
    return sum(choice.seconds for choice in done.choices) + sum(owed)


def _choice(decision: Decision) -> Choice:
    option, other = decision
    return Choice(option.placement, option.source, option.seconds, _runner_up(other) if other is not None else None)


def _runner_up(other: Option) -> RunnerUp:
    return RunnerUp(other.source, other.seconds, other.placement.operands, other.placement.results)


class Propagation:
    """The searches over one graph, and the tables that they share."""

    def __init__(self, graph: Graph, world: DeviceMesh):
        self.graph, self.world, self.order = graph, world, depth_first(graph)
        ordered = reordered(graph, self.order)
        self.meshes = node_meshes(ordered, world)
        self.roles = Roles(ordered, self.meshes.nodes)
        self.inputs: dict[int, Available] = {i: (self._input_home(i),) for i in graph.input_tensors}
        self.placed: dict[int, Available] = {i: (sharding,) for i, sharding in graph.annotations.items()}
        self._done: list[tuple[BeamSettings, dict[int, Available], Mapping[int, Sharding], ShardedDefinition]] = []

    def _input_home(self, tensor: int) -> Sharding:
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
        found = ShardedDefinition(self.graph, choices, self._homes(list(choices)) | dict(ends))
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
        kind = self.graph.tensors[tensor].type
        slow, fast = (cheapest(there, need, kind.shape, kind.dtype.itemsize) for there in (held, (*held, start)))
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
        found = ShardedDefinition(self.graph, tuple(choices), self._homes(choices))
        found.verify()
        return found

    def _homes(self, choices: list[Choice]) -> dict[int, Sharding]:
        """Every tensor's sharding after its op: its annotation, or as the op makes it."""
        homes = {i: available[0] for i, available in self.inputs.items()}
        for node, choice in zip(self.graph.nodes, choices, strict=True):
            homes.update(zip(node.outputs, choice.placement.results, strict=True))
        return homes | dict(self.graph.annotations)
