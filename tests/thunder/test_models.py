"""Models on simulated ranks: results, gradients and steps as eager torch has them, and what the traces say."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from thunder_models import ADAM, CASES, MLP_PLAN, SGD, Mlp, Pair
from torch import nn

import meshfuse as mf
import meshfuse.thunder
import thunder

MESH = mf.DeviceMesh((2,), ("tp",))


@pytest.mark.parametrize("name", sorted(CASES.keys() - {"gpt", "llama"}))  # "layers" has two of both
def test_trains_as_eager_does_by_one_region_forward_and_one_backward(name: str) -> None:
    pair = Pair.make(name, MESH)
    optimizer = ADAM if name == "layers" else SGD
    for found, wanted in pair.steps(optimizer):
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)
    assert pair.differ_by() < 1e-5
    for traces, name in ((thunder.last_traces, "meshfuse0"), (thunder.last_backward_traces, "meshfuse1")):
        found = [bsym.sym.name for bsym in traces(pair.jitted)[-1].bound_symbols]
        assert [n for n in found if n.startswith("meshfuse")] == [name]
        assert not [n for n in found if n.startswith(("torch", "matmul", "linear"))]


def test_plans_name_modules_and_lines() -> None:
    pair = Pair.make("mlp", MESH)
    next(pair.steps(SGD))
    found = meshfuse.thunder.definitions(pair.jitted)
    assert list(found) == ["meshfuse0", "meshfuse1"]
    forward, backward = (str(fd.explain()) for fd in found.values())
    assert "fc1.weight (t" in forward and "fc1.linear (t" in forward
    assert "fc2.matmul (t" in backward and "fc2.weight.grad (t" in backward
    assert meshfuse.thunder.bill(pair.jitted).total > 0


def test_stationary_weights_are_not_moved() -> None:
    """Activations are larger than weights here, so that bytes alone would have these gathered."""
    model, x = Mlp(), torch.randn(64, 8, 16)
    sent = {}
    for stationary in (False, True):
        split = meshfuse.thunder.MeshSplit(MESH, MLP_PLAN, stationary=stationary)
        jitted = thunder.jit(copy.deepcopy(model), executors=[mf.thunder.executor()], transforms=[split])
        torch.testing.assert_close(jitted(x), model(x), rtol=1e-5, atol=1e-5)
        sent[stationary] = [(e.collective, e.tensor) for e in meshfuse.thunder.bill(jitted).entries]
    assert any("weight" in tensor for _, tensor in sent[False])
    assert not any("weight" in tensor for _, tensor in sent[True])


def test_the_sizes_of_a_call_are_planned_once() -> None:
    pair = Pair.make("mlp", MESH)
    with torch.no_grad():
        for rows in (2, 3, 2):
            x = torch.randn(rows, 8, 16)
            torch.testing.assert_close(pair.jitted(x), pair.eager(x), rtol=1e-5, atol=1e-5)
    assert thunder.cache_misses(pair.jitted) == 2


def test_state_dicts_of_the_whole_model_are_taken() -> None:
    pair = Pair.make("block", MESH)
    torch.manual_seed(5)
    other = pair.case.make()
    pair.jitted.load_original_state_dict(other.state_dict())
    arguments = pair.case.arguments(0)
    torch.testing.assert_close(pair.jitted(*arguments), other(*arguments), rtol=1e-5, atol=1e-5)


def jit(function: Any, *transforms: Any) -> Any:
    return thunder.jit(function, executors=[mf.thunder.executor()], transforms=list(transforms))


class Attention(nn.Module):
    def __init__(self, masked: bool, learned: bool = False) -> None:
        super().__init__()
        self.q, self.masked = nn.Linear(16, 16), masked
        self.bias = nn.Parameter(torch.randn(1, 1, 8, 8), requires_grad=learned)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q = self.q(x).view(2, 8, 4, 4).transpose(1, 2)
        return F.scaled_dot_product_attention(q, q, q, self.bias if self.masked else None, scale=0.3)


@pytest.mark.parametrize(("masked", "learned"), [(False, False), (True, False), (True, True)])
def test_attention_is_one_op_unless_its_mask_is_learned(masked: bool, learned: bool) -> None:
    eager = Attention(masked, learned)
    jitted = jit(copy.deepcopy(eager), meshfuse.thunder.MeshSplit(MESH, {"q": "colwise"}))
    x = torch.randn(2, 8, 16)
    for model in (jitted, eager):
        model(x).square().sum().backward()
    weights = dict(eager.named_parameters())
    for name, parameter in jitted.named_parameters():
        if parameter.requires_grad and weights[name].grad is not None:
            torch.testing.assert_close(parameter.grad, weights[name].grad, rtol=1e-4, atol=1e-4)
    names = str(thunder.last_traces(jitted)[-1])
    assert ("mesh_attention" in names) != learned


class Dropout(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.rand(64, 64) + 1)

    def forward(self) -> torch.Tensor:
        return F.dropout(self.w, 0.25)


def test_dropout_is_drawn_by_torchs_seed_and_the_same_backward() -> None:
    jitted = jit(Dropout(), meshfuse.thunder.MeshSplit(MESH, {"w": ["tp", None]}))
    (weight,) = jitted.parameters()
    found = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        found.append(jitted())
    assert torch.equal(found[0], found[1]) and not torch.equal(found[1], found[2])
    assert 0.2 < float((found[0] == 0).float().mean()) < 0.3
    found[2].sum().backward()
    torch.testing.assert_close(weight.grad, (found[2] != 0).float() / 0.75)


def test_functions_without_a_mesh_run_on_one_rank() -> None:
    x = torch.randn(4, 4, requires_grad=True)
    jitted = jit(lambda x: torch.tanh(x @ x).sum() * 2)
    torch.testing.assert_close(jitted(x), torch.tanh(x @ x).sum() * 2)
    assert "meshfuse0" in str(thunder.last_traces(jitted)[-1])


def test_one_op_is_left_to_torch() -> None:
    jitted = jit(lambda x: torch.tanh(x))
    jitted(torch.randn(3))
    assert "meshfuse" not in str(thunder.last_traces(jitted)[-1])


# errors


def error_of(call: Any) -> str:
    with pytest.raises(mf.MeshfuseError) as error:
        call()
    return str(error.value)


def test_a_plan_without_the_executor() -> None:
    jitted = thunder.jit(Mlp(), transforms=[meshfuse.thunder.MeshSplit(MESH, MLP_PLAN)])
    text = error_of(lambda: jitted(torch.randn(2, 16)))
    assert text.startswith("MeshSplit without meshfuse's executor: found executors ['")
    assert "needed mf.thunder.executor() among them. Call thunder.jit(model, executors=[mf.thunder.executor()," in text
    assert "(at test_models.py:" in text


def test_a_plan_of_activations() -> None:
    text = error_of(lambda: jit(Mlp(), meshfuse.thunder.MeshSplit(MESH, {"fc1:output": [None, "tp"]})))
    assert text.startswith("MeshSplit: the plan says how the result of fc1 lies: needed a plan of weights. Leave")


def test_a_plan_that_fits_nothing() -> None:
    text = error_of(lambda: jit(Mlp(), meshfuse.thunder.MeshSplit(MESH, {"fc3": "colwise"})))
    assert text.startswith("plan: 'fc3' matches nothing in Mlp: found near to it ['fc2")


def test_a_backend_that_does_not_exist() -> None:
    assert "'fast'" in error_of(lambda: mf.thunder.executor("fast"))


def test_nothing_was_traced_yet() -> None:
    text = error_of(lambda: meshfuse.thunder.definitions(jit(Mlp())))
    assert text.startswith(
        "no traces yet: found a ThunderModule, needed a function of thunder.jit that has been called."
    )
