"""Statistics of complex numbers, and of no numbers, as torch gives them: on one rank and with their dims sharded."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import meshfuse as mf
from meshfuse import DataType

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
