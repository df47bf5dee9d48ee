"""Statistics of complex numbers, and of no numbers, as torch gives them: on one rank and with their dims sharded."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch

import meshfuse as mf
from meshfuse import DataType

# What is checked are numbers, whatever the plan.
pytestmark = pytest.mark.usefixtures("over_whole_axes")

Z = torch.randn(6, 8, generator=torch.Generator().manual_seed(1), dtype=torch.complex128)
SPECS: list[list[Any]] = [[None, None], ["x", None], [None, "x"]]
KINDS = {DataType.ComplexDouble: (Z, 1e-13), DataType.ComplexFloat: (Z.to(torch.complex64), 1e-5)}


def run(build: Any, x: torch.Tensor, dtype: DataType, spec: list[Any], ranks: int = 3) -> list[torch.Tensor]:
    with mf.FusionDefinition() as fd:
        t = fd.define_tensor(list(x.shape), dtype=dtype)
        for made in build(fd, t):
            fd.add_output(made)
        fd.mesh_split(t, mf.DeviceMesh((ranks,), ("x",)), spec)
    return list(fd.simulate([x], check_replicas=True))


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("dtype", KINDS)
@pytest.mark.parametrize("dims", [[0], [1], [0, 1]])
@pytest.mark.parametrize("name", ["var", "var_mean", "welford"])
def test_a_spread_of_complex_numbers_is_real(name: str, dims: list[int], dtype: DataType, spec: list[Any]) -> None:
    x, close = KINDS[dtype]

    def build(fd: Any, t: Any) -> list[Any]:
        made = fd.ops.welford(t, dims) if name == "welford" else getattr(fd.ops, name)(t, dims, 1, True)
        return list(made) if isinstance(made, tuple) else [made]

    found = run(build, x, dtype, spec)
    n = x.numel() // torch.var(x, dims).numel()
    var, mean = torch.var_mean(x, dims, keepdim=True)
    wanted = {
        "var": [var], "var_mean": [var, mean],
        "welford": [mean.squeeze(dims), (var * (n - 1)).squeeze(dims), torch.full(var.squeeze(dims).shape, n)],
    }[name]  # fmt: skip
    torch.testing.assert_close(found, wanted, rtol=close, atol=close)


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("name", ["var", "var_mean", "welford"])
def test_its_gradient_is_torchs(name: str, spec: list[Any]) -> None:
    def build(fd: Any, t: Any) -> list[Any]:
        made = getattr(fd.ops, name)(t, [1])
        spread = made if name == "var" else made[name == "welford"]
        return [fd.grad(fd.ops.sum(fd.ops.exp(spread)), t)]

    x = Z.clone().requires_grad_()
    var = torch.var(x, 1, correction=0 if name == "welford" else 1) * (8 if name == "welford" else 1)
    wanted = torch.autograd.grad(var.exp().sum(), [x])
    torch.testing.assert_close(run(build, Z, DataType.ComplexDouble, spec), list(wanted), rtol=1e-12, atol=1e-12)


EMPTY_DIMS: list[tuple[list[int], Any]] = [
    ([0, 3], [0]),
    ([3, 0], [1]),
    ([3, 0], None),
    ([0], None),
    ([2, 0, 3], [0, 1]),
]


@pytest.mark.parametrize("is_open", [False, True])
@pytest.mark.parametrize(("shape", "dims"), EMPTY_DIMS)
@pytest.mark.parametrize("name", ["max", "min", "argmax"])
def test_the_greatest_of_no_elements_is_an_error(name: str, shape: list[int], dims: Any, is_open: bool) -> None:
    """As in torch; where sizes are open, once they are known."""
    x, dim = torch.empty(shape), dims if name != "argmax" or dims is None else dims[-1]
    with pytest.raises((RuntimeError, IndexError)):
        x.argmax(dim) if name == "argmax" else (torch.amax if name == "max" else torch.amin)(x, dims or ())
    with pytest.raises(mf.DefinitionError, match=r"found .*Float\[.*needed .*at test_statistics.py:") as caught:
        with mf.FusionDefinition() as fd:
            t = fd.define_tensor([-1] * x.ndim if is_open else shape)
            fd.add_output(getattr(fd.ops, name)(t, dim))
        fd.simulate([x])
    assert re.search(rf"{name} (of no|takes no)|{name}: a dim of size 0", str(caught.value))


@pytest.mark.parametrize("is_open", [False, True])
@pytest.mark.parametrize("ranks", [1, 3])
def test_what_torch_makes_of_no_elements(ranks: int, is_open: bool) -> None:
    """Reductions of dims that have elements, in tensors without; and what has a result for no element at all."""
    cases: list[tuple[Any, Any]] = [
        (lambda o, x: o.max(x, [1]), lambda x: x.amax(1)), (lambda o, x: o.min(x, [1]), lambda x: x.amin(1)),
        (lambda o, x: o.argmax(x, 1), lambda x: x.argmax(1)), (lambda o, x: o.sum(x, [0]), lambda x: x.sum(0)),
        (lambda o, x: o.prod(x, [0]), lambda x: x.prod(0)), (lambda o, x: o.softmax(x, 0), lambda x: x.softmax(0)),
        (lambda o, x: o.log_softmax(x, 0), lambda x: x.log_softmax(0)),
        (lambda o, x: o.logsumexp(x, [0]), lambda x: x.logsumexp(0)),
        (lambda o, x: o.mean(x, [0]), lambda x: x.mean(0)), (lambda o, x: o.cummax(x, 0), lambda x: x.cummax(0).values),
        (lambda o, x: o.max(x, [0], empty=True), lambda x: x.new_full((3,), -torch.inf)),
        (lambda o, x: o.min(x, None, True, empty=True), lambda x: x.new_full((1, 1), torch.inf)),
    ]  # fmt: skip
    x = torch.empty(0, 3)
    for build, reference in cases:
        with mf.FusionDefinition() as fd:
            t = fd.define_tensor([-1, -1] if is_open else [0, 3])
            fd.add_output(build(fd.ops, t))
            fd.mesh_split(t, mf.DeviceMesh((ranks,), ("x",)), ["x", None])
        torch.testing.assert_close(fd.simulate([x])[0], reference(x), equal_nan=True)
