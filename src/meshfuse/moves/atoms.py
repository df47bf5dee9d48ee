"""Layouts in terms of atoms: the parts of mesh axes between the boundaries that a reshard's two ends have.

Searches ask the same of the same layouts over and over, so that every answer is kept.
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
    """For every axis the boundaries at which it is cut, ascending; one object for equal ones."""

    by_axis: Mapping[str, tuple[int, ...]]


@functools.lru_cache(maxsize=1 << 14)
def cuts_of(shardings: tuple[Sharding, ...]) -> Cuts:
    """The boundaries of all parts of axes that any of the shardings uses."""
    by_axis: dict[str, set[Split]] = {}
    for split in [s for sharding in shardings for s in (*sharding.splits, *sharding.partial)]:
        assert split.axis is not None
        by_axis.setdefault(split.axis, set()).add(split)
    return _cuts(frozenset((axis, boundaries(found)) for axis, found in by_axis.items()))


@functools.lru_cache(maxsize=1 << 12)
def _cuts(by_axis: frozenset[tuple[str, tuple[int, ...]]]) -> Cuts:
    return Cuts(dict(by_axis))


@functools.lru_cache(maxsize=1 << 16)
def cut(cuts: Cuts, splits: tuple[Split, ...]) -> tuple[Split, ...]:
    """Bound splits cut at every boundary."""
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
    """The layout with these atoms bound as the target has them; None where it is not a part of the target."""
    bound = atoms(cuts, layout)
    return keeping(cuts, target, n, bound | more) if keeping(cuts, target, n, bound) == layout else None


@functools.lru_cache(maxsize=1 << 16)
def crossed(cuts: Cuts, layout: Layout, target: Layout, n: int) -> Atoms:
    """The atoms that a dim of size n has in a layout and not where the target has them: ranks that differ in one of
    these must come to speak to each other. Of blocks of several sizes nothing is told.
    """
    if layout == target or n % lay.extent(layout) or n % lay.extent(target):
        return frozenset()
    bound = [(atom, frozenset((atom,))) for atom in atoms(cuts, layout)]
    return frozenset([a for a, only in bound if keeping(cuts, layout, n, only) != keeping(cuts, target, n, only)])
