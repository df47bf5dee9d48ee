"""Strategies for meshes, layouts and shardings."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

from hypothesis import strategies as st

from ..mesh import DeviceMesh
from ..sharding.layout import Layout, Split
from ..sharding.value import Sharding

AXIS_NAMES = ("dp", "tp", "cp")


def _shapes(axes: int, max_size: int, max_ranks: int) -> list[tuple[int, ...]]:
    """Mesh shapes, simple ones first: counter-examples shrink towards them."""
    sizes = range(1, max_size + 1)
    found = [
        s for n in range(1, axes + 1) for s in itertools.product(sizes, repeat=n) if math.prod(s) <= max_ranks
    ]
    return sorted(found, key=lambda shape: (math.prod(shape), len(shape), shape))


@st.composite
def meshes(
    draw: st.DrawFn, max_axes: int = 3, max_size: int = 4, max_ranks: int = 8, first_rank: int = 0
) -> DeviceMesh:
    """Meshes of 1 to `max_axes` axes, with the ranks from `first_rank` on in any order."""
    shape = draw(st.sampled_from(_shapes(max_axes, max_size, max_ranks)))
    ranks = [first_rank + i for i in range(math.prod(shape))]
    if draw(st.booleans()):
        ranks = draw(st.permutations(ranks))
    return DeviceMesh(shape, AXIS_NAMES[: len(shape)], ranks=ranks)


def _parts(draw: st.DrawFn, axis: str, size: int) -> list[Split]:
    """The axis whole, or as two sub-axes."""
    cuts = [c for c in range(2, size) if size % c == 0]
    cut = draw(st.sampled_from([0, *cuts])) if cuts else 0
    return [Split(cut, axis), Split(size // cut, axis, cut)] if cut else [Split(size, axis)]


@st.composite
def layouts(draw: st.DrawFn, n: int, splits: Sequence[Split]) -> Layout:
    """A layout of a dim of size n that binds exactly these splits, in any order, and any unbound factors."""
    out: list[Split] = []
    for split in draw(st.permutations(splits)) if len(splits) > 1 else splits:
        if draw(st.integers(0, 3)) == 3:
            out.append(Split(draw(st.integers(2, max(2, min(n, 6))))))
        out.append(split)
    if out and draw(st.integers(0, 3)) == 3:
        out.append(Split(draw(st.integers(2, max(2, min(n, 6))))))
    return tuple(out)


@st.composite
def dim_layouts(draw: st.DrawFn, mesh: DeviceMesh, shape: Sequence[int]) -> tuple[Layout, ...]:
    """For every dim a layout, each part of each mesh axis being used at most once. Not canonical."""
    dims: list[list[Split]] = [[] for _ in shape]
    places = st.integers(0, len(shape))
    for axis, size in zip(mesh.names, mesh.shape, strict=True):
        for split in _parts(draw, axis, size):
            place = draw(places)
            if place:
                dims[place - 1].append(split)
    return tuple(draw(layouts(n, splits)) if splits else () for n, splits in zip(shape, dims, strict=True))


@st.composite
def shardings(draw: st.DrawFn, shape: Sequence[int], mesh: DeviceMesh) -> Sharding:
    """Shardings of a tensor of this shape: outer, inner, nested, strided, sub-axes, uneven, empty chunks."""
    return Sharding.make(mesh, draw(dim_layouts(mesh, shape)), shape)
