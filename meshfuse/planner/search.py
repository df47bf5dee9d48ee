"""Programs are planned in several ways, and the best of the plans is taken.

Long programs can afford one sweep with a beam. In a sweep each op tries what its operands and its readers ask for, and
a tensor is wanted where it would be if all ops just followed the annotations (as in GSPMD and Shardy). Where operands
disagree, the best answer may be one that none of them asks for, such as the heads in attention by hand over a split
sequence. So a short program is planned again and again:

- from what a greedy sweep makes, and from the best plan so far;
- with more placements to choose from (`votes.reassigned`), and with more plans kept for longer;
- as if its inputs lay elsewhere (`starts`), as if its one axis were two (`grids`);
- with single tensors held elsewhere (`pins`), and with free outputs held where they are left.

Of a long program of equal layers a few are planned so, and the others like them (`placement.repeated_layers`).
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

from ..graph import Graph
from ..mesh import DeviceMesh
from ..placement.beam import BeamSettings
from ..placement.growth import EPSILON
from ..placement.repeated_layers import repeated_layers
from ..propagation import (
    FAST,
    LATE,
    LOOK,
    NARROW,
    SPARING,
    THOROUGH,
    Propagation,
    ShardedDefinition,
    all_followed,
    ends,
    first_reduced,
    over_whole_axes,
    propagate,
    written_out,
)
from ..resharding import insert_resharding
from ..sharding.value import Sharding
from .effort import MOST, Effort, most_axes
from .grids import Grid, grids
from .pins import Pin, most, pins
from .plan_cost import PlanCost, better, plan_cost
from .remap_mesh import remap_mesh
from .starts import Starts, come_for_some, elsewhere, in_rounds, shared_starts

# The most ops of a long program that is searched as a whole as well as by a few of its layers.
MOST_WHOLE = 1200
# Programs this many times as long are searched as a whole, too, where the plan of a few layers is not good for all.
MISSED = 4
# The layers of a long program that are planned several times: two before and one after those that are left out.
LAYERS = 3
# Programs over more axes are searched with one of them as two if they have so few ops: it takes most of the time there.
GRID_AXES, GRID_OPS = 2, 8
# How many times in a row a search starts again from the plan that it has just found.
ROUNDS = 4
# Long programs are searched again, with more plans kept, where the best plan still spends more than this part of what
# the first one spends on moves.
LITTLE = 0.9
# Tensors are held elsewhere until this many in a row have saved nothing; on meshes of three axes until half as many
# have, of four a third, as each takes longer there. On grids fewer do.
IDLE, GRID_IDLE = 40, 30
# Grids are searched on where the plans found there move less than so many times what the best one moves.
HOPEFUL = 1.25
# Seconds of moves, about 100 KB on the default link, that are not worth half of a far search.
SMALL_RESHARDS = 2e-6
# A loose search takes plans for one whose times differ by less than this part of the time of the best plan's moves.
SLACK = 0.01

# A method that searches from the best plan so far.
_Search = Callable[["_PlanSearch"], None]

# No choice is final before the end, and ops try more placements: so slow that it is done only once.
_FAR = LATE._replace(width=32, thorough=1)


def searched(sharded: ShardedDefinition, default_mesh: DeviceMesh, effort: Effort = Effort.AUTO) -> ShardedDefinition:
    """A better plan near this one; the plan itself where there is none, nothing moves, or the effort does not allow."""
    if not _is_worth(sharded, effort):
        return sharded
    if _is_long(sharded):
        sharded = _searched(sharded, default_mesh, effort, (_PlanSearch.briefly_on_grids,), beside=_PlanSearch.briefly)
        if effort is not Effort.THOROUGH:
            return sharded
    return _searched(sharded, default_mesh, effort, (_PlanSearch.near,))


def searched_far(
    sharded: ShardedDefinition, default_mesh: DeviceMesh, effort: Effort = Effort.AUTO
) -> ShardedDefinition:
    """A better plan farther from this one, which takes several times as long to find; else the plan itself.

    Long programs are searched so with `Effort.THOROUGH` only.
    """
    if _is_long(sharded) and effort is not Effort.THOROUGH:
        return sharded
    far = _PlanSearch.farthest if effort is Effort.THOROUGH else _PlanSearch.far
    searches = (_PlanSearch.near, far)
    return _searched(sharded, default_mesh, effort, searches) if _is_worth(sharded, effort) else sharded


def _is_long(sharded: ShardedDefinition) -> bool:
    return len(sharded.graph.nodes) > MOST


def _is_worth(sharded: ShardedDefinition, effort: Effort) -> bool:
    if not sharded.graph.annotations or effort is Effort.FAST:
        return False
    return not _is_long(sharded) or effort.searches(sharded)


def _searched(
    sharded: ShardedDefinition, default_mesh: DeviceMesh, effort: Effort, searches: Sequence[_Search],
    beside: _Search | None = None,
) -> ShardedDefinition:  # fmt: skip
    """The best plan that searches find from this one.

    A program that repeats itself is first searched by a few of its layers, with all of `searches`. Then, or if nothing
    repeats, it is searched as a whole if it is not too long: with the last of them, or with `beside` after its layers.
    Where layers share a large tensor, such as a mask, few of them may mislead: what they find counts if it is better
    for all, and the whole is searched as if nothing repeated.
    """
    graph, missed = sharded.graph, False
    alike = repeated_layers(graph, LAYERS)
    fold = alike or repeated_layers(graph, LAYERS, sharing=True)
    if fold is not None:
        first = propagate(fold.short, default_mesh)
        short = _found(first, default_mesh, *searches)
        found = better(sharded, written_out(fold, short))
        sharded, missed = found, found is sharded and short is not first and alike is not None
    whole = len(graph.nodes) <= MOST_WHOLE * (MISSED if missed else 1) or (alike is None and effort is Effort.THOROUGH)
    last = searches[-1] if alike is None or beside is None else beside
    return _found(sharded, default_mesh, last) if whole else sharded


def _found(sharded: ShardedDefinition, default_mesh: DeviceMesh, *searches: _Search) -> ShardedDefinition:
    found = _PlanSearch(sharded.graph, default_mesh, sharded)
    for search in searches:
        found.run(search)
    return found.best


class _PlanSearch:
    """Searches over the plans of one graph, of which the best is kept.

    `parts` are axes that are parts of one, written as two.
    """

    def __init__(self, graph: Graph, default_mesh: DeviceMesh, first: ShardedDefinition, parts: Collection[str] = ()):
        self.graph, self.default_mesh, self.parts = graph, default_mesh, parts
        self.propagation = Propagation(graph, default_mesh)
        self.best, self.cost = first, plan_cost(first)
        self._costs = [(first, self.cost)]

    def run(self, search: _Search) -> None:
        """Search from the best plan, if that moves anything."""
        if self.cost.moving > EPSILON:
            search(self)

    def briefly(self) -> None:
        """Find most of what `near` finds of long programs, in half its time.

        Ops have more placements to choose from, ranks share inputs, and inputs come sooner. More plans are kept where
        that finds little.
        """
        before = self.cost
        for search in (NARROW, THOROUGH):
            if self.cost.moving > LITTLE * before.moving:
                self._try(None, search)
                self._go_on()
        self._share()
        self._bring_sooner()

    def briefly_on_grids(self) -> None:
        """Search briefly, on the mesh and as if its one axis were two.

        One of several as two takes several times as long as all else that is done briefly.
        """
        self.briefly()
        if most_axes(self.graph) <= 1:
            self._on_grids(_PlanSearch.briefly)

    def near(self) -> None:
        """Try what finds most: other wishes, more placements to choose from, and other places for inputs."""
        likely = _followed(self.graph, self.best, {})
        self._try(likely)
        self._try(None)
        self._try(self._made(self.best))
        self._try(None, THOROUGH)
        self._try(likely, NARROW)
        # One axis has no slower ones: what is left where is then found by far searches alone.
        leaving = (_PlanSearch._leave,) if most_axes(self.graph) > 1 else ()
        for plan in _on_equal_links(self.graph, self.default_mesh, _PlanSearch.near, *leaving):
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
        """Try inputs that the best plan brings somewhere for one reader as if they came there before all readers."""
        for _ in range(ROUNDS):
            before = self.cost
            for starts in come_for_some(self.best):
                self._keep(self.propagation.again(self._made(self.best), starts=starts))
            if self.cost == before:
                return

    def far(self) -> None:
        """As `farthest`, but not on grids of meshes that have many axes already, unless for a few ops."""
        self._far(on_grids=most_axes(self.graph) <= GRID_AXES or len(self.graph.nodes) <= GRID_OPS)

    def farthest(self) -> None:
        """Try what takes longest: an axis as two, inputs that ranks share, choices open to the end, tensors held."""
        self._far(on_grids=True)

    def _far(self, on_grids: bool) -> None:
        """Search far, with an axis as two if that may be: of one axis, the plans there are the mesh's own and more.

        Beside a plan with parts of one of several axes there are too many places to hold tensors at.
        """
        before = self.cost
        farthest = on_grids and self._far_on_grids()
        enough = farthest if most_axes(self.graph) <= 1 else self.cost != before
        self._share()
        if not enough:
            self._openly()
            self._hold()
        self._leave()
        if most_axes(self.graph) > 1:
            self._sparingly()

    def _sparingly(self) -> None:
        """Try products with an axis less, and what annotated results ask for as it is.

        Last, as other searches that went on from what this finds would miss more than they find.
        """
        before, likely = self.cost, _followed(self.graph, self.best, {})
        for search in (SPARING, FAST._replace(plainly=True)):
            self._try(likely, search)
        if self.cost != before:
            self._go_on()

    def _openly(self) -> None:
        """Search with no choice final before the end."""
        if not in_rounds(self.graph):
            found = self.propagation.again(self._made(self.best), _FAR)
            if self._spent(found).sends_less_than(self.cost):
                self._keep(found)

    def _share(self) -> None:
        """Try inputs that are whole as if ranks shared them."""
        for starts in shared_starts(self.graph, self.best.shardings):
            for search in (FAST, LATE):
                self._try(_followed(self.graph, self.best, starts), search)

    def _loosely(self) -> None:
        """Try searches that take plans with nearly equal times for one, so that those kept are farther apart."""
        for asked in (_followed(self.graph, self.best, {}), None, self._made(self.best)):
            self._try(asked, self._loose(LATE))

    def _loose(self, search: BeamSettings) -> BeamSettings:
        """The search with slack for this program, rounded to two digits so that searches share what they work out."""
        return search._replace(slack=float(f"{SLACK * self.cost.moving:.1e}"))

    def _farther(self) -> None:
        """Search a grid farther, in little time.

        Its plans split dims by parts of an axis, which no op asks for on the mesh itself: a search there would not find
        the plans next to these.
        """
        self._loosely()
        self._go_on()
        self._leave()

    def _on_grids(self, search: _Search, either: bool = False) -> list[tuple[Grid, _PlanSearch]]:
        """Try the plans that a search finds on meshes whose one axis is written as two; the searches there."""
        found = list[tuple[Grid, _PlanSearch]]()
        for grid in grids(self.graph, either):
            default_mesh = grid.written if self.default_mesh == grid.mesh else self.default_mesh
            graph = grid.graph(self.graph)
            there = _PlanSearch(graph, default_mesh, propagate(graph, default_mesh), grid.names)
            there.run(search)
            self._keep(grid.plan_back(self.graph, there.best))
            found.append((grid, there))
        return found

    def _go_on_there(self, grid: Grid, there: _PlanSearch, search: _Search) -> None:
        before = there.best
        there.run(search)
        if there.best is not before:
            self._keep(grid.plan_back(self.graph, there.best))

    def _far_on_grids(self) -> bool:
        """Search on grids, farther where a plan there moves little more than the best one, and farthest on one of them.

        Whether there is one. Where all moves together take no time to speak of, none is searched farthest.
        """
        large = self.cost.moving > SMALL_RESHARDS
        most = self.cost.moving * HOPEFUL if large else self.cost.moving + EPSILON
        found = [(grid, there) for grid, there in self._on_grids(_PlanSearch.near, large) if there.cost.moving < most]
        for grid, there in found:
            self._go_on_there(grid, there, _PlanSearch._farther)
        least = min([there.cost.moving for _, there in found], default=0.0)
        if not large or not least:
            return False
        alike = [pair for pair in found if pair[1].cost.moving < least * (1 + SLACK)]
        *_, chosen = sorted(alike, key=lambda pair: pair[0].major)
        for search in (_PlanSearch._openly, _PlanSearch._hold):
            self._go_on_there(*chosen, search)
        return True

    def _hold(self) -> None:
        """Hold tensors beside the best plan's moves elsewhere, one at a time, as long as that saves moves."""
        first, tried, idle, before = self.cost, set[Pin](), 0, None
        most_idle = (GRID_IDLE if self.parts else IDLE) // max(1, most_axes(self.graph) - 1)
        while self.cost != before:
            before = self.cost
            for _, places in itertools.groupby(pins(insert_resharding(self.best)), key=lambda pin: pin.tensor):
                made = self._made(self.best)
                for pin in places:
                    if pin not in tried and len(tried) < most(self.graph) and idle < most_idle:
                        tried.add(pin)
                        idle = 0 if self._held(made, pin) else idle + 1
        if self.cost != first:
            self._go_on()

    def _held(self, made: Mapping[int, Sharding], pin: Pin) -> bool:
        """Plan with a tensor pinned, from what a plan makes; whether that is better, and so kept."""
        found, cost = self.propagation.holding(made, *pin, self._loose(LOOK)), self.cost
        if self._spent(found).moving < cost.moving - EPSILON:
            self._keep(found)
        return self.cost != cost

    def _leave(self) -> None:
        """Hold free outputs where the best plan leaves them, as if the user had asked for that.

        So an output that the best plan moves its operands for may be a sum that is scattered to it instead. An output
        that lies over a part of an axis may as well lie over all of it, and where its sum is first reduced.
        """
        before, held = None, dict[int, Sharding]()
        for place in (self._as_left, self._over_whole_axes, first_reduced):
            free = {i: end for i, end in ends(self.best).items() if i not in self.graph.annotations and any(end.dims)}
            left = place(self.best, free)
            if left and (self.best is not before or left != held):
                before, held = self.best, left
                self._keep(self.propagation.leaving(self._made(self.best), left))

    def _as_left(self, _: ShardedDefinition, left: dict[int, Sharding]) -> dict[int, Sharding]:
        return left

    def _over_whole_axes(self, _: ShardedDefinition, left: dict[int, Sharding]) -> dict[int, Sharding]:
        return over_whole_axes(self.graph, left, self.parts)

    def _go_on(self) -> None:
        """Search from the best plan, and again from what that finds."""
        for _ in range(ROUNDS):
            before = self.cost
            self._try(self._made(self.best), NARROW)
            self._try(self._made(self.best))
            if self.cost == before:
                return

    def _made(self, plan: ShardedDefinition) -> dict[int, Sharding]:
        """The shardings of what ops make in a plan."""
        inputs = set(self.graph.input_tensors)
        return {i: sharding for i, sharding in plan.shardings.items() if i not in inputs}

    def _try(self, asked: Mapping[int, Sharding] | None, search: BeamSettings = FAST) -> None:
        self._keep(self.propagation.again(asked, search))

    def _keep(self, found: ShardedDefinition) -> None:
        cost = self._spent(found)
        if cost.beats(self.cost):
            self.best, self.cost = found, cost

    def _spent(self, found: ShardedDefinition) -> PlanCost:
        """What a plan takes; looked up where a search has found the same plan before."""
        same = (
            cost for plan, cost in self._costs if plan.choices == found.choices and plan.shardings == found.shardings
        )
        known = next(same, None)
        if known is None:
            known = plan_cost(found)
            self._costs.append((found, known))
        return known


