"""Experts of Hugging Face's models over an axis: loss, gradients and AdamW steps as in eager torch."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import zoo
from torch import nn

import meshfuse as mf
from frontend_models import gradients_differ_by, train


@pytest.fixture(autouse=True)
def _plan_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MESHFUSE_SEARCH", "fast")


def mesh(**axes: int) -> mf.DeviceMesh:
    return mf.DeviceMesh(tuple(axes.values()), tuple(axes), links="bytes")


def compare(name: str, mesh: mf.DeviceMesh, batch: Any, plan: Any = None, **more: Any) -> Any:
    torch.manual_seed(0)
    found = zoo.MODELS[name]()
    model, eager = found.model.train(), copy.deepcopy(found.model).train()
    mf.parallelize(model, mesh, plan, inputs=dict.fromkeys(found.arguments, batch), experts=mf.Experts("ep"), **more)
    for each in (model, eager):
        each(**found.arguments).loss.backward()
    assert gradients_differ_by(model, eager) < 1e-5
    assert train(model, found.arguments) == pytest.approx(train(eager, found.arguments), rel=1e-5)
    return model


def test_rows_go_to_experts_and_back() -> None:
    model = compare("mixtral", mesh(dp=2, ep=2), [["dp", "ep"], None])
    assert any(e.collective == "exchange" and e.axes == "ep" for e in model.bill().entries)
    assert "experts.down_proj" in model.explain("layers.0.mlp.experts.down_proj")
    assert "moe_dispatch" not in model.config._experts_implementation


@pytest.mark.parametrize("asked", ["by the config", "in the call"])
def test_a_loss_of_routers(asked: str) -> None:
    """Logits of routers are recorded by hooks of transformers, which its first forward would install."""
    torch.manual_seed(0)
    found = zoo.MODELS["mixtral"]()
    found.model.config.output_router_logits = asked == "by the config"
    arguments = found.arguments | ({} if asked == "by the config" else {"output_router_logits": True})
    model, eager = found.model, copy.deepcopy(found.model)
    inputs = {name: ["ep", None] for name in found.arguments}
    mf.parallelize(model, mesh(ep=2), inputs=inputs, experts=mf.Experts("ep"))
    for each in (model, eager):
        each(**arguments).loss.backward()
    assert gradients_differ_by(model, eager) < 1e-5


@pytest.mark.models
@pytest.mark.parametrize(("name", "mesh", "batch", "more"), [
    ("qwen3_moe", mesh(ep=2, tp=2), ["ep", None], {"plan": "hf"}),
    ("qwen3_moe", mesh(ep=3), [None, "ep"], {}),
    ("deepseek_v3", mesh(ep=4), ["ep", None], {}),
    ("mixtral", mesh(dp=2, ep=2), [["dp", "ep"], None], {"fsdp": "dp"}),
    ("mixtral", mesh(dp=2, ep=2), [["dp", "ep"], None], {"checkpoint": "layers.*"}),
    ("mixtral", mesh(dp=2, ep=2, cp=2), ["dp", "cp"], {}),
])  # fmt: skip
def test_models_and_meshes(name: str, mesh: mf.DeviceMesh, batch: Any, more: Any) -> None:
    compare(name, mesh, batch, **more)


@pytest.mark.models
def test_fully_sharded_models_gather_no_experts_over_the_axis_that_these_lie_over() -> None:
    model = compare("mixtral", mesh(ep=2), ["ep", None], fsdp="ep")
    gathered = [e.tensor for e in model.bill().entries if ".gathered" in e.tensor]
    assert any("q_proj" in name for name in gathered) and not any(".experts." in name for name in gathered)


def test_what_is_wrong_with_experts_is_said() -> None:
    model = zoo.MODELS["mixtral"]().model
    two = mesh(ep=2)
    cases = [
        (lambda: mf.Experts(()), "Experts: axes"),
        (lambda: mf.Experts("ep", capacity=1.25), "Experts: capacity: found 1.25"),
        (lambda: mf.parallelize(model, two, experts=3), "parallelize: experts: found 3"),
        (lambda: mf.parallelize(model, two, experts="e"), "experts: unknown mesh axis: found 'e'"),
        (lambda: mf.parallelize(model, two, experts=mf.Experts("ep", "*.attn")), "matches no module with experts"),
        (lambda: mf.parallelize(nn.Linear(2, 2), two, experts="ep"), "Experts: Linear has none"),
        (lambda: mf.parallelize(zoo.hf.GptOssForCausalLM(zoo.hf.GptOssConfig(
            num_hidden_layers=1, num_local_experts=2, hidden_size=8, intermediate_size=8, vocab_size=16, head_dim=4,
            num_attention_heads=2, num_key_value_heads=2, pad_token_id=0)), two, experts="ep"), "has biases"),
    ]  # fmt: skip
    for call, text in cases:
        with pytest.raises(mf.DefinitionError, match=text):
            call()
