"""Gradients where the definition leaves sizes open: what only a call shows, as that a dim was broadcast, against torch.

(test_gradients.py has every sample of every op with its sizes open.)
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import meshfuse as mf
from meshfuse.testing import inputs_for
from meshfuse.testing.examples import Example, examples_of

# What is checked are numbers, whatever the plan.
pytestmark = pytest.mark.usefixtures("over_whole_axes")

DOUBLE = mf.DataType.Double
Case = tuple[Callable[..., Any], Callable[..., torch.Tensor], tuple[tuple[int, ...], ...]]


def by_start(start: int, stop: int, step: int = 1) -> Case:
    return lambda o, x: o.slice(x, [start, 0], [stop, 4], [step, 1]), lambda x: x[start:stop:step], ((5, 4),)


def attention(q: tuple[int, ...], k: tuple[int, ...]) -> Case:
    """With a bias, so that the gradient is written out in ops."""
    shapes = (q, k, (*k[:-1], 3), (*q[:-1], k[-2]))
    return lambda o, q, k, v, bias: o.sdpfa_fwd(q, k, v, bias)[0], attended, shapes


def attended(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    repeats = q.shape[1] // max(k.shape[1], 1)
    k, v = (x if not x.shape[1] else x.repeat_interleave(repeats, 1) for x in (k, v))
    scores = q @ k.transpose(-1, -2) / max(q.shape[-1], 1) ** 0.5 + bias
    return torch.softmax(scores, -1) @ v


CASES: dict[str, Case] = {
    "added to more rows": (lambda o, x, y: o.add(x, y), torch.add, ((1, 4), (5, 4))),
    "times more rows": (lambda o, x, y: o.mul(x, y), torch.mul, ((5, 4), (1, 4))),
    "one to no rows": (lambda o, x, y: o.add(x, y), torch.add, ((1, 4), (0, 4))),
    "no row more": (lambda o, x, y: o.mul(x, y), torch.mul, ((5, 4), (5, 4))),
    "with itself": (lambda o, x: o.mul(x, x), lambda x: x * x, ((1, 4),)),
    "chosen from": (
        lambda o, x, y: o.where(o.gt(x, 0.0), x, y), lambda x, y: torch.where(x > 0, x, y), ((1, 4), (5, 1)),
    ),
    "expanded": (lambda o, x: o.expand(x, [5, 4]), lambda x: x.expand(5, 4), ((1, 4),)),
    "expanded in place": (
        lambda o, x: o.broadcast_in_dim(x, [5, 4, 3], [1, 2]), lambda x: x.expand(5, 4, 3), ((4, 1),),
    ),
    "one matrix for all": (lambda o, x, y: o.matmul(x, y), torch.matmul, ((1, 3, 4), (5, 4, 2))),
    "all by one matrix": (lambda o, x, y: o.matmul(x, y), torch.matmul, ((5, 3, 4), (1, 4, 2))),
    "one head of keys": (
        lambda o, q, k, v: o.sdpfa_fwd(q, k, v)[0],
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v, enable_gqa=True),
        ((2, 4, 3, 8), (2, 1, 3, 8), (2, 1, 3, 8)),
    ),
    **{f"{name}, with a bias": attention(q, k) for name, q, k in (
        ("a head for two", (2, 4, 3, 8), (2, 2, 5, 8)), ("no keys", (2, 4, 3, 8), (2, 2, 0, 8)),
        ("no rows", (2, 4, 0, 8), (2, 2, 5, 8)), ("no batch", (0, 4, 3, 8), (0, 2, 5, 8)),
        ("no heads", (2, 0, 3, 8), (2, 0, 5, 8)), ("nothing to score by", (2, 4, 3, 0), (2, 2, 5, 0)),
    )},
    "from the end": by_start(-3, 5),
    "between, from the end": by_start(-3, 4),
    "before the start": by_start(-9, 2),
    "from beyond the end": by_start(7, 9),
    "to beyond the end": by_start(1, 9),
    "every other from the end": by_start(-4, 5, 2),
    "the variance of one": (lambda o, x: o.var(x, [0]), lambda x: x.var(0), ((1, 4),)),
    "the variance of none": (lambda o, x: o.var(x, [0]), lambda x: x.var(0), ((0, 4),)),
    "the first of a squeezed dim": (
        lambda o, x: o.squeeze(x, [0], squeeze_expanded=True), lambda x: x[0], ((3, 4),),
    ),
}  # fmt: skip


def defined(case: Case) -> tuple[mf.FusionDefinition, list[Any], list[Any]]:
    fd = mf.FusionDefinition()
    tensors = [fd.define_tensor([-1] * len(shape), dtype=DOUBLE) for shape in case[2]]
    y = case[0](fd.ops, *tensors)
    grads = fd.grad(y, tensors)
    for t in (y, *grads):
        fd.add_output(t)
    return fd, tensors, grads


def wanted(case: Case, values: list[torch.Tensor]) -> list[torch.Tensor]:
    leaves = [t.clone().requires_grad_() for t in values]
    y = case[1](*leaves)
    return [y.detach(), *torch.autograd.grad(y.sum(), leaves)]


def values_of(case: Case) -> list[torch.Tensor]:
    made = torch.Generator().manual_seed(1)
    return [torch.randn(shape, dtype=torch.float64, generator=made) for shape in case[2]]


@pytest.mark.filterwarnings("ignore:var")
@pytest.mark.parametrize("split", [None, 0, -1], ids=["whole", "first dim split", "last dim split"])
@pytest.mark.parametrize("name", CASES)
def test_gradients_are_those_of_autograd(name: str, split: int | None) -> None:
    case = CASES[name]
    fd, tensors, _ = defined(case)
    for t in tensors if split is not None else ():
        fd.mesh_split(t, mf.DeviceMesh((2,), ("x",)), ["x" if d == split % t.ndim else None for d in range(t.ndim)])
    values = values_of(case)
    for found, expected in zip(fd.simulate(values, check_replicas=True), wanted(case, values), strict=True):
        assert found.shape == expected.shape
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9, equal_nan=True)


def test_one_definition_takes_rows_that_are_broadcast_and_rows_that_are_not() -> None:
    fd, _, _ = defined(CASES["added to more rows"])
    for rows in (5, 1, 7, 1):
        values = [torch.randn(rows, 4).double(), torch.randn(max(rows, 3) if rows == 1 else rows, 4).double()]
        expected = wanted(CASES["added to more rows"], values)
        for found, one in zip(fd.simulate(values), expected, strict=True):
            torch.testing.assert_close(found, one)


def test_where_nothing_is_broadcast_nothing_is_computed_for_it() -> None:
    """A program of open sizes has, for sizes that are equal, the ops of one whose sizes are known."""

    def ops(shape: list[int]) -> list[str]:
        with mf.FusionDefinition() as fd:
            x, y, z = (fd.define_tensor(shape, dtype=DOUBLE) for _ in range(3))
            out = fd.ops.mul(fd.ops.add(x, y), fd.ops.tanh(z))
            for grad in fd.grad(fd.ops.add(out, x), [x, y, z]):
                fd.add_output(fd.ops.mul(grad, 2.0))
        return [node.name for node in fd.compile(*[[6, 4]] * 3).graph.nodes]

    assert ops([-1, -1]) == ops([6, 4])


@pytest.mark.parametrize("width", [0, 2, -1])
@pytest.mark.parametrize("split", [None, "x"])
def test_a_dim_padded_by_a_number_of_the_call_is_open(width: int, split: str | None) -> None:
    """Its size is no number less one: what is read off it while defining, as a gradient's slices, would be wrong."""
    fd = mf.FusionDefinition()
    x, n = fd.define_tensor([3, 4], dtype=DOUBLE), fd.define_scalar(dtype=mf.DataType.Int)
    y = fd.ops.pad(x, [n, 1, 0, n], 0.5)
    assert y.type.shape == (-1, -1)
    z = fd.ops.cat([y, fd.ops.sin(y)], 0)
    for t in (z, fd.grad(fd.ops.tanh(z), x)):
        fd.add_output(t)
    fd.mesh_split(x, mf.DeviceMesh((2,), ("x",)), [None, split])
    value = torch.randn(3, 4, dtype=torch.float64, requires_grad=True)
    padded = torch.nn.functional.pad(value, (width, 1, 0, width), value=0.5)
    wanted = torch.cat([padded, padded.sin()])
    (grad,) = torch.autograd.grad(wanted.tanh().sum(), value)
    found = fd.simulate([value.detach(), width])
    torch.testing.assert_close(found, [wanted.detach(), grad])


