"""Layouts and shardings against index arithmetic written out index by index."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from meshfuse import DeviceMesh
from meshfuse.reshard.steps import axis_keys
from meshfuse.sharding import Sharding, Split
from meshfuse.sharding import layout as lay
from meshfuse.sharding.data import shard, unshard
from meshfuse.sharding.layout import Layout
from meshfuse.sharding.value import conflicting, disjoint
from meshfuse.testing import dim_layouts, layouts, meshes, shardings

SIZES = st.sampled_from([0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 12, 13, 16, 24])
SHAPES = st.lists(st.integers(0, 9), min_size=1, max_size=3).map(tuple)
# A mesh, the size of a dim (or of its factors) and a layout of it.
DimCase = tuple[DeviceMesh, int, Layout]
FactoredCase = tuple[DeviceMesh, tuple[int, ...], Layout]


def place_of(mesh: DeviceMesh, rank: int, split: Split) -> int:
    """The rank's place along a part of a mesh axis, from the mesh's row-major order."""
    place, axis = mesh.ranks.index(rank), mesh.names.index(split.axis)
    coordinate = place // math.prod(mesh.shape[axis + 1 :]) % mesh.shape[axis]
    minor = mesh.shape[axis] // (split.pre * split.size)
    return coordinate // minor % split.size


def indices(layout: Layout, n: int, mesh: DeviceMesh, rank: int) -> list[int]:
    """The definition: those i < n whose digits, in the radices of the layout, agree with the rank's place."""
    sizes = [s.size for s in layout]
    tail = max(1, math.ceil(n / math.prod(sizes)))
    found = []
    for i in range(n):
        rest, agrees = i // tail, True
        for split in reversed(layout):
            rest, digit = divmod(rest, split.size)
            agrees = agrees and (split.axis is None or digit == place_of(mesh, rank, split))
        if agrees:
            found.append(i)
    return found


def listed(runs: lay.Runs) -> list[int]:
    return [i for a, b in runs for i in range(a, b)]


@st.composite
def cases(draw: st.DrawFn) -> DimCase:
    mesh, n = draw(meshes()), draw(SIZES)
    return mesh, n, draw(dim_layouts(mesh, (n,)))[0]


@settings(max_examples=500)
@given(cases())
def test_a_rank_holds_the_indices_whose_digits_are_its_own(case: DimCase) -> None:
    mesh, n, layout = case
    for rank in mesh.ranks:
        expected = indices(layout, n, mesh, rank)
        digits = tuple(place_of(mesh, rank, s) for s in layout if s.axis)
        assert listed(lay.runs(layout, n, digits)) == expected
        short = lay.canonical(layout, n)
        assert listed(lay.runs(short, n, lay.digits(short, mesh, rank))) == expected
        sharding = Sharding.make(mesh, [layout], (n,))
        assert sharding.local_shape((n,), rank) == (len(expected),)
        assert len(expected) <= sharding.max_local_numel((n,))


@settings(max_examples=300)
@given(cases())
def test_ranks_of_different_coordinates_hold_disjoint_parts_of_the_whole_dim(case: DimCase) -> None:
    mesh, n, layout = case
    sharding = Sharding.make(mesh, [layout], (n,))
    parts: dict[tuple[int, ...], list[int]] = {}
    for rank in mesh.ranks:
        (runs,) = sharding.runs((n,), rank)
        assert parts.setdefault(sharding.coordinates(rank), listed(runs)) == listed(runs)
        assert all(b < c for (_, b), (c, _) in itertools.pairwise(runs)), "runs touch or are out of order"
    assert sorted(i for part in parts.values() for i in part) == list(range(n))


@settings(max_examples=500)
@given(st.data())
def test_unshard_is_the_inverse_of_shard(data: st.DataObject) -> None:
    mesh, shape = data.draw(meshes()), data.draw(SHAPES)
    sharding = data.draw(shardings(shape, mesh))
    tensor = torch.arange(math.prod(shape)).reshape(shape)
    shards = {rank: shard(tensor, sharding, rank) for rank in mesh.ranks}
    for rank, local in shards.items():
        assert tuple(local.shape) == sharding.local_shape(shape, rank)
        assert local.is_contiguous()
        rows = tensor
        for d, layout in enumerate(sharding.dims):
            rows = rows[(slice(None),) * d + (indices(layout, shape[d], mesh, rank),)]
        assert torch.equal(local, rows)
    assert torch.equal(unshard(shards, sharding, shape), tensor)


