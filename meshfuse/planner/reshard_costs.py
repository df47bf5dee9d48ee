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
from typing import NamedTuple

import numpy as np

from ..costs import Form, all_gather_forms, all_reduce_forms, all_to_all_forms, permute, reduce_scatter_forms
from ..mesh import DeviceMesh
from ..ops.values import TensorType
from ..reshard.prices import A2A_SECONDS, EXCHANGE_SECONDS, SLICE_SECONDS, STEP_SECONDS, between, link_over
from ..reshard.search import plan
from ..sharding import layout as lay
from ..sharding.layout import Split
from ..sharding.value import Sharding
from .cost_graph import Costs, numbered

_Forms = Callable[[int], tuple[Form, ...]]
# Where an axis may be: on a dim (its number), on none, or holding terms of a reduction.
_NOWHERE, _PARTIAL = -1, -2
# Blocks beyond this count are not told apart: there are more of them than elements.
_MOST_ABOVE = 1 << 40


# Seconds that nothing else takes, by axis: what has no way at all is left out wherever that can be.
_NEVER = 100.0
Atoms = tuple[Split, ...]


@functools.lru_cache(maxsize=1 << 10)
def whole_axes(mesh: DeviceMesh) -> Atoms:
    """The axes of more than one rank."""
    return tuple([Split(n, name) for n, name in zip(mesh.shape, mesh.names, strict=True) if n > 1])


