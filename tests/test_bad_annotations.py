"""What is no mesh and no annotation, or contradicts one, is a ValueError that says so, at the user's own line."""

from __future__ import annotations

import html
import math
import operator
import os
from array import array
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

import meshfuse as mf
from defining import rebuilt
from meshfuse import ParallelType
from meshfuse.report.page import page
from refusing import MESH, X, define, raises

HERE = os.path.basename(__file__)


SPECS = {
    "one entry per dim": (["dp"], "dp", None, 5, {"a": "dp"}, ["stream", None, None]),
    "mesh axis 'dp' is used twice": (["dp", "dp"], [["dp", "dp"], None], [["tp", "dp"], 0]),
    "x (t0), dim 0: unknown mesh axis: found 'ep', needed one of ('dp', 'tp')": (
        ["ep", None],
        [["tp", "ep"], None],
    ),
    "x (t0), dim 1: no such mesh axis": ([None, 2], [None, -2], [None, np.int64(7)]),
    "not a way to split a dim": (
        [1.5, None],
        [{}, None],
        [[["dp"]], None],
        [True, None],
        [object, None],
        [b"dp", None],
        [[(0, "tp")], None],
        [[(-4, "tp")], None],
        [[(2, 3)], None],
        [[mf.Split(2.0, "tp")], None],
        [mf.Split(4, "tp", -1), None],
    ),
    "a factor of 3 cannot be bound to mesh axis 'tp': found axis size 4": ([[mf.Split(3, "tp")], None],),
    "only one factor may be what remains": ([[mf.Split(None), mf.Split(None)], None],),
}


@pytest.mark.parametrize(("text", "spec"), [(text, spec) for text, specs in SPECS.items() for spec in specs], ids=str)
def test_mesh_split(text: str, spec: Any) -> None:
    fd, x = define()
    raises(text, lambda: fd.mesh_split(x, MESH, spec))
    assert not x.has_device_mesh()


SHARDINGS: list[tuple[str, Any]] = [
    ("one placement per mesh axis", [Shard(0)]),
    ("one placement per mesh axis", Shard(0)),
    ("one placement per mesh axis", [0, 1]),
    ("one placement per mesh axis", "dp"),
    ("names a dim that it has not", [Shard(2), Replicate()]),
    ("names a dim that it has not", [Shard(-3), Replicate()]),
    ("an annotation must say where the elements are", [Partial(), Replicate()]),
    (
        "a strided placement cuts chunks that later axes do not make: found [_StridedShard(dim=0, sf=3), "
        "Shard(dim=0)], needed a split_factor that is a product of their sizes, from the major one on, or a multiple",
        [_StridedShard(0, split_factor=3), Shard(0)],
    ),
    (
        "an annotation must say where the elements are",
        mf.Sharding(MESH, ((), ()), (mf.Split(4, "tp"),), "sum"),
    ),
    ("another number of dims: found 3", mf.Sharding.replicated(MESH, 3)),
    ("unknown mesh axis: found 'xx'", mf.Sharding(MESH, ((mf.Split(4, "xx"),), ()))),
    ("used twice: found on dims 0 and 1", mf.Sharding(MESH, ((mf.Split(4, "tp"),), (mf.Split(4, "tp"),)))),
    ("cannot be bound", mf.Sharding(MESH, ((mf.Split(3, "tp"),), ()))),
    (
        "parts of mesh axis 'x' do not nest: found x:(1)2 and x:(3)2 of 6, on dims 0 and 1, needed parts that one "
        "cutting of the axis has",
        mf.Sharding(mf.DeviceMesh((6,), ("x",)), ((mf.Split(2, "x"),), (mf.Split(2, "x", 3),))),
    ),
]


@pytest.mark.parametrize(("text", "sharding"), SHARDINGS, ids=str)
def test_shardings_that_do_not_fit_are_errors(text: str, sharding: Any) -> None:
    fd, x = define()
    raises(text, lambda: fd.shard(x, sharding, MESH))


