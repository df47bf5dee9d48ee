"""A mesh on which an axis is written as two: every rank has the same of every tensor as before."""

from __future__ import annotations

import dataclasses
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from layers import SMALL

import meshfuse as mf
from bill_classes.grids import CLASSES
from defining import graph_of
from meshfuse.planner.grids import MOST_WAYS, Grid, grids
from meshfuse.plans.plan_cost import plan_cost
from meshfuse.planner.search import GRID_OPS
from meshfuse.propagation import THOROUGH, Propagation
from meshfuse.sharding import layout as lay
from meshfuse.sharding.layout import Split
from meshfuse.sharding.value import Sharding

RANKS = (5, 3, 0, 1, 2, 4, 7, 6, 8, 9, 10, 11)
SHAPE = (24, 7)


def pairs_of_rows(mesh: mf.DeviceMesh, spec: list[object]) -> mf.FusionDefinition:
    with mf.FusionDefinition() as fd:
        x = fd.define_tensor([8, 8])
        fd.mesh_split(x, mesh, spec)
        fd.add_output(fd.ops.matmul(x, fd.ops.permute(x, [1, 0])))
    return fd


@st.composite
def cut(draw: st.DrawFn) -> tuple[Grid, Sharding]:
    """An axis of 12 written as two, beside another; and parts of the two on two dims or unreduced."""
    major = draw(st.sampled_from([2, 3, 4, 6]))
    beside = draw(st.sampled_from([1, 2]))
    mesh = mf.DeviceMesh((12, beside), ("t", "d"), ranks=range(12 * beside) if beside > 1 else RANKS)
    parts = [Split(2, "d")] if beside > 1 else []
    for size, pre in ((major, 1), (12 // major, major)):
        part = draw(st.sampled_from([n for n in range(1, size + 1) if size % n == 0]))
        parts += [Split(part, "t", pre)] if draw(st.booleans()) else [Split(size // part, "t", pre * part)]
    places = [draw(st.sampled_from([0, 0, 1, 2, 3])) for _ in parts]
    on = [tuple(p for p, at in zip(parts, places, strict=True) if at == place) for place in range(3)]
    return Grid.of(mesh, "t", major), Sharding.make(mesh, on[:2], SHAPE, on[2], "sum" if on[2] else "")


@given(cut())
def test_every_rank_has_the_same_on_the_grid(drawn: tuple[Grid, Sharding]) -> None:
    grid, sharding = drawn
    with mf.FusionDefinition() as fd:
        fd.add_output(fd.ops.relu(fd.define_tensor(list(SHAPE))))
    graph = dataclasses.replace(graph_of(fd), annotations={0: sharding})
    assert grid.holds(graph)
    there = grid.graph(graph).annotations[0]
    assert there.mesh == grid.written and grid.back(there, SHAPE) == sharding
    for rank in grid.mesh.ranks:
        assert there.runs(SHAPE, rank) == sharding.runs(SHAPE, rank)
        summed = [frozenset(r for r in mesh.ranks if terms(s, mesh, r) == terms(s, mesh, rank))
                  for s, mesh in ((there, grid.written), (sharding, grid.mesh))]  # fmt: skip
        assert summed[0] == summed[1]


def terms(sharding: Sharding, mesh: mf.DeviceMesh, rank: int) -> tuple[int, ...]:
    """The rank's place along the unreduced axes."""
    return lay.digits(sharding.partial, mesh, rank)


@pytest.mark.parametrize("name", [*CLASSES])
def test_a_plan_on_the_grid_takes_as_much_on_the_mesh(name: str) -> None:
    graph = graph_of(CLASSES[name].defined(SMALL))
    for grid in grids(graph):
        written = Propagation(grid.graph(graph), grid.written).again(None, THOROUGH)
        assert plan_cost(grid.plan_back(graph, written)) == pytest.approx(plan_cost(written))


def test_ways_are_those_of_the_largest_axis_alike_parts_first() -> None:
    def ways(shape: tuple[int, ...], either: bool = False) -> list[tuple[str, int]]:
        mesh = mf.DeviceMesh(shape, ("d", "t")[-len(shape) :])
        return [(grid.axis, grid.major) for grid in grids(graph_of(pairs_of_rows(mesh, ["t", None])), either)]

    def majors(shape: tuple[int, ...]) -> list[int]:
        return [major for _, major in ways(shape)]

    assert majors((8,)) == majors((1, 8)) == [2] and majors((12,)) == [3, 2]
    assert majors((16,)) == [4, 2] and majors((4,)) == [2] and len(majors((64,))) == MOST_WAYS
    assert majors((7,)) == majors((2, 2)) == majors((1,)) == []
    assert ways((2, 8)) == ways((4, 8))[:1] == [("t", 2)] and ways((6, 4)) == [("d", 2), ("t", 2)]
    assert ways((8,), True) == [("t", 2), ("t", 4)] and ways((4,), True) == [("t", 2)]
    assert ways((6, 4), True) == [("d", 2), ("t", 2), ("d", 3)]


def test_an_axis_of_which_other_parts_are_used_is_left_as_it_is() -> None:
    """Thirds of an axis of 6 are no parts of halves."""
    mesh = mf.DeviceMesh((6,), ("t",))
    with mf.FusionDefinition() as fd:
        x = fd.define_tensor([6, 6])
        fd.mesh_split(x, mesh, [[Split(3, "t", 1)], None])
        fd.add_output(fd.ops.relu(x))
    assert not any(True for _ in grids(graph_of(fd)))


def test_the_grid_has_the_links_of_its_mesh_and_names_of_its_own() -> None:
    links = {"t": mf.Link(1e9, 1e-6), "t_major": mf.Link(2e9, 2e-6)}
    mesh = mf.DeviceMesh((8, 1), ("t", "t_major"), links=links, flops=1e12)
    written = Grid.of(mesh, "t", 2).written
    assert written.shape == (2, 4, 1) and written.ranks == mesh.ranks and math.prod(written.shape) == 8
    assert len(set(written.names)) == 3 and written.names[2] == "t_major" and written.flops == 1e12
    assert written.links == (links["t"], links["t"], links["t_major"])


def test_plain_meshes_stay_plain() -> None:
    assert not Grid.of(mf.DeviceMesh((8,), ("t",)), "t", 2).written.linked


@pytest.mark.parametrize("effort", ["auto", "fast"])
def test_only_searches_write_axes_as_two(effort: str) -> None:
    with mf.FusionDefinition(search=effort) as fd:
        x = fd.define_tensor([4096, 1024])
        fd.mesh_split(x, mf.DeviceMesh((8,), ("t",)), ["t", None])
        fd.add_output(fd.ops.matmul(x, fd.ops.permute(x, [1, 0])))
    whole = 4096 * 1024 * 4
    assert fd.bill().total == (whole / 2 if effort == "auto" else whole * 7 / 8)


def product_over_three_axes(effort: str, *, long: bool) -> mf.FusionDefinition:
    """Rows over two slow axes, columns over a fast one of four; `long`: beside more ops than are searched on grids."""
    links = {"x": mf.Link(25e9, 20e-6), "y": mf.Link(100e9, 5e-6), "z": mf.Link(450e9, 5e-6)}
    mesh = mf.DeviceMesh((2, 2, 4), ("x", "y", "z"), links=links)
    with mf.FusionDefinition(search=effort) as fd:
        a, b = fd.define_tensor([4096, 2048]), fd.define_tensor([2048, 4096])
        fd.mesh_split(a, mesh, [("x", "y"), "z"])
        fd.mesh_split(b, mesh, ["z", ("x", "y")])
        c = fd.ops.matmul(a, b)
        fd.mesh_split(c, mesh, [("x", "y"), "z"])
        beside = fd.define_tensor([4])
        for _ in range(GRID_OPS if long else 1):
            beside = fd.ops.tanh(beside)
        for made in (c, beside):
            fd.add_output(made)
    return fd


def test_over_many_axes_few_ops_are_searched_on_grids() -> None:
    whole = 4096 * 2048 * 4
    assert product_over_three_axes("auto", long=False).bill().total <= whole * 7 / 16
    assert product_over_three_axes("thorough", long=True).bill().total <= whole * 7 / 16
    assert product_over_three_axes("auto", long=True).bill().total > whole * 7 / 16
