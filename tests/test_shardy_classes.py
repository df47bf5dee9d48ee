"""Classes of programs in which our plans once moved more than Shardy's, each with what it must not move."""

from __future__ import annotations

import pytest

import meshfuse as mf
from meshfuse.moves.planner import plan
from meshfuse.sharding import Sharding, Split


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
    assert found is not None and len(found.moves) == 1