def test_a_sharding_with_another_mesh_is_an_error() -> None:
    fd, x = define()
    found = mf.Sharding.replicated(MESH, 2)
    raises("is annotated twice: found mesh", lambda: fd.shard(x, found, mf.DeviceMesh((2,), ("q",))))
    fd.shard(x, found, mf.DeviceMesh((2, 4), ("dp", "tp")))


@pytest.mark.parametrize("factor", [17, 10**9, 2**70])
@pytest.mark.parametrize("place", ["before", "after", "between", "stream"])
def test_factors_far_larger_than_the_dim_cost_nothing(factor: int, place: str) -> None:
    """Of their steps only those exist that the dim has."""
    tp, dp, big = mf.Split(4, "tp"), mf.Split(2, "dp"), mf.Split(factor)
    layouts = {"before": [big, tp], "after": [tp, big], "between": [dp, big, tp], "stream": [tp, big, dp]}
    fd, x = define()
    fd.add_output(fd.ops.sum(fd.ops.exp(x), [0]))
    fd.mesh_split(x, MESH, [layouts[place], None])
    torch.testing.assert_close(fd.simulate([X])[0], X.exp().sum(0))


def test_more_pieces_than_can_be_planned() -> None:
    fd = mf.FusionDefinition()
    x = fd.define_tensor([-1, 2])
    fd.add_output(fd.ops.relu(x))
    fd.mesh_split(x, MESH, [[mf.Split(None), mf.Split(4, "tp")], None])
    raises("dim 0: too many pieces: found 268435456 per rank", lambda: fd.bill([2**30, 2]))
    assert torch.equal(fd.simulate([torch.ones(9, 2)])[0], torch.ones(9, 2))


def _tiled(ops: Any, x: Any, n: int) -> Any:
    return ops.reshape(ops.expand(ops.broadcast(x, [True, False, False]), [n, 8, 4]), [n * 8, 4])


# Of x, whose first dim of 8 (or second, of [n, 8, 4]) lies over 8 ranks, results that could lie in a run per row.
ROWS: dict[str, tuple[Callable[[int], list[int]], Callable[[Any, Any, int], Any]]] = {
    "padded": (lambda n: [8, 4], lambda ops, x, n: ops.pad(x, [0, 0, 8 * n, 0])),
    "tiled": (lambda n: [8, 4], _tiled),
    "merged": (lambda n: [n, 8, 4], lambda ops, x, n: ops.reshape(x, [8 * n, 4])),
    "sliced": (lambda n: [8 * n, 4], lambda ops, x, n: ops.slice(x, [8, 0], [16, 4])),
    "joined": (lambda n: [8, 4], lambda ops, x, n: ops.cat([ops.full([8 * n, 4], 1.0, mf.DataType.Float), x], 0)),
}


@pytest.mark.timeout(60)
@pytest.mark.filterwarnings("ignore::meshfuse.PlanWarning")
@pytest.mark.parametrize("n", [2**22, 2**37])
@pytest.mark.parametrize("name", ROWS)
def test_no_plan_has_more_pieces_than_can_be_planned(name: str, n: int) -> None:
    """Though nothing would move: no list of a rank's runs would ever end."""
    shape, make = ROWS[name]
    fd, mesh = mf.FusionDefinition(), mf.DeviceMesh((8,), ("tp",))
    x = fd.define_tensor(shape(n))
    made = make(fd.ops, x, n)
    fd.add_output(made)
    fd.mesh_split(x, mesh, [None, "tp", None] if x.ndim == 3 else ["tp", None])
    assert fd.bill().total <= math.prod(shape(n)) * 4
    (sharding,) = fd.output_shardings()
    assert math.prod(sharding.local_shape([made.type.shape[0], 4], 7)) > 0


def test_more_chunks_than_can_be_planned() -> None:
    fd, x = define()
    fd.add_output(fd.ops.relu(x))
    fd.mesh_split(x, MESH, [[mf.Split(2**40, "stream"), mf.Split(2, "dp")], None])
    raises("dim 0: too many chunks: found 1099511627776, needed at most 16384", lambda: fd.simulate([X]))


