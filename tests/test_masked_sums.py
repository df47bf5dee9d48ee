"""Sums over ranks that a mask or a pad picks from: zeros beside them leave them sums, other numbers do not."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

import meshfuse as mf
from meshfuse.testing import assert_same_as_unsharded, inputs_for

MESH = mf.DeviceMesh((4,), ("tp",))
S, D, H = 12, 8, 16
DOUBLE = mf.DataType.Double
Fd, Tensor = mf.FusionDefinition, mf.TensorView


def tensor(fd: Fd, *shape: int, split: int | None = None) -> Tensor:
    made = fd.define_tensor(list(shape), dtype=DOUBLE)
    fd.mesh_split(made, MESH, ["tp" if d == split else None for d in range(len(shape))])
    return made


def row_parallel(fd: Fd) -> Tensor:
    """h @ w, whose terms lie on the ranks."""
    return fd.ops.matmul(tensor(fd, S, H, split=1), tensor(fd, H, D, split=0))


def mask(fd: Fd) -> Tensor:
    return fd.ops.gt(tensor(fd, S, 1), 0.0)


def summed_where(fd: Fd, made: Tensor) -> mf.Bill:
    """The bill where the made tensor is read summed over its rows, on all ranks."""
    total = fd.ops.sum(made, [0])
    fd.mesh_split(total, MESH, [None])
    fd.add_output(total)
    return fd.bill()


PICKED: dict[str, Callable[[Fd], Tensor]] = {
    "where a mask holds": lambda fd: fd.ops.where(mask(fd), row_parallel(fd), 0.0),
    "where it does not": lambda fd: fd.ops.where(mask(fd), 0, row_parallel(fd)),
    "of two sums": lambda fd: fd.ops.where(mask(fd), row_parallel(fd), row_parallel(fd)),
    "padded": lambda fd: fd.ops.pad(row_parallel(fd), [0, 0, 3, 1]),
    "padded and cut": lambda fd: fd.ops.pad(row_parallel(fd), [0, 0, -3, 2], 0.0),
    "by a number of the condition": lambda fd: fd.ops.where(True, row_parallel(fd), 0.0),
}
OTHER: dict[str, Callable[[Fd], Tensor]] = {
    "ones": lambda fd: fd.ops.where(mask(fd), row_parallel(fd), 1.0),
    "a tensor": lambda fd: fd.ops.where(mask(fd), row_parallel(fd), tensor(fd, S, D)),
    "a sum as the condition": lambda fd: fd.ops.where(fd.ops.gt(row_parallel(fd), 0.0), tensor(fd, S, D), 0.0),
    "padded by -0.0": lambda fd: fd.ops.pad(row_parallel(fd), [0, 0, -3, 2], -0.0),
    "padded by ones": lambda fd: fd.ops.pad(row_parallel(fd), [0, 0, 3, 1], 1.0),
}


@pytest.mark.parametrize("name", PICKED)
def test_zeros_leave_a_sum_a_sum(name: str) -> None:
    with mf.FusionDefinition() as fd:
        bill = summed_where(fd, PICKED[name](fd))
    assert_same_as_unsharded(fd, inputs_for(fd))
    assert bill.total == 2 * 3 / 4 * D * 8


@pytest.mark.parametrize("name", OTHER)
def test_other_numbers_and_conditions_need_it_reduced(name: str) -> None:
    with mf.FusionDefinition() as fd:
        bill = summed_where(fd, OTHER[name](fd))
    assert_same_as_unsharded(fd, inputs_for(fd))
    assert bill.total > 2 * 3 / 4 * D * 8


def test_a_number_that_a_call_tells_needs_it_reduced() -> None:
    with mf.FusionDefinition() as fd:
        fill = fd.define_scalar(dtype=DOUBLE)
        bill = summed_where(fd, fd.ops.where(mask(fd), row_parallel(fd), fill))
    rows, w, there = (torch.randn(*shape, dtype=torch.float64) for shape in ((S, H), (H, D), (S, 1)))
    (found,) = fd(2.5, there, rows, w)
    torch.testing.assert_close(found, torch.where(there > 0, rows @ w, 2.5).sum(0))
    assert bill.total > 2 * 3 / 4 * D * 8


def relu_twice(fd: Fd) -> None:
    """The gradient of a weight between two layers, whose second one is split by columns."""
    x, w1, w2 = tensor(fd, S, D), tensor(fd, D, D), tensor(fd, D, H, split=1)
    y = fd.ops.matmul(fd.ops.relu(fd.ops.matmul(x, w1)), w2)
    (grad,) = fd.grad(fd.ops.sum(y * y), [w1])
    fd.mesh_split(grad, MESH, [None, None])
    fd.add_output(grad)


def test_the_gradient_of_relu_passes_sums() -> None:
    """What is reduced is the weight's gradient, not that of the rows."""
    with mf.FusionDefinition() as fd:
        relu_twice(fd)
    assert_same_as_unsharded(fd, inputs_for(fd))
    assert fd.bill().total == 2 * 3 / 4 * D * D * 8
