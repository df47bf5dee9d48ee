"""The planner: its solver against all assignments, its prices against the path search, its plans against all plans."""

from __future__ import annotations

import itertools
import random
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import meshfuse as mf
from laws import renaming_axes_commutes
from ledger.known_programs import all_programs
from meshfuse.compiler import graph_to_plan
from meshfuse.graph import Graph
from meshfuse.ops.values import TensorType
from meshfuse.planner.answer import Answer, Optimum
from meshfuse.planner.cost_graph import Between, Classes, CostGraph, FromEither, Same
from meshfuse.planner.dual_ascent import solve
from meshfuse.planner.elimination import Assignment
from meshfuse.planner.frame import Frame
from meshfuse.planner.optimum import _among, _named_axes, parts_of_axes, solved
from meshfuse.planner.prices import Prices
from meshfuse.planner.program import Program
from meshfuse.planner.reshard_costs import exact_seconds, whole_axes
from meshfuse.plans.plan_cost import plan_cost
from meshfuse.propagation import ShardedDefinition
from meshfuse.resharding import Compute, Reshard
from meshfuse.sharding.value import Sharding, canonical_partial
from meshfuse.testing import assert_same_as_unsharded, inputs_for

EXAMPLE = Path(__file__).parents[1] / "examples" / "gpt"
sys.path.insert(0, str(EXAMPLE))
import fused  # noqa: E402
import model  # noqa: E402


def drawn_graph(seed: int) -> CostGraph:
    """Up to six variables of up to four labels, with edges of all kinds."""
    draw, graph = np.random.default_rng(seed), CostGraph()
    for _ in range(draw.integers(1, 7)):
        graph.add_variable(draw.integers(0, 20, draw.integers(1, 5)))
    sizes = graph.sizes()

    def classes(variable: int, count: int) -> Classes:
        return Classes(draw.integers(0, count, sizes[variable]), count)

    def table(*shape: int) -> np.ndarray:
        return draw.integers(0, 20, shape).astype(float)

    for a, b in itertools.permutations(range(len(sizes)), 2):
        kind = draw.integers(0, 8)
        if kind < 2:
            graph.edges.append(Between((a, b), table(3, 4), classes(a, 3), classes(b, 4)))
        elif kind == 2:
            graph.edges.append(Same((a, b), classes(a, 3), classes(b, 3), 50.0))
        elif kind == 3:
            sources = classes(a, 3), classes(a, 2)
            graph.edges.append(FromEither((a, b), table(3 + 2, 4), sources, classes(b, 4)))
    return graph


@settings(max_examples=100)
@given(st.integers(0, 10**6))
def test_the_solver_finds_the_least_of_all_assignments(seed: int) -> None:
    """With tables of any size allowed; with small ones its bound is one."""
    graph = drawn_graph(seed)
    least = min(graph.value(labels) for labels in itertools.product(*map(range, graph.sizes())))
    found = solve(graph)
    assert found.gap == 0 and found.assignment.value == pytest.approx(least)
    assert graph.value(found.assignment.labels) == pytest.approx(least)
    for cells in (2, 10):
        bounded = solve(graph, cells)
        assert bounded.bound <= least + 1e-9 and bounded.assignment.value >= least - 1e-9
        assert graph.value(bounded.assignment.labels) == pytest.approx(bounded.assignment.value)


MESHES = {
    "one axis": (mf.DeviceMesh((4,), ("a",)), 1.0),
    "two axes": (mf.DeviceMesh((2, 4), ("a", "b")), 0.9),
    "hosts": (mf.DeviceMesh((2, 4), ("a", "b"), links="dgx-h100"), 0.8),
    "three axes": (mf.DeviceMesh((2, 2, 2), ("a", "b", "c")), 0.8),
}


def every_sharding(mesh: mf.DeviceMesh, ndim: int) -> list[Sharding]:
    """Each axis on one dim, on none, or over terms of a sum."""
    axes, out = whole_axes(mesh), []
    for places in itertools.product(range(-2, ndim), repeat=len(axes)):
        at = [*zip(axes, places, strict=True)]
        dims = [tuple(axis for axis, place in at if place == d) for d in range(ndim)]
        terms = canonical_partial([axis for axis, place in at if place == -2])
        out.append(Sharding(mesh, dims, terms, "sum" if terms else ""))
    return out


