"""Searches over one graph share what they work out, and what they find does not depend on what was searched before."""

from __future__ import annotations

import contextlib
import itertools
import math
from typing import Any

import pytest
from layers import SMALL

import meshfuse as mf
from bill_classes import CLASSES
from bill_classes.known import Known
from defining import graph_of
from interrupts import interrupted, places
from laws import renaming_axes_commutes
from meshfuse.dtypes import DataType
from meshfuse.graph import specialize
from meshfuse.ops.values import TensorType
from meshfuse.placement import beam, factors
from meshfuse.placement import options as choose
from meshfuse.placement.dominance import JointTable, Table, conversion
from meshfuse.planner import starts
from meshfuse.propagation import THOROUGH, Propagation
from meshfuse.sharding.layout import Split
from meshfuse.sharding.value import Sharding
from meshfuse.testing import assert_same_as_unsharded, inputs_for

MESH = mf.DeviceMesh((2, 2), ("x", "y"))
KIND = TensorType((8, 8), DataType.Float)
X, Y = (Split(2, "x"),), (Split(2, "y"),)
PLACES = [Sharding(MESH, dims) for dims in ((X, ()), ((), X), (X, Y), (Y, X), ((), ()))]
WAYS = [(a,) for a in PLACES] + [(a, b) for a, b in itertools.permutations(PLACES[:3], 2)]


def propagation(width: int) -> Propagation:
    """Of two layers that disagree on where their rows are."""
    with mf.FusionDefinition() as fd:
        x, w, v = (fd.define_tensor([width, width]) for _ in range(3))
        fd.mesh_split(x, MESH, ["x", None])
        fd.mesh_split(w, MESH, [None, "y"])
        fd.mesh_split(v, MESH, ["y", "x"])
        fd.add_output(fd.ops.matmul(fd.ops.relu(fd.ops.matmul(x, w)), v))
    return Propagation(specialize(fd.recording, dict.fromkeys(range(3), (width, width)), {}), MESH)


def numbered(table: Table) -> list[float]:
    """The costs between all ways in a table."""
    numbers = [table.numbers[way] for way in WAYS]
    assert sorted(numbers) == list(range(len(WAYS)))
    assert [table.grown(n, PLACES[3]) in numbers for n in numbers].count(True) == sum(PLACES[3] in way for way in WAYS)
    return [table.cost(a, b) for a in numbers for b in numbers]


def numbered_together(held: JointTable) -> list[float]:
    """The costs between some ways of two tensors."""
    ways = [(a, b) for a in WAYS[:3] for b in WAYS[-3:]]
    numbers = [held[tuple(t.numbers[way] for t, way in zip(held.tables, pair, strict=True))] for pair in ways]
    assert sorted(numbers) == list(range(len(ways)))
    return [held.cost(a, b, math.inf) for a in numbers for b in numbers]


@pytest.mark.parametrize(
    ("make", "fill"), [(lambda: Table(KIND), numbered), (lambda: JointTable([Table(KIND)] * 2), numbered_together)]
)
def test_a_table_goes_on_numbering_wherever_it_was_interrupted(make: Any, fill: Any) -> None:
    """Tables outlive the compilation that Ctrl-C ends."""
    costs = fill(make())
    for count in places(lambda: fill(make()), "/dominance.py"):
        table = make()
        with contextlib.suppress(KeyboardInterrupt), interrupted(count, "/dominance.py"):
            fill(table)
        assert fill(table) == costs


def test_what_is_asked_again_is_not_searched_again() -> None:
    searches = propagation(64)
    found = searches.again(None, THOROUGH)
    assert searches.again(dict(searches.greedily), THOROUGH) is found
    assert searches.again(None) is searches.again(dict(searches.greedily)) and searches.first() is searches.first()


def test_a_plan_does_not_depend_on_what_was_searched_before() -> None:
    alone = propagation(96).again(None, THOROUGH)
    searches = propagation(96)
    searches.first()
    searches.again(alone.shardings, THOROUGH)
    searches.again(alone.shardings)
    assert str(searches.again(None, THOROUGH)) == str(alone)


@pytest.mark.parametrize("layers", [1, 4])
def test_what_ranks_may_share_is_first_what_most_follows(layers: int) -> None:
    """Rows, which everything has, before dims of weights, however large and many these are; alike weights are tried
    once.
    """
    with mf.FusionDefinition() as fd:
        x = rows = fd.define_tensor([2, 8, 16])
        weights = [(fd.define_tensor([16, 512]), fd.define_tensor([512, 16])) for _ in range(layers)]
        fd.mesh_split(x, MESH, ["x", None, None])
        for w, v in weights:
            fd.mesh_split(w, MESH, [None, "y"])
            fd.mesh_split(v, MESH, ["y", None])
            rows = rows + fd.ops.matmul(fd.ops.gelu(fd.ops.matmul(rows, w)), v)
        fd.add_output(rows)
    graph = graph_of(fd)
    plan = Propagation(graph, MESH).first()
    found = [next(iter(start.items())) for start in starts.shared_starts(graph, plan.shardings)]
    assert found[0] == (x.id, Sharding(MESH, (X, Y, ())))
    assert {i for i, _ in found} <= {x.id, weights[0][0].id, weights[0][1].id}


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


