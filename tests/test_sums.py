"""Sums of which some terms lie on the ranks unreduced: added in whatever order, these are reduced together."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import meshfuse as mf
from defining import graph_of, random_inputs
from meshfuse.plans import plan_cache
from meshfuse.rewrites.reassociate_sums import Regrouped
from meshfuse.testing import assert_same_as_unsharded

MESH = mf.DeviceMesh((8,), ("tp",))
T = mf.TensorView
ROWS, WIDTH = 64, 32
# One all-reduce of the result: 2 * 7/8 of its bytes.
ONE = 2 * 7 / 8 * ROWS * WIDTH * 4


def product(fd: mf.FusionDefinition) -> T:
    """Of operands that are split where they are reduced, with little to gather: it is best left unreduced."""
    a, b = fd.define_tensor([ROWS, 4 * WIDTH]), fd.define_tensor([4 * WIDTH, WIDTH])
    fd.mesh_split(a, MESH, [None, "tp"])
    fd.mesh_split(b, MESH, ["tp", None])
    return fd.ops.matmul(a, b)


def whole(fd: mf.FusionDefinition) -> T:
    made = fd.define_tensor([ROWS, WIDTH])
    fd.mesh_split(made, MESH, [None, None])
    return made


def defined(add: Callable[..., T]) -> mf.FusionDefinition:
    """Two terms that are whole and two products, added so."""
    with mf.FusionDefinition() as fd:
        x, y, a, b = whole(fd), whole(fd), product(fd), product(fd)
        out = add(fd, x, y, a, b)
        fd.mesh_split(out, MESH, [None, None])
        fd.add_output(out)
    return fd


ORDERS: dict[str, Callable[..., T]] = {
    "x + a + b": lambda fd, x, y, a, b: x + a + b,
    "a + x + b": lambda fd, x, y, a, b: a + x + b,
    "a + b + x": lambda fd, x, y, a, b: a + b + x,
    "a + (x + b)": lambda fd, x, y, a, b: a + (x + b),
    "(x + a) + (y + b)": lambda fd, x, y, a, b: (x + a) + (y + b),
    "x + (a + (y + b))": lambda fd, x, y, a, b: x + (a + (y + b)),
    "x + a + y + b": lambda fd, x, y, a, b: x + a + y + b,
    "x + 2a + b": lambda fd, x, y, a, b: x + a * 2.0 + b,
    "x + a + b, turned": lambda fd, x, y, a, b: x + fd.ops.permute(fd.ops.reshape(a, [WIDTH, ROWS]), [1, 0]) + b,
}


@pytest.mark.parametrize("order", ORDERS)
def test_terms_on_the_ranks_are_reduced_together(order: str) -> None:
    fd = defined(ORDERS[order])
    assert fd.bill().total == ONE
    assert_same_as_unsharded(fd, random_inputs(fd))


def test_so_are_those_of_many_layers() -> None:
    with mf.FusionDefinition() as fd:
        x = whole(fd)
        for _ in range(160):
            x = fd.ops.tanh(x + product(fd) + product(fd))
        fd.add_output(x)
    assert fd.bill().total <= 160 * ONE


def test_a_sum_with_a_name_is_what_it_is() -> None:
    """One that is an output, annotated, or read elsewhere is made as it is written."""

    def output(fd: mf.FusionDefinition, x: T, y: T, a: T, b: T) -> T:
        inner = x + a
        fd.add_output(inner)
        return inner + b

    def annotated(fd: mf.FusionDefinition, x: T, y: T, a: T, b: T) -> T:
        inner = x + a
        fd.mesh_split(inner, MESH, ["tp", None])
        return inner + b

    def read_twice(fd: mf.FusionDefinition, x: T, y: T, a: T, b: T) -> T:
        inner = x + a
        return inner + b * fd.ops.tanh(inner)

    def doubled(fd: mf.FusionDefinition, x: T, y: T, a: T, b: T) -> T:
        inner = x + a + b
        return inner + inner

    for add in (output, annotated, read_twice, doubled):
        fd = defined(add)
        assert_same_as_unsharded(fd, random_inputs(fd))


def test_sums_of_other_types_and_shapes_are_left_alone() -> None:
    def wider(fd: mf.FusionDefinition, x: T, y: T, a: T, b: T) -> T:
        row = fd.define_tensor([WIDTH])
        return x + a + row + b

    def double(fd: mf.FusionDefinition, x: T, y: T, a: T, b: T) -> T:
        return fd.ops.cast(fd.ops.cast(x + a, mf.DataType.Double) + b, mf.DataType.Float)

    for add in (wider, double):
        fd = defined(add)
        assert_same_as_unsharded(fd, random_inputs(fd))


def test_a_plan_with_another_order_is_stored_and_made_again() -> None:
    fd = defined(ORDERS["(x + a) + (y + b)"])
    plan = fd.compile().planned
    assert [type(rewriting) for rewriting in plan.graph.rewritings] == [Regrouped]
    again = plan_cache.unpacked(plan_cache.packed(plan), graph_of(fd))
    assert str(again) == str(plan)


# maxima and minima ------------------------------------------------------------------------------------------------


def largest(fd: mf.FusionDefinition, name: str, dtype: mf.DataType) -> T:
    """The greatest or least along a split dim."""
    made = fd.define_tensor([ROWS, 2, 4 * WIDTH], dtype=dtype)
    fd.mesh_split(made, MESH, [None, None, "tp"])
    return getattr(fd.ops, name)(made, [-1])


FOLDS: dict[str, Callable[..., T]] = {
    "of two": lambda fold, along, a, b, x: fold(a, b),
    "with what is whole": lambda fold, along, a, b, x: fold(fold(a, x), b),
    "of three, one of them twice": lambda fold, along, a, b, x: fold(fold(a, x), fold(b, a)),
    "of the other dim too": lambda fold, along, a, b, x: fold(along(a, [1], True), b),
}


@pytest.mark.parametrize("dtype", [mf.DataType.Float, mf.DataType.Int32, mf.DataType.Double])
@pytest.mark.parametrize("name", ["max", "min"])
@pytest.mark.parametrize("order", FOLDS)
def test_maxima_on_the_ranks_are_reduced_together(order: str, name: str, dtype: mf.DataType) -> None:
    with mf.FusionDefinition() as fd:
        a, b = largest(fd, name, dtype), largest(fd, name, dtype)
        x = fd.define_tensor([ROWS, 2], dtype=dtype)
        out = FOLDS[order](getattr(fd.ops, name + "imum"), getattr(fd.ops, name), a, b, x)
        fd.mesh_split(out, MESH, [None, None])
        fd.add_output(out)
    assert fd.bill().total == 2 * 7 / 8 * ROWS * 2 * dtype.itemsize
    generator = torch.Generator().manual_seed(0)
    kinds = [fd.recording.tensors[i].type for i in fd.recording.input_tensors()]
    tensors = [torch.randint(-99, 99, t.shape, generator=generator).to(getattr(torch, t.dtype.value)) for t in kinds]
    assert_same_as_unsharded(fd, tensors)


DTYPES = {
    getattr(torch, dtype): mf.DataType(dtype)
    for dtype in ("float64", "float32", "float16", "complex128", "int64", "int32", "bool")
}


@pytest.mark.filterwarnings("ignore:Casting complex values")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("of", [torch.float64, torch.complex128, torch.int64], ids=str)
def test_terms_of_a_sum_are_added_before_they_are_of_another_type(of: torch.dtype, dtype: torch.dtype) -> None:
    """By a sum over more dims, or a cast: halves are no whole numbers, but their sum is."""
    made: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
        "sum": (lambda fd, y: fd.ops.sum(y, [0], dtype=DTYPES[dtype]), lambda y: y.sum(0, dtype=dtype)),
        "over all": (lambda fd, y: fd.ops.sum(y, dtype=DTYPES[dtype]), lambda y: y.sum(dtype=dtype)),
        "kept": (lambda fd, y: fd.ops.sum(y, [1], True, DTYPES[dtype]), lambda y: y.sum(1, True, dtype=dtype)),
        "cast": (lambda fd, y: fd.ops.cast(y, DTYPES[dtype]), lambda y: y.to(dtype)),
    }
    halves = torch.tensor([0.5, 0.5, -1.5, 2.5, 40000.5, -40000.5], dtype=torch.float64).repeat(4, 1)
    whole = (halves if of.is_floating_point or of.is_complex else 2 * halves).to(of).reshape(4, 3, 2)
    for name, (ours, theirs) in made.items():
        with mf.FusionDefinition() as fd:
            x = fd.define_tensor([4, 3, 2], dtype=DTYPES[of])
            fd.mesh_split(x, mf.DeviceMesh((2,), ("a",)), [None, None, "a"])
            fd.add_output(ours(fd, fd.ops.sum(x, [2])))
        wanted = theirs(whole.sum(2))
        (found,) = fd.simulate([whole])
        assert found.dtype == wanted.dtype and torch.equal(found, wanted), (name, found, wanted)


@pytest.mark.parametrize("dtype", [torch.int64, torch.float64], ids=str)
@pytest.mark.parametrize("cast", [False, True])
def test_sums_of_integers_wrap_where_their_own_type_ends(dtype: torch.dtype, cast: bool) -> None:
    with mf.FusionDefinition() as fd:
        x = fd.define_tensor([4, 2], dtype=mf.DataType.Int32)
        fd.mesh_split(x, mf.DeviceMesh((2,), ("a",)), [None, "a"])
        made = fd.ops.sum(x, [1], dtype=mf.DataType.Int32)
        made = fd.ops.cast(made, DTYPES[dtype]) if cast else made
        fd.add_output(fd.ops.sum(made, [0], dtype=DTYPES[dtype]))
    large = torch.full((4, 2), 2**31 - 5, dtype=torch.int32)
    (found,) = fd.simulate([large])
    assert torch.equal(found, large.sum(1, dtype=torch.int32).sum(0, dtype=dtype))