# Equal canonical forms always mean equal index sets. The other way round holds where factors divide the dim.
# Where they do not, too few indices are left to tell some layouts apart, (2, x) and (3, -)(2, x) of a single
# index for instance, and the canonical form keeps those apart.


@settings(max_examples=500)
@given(st.data())
def test_canonical_forms_are_equal_where_the_indices_are(
    data: st.DataObject,
) -> None:
    mesh, n = data.draw(meshes()), data.draw(st.sampled_from([1, 2, 4, 6, 8, 12, 16, 24]))
    one = data.draw(dim_layouts(mesh, (n,)))[0]
    other = data.draw(st.one_of(st.permutations(one).map(tuple), dim_layouts(mesh, (n,)).map(lambda dims: dims[0])))
    same_form = lay.canonical(one, n) == lay.canonical(other, n)
    same_sets = all(indices(one, n, mesh, rank) == indices(other, n, mesh, rank) for rank in mesh.ranks)
    if same_form:
        assert same_sets
    if all(n % lay.extent(layout) == 0 for layout in (one, other)) and same_sets:
        assert same_form


@pytest.mark.parametrize("size", [12, 30])
def test_parts_of_an_axis_that_hold_others_share_nothing(size: int) -> None:
    """Any three of its parts: those that do not nest are in one that holds them, and so is what overlaps that."""
    mesh = DeviceMesh((size,), ("x",))
    numbers = [n for n in range(1, size + 1) if size % n == 0]
    parts = [Split(n, "x", pre) for pre in numbers for n in numbers[1:] if size % (pre * n) == 0]
    for some in itertools.chain(*(itertools.combinations(parts, count) for count in (1, 2, 3))):
        found = disjoint(some)
        assert not any(conflicting(a, b) for a, b in itertools.combinations(found, 2))
        group = set(mesh.group(0, axis_keys(found)))
        assert all(group.issuperset(mesh.group(rank, axis_keys([part]))) for rank in group for part in some)


@settings(max_examples=300)
@given(cases())
def test_canonical_is_idempotent_and_keeps_every_bound_part(case: DimCase) -> None:
    _, n, layout = case
    short = lay.canonical(layout, n)
    assert lay.canonical(short, n) == short
    assert math.prod(s.size for s in lay.axes(short)) == math.prod(s.size for s in lay.axes(layout))


def factored(i: int, sizes: Sequence[int]) -> list[int]:
    """i in the radices `sizes`, major to minor; the most major digit is what is left."""
    digits = []
    for size in reversed(sizes[1:]):
        i, digit = divmod(i, size)
        digits.append(digit)
    return [i, *reversed(digits)]


@st.composite
def factored_cases(draw: st.DrawFn) -> FactoredCase:
    mesh = draw(meshes())
    sizes = tuple(draw(st.lists(st.integers(1, 6), min_size=1, max_size=3)))
    return mesh, sizes, draw(dim_layouts(mesh, (math.prod(sizes),)))[0]


def product_indices(parts: Sequence[Layout], sizes: Sequence[int], mesh: DeviceMesh, rank: int) -> list[int]:
    """The indices of a merged dim whose factors all lie on the rank."""
    held = [set(indices(part, size, mesh, rank)) for part, size in zip(parts, sizes, strict=True)]
    everything = range(math.prod(sizes))
    return [i for i in everything if all(d in h for d, h in zip(factored(i, sizes), held, strict=True))]


def aligned(layout: Layout, sizes: Sequence[int]) -> bool:
    """True where every boundary between digits is a multiple or a divisor of every one between the sizes."""
    padded = [s.size for s in lay.padded(layout, math.prod(sizes))]
    ours, theirs = ([math.prod(radices[i:]) for i in range(len(radices))] for radices in (padded, sizes))
    return all(a % b == 0 or b % a == 0 for a in ours for b in theirs)


@settings(max_examples=500)
@given(factored_cases())
@example((DeviceMesh((4,), ("tp",)), (2, 6), (Split(4, "tp"),)))
def test_project_gives_factors_whose_product_is_the_dim(case: FactoredCase) -> None:
    mesh, sizes, layout = case
    n = math.prod(sizes)
    layout = lay.canonical(layout, n)
    parts = lay.project(layout, n, sizes)
    if parts is None:
        assert n % lay.extent(layout) or not aligned(layout, sizes)
        return
    for rank in mesh.ranks:
        assert product_indices(parts, sizes, mesh, rank) == indices(layout, n, mesh, rank)
    joined = lay.concat(parts, sizes)
    assert joined is not None
    assert [indices(joined, n, mesh, r) for r in mesh.ranks] == [indices(layout, n, mesh, r) for r in mesh.ranks]


