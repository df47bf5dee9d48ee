"""Pipelines over real ranks: training, clipping, checkpoints on another cut, and a stage that is killed."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any

import forked
import pytest
import torch
from rank_pool import base_environment

import meshfuse as mf

sys.path.insert(0, str(Path(__file__).parent.parent))
from frontend_models import pair
from pipeline_models import Words, loss_of, words

pytestmark = pytest.mark.ranks

AXES = ("pp", "dp")


def fast() -> None:
    os.environ["MESHFUSE_SEARCH"] = "fast"


def rows(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's rows on a mesh of 2 stages and 2 data parallel ranks."""
    return tensor.chunk(2)[mf.World.current().rank % 2]


def wrong_by(model: Any, eager: Any) -> float:
    weights = dict(eager.named_parameters())
    found = [
        (getattr(p, "full_tensor", lambda p=p: p)() - weights[n]).abs().max().item()
        for n, p in model.named_parameters()
    ]
    return max(found, default=0.0)


def on_rank_training(folder: str) -> dict[str, Any]:
    """Train on 2 stages by 2 ranks with weights cut, save, and resume on 4 stages."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict

    fast()
    model, eager = pair(Words)
    mf.parallelize(
        model, mf.DeviceMesh((2, 2), AXES), inputs={"words": ["dp", None], "target": ["dp", None]}, fsdp="dp",
        pipeline=mf.Pipeline("pp", "1f1b", 2), loss=loss_of,
    )  # fmt: skip
    ours, theirs = (torch.optim.AdamW(m.parameters(), lr=1e-2) for m in (model, eager))
    steps = []
    for step in range(3):
        x, y = words(step), words(step + 5)
        loss = model.step(rows(x), rows(y))
        wanted = loss_of(eager(x), y)
        wanted.backward()
        norms = model.clip_grad_norm_(0.1), torch.nn.utils.clip_grad_norm_(eager.parameters(), 0.1)
        steps.append(max(abs(loss - wanted).item(), abs(norms[0] - norms[1]).item()))
        for optimizer in (ours, theirs):
            optimizer.step()
            optimizer.zero_grad()
    found = {"steps": max(steps), "weights": wrong_by(model, eager), "names": sorted(model.state_dict())}
    dcp.save({"model": get_model_state_dict(model)}, checkpoint_id=folder)
    with torch.device("meta"):
        other: Any = Words()
    mf.parallelize(other, mf.DeviceMesh((4,), ("pp",)), pipeline=mf.Pipeline("pp", "zero-bubble", 4), loss=loss_of)
    other.init_weights(3)
    state = {"model": get_model_state_dict(other)}
    dcp.load(state, checkpoint_id=folder)
    set_model_state_dict(other, state["model"], options=StateDictOptions(strict=False))
    found["resumed"] = wrong_by(other, eager)
    found |= with_our_own(folder, model, other, eager)
    with torch.no_grad():
        found["loss"] = abs(other.step(words(7), words(8)) - loss_of(eager(words(7)), words(8))).item()
    return found


def with_our_own(folder: str, model: Any, other: Any, eager: Any) -> dict[str, Any]:
    """The same by mf.save and mf.load, also to a model of one stage."""
    mf.save(f"{folder}/own", {"step": 3, **model.state_dict()})
    other.init_weights(4)
    before = wrong_by(other, eager)
    mf.load(f"{folder}/own", other.state_dict())
    with torch.device("meta"):
        whole: Any = Words()
    mf.parallelize(whole, mf.DeviceMesh((4,), ("dp",)), inputs={"words": ["dp", None]}, fsdp="dp")
    whole.init_weights(5)
    assert mf.load(f"{folder}/own", {"step": None, **whole.state_dict()})["step"] == 3
    plain = mf.load(f"{folder}/own")
    names = dict(eager.state_dict())
    return {
        "initial": before, "own": wrong_by(other, eager), "whole": wrong_by(whole, eager),
        "plain": max((plain[name] - value).abs().max().item() for name, value in names.items()),
    }  # fmt: skip


def test_training_and_resuming_on_another_cut(ranks4: Any, tmp_path: Path) -> None:
    results = ranks4.run(on_rank_training, str(tmp_path), timeout=250)
    for found in results:
        assert found["own"] < 1e-5 and found["whole"] < 1e-5 and found["plain"] < 1e-5 < found["initial"]
        assert found["steps"] < 1e-5 and found["weights"] < 1e-5 and found["resumed"] < 1e-5 and found["loss"] < 1e-5
    assert results[0]["names"] == results[1]["names"]  # a rank has the weights of its own stages
    assert "layers.0.up.bias" in results[0]["names"] and "layers.3.up.bias" in results[3]["names"]
    assert set(results[0]["names"]) & set(results[3]["names"]) <= {"embed.weight", "head.weight"}


def on_rank_schedules() -> dict[str, Any]:
    fast()
    found = {}
    for schedule, microbatches in (("zbv", 4), ("interleaved", 3)):
        model, eager = pair(lambda: Words().double())
        mf.parallelize(
            model, mf.DeviceMesh((2,), ("pp",)), pipeline=mf.Pipeline("pp", schedule, microbatches), loss=loss_of
        )
        loss, wanted = model.step(words(0, 7), words(1, 7)), loss_of(eager(words(0, 7)), words(1, 7))
        wanted.backward()
        weights = dict(eager.named_parameters())
        wrong = [(p.grad - weights[n].grad).abs().max().item() for n, p in model.named_parameters()]
        found[schedule] = max(abs(loss - wanted).item(), *wrong)
    return found


def test_schedules_with_several_stages_on_a_rank(ranks2: Any) -> None:
    for found in ranks2.run(on_rank_schedules, timeout=140):
        assert max(found.values()) < 1e-12


SCRIPT = """
import os, signal, torch, meshfuse as mf
from torch import nn
torch.manual_seed(0)
model = nn.Sequential(*[nn.Linear(8, 8) for _ in range(2)])
mf.parallelize(model, mf.DeviceMesh((2,), ("pp",)), pipeline=mf.Pipeline("pp", "1f1b", 4),
               loss=lambda x, y: (x - y).square().mean())
for step in range(6):
    if step == 5 and mf.World.current().rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    model.step(torch.ones(8, 8), torch.zeros(8, 8))
"""


def test_a_stage_that_is_killed_is_named(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    start = time.monotonic()
    words = ["-m", "meshfuse", "run", "--ranks", "2", str(script)]
    done = forked.finished(words, base_environment(MESHFUSE_SEARCH="fast"), tmp_path, 100)
    assert done.returncode and time.monotonic() - start < 100
    assert "rank 1 was killed by SIGKILL" in done.stderr
    assert "the backward of stage 0, micro-batch 0" in done.stderr
