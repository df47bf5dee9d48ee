"""Lower bounds of what a reshard takes, without a search for its steps."""

from __future__ import annotations

import functools
import itertools
import math
from typing import NamedTuple

from ..mesh import DeviceMesh
from ..sharding.layout import Split
from ..sharding.value import Sharding
from .atoms import Cuts, crossed, cut, cuts_of, outside
from .prices import STEP_SECONDS, held, holders, lacking, received
from .steps import group_size

# Part of a bound on the time that is left, lest rounding make it more than the time is.
_ROUNDING = 1e-12


class Level(NamedTuple):
    """Axes whose links have at least some bandwidth, and what it costs to go beyond them.

    `detour` is the seconds that a byte takes longer over the next slower links, shared by all ranks that these axes
    connect.
    """

    axes: frozenset[str]
    detour: float


class Wait(NamedTuple):
    """Axes whose links start quickly, and how many ranks they connect.

    `more` is the seconds by which a step along other axes starts later at least.
    """

    axes: frozenset[str]
    ranks: int
    more: float


class Speeds(NamedTuple):
    """The greatest bandwidth of a mesh's links and its levels but for the slowest; the least latency, and waits."""

    fastest: float
    levels: tuple[Level, ...]
    quickest: float
    waits: tuple[Wait, ...]


@functools.lru_cache(maxsize=1 << 10)
def speeds(mesh: DeviceMesh) -> Speeds:
    """How fast the links of a mesh are; axes of one rank have none."""
    axes = [row for row in zip(mesh.names, mesh.shape, mesh.links, strict=True) if row[1] > 1]
    links = [link for *_, link in axes] or [mesh.links[0]]
    found = sorted({link.bandwidth for link in links}, reverse=True)
    levels = list[Level]()
    for here, slower in itertools.pairwise(found):
        near = {name: size for name, size, link in axes if link.bandwidth >= here}
        levels.append(Level(frozenset(near), (1 / slower - 1 / here) / math.prod(near.values())))
    starts = sorted({link.latency for link in links})
    waits = list[Wait]()
    for here, later in itertools.pairwise(starts):
        near = {name: size for name, size, link in axes if link.latency <= here}
        waits.append(Wait(frozenset(near), math.prod(near.values()), later - here))
    return Speeds(found[0], tuple(levels), starts[0], tuple(waits))


class Bound:
    """A lower bound of the seconds to one sharding (`dst`) from others of its mesh.

    What a rank lacks comes over the fastest links. What none of the ranks has that the fastest links connect must come
    over slower ones, once for all these ranks together; and so on, level by level. Before that, to hear of n ranks
    takes log2 n messages, one after the other. Where some axes start later, the g ranks that the others connect hear of
    groups like their own: of 1 + g times as many with each message along those axes.
    """

    def __init__(self, cuts: Cuts, dst: Sharding, shape: tuple[int, ...], itemsize: float):
        self.cuts, self.dst, self.shape = cuts, dst, shape
        self.speeds = speeds(dst.mesh)
        self._kept = frozenset(cut(cuts, dst.partial))
        self._element = itemsize * (1 - _ROUNDING)
        self._levels = [(level, self._together(dst, level.axes)) for level in self.speeds.levels]
        self._waits = [(wait, self._together(dst, wait.axes)) for wait in self.speeds.waits]
        self._known: dict[Sharding, float] = {}

    def seconds(self, state: Sharding) -> float:
        """The bound for coming from `state`."""
        found = self._known.get(state)
        if found is None:
            found = self._known[state] = self._seconds(state)
        return found

    def _seconds(self, state: Sharding) -> float:
        to_reduce = self.to_reduce(state)
        per_element = lacking(state, self.dst, self.shape) / self.speeds.fastest
        for level, wanted in self._levels:
            if level.axes.issuperset([split.axis for split in to_reduce]):
                far = received(self._together(state, level.axes), wanted, self.shape)
            else:
                far = held(wanted, self.shape)
            per_element += far * level.detour
        return self._starts(state, to_reduce) + per_element * self._element

    def to_reduce(self, state: Sharding) -> list[Split]:
        """The atoms over which `state` is unreduced and the target is not."""
        return [split for split in cut(self.cuts, state.partial) if split not in self._kept]

    def _together(self, state: Sharding, near: frozenset[str]) -> Sharding:
        """What ranks that differ along these axes alone have together, as a sharding."""
        rows = zip(state.dims, self.shape, strict=True)
        return state.with_dims([outside(self.cuts, layout, n, near) for layout, n in rows])

    def _starts(self, state: Sharding, to_reduce: list[Split]) -> float:
        """Seconds for messages to start, and what steps count by themselves; an exchange counts as two steps."""
        rows = zip(state.dims, self.dst.dims, self.shape, strict=True)
        found = [to_reduce, *(crossed(self.cuts, old, new, n) for old, new, n in rows if old != new)]
        steps = min(sum(map(bool, found)), 2)
        if not steps:
            return 0.0
        seconds = self.speeds.quickest * _steps(self._sources(state, self.dst, to_reduce), 2)
        for wait, wanted in self._waits:
            far = [split for split in to_reduce if split.axis not in wait.axes]
            sources = self._sources(self._together(state, wait.axes), wanted, far)
            seconds += wait.more * _steps(sources, 1 + wait.ranks)
        return (seconds + steps * STEP_SECONDS) * (1 - _ROUNDING)

    def _sources(self, src: Sharding, dst: Sharding, to_reduce: list[Split]) -> int:
        """How many shards or terms a rank must hear of, its own among them; not counted where blocks differ in size."""
        found = holders(src, dst, self.shape)
        return found.count * group_size(to_reduce) + (not found.itself)


# Searches for paths to one sharding share what they know of it.
bound_of = functools.lru_cache(maxsize=1 << 10)(Bound)


def _steps(sources: int, growth: int) -> int:
    """Steps until a rank can have something of so many, where in each step it hears of `growth` times as many."""
    steps, reached = 0, 1
    while reached < sources:
        steps, reached = steps + 1, reached * growth
    return steps


@functools.lru_cache(maxsize=1 << 16)
def at_least(src: Sharding, dst: Sharding, shape: tuple[int, ...], itemsize: int) -> float:
    """A lower bound of the cheapest path's seconds; inf where there is no path, 0 between meshes. Takes no search."""
    if src.mesh != dst.mesh:
        return 0.0
    if not is_possible(src, dst):
        return math.inf
    return bound_of(cuts_of((src, dst)), dst, shape, itemsize).seconds(src)


def is_possible(src: Sharding, dst: Sharding) -> bool:
    """Whether there is a path: the target is reduced, or unreduced over axes that the source is unreduced over, too."""
    return not dst.partial or (set(dst.partial) <= set(src.partial) and src.reduce == dst.reduce)