@settings(max_examples=500)
@given(st.data())
def test_concat_gives_the_dim_that_its_factors_make_up(data: st.DataObject) -> None:
    mesh = data.draw(meshes())
    sizes = tuple(data.draw(st.lists(st.integers(1, 6), min_size=1, max_size=3)))
    parts = data.draw(dim_layouts(mesh, sizes))
    short = tuple(lay.canonical(p, n) for p, n in zip(parts, sizes, strict=True))
    joined, n = lay.concat(short, sizes), math.prod(sizes)
    divides = [size % lay.extent(part) == 0 for part, size in zip(short, sizes, strict=True)]
    if joined is None:
        assert not all(divides[1:]), "factors that divide can always be joined"
        return
    for rank in mesh.ranks:
        assert indices(joined, n, mesh, rank) == product_indices(parts, sizes, mesh, rank)
    if all(divides):
        assert lay.project(joined, n, sizes) == short


@settings(max_examples=300)
@given(st.data())
def test_positions_and_intersections_of_runs(data: st.DataObject) -> None:
    runs_of = st.sets(st.integers(0, 20)).map(lambda s: tuple(runs_from(sorted(s))))
    a, b = data.draw(runs_of), data.draw(runs_of)
    common = lay.intersect(a, b)
    assert listed(common) == sorted({*listed(a)} & {*listed(b)})
    assert listed(lay.positions(common, a)) == [listed(a).index(i) for i in listed(common)]
    assert lay.count(common) == len(listed(common))


def runs_from(sorted_indices: Sequence[int]) -> list[tuple[int, int]]:
    runs: list[tuple[int, int]] = []
    for i in sorted_indices:
        if runs and runs[-1][1] == i:
            runs[-1] = (runs[-1][0], i + 1)
        else:
            runs.append((i, i + 1))
    return runs


@settings(max_examples=300)
@given(st.data())
def test_equal_shardings_are_found_equal_however_they_are_written(data: st.DataObject) -> None:
    mesh, n = data.draw(meshes()), data.draw(SIZES)
    layout = data.draw(dim_layouts(mesh, (n,)))[0]
    cut = [part for split in layout for part in (halves(split) if data.draw(st.booleans()) else [split])]
    a, b = (Sharding.make(mesh, [which], (n,)) for which in (layout, tuple(cut)))
    assert a == b
    assert hash(a) == hash(b)


def halves(split: Split) -> list[Split]:
    """The split as two neighbours that amount to it, where its size is not prime."""
    major = next((m for m in range(2, split.size) if split.size % m == 0), 0)
    if not major:
        return [split]
    minor_pre = split.pre * major if split.axis else 1
    return [Split(major, split.axis, split.pre), Split(split.size // major, split.axis, minor_pre)]


@pytest.mark.parametrize("n", [0, 1, 5, 9])
def test_an_outer_layout_cuts_as_torch_chunk_does(n: int) -> None:
    mesh, tensor = DeviceMesh((4,), ("tp",)), torch.arange(n)
    chunks = [*tensor.chunk(4), *[tensor[:0]] * 4][:4] if n else [tensor] * 4
    sharding = Sharding.make(mesh, [(Split(4, "tp"),)], (n,))
    for rank in mesh.ranks:
        assert torch.equal(shard(tensor, sharding, rank), chunks[rank])


@settings(max_examples=300)
@given(st.data())
def test_drawn_layouts_have_the_given_splits(data: st.DataObject) -> None:
    splits = [Split(2, "dp"), Split(3, "tp")]
    layout = data.draw(layouts(data.draw(SIZES), splits))
    assert sorted(s for s in layout if s.bound) == splits


def test_the_first_part_of_an_axis_does_not_read_as_the_axis() -> None:
    mesh = DeviceMesh((8,), ("dp",))
    half, whole = (Sharding.make(mesh, [(Split(n, "dp"),)], (16,)) for n in (4, 8))
    assert (str(half), str(whole)) == ("[dp:(1)4]", "[dp]")
    assert str(Sharding.make(mesh, [()], (16,), [Split(2, "dp")], "sum")) == "[-] partial(sum: dp:(1)2)"
