"""The GPT example trains on every mesh as on one rank, and as plain torch does."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

EXAMPLE = Path(__file__).parent.parent / "examples" / "gpt"
sys.path.insert(0, str(EXAMPLE))

import data  # noqa: E402
import model  # noqa: E402
import train  # noqa: E402
import train_mesh  # noqa: E402

TINY = model.Config(layers=2, width=32, heads=4, block=16, vocab=256)
STEPS = 50


def _text() -> torch.Tensor:
    return data.to_tokens(data.EVAL_PATH.read_bytes()[:20_000])


@pytest.fixture(scope="module")
def one_rank() -> list[float]:
    return train_mesh.run(_text(), STEPS, train_mesh.parse_mesh("tp=1"), TINY)


@pytest.mark.parametrize("mesh", ["tp=2", "dp=2,tp=2", "tp=2,sp=2", "dp=3"])
def test_the_loss_curve_is_that_of_one_rank(mesh: str, one_rank: list[float]) -> None:
    found = train_mesh.run(_text(), STEPS, train_mesh.parse_mesh(mesh), TINY)
    assert one_rank[-1] < one_rank[0] - 0.5
    assert found == pytest.approx(one_rank, abs=1e-5, rel=0)


def test_the_loss_curve_is_that_of_plain_torch(one_rank: list[float]) -> None:
    params = {name: value.requires_grad_() for name, value in model.init_params(train.SEED, TINY).items()}
    optimizer, text = train.make_optimizer(params), _text()
    generator = torch.Generator().manual_seed(train.SEED)
    losses = []
    for step in range(1, STEPS + 1):
        train.set_rate(optimizer, train.learning_rate(step, STEPS))
        loss = model.loss(params, *train_mesh.sample_batch(text, TINY.block, generator), TINY)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(params.values(), train.GRADIENT_LIMIT)
        optimizer.step()
        losses.append(loss.item())
    assert one_rank == pytest.approx(losses, abs=1e-5, rel=0)
