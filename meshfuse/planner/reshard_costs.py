"""What all reshards between two sets of shardings cost, in closed form: a few array operations for each mesh axis.

A reshard over whole axes slices first, as that is free and makes all else smaller; then come reduce-scatters, then
all-to-alls, then an all-reduce, and gathers last, each on what a rank then has. Faster links are used first where a
step makes the tensor smaller, and last where it makes it larger. An all-reduce may also be a reduce-scatter whose
gather comes last, and axes on which the tensor is replicated may share the work: sliced first, gathered last. The path
search (`reshard.search`) has more moves; the planner asks it for the prices of the pairs in its answer.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from ..costs import Form, all_gather_forms, all_reduce_forms, all_to_all_forms, reduce_scatter_forms
from ..mesh import DeviceMesh
from ..ops.values import TensorType
from ..reshard.prices import EXCHANGE_SECONDS, MOVE_SECONDS, SLICE_SECONDS, link_over
from ..reshard.search import plan
from ..sharding.layout import Layout, Split
from ..sharding.value import Sharding
from .cost_graph import Costs

_Forms = Callable[[int], tuple[Form, ...]]
# Where an axis may be: on a dim (its number), on none, or holding terms of a reduction.
_NOWHERE, _PARTIAL = -1, -2


@functools.lru_cache(maxsize=1 << 10)
def whole_axes(mesh: DeviceMesh) -> tuple[Split, ...]:
    """The axes of more than one rank."""
    return tuple([Split(n, name) for n, name in zip(mesh.shape, mesh.names, strict=True) if n > 1])


@functools.lru_cache(maxsize=1 << 16)
def _places(sharding: Sharding) -> tuple[tuple[int, int], ...] | None:
    """For every whole axis where it is, and a number for all that is more major on that dim; None for parts of axes."""
    axes = {axis: n for n, axis in enumerate(whole_axes(sharding.mesh))}
    at = [(_NOWHERE, 0)] * len(axes)
    bound = [*((split, dim) for dim, layout in enumerate(sharding.dims) for split in layout if split.bound),
             *((split, _PARTIAL) for split in sharding.partial)]  # fmt: skip
    if any(split not in axes for split, _ in bound):
        return None
    for split, dim in bound:
        above = sharding.dims[dim][: sharding.dims[dim].index(split)] if dim >= 0 else ()
        at[axes[split]] = (dim, _number(above))
    return tuple(at)


@functools.lru_cache(maxsize=1 << 16)
def _number(layout: Layout) -> int:
    """A number that equal layouts have alike: that of the first call with each."""
    return next(_NUMBERS)


_NUMBERS = itertools.count(1)


@dataclass(frozen=True, slots=True)
class _Side:
    """Shardings of one tensor: `places` [shardings, axes], `above` [shardings, axes], a rank's bytes [shardings]."""

    places: np.ndarray
    above: np.ndarray
    nbytes: np.ndarray
    reductions: np.ndarray


def _side(shardings: Sequence[Sharding], ttype: TensorType) -> _Side:
    places = np.array([_places(s) for s in shardings], dtype=np.int64).reshape(len(shardings), -1, 2)
    nbytes = np.array([s.max_local_numel(ttype.shape) * float(ttype.dtype.itemsize) for s in shardings])
    return _Side(places[..., 0], places[..., 1], nbytes, np.array([s.reduce for s in shardings]))


def reshard_costs(sources: Sequence[Sharding], targets: Sequence[Sharding], ttype: TensorType) -> Costs:
    """Modelled seconds from every source to every target, of one mesh; inf where there is no way."""
    out = np.empty((len(sources), len(targets)))
    known = [[n for n, s in enumerate(side) if _places(s) is not None] for side in (sources, targets)]
    if all(known):
        sides = [_side([side[n] for n in there], ttype) for side, there in zip((sources, targets), known, strict=True)]
        out[np.ix_(*known)] = _between(sides[0], sides[1], sources[0].mesh)
    for n, m in _unknown_pairs(known, out.shape):
        out[n, m] = exact_seconds(sources[n], targets[m], ttype)
    return out


