"""The GPT example trains on every mesh as on one rank, and as plain torch does."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

from scripts import script

EXAMPLE = Path(__file__).parent.parent / "examples" / "gpt"
sys.path.insert(0, str(EXAMPLE))

import data  # noqa: E402
import fused  # noqa: E402
import model  # noqa: E402
import train  # noqa: E402
import train_mesh  # noqa: E402

TINY = model.Config(layers=2, width=32, heads=4, block=16, vocab=256)
STEPS = 50

# By its path: another folder on the tests' path has a `run`, too.
run = script("examples/gpt/run.py")


def _text() -> torch.Tensor:
    return data.to_tokens(data.EVAL_PATH.read_bytes()[:20_000])


@pytest.fixture(scope="module")
def one_rank() -> list[float]:
    return train_mesh.run(_text(), STEPS, fused.parse_mesh("tp=1"), TINY)


@pytest.mark.slow
@pytest.mark.parametrize("mesh", ["tp=2", "dp=3"])
def test_the_loss_curve_is_that_of_one_rank(mesh: str, one_rank: list[float]) -> None:
    found = train_mesh.run(_text(), STEPS, fused.parse_mesh(mesh), TINY)
    assert one_rank[-1] < one_rank[0] - 0.5
    assert found == pytest.approx(one_rank, abs=1e-5, rel=0)


@pytest.mark.slow
@pytest.mark.usefixtures("over_whole_axes")
def test_the_loss_curve_on_two_axes_is_that_of_one_rank(one_rank: list[float]) -> None:
    found = train_mesh.run(_text(), STEPS, fused.parse_mesh("tp=2,sp=2"), TINY)
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


@pytest.mark.parametrize("program", [run, train_mesh], ids=lambda program: program.__name__)
@pytest.mark.parametrize("mesh", ["dp=2,tp", "dp=2,dp=2", "pp=2", "dp=0", "dp=-1", "dp=two", "", "dp=2,", "dp==2"])
def test_the_command_line_refuses_a_malformed_mesh(
    program: ModuleType, mesh: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["example", "--mesh", mesh])
    with pytest.raises(SystemExit, match="2"):
        program.main()
    assert f"--mesh: found {mesh!r}, needed axes of dp, tp and sp with their sizes. Write" in capsys.readouterr().err


@pytest.mark.parametrize("words", ["--steps 0", "--batch -1", "--batch 1.5"])
def test_the_command_line_refuses_useless_numbers(
    words: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["run.py", *words.split()])
    with pytest.raises(SystemExit, match="2"):
        run.main()
    name, number = words.split()
    assert f"argument {name}: found {number!r}, needed a whole number above 0" in capsys.readouterr().err
