"""The cheapest path of steps from one sharding to another (A* over layouts: Hart, Nilsson, Raphael 1968)."""

from __future__ import annotations

import functools
import heapq
import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from ..sharding import layout as lay
from ..sharding.layout import Layout, Split
from ..sharding.strided import in_factors
from ..sharding.value import Sharding, canonical_partial, conflicting, disjoint, nested
from .atoms import Atoms, atoms, cut, cuts_of, growing, keeping, moved
from .bounds import bound_of, is_possible
from .direct import one_step, straight
from .prices import SLICE_SECONDS, price
from .steps import Step, StepKind, is_even


@dataclass(frozen=True, slots=True)
class ReshardPlan:
    """The steps of a reshard in order, their modelled time in seconds and the bytes per rank on the wire."""

    steps: tuple[Step, ...]
    seconds: float
    wire: float

    def __str__(self) -> str:
        return " ; ".join(map(str, self.steps)) or "nothing"


NOTHING = ReshardPlan((), 0.0, 0.0)
# On the way a rank holds no more than at the dearer end, or so many bytes, whatever time that would save.
ROOM = 64 << 20
# Bytes alone decide where the least part of them that two paths may differ by weighs as much as so many starts.
_OUTWEIGH = 1000
# Paths that take as long but for a part of a step are gone on with from the one that has come farthest.
_ALIKE = SLICE_SECONDS / 10
# They stand for what is left of a size without the divisors that matter.
_PRIMES = (1009, 1013)


@functools.lru_cache(maxsize=1 << 16)
def plan(src: Sharding, dst: Sharding, shape: tuple[int, ...], itemsize: int) -> ReshardPlan | None:
    """The cheapest path from `src` to `dst` for a tensor of this global shape.

    None where there is none: the target is unreduced in a way in which the source is not.
    """
    if src == dst:
        return NOTHING
    if src.mesh != dst.mesh:
        return _between_meshes(src, dst, shape, itemsize)
    if not is_possible(src, dst):
        return None
    ends = in_factors(src, shape), in_factors(dst, shape)
    if ends != (src, dst):
        return _over_factors(src, dst, ends, shape, itemsize)
    if not all(map(nested, cuts_of((src, dst)).by_axis.values())):
        return _at_once(src, dst, shape, itemsize)
    sizes = _alike(src, dst, shape, itemsize)
    if sizes is None:
        return _PlanSearch(src, dst, shape, itemsize, _room(src, dst, shape, itemsize)).run()
    steps = _path(src, dst, sizes)
    return None if steps is None else _priced(steps, shape, itemsize)


def _alike(src: Sharding, dst: Sharding, shape: tuple[int, ...], itemsize: int) -> tuple[int, ...] | None:
    """Stand-in sizes with the same cheapest path, so that it is searched once for all of them.

    Between equal blocks the bytes of a path are proportional to the tensor's, and which paths there are depends on the
    divisors of sizes alone. None where blocks differ in size, or where more than bytes counts.
    """
    mesh, nbytes = src.mesh, itemsize * math.prod(shape)
    start_bytes = mesh.links[0].latency * mesh.links[0].bandwidth  # What a link carries while a message starts.
    if not mesh.uniform or not mesh.size**2 * start_bytes * _OUTWEIGH <= nbytes <= ROOM or not is_even(src, dst, shape):
        return None
    splits = [split for layout in (*src.dims, *dst.dims) for split in layout]
    divided_by = mesh.size * math.prod([split.size or 1 for split in splits if not split.bound])
    rest = next(prime for prime in _PRIMES if divided_by % prime)
    common = [math.gcd(n, divided_by) for n in shape]
    return tuple([n if n == divisor else divisor * rest for n, divisor in zip(shape, common, strict=True)])