@pytest.mark.parametrize("bounds", ["start", "end", "step"])
def test_a_dim_sliced_by_a_number_of_the_call_is_open(bounds: str) -> None:
    fd = mf.FusionDefinition()
    x, n = fd.define_tensor([8], dtype=DOUBLE), fd.define_scalar(dtype=mf.DataType.Int)
    start, end, step = (n if name == bounds else known for name, known in (("start", 1), ("end", 7), ("step", 1)))
    y = fd.ops.slice(x, [start], [end], [step])
    assert y.type.shape == (-1,)
    value = torch.randn(8, dtype=torch.float64, requires_grad=True)
    wanted = value[slice(*(2 if name == bounds else k for name, k in (("start", 1), ("end", 7), ("step", 1))))]
    for t in (y, fd.grad(fd.ops.cat([y, fd.ops.sin(y)], 0), x)) if bounds != "step" else (y,):
        fd.add_output(t)
    found = fd.simulate([value.detach(), 2])
    (grad,) = torch.autograd.grad(torch.cat([wanted, wanted.sin()]).sum(), value)
    torch.testing.assert_close(found, [wanted.detach(), grad][: len(found)])


GIVEN: dict[str, Callable[[Any, Any], Any]] = {
    "itself": lambda o, x: x, "passed on": lambda o, x: o.set(x), "computed": lambda o, x: o.sin(x),
    "permuted": lambda o, x: o.permute(x, [1, 0]), "scanned": lambda o, x: o.cumsum(x, 0),
    "cut": lambda o, x: o.slice(x, [1, 0], [3, 4]), "put together": lambda o, x: o.cat([x, x], 0),
    "summed": lambda o, x: o.sum(x, [1]), "expanded": lambda o, x: o.broadcast_in_dim(x, [2, 3, 4], [1, 2]),
}  # fmt: skip


