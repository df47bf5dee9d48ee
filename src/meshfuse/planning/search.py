"""Small programs are planned in several ways, and the best of the plans is taken.

One sweep with a beam is what long programs can afford. In it an op tries what its operands and readers ask for, and
what is wanted of a tensor is what it would have if all just followed the annotations (as in GSPMD and Shardy). Where
operands disagree, the best answer may be one that none of them asks for (attention by hand over a split sequence: the
heads). So a small program is planned again from what a greedy sweep makes, from the best plan so far, with more
placements to choose from (`votes.reassigned`), as if its inputs lay elsewhere (`starts`), as if its one axis were two
(`grids`), with more plans kept for longer, with single tensors held elsewhere (`pins`), and as if the user had asked
for free outputs where they are left. Of a long program of equal layers few are planned so, and the others like them
(`propagation.folding`).
"""

from __future__ import annotations

import dataclasses
import itertools
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from enum import Enum
from typing import Any, NamedTuple

from ..costs import computation
from ..errors import SourceLine, shown, user_error
from ..graph import Graph
from ..mesh import DeviceMesh
from ..propagation.beam import BeamSettings
from ..propagation.folding import folded
from ..propagation.growth import EPSILON
from ..propagation.outputs import all_followed, ends
from ..propagation.propagate import FAST, LATE, LOOK, NARROW, THOROUGH, Propagation, propagate
from ..propagation.sharded import ShardedDefinition
from ..resharding.insert import insert_resharding
from ..resharding.resharded import Set
from ..sharding.layout import is_prefix
from ..sharding.value import Sharding
from .grids import grids
from .pins import Pin, most, pins
from .starts import Starts, come_for_some, elsewhere, in_rounds, shared_starts
from .translated import translated
from .weights import saved_by_gathering, saved_by_leaving

VARIABLE = "MESHFUSE_SEARCH"
# The most ops of a program that is planned several times as it is, whatever it moves: about a second's work.
MOST = 400
# And of one that is searched as a whole, beside few of its layers, where it is worth a search.
MOST_WHOLE = 1200
# So many times as long ones are searched as a whole where what is found for a few of their layers is not good for all.
MISSED = 4
# The layers of a long program that are planned several times: two before and one after those that are left out.
LAYERS = 3
# Few different calls: more than an MLP has, forward and backward, and fewer than attention beside it.
FEW = 32
# How often what was found last is gone on from, while that finds more.
ROUNDS = 4
# Long programs are searched with more plans kept where fewer leave more than this part of what the first plan moves.
LITTLE = 0.9
# So many tensors in a row that are held elsewhere and save nothing are the last ones tried.
IDLE = 40
# A plan that moves more must take less than this part of the time: rates of computation are the rougher estimate.
WORTH = 0.75
# One that moves as much must take less than this part: an all-reduce in two halves saves next to no computation.
NOTABLE = 0.98
# In a loose search, plans count as one that differ by no more than this part of what the best one's moves take.
SLACK = 0.01
# A long program is searched where weights that are gathered would save more than this part of its reductions, or
# weights that are left where they are more than this part of what gathers them.
SAVED = 0.1

# What goes on from the best plan so far.
_Search = Callable[["_PlanSearch"], None]

# The search with no choice final before the end in which ops try more placements: too slow to be asked more than once.
_FAR = LATE._replace(width=32, thorough=True)


class Spent(NamedTuple):
    """Modelled seconds of a plan's moves, and of what one rank computes; and the bytes that it puts on the wire."""

    moving: float
    computing: float
    wire: float

    @property
    def seconds(self) -> float:
        return self.moving + self.computing

    def beats(self, other: Spent) -> bool:
        """Whether this is better: less time, and less of it for moves, but where the time is notably less."""
        saved = other.moving - self.moving
        limit = other.seconds * (1.0 if saved > EPSILON else NOTABLE if saved > -EPSILON else WORTH)
        return self.seconds < limit - EPSILON

    def sends_less_than(self, other: Spent) -> bool:
        """Whether fewer bytes are sent, or as many and less is computed: few collectives alone save less than modelled,
        where small ones are one call.
        """
        return (round(self.wire), self.computing) < (round(other.wire), other.computing)


def spent(sharded: ShardedDefinition) -> Spent:
    """What a plan takes."""
    resharded = insert_resharding(sharded)
    prices = [resharded.price(step) for step in resharded.steps if isinstance(step, Set)]
    placed = zip(sharded.graph.nodes, (choice.placement for choice in sharded.choices), strict=True)
    work = [computation(n.call.op.flops(n.call) / p.ways, p.results[0].mesh.flops) for n, p in placed if not p.move]
    return Spent(sum([p.seconds for p in prices]), sum(work), sum([p.wire for p in prices]))


