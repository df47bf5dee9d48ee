"""Small models that the tests of frontends run, and what compares them with the same model in eager torch."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import meshfuse as mf

VOCABULARY, WIDTH = 48, 16


class Block(nn.Module):
    """A transformer's layer, with causal attention as torch has it."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, s, _ = x.shape
        q, k, v = (y.view(b, s, 4, WIDTH // 4).transpose(1, 2) for y in self.qkv(self.norm1(x)).chunk(3, -1))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(b, s, WIDTH))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Gpt(nn.Module):
    """A small GPT with tied embeddings, a parameter that nothing uses, and a loss if there are targets."""

    def __init__(self, layers: int = 2) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(32, WIDTH)
        self.layers = nn.ModuleList([Block() for _ in range(layers)])
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.tokens.weight
        self.idle = nn.Parameter(torch.ones(3))

    def reset_parameters(self) -> None:
        nn.init.ones_(self.idle)

    def forward(self, ids: torch.Tensor, targets: torch.Tensor | None = None) -> Any:
        x = self.tokens(ids) + self.places(torch.arange(ids.shape[1], device=ids.device))
        for layer in self.layers:
            x = layer(x)
        logits = self.head(self.norm(x))
        if targets is None:
            return logits
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten()), logits


GPT_PLAN: dict[str, Any] = {
    "layers.*.qkv": [[mf.Split(3), "tp"], None],
    "layers.*.out": "rowwise", "layers.*.up": "colwise", "layers.*.down": "rowwise",
    "tokens": ["tp", None],
}  # fmt: skip


def pair(make: Any, *args: Any) -> tuple[Any, Any]:
    """A model and an equal one that stays as it is."""
    torch.manual_seed(0)
    model = make(*args)
    return model, copy.deepcopy(model)


def whole(tensor: Any) -> torch.Tensor:
    """The whole tensor of a DTensor; any other as it is."""
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def difference(found: Any, wanted: torch.Tensor) -> float:
    """The greatest difference, relative to the greatest element of what is wanted (or to 1e-4)."""
    wanted = whole(wanted)
    return float((whole(found).detach() - wanted.detach()).abs().max() / max(float(wanted.detach().abs().max()), 1e-4))


def gradients_differ_by(model: nn.Module, other: nn.Module) -> float:
    """The greatest difference of two models' gradients; both lack the same ones."""
    worst = 0.0
    for (name, p), (same, q) in zip(model.named_parameters(), other.named_parameters(), strict=True):
        assert name == same and (p.grad is None) == (q.grad is None), name
        if q.grad is not None:
            worst = max(worst, difference(p.grad, q.grad))
    return worst


def parameters_differ_by(model: nn.Module, other: nn.Module) -> float:
    return max(difference(p, q) for p, q in zip(model.parameters(), other.parameters(), strict=True))


def worse_than_eager_by(model: nn.Module, eager: nn.Module, exact: nn.Module) -> float:
    """The greatest distance of a model's parameters from those of float64, beyond twice eager's own.

    A step of AdamW makes much of a gradient that is all rounding, as that of a bias is which starts at 0.
    """
    rows = zip(model.parameters(), eager.parameters(), exact.parameters(), strict=True)
    return max(difference(whole(p).double(), r) - 2 * difference(q.double(), r) for p, q, r in rows)


def train(model: nn.Module, arguments: dict[str, torch.Tensor], steps: int = 3) -> list[float]:
    """The losses and norms of steps of AdamW with clipping."""
    optimizer, found = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=True), []
    for _ in range(steps):
        results = model(**arguments)
        loss = results[0] if isinstance(results, tuple) else results.loss
        loss.backward()
        norm = whole(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0))
        optimizer.step()
        optimizer.zero_grad()
        found += [float(loss.detach()), float(norm)]
    return found