@pytest.mark.parametrize("name", MESHES)
def test_closed_prices_are_those_of_the_path_search(name: str) -> None:
    """Of all reshards that are possible, which are the same; of the others most, and none by far."""
    mesh, share = MESHES[name]
    found = every_sharding(mesh, 3)
    shardings = random.Random(0).sample(found, min(len(found), 30))
    ttype = TensorType((64, 1024, 512), mf.DataType.Float)
    closed = Prices(whole_axes).table(tuple(shardings), tuple(shardings), ttype)
    exact = np.array([[exact_seconds(a, b, ttype) for b in shardings] for a in shardings])
    np.testing.assert_array_equal(np.isfinite(closed), np.isfinite(exact))
    ratios = (closed[np.isfinite(exact)] + 1e-9) / (exact[np.isfinite(exact)] + 1e-9)
    assert np.mean(np.abs(ratios - 1) < 1e-2) >= share, np.mean(np.abs(ratios - 1) < 1e-2)
    assert ratios.max() < 4 and ratios.min() > 0.5


def test_axes_in_parts() -> None:
    assert [str(part) for part in parts_of_axes(mf.DeviceMesh((2, 12), ("a", "b")))] == [
        "a", "b", "b:(2)2", "b:(4)3",
    ]  # fmt: skip
    assert len(parts_of_axes(mf.DeviceMesh((64,), ("a",)))) == 1


def small_programs() -> list[mf.FusionDefinition]:
    """Two or three ops each, with inputs on an axis of two."""
    mesh, out = mf.DeviceMesh((2,), ("tp",)), []

    def program(build, *specs) -> None:
        with mf.FusionDefinition() as fd:
            tensors = [fd.define_tensor([8, 8]) for _ in specs]
            fd.add_output(build(fd.ops, *tensors))
            for tensor, spec in zip(tensors, specs, strict=True):
                fd.mesh_split(tensor, mesh, spec)
        out.append(fd)

    rows, columns, whole = ["tp", None], [None, "tp"], [None, None]
    for specs in itertools.product((rows, columns, whole), repeat=2):
        program(lambda o, x, w: o.matmul(o.relu(x), w), *specs)
        program(lambda o, x, w: o.sum(o.matmul(x, w), [0]), *specs)
        program(lambda o, x, w: o.add(o.exp(o.matmul(x, w)), x), *specs)
    return out


def graph_of(fd: mf.FusionDefinition) -> Graph:
    return graph_to_plan(
        fd.recording, {i: tuple(fd.recording.tensors[i].type.shape) for i in fd.recording.input_tensors()}, {}
    )


def _seconds(graph: Graph, found: Optimum) -> float:
    return plan_cost(ShardedDefinition(graph, found.choices, found.shardings)).seconds


def test_a_plan_is_the_best_of_all_plans() -> None:
    """Each lowered, and its moves counted by what `insert_resharding` puts in."""
    for fd in small_programs():
        graph = graph_of(fd)
        (mesh,) = {sharding.mesh for sharding in graph.annotations.values()}
        best = solved(graph, mesh, Prices(whole_axes)).refined(parts=False)
        assert best.gap == 0
        program = Program(Frame.of(graph, (mesh,)), Prices(whole_axes), _among(_named_axes(graph), whole_axes))
        program.build()
        ops = [program.variables[node.id] for node in graph.nodes]
        rest = {v: [*range(n)] if v in ops else [int(program.costs.costs[v].argmin())]
                for v, n in enumerate(program.costs.sizes())}  # fmt: skip
        possible = [Assignment(chosen, 0.0) for chosen in itertools.product(*rest.values())
                    if _is_possible(Answer(program, Assignment(chosen, 0.0)))]  # fmt: skip
        least = min(_seconds(graph, Answer(program, found).plan(None)) for found in possible)
        assert _seconds(graph, best) <= least + 1e-11, str(fd)


def _is_possible(answer: Answer) -> bool:
    """Whether no op needs terms that are not there, and what is shared is where its op makes it."""
    program, pairs = answer.program, answer.used()
    made = all(
        answer.there(i)[0] == answer.placement(n).results[k]
        for i, (n, k) in program.frame.makers.items() if i in program.shared
    )  # fmt: skip
    return made and all(program.prices.seconds(*pair) < np.inf for pair in pairs)


