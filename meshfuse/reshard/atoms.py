"""Layouts in terms of atoms: mesh axes cut at every boundary that either end of a reshard uses.

If the source uses an axis of 8 as 2 x 4 and the target uses its major 4, the atoms are 2, 2 and 2. Searches ask the
same of the same layouts over and over, so that every answer is kept.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Mapping
from dataclasses import dataclass

from ..sharding import layout as lay
from ..sharding.layout import Layout, Split
from ..sharding.value import Sharding, boundaries

Atoms = frozenset[Split]


@dataclass(frozen=True, slots=True, eq=False)
class Cuts:
    """By axis the boundaries at which it is cut, ascending, without axes that stay whole; one object for equal ones."""

    by_axis: Mapping[str, tuple[int, ...]]


@functools.lru_cache(maxsize=1 << 14)
def cuts_of(shardings: tuple[Sharding, ...]) -> Cuts:
    """The boundaries of all sub-axes that any of these shardings of one mesh uses."""
    by_axis: dict[str, set[Split]] = {}
    for split in [s for sharding in shardings for s in (*sharding.splits, *sharding.partial)]:
        assert split.axis is not None
        by_axis.setdefault(split.axis, set()).add(split)
    cuts = {axis: boundaries(found) for axis, found in by_axis.items()}
    return _cuts(frozenset([(a, found) for a, found in cuts.items() if found != (1, shardings[0].mesh.axis_size(a))]))


@functools.lru_cache(maxsize=1 << 12)
def _cuts(by_axis: frozenset[tuple[str, tuple[int, ...]]]) -> Cuts:
    return Cuts(dict(by_axis))


@functools.lru_cache(maxsize=1 << 16)
def cut(cuts: Cuts, splits: tuple[Split, ...]) -> tuple[Split, ...]:
    """These splits, each cut into atoms."""
    out: list[Split] = []
    for split in splits:
        assert split.axis is not None and split.size is not None
        inside = [c for c in cuts.by_axis.get(split.axis, ()) if split.pre < c < split.pre * split.size]
        bounds = [split.pre, *inside, split.pre * split.size]
        out.extend(Split(b // a, split.axis, a) for a, b in itertools.pairwise(bounds))
    return tuple(out)


@functools.lru_cache(maxsize=1 << 16)
def atoms(cuts: Cuts, layout: Layout) -> Atoms:
    """The atoms that a layout binds."""
    return frozenset(cut(cuts, lay.axes(layout)))


@functools.lru_cache(maxsize=1 << 16)
def keeping(cuts: Cuts, layout: Layout, n: int, keep: Atoms) -> Layout:
    """The layout of a dim of size n with the atoms outside `keep` unbound."""
    fine = [part for s in lay.padded(layout, n) for part in (cut(cuts, (s,)) if s.bound else (s,))]
    return lay.canonical(tuple(s if not s.bound or s in keep else Split(s.size) for s in fine), n)


@functools.lru_cache(maxsize=1 << 16)
def outside(cuts: Cuts, layout: Layout, n: int, axes: frozenset[str]) -> Layout:
    """The layout of a dim of size n with the atoms of these axes unbound."""
    return keeping(cuts, layout, n, frozenset([atom for atom in atoms(cuts, layout) if atom.axis not in axes]))


@functools.lru_cache(maxsize=1 << 16)
def growing(cuts: Cuts, layout: Layout, target: Layout, n: int, more: Atoms) -> Layout | None:
    """The layout with the atoms in `more` bound as well, where `target` has them.

    None where the layout is not the target with some atoms unbound.
    """
    bound = atoms(cuts, layout)
    return keeping(cuts, target, n, bound | more) if keeping(cuts, target, n, bound) == layout else None


@functools.lru_cache(maxsize=1 << 16)
def moved(cuts: Cuts, layout: Layout, target: Layout, n: int) -> Atoms:
    """The atoms that one of two layouts of a dim binds and the other does not, or elsewhere.

    All of both where blocks are not of one size: nothing is known of these.
    """
    both = atoms(cuts, layout) | atoms(cuts, target)
    if layout == target:
        return frozenset()
    if n % lay.extent(layout) or n % lay.extent(target):
        return both
    each = [(atom, frozenset((atom,))) for atom in both]
    return frozenset([a for a, only in each if keeping(cuts, layout, n, only) != keeping(cuts, target, n, only)])


@functools.lru_cache(maxsize=1 << 16)
def crossed(cuts: Cuts, layout: Layout, target: Layout, n: int) -> Atoms:
    """The atoms that the layout binds otherwise than the target: ranks that differ in one of them must communicate.

    Empty where blocks are not of one size.
    """
    uneven = n % lay.extent(layout) or n % lay.extent(target)
    return frozenset() if uneven else moved(cuts, layout, target, n) & atoms(cuts, layout)
