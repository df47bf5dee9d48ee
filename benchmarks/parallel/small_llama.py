"""The model of all measurements: a small Llama, in parts for a pipeline written with torch's own stages."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRMSNorm, LlamaRotaryEmbedding

VOCAB, LENGTH = 512, 128


def config(layers: int) -> LlamaConfig:
    made = LlamaConfig(
        vocab_size=VOCAB, hidden_size=256, intermediate_size=704, num_hidden_layers=layers, num_attention_heads=8,
        num_key_value_heads=4, max_position_embeddings=LENGTH, use_cache=False,
    )  # fmt: skip
    made._attn_implementation = "sdpa"
    return made


class Llama(nn.Module):
    """Words to logits; a part of it if it lacks the embedding, layers, or the head."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.config = config(layers)
        self.embed: nn.Module | None = nn.Embedding(VOCAB, self.config.hidden_size)
        self.layers = nn.ModuleList([LlamaDecoderLayer(self.config, i) for i in range(layers)])
        self.norm: nn.Module | None = LlamaRMSNorm(self.config.hidden_size)
        self.head: nn.Module | None = nn.Linear(self.config.hidden_size, VOCAB, bias=False)
        self.rotary = LlamaRotaryEmbedding(self.config)
        for parameter in self.parameters():
            if parameter.ndim > 1:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = x if self.embed is None else self.embed(x)
        positions = torch.arange(hidden.shape[1], device=hidden.device)[None]
        angles = self.rotary(hidden, positions)
        for layer in self.layers:
            hidden = layer(hidden, position_embeddings=angles, position_ids=positions)
        return hidden if self.norm is None or self.head is None else self.head(self.norm(hidden))


def part_of(model: Llama, stage: int, stages: int) -> Llama:
    """The part of a model that a stage has: as many layers as all others."""
    each = len(model.layers) // stages
    model.layers = nn.ModuleList(list(model.layers)[stage * each : (stage + 1) * each])
    if stage > 0:
        model.embed = None
    if stage < stages - 1:
        model.norm = model.head = None
    return model


def cross_entropy(logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits.flatten(0, 1), target.flatten())


def batch(rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    words = torch.randint(VOCAB, (rows, LENGTH + 1), generator=generator)
    return words[:, :-1].contiguous(), words[:, 1:].contiguous()


def gradient(parameter: Any) -> torch.Tensor:
    """The whole gradient of a parameter, which may be a DTensor; every rank asks for it."""
    found = parameter.grad
    return found.full_tensor() if hasattr(found, "full_tensor") else found
