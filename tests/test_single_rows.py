"""A dim of size 1 over an axis, as a batch of one sample: the rank that has it computes, and nothing is sent."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import meshfuse as mf
from meshfuse.testing import assert_same_as_unsharded
from meshfuse.testing.check import inputs_for

Fd, T = mf.FusionDefinition, mf.TensorView
S, D, H = 6, 8, 2


def attention(fd: Fd, x: T, w: T) -> T:
    q, k, v = (fd.ops.permute(fd.ops.reshape(fd.ops.linear(x, w), [1, S, H, D // H]), [0, 2, 1, 3]) for _ in range(3))
    mixed = fd.ops.sdpfa_fwd(q, k, v, is_causal=True)[0]
    return fd.ops.reshape(fd.ops.permute(mixed, [0, 2, 1, 3]), [1, S, D])


def normalised(fd: Fd, x: T, _: T) -> T:
    var, mean = fd.ops.var_mean(x, [-1], correction=0, keepdim=True)
    return (x - mean) * fd.ops.rsqrt(var + 1e-5)


BODIES: dict[str, Callable[[Fd, T, T], T]] = {
    "relu": lambda fd, x, _: fd.ops.relu(x),
    "a row for all": lambda fd, x, w: x + fd.ops.mul(x, fd.ops.sum(w, [0])),
    "its own dims": lambda fd, x, _: x * fd.ops.sum(x, [-1], keepdim=True),
    "linear": lambda fd, x, w: fd.ops.linear(x, w),
    "matmul": lambda fd, x, w: fd.ops.matmul(x, w),
    "batched": lambda fd, x, _: fd.ops.matmul(fd.ops.matmul(x, fd.ops.permute(x, [0, 2, 1])), x),
    "norm": normalised,
    "softmax": lambda fd, x, _: fd.ops.softmax(x, -1),
    "attention": attention,
    "joined": lambda fd, x, _: fd.ops.slice(fd.ops.cat([x, x], 1), [0, 1, 0], [1, 1 + S, D]),
    "turned": lambda fd, x, _: fd.ops.permute(fd.ops.reshape(fd.ops.permute(x, [1, 0, 2]), [S, 1, D]), [1, 0, 2]),
    "merged and split": lambda fd, x, _: fd.ops.reshape(fd.ops.relu(fd.ops.reshape(x, [1, S * D])), [1, S, D]),
    "scanned": lambda fd, x, _: fd.ops.cumsum(x, 1),
}


def defined(name: str, ranks: int, annotated: bool) -> Fd:
    mesh = mf.DeviceMesh((ranks,), ("dp",))
    with mf.FusionDefinition() as fd:
        x, w = fd.define_tensor([1, S, D]), fd.define_tensor([D, D])
        y = BODIES[name](fd, x, w)
        fd.add_output(y)
        for t in (x, y) if annotated else (x,):
            fd.mesh_split(t, mesh, ["dp", None, None])
    return fd


def unsharded(name: str, given: list[torch.Tensor]) -> Any:
    """The definition run on one rank, without annotations; ops by themselves are compared with torch elsewhere."""
    with mf.FusionDefinition() as fd:
        x, w = fd.define_tensor([1, S, D]), fd.define_tensor([D, D])
        fd.add_output(BODIES[name](fd, x, w))
    return fd.simulate(given)


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("annotated", [True, False], ids=["annotated", "free"])
@pytest.mark.parametrize("name", BODIES)
def test_one_row_is_computed_where_it_is(name: str, annotated: bool, ranks: int) -> None:
    fd = defined(name, ranks, annotated)
    given = inputs_for(fd)
    assert_same_as_unsharded(fd, given, unsharded(name, given))
    assert fd.bill().total == 0


def test_the_gradient_of_one_row_is_a_sum_of_one_term() -> None:
    mesh = mf.DeviceMesh((4,), ("dp",))
    with mf.FusionDefinition() as fd:
        x, w = fd.define_tensor([1, S, D]), fd.define_tensor([D, D])
        fd.mesh_split(x, mesh, ["dp", None, None])
        loss = fd.ops.sum(fd.ops.relu(fd.ops.linear(x, w)))
        for made in (loss, *fd.grad(loss, [w])):
            fd.add_output(made)
    given = [torch.randn(1, S, D, dtype=torch.float64).float(), torch.randn(D, D)]
    weights = given[1].clone().requires_grad_()
    wanted = torch.relu(given[0] @ weights.t()).sum()
    wanted.backward()
    assert weights.grad is not None
    assert_same_as_unsharded(fd, given, [wanted.detach(), weights.grad])


def test_one_row_over_one_axis_and_a_sum_over_another() -> None:
    """The ranks that have the row reduce its sums: no others take part."""
    mesh = mf.DeviceMesh((2, 4), ("dp", "tp"))
    with mf.FusionDefinition() as fd:
        x = fd.define_tensor([1, 512, 1024])
        y = fd.ops.sum(x, [-1])
        fd.add_output(y)
        fd.mesh_split(x, mesh, ["dp", None, "tp"])
        fd.mesh_split(y, mesh, ["dp", None])
    assert fd.bill().total <= 2 * 3 / 4 * 512 * 4
    given = inputs_for(fd)
    assert_same_as_unsharded(fd, given, [given[0].double().sum(-1).float()])