def better(found: ShardedDefinition, other: ShardedDefinition) -> ShardedDefinition:
    """The better of two plans, the first where they are as good."""
    return other if spent(other).beats(spent(found)) else found


class Effort(Enum):
    """How long programs are planned: once; several times up to `MOST` ops, and longer ones where `searches` says so; or
    several times in any case.
    """

    FAST = "fast"
    AUTO = "auto"
    THOROUGH = "thorough"

    @property
    def rewrites(self) -> bool:
        """Whether a program is planned once more where it may be written otherwise."""
        return self is not Effort.FAST

    def searches(self, plan: ShardedDefinition) -> bool:
        """Whether a long program with this plan is planned several times. On several axes that takes longest, as there
        are many more ways to put them on an op's factors, but where layers are of few different ops. Where a plan only
        reduces sums and brings inputs where they are read, there is little to find, but where sums are larger than the
        weights behind them, or weights than the rows that they are gathered for.
        """
        if self is not Effort.AUTO:
            return self is Effort.THOROUGH
        graph = plan.graph
        axes = max(sum(n > 1 for n in sharding.mesh.shape) for sharding in graph.annotations.values())
        if axes <= 1 or len({id(node.call) for node in graph.nodes}) <= FEW or _moves_results(plan):
            return True
        return saved_by_leaving(plan) > SAVED or saved_by_gathering(plan) > SAVED


def _moves_results(plan: ShardedDefinition) -> bool:
    """Whether what an op made is gathered, or comes to lie elsewhere, for another or for its annotation."""
    made, homes = dict[int, Sharding](), plan.homes
    for node, choice in zip(plan.graph.nodes, plan.choices, strict=True):
        placement = choice.placement
        if placement.move is not None:
            return True
        for i, need in zip(node.inputs, placement.operands, strict=True):
            have = made.get(i, need)
            if have is not need and not (_stays(have, need) or _stays(homes[i], need)):
                return True
        for i, have in zip(node.outputs, placement.results, strict=True):
            if homes[i] is not have and not _stays(have, homes[i]):
                return True
            made[i] = have
    return False


def _stays(have: Sharding, need: Sharding) -> bool:
    """Whether a rank that has the one has all of the other but for what is left to reduce."""
    return have.mesh == need.mesh and all(map(is_prefix, have.dims, need.dims))


def effort_of(given: Any, line: SourceLine | None) -> Effort:
    """The effort of this name, else of MESHFUSE_SEARCH, else "auto". DefinitionError for another."""
    name = os.environ.get(VARIABLE) or "auto" if given is None else given
    try:
        return Effort(name)
    except ValueError:
        told = VARIABLE if given is None else "search"
        needed = "'fast', 'auto' or 'thorough'"
        raise user_error(told, shown(name), needed, "'thorough' plans long programs longer.", line) from None


def searched(sharded: ShardedDefinition, world: DeviceMesh, effort: Effort = Effort.AUTO) -> ShardedDefinition:
    """The plan, or a better one near it; the plan itself for programs that move nothing, and on less effort."""
    if not _is_worth(sharded, effort):
        return sharded
    if _is_long(sharded) and effort is not Effort.THOROUGH:
        return _searched(sharded, world, effort, (_PlanSearch.briefly_on_grids,), beside=_PlanSearch.briefly)
    return _searched(sharded, world, effort, (_PlanSearch.near,))


def searched_far(sharded: ShardedDefinition, world: DeviceMesh, effort: Effort = Effort.AUTO) -> ShardedDefinition:
    """The plan, or a better one farther from it, which takes several times as long: of short programs, or on effort."""
    if _is_long(sharded) and effort is not Effort.THOROUGH:
        return sharded
    searches = (_PlanSearch.near, _PlanSearch.far)
    return _searched(sharded, world, effort, searches) if _is_worth(sharded, effort) else sharded


def _is_long(sharded: ShardedDefinition) -> bool:
    return len(sharded.graph.nodes) > MOST


def _is_worth(sharded: ShardedDefinition, effort: Effort) -> bool:
    if not sharded.graph.annotations or effort is Effort.FAST:
        return False
    return not _is_long(sharded) or effort.searches(sharded)