MESHES: list[tuple[str, Callable[[], Any]]] = [
    ("a mesh holds each rank once, none negative: found ranks [0, 1, 1]", lambda: mf.DeviceMesh([0, 1, 1])),
    ("Remove the negative ranks", lambda: mf.DeviceMesh([0, -1])),
    ("Remove the too large ranks", lambda: mf.DeviceMesh([0, 2**31])),
    ("Remove the repeated ranks [2]; a shape needs a name for each of its axes", lambda: mf.DeviceMesh((2, 2))),
    ("Remove the repeated ranks [7]", lambda: mf.DeviceMesh([*range(10**6), 7])),
    *[
        (
            f"found names {names} for the ranks {list(given)}, needed 1 for shape ({len(given)},). Name every axis. As "
            f"many numbers as names are a shape, others the ranks themselves",
            lambda given=given, names=names: mf.DeviceMesh(given, names),
        )
        for given, names in (([2, 4, 2], ("dp", "tp")), ([2, 4], ("dp", "tp", "pp")))
    ],
    *[
        (
            f"found names {shown} for the shape {shape}, needed {len(shape)} names. Name every axis, or pass the ranks "
            f"in a list: {list(shape)}.",
            lambda given=given, names=names: mf.DeviceMesh(given, names),
        )
        for given, names, shown, shape in (
            ((2, 4), ("dp",), "('dp',)", (2, 4)),
            ((2, 4), "dp", "('dp',)", (2, 4)),
            ((2, 4), (), "()", (2, 4)),
            ((2, 4, 2), ["dp", "tp"], "['dp', 'tp']", (2, 4, 2)),
            ((np.int64(0), 1), ("dp",), "('dp',)", (0, 1)),
            (torch.Size([3, 1]), ("dp",), "('dp',)", (3, 1)),
        )
    ],
    ("one name per axis", lambda: mf.DeviceMesh((2, 4), ("dp", "dp"))),
    ("one name per axis", lambda: mf.DeviceMesh((2, 4), (1, 2))),  # type: ignore[arg-type]
    ("one name per axis", lambda: mf.DeviceMesh((2,), ("stream",))),
    ("one name per axis", lambda: mf.DeviceMesh((2,), ("",))),
    *[
        (
            f"names ({name!r},) for shape (2,), needed 1 different words without any of ',:=()[]'",
            lambda n=name: mf.DeviceMesh((2,), (n,)),
        )
        for name in ("a,b", "a:b", "tp:(2)4", "tp=4", "(a", "[a]", " ", "a b", "a\tb", "a\nb", "a\0b", "\u202ea", "-")
    ],
    ("one name per axis", lambda: mf.DeviceMesh(torch.arange(128).reshape([2] * 7))),
    ("at least one rank along every axis", lambda: mf.DeviceMesh((-2, 4), ("dp", "tp"))),
    ("at least one rank along every axis", lambda: mf.DeviceMesh((0,), ("tp",))),
    ("at least one rank along every axis", lambda: mf.DeviceMesh([])),
    ("a mesh must be a full grid", lambda: mf.DeviceMesh([[0, 1], [2]])),
    ("found 3 for shape (2,)", lambda: mf.DeviceMesh((2,), ("a",), ranks=[0, 1, 2])),
    ("made of ranks: found 'abc'", lambda: mf.DeviceMesh("abc")),
    ("made of ranks: found None", lambda: mf.DeviceMesh(None)),
    ("made of ranks: found 2.0", lambda: mf.DeviceMesh((2.0, 4), ("a", "b"))),
    ("made of ranks: found True", lambda: mf.DeviceMesh([True, False])),
    *[
        (f"a mesh is made of ranks: found {found}", lambda v=v, names=names: mf.DeviceMesh(v, names, ranks=[0]))
        for names in ((), ("a",))
        for v, found in (("x", "'x'"), (None, "None"), ([None], "None"), ([[0]], "[0]"), ([2.5], "2.5"))
    ],
    *[("made of ranks: found ", lambda v=v: mf.DeviceMesh((v,), ("a",))) for v in (np.ones(2), torch.ones(2))],
    ("at most 1048576", lambda: mf.DeviceMesh((10**12,), ("a",))),
    ("found 1000000000 ranks, needed at most 1048576", lambda: mf.DeviceMesh(range(10**9), ("a",))),
    ("at most 1048576", lambda: mf.DeviceMesh((2,), ("a",), ranks=range(10**9))),
    ("at most 1048576", lambda: mf.DeviceMesh(torch.empty(10**10, device="meta"))),
    ("found a meta tensor", lambda: mf.DeviceMesh(torch.empty(2, device="meta"))),
    ("made of ranks: found '3'", lambda: mf.DeviceMesh((2,), ("a",), ranks=3)),  # type: ignore[arg-type]
    *[
        (f"the axes of a link: found {v!r}, needed a tuple of names", lambda v=v: MESH.link(v))
        for v in (None, 3, "dp", {"dp": 1})
    ],
    ("no such axis of DeviceMesh((2, 4), ('dp', 'tp')): found 3", lambda: MESH.link((3,))),
    ("no such axis of DeviceMesh((2, 4), ('dp', 'tp')): found 'zz'", lambda: MESH.axis_size("zz")),
    ("no such rank of DeviceMesh((2, 4), ('dp', 'tp')): found 99", lambda: MESH.coordinate(99)),
    *[("a link's bandwidth", lambda v=v: mf.Link(v, 0)) for v in (0, -1, float("nan"), float("inf"), "a", None, True)],
    *[("a link's latency", lambda v=v: mf.Link(1e9, v)) for v in (-1, float("nan"), 1j)],
]


