"""Strategies for meshes, layouts and shardings."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

from hypothesis import strategies as st

from ..errors import ArgumentError, caller_line, user_error
from ..mesh import DeviceMesh
from ..sharding.layout import Layout, Split
from ..sharding.value import Sharding
from .asked import check_entries, check_int, check_sizes, check_type

AXIS_NAMES = ("dp", "tp", "cp")


# Numbers of ranks, the more interesting ones more often; simple ones first: counter-examples shrink towards them.
_RANKS = (1, 2, 3, 4, 4, 4, 5, 6, 6, 6, 7, 8, 8, 8, 8)
MOST_RANKS = 64


def _shapes(ranks: int, axes: int, max_size: int) -> list[tuple[int, ...]]:
    """The shapes of meshes with so many ranks."""
    sizes = [n for n in range(1, min(max_size, ranks) + 1) if ranks % n == 0]
    found = [shape for n in range(1, axes + 1) for shape in itertools.product(sizes, repeat=n)]
    return [shape for shape in found if math.prod(shape) == ranks]


def meshes(
    max_axes: int = 3, max_size: int = 6, max_ranks: int = 8, first_rank: int = 0, min_ranks: int = 1
) -> st.SearchStrategy[DeviceMesh]:
    """Meshes of 1 to `max_axes` axes, with the ranks from `first_rank` on in any order.

    Raises ArgumentError where there are none.
    """
    for name, value, low, high in (
        ("max_axes", max_axes, 1, len(AXIS_NAMES)), ("max_size", max_size, 1, None),
        ("first_rank", first_rank, 0, None), ("max_ranks", max_ranks, 1, MOST_RANKS),
        ("min_ranks", min_ranks, 0, max_ranks),
    ):  # fmt: skip
        check_int(f"meshes: {name}", value, low, high)
    known = (*_RANKS, *range(_RANKS[-1] + 1, max_ranks + 1))
    totals = [n for n in known if min_ranks <= n <= max_ranks and _shapes(n, max_axes, max_size)]
    if not totals:
        raise user_error(
            "meshes", f"none of {min_ranks} to {max_ranks} ranks on {max_axes} axes of at most {max_size}",
            "numbers that leave one", "Raise max_size or max_axes.", caller_line(), ArgumentError,
        )  # fmt: skip
    return _meshes(totals, max_axes, max_size, first_rank)


@st.composite
def _meshes(draw: st.DrawFn, totals: Sequence[int], max_axes: int, max_size: int, first_rank: int) -> DeviceMesh:
    size = draw(st.sampled_from(totals))
    shape = draw(st.sampled_from(_shapes(size, max_axes, max_size)))
    ranks = [first_rank + i for i in range(size)]
    if draw(st.booleans()):
        ranks = draw(st.permutations(ranks))
    return DeviceMesh(shape, AXIS_NAMES[: len(shape)], ranks=ranks)


def drawn_place(draw: st.DrawFn, ndim: int) -> int:
    """The dim that an axis splits; -1, about one time in four, for none."""
    return draw(st.sampled_from([-1, *range(ndim), *range(ndim)])) if ndim else -1


def _parts(draw: st.DrawFn, axis: str, size: int) -> list[Split]:
    """An axis whole, or as two sub-axes."""
    cuts = [c for c in range(2, size) if size % c == 0]
    cut = draw(st.sampled_from([0, *cuts])) if cuts else 0
    return [Split(cut, axis), Split(size // cut, axis, cut)] if cut else [Split(size, axis)]


def layouts(n: int, splits: Sequence[Split]) -> st.SearchStrategy[Layout]:
    """Layouts of a dim of size n that bind exactly these splits, in any order, beside any unbound factors."""
    check_int("layouts: n", n, 0)
    check_entries("layouts: splits", splits, Split, "a list of mf.Split")
    return _layouts(n, splits)


@st.composite
def _layouts(draw: st.DrawFn, n: int, splits: Sequence[Split]) -> Layout:
    out: list[Split] = []
    for split in draw(st.permutations(splits)) if len(splits) > 1 else splits:
        if draw(st.integers(0, 3)) == 3:
            out.append(Split(draw(st.integers(2, max(2, min(n, 6))))))
        out.append(split)
    if out and draw(st.integers(0, 3)) == 3:
        out.append(Split(draw(st.integers(2, max(2, min(n, 6))))))
    return tuple(out)


def dim_layouts(mesh: DeviceMesh, shape: Sequence[int]) -> st.SearchStrategy[tuple[Layout, ...]]:
    """A layout for every dim, in which each part of each mesh axis is used at most once. Not canonical."""
    check_type("dim_layouts: mesh", mesh, DeviceMesh, "Pass an mf.DeviceMesh.")
    check_sizes("dim_layouts: shape", shape)
    return _dim_layouts(mesh, shape)


@st.composite
def _dim_layouts(draw: st.DrawFn, mesh: DeviceMesh, shape: Sequence[int]) -> tuple[Layout, ...]:
    dims: list[list[Split]] = [[] for _ in shape]
    for axis, size in zip(mesh.names, mesh.shape, strict=True):
        for split in _parts(draw, axis, size):
            place = drawn_place(draw, len(shape))
            if place >= 0:
                dims[place].append(split)
    return tuple(draw(_layouts(n, splits)) if splits else () for n, splits in zip(shape, dims, strict=True))


def shardings(shape: Sequence[int], mesh: DeviceMesh) -> st.SearchStrategy[Sharding]:
    """Shardings of a tensor of this shape: outer, inner, nested, strided, sub-axes, uneven, empty chunks."""
    check_type("shardings: mesh", mesh, DeviceMesh, "Pass an mf.DeviceMesh.")
    check_sizes("shardings: shape", shape)
    return _dim_layouts(mesh, shape).map(lambda dims: Sharding.make(mesh, dims, shape))