@pytest.mark.parametrize("is_open", [True, False], ids=["open", "known"])
@pytest.mark.parametrize("name", GIVEN)
def test_a_gradient_that_is_given_has_the_shape_of_its_output(name: str, is_open: bool) -> None:
    """Also where only a call has its sizes: else the gradient would be of another shape, or of some elements."""
    fd, mesh = mf.FusionDefinition(), mf.DeviceMesh((2,), ("x",))
    x = fd.define_tensor([-1, -1] if is_open else [3, 4], dtype=DOUBLE)
    y = GIVEN[name](fd.ops, x)
    given = fd.define_tensor([-1] * y.ndim, dtype=DOUBLE)
    fd.add_output(y)
    fd.add_output(fd.ops.mul(fd.grad(y, x, given), 2.0))
    fd.mesh_split(given, mesh, ["x", *[None] * (y.ndim - 1)])
    value = torch.randn(3, 4, dtype=torch.float64)
    for sizes in ([1] * y.ndim, [2] * y.ndim):
        with pytest.raises(mf.DefinitionError, match=r"sizes of a tensor: found .* Of grad_outputs they are their"):
            fd.simulate([value, torch.ones(sizes).double()])
    shape = {"permuted": (4, 3), "cut": (2, 4), "put together": (6, 4), "summed": (3,), "expanded": (2, 3, 4)}.get(
        name, (3, 4)
    )
    found, grad = fd.simulate([value, torch.ones(shape).double()])
    assert found.shape == shape and grad.shape == value.shape
    assert not any(node.name == "sized" for node in fd.latest().graph.nodes)


def test_inputs_of_a_definition_with_gradients_index_what_is_there() -> None:
    """The ops of a gradient index tensors of open sizes, too."""
    with mf.FusionDefinition() as fd:
        x, index = fd.define_tensor([2, -1], dtype=DOUBLE), fd.define_tensor([2, 2], dtype=mf.DataType.Int)
        examples_of(fd)[x.id] = Example((2, 3))
        fd.add_output(fd.grad(fd.ops.tanh(fd.ops.scatter(x, index, 3.0, 1)), x))
    assert all(0 <= n < 3 for n in inputs_for(fd)[1].flatten().tolist())


@pytest.mark.parametrize("seeds", [(-1, -1), (4, 4), (4, -1)])
def test_windows_of_an_open_dim_are_joined_whoever_knows_its_size(seeds: tuple[int, int]) -> None:
    """A tensor's dim is open, and the sizes of some gradients by its rows are known: one `cat`, and nothing padded."""
    with mf.FusionDefinition() as fd:
        x = fd.define_tensor([2, -1], dtype=DOUBLE)
        given = [fd.define_tensor([size], dtype=DOUBLE) for size in seeds]
        fd.add_output(fd.grad([fd.ops.select(x, i, 0) for i in (0, 1)], x, given))
    values = [torch.randn(shape, dtype=torch.float64) for shape in ((2, 4), (4,), (4,))]
    (found,) = fd.simulate(values)
    assert torch.equal(found, torch.stack(values[1:]))
    assert [node.op.name for node in fd.recording.nodes].count("cat") == 1 and "pad" not in repr(fd)