def _searched(
    sharded: ShardedDefinition, world: DeviceMesh, effort: Effort, searches: Sequence[_Search],
    beside: _Search | None = None,
) -> ShardedDefinition:  # fmt: skip
    """What the last search finds from the plan; where it is of a long program that repeats itself, from what all of
    them find for few of its layers, by the search `beside` those, if that is another.
    """
    graph, missed = sharded.graph, False
    fold = folded(graph, LAYERS)
    if fold is not None:
        first = propagate(fold.short, world)
        short = _found(first, world, *searches)
        found = better(sharded, fold.written_out(short))
        sharded, missed = found, found is sharded and short is not first
    whole = len(graph.nodes) <= MOST_WHOLE * (MISSED if missed else 1) or (fold is None and effort is Effort.THOROUGH)
    last = searches[-1] if fold is None or beside is None else beside
    return _found(sharded, world, last) if whole else sharded


def _found(sharded: ShardedDefinition, world: DeviceMesh, *searches: _Search) -> ShardedDefinition:
    found = _PlanSearch(sharded.graph, world, sharded)
    for search in searches:
        found.run(search)
    return found.best


class _PlanSearch:
    """The plans of one graph, the best kept."""

    def __init__(self, graph: Graph, world: DeviceMesh, first: ShardedDefinition):
        self.graph, self.world = graph, world
        self.propagation = Propagation(graph, world)
        self.best, self.cost = first, spent(first)
        self._costs = [(first, self.cost)]

    def run(self, search: _Search) -> None:
        """A search from the best plan, if that moves anything."""
        if self.cost.moving > EPSILON:
            search(self)

    def briefly(self) -> None:
        """Most of what `near` finds of long programs, in half its time: with more placements to choose from, from a
        greedy plan and from the best, and with inputs brought sooner. More plans are kept where that finds little.
        """
        before = self.cost
        for search in (NARROW, THOROUGH):
            if self.cost.moving > LITTLE * before.moving:
                self._try(None, search)
                self._go_on()
        self._bring_sooner()

    def briefly_on_grids(self) -> None:
        """The same, and as if an axis were two."""
        self.briefly()
        self._on_grids(_PlanSearch.briefly)

    def near(self) -> None:
        """From what the annotations ask for, with more placements to choose from, and as if inputs that a plan moves
        often lay elsewhere: what most is found by.
        """
        likely = _followed(self.graph, self.best, {})
        self._try(likely)
        self._try(None)
        self._try(self._made(self.best))
        self._try(None, THOROUGH)
        self._try(likely, NARROW)
        for plan in _on_equal_links(self.graph, self.world):
            self._keep(plan)
            self._try(self._made(plan), NARROW)
        self._go_on()
        before = self.cost
        for starts in elsewhere(insert_resharding(self.best)):
            asked = _followed(self.graph, self.best, starts)
            self._keep(self.propagation.again(asked, starts=starts))
        self._bring_sooner()
        if self.cost != before:
            self._go_on()

    def _bring_sooner(self) -> None:
        """As if inputs that the best plan brings somewhere for some readers came there before all of them."""
        for _ in range(ROUNDS):
            before = self.cost
            for starts in come_for_some(self.best):
                self._keep(self.propagation.again(self._made(self.best), starts=starts))
            if self.cost == before:
                return

    def far(self) -> None:
        """As if an axis were two, or ranks shared inputs, with choices that stay open, and with tensors elsewhere."""
        self._on_grids(_PlanSearch.near, _PlanSearch._farther)
        for starts in shared_starts(self.graph, self.best.homes):
            for search in (FAST, LATE):
                self._try(_followed(self.graph, self.best, starts), search)
        if not in_rounds(self.graph):
            found = self.propagation.again(self._made(self.best), _FAR)
            if self._spent(found).sends_less_than(self.cost):
                self._keep(found)
            self._loosely()
        before = self.cost
        self._hold()
        if self.cost != before:
            self._go_on()
        self._leave()

    def _loosely(self) -> None:
        """With plans that differ in little counted as one, so that those kept are farther apart."""
        for asked in (_followed(self.graph, self.best, {}), None, self._made(self.best)):
            self._try(asked, self._loose(LATE))

    def _loose(self, search: BeamSettings) -> BeamSettings:
        """The search with the slack for this program: of two digits, so that searches share what they work out."""
        return search._replace(slack=float(f"{SLACK * self.cost.moving:.1e}"))

    def _farther(self) -> None:
        """What far searches find on a grid in little time. Its plans are in parts of an axis, which no op asks for on
        the mesh itself: there a search from them finds other plans, not those next to them.
        """
        self._loosely()
        self._go_on()
        self._leave()

    def _on_grids(self, search: _Search, farther: _Search | None = None) -> None:
        """From the plans that a search finds on meshes on which an axis is two; and from what a second one makes of
        those that take no more than the best.
        """
        for grid in grids(self.graph):
            world = grid.written if self.world == grid.mesh else self.world
            graph = grid.graph(self.graph)
            there = _PlanSearch(graph, world, propagate(graph, world))
            there.run(search)
            if farther is not None and there.cost.moving < self.cost.moving + EPSILON:
                there.run(farther)
            self._keep(grid.plan_back(self.graph, there.best))

    def _hold(self) -> None:
        """With what is made beside moves held elsewhere, from the best plan, as long as that saves moves."""
        tried, idle, before = set[Pin](), 0, None
        while self.cost != before:
            before = self.cost
            for _, places in itertools.groupby(pins(insert_resharding(self.best)), key=lambda pin: pin.tensor):
                made = self._made(self.best)
                for pin in places:
                    if pin not in tried and len(tried) < most(self.graph) and idle < IDLE:
                        tried.add(pin)
                        idle = 0 if self._held(made, pin) else idle + 1

    def _held(self, made: Mapping[int, Sharding], pin: Pin) -> bool:
        """Whether the plan that a pin leads to, from what a plan makes, is better: it is kept then."""
        found, cost = self.propagation.holding(made, *pin, self._loose(LOOK)), self.cost
        if self._spent(found).moving < cost.moving - EPSILON:
            self._keep(found)
        return self.cost != cost

    def _leave(self) -> None:
        """With free outputs where the best plan leaves them, as if the user had asked for that: so a sum that need not
        be whole is scattered to where its operands were moved for it to be.
        """
        left = {i: end for i, end in ends(self.best).items() if i not in self.graph.annotations and any(end.dims)}
        if left:
            self._keep(self.propagation.leaving(self._made(self.best), left))

    def _go_on(self) -> None:
        """From the best plan, while that finds more."""
        for _ in range(ROUNDS):
            before = self.cost
            self._try(self._made(self.best), NARROW)
            self._try(self._made(self.best))
            if self.cost == before:
                return

    def _made(self, plan: ShardedDefinition) -> dict[int, Sharding]:
        """What a plan makes."""
        inputs = set(self.graph.input_tensors)
        return {i: home for i, home in plan.homes.items() if i not in inputs}

    def _try(self, asked: Mapping[int, Sharding] | None, search: BeamSettings = FAST) -> None:
        self._keep(self.propagation.again(asked, search))

    def _keep(self, found: ShardedDefinition) -> None:
        cost = self._spent(found)
        if cost.beats(self.cost):
            self.best, self.cost = found, cost

    def _spent(self, found: ShardedDefinition) -> Spent:
        """What it takes: searches often find the same."""
        same = (cost for plan, cost in self._costs if plan.choices == found.choices and plan.homes == found.homes)
        known = next(same, None)
        if known is None:
            known = spent(found)
            self._costs.append((found, known))
        return known