@functools.lru_cache(maxsize=1 << 16)
def _places(sharding: Sharding, atoms: Atoms) -> tuple[tuple[int, int], ...] | None:
    """For every atom where it is, and how many blocks of the dim are more major; None for splits of other parts."""
    at: dict[Split | None, tuple[int, int]] = dict.fromkeys(atoms, (_NOWHERE, 1))
    for dim, layout in enumerate(sharding.dims):
        above = 1
        for split in layout:
            for atom in atoms_of_split(split, atoms) if split.bound else ():
                if atom is None:
                    return None
                at[atom] = (dim, min(above * (atom.pre // split.pre), _MOST_ABOVE))
            above = min(above * (split.size or 1), _MOST_ABOVE)
    for split in sharding.partial:
        for atom in atoms_of_split(split, atoms):
            if atom is None:
                return None
            at[atom] = (_PARTIAL, 1)
    return tuple(at.values())


@functools.lru_cache(maxsize=1 << 12)
def atoms_of_split(split: Split, atoms: Atoms) -> tuple[Split | None, ...]:
    """The atoms that a split is made of, major to minor; (None,) where there are none."""
    end = split.pre * (split.size or 1)
    parts = [a for a in atoms if a.axis == split.axis and split.pre <= a.pre < end]
    fits = bool(parts) and parts[0].pre == split.pre and math.prod([a.size or 1 for a in parts]) == split.size
    return tuple(parts) if fits else (None,)


@dataclass(frozen=True, slots=True)
class _Side:
    """Shardings of one tensor: `places` and `above` [shardings, atoms], a rank's bytes [shardings]."""

    places: np.ndarray
    above: np.ndarray
    nbytes: np.ndarray
    reductions: np.ndarray
    uneven: np.ndarray


@functools.lru_cache(maxsize=1 << 14)
def _nbytes(sharding: Sharding, ttype: TensorType) -> float:
    return sharding.max_local_numel(ttype.shape) * float(ttype.dtype.itemsize)


@functools.lru_cache(maxsize=1 << 14)
def _is_uneven(sharding: Sharding, shape: tuple[int, ...]) -> bool:
    return not all([lay.is_even(layout, n) for layout, n in zip(sharding.dims, shape, strict=True) if layout])


def _side(shardings: Sequence[Sharding], ttype: TensorType, atoms: Atoms) -> _Side:
    places = np.array([_places(s, atoms) for s in shardings], dtype=np.int64).reshape(len(shardings), len(atoms), 2)
    nbytes = np.array([_nbytes(s, ttype) for s in shardings])
    uneven = np.array([_is_uneven(s, ttype.shape) for s in shardings], dtype=bool)
    return _Side(places[..., 0], places[..., 1], nbytes, np.array([s.reduce for s in shardings]), uneven)


AtomsOf = Callable[[DeviceMesh], Atoms]


# How good a closed form is: as the cheapest path; not above it; rough, as blocks change places or are of several sizes;
# or there is none.
GOOD, LOW, DISPLACED, UNEVEN, NONE = range(5)


class Block(NamedTuple):
    """Shardings of a tensor of a type: from each source to each target."""

    sources: Sequence[Sharding]
    targets: Sequence[Sharding]
    ttype: TensorType


def reshard_costs(blocks: Sequence[Block], atoms_of: AtomsOf = whole_axes) -> list[tuple[Costs, np.ndarray]]:
    """Of each block modelled seconds, [sources, targets], inf where there is no way, and how good closed forms are.

    What becomes of axes is priced once for all blocks. `atoms_of` gives the axes of a mesh, or the parts of axes, that
    shardings are made of.
    """
    out = [(np.empty((len(sources), len(targets))), np.full((len(sources), len(targets)), GOOD))
           for sources, targets, _ in blocks]  # fmt: skip
    within: dict[DeviceMesh, list[tuple[int, Place, Block]]] = {}
    for number, block in enumerate(blocks):
        if block.ttype.rows:
            out[number][0][:] = _of_experts_rows(block)
            continue
        for mesh, other, at, part in _by_meshes(block):
            if mesh == other:
                within.setdefault(mesh, []).append((number, at, part))
            else:
                out[number][0][at] = _across(part, atoms_of)
    for mesh, parts in within.items():
        tables = _within([part for *_, part in parts], mesh, atoms_of(mesh))
        for (number, at, _), table in zip(parts, tables, strict=True):
            out[number][0][at], out[number][1][at] = table
    return out


def _of_experts_rows(block: Block) -> Costs:
    """Nothing but an op that knows them moves rows of experts."""
    found = [_NEVER * _apart(source, target) for source in block.sources for target in block.targets]
    return np.array(found).reshape(len(block.sources), len(block.targets))


# The rows and columns of a block that are a part of it.
Place = tuple[np.ndarray, ...]


def _by_meshes(block: Block) -> Iterator[tuple[DeviceMesh, DeviceMesh, Place, Block]]:
    """The parts of a block whose sources lie on one mesh, and whose targets on one."""
    sources, targets, ttype = block
    for mesh, rows in _by_mesh(sources).items():
        for other, columns in _by_mesh(targets).items():
            part = Block([sources[n] for n in rows], [targets[n] for n in columns], ttype)
            yield mesh, other, np.ix_(rows, columns), part


def _by_mesh(shardings: Sequence[Sharding]) -> dict[DeviceMesh, list[int]]:
    found: dict[DeviceMesh, list[int]] = {}
    for number, sharding in enumerate(shardings):
        found.setdefault(sharding.mesh, []).append(number)
    return found


def _across(block: Block, atoms_of: AtomsOf) -> Costs:
    """To another mesh: reduced on the old one, then sent to every rank of the new one that needs it."""
    sources, targets, ttype = block
    inside = [Block([s], [s.reduced()], ttype) for s in sources if s.partial]
    reduced = iter([float(costs[0, 0]) for costs, _ in reshard_costs(inside, atoms_of)])
    before = np.array([next(reduced) if s.partial else 0.0 for s in sources])
    link = between(sources[0].mesh, targets[0].mesh)
    sizes = [max(s.max_local_numel(ttype.shape), 1) * float(ttype.dtype.itemsize) for s in targets]
    sent = [np.inf if s.partial else permute(link, nbytes) for s, nbytes in zip(targets, sizes, strict=True)]
    return before[:, None] + np.array(sent)[None, :]


def _within(blocks: Sequence[Block], mesh: DeviceMesh, atoms: Atoms) -> list[tuple[Costs, np.ndarray]]:
    """The same of blocks on one mesh."""
    known = [[[n for n, s in enumerate(side) if _places(s, atoms) is not None] for side in block[:2]]
             for block in blocks]  # fmt: skip
    pairs = [(_side([block.sources[n] for n in rows], block.ttype, atoms),
              _side([block.targets[n] for n in columns], block.ttype, atoms))
             for block, (rows, columns) in zip(blocks, known, strict=True)]  # fmt: skip
    # Where bytes alone decide, and all links are alike, nothing takes less than the closed form of such a change.
    displaced = LOW if mesh.uniform and mesh.links[0].is_bytes_only else DISPLACED
    out = []
    for block, at, pair, seconds in zip(blocks, known, pairs, _between(pairs, mesh, atoms), strict=True):
        costs = np.full((len(block.sources), len(block.targets)), np.inf)
        quality = np.full(costs.shape, NONE)
        found = np.where(_displaced(*pair), displaced, GOOD)
        found[pair[0].uneven[:, None] | pair[1].uneven[None, :]] = UNEVEN
        costs[np.ix_(*at)], quality[np.ix_(*at)] = seconds, np.where(np.isfinite(seconds), found, GOOD)
        out.append((costs, quality))
    return out


def _displaced(sources: _Side, targets: _Side) -> np.ndarray:
    """The pairs in which blocks of a dim change places."""
    same = (sources.places[:, None] == targets.places[None, :]) & (sources.places[:, None] >= 0)
    return (same & (sources.above[:, None] != targets.above[None, :])).any(-1)


def exact_seconds(source: Sharding, target: Sharding, ttype: TensorType) -> float:
    """Modelled seconds of the cheapest path; inf where there is none."""
    if source is target:
        return 0.0
    if ttype.rows:
        return _NEVER * _apart(source, target)
    path = plan(source, target, ttype.shape, ttype.dtype.itemsize)
    return math.inf if path is None else path.seconds


def _apart(source: Sharding, target: Sharding) -> int:
    """How many axes are elsewhere in one of two shardings; 0 if they are equal."""
    if source is target:
        return 0
    one, other = (_by_axis(s) for s in (source, target))
    return sum([one.get(axis) != other.get(axis) for axis in {**one, **other}]) or 1


def _by_axis(sharding: Sharding) -> dict[str | None, list[tuple[int, Split]]]:
    found: dict[str | None, list[tuple[int, Split]]] = {}
    for dim, layout in enumerate((*sharding.dims, sharding.partial)):
        for split in layout:
            found.setdefault(split.axis, []).append((dim, split))
    return found


# What becomes of an axis in a reshard; the numbers are digits of a code.
_STAYS, _IDLE, _SLICED, _LATE, _SCATTERED, _MOVED, _DISPLACED, _REDUCED, _GATHERED, _KINDS = range(10)


def _between(pairs: Sequence[tuple[_Side, _Side]], mesh: DeviceMesh, atoms: Atoms) -> list[Costs]:
    """Pairs in which the same becomes of all axes, at the same sizes, cost the same: each case is priced once."""
    if not atoms:
        return [np.zeros((len(sources.nbytes), len(targets.nbytes))) for sources, targets in pairs]
    before, rows = numbered(np.concatenate([sources.nbytes for sources, _ in pairs]))
    after, columns = numbered(np.concatenate([targets.nbytes for _, targets in pairs]))
    codes, impossible = list[np.ndarray](), list[np.ndarray]()
    row = column = 0
    for sources, targets in pairs:
        kinds, never = _kinds(sources, targets, atoms)
        code = np.zeros(never.shape, dtype=np.int64)
        for kind in kinds:
            code = code * _KINDS + kind
        ends = row + len(sources.nbytes), column + len(targets.nbytes)
        code = (code * len(before) + rows[row : ends[0], None]) * len(after) + columns[None, column : ends[1]]
        (row, column), codes, impossible = ends, [*codes, code], [*impossible, never]
    cases, which = numbered(np.concatenate([code.ravel() for code in codes]))
    digits = cases // (len(before) * len(after))
    listed = np.stack([digits // _KINDS**n % _KINDS for n in reversed(range(len(atoms)))], -1)
    change = _Change(listed, before[cases // len(after) % len(before)], after[cases % len(after)], mesh, atoms)
    seconds = np.minimum.reduce([_Way(change, scattered, shared).seconds() for scattered, shared in change.ways()])[
        which
    ]
    parts = np.split(seconds, np.cumsum([code.size for code in codes])[:-1])
    return [np.where(never, np.inf, part.reshape(never.shape)) for never, part in zip(impossible, parts, strict=True)]


def _kinds(sources: _Side, targets: _Side, atoms: Atoms) -> tuple[list[np.ndarray], np.ndarray]:
    """(by axis what becomes of it in each pair, whether the pair is impossible)."""
    before = [sources.places[:, None, n] for n in range(len(atoms))]
    after = [targets.places[None, :, n] for n in range(len(atoms))]
    out = []
    impossible = np.zeros((len(sources.nbytes), len(targets.nbytes)), dtype=bool)
    for n, (old, new) in enumerate(zip(before, after, strict=True)):
        same = old == new
        kind = np.where(same & (old == _NOWHERE), _IDLE, np.full(same.shape, _STAYS))
        kind[same & (old >= 0) & (sources.above[:, None, n] != targets.above[None, :, n])] = _DISPLACED
        kind[(old == _NOWHERE) & (new >= 0)] = _SLICED
        kind[(old == _PARTIAL) & (new >= 0)] = _SCATTERED
        kind[(old >= 0) & (new >= 0) & ~same] = _MOVED
        kind[(old == _PARTIAL) & (new == _NOWHERE)] = _REDUCED
        kind[(old >= 0) & (new == _NOWHERE)] = _GATHERED
        mixed = same & (old == _PARTIAL) & (sources.reductions[:, None] != targets.reductions[None, :])
        impossible |= ((new == _PARTIAL) & ~same) | mixed
        out.append(kind)
    leaves = [(kind == _MOVED) | (kind == _GATHERED) for kind in out]
    for n, m in itertools.permutations(range(len(atoms)), 2):
        start, other = targets.above[None, :, n], sources.above[:, None, m]
        overlaps = (start < other * (atoms[m].size or 1)) & (other < start * (atoms[n].size or 1))
        out[n][(out[n] == _SLICED) & leaves[m] & overlaps & (after[n] == before[m])] = _LATE
    return out, impossible


class _Change:
    """What becomes of every axis in some cases: [cases, axes] of booleans."""

    def __init__(
        self, kinds: np.ndarray, nbytes: np.ndarray, target_nbytes: np.ndarray, mesh: DeviceMesh, atoms: Atoms
    ):
        self.axes, self.mesh, self.nbytes, self.target_nbytes = atoms, mesh, nbytes, target_nbytes
        self.idle, self.sliced, self.late = kinds == _IDLE, kinds == _SLICED, kinds == _LATE
        self.scattered, self.moved, self.displaced = kinds == _SCATTERED, kinds == _MOVED, kinds == _DISPLACED
        self.reduced, self.gathered = kinds == _REDUCED, kinds == _GATHERED
        links = [link_over(mesh, (axis,)) for axis in self.axes]
        self.fast_first = sorted(range(len(links)), key=lambda n: (-links[n].bandwidth, links[n].latency, n))

    def ways(self) -> Iterator[tuple[bool, bool]]:
        """Whether reductions are scattered until the end, and whether idle axes share the work; where that differs."""
        for scattered in (False, True) if self.reduced.any() else (False,):
            yield from ((scattered, shared) for shared in ((False, True) if self.idle.any() else (False,)))

    def sets(self, changed: np.ndarray) -> Iterator[tuple[tuple[int, ...], np.ndarray]]:
        """Sets of axes, and the pairs where just these are changed."""
        bits = changed @ (1 << np.arange(len(self.axes)))
        for code in np.flatnonzero(np.bincount(bits)):
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
        idle, later = change.idle & busy & shared, change.reduced & scattered  # Both are gathered at the end.
        self.sliced, self.scattered = change.sliced | idle, change.scattered | later
        self.reduced, self.gathered = change.reduced & ~later, change.gathered | later | idle

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
        """All-to-alls one after another, or all pieces at once: so, too, where a dim's blocks change places."""
        change = self.change
        apart = change.displaced.any(-1)
        for axes, where in change.sets(change.moved | change.displaced):
            nbytes = self.nbytes[where]
            one = change.form(_exchange_forms, axes, nbytes) + EXCHANGE_SECONDS
            each = sum([change.form(all_to_all_forms, (n,), nbytes) + A2A_SECONDS for n in axes])
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
        self.total[where] += self.change.form(forms, axes, self.nbytes[where]) + STEP_SECONDS
