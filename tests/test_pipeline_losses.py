"""Losses of a step of micro-batches that are no mean over rows: those of the whole batch, as in eager torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import meshfuse as mf
from frontend_models import gradients_differ_by, pair
from pipeline_models import WORDS, Words, words

PP, PLANE = mf.DeviceMesh((2,), ("pp",)), mf.DeviceMesh((2, 2), ("pp", "dp"), links="bytes")
WEIGHTS = torch.rand(WORDS, dtype=torch.float64, generator=torch.Generator().manual_seed(3)) + 0.1


@pytest.fixture(autouse=True)
def _plan_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MESHFUSE_SEARCH", "fast")


class Small(nn.Module):
    """Scores of words, by two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, 4)
        self.layers = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, WORDS)])

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        x = self.embed(words)
        for layer in self.layers:
            x = layer(x)
        return x


def entropies(scores: torch.Tensor, target: torch.Tensor, **options: Any) -> torch.Tensor:
    return F.cross_entropy(scores.flatten(0, 1), target.flatten(), **options)


def of_each(scores: torch.Tensor, target: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(the loss of each token, which of them count)."""
    return entropies(scores, target, reduction="none").view_as(target), (target > 5).double()


def masked(scores: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    each, counts = of_each(scores, target)
    return (each * counts).sum() / counts.sum().clamp(min=1)


def several(scores: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return entropies(scores, target) + 0.3 * masked(scores, target) - 0.1 * scores.square().mean()


def divided_first(scores: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    each, counts = of_each(scores, target)
    return (each * counts / counts.sum()).sum()


def times_a_reciprocal(scores: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    each, counts = of_each(scores, target)
    return (each * counts).sum() * (1 / counts.sum())


def mean_over_mean(scores: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    each, counts = of_each(scores, target)
    return (each * counts).mean() / counts.mean()


Loss = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
LOSSES: dict[str, Loss] = {
    "targets left out": entropies,
    "weights of classes": lambda y, t: entropies(y, t, weight=WEIGHTS),
    "smoothed labels": lambda y, t: entropies(y, t, label_smoothing=0.1),
    "a mask": masked,
    "several terms": several,
    "divided before the sum": divided_first,
    "times a reciprocal": times_a_reciprocal,
    "a mean over a mean": mean_over_mean,
    "a sum": lambda y, t: entropies(y, t, reduction="sum"),
    "a sum by a number of one's own": lambda y, t: entropies(y, t, reduction="sum") / 19.0,
    "a sum by the rows": lambda y, t: entropies(y, t, reduction="sum") / t.shape[0],
    "a sum by the elements": lambda y, t: entropies(y, t, reduction="sum") / t.numel(),
    "a mean of sums": lambda y, t: of_each(y, t)[0].sum(1).mean(),
}


def batch(rows: int = 7) -> tuple[torch.Tensor, torch.Tensor]:
    """Words and targets, most of which the first micro-batch leaves out."""
    x, y = words(0, rows), words(1, rows)
    y[:2], y[2, 1:] = -100, -100
    return x, y


def differ(model: Any, eager: Any, loss: Loss, rows: int = 7, **named: Any) -> float:
    x, y = batch(rows)
    found, wanted = model.step(x, y, **named), loss(eager(x), y)
    wanted.backward()
    return max(abs(found.item() - wanted.item()), gradients_differ_by(model, eager))


@pytest.mark.parametrize("name", LOSSES)
def test_a_loss_is_that_of_the_whole_batch(name: str) -> None:
    model, eager = pair(lambda: Small().double())
    mf.parallelize(model, PP, pipeline=mf.Pipeline("pp", microbatches=3), loss=LOSSES[name])
    assert differ(model, eager, LOSSES[name]) < 1e-12


@pytest.mark.parametrize("schedule", ["zero-bubble", "zbv"])
def test_with_a_split_backward_over_ranks_of_data(schedule: str) -> None:
    """What is counted is summed over the ranks of the last stage, and stands in the bill."""
    model, eager = pair(lambda: Words().double())
    mf.parallelize(
        model, PLANE, pipeline=mf.Pipeline("pp", schedule, microbatches=2), loss=masked, fsdp="dp",
        inputs={"words": ["dp", None], "target": ["dp", None]},
    )  # fmt: skip
    assert differ(model, eager, masked, 8) < 1e-12
    counted = [e for e in model.bill().entries if e.collective == "all-reduce x2" and e.wire == 2 * 8]
    assert len(counted) == 2  # what is counted, and the loss


class Summed(Small):
    """Returns a loss: a sum over targets, divided by a number that the script knows."""

    def forward(self, words: torch.Tensor, target: torch.Tensor, count: torch.Tensor) -> torch.Tensor:
        return entropies(super().forward(words), target, reduction="sum") / count


def test_a_sum_by_a_number_that_is_passed() -> None:
    model, eager = pair(lambda: Summed().double())
    mf.parallelize(model, PP, pipeline=mf.Pipeline("pp", microbatches=2))
    (x, y), count = batch(), torch.tensor(17.0, dtype=torch.float64)
    found, wanted = model.step(x, y, count), eager(x, y, count)
    wanted.backward()
    assert abs(found.item() - wanted.item()) < 1e-12 and gradients_differ_by(model, eager) < 1e-12


def test_micro_batches_without_a_pipeline() -> None:
    model, eager = pair(lambda: Small().double())
    x, y = batch(8)
    plan = mf.plan(model, mf.DeviceMesh((2,), ("dp",)), x, y, loss=masked, microbatches=2)
    mf.parallelize(model, mf.DeviceMesh((2,), ("dp",)), plan, loss=masked)
    assert differ(model, eager, masked, 8) < 1e-12
