"""Outputs that nobody places: left where most is saved, as if the user had asked for just that."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import pytest

import meshfuse as mf
from defining import graph_of
from meshfuse.definition.tensor_view import TensorView
from meshfuse.ops.values import TensorRef
from meshfuse.plans.plan_cache import packed, unpacked
from meshfuse.sharding.value import Sharding
from meshfuse.testing import assert_same_as_unsharded, inputs_for

MESH = mf.DeviceMesh((2, 4), ("x", "y"))
Dim = str | tuple[str, ...] | None
Spec = list[Dim]
SPECS: list[Spec] = [
    [None, None], ["x", None], [None, "x"], ["y", None], [None, "y"], ["x", "y"], ["y", "x"], [("x", "y"), None],
    [None, ("x", "y")],
]  # fmt: skip


def split_some(fd: mf.FusionDefinition, mesh: mf.DeviceMesh, *said: tuple[mf.TensorView, Spec | None]) -> None:
    """Annotate the tensors that something is said of."""
    for tensor, spec in said:
        if spec is not None:
            fd.mesh_split(tensor, mesh, spec)  # type: ignore[arg-type]


def product(left: Spec, right: Spec, end: Spec | None = None, size: int = 64) -> mf.FusionDefinition:
    with mf.FusionDefinition() as fd:
        x, w = fd.define_tensor([size, 2 * size]), fd.define_tensor([2 * size, 4 * size])
        y = fd.ops.matmul(x, w)
        fd.add_output(y)
        split_some(fd, MESH, (x, left), (w, right), (y, end))
    return fd


def as_spec(sharding: Sharding) -> Spec:
    return [tuple(split.axis for split in layout if split.axis) or None for layout in sharding.dims]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("left", SPECS)
def test_to_say_where_an_output_is_left_saves_nothing(left: Spec) -> None:
    for right in SPECS:
        fd, asked = product(left, right), product(left, right)
        (end,) = fd.compile().output_shardings()
        asked.shard(TensorView(asked, TensorRef(asked.recording.outputs[0])), end)
        assert fd.bill().total <= asked.bill().total, (right, end)


SCATTERED: list[tuple[Spec, Spec, float]] = [
    ([None, "x"], ["x", None], 64 * 256 * 4 / 2),  # the sum among two ranks
    # x's rows to its columns over x, all-gathered over y; the sum of 64 columns scattered among two
    ([("x", "y"), None], ["x", "y"], 64 * 128 * 4 / 16 + 64 * 64 * 4 * 3 / 4 + 64 * 64 * 4 / 2),
]


@pytest.mark.parametrize("left, right, wire", SCATTERED)
def test_a_sum_is_scattered_to_where_operands_were_moved_for_it_to_be(left: Spec, right: Spec, wire: float) -> None:
    assert product(left, right).bill().total == wire


@pytest.mark.parametrize("left, right", list(itertools.product(SPECS[:7:2], SPECS[1:7])))
def test_numbers_and_stored_plans(left: Spec, right: Spec) -> None:
    fd = product(left, right, size=8)
    assert_same_as_unsharded(fd, inputs_for(fd))
    plan = fd.compile().planned
    found = unpacked(packed(plan), graph_of(fd))
    assert (str(found), found.choices, found.shardings) == (str(plan), plan.choices, plan.shardings)


def test_a_sum_that_nobody_places_is_left_scattered() -> None:
    """That is half of reducing it, as Megatron-LM does where the next layer wants it whole."""
    with mf.FusionDefinition() as fd:
        x, w, v = fd.define_tensor([64, 64]), fd.define_tensor([64, 256]), fd.define_tensor([256, 64])
        fd.mesh_split(w, MESH, [None, "y"])
        fd.mesh_split(v, MESH, ["y", None])
        fd.add_output(fd.ops.matmul(fd.ops.gelu(fd.ops.matmul(x, w)), v))
    assert as_spec(fd.compile().output_shardings()[0]) == [("y",), None]


def test_several_outputs_are_left_together() -> None:
    """Each as if it were annotated, one of them read by the other's op."""

    def two(ends: Sequence[Spec] = ()) -> mf.FusionDefinition:
        with mf.FusionDefinition() as fd:
            x, w, v = fd.define_tensor([64, 128]), fd.define_tensor([128, 256]), fd.define_tensor([256, 512])
            for tensor, spec in ((x, [None, "x"]), (w, ["x", None]), (v, [None, "x"])):
                fd.mesh_split(tensor, MESH, spec)
            first = fd.ops.matmul(x, w)
            made = (first, fd.ops.matmul(fd.ops.gelu(first), v))
            for result in made:
                fd.add_output(result)
            for result, end in zip(made, ends, strict=False):
                fd.mesh_split(result, MESH, end)  # type: ignore[arg-type]
        return fd

    free = two()
    ends = [as_spec(end) for end in free.compile().output_shardings()]
    assert free.bill().total <= two(ends).bill().total


LINE = mf.DeviceMesh((8,), ("y",))
ALONG: list[Spec] = [[None, None], ["y", None], [None, "y"]]


def on_a_line(left: Spec, right: Spec, end: Spec | None) -> mf.FusionDefinition:
    """A product over eight ranks, its terms perhaps on different ones."""
    with mf.FusionDefinition() as fd:
        x, w = fd.define_tensor([512, 1024]), fd.define_tensor([1024, 1024])
        y = fd.ops.matmul(x, w)
        fd.add_output(y)
        split_some(fd, LINE, (x, left), (w, right), (y, end))
    return fd


def mlp_on_a_line(left: Spec, right: Spec, end: Spec | None) -> mf.FusionDefinition:
    """Two products with many rows, so that ranks had better gather the weights in part."""
    with mf.FusionDefinition() as fd:
        x, w, v = fd.define_tensor([4096, 256]), fd.define_tensor([256, 1024]), fd.define_tensor([1024, 256])
        y = fd.ops.matmul(fd.ops.gelu(fd.ops.matmul(x, w)), v)
        fd.add_output(y)
        split_some(fd, LINE, (w, left), (v, right), (y, end))
    return fd


@pytest.mark.parametrize("build", [on_a_line, mlp_on_a_line])
@pytest.mark.parametrize("left, right", list(itertools.product(ALONG[1:], ALONG[1:])))
def test_no_output_in_parts_costs_more_than_one_that_is_placed(build: Any, left: Spec, right: Spec) -> None:
    """Where an output is not whole, it is where it costs least: not over a part of an axis, nor moved at last."""
    fd = build(left, right, None)
    if as_spec(fd.compile().output_shardings()[0]) != [None, None]:
        assert fd.bill().total <= min(build(left, right, end).bill().total for end in ALONG)