# GPT's forward over 4 ranks of a host, and over 2 x 4: microseconds of moves (../shared/reference/exact_planning).
@pytest.mark.parametrize(("shape", "names", "moves"), [((4,), ("tp",), 127.72), ((2, 4), ("dp", "tp"), 114.08)])
def test_the_example_has_the_optimum_of_two_other_planners(shape, names, moves: float) -> None:
    mesh = mf.DeviceMesh(shape, names, links="dgx-h100")
    gpt = fused.define()
    fused.annotate(gpt, mesh)
    shapes = [(8, 128), (8, 128), *map(tuple, model.param_shapes(model.GPT).values())]
    graph = graph_to_plan(gpt.fd.recording, dict(zip(gpt.fd.recording.input_tensors(), shapes, strict=True)), {})
    best = solved(graph, mesh, Prices(whole_axes)).refined(parts=False)
    assert best.gap == 0
    assert plan_cost(ShardedDefinition(graph, best.choices, best.shardings)).moving <= moves * 1.0001e-6


@pytest.mark.parametrize(("effort", "part"), [("auto", 1 / 2), ("fast", 7 / 8)])
def test_parts_of_axes_are_placed_where_links_have_no_latency(effort: str, part: float) -> None:
    with mf.FusionDefinition(search=effort) as fd:
        x = fd.define_tensor([4096, 1024])
        fd.mesh_split(x, mf.DeviceMesh((8,), ("t",)), ["t", None])
        fd.add_output(fd.ops.matmul(x, fd.ops.permute(x, [1, 0])))
    assert fd.bill().total == 4096 * 1024 * 4 * part


def test_axes_of_one_name_on_two_meshes_are_two_axes() -> None:
    """What lies over an axis of one mesh makes no other mesh's axis of that name worth sharing rows over."""
    first, second = mf.DeviceMesh((2, 2), ("dp", "tp")), mf.DeviceMesh((3,), ("dp",), ranks=[4, 5, 6])
    with mf.FusionDefinition() as fd:
        elsewhere, x, y = (fd.define_tensor(shape) for shape in ([8], [3, 3], [3, 3]))
        fd.mesh_split(elsewhere, first, ["dp"])
        fd.mesh_split(y, second, [None, None])
        shared = fd.ops.tanh(x)
        for out in (fd.ops.exp(elsewhere), fd.ops.tanh(shared), fd.ops.tanh(fd.ops.div(shared, y * y))):
            fd.add_output(out)
    plan = fd.compile().planned
    assert all(not any(sharding.dims) for sharding in plan.shardings.values() if sharding.mesh == second)
    renaming_axes_commutes(plan, 0)


def row_parallel(body: Any, spec: list[str | None] | None) -> mf.FusionDefinition:
    """A product whose terms lie on the ranks, and what follows it."""
    mesh = mf.DeviceMesh((8,), ("tp",))
    with mf.FusionDefinition() as fd:
        x, w = fd.define_tensor([64, 512]), fd.define_tensor([256, 512])
        out = body(fd, fd.ops.linear(x, w))
        fd.add_output(out)
        fd.mesh_split(x, mesh, [None, "tp"])
        fd.mesh_split(w, mesh, [None, "tp"])
        if spec is not None:
            fd.mesh_split(out, mesh, spec)
    return fd


HALF, ROW = 7 / 8 * 64 * 256 * 4, 2 * 7 / 8 * 64 * 4


@pytest.mark.parametrize(
    ("body", "spec", "wire"),
    [
        (lambda fd, y: fd.ops.cast(y, mf.DataType.BFloat16), None, HALF),
        (lambda fd, y: fd.ops.relu(y), None, HALF),
        (lambda fd, y: fd.ops.softmax(y, -1), [None, "tp"], HALF + 2 * ROW),
        (lambda fd, y: fd.ops.softmax(y, -1), ["tp", None], HALF),
        (lambda fd, y: fd.ops.layer_norm(y, [256]), ["tp", None], HALF),
        (lambda fd, y: fd.ops.max(y, [1]), ["tp"], HALF),
    ],
    ids=["cast", "relu", "softmax of columns", "softmax of rows", "norm of rows", "max of rows"],
)
def test_a_sum_that_is_needed_in_parts_is_scattered(body: Any, spec: Any, wire: float) -> None:
    fd = row_parallel(body, spec)
    assert fd.bill().total <= wire * 1.001
    assert_same_as_unsharded(fd, inputs_for(fd))


@pytest.mark.parametrize("name", [f"random/{n:03}" for n in range(0, 300, 10)])
def test_readers_of_annotated_tensors_take_them_from_their_annotations(name: str) -> None:
    resharded = all_programs()[name]().compile().resharded
    makers = {s.target: s.source for s in resharded.statements if isinstance(s, Reshard)}
    notes = resharded.graph.annotations
    for statement in resharded.statements:
        for value in statement.inputs if isinstance(statement, Compute) else ():
            note = notes.get(resharded.values[value].tensor)
            while note is not None and resharded.values[value].sharding is not note:
                value = makers[value]