@pytest.mark.parametrize(("text", "make"), MESHES, ids=[f"{i}-{text}" for i, (text, _) in enumerate(MESHES)])
def test_malformed_meshes_are_errors(text: str, make: Callable[[], Any]) -> None:
    raises(text, make)


@pytest.mark.parametrize(
    ("devices", "names", "wanted"),
    [
        # A range holds ranks, however many; so does what a script calls list(range(world)) of a world of one.
        *[(kind(n), ("a",), ((n,), range(n))) for n in (1, 2, 4) for kind in (range, lambda n: [*range(n)])],
        (range(2, 4), ("a",), ((2,), [2, 3])),
        (range(1, 2), ("a",), ((1,), [1])),
        (array("i", [0, 1]), None, ((2,), [0, 1])),
        ((np.int64(2), 2), ("a", "b"), ((2, 2), range(4))),
        ((np.int32(3),), ("a",), ((3,), range(3))),
        (np.int64(3), ("a",), ((3,), range(3))),
        ([np.int64(3)], None, ((1,), [3])),
        (np.array([3]), ("a",), ((1,), [3])),
        (torch.tensor([0]), ("a",), ((1,), [0])),
    ],
)
def test_meshes_are_made_of_every_form_of_arguments(devices: Any, names: Any, wanted: Any) -> None:
    mesh = mf.DeviceMesh(devices, names)
    assert (mesh.shape, mesh.ranks) == (wanted[0], tuple(wanted[1]))


@pytest.mark.parametrize(
    "name", ["dp-1", "a.b", "'", '"""', "\\", "{x}", "%s", "<b>", "&amp;", "é", "数", "#", "None", "0", "total"]
)
def test_other_names_of_axes_are_fine(name: str) -> None:
    """In what is printed, and in the Python of a definition and of its programs."""
    mesh = mf.DeviceMesh((2, 2), (name, "tp"), links={name: mf.Link(1e9, 0), "tp": mf.Link(1e10, 0)})
    with mf.FusionDefinition() as fd:
        x = fd.define_tensor([8, 16])
        fd.add_output(fd.ops.sum(x, [0]))
        fd.mesh_split(x, mesh, [[mf.Split(2, name), "tp"], None])
    again = rebuilt(fd)
    assert repr(again) == repr(fd)
    assert torch.equal(again.simulate([X + 1])[0], fd.simulate([X + 1])[0])
    assert name in str(fd.bill()) and name in {e["axes"] for e in fd.bill().to_dict()["entries"]}
    assert html.escape(name) in page([fd.compile()])


