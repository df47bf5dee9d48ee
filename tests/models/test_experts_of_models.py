"""Experts of Hugging Face's models over an axis: loss, gradients and AdamW steps as in eager torch."""

from __future__ import annotations

import copy
import itertools
import math
from collections import Counter
from fractions import Fraction
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import zoo
from torch import nn
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

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


def one_by_one(capacity: Fraction, groups: int, dropped: list[int]) -> Any:
    """Experts of transformers with room for some rows, as a loop over tokens."""

    def forward(self: Any, hidden: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        tokens, k = chosen.shape
        of_group = -(-tokens // groups)
        room, taken = math.ceil(capacity * of_group * k / self.num_experts), Counter[tuple[int, int]]()
        out = [torch.zeros_like(row) for row in hidden]
        for t, j in itertools.product(range(tokens), range(k)):
            expert = int(chosen[t, j])
            taken[t // of_group, expert] += 1
            if taken[t // of_group, expert] > room:
                dropped[0] += 1
                continue
            gate, up = F.linear(hidden[t], self.gate_up_proj[expert]).chunk(2, -1)
            out[t] = out[t] + F.linear(self.act_fn(gate) * up, self.down_proj[expert]) * weights[t, j]
        return torch.stack(out)

    return forward


@pytest.mark.parametrize(("mesh", "batch", "groups", "rows", "more"), [
    (mesh(ep=4), ["ep", None], None, 8, {}),
    (mesh(ep=2), [None, None], 3, 4, {}),  # groups that do not divide the tokens
    pytest.param(mesh(dp=2, ep=2), [["dp", "ep"], None], None, 4, {"fsdp": "dp"}, marks=pytest.mark.models),
    pytest.param(mesh(ep=2, tp=2), ["ep", None], 4, 8, {"plan": "hf"}, marks=pytest.mark.models),
])  # fmt: skip
def test_experts_have_room_for_so_many_rows(
    mesh: mf.DeviceMesh, batch: Any, groups: int | None, rows: int, more: Any
) -> None:
    torch.manual_seed(0)
    model = zoo.MODELS["mixtral"]().model.train()
    eager, tokens = copy.deepcopy(model), torch.randint(0, 64, (rows, 8))
    experts = mf.Experts("ep", capacity=1.1, groups=groups)
    mf.parallelize(model, mesh, inputs={"input_ids": batch, "labels": batch}, experts=experts, **more)
    used, dropped = groups or (mesh.size if batch[0] else 1), [0]
    ALL_EXPERTS_FUNCTIONS.register("one_by_one", one_by_one(Fraction("1.1"), used, dropped))
    eager.config._experts_implementation = "one_by_one"
    losses = [each(input_ids=tokens, labels=tokens).loss for each in (model, eager)]
    assert dropped[0] > 0
    torch.testing.assert_close(losses[0], losses[1], rtol=1e-5, atol=0)
    for loss in losses:
        loss.backward()
    assert gradients_differ_by(model, eager) < 1e-5
    assert not any(entry.collective == "exchange" for entry in model.bill().entries)


def test_rows_of_experts_with_room_go_by_one_all_to_all_each_way() -> None:
    config = zoo.hf.MixtralConfig(
        vocab_size=64, hidden_size=64, intermediate_size=128, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=2, num_local_experts=8, num_experts_per_tok=2,
    )  # fmt: skip
    part = zoo.hf.MixtralForCausalLM(config).model.layers[0].mlp
    four = mesh(ep=4)
    mf.parallelize(part, four, inputs={"hidden_states": ["ep", None, None]},
                   experts=mf.Experts("ep", capacity=1.25))  # fmt: skip
    part(torch.randn(8, 32, 64).requires_grad_()).square().sum().backward()
    room = -(-2 * 32 * 2 * 5 // (8 * 4))  # rows of an expert for a rank's two sequences
    sent = 8 * room * 64 * 4 * 3 // 4
    found = [entry.wire for entry in part.bill().entries if entry.collective in ("all-to-all", "window")]
    assert found == [sent] * 4


def test_what_is_wrong_with_experts_is_said() -> None:
    model = zoo.MODELS["mixtral"]().model
    two = mesh(ep=2)
    cases = [
        (lambda: mf.Experts(()), "Experts: axes"),
        (lambda: mf.Experts("ep", capacity=0), "Experts: capacity: found 0, needed a number above 0"),
        (lambda: mf.Experts("ep", capacity="1"), "Experts: capacity: found '1'"),
        (lambda: mf.Experts("ep", groups=2), "Experts: groups: found 2, needed a capacity"),
        (lambda: mf.Experts("ep", capacity=1.0, groups=0), "Experts: groups: found 0, needed a number from 1 on"),
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
