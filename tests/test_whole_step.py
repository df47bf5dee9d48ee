"""Steps of all ranks that are made, verified and played without running: models on meta, and failures of hosts."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import meshfuse as mf
from meshfuse.frontends.module_state import STATE
from meshfuse.frontends.pipeline.few_stages import all_stages
from meshfuse.frontends.pipeline.whole_step import WholeStep
from meshfuse.report.failures import Job, play_failures

LINK = mf.Link(1e9, 1e-6)


class Layer(nn.Module):
    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(64, width), nn.Linear(width, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(x)))


def mse(result: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return (result - target).square().mean()


PLAN = {"*.up.weight": ["tp", None], "*.up.bias": ["tp"], "*.down.weight": [None, "tp"]}


def parallel(
    ranks: tuple[int, int, int], layers: int, schedule: str = "1f1b", microbatches: int = 4, link: mf.Link = LINK
) -> Any:  # fmt: skip
    mesh = mf.DeviceMesh(ranks, ("pp", "dp", "tp"), links=link, flops=1e12, memory=1e12)
    with torch.device("meta"):
        model = nn.Sequential(*[Layer() for _ in range(layers)])
    return mf.parallelize(
        model, mesh, PLAN, inputs={"input": ["dp", None], "target": ["dp", None]}, loss=mse,
        pipeline=mf.Pipeline("pp", schedule, microbatches),
    )  # fmt: skip


def batch(rows: int) -> torch.Tensor:
    return torch.empty(rows, 64, device="meta")


def whole_step(model: Any, x: torch.Tensor) -> WholeStep:
    return getattr(model, STATE).stepper.whole_step((x, x), {}, mf.errors.caller_line())


def test_a_step_of_stages_that_stand_for_others_is_that_of_all_stages(monkeypatch: pytest.MonkeyPatch) -> None:
    few = parallel((5, 2, 1), 5).play(batch(16), batch(16))
    monkeypatch.setattr(
        "meshfuse.frontends.pipeline.door.few_stages", lambda module, assignment, plan: all_stages(assignment)
    )  # fmt: skip
    every = parallel((5, 2, 1), 5).play(batch(16), batch(16))
    assert few.programs < every.programs and few.in_all == every.in_all
    assert few.seconds == pytest.approx(every.seconds, rel=1e-9)
    for one, other in zip(few.rows, every.rows, strict=True):
        assert dataclasses.astuple(one)[2:] == pytest.approx(dataclasses.astuple(other)[2:], rel=1e-9)
    for name in ("bubble", "exposed", "peak", "memory"):
        assert getattr(few, name) == pytest.approx(getattr(every, name), rel=1e-9)


def test_how_many_programs_are_made_does_not_grow_with_the_ranks() -> None:
    small, large = (parallel(ranks, 8).play(batch(1024), batch(1024)) for ranks in ((4, 2, 2), (8, 128, 2)))
    assert large.programs == small.programs and large.ranks == 2048
    assert large.in_all == 2048 * large.programs // 3  # Programs of three kinds of stages, on every rank of each stage.


def test_a_step_has_the_operations_of_its_model() -> None:
    """Each weight has a product of two operations forward and two more backward, but for the first layer's input."""
    played = parallel((2, 1, 1), 2, microbatches=2).play(batch(16), batch(16))
    done = played.peak * played.seconds * played.flops * played.ranks
    products = 16 * 2 * (2 * 64 * 64) * (2 * 2 + 1) + 16 * 2 * (64 * 64) * 1
    assert products <= done <= 1.2 * products


def test_the_bubble_is_that_of_the_schedule() -> None:
    """On links that take no time (p - 1) / (m + p - 1), with what the first and the last stage do less and more."""
    played = parallel((4, 1, 1), 12, "gpipe", 12, mf.Link(1e15, 0)).play(batch(12 * 64), batch(12 * 64))
    assert played.bubble == pytest.approx(3 / 15, abs=0.06)
    assert played.exposed == 0.0