@pytest.mark.parametrize("names", [("DIDx", "tp"), ("DIDz", "DIDy"), ("DIDy", "DIDx")])
def test_axes_named_as_parallel_types_print_are_other_axes(names: tuple[str, str]) -> None:
    fd, x = define()
    fd.add_output(fd.ops.relu(x))
    x.set_device_mesh(mf.DeviceMesh((2, 4), names))
    x.outer_split(0, 4)
    x.axis(0).parallelize(ParallelType.mesh_x)
    assert str(fd.compile().sharded.shardings[0]) == f"[{names[1]}, -]"


@pytest.mark.parametrize("mesh", [None, "dp", 3.5, object, {}, [0, "a"], [0, 0]], ids=str)
def test_what_is_no_mesh(mesh: Any) -> None:
    fd, x = define()
    raises("mesh", lambda: fd.mesh_split(x, mesh, [None, None]))
    raises("mesh", lambda: x.set_device_mesh(mesh))
    raises("mesh", lambda: fd.shard(x, [Shard(0)], mesh))


def _parallel(x: mf.TensorView, factor: int, kind: ParallelType) -> mf.TensorView:
    x.set_device_mesh(MESH)
    x.outer_split(0, factor)
    x.axis(0).parallelize(kind)
    return x


VIEWS: list[tuple[str, Callable[[mf.TensorView, mf.TensorView], Any]]] = [
    *[("axis of x (t0): no such axis", lambda x, y, v=v: x.axis(v)) for v in (2, -3, "a", None, True)],
    ("outer_split: no such axis", lambda x, y: x.outer_split(9, 2)),
    *[("split: factor", lambda x, y, v=v: x.outer_split(0, v)) for v in (0, -1, 2.0, None)],
    (
        "outer_split: axis 0 is parallelized",
        lambda x, y: _parallel(x, 4, ParallelType.mesh_x).outer_split(0, 2),
    ),
    ("must split evenly: found size 4 by 3", lambda x, y: x.outer_split(0, 4).inner_split(0, 3)),
    *[("parallelize", lambda x, y, v=v: x.axis(0).parallelize(v)) for v in ("x", None, 1)],
    (
        "parallelize: the axis is bound already",
        lambda x, y: _parallel(x, 4, ParallelType.mesh_x).axis(0).parallelize(ParallelType.mesh_y),
    ),
    ("a position is named twice", lambda x, y: x.reorder({0: 1, 1: 1})),
    *[("reorder", lambda x, y, v=v: x.reorder(v)) for v in ({0: 7}, "ab", [0, 0], None, {"a": 0})],
    *[("rfactor of y (t1): only reduction axes", lambda x, y, v=v: y.rfactor(v)) for v in ([], [0])],
    *[("rfactor", lambda x, y, v=v: y.rfactor(v)) for v in (0, None, [7])],
    *[("set_allocation_domain of x (t0)", lambda x, y, v=v: x.set_allocation_domain(v)) for v in (None, [0, 1], [])],
    ("of every dim", lambda x, y: x.set_allocation_domain([x.axis(0)])),
    ("set_allocation_domain of x (t0)", lambda x, y: x.set_allocation_domain(y.get_loop_domain())),
    ("swizzle1d: no such axis", lambda x, y: x.swizzle1d(9, ParallelType.mesh_x)),
    *[("overlap of y (t1): chunks", lambda x, y, v=v: x.fd.overlap(y, v)) for v in (0, -1, 2.0, "a", None, 2**70)],
    ("x (t0) cannot be iterated over: found 2 dims, needed an op", lambda x, y: list(x)),
    ("x (t0) cannot be written to: found [0] = ..., needed an op", lambda x, y: operator.setitem(x, 0, 1.0)),
    ("a value of a definition has no truth value", lambda x, y: bool(x > 0)),
    ("a value of a definition has no truth value", lambda x, y: bool(x.size(0))),
    *[("size of x (t0): no such dim", lambda x, y, v=v: x.size(v)) for v in (5, -3, "a")],
    *[("size of x (t0): no such dim", lambda x, y, v=v: x.shape[v]) for v in (5, -3, "a")],
    *[
        ("a value of a definition is no number: found TensorView(t0", lambda x, y, f=f: f(x))
        for f in (int, float, complex, np.array, math.sqrt, range, lambda x: [1, 2][x])
    ],
    *[
        ("a value of a definition is no number: found Val(s", lambda x, y, f=f: f(x.shape[0]))
        for f in (int, float, np.asarray, math.sqrt, range)
    ],
]


