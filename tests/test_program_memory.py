"""Modelled memory with buffers of communications, against what torch allocates in a rank's program."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

import meshfuse as mf
from meshfuse.frontends.parallel_module import _halves
from program_memory import measured_bytes
from test_units import of_layers, stack


@pytest.mark.parametrize("fsdp", [mf.FSDP("dp", prefetch=0), mf.FSDP("dp", prefetch=1), mf.FSDP("dp", 2)])
def test_definitions_with_units(fsdp: mf.FSDP) -> None:
    made = stack(of_layers(fsdp), width=256)
    assert made.fd.memory().total == pytest.approx(measured_bytes(made.fd), rel=0.01)


def test_programs_without_units() -> None:
    """All-reduces and exchanges, and what stays until their waits."""
    mesh = mf.DeviceMesh((4,), ("tp",))
    with mf.FusionDefinition() as fd:
        x = fd.define_tensor([64, 256])
        up, down = fd.define_tensor([512, 256]), fd.define_tensor([256, 512])
        y = fd.ops.linear(fd.ops.gelu(fd.ops.linear(x, up)), down)
        for out in (y, *fd.grad(fd.ops.sum(y, [0, 1]), [up, down])):
            fd.add_output(out)
        fd.mesh_split(x, mesh, [None, None])
        fd.mesh_split(up, mesh, ["tp", None], stationary=True)
        fd.mesh_split(down, mesh, [None, "tp"], stationary=True)
    assert fd.memory().total == pytest.approx(measured_bytes(fd), rel=0.1)


def llama() -> nn.Module:
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(
        vocab_size=256, hidden_size=64, intermediate_size=176, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, use_cache=False, max_position_embeddings=64,
    ))  # fmt: skip


@pytest.mark.parametrize("pipeline", [None, mf.Pipeline("pp", "1f1b", 2)])
def test_a_llama_with_recomputation(pipeline: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fully sharded, without and with stages: all programs that its ranks run."""
    monkeypatch.setenv("MESHFUSE_SEARCH", "fast")
    mesh = mf.DeviceMesh((2, 2), ("pp", "dp")) if pipeline is not None else mf.DeviceMesh((2,), ("dp",))
    rows = {"input_ids": ["dp", None], "labels": ["dp", None]}
    model = mf.parallelize(llama(), mesh, inputs=rows, fsdp="dp", checkpoint="model.layers.*", pipeline=pipeline)
    tokens = torch.randint(256, (4, 64))
    if pipeline is not None:
        model.step(input_ids=tokens, labels=tokens)
    else:
        model(input_ids=tokens, labels=tokens).loss.backward()
    assert "more in buffers" in model.memory() or "in sums of gradients" in model.memory()
    for half in _halves(model).values():
        compiled = half.fd.latest()
        assert half.fd.memory().total == pytest.approx(measured_bytes(half.fd, compiled.ranks[0]), rel=0.1)
