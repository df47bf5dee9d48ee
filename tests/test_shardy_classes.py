"""Classes of programs in which our plans once moved more than Shardy's, each with what it must not move."""

from __future__ import annotations

import pytest
import torch

import meshfuse as mf
from meshfuse.graph import specialize
from meshfuse.reshard.search import plan
from meshfuse.sharding import Sharding, Split
from shardy_text import Untranslatable, stablehlo_of
from test_reshard_properties import lacking


@pytest.mark.parametrize("start", [0, 1, 2])
@pytest.mark.parametrize("layout", [[(4, "tp")], [(2, "tp"), (8,), (2, "tp", 2)]])
def test_one_element_of_every_few_of_a_sharded_dim_is_taken_where_it_is(start: int, layout: list[tuple]) -> None:
    """x[start::3]: rotary embeddings take every second element so."""
    fd = mf.FusionDefinition()
    x = fd.define_tensor([96, 5], dtype=mf.DataType.Double)
    fd.add_output(fd.ops.slice(x, [start, 0], [96, 5], [3, 1]))
    fd.mesh_split(x, mf.DeviceMesh((4,), ("tp",)), [layout, None])
    assert fd.bill().total == 0


@pytest.mark.parametrize("n", [4, 8, 64, 4096])
def test_an_axis_is_replaced_by_a_permute_however_small_the_tensor(n: int) -> None:
    """Not by a gather, which is as soon begun and moves twice as much."""
    mesh = mf.DeviceMesh((2, 2), ("x", "y"))
    src, dst = (Sharding.make(mesh, [(Split(2, axis),)], (n,)) for axis in "xy")
    found = plan(src, dst, (n,), 4)
    assert found is not None
    assert found.wire == n / 2 * 4 / 2  # half of the ranks hold what they need


def test_a_sum_wanted_over_more_axes_in_another_order_is_scattered_before_it_is_moved() -> None:
    mesh, shape = mf.DeviceMesh((2, 4), ("x", "y")), (64,)
    src = Sharding.make(mesh, [(Split(4, "y"),)], shape, (Split(2, "x"),), "sum")
    dst = Sharding.make(mesh, [(Split(2, "x"), Split(4, "y"))], shape)
    found = plan(src, dst, shape, 8)
    assert found is not None
    scattered, permuted = 64 / 4 / 2 * 8, 64 / 8 * 8 * 6 / 8  # two of eight ranks end with what they got
    assert found.wire == scattered + permuted


def test_fewer_collectives_are_taken_where_bytes_are_equal() -> None:
    mesh, shape = mf.DeviceMesh((2, 4), ("x", "y")), (64,)
    src = Sharding.make(mesh, [(Split(2, "x"), Split(4, "y"))], shape)
    found = plan(src, Sharding.replicated(mesh, 1), shape, 8)
    assert found is not None and len(found.steps) == 1


@pytest.mark.parametrize("itemsize", [4, 8])
@pytest.mark.parametrize("shape", [(16, 8), (16, 16), (32, 16)], ids=str)
def test_few_elements_on_many_ranks_come_to_those_that_lack_them(shape: tuple[int, int], itemsize: int) -> None:
    """At once, from a few others: not in gathers that move more, as if each rank had to hear from all of them."""
    mesh = mf.DeviceMesh((2, 2, 2, 16), ("x", "y", "z", "w"))
    parts = [Split(2, "w", pre) for pre in (1, 2, 4, 8)]
    src = Sharding.make(mesh, [(Split(2, "y"), parts[2], Split(2, "z"), parts[0]), ()], shape)
    for dim in ((Split(2, "x"), Split(8, "w", 2)), (Split(2, "x"), Split(16, "w"))):
        dst = Sharding.make(mesh, [(Split(2, "y"),), dim], shape)
        found = plan(src, dst, shape, itemsize)
        assert found is not None
        assert found.wire == pytest.approx(lacking(src, dst, shape) * itemsize)


@pytest.mark.parametrize("n", [16, 30, 64])
def test_a_flipped_dim_moves_what_ranks_lack(n: int) -> None:
    """As Shardy's reverse does, by a permutation of the blocks; not by a gather, nor over another dim and back."""
    mesh, given = mf.DeviceMesh((4,), ("x",)), torch.arange(6.0 * n).reshape(n, 6)
    with mf.FusionDefinition() as fd:
        x = fd.define_tensor([n, 6])
        made = fd.ops.reorder_blocks(x, 0, list(range(n))[::-1])
        fd.add_output(made)
        for tensor in (x, made):
            fd.mesh_split(tensor, mesh, ["x", None])
    assert torch.equal(fd.simulate([given])[0], given.flip(0))
    held = [set(part.tolist()) for part in torch.arange(n).chunk(4)]
    lacking = sum(len({n - 1 - i for i in part} - part) for part in held)
    assert fd.bill().total == lacking / 4 * 6 * 4


@pytest.mark.parametrize("op", ["argsort", "cumsum", "cumprod"])
def test_what_needs_a_dim_whole_is_not_judged_as_elementwise(op: str) -> None:
    """Shardy's text of it would be a negation, which moves nothing."""
    fd = mf.FusionDefinition()
    x = fd.define_tensor([8])
    fd.add_output(getattr(fd.ops, op)(x, 0))
    fd.mesh_split(x, mf.DeviceMesh((2,), ("x",)), ["x"])
    with pytest.raises(Untranslatable, match=op):
        stablehlo_of(specialize(fd.recording, {x.id: (8,)}, {}))