@functools.lru_cache(maxsize=1 << 16)
def _path(src: Sharding, dst: Sharding, sizes: tuple[int, ...]) -> tuple[Step, ...] | None:
    """The steps of the cheapest path for stand-in sizes, where bytes alone decide.

    Where nothing is reduced, dims that are whole at both ends are left out of the search: they stay whole.
    """
    one = one_step(src, dst)
    known = straight(src, dst) if one is None else (one,)
    if known is not None:
        return known
    places = tuple([d for d, layouts in enumerate(zip(src.dims, dst.dims, strict=True)) if any(layouts)])
    if src.partial != dst.partial or len(places) == len(sizes):
        found = _PlanSearch(src, dst, sizes, ROOM / math.prod(sizes), room=0).run()
        return None if found is None else found.steps
    ends = [end.with_dims([end.dims[d] for d in places]) for end in (src, dst)]
    steps = _path(*ends, tuple([sizes[d] for d in places]))
    return None if steps is None else tuple([_among_whole(step, places, len(sizes)) for step in steps])


def _among_whole(step: Step, places: Sequence[int], ndim: int) -> Step:
    """The step for a tensor of more dims: it has the step's dims at these places, and all others whole."""
    before, after = (end.with_dims(_spread(end.dims, places, ndim)) for end in (step.src, step.dst))
    return Step(step.kind, step.axes, before, after)


def _spread(dims: Sequence[Layout], places: Sequence[int], ndim: int) -> tuple[Layout, ...]:
    at = dict(zip(places, dims, strict=True))
    return tuple([at.get(d, lay.WHOLE) for d in range(ndim)])


def _priced(steps: tuple[Step, ...], shape: tuple[int, ...], itemsize: int) -> ReshardPlan:
    prices = [price(step, shape, itemsize) for step in steps]
    return ReshardPlan(steps, sum([p.seconds for p in prices]), sum([p.wire for p in prices]))


