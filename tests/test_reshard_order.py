"""Readers of one tensor in several shardings: what comes first serves the others, whoever stands first."""

from __future__ import annotations

import itertools

import pytest

import meshfuse as mf
from laws import permuting_independent_ops_commutes
from meshfuse.testing import assert_same_as_unsharded, inputs_for

MESH = mf.DeviceMesh((2, 4), ("tp", "cp"))


def read_by_a_product_and_a_reshape() -> mf.FusionDefinition:
    """The reshape needs all of t, the product would be content with a part of its columns."""
    with mf.FusionDefinition() as fd:
        x, t = fd.define_tensor([6, 4], dtype=mf.DataType.Double), fd.define_tensor([4, 6], dtype=mf.DataType.Double)
        rows = fd.define_tensor([6], dtype=mf.DataType.Int)
        groups = fd.ops.iota(2, start=2, step=2, dtype=mf.DataType.Int32)
        made = fd.call("grouped_mm", [x, t, groups], {})
        flat = fd.ops.reshape(t, [24])
        for out in (fd.ops.sum(made, [0]), fd.ops.complex(flat, flat), fd.ops.index_select(made, rows, 0)):
            fd.add_output(out)
        fd.mesh_split(t, MESH, [["cp", "tp"], None])
    return fd


@pytest.mark.parametrize("seed", range(6))
def test_what_moves_does_not_depend_on_which_reader_is_the_first(seed: int) -> None:
    permuting_independent_ops_commutes(read_by_a_product_and_a_reshape().compile().planned, seed)


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))), ids=str)
def test_what_all_readers_need_comes_once(order: tuple[int, ...]) -> None:
    with mf.FusionDefinition() as fd:
        x = fd.define_tensor([16, 16])
        fd.mesh_split(x, MESH, [["cp", "tp"], None])
        specs = [[None, None], [None, "tp"], ["cp", None]]
        for place in order:
            made = fd.ops.set(x)
            fd.mesh_split(made, MESH, specs[place])
            fd.add_output(made)
    assert fd.bill().total == 16 * 16 * 4 * 7 / 8, "one gather of x; the others are slices of it"
    assert_same_as_unsharded(fd, inputs_for(fd, 0))