def _unknown_pairs(known: Sequence[Sequence[int]], shape: tuple[int, ...]) -> Iterator[tuple[int, int]]:
    rows, columns = (frozenset(there) for there in known)
    if len(rows) < shape[0] or len(columns) < shape[1]:
        for n, m in itertools.product(range(shape[0]), range(shape[1])):
            if n not in rows or m not in columns:
                yield n, m


def exact_seconds(source: Sharding, target: Sharding, ttype: TensorType) -> float:
    """Modelled seconds of the cheapest path; inf where there is none."""
    if source is target:
        return 0.0
    path = plan(source, target, ttype.shape, ttype.dtype.itemsize)
    return math.inf if path is None else path.seconds


def _between(sources: _Side, targets: _Side, mesh: DeviceMesh) -> Costs:
    change = _Change(sources, targets, mesh)
    ways = [_Way(change, scattered, shared).seconds() for scattered, shared in change.ways()]
    return np.where(change.impossible, np.inf, np.minimum.reduce(ways))


class _Change:
    """What happens to every axis, [sources, targets, axes] of booleans."""

    def __init__(self, sources: _Side, targets: _Side, mesh: DeviceMesh):
        self.axes, self.mesh = whole_axes(mesh), mesh
        before, after = sources.places[:, None, :], targets.places[None, :, :]
        shape = (len(sources.nbytes), len(targets.nbytes))
        self.nbytes = np.broadcast_to(sources.nbytes[:, None], shape)
        self.target_nbytes = np.broadcast_to(targets.nbytes[None, :], shape)
        stays = before == after
        kept = stays & (before >= 0)
        self.displaced = kept & (sources.above[:, None, :] != targets.above[None, :, :])
        sliced = (before == _NOWHERE) & (after >= 0)
        self.scattered = (before == _PARTIAL) & (after >= 0)
        self.moved = (before >= 0) & (after >= 0) & ~stays
        self.reduced = (before == _PARTIAL) & (after == _NOWHERE)
        self.gathered = (before >= 0) & (after == _NOWHERE)
        self.idle = stays & (before == _NOWHERE)
        self.late = sliced & self._onto_left_dims(before, after, (self.moved | self.gathered) & ~stays)
        self.sliced = sliced & ~self.late
        terms = stays & (before == _PARTIAL)
        mixed = terms.any(-1) & (sources.reductions[:, None] != targets.reductions[None, :])
        self.impossible = ((after == _PARTIAL) & ~stays).any(-1) | mixed
        links = [link_over(mesh, (axis,)) for axis in self.axes]
        self.fast_first = sorted(range(len(links)), key=lambda n: (-links[n].bandwidth, links[n].latency, n))

    @staticmethod
    def _onto_left_dims(before: np.ndarray, after: np.ndarray, leaves: np.ndarray) -> np.ndarray:
        """The axes that come to a dim which some axis leaves: blocks of that one are in the way until then."""
        same_dim = before[..., None, :] == after[..., :, None]
        return (same_dim & leaves[..., None, :]).any(-1)

    def ways(self) -> Iterator[tuple[bool, bool]]:
        """Whether reductions are scattered until the end, and whether idle axes share the work; where that differs."""
        for scattered in (False, True) if self.reduced.any() else (False,):
            yield from ((scattered, shared) for shared in ((False, True) if self.idle.any() else (False,)))

    def sets(self, changed: np.ndarray) -> Iterator[tuple[tuple[int, ...], np.ndarray]]:
        """Sets of axes, and the pairs where just these are changed."""
        bits = changed @ (1 << np.arange(len(self.axes)))
        for code in np.unique(bits):
            if code:
                yield tuple(n for n in range(len(self.axes)) if code >> n & 1), bits == code

    def form(self, forms: _Forms, axes: Sequence[int], nbytes: np.ndarray) -> np.ndarray:
        """Seconds of a collective over axes for these sizes."""
        splits = [self.axes[n] for n in axes]
        link = link_over(self.mesh, splits)
        ways = [form.steps * link.latency + form.share * nbytes / link.bandwidth
                for form in forms(math.prod([split.size or 1 for split in splits]))]  # fmt: skip
        return np.minimum.reduce(ways)


