"""Lower bounds of what a reshard takes, without a search for its moves."""

from __future__ import annotations

import functools
import itertools
import math
from typing import NamedTuple

from ..mesh import DeviceMesh
from ..sharding.layout import Split
from ..sharding.value import Sharding
from .atoms import Cuts, crossed, cut, cuts_of, outside
from .prices import MOVE_SECONDS, held, lacking, received

# Part of a bound on the time that is left, lest rounding make it more than the time is.
_ROUNDING = 1e-12


class Level(NamedTuple):
    """Axes whose links have at least some bandwidth, and what it costs to go beyond them.

    `detour` is the seconds that a byte takes longer over the next slower links, shared by all ranks that these axes
    connect.
    """

    axes: frozenset[str]
    detour: float


class Speeds(NamedTuple):
    """The greatest bandwidth of a mesh's links, its levels but for the slowest, and by axis the latency."""

    fastest: float
    levels: tuple[Level, ...]
    latency: dict[str | None, float]


@functools.lru_cache(maxsize=1 << 10)
def speeds(mesh: DeviceMesh) -> Speeds:
    """How fast the links of a mesh are; axes of one rank have none."""
    axes = [row for row in zip(mesh.names, mesh.shape, mesh.links, strict=True) if row[1] > 1]
    found = sorted({link.bandwidth for _, _, link in axes or [("", 1, mesh.links[0])]}, reverse=True)
    levels = list[Level]()
    for here, slower in itertools.pairwise(found):
        near = {name: size for name, size, link in axes if link.bandwidth >= here}
        levels.append(Level(frozenset(near), (1 / slower - 1 / here) / math.prod(near.values())))
    return Speeds(found[0], tuple(levels), {name: link.latency for name, _, link in axes})


class Bound:
    """A lower bound of the seconds to one sharding (`dst`) from others of its mesh.

    What a rank lacks comes over the fastest links. What none of the ranks has that the fastest links connect must come
    over slower ones, once for all these ranks together; and so on, level by level. Before that, bringing together n
    parts of an axis takes log2 n messages, one after the other.
    """

    def __init__(self, cuts: Cuts, dst: Sharding, shape: tuple[int, ...], itemsize: float):
        self.cuts, self.dst, self.shape = cuts, dst, shape
        self.speeds = speeds(dst.mesh)
        self._kept = frozenset(cut(cuts, dst.partial))
        self._element = itemsize * (1 - _ROUNDING)
        self._levels = [(level, self._together(dst, level)) for level in self.speeds.levels]
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
                far = received(self._together(state, level), wanted, self.shape)
            else:
                far = held(wanted, self.shape)
            per_element += far * level.detour
        return self._starts(state, to_reduce) + per_element * self._element

    def to_reduce(self, state: Sharding) -> list[Split]:
        """The atoms over which `state` is unreduced and the target is not."""
        return [split for split in cut(self.cuts, state.partial) if split not in self._kept]

    def _together(self, state: Sharding, level: Level) -> Sharding:
        """What ranks that differ along a level's axes alone have together, as a sharding."""
        rows = zip(state.dims, self.shape, strict=True)
        return state.with_dims([outside(self.cuts, layout, n, level.axes) for layout, n in rows])

    def _starts(self, state: Sharding, to_reduce: list[Split]) -> float:
        """Seconds for messages to start, and what moves count by themselves; an exchange counts as two moves."""
        rows = zip(state.dims, self.dst.dims, self.shape, strict=True)
        found = [to_reduce, *(crossed(self.cuts, old, new, n) for old, new, n in rows if old != new)]
        latency = self.speeds.latency
        steps = [math.log2(split.size or 1) * latency[split.axis] for side in found for split in side]
        return (sum(steps) + min(sum(map(bool, found)), 2) * MOVE_SECONDS) * (1 - _ROUNDING)


@functools.lru_cache(maxsize=1 << 16)
def at_least(src: Sharding, dst: Sharding, shape: tuple[int, ...], itemsize: int) -> float:
    """A lower bound of the cheapest path's seconds; inf where there is no path, 0 between meshes. Takes no search."""
    if src.mesh != dst.mesh:
        return 0.0
    if not is_possible(src, dst):
        return math.inf
    return Bound(cuts_of((src, dst)), dst, shape, itemsize).seconds(src)


def is_possible(src: Sharding, dst: Sharding) -> bool:
    """Whether there is a path: the target is reduced, or unreduced over axes that the source is unreduced over, too."""
    return not dst.partial or (set(dst.partial) <= set(src.partial) and src.reduce == dst.reduce)
