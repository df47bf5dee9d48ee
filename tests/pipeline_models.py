"""A small model with what is hard about pipelines: tied weights and a skip connection over stages, and masks."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

WORDS, WIDTH = 24, 8


class Layer(nn.Module):
    """A residual layer with a bias, whose gradient reads no activation."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 16), nn.Linear(16, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.relu(self.up(self.norm(x))))


class Words(nn.Module):
    """Embedding, layers, and a head that is tied to the embedding and reads its result once more."""

    def __init__(self, layers: int = 4) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.layers = nn.ModuleList([Layer() for _ in range(layers)])
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        kept = (words > 2).unsqueeze(-1)  # depends on no weight: each stage makes its own
        first = x = self.embed(words) * kept
        for layer in self.layers:
            x = layer(x) * kept
        return self.head(self.norm(x + 0.5 * first))


def loss_of(scores: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(scores.flatten(0, 1), target.flatten())


def words(seed: int, rows: int = 8, length: int = 4) -> torch.Tensor:
    return torch.randint(WORDS, (rows, length), generator=torch.Generator().manual_seed(seed))
