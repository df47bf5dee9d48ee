"""Sizes that a graph leaves open stay so, whatever numbers they have while torch traces."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import meshfuse as mf
from frontend_models import difference, pair

WORDS, TOKENS, WIDTH, HEADS = 50, 16, 32, 4
MESH = mf.DeviceMesh((2, 2), ("dp", "tp"))


class Attends(nn.Module):
    """Has tables of positions and heads, so that torch compares its sizes with one another."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(WORDS, WIDTH), nn.Embedding(TOKENS, WIDTH)
        self.layers = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(3)])

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.words(ids) + self.places.weight[: ids.shape[1]]
        for layer in self.layers:
            q = x.view(*x.shape[:2], HEADS, WIDTH // HEADS).transpose(1, 2)
            mixed = nn.functional.scaled_dot_product_attention(q, q, q, is_causal=True)
            x = x + layer(mixed.transpose(1, 2).reshape(x.shape))
        return x @ self.words.weight.T


# As many rows as tokens, as heads, as the width, and as words.
@pytest.mark.parametrize("rows", [TOKENS, HEADS, WIDTH, WORDS, 6])
def test_rows_may_be_as_many_as_any_other_size(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MESHFUSE_SEARCH", "fast")
    model, eager = pair(lambda: Attends().double())
    parallel = mf.parallelize(model, MESH, {"layers.*": "colwise"}, inputs={"ids": ["dp", None]}, dynamic={"ids": [0]})
    for n in (rows, 8, 12):
        ids = torch.randint(0, WORDS, (n, TOKENS))
        assert difference(parallel(ids), eager(ids)) < 1e-12


def _of_some(x: torch.Tensor) -> torch.Tensor:
    assert x.shape[0] in (6, 10)
    return x * x.shape[0] if x.shape[0] == 6 else x + x.shape[0]


def _by_size(x: torch.Tensor) -> torch.Tensor:
    return x * 2 if x.shape[0] > 8 else x + 1


def _by_both(x: torch.Tensor) -> torch.Tensor:
    return x @ x.T if x.shape[0] * x.shape[1] < 36 else x.sum(0)


def _by_remainder(x: torch.Tensor) -> torch.Tensor:
    return x.unflatten(0, (-1, 2)).sum(1) if x.shape[0] % 4 == 0 else x.cumsum(0)


@pytest.mark.parametrize("function", [_of_some, _by_size, _by_both, _by_remainder])
def test_each_way_of_a_forward_that_branches_on_sizes(function: Any) -> None:
    step = mf.compile(function, MESH, inputs={"x": ["dp", None]}, dynamic={"x": [0]})
    for n in (6, 10, 6) if function is _of_some else (6, 10, 8, 12, 4, 6):
        x = torch.randn(n, 4, dtype=torch.float64)
        assert difference(step(x), function(x)) < 1e-12, n


@pytest.mark.parametrize("rows", [12, TOKENS])
def test_a_micro_batch_is_planned_with_its_own_rows(rows: int) -> None:
    with torch.device("meta"):
        model, ids = Attends(), torch.zeros(rows, TOKENS, dtype=torch.long)
    slow = mf.DeviceMesh((2,), ("dp",), flops=1e9, memory=1e9)

    def loss(y: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(y.flatten(0, 1), target.flatten())

    whole, parts = (mf.plan(model, slow, ids, ids, loss=loss, microbatches=m) for m in (1, 2))
    assert parts.seconds < 1.5 * whole.seconds
