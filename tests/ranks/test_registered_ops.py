"""An op of the user's own on real gloo ranks, each of which registers it."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import meshfuse as mf

pytestmark = pytest.mark.ranks


@mf.torch_op("b c t~, c k -> b c t", blocked="k", halo={"t": (1, 1)}, partial=mf.Partial.EACH)
def convolved(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return F.conv1d(x, weight[:, None], groups=weight.shape[0])


def tensors() -> list[torch.Tensor]:
    made = torch.Generator().manual_seed(2)
    return [torch.randn(s, generator=made, dtype=torch.float64) for s in ((2, 3, 501), (3, 3))]


def on_rank() -> list[torch.Tensor]:
    if "convolved" not in dir(mf.FusionDefinition().ops):
        mf.register_op(convolved)
    with mf.FusionDefinition() as fd:
        x, weight = (fd.define_tensor(list(t.shape), dtype=mf.DataType.Double) for t in tensors())
        y = fd.ops.convolved(x, weight)
        for out in (y, *fd.grad(y, [x, weight])):
            fd.add_output(out)
        fd.mesh_split(x, mf.DeviceMesh((2,), ("cp",)), [None, None, "cp"])
    return fd(*tensors())


def test_a_registered_op_and_its_gradients_on_two_ranks(ranks2):
    leaves = [t.requires_grad_() for t in tensors()]
    wanted = F.conv1d(leaves[0], leaves[1][:, None], groups=3, padding=1)
    expected = [wanted, *torch.autograd.grad(wanted.sum(), leaves)]
    for found in ranks2.run(on_rank):
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(one, other.detach(), rtol=1e-12, atol=1e-12)
