"""`fd.pipeline` and `fd.units` on real ranks: shards in and out, and what is sent."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import meshfuse as mf

sys.path.insert(0, str(Path(__file__).parent.parent))
from test_definition_pipeline import arguments, by_torch, net
from test_units import by_torch as stack_by_torch
from test_units import of_layers, stack

pytestmark = pytest.mark.ranks


def mine(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's half of the rows, on a mesh of 2 stages and 2 ranks each."""
    return tensor.chunk(2)[mf.World.current().rank % 2]


def on_rank_pipeline(schedule: str, sharded: bool) -> dict[str, Any]:
    given, made = arguments(16), net()
    if sharded:
        made.fd.units(made.mesh, "dp", "layers.*")
    stages = 4 if schedule == "interleaved" else 2
    step = made.pipeline(schedule, 4, stages, stages // 2)
    stage = mf.World.current().rank // 2
    held = {0: (0, 1), 1: (0, 2, 3)} if stages == 2 else {0: (0, 2), 1: (0, 1, 3)}
    weights = [t if i in held[stage] else None for i, t in enumerate(given[2:])]
    cut = [t if t is None or not sharded else mine(t) for t in weights]
    loss, gradients = step.execute([*(mine(t) for t in given[:2]), *cut])
    wanted, all_ = by_torch(given)
    pairs = [(g, mine(w) if sharded else w) for g, w in zip(gradients, all_, strict=True) if g is not None]
    return {
        "wrong": max(abs(loss - wanted).item(), *((g - w).abs().max().item() for g, w in pairs)),
        "held": [i for i, g in enumerate(gradients) if g is not None] == list(held[stage]),
        "sends": sum(e.wire for e in step.bill().entries if e.collective.startswith("send")),
    }


@pytest.mark.parametrize(("schedule", "sharded"), [("1f1b", True), ("interleaved", False)])
def test_a_pipeline(ranks4: Any, schedule: str, sharded: bool) -> None:
    for found in ranks4.run(on_rank_pipeline, schedule, sharded, timeout=250):
        assert found["wrong"] < 1e-6 and found["held"] and found["sends"] > 0


def on_rank_units() -> float:
    made = stack(of_layers("dp"))
    draw = torch.Generator().manual_seed(2)
    views = [view for layer in made.weights for view in layer]
    given = [torch.randn(8, 16, generator=draw) for _ in range(2)]
    given += [torch.randn(list(view.type.shape), generator=draw) * 0.3 for view in views]
    rank = mf.World.current().rank
    loss, *gradients = made.fd.execute([t.chunk(4)[rank] for t in given])
    wanted, *all_ = stack_by_torch([t.double() for t in given])
    return max(abs(loss - wanted).item(),
               *((g - w.chunk(4)[rank]).abs().max().item() for g, w in zip(gradients, all_, strict=True)))  # fmt: skip


def test_units(ranks4: Any) -> None:
    assert max(ranks4.run(on_rank_units, timeout=250)) < 1e-6