def _on_equal_links(graph: Graph, default_mesh: DeviceMesh, *searches: _Search) -> Iterator[ShardedDefinition]:
    """The plan that searches find best if all axes have the same links; none where they have."""
    linked = {s.mesh for s in graph.annotations.values() if s.mesh.linked}
    if linked:
        plain = {mesh: DeviceMesh(mesh.shape, mesh.names, ranks=mesh.ranks) for mesh in linked}
        # Links and a rate that are the default's make no other mesh: there is nothing else to try.
        alike = {mesh: other for mesh, other in plain.items() if other != mesh}
        if not alike:
            return
        annotations = {i: _on(s, alike) for i, s in graph.annotations.items()}
        found = _found(
            propagate(dataclasses.replace(graph, annotations=annotations), default_mesh), default_mesh, *searches
        )
        back = {other: mesh for mesh, other in alike.items()}
        yield remap_mesh(found, graph, lambda sharding, _: _on(sharding, back), lambda layout: layout)


def _on(sharding: Sharding, meshes: Mapping[DeviceMesh, DeviceMesh]) -> Sharding:
    mesh = meshes.get(sharding.mesh, sharding.mesh)
    return Sharding(mesh, sharding.dims, sharding.partial, sharding.reduce)


def _followed(graph: Graph, plan: ShardedDefinition, starts: Starts) -> dict[int, Sharding]:
    """Every op's results where they follow the annotations; where the plan has them if they cannot.

    `starts`: inputs that are taken to lie elsewhere.
    """
    inputs = {i: starts.get(i, plan.shardings[i]) for i in graph.input_tensors}
    return all_followed(graph, inputs, lambda i: plan.shardings[i].reduced())