def _on_equal_links(graph: Graph, world: DeviceMesh) -> Iterator[ShardedDefinition]:
    """The plan for links that are alike on all axes; nothing where they are."""
    linked = {s.mesh for s in graph.annotations.values() if s.mesh.linked}
    if linked:
        plain = {mesh: DeviceMesh(mesh.shape, mesh.names, ranks=mesh.ranks) for mesh in linked}
        # Links and a rate that are the default's make no other mesh: there is nothing else to try.
        alike = {mesh: other for mesh, other in plain.items() if other != mesh}
        if not alike:
            return
        annotations = {i: _on(s, alike) for i, s in graph.annotations.items()}
        found = _found(propagate(dataclasses.replace(graph, annotations=annotations), world), world, _PlanSearch.near)
        back = {other: mesh for mesh, other in alike.items()}
        yield translated(found, graph, lambda sharding, _: _on(sharding, back), lambda layout: layout)


def _on(sharding: Sharding, meshes: Mapping[DeviceMesh, DeviceMesh]) -> Sharding:
    mesh = meshes.get(sharding.mesh, sharding.mesh)
    return Sharding(mesh, sharding.dims, sharding.partial, sharding.reduce)


def _followed(graph: Graph, plan: ShardedDefinition, starts: Starts) -> dict[int, Sharding]:
    """Every op's results where they follow the annotations, or where the plan has them if they cannot.

    `starts`: inputs as if they lay elsewhere.
    """
    inputs = {i: starts.get(i, plan.homes[i]) for i in graph.input_tensors}
    return all_followed(graph, inputs, lambda i: plan.homes[i].reduced())
