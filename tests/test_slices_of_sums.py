"""Slices and sums before what is made of a sum: terms that lie on the ranks are summed for what is read of them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import meshfuse as mf
from meshfuse.testing import assert_same_as_unsharded, inputs_for

MESH = mf.DeviceMesh((4,), ("tp",))
B, S, D, H = 3, 12, 8, 16
DOUBLE = mf.DataType.Double
Fd, Tensor = mf.FusionDefinition, mf.TensorView


def operand(fd: Fd, *shape: int) -> Tensor:
    """An input that every rank has."""
    made = fd.define_tensor(list(shape), dtype=DOUBLE)
    fd.mesh_split(made, MESH, [None] * len(shape))
    return made


def row_parallel(fd: Fd) -> Tensor:
    """h @ w, whose terms lie on the ranks."""
    h, w = fd.define_tensor([B, S, H], dtype=DOUBLE), fd.define_tensor([H, D], dtype=DOUBLE)
    fd.mesh_split(h, MESH, [None, None, "tp"])
    fd.mesh_split(w, MESH, ["tp", None])
    return fd.ops.matmul(h, w)


MADE: dict[str, Callable[[Fd, Tensor], Tensor]] = {
    "residual": lambda fd, y: operand(fd, B, S, D) + y,
    "bias": lambda fd, y: y + operand(fd, D),
    "scale of each row": lambda fd, y: operand(fd, S, 1) * y,
    "one of each batch": lambda fd, y: fd.ops.add(operand(fd, B, 1, D), y),
    "a chain": lambda fd, y: fd.ops.tanh((y + operand(fd, D)) * 2.0) - operand(fd, B, S, D),
    "a choice": lambda fd, y: fd.ops.where(fd.ops.gt(operand(fd, S, D), 0.0), y, operand(fd, D)),
}


@pytest.mark.parametrize("name", MADE)
@pytest.mark.parametrize("part", [(S - 1, S, 1), (0, S, 4)], ids=["the last", "each fourth"])
def test_only_what_is_read_is_summed(name: str, part: tuple[int, int, int]) -> None:
    start, stop, step = part
    with mf.FusionDefinition() as fd:
        y = MADE[name](fd, row_parallel(fd))
        last = fd.ops.slice(y, [0, start, 0], [B, stop, D], [1, step, 1])
        fd.mesh_split(last, MESH, [None, None, None])
        fd.add_output(last)
    assert_same_as_unsharded(fd, inputs_for(fd))
    rows = len(range(start, stop, step))
    assert fd.bill().total == 2 * 3 / 4 * B * rows * D * 8


TERMS: dict[str, Callable[[Fd, Tensor], Tensor]] = {
    "residual": lambda fd, y: operand(fd, B, S, D) + y,
    "the other way": lambda fd, y: y - operand(fd, B, S, D),
    "scaled": lambda fd, y: 0.5 * (operand(fd, B, S, D) - y / 3.0),
    "a bias": lambda fd, y: y + operand(fd, D),
    "one for each row and one for all": lambda fd, y: operand(fd, S, 1) - (operand(fd, 1, 1, 1) + y),
    "a sum of biases": lambda fd, y: y + (operand(fd, D) + operand(fd, 1)),
    "two products": lambda fd, y: row_parallel(fd) + (operand(fd, B, S, D) + y),
    "its negative and others": lambda fd, y: fd.ops.tanh(operand(fd, B, S, D)) + (operand(fd, B, S, D) - -y),
}


@pytest.mark.parametrize("dims", [[0, 1, 2], [1], [0, -1]], ids=str)
@pytest.mark.parametrize("name", TERMS)
def test_terms_are_summed_over_dims_before_they_are_over_ranks(name: str, dims: list[int]) -> None:
    with mf.FusionDefinition() as fd:
        made = fd.ops.mean(TERMS[name](fd, row_parallel(fd)), dims, keepdim=len(dims) == 1)
        fd.mesh_split(made, MESH, [None] * made.ndim)
        fd.add_output(made)
    assert_same_as_unsharded(fd, inputs_for(fd))
    kept = {3: 1, 1: B * D, 2: S}[len(dims)]
    assert fd.bill().total == 2 * 3 / 4 * kept * 8


def test_a_loss_of_a_residual_is_summed_once_in_a_training_step() -> None:
    with mf.FusionDefinition() as fd:
        x, w, v = operand(fd, B, S, D), fd.define_tensor([D, H], dtype=DOUBLE), fd.define_tensor([H, D], dtype=DOUBLE)
        fd.mesh_split(w, MESH, [None, "tp"])
        fd.mesh_split(v, MESH, ["tp", None])
        loss = fd.ops.sum(x + fd.ops.matmul(fd.ops.tanh(fd.ops.matmul(x, w)), v))
        for made in (loss, *fd.grad(loss, [w, v])):
            fd.add_output(made)
    assert_same_as_unsharded(fd, inputs_for(fd))
    assert fd.bill().total <= 2 * 3 / 4 * 8


UNCHANGED: dict[str, Callable[[Fd, Tensor], Tensor]] = {
    "plus a number": lambda fd, y: fd.ops.sum(y + 1.0),
    "a number over it": lambda fd, y: fd.ops.sum(2.0 / (y * y + 1.0)),
    "of other types": lambda fd, y: fd.ops.sum(fd.ops.cast(y, mf.DataType.Float) + operand(fd, B, S, D)),
    "by a tensor": lambda fd, y: fd.ops.sum(y * operand(fd, B, S, D)),
    "in another type": lambda fd, y: fd.ops.sum(y + operand(fd, B, S, D), dtype=mf.DataType.Float),
}


@pytest.mark.parametrize("name", UNCHANGED)
def test_sums_of_what_is_no_sum_of_whole_terms(name: str) -> None:
    with mf.FusionDefinition() as fd:
        fd.add_output(UNCHANGED[name](fd, row_parallel(fd)))
    assert_same_as_unsharded(fd, inputs_for(fd))


def test_in_half_precision_terms_that_cancel_out_are_added_first() -> None:
    with mf.FusionDefinition() as fd:
        shapes = [[64, 16], [16, 16], [16, 16], [64, 16]]
        x, w, v, z = (fd.define_tensor(shape, dtype=mf.DataType.BFloat16) for shape in shapes)
        fd.mesh_split(w, MESH, [None, "tp"])
        fd.mesh_split(v, MESH, ["tp", None])
        fd.add_output(fd.ops.sum(fd.ops.matmul(fd.ops.matmul(x, w), v) - z))
    x, one = torch.randint(128, 255, (64, 16)).bfloat16() / 128, torch.eye(16).bfloat16()
    z = x.clone()
    z[:, :4] += 1 / 128
    # By themselves the sums, of 1,500 and more, are rounded to eights.
    (found,) = fd.simulate([x, one, one, z])
    assert found == -2


def test_what_others_read_is_summed_whole() -> None:
    with mf.FusionDefinition() as fd:
        y = row_parallel(fd) + operand(fd, D)
        for made in (fd.ops.slice(y, [0, S - 1, 0], [B, S, D]), fd.ops.tanh(y)):
            fd.mesh_split(made, MESH, [None, None, None])
            fd.add_output(made)
    assert_same_as_unsharded(fd, inputs_for(fd))
    assert fd.bill().total <= 2 * 3 / 4 * B * S * D * 8


@st.composite
def chains(draw: st.DrawFn) -> mf.FusionDefinition:
    """Slices of slices of elementwise ops on sums and on operands that repeat along some of their dims; and sums."""
    with mf.FusionDefinition() as fd:
        y, shape = row_parallel(fd), [B, S, D]
        for _ in range(draw(st.integers(1, 5))):
            if draw(st.integers(0, 2)) == 0:
                bounds = [(draw(st.integers(0, n - 1)), n, draw(st.integers(1, 3))) for n in shape]
                y, shape = fd.ops.slice(y, *map(list, zip(*bounds, strict=True))), [len(range(*b)) for b in bounds]
                continue
            name = draw(st.sampled_from(["add", "mul", "sub", "relu", "same"]))
            sizes = [n if draw(st.booleans()) else 1 for n in shape][draw(st.integers(0, 2)) :]
            other = operand(fd, *sizes)
            y = fd.ops.relu(y) if name == "relu" else y * y if name == "same" else fd.call(name, (other, y))
        dims = draw(st.lists(st.integers(0, 2), max_size=2, unique=True))
        y = fd.ops.sum(y, dims, keepdim=True) if dims else y
        fd.add_output(y)
        if draw(st.booleans()):
            fd.mesh_split(y, MESH, [None] * 3)
    return fd


@settings(max_examples=30)
@given(chains())
def test_any_chain_is_what_torch_computes(fd: mf.FusionDefinition) -> None:
    assert_same_as_unsharded(fd, inputs_for(fd))
