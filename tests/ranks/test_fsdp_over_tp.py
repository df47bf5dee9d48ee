"""Parameters of torch's FSDP over tensor parallelism, whose dims both axes cut, into definitions and back."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import meshfuse as mf
from ranks.test_dtensor import distributed, numbers, torch_mesh

pytestmark = pytest.mark.ranks

RATE = 0.125


def model(width: int) -> torch.nn.Sequential:
    found = torch.nn.Sequential(torch.nn.Linear(8, width), torch.nn.Linear(width, 8)).double()
    with torch.no_grad():
        for p in found.parameters():
            p.copy_(numbers(*p.shape))
    return found


def parallel_model(mesh: Any, width: int) -> torch.nn.Module:
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    plan = {"0": ColwiseParallel(), "1": RowwiseParallel()}
    return fully_shard(parallelize_module(model(width), mesh["tp"], plan), mesh=mesh["dp"])


def step(x: Any, parameters: list[Any]) -> mf.FusionDefinition:
    """Gradients, annotated as their parameters are, and the parameters after a step, free."""
    with mf.FusionDefinition() as fd:
        h, (w1, b1, w2, b2) = fd.from_pytorch(x), (fd.from_pytorch(p, static_sizes=True) for p in parameters)
        y = fd.ops.linear(fd.ops.linear(h, w1, b1), w2, b2)
        grads = fd.grad(fd.ops.sum(y * y), [w1, b1, w2, b2])
        for p, grad in zip(parameters, grads, strict=True):
            fd.shard(grad, p.placements, p.device_mesh)
            fd.add_output(grad)
        for w, grad in zip((w1, b1, w2, b2), grads, strict=True):
            fd.add_output(w - RATE * grad)
    return fd


def on_rank_step(width: int) -> list[tuple[bool, torch.Tensor]]:
    mesh = torch_mesh((2, 2), ("dp", "tp"))
    parameters = list(parallel_model(mesh, width).parameters())
    x = distributed(numbers(6, 8), mesh, "0R")
    out = step(x, parameters).execute([x, *parameters])
    return [(found.placements == p.placements and found.to_local().shape == p.to_local().shape, found.full_tensor())
            for p, found in zip([*parameters, *parameters], out, strict=True)]  # fmt: skip


def reference(width: int) -> list[torch.Tensor]:
    whole = model(width)
    y = whole(numbers(6, 8))
    (y * y).sum().backward()
    grads = [p.grad for p in whole.parameters()]
    return [*grads, *(p.detach() - RATE * grad for p, grad in zip(whole.parameters(), grads, strict=True))]


@pytest.mark.parametrize("width", [16, 13, 6, 50257])
def test_gradients_and_new_parameters_lie_as_the_parameters(ranks4, width: int) -> None:
    """Also those of dims that both axes cut unevenly, such as a vocabulary of 50,257."""
    right = reference(width)
    for found in ranks4.run(on_rank_step, width):
        for (same, value), wanted in zip(found, right, strict=True):
            assert same
            torch.testing.assert_close(value, wanted, rtol=1e-12, atol=1e-12 * wanted.abs().max().item())


def on_rank_orders() -> list[tuple[bool, bool]]:
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor
    from torch.distributed.tensor.placement_types import _StridedShard

    mesh, value, half = torch_mesh((2, 2), ("dp", "tp")), numbers(8, 6), _StridedShard(0, split_factor=2)
    found = []
    for placements in ([half, Shard(0)], [half, Replicate()], [Shard(0), half], [half, half]):
        x = distribute_tensor(value, mesh, placements, src_data_rank=None)
        with mf.FusionDefinition() as fd:
            t = fd.from_pytorch(x)
            whole = fd.ops.neg(t)
            fd.mesh_split(whole, mf.DeviceMesh((2, 2), ("dp", "tp")), [None, None])
            fd.add_output(fd.ops.sum(t, [1]) if placements[1] == Shard(0) else whole)
        (out,) = fd.execute([x])
        wanted = value.sum(1) if placements[1] == Shard(0) else -value
        found.append((torch.allclose(out.full_tensor(), wanted), out.placements == x.placements))
    return found


def test_strided_inputs(ranks4) -> None:
    """Chunks of the other axis' and chunks of no axis; a free output keeps the order of axes."""
    for found in ranks4.run(on_rank_orders):
        assert found == [(True, True), *[(True, False)] * 3]