def test_costs_are_those_of_the_reshards_however_ways_are_numbered() -> None:
    tables = [Table(KIND), Table(KIND)]
    for way in reversed(WAYS):
        assert tables[1].numbers[way] < len(WAYS)
    held = JointTable(tables)
    for have, want in itertools.product(itertools.product(WAYS[::3], WAYS), repeat=2):
        numbers = [held[tables[0].numbers[a], tables[1].numbers[b]] for a, b in (have, want)]
        seconds = sum(conversion(a, b, KIND) for a, b in zip(have, want, strict=True) if a != b)
        assert held.cost(*numbers, most=seconds) == seconds
        if seconds:
            assert seconds / 2 < held.cost(*numbers, most=seconds / 2) <= seconds


def decoding(heads: int) -> mf.FusionDefinition:
    """A token's attention on a cache that is split by its length; two heads of keys for each group of queries."""
    mesh, groups, length, size = mf.DeviceMesh((2, 4), ("dp", "tp")), 2, 2048, 64
    width = heads * size
    with mf.FusionDefinition() as fd:
        x, query, out = (fd.define_tensor(list(shape)) for shape in ((8, 1, width), (width, width), (width, width)))
        keys, values = (fd.define_tensor([8, length, groups, size]) for _ in range(2))
        fd.mesh_split(x, mesh, ["dp", None, None])
        fd.mesh_split(query, mesh, [None, "tp"])
        fd.mesh_split(out, mesh, ["tp", None])
        for cached in (keys, values):
            fd.mesh_split(cached, mesh, ["dp", "tp", None, None])
        q = fd.ops.reshape(fd.ops.matmul(x, query), [8, 1, groups, heads // groups, size])
        q = fd.ops.reshape(fd.ops.permute(q, [0, 2, 3, 1, 4]), [8, groups, heads // groups, size])
        seen = fd.ops.softmax(fd.ops.matmul(q, fd.ops.permute(keys, [0, 2, 3, 1])), -1)
        mixed = fd.ops.matmul(seen, fd.ops.permute(values, [0, 2, 1, 3]))
        mixed = fd.ops.permute(fd.ops.reshape(mixed, [8, groups, heads // groups, 1, size]), [0, 3, 1, 2, 4])
        fd.add_output(fd.ops.matmul(fd.ops.reshape(mixed, [8, 1, width]), out))
    return fd


@pytest.mark.parametrize("heads", [4, 16])
def test_every_layout_that_is_tried_has_its_one_form(heads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else what is one place would be two, with an exchange of nothing between them."""
    tried = list[tuple[Sharding, tuple[int, ...]]]()

    def recorded(call: Any, *rest: Any) -> Any:
        found = factors.placed(call, *rest)
        if found is not None:
            tried.extend(zip(found.operands, [t.shape for t in call.types], strict=True))
            tried.extend(zip(found.results, [t.shape for t in call.results], strict=True))
        return found

    choose._candidates.cache_clear()
    monkeypatch.setattr(choose, "placed", recorded)
    decoding(heads).compile()
    assert len(tried) > 1000
    assert all(s == Sharding.make(s.mesh, s.dims, shape, s.partial, s.reduce) for s, shape in tried)


# sums left on ranks -----------------------------------------------------------------------------------------------


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


@pytest.mark.parametrize(
    "program",
    [
        CLASSES["general/rows_over_both_axes_and_a_vocabulary_over_one_of_them"],
        CLASSES["backward/clipped_gradients_of_an_mlp_on_two_axes"],
    ],
)
def test_a_plan_is_dropped_only_if_one_that_is_kept_reaches_it(program: Known, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where plans come to cost less, as less is left to reduce than was charged for."""
    pruned, cheaper_than_before = beam._Striding._pruned, list[bool]()

    def reaches(striding: Any, have: Any, want: Any, rounding: float) -> bool:
        """Whether one plan can be resharded into the other, as far as tensors are read again before long."""
        rows = zip(striding.tables, striding.near, striding._held(have), striding._held(want), strict=True)
        moved = sum(conversion(t.ways[a], t.ways[b], t.kind) for t, near, a, b in rows if near and a != b)
        return have.seconds + moved <= want.seconds + striding.margin + rounding

    def checked(striding: Any, found: Any) -> Any:
        kept = pruned(striding, found)
        cheaper_than_before.append(found[0].seconds < -striding.margin)
        left = iter(kept)
        coming, cheaper = next(left), []
        for f in found:
            if f is coming:
                assert not any(reaches(striding, k, f, -1e-15) for k in cheaper)
                cheaper.append(f)
                coming = next(left, None)
            elif len(cheaper) < striding.width:
                assert any(reaches(striding, k, f, 1e-15) for k in cheaper)
        return kept

    monkeypatch.setattr(beam._Striding, "_pruned", checked)
    beam._stride.cache_clear()
    program.defined(SMALL).bill()
    assert any(cheaper_than_before)
