"""Slices with steps of sharded dims: what moves is little more than the result."""

from __future__ import annotations

import itertools

import pytest
import torch

import meshfuse as mf

STEPS = [(24, 0, 24, 3), (24, 2, 20, 3), (24, 5, 24, 4), (23, 1, 23, 2), (24, 0, 12, 2), (1024, 7, 1000, 5)]


@pytest.mark.parametrize("n,start,stop,step", STEPS)
@pytest.mark.parametrize("backward", [False, True])
def test_a_slice_with_steps_of_a_sharded_dim_moves_elements_of_the_result_and_less_than_a_step_of_each_block(
    n: int, start: int, stop: int, step: int, backward: bool
) -> None:
    ranks, row = 4, 16 * 4
    fd = mf.FusionDefinition()
    x = fd.define_tensor([n, 16], dtype=mf.DataType.Float)
    y = fd.ops.slice(x, [start, 0], [stop, 16], [step, 1])
    gradients = fd.grad([fd.ops.sum(fd.ops.mul(y, y))], [x]) if backward else []
    for out in (y, *gradients):
        fd.add_output(out)
        fd.mesh_split(out, mf.DeviceMesh((ranks,), ("x",)), ["x", None])
    fd.mesh_split(x, mf.DeviceMesh((ranks,), ("x",)), ["x", None])
    kept, passes = len(range(start, stop, step)), 2 if backward else 1
    assert fd.bill().total <= passes * row * (ranks * step + kept) / ranks
    given = torch.randn(n, 16, generator=torch.Generator().manual_seed(0))
    made, *found = fd.simulate([given], check_replicas=True)
    assert torch.equal(made, given[start:stop:step])
    wanted = torch.zeros(n, 16)
    wanted[start:stop:step] = 2 * made
    assert all(torch.equal(gradient, wanted) for gradient in found)


WINDOWS_AND_STEPS = [
    ((8, 24, 1), (0, 64, 8), (0, 16, 1)), ((8, 12, 1), (0, 64, 8), (0, 16, 1)), ((4, 30, 1), (3, 60, 5), (0, 16, 1)),
    ((8, 24, 1), (0, 64, 1), (0, 16, 2)), ((1, 31, 1), (0, 64, 4), (2, 9, 1)), ((5, 29, 1), (7, 64, 8), (1, 16, 3)),
]  # fmt: skip


@pytest.mark.parametrize("bounds", WINDOWS_AND_STEPS, ids=str)
@pytest.mark.parametrize("wanted", ["x", None])
def test_steps_of_whole_dims_are_taken_before_a_window_of_a_sharded_one_moves(
    bounds: tuple[tuple[int, int, int], ...], wanted: str | None
) -> None:
    """Nothing but elements of the result, however many others there are in the window."""
    mesh, shape = mf.DeviceMesh((4,), ("x",)), (32, 64, 16)
    fd = mf.FusionDefinition()
    x = fd.define_tensor(list(shape), dtype=mf.DataType.Float)
    y = fd.ops.slice(x, *map(list, zip(*bounds, strict=True)))
    fd.add_output(y)
    fd.mesh_split(x, mesh, ["x", None, None])
    if wanted is not None:
        fd.mesh_split(y, mesh, [wanted, None, None])
    given = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    made = given[tuple(itertools.starmap(slice, bounds))]
    assert fd.bill().total <= made.numel() * 4 / 4
    assert torch.equal(fd.simulate([given], check_replicas=True)[0], made)
