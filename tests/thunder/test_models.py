"""Models on simulated ranks: results, gradients and steps as eager torch has them, and what the traces say."""

from __future__ import annotations

import pytest
import torch
from thunder_models import ADAM, CASES, SGD, Pair

import meshfuse as mf
import thunder

MESH = mf.DeviceMesh((2,), ("tp",))


@pytest.mark.parametrize("name", CASES)
def test_trains_as_eager_does(name: str) -> None:
    pair = Pair.make(name, MESH)
    optimizer = ADAM if name == "gpt" else SGD
    for found, wanted in pair.steps(optimizer):
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)
    assert pair.differ_by() < 1e-5


def test_is_one_region_forward_and_one_backward() -> None:
    pair = Pair.make("gpt", MESH)
    next(pair.steps(SGD))
    for traces, name in ((thunder.last_traces, "meshfuse0"), (thunder.last_backward_traces, "meshfuse1")):
        found = [bsym.sym.name for bsym in traces(pair.jitted)[-1].bound_symbols]
        assert [n for n in found if n.startswith("meshfuse")] == [name]
        assert not [n for n in found if n.startswith(("torch", "matmul", "linear"))]