@pytest.mark.parametrize(("text", "call"), VIEWS, ids=[f"{i}-{text}" for i, (text, _) in enumerate(VIEWS)])
def test_calls_of_tensor_views(text: str, call: Callable[[mf.TensorView, mf.TensorView], Any]) -> None:
    fd, x = define()
    y = fd.ops.sum(x, [1])
    raises(text, lambda: call(x, y))


COMPILING: list[tuple[str, Callable[[mf.TensorView], Any]]] = [
    ("mesh_z on a mesh of 2 axes", lambda x: _parallel(x, 2, ParallelType.mesh_z)),
    (
        "dim 0: a factor of 2 cannot be bound to mesh axis 'tp'",
        lambda x: _parallel(x, 2, ParallelType.mesh_x),
    ),
    (
        "mesh axis 'tp' is used twice: found on dims 0 and 1",
        lambda x: _parallel(x, 4, ParallelType.mesh_x).outer_split(2, 4).axis(2).parallelize(ParallelType.mesh_x),
    ),
    (
        "tensor x (t0) is parallelized and has no mesh",
        lambda x: x.outer_split(0, 4).axis(0).parallelize(ParallelType.mesh_x),
    ),
]


@pytest.mark.parametrize(("text", "annotate"), COMPILING, ids=[text for text, _ in COMPILING])
def test_annotations_that_fit_no_mesh(text: str, annotate: Callable[[mf.TensorView], Any]) -> None:
    fd, x = define()
    fd.add_output(fd.ops.relu(x))
    annotate(x)
    raises(text, lambda: fd.simulate([X]))


def _dp(fd: mf.FusionDefinition, x: mf.TensorView) -> None:
    fd.mesh_split(x, MESH, ["dp", None])


CONTRADICTIONS: list[tuple[Callable[..., Any], Callable[..., Any]]] = [
    (_dp, lambda fd, x: fd.mesh_split(x, MESH, ["tp", None])),
    (_dp, lambda fd, x: fd.mesh_split(x, MESH, [None, None])),
    (_dp, lambda fd, x: fd.mesh_split(x, mf.DeviceMesh((2, 4), ("tp", "dp")), ["dp", None])),
    (_dp, lambda fd, x: fd.shard(x, [Replicate(), Shard(0)], MESH)),
    (_dp, lambda fd, x: x.set_device_mesh(mf.DeviceMesh([0, 1]))),
    (lambda fd, x: x.set_device_mesh(mf.DeviceMesh([0, 1])), _dp),
    (lambda fd, x: x.set_device_mesh(mf.DeviceMesh([0, 1])), lambda fd, x: x.set_device_mesh(MESH)),
    (lambda fd, x: _parallel(x, 4, ParallelType.mesh_x), _dp),
]


@pytest.mark.parametrize(("first", "second"), CONTRADICTIONS)
@pytest.mark.parametrize("after_ops", [False, True])
def test_contradicting_annotations_are_an_error(
    first: Callable[..., Any], second: Callable[..., Any], after_ops: bool
) -> None:
    fd, x = define()
    first(fd, x)
    if after_ops:
        fd.add_output(fd.ops.relu(x))
    raises("tensor x (t0) is annotated twice", lambda: second(fd, x))


def test_a_contradiction_names_both_and_the_first_line() -> None:
    fd, x = define()
    fd.mesh_split(x, MESH, ["dp", None])
    with pytest.raises(mf.DefinitionError) as caught:
        fd.mesh_split(x, MESH, [None, "tp"])
    mesh = "DeviceMesh((2, 4), ('dp', 'tp'))"
    line = caught.traceback[0].lineno
    assert str(caught.value) == (
        f"tensor x (t0) is annotated twice: found [-, tp] on {mesh} after [dp, -] on {mesh} at {HERE}:{line - 1}, "
        "needed one annotation, or equal ones. Remove one, or reshard with fd.ops.set and annotate its result. "
        f"(at {HERE}:{line + 1})"
    )