def _exchange_forms(n: int) -> tuple[Form, ...]:
    """Pieces of any sizes to all the others: of a tensor that is cut n ways otherwise all but an n-th."""
    return (Form(n - 1, (n - 1) / n),)


class _Way:
    """One way to do all changes: what the steps so far cost for every pair, and the bytes that a rank then has."""

    def __init__(self, change: _Change, scattered: bool, shared: bool):
        self.change = change
        self.nbytes = change.nbytes.copy()
        self.total = np.zeros(self.nbytes.shape)
        busy = (change.scattered | change.moved | change.displaced | change.reduced).any(-1, keepdims=True)
        self.sliced = change.sliced | (change.idle & busy) if shared else change.sliced
        self.scattered = change.scattered | change.reduced if scattered else change.scattered
        self.reduced = np.zeros_like(change.reduced) if scattered else change.reduced
        last = [change.gathered]
        self.gathered = np.logical_or.reduce(
            [*last, *([change.reduced] if scattered else []), *([change.idle & busy] if shared else [])]
        )

    def seconds(self) -> Costs:
        self._slice()
        self._reduce_scatter()
        at_once = self.total + self._at_once()
        self._exchange()
        self._all_reduce()
        self._gather()
        self.total += self.change.late.sum(-1) * SLICE_SECONDS
        return np.minimum(self.total, at_once)

    def _at_once(self) -> np.ndarray:
        """Seconds of one exchange for all that is left to do, where nothing is left to reduce."""
        change, out = self.change, np.full(self.total.shape, np.inf)
        left = change.moved | change.displaced | change.gathered
        for axes, where in change.sets(left):
            where = where & ~self.reduced.any(-1) & (self.gathered == change.gathered).all(-1)
            out[where] = change.form(_exchange_forms, axes, change.target_nbytes[where]) + EXCHANGE_SECONDS
        return out

    def _slice(self) -> None:
        for n, axis in enumerate(self.change.axes):
            where = self.sliced[..., n]
            self.nbytes[where] /= axis.size or 1
            self.total[where] += SLICE_SECONDS

    def _reduce_scatter(self) -> None:
        for n in self.change.fast_first:
            where = self.scattered[..., n]
            self._add(where, reduce_scatter_forms, (n,))
            self.nbytes[where] /= self.change.axes[n].size or 1

    def _exchange(self) -> None:
        """All-to-alls one after another, or the pieces of all of them at once, as where a dim's blocks change places."""
        change = self.change
        apart = change.displaced.any(-1)
        for axes, where in change.sets(change.moved | change.displaced):
            nbytes = self.nbytes[where]
            one = change.form(_exchange_forms, axes, nbytes) + EXCHANGE_SECONDS
            each = sum([change.form(all_to_all_forms, (n,), nbytes) + MOVE_SECONDS for n in axes])
            self.total[where] += np.where(apart[where], one, np.minimum(one, each))

    def _all_reduce(self) -> None:
        """Over all axes at once."""
        for axes, where in self.change.sets(self.reduced):
            self._add(where, all_reduce_forms, axes)

    def _gather(self) -> None:
        for n in reversed(self.change.fast_first):
            where = self.gathered[..., n]
            self.nbytes[where] *= self.change.axes[n].size or 1
            self._add(where, all_gather_forms, (n,))

    def _add(self, where: np.ndarray, forms: _Forms, axes: Sequence[int]) -> None:
        self.total[where] += self.change.form(forms, axes, self.nbytes[where]) + MOVE_SECONDS