def _room(src: Sharding, dst: Sharding, shape: tuple[int, ...], itemsize: int) -> int:
    """The most elements that a rank may hold on the way; 0 for any number."""
    if itemsize * math.prod(shape) <= ROOM:
        return 0
    return max(src.max_local_numel(shape), dst.max_local_numel(shape), ROOM // itemsize)


def _between_meshes(src: Sharding, dst: Sharding, shape: tuple[int, ...], itemsize: int) -> ReshardPlan | None:
    """Reduce on the old mesh, then send every rank of the new one what it needs."""
    if dst.partial:
        return None
    first = plan(src, src.reduced(), shape, itemsize)
    assert first is not None
    return _priced((*first.steps, Step(StepKind.TRANSFER, (), src.reduced(), dst)), shape, itemsize)


def _over_factors(
    src: Sharding, dst: Sharding, ends: tuple[Sharding, Sharding], shape: tuple[int, ...], itemsize: int
) -> ReshardPlan | None:
    """The path where dims are cut in turn: by way of `ends`, which have factors there, or in one exchange.

    Little has to move between the two, as chunks differ by their edges.
    """
    inner = plan(*ends, shape, itemsize)
    if inner is None:
        return None
    first, last = (_exchanged(a, b) for a, b in ((src, ends[0]), (ends[1], dst)))
    ways = [(*first, *inner.steps, *last)]
    if src.partial == dst.partial:
        ways.append(_exchanged(src, dst))
    return min((_priced(way, shape, itemsize) for way in ways), key=lambda path: path.seconds)


def _exchanged(src: Sharding, dst: Sharding) -> tuple[Step, ...]:
    """One exchange from one sharding to another, or nothing."""
    axes = disjoint([*src.splits, *dst.splits])
    return (Step(StepKind.EXCHANGE, axes, src, dst),) if src != dst else ()


def _at_once(src: Sharding, dst: Sharding, shape: tuple[int, ...], itemsize: int) -> ReshardPlan:
    """The path between sub-axes that do not nest, as 2 and 3 of 6: reduce, then one exchange.

    No other collective has groups of ranks for that.
    """
    reduced = Sharding(src.mesh, src.dims, dst.partial, dst.reduce)
    first = plan(src, reduced, shape, itemsize)
    assert first is not None
    axes = [split for split in (*src.splits, *dst.splits) if split not in dst.partial]
    return _priced((*first.steps, Step(StepKind.EXCHANGE, disjoint(axes), reduced, dst)), shape, itemsize)


def _filled(layout: Layout, atom: Split) -> Iterator[Layout]:
    """The layout with an unbound factor bound to an atom at its major or minor end: (4, x) as (y, x), if y is 4."""
    for place, split in enumerate(layout):
        rest, left = divmod(split.size or 1, atom.size or 1)
        if not split.bound and split.size and not left:
            for parts in ((atom, Split(rest)), (Split(rest), atom)) if rest > 1 else ((atom,),):
                yield (*layout[:place], *parts, *layout[place + 1 :])


class _PlanSearch:
    """A* from one sharding to another on the same mesh.

    Its states are shardings whose axes are cut into the same atoms.
    """

    def __init__(self, src: Sharding, dst: Sharding, shape: tuple[int, ...], itemsize: float, room: int):
        self.src, self.dst, self.shape, self.itemsize = src, dst, shape, itemsize
        self.cuts = cuts_of((src, dst))
        self.wanted = [atoms(self.cuts, layout) for layout in dst.dims]
        self.kept_partial = frozenset(cut(self.cuts, dst.partial))
        self.room = room
        self.bound = bound_of(self.cuts, dst, shape, itemsize)
        mesh = src.mesh
        self.axes = tuple([Split(n, name) for n, name in zip(mesh.shape, mesh.names, strict=True) if n > 1])
        self._speed: dict[str | None, float] = {
            name: link.bandwidth for name, link in zip(mesh.names, mesh.links, strict=True)
        }
        self._slowest = min(self._speed.values())
        self._unequal = bool(self.bound.speeds.levels)
        # Fast axes along which ranks of the target are replicas; those that only a slice for a while brings; and what
        # replicas may have of the target before they share it.
        self._idle = self._fast_axes().difference([split.axis for split in dst.used()])
        self._lent = self._idle.difference([split.axis for split in src.used()])
        self._shared = self._ends()[1:] if self._idle else []

    def run(self) -> ReshardPlan | None:
        order = itertools.count()
        queue: list[tuple[int, int, int, Sharding]] = [(0, 0, next(order), self.src)]
        best: dict[Sharding, tuple[float, float, tuple[Step, ...]]] = {self.src: (0.0, 0.0, ())}
        done: set[Sharding] = set()
        limit = math.inf
        while queue:
            *_, state = heapq.heappop(queue)
            if state in done:
                continue
            done.add(state)
            seconds, wire, path = best[state]
            if state == self.dst:
                return ReshardPlan(path, seconds, wire)
            for step in self._moves(state):
                then = step.dst
                known = best.get(then)
                if known is not None and seconds >= known[0]:
                    continue
                added = price(step, self.shape, self.itemsize)
                total = seconds + added.seconds
                if total >= limit or (known is not None and total >= known[0] - 1e-15) or not self._fits(then):
                    continue
                at_least = total + self.bound.seconds(then)
                if at_least >= limit:
                    continue
                best[then] = (total, wire + added.wire, (*path, step))
                if then == self.dst:
                    limit = total
                heapq.heappush(queue, (round(at_least / _ALIKE), -len(path), next(order), then))
        return None

    def _fits(self, state: Sharding) -> bool:
        return not self.room or state.max_local_numel(self.shape) <= self.room

    # states ---------------------------------------------------------------------------------------------------

    def _keep(self, dim: int, layout: Layout, keep: Atoms) -> Layout:
        return keeping(self.cuts, layout, self.shape[dim], keep)

    def _grown(self, state: Sharding, dim: int, more: Atoms) -> Layout | None:
        return growing(self.cuts, state.dims[dim], self.dst.dims[dim], self.shape[dim], more)

    def _with(self, state: Sharding, changes: dict[int, Layout], partial: Iterable[Split] | None = None) -> Sharding:
        dims = tuple([changes.get(d, layout) for d, layout in enumerate(state.dims)])
        if partial is None:
            return state.with_dims(dims)
        terms = canonical_partial(partial)
        return Sharding(state.mesh, dims, terms, state.reduce if terms else "")

    # steps ----------------------------------------------------------------------------------------------------

    def _moves(self, state: Sharding) -> Iterator[Step]:
        to_reduce = self.bound.to_reduce(state)
        # First what arrives in any case: no path that takes longer is gone on with.
        if not to_reduce:
            yield self._exchange(state, self.dst)
            yield from self._exchanged_in_parts(state)
        yield from self._reductions(state, to_reduce)
        yield from self._slices(state)
        if to_reduce or self._unequal:
            yield from self._sliced_for_a_while(state, bool(to_reduce))
        yield from self._gathers(state)

    def _reductions(self, state: Sharding, to_reduce: list[Split]) -> Iterator[Step]:
        if not to_reduce:
            return
        others = [p for p in cut(self.cuts, state.partial) if p in self.kept_partial]
        yield Step(StepKind.ALL_REDUCE, tuple(to_reduce), state, self._with(state, {}, others))
        for atom in to_reduce:
            rest = [*others, *(p for p in to_reduce if p != atom)]
            if len(to_reduce) > 1:
                yield Step(StepKind.ALL_REDUCE, (atom,), state, self._with(state, {}, rest))
            places = list(self._places(state, atom))
            for parts in places or self._out_of_place(state, atom):
                yield Step(StepKind.REDUCE_SCATTER, (atom,), state, self._with(state, parts, rest))
            yield from self._scattered_for_a_while(state, atom, rest)

    def _places(self, state: Sharding, atom: Split) -> Iterator[dict[int, Layout]]:
        """The changes that put the atom on a dim where the target has it and the state can take it."""
        for dim, wanted in enumerate(self.wanted):
            grown = self._grown(state, dim, frozenset((atom,))) if atom in wanted else None
            if grown is not None:
                yield {dim: grown}

    def _out_of_place(self, state: Sharding, atom: Split) -> Iterator[dict[int, Layout]]:
        """While axes are still to move: changes that put the atom on any dim it cuts evenly, so that less moves."""
        if any(self._grown(state, dim, frozenset()) is None for dim in range(state.ndim)):
            yield from self._minor(state, atom)
            yield from self._beside_others(state, atom)

    def _beside_others(self, state: Sharding, atom: Split) -> Iterator[dict[int, Layout]]:
        """Changes that put the atom where the target has it, among axes that still have to go: (4, x) as (y, x)."""
        only = frozenset((atom,))
        for dim, (layout, n) in enumerate(zip(state.dims, self.shape, strict=True)):
            if atom in self.wanted[dim] and not n % lay.extent(layout):
                there = self._keep(dim, self.dst.dims[dim], only)
                filled = [lay.canonical(way, n) for way in _filled(lay.padded(layout, n), atom)]
                yield from ({dim: way} for way in filled if self._keep(dim, way, only) == there)

    def _scattered_for_a_while(self, state: Sharding, atom: Split, rest: list[Split]) -> Iterator[Step]:
        """Where axes differ in speed: a reduce-scatter over a fast axis, so that less is reduced over a slow one.

        An all-gather undoes it in the end (a hierarchical all-reduce, as in NCCL and Horovod).
        """
        if self._unequal and rest:
            for parts in self._for_a_while(state, atom):
                yield Step(StepKind.REDUCE_SCATTER, (atom,), state, self._with(state, parts, rest))

    def _minor(self, state: Sharding, atom: Split) -> Iterator[dict[int, Layout]]:
        """The changes that make the atom the minor split of any dim it cuts evenly."""
        for dim, layout in enumerate(state.dims):
            n = self.shape[dim]
            if n and n % (lay.extent(layout) * (atom.size or 1)) == 0:
                yield {dim: lay.canonical((*layout, atom), n)}

    def _for_a_while(self, state: Sharding, atom: Split) -> Iterator[dict[int, Layout]]:
        """As `_minor`; also inside what the target will have there of slower axes, as (4, x) for (y), if y is 4.

        Then nothing else has to move when the slower axes come.
        """
        minor, only = list(self._minor(state, atom)), frozenset((atom,))
        yield from minor
        for end in self._shared:
            for dim, wanted in enumerate(end.dims):
                grown = growing(self.cuts, state.dims[dim], wanted, self.shape[dim], only)
                if grown is not None and atom in atoms(self.cuts, wanted) and {dim: grown} not in minor:
                    yield {dim: grown}

    def _sliced_for_a_while(self, state: Sharding, reducing: bool) -> Iterator[Step]:
        """Slices over an idle axis: its replicas each reduce or move a part, and gather the parts afterwards.

        A sum of p terms, each on q replicas, then sends 1 + (p - 2) / (p q) of a tensor instead of 2 - 2 / p.
        """
        used = {split.axis for split in (*state.splits, *state.partial)}
        leaving = [self._speed[split.axis] for dim, layout in enumerate(state.dims) if layout != self.dst.dims[dim]
                   for split in lay.axes(layout)]  # fmt: skip
        least, kept = min(leaving, default=math.inf), {split.axis for split in self.dst.splits}
        for atom in self.axes:
            if atom.axis not in used and (reducing or atom.axis in kept or least < self._speed[atom.axis]):
                for parts in self._for_a_while(state, atom):
                    yield Step(StepKind.SLICE, (atom,), state, self._with(state, parts))

    def _slices(self, state: Sharding) -> Iterator[Step]:
        used = [*state.splits, *state.partial]
        for dim, wanted in enumerate(self.wanted):
            free = frozenset(a for a in wanted if not any(conflicting(a, u) for u in used))
            grown = self._grown(state, dim, free) if free else None
            if grown is not None:
                yield Step(StepKind.SLICE, tuple(sorted(free)), state, self._with(state, {dim: grown}))

    def _gathers(self, state: Sharding) -> Iterator[Step]:
        for dim, layout in enumerate(state.dims):
            if layout == self.dst.dims[dim]:
                continue
            bound = atoms(self.cuts, layout)
            for atom in sorted(bound):
                left = self._keep(dim, layout, bound - {atom})
                yield Step(StepKind.ALL_GATHER, (atom,), state, self._with(state, {dim: left}))
                yield from self._all_to_alls(state, dim, atom, left)
            if len(bound) > 1:
                whole = self._with(state, {dim: lay.WHOLE})
                yield Step(StepKind.ALL_GATHER, lay.axes(layout), state, whole)

    def _all_to_alls(self, state: Sharding, dim: int, atom: Split, left: Layout) -> Iterator[Step]:
        """To dims where the target has the atom; of faster axes also to others, out of a slower axis' way."""
        for other, wanted in enumerate(self.wanted):
            grown = self._grown(state, other, frozenset((atom,))) if other != dim and atom in wanted else None
            if grown is not None:
                yield Step(StepKind.ALL_TO_ALL, (atom,), state, self._with(state, {dim: left, other: grown}))
        for parts in self._minor(state, atom) if self._speed[atom.axis] > self._slowest else ():
            if dim not in parts:
                yield Step(StepKind.ALL_TO_ALL, (atom,), state, self._with(state, {dim: left, **parts}))

    def _exchange(self, state: Sharding, target: Sharding) -> Step:
        """Everything in one step: each rank gets exactly what it lacks."""
        rows = zip(state.dims, target.dims, self.shape, strict=True)
        axes = [atom for old, new, n in rows if old != new for atom in moved(self.cuts, old, new, n)]
        return Step(StepKind.EXCHANGE, tuple(sorted(set(axes))), state, target)

    def _exchanged_in_parts(self, state: Sharding) -> Iterator[Step]:
        """One exchange after which replicas along idle fast axes have a part each, which they gather then."""
        if self._shared and self._lent.isdisjoint([split.axis for split in state.splits]):
            yield from (self._exchange(state, end) for end in self._shared)

    def _fast_axes(self) -> frozenset[str | None]:
        """All axes but the slowest ones."""
        return frozenset([axis.axis for axis in self.axes if self._speed[axis.axis] > self._slowest])

    def _ends(self) -> list[Sharding]:
        """The target, and the shardings in which replicas of it along idle axes each have a part."""
        found = [self.dst]
        for axis in self.axes:
            if axis.axis in self._idle:
                found += [self._with(end, parts) for end in found for parts in self._minor(end, axis)]
        return found