def test_a_stage_that_takes_what_nobody_sends_is_refused() -> None:
    step = whole_step(parallel((4, 2, 1), 4), batch(16))
    step.verify()
    (planned,) = dict.fromkeys(step.planned)
    programs = dict(planned.programs)
    (sent, *rest) = programs[1].stage.sent
    wrong = dataclasses.replace(sent, shape=(*sent.shape[:-1], 32))
    programs[1] = dataclasses.replace(
        programs[1], stage=dataclasses.replace(programs[1].stage, sent=(wrong, *rest))
    )  # fmt: skip
    broken = dataclasses.replace(planned, programs=programs)
    with pytest.raises(AssertionError, match="does not take"):
        WholeStep(step.assignment, [broken] * 4).verify()


def test_stages_of_unequal_layers_stand_for_themselves() -> None:
    mesh = mf.DeviceMesh((5, 2), ("pp", "dp"), links=LINK)
    with torch.device("meta"):
        model = nn.Sequential(*[Layer(width) for width in (64, 64, 32, 64, 64)])
    found = mf.parallelize(model, mesh, inputs={"input": ["dp", None], "target": ["dp", None]}, loss=mse,
                           pipeline=mf.Pipeline("pp", "1f1b", 4, cut=["1", "2", "3", "4"]))  # fmt: skip
    played = found.play(batch(16), batch(16))
    assert played.programs == 4 * 2 and played.in_all == 5 * 2 * 2  # The fourth is as the second.
    assert played.rows[2].flops < played.rows[1].flops == played.rows[3].flops


def test_a_played_step_prints_and_has_a_page(tmp_path: Path) -> None:
    played = parallel((4, 2, 2), 4).play(batch(16), batch(16))
    assert "16 ranks (pp 4 x dp 2 x tp 2)" in str(played) and "bubble" in str(played)
    page = Path(played.show(tmp_path / "step.html").path).read_text()
    for text in ("bubble", "exposed communication", "of peak operations", "GB", "F0.0", "B3.3"):
        assert text in page
    assert page.count("<rect") == 4 * 2 * 4  # Forwards and backwards of four stages.


def test_play_needs_rows_for_all_micro_batches() -> None:
    with pytest.raises(mf.errors.ArgumentError, match="4 micro-batches of a batch"):
        parallel((2, 1, 1), 2).play(batch(3), batch(3))


@pytest.mark.parametrize("hosts", [64, 2048])
@pytest.mark.parametrize("part", [0.3, 1.0, 3.0])
def test_played_failures_lose_what_dalys_closed_form_says(hosts: int, part: float) -> None:
    job = Job(hosts, hosts * 4 * 3600.0, 60.0, 600.0)
    interval = part * job.best_interval
    (played,) = play_failures(job, [interval], 4000, 0).intervals
    mean = job.mean
    needed = mean * math.exp(600 / mean) * (math.exp((interval + 60) / mean) - 1)  # Seconds for one interval of work.
    assert played.useful == pytest.approx(interval / needed, abs=0.004)
    assert played.expected == pytest.approx(interval / needed, rel=1e-12)


def test_the_best_interval_is_youngs() -> None:
    job = Job(1, 1e6, 50.0, 100.0)
    assert job.best_interval == pytest.approx(math.sqrt(2 * 50 * 1e6), rel=0.01)
    tried = play_failures(job, [job.best_interval * k for k in (0.2, 1, 5)], 40000, 1)
    assert tried.best.interval == job.best_interval


def test_failures_of_a_played_step() -> None:
    played = parallel((4, 2, 2), 4).play(batch(16), batch(16))
    found = played.failures(1e6, checkpoint=30.0, restart=300.0, days=200)
    assert found.job.hosts == 2 and len(found.intervals) == 5
    assert "lost work" in str(found) and "by Daly" in str(found)
    with pytest.raises(mf.errors.ArgumentError, match="failures: restart: found -1"):
        played.failures(1e6, checkpoint=30.0, restart=-1)
