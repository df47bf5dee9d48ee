"""Models of Hugging Face over simulated ranks: loss, gradients, buffers and AdamW steps as in eager torch."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import zoo

import meshfuse as mf
from frontend_models import difference, gradients_differ_by, train

MESHES = {
    "dp2tp2": mf.DeviceMesh((2, 2), ("dp", "tp")), "dp2": mf.DeviceMesh((2, 1), ("dp", "tp")),
    "tp4": mf.DeviceMesh((1, 4), ("dp", "tp")), "tp3": mf.DeviceMesh((1, 3), ("dp", "tp")),
    "tp8": mf.DeviceMesh((1, 8), ("dp", "tp")),
}  # fmt: skip
# Gradients that are 0 but for rounding; AdamW would make steps of it.
_NOISY = ("phi", "qwen2", "gpt2", "bert", "vit", "whisper", "t5")


@pytest.fixture(autouse=True)
def _plan_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MESHFUSE_SEARCH", "fast")


def example(name: str) -> tuple[Any, Any, zoo.Example]:
    torch.manual_seed(0)
    found = zoo.MODELS[name]()
    return found.model.train(), copy.deepcopy(found.model).train(), found


def parallel(found: zoo.Example, mesh: mf.DeviceMesh, name: str, **more: Any) -> Any:
    specs = {key: ["dp", *[None] * (value.ndim - 1)] for key, value in found.arguments.items()}
    return mf.parallelize(found.model, mesh, found.plan, inputs=specs, **more)


def compare(name: str, mesh: mf.DeviceMesh, **more: Any) -> None:
    model, eager, found = example(name)
    parallel(found, mesh, name, **more)
    for each in (model, eager):
        each(**found.arguments).loss.backward()
    assert gradients_differ_by(model, eager) < (5e-4 if name in _NOISY else 1e-5)
    for key, buffer in eager.named_buffers():
        assert difference(model.get_buffer(key).double(), buffer.double()) < 1e-5, key
    if name not in _NOISY:
        assert train(model, found.arguments) == pytest.approx(train(eager, found.arguments), rel=1e-5)


@pytest.mark.models
@pytest.mark.parametrize("name", list(zoo.MODELS))
def test_model(name: str) -> None:
    compare(name, MESHES["dp2tp2"])


@pytest.mark.models
@pytest.mark.parametrize(("name", "mesh"), [
    ("llama", "tp3"), ("llama", "tp8"), ("llama", "dp2"), ("llama", "tp4"), ("gpt2", "tp3"), ("mixtral", "tp4"),
])  # fmt: skip
def test_heads_that_do_not_divide(name: str, mesh: str) -> None:
    compare(name, MESHES[mesh])


def test_a_llama_by_its_own_plan() -> None:
    compare("llama", MESHES["dp2tp2"], fsdp="dp")


def test_generation_is_equal_token_by_token() -> None:
    from meshfuse.frontends.module_state import STATE

    model, eager, found = example("llama")
    mf.parallelize(model.eval(), mf.DeviceMesh((2,), ("tp",)), "hf")
    options: dict[str, Any] = {"max_new_tokens": 6, "do_sample": False}
    prompt = found.arguments["input_ids"][:2, :5]
    wanted = eager.eval().generate(prompt, **options)
    assert torch.equal(model.generate(prompt, **options), wanted)
    made = len(getattr(model, STATE).runners)
    assert made == 2 and torch.equal(model.generate(prompt, **options), wanted)
    assert len(getattr(model, STATE).runners) == made


def test_checkpointing_and_recorded_states() -> None:
    """As transformers has them: regions of torch.utils.checkpoint, and hidden states recorded by hooks."""
    model, eager, found = example("llama")
    for each in (model, eager):
        each.gradient_checkpointing_enable()
    parallel(found, MESHES["dp2tp2"], "llama")
    results = [each(**found.arguments, output_hidden_states=True) for each in (model, eager)]
    assert len(results[0].hidden_states) == len(results[1].hidden_states) == 3
    for ours, theirs in zip(*(result.hidden_states for result in results), strict=True):
        assert difference(ours, theirs) < 1e-5
    for result in results:
        result.loss.backward()
    assert gradients_differ_by(model, eager) < 1e-5
