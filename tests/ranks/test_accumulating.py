"""Micro-batches in `no_sync` over real ranks: gradients as of the whole batch, summed over ranks once."""

from __future__ import annotations

import math
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import meshfuse as mf

sys.path.insert(0, str(Path(__file__).parent.parent))
from frontend_models import gradients_differ_by, pair

pytestmark = pytest.mark.ranks

INPUTS = {"x": ["dp", None], "y": ["dp", None]}
PLAN = {"up": "colwise", "down": "rowwise"}
SETUPS = {
    "data parallel": ((2, 1), None, {}), "fully sharded": ((2, 1), None, {"fsdp": "dp"}),
    "sharded and tensor": ((2, 2), PLAN, {"fsdp": "dp"}),
    "mixed": ((2, 1), None, {"fsdp": "dp", "precision": mf.Precision(reduce=torch.float64)}),
}  # fmt: skip
WIDTH, ROWS = 8, 256


class Rows(nn.Module):
    """Layers that share a weight, on so many rows that these stay where they are."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH, bias=False)
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH, bias=False)
        self.last.weight = self.first.weight

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        x = x + self.down(F.gelu(self.up(self.norm(x))))
        return F.mse_loss(self.last(x), y)


def batch(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    made = torch.Generator().manual_seed(seed)
    x, y = (torch.randn(ROWS, WIDTH, generator=made) for _ in range(2))
    return x, y


def mine(tensor: torch.Tensor, ranks: int) -> torch.Tensor:
    """This rank's rows on a mesh whose first axis has so many ranks."""
    world = mf.World.current()
    return tensor.chunk(ranks)[world.rank * ranks // world.size]


def summed(bill: Any) -> float:
    """The bytes in which sums over ranks of the data are made."""
    kinds = ("all-reduce", "reduce-scatter")
    return sum(entry.wire for entry in bill.entries if entry.axes == "dp" and entry.collective in kinds)


def on_rank_accumulating(shape: tuple[int, int], plan: Any, options: Any) -> dict[str, Any]:
    import os

    os.environ["MESHFUSE_SEARCH"] = "fast"
    found: dict[str, Any] = {"bills": [], "partial": []}
    model, eager = pair(Rows)
    mf.parallelize(model, mf.DeviceMesh(shape, ("dp", "tp")), plan, inputs=INPUTS, **options)

    def step(seeds: range, discarded: bool = False) -> None:
        for seed in seeds:
            last = seed == seeds[-1] and not discarded
            x, y = batch(seed)
            if last:
                model(mine(x, shape[0]), mine(y, shape[0])).backward()
            else:
                with model.no_sync():
                    model(mine(x, shape[0]), mine(y, shape[0])).backward()
            found["bills"].append(summed(model.bill()))
            grads = [p.grad for p in model.parameters() if p.grad is not None]
            found["partial"].append(any(placement.is_partial() for grad in grads for placement in grad.placements))
            if not discarded:
                eager(x, y).backward()

    step(range(3))
    found["first"] = gradients_differ_by(model, eager)
    step(range(3, 6))  # On top of gradients that are summed already.
    found["second"] = gradients_differ_by(model, eager)
    for each in (model, eager):
        each.zero_grad()
    step(range(6, 8), discarded=True)
    model.zero_grad()  # What was left to sum goes with it.
    step(range(8, 9))
    found["discarded"] = gradients_differ_by(model, eager)
    for each in (model, eager):
        each.zero_grad()
    (x, y), (more, others) = batch(9), batch(10)
    with model.no_sync():
        first = model(mine(x, shape[0]), mine(y, shape[0]))
    (first + model(mine(more, shape[0]), mine(others, shape[0]))).backward()  # The last one's backward comes first.
    (eager(x, y) + eager(more, others)).backward()
    found["at once"] = gradients_differ_by(model, eager)
    return found


@pytest.mark.parametrize("name", SETUPS)
def test_micro_batches_are_summed_over_ranks_once(request: pytest.FixtureRequest, name: str) -> None:
    ranks = request.getfixturevalue(f"ranks{math.prod(SETUPS[name][0])}")
    for found in ranks.run(on_rank_accumulating, *SETUPS[name], timeout=250):
        for when in ("first", "second", "discarded", "at once"):
            assert found[when] < 1e-5, when
        assert found["partial"][:3] == [True, True, False]
        first, second, last, *_ = found["bills"]
        assert max(first, second) <= 8 < 300 < last  # of the loss alone; of all weights


def on_rank_pipeline() -> dict[str, float]:
    """Stages over two ranks of data each, whose micro-batches are summed once; fully sharded, and with tied weights."""
    import os

    os.environ["MESHFUSE_SEARCH"] = "fast"
    found: dict[str, float] = {}
    for fsdp in (None, "dp"):
        model, eager = pair(Stages)
        mf.parallelize(
            model, mf.DeviceMesh((2, 2), ("pp", "dp")), fsdp=fsdp, inputs={"x": ["dp", None], "target": ["dp", None]},
            loss=F.mse_loss, pipeline=mf.Pipeline("pp", "1f1b", 4, cut=["layers.1"]),
        )  # fmt: skip
        x, y = batch(1)
        rank = mf.World.current().rank % 2
        for _ in range(2):
            model.step(x.chunk(2)[rank], y.chunk(2)[rank])
            F.mse_loss(eager(x), y).backward()
        wanted = dict(eager.named_parameters())
        own = {n: p.grad.full_tensor() for n, p in model.named_parameters() if p.grad is not None}
        found[f"{fsdp} {len(own)}"] = max(float((grad - wanted[n].grad).abs().max()) for n, grad in own.items())
        found[f"{fsdp} summed"] = summed(model.bill())
    return found


class Stages(nn.Module):
    """Layers of which the first and the last share a weight."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(2)])
        self.last = nn.Linear(WIDTH, WIDTH, bias=False)
        self.last.weight = self.first.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for layer in self.layers:
            x = F.gelu(layer(x))
        return self.last(x)


def test_micro_batches_of_a_pipeline_are_summed_over_ranks_once(ranks4: Any) -> None:
    for found in ranks4.run(on_rank_pipeline, timeout=250):
        sums = [value for name, value in found.items() if "summed" in name]
        assert all(200 < value < 700 for value in sums)  # A stage's weights; four micro-batches would send four times.
        assert max(value for name, value in found.items() if "summed" not in name) < 1e-6


def masked(scores: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    counts = (target > 0.5).to(scores.dtype)
    return ((scores - target).square() * counts).sum() / counts.sum()


def on_rank_masked() -> float:
    """A loss whose micro-batches count different numbers of elements, which each rank of data knows a part of."""
    model, eager = pair(lambda: Stages().double())
    mf.parallelize(
        model, mf.DeviceMesh((2, 2), ("pp", "dp")), inputs={"x": ["dp", None], "target": ["dp", None]}, loss=masked,
        pipeline=mf.Pipeline("pp", "1f1b", 4, cut=["layers.1"]),
    )  # fmt: skip
    x, y = (tensor.double() for tensor in batch(1))
    rank, y[: ROWS // 3] = mf.World.current().rank % 2, 0
    found, wanted = [], masked(eager(x), y)
    wanted.backward()
    order = torch.arange(ROWS).view(4, 2, -1)[:, rank].flatten()  # Micro-batches are of a rank's own rows.
    loss = model.step(x[order], y[order])
    gradients = dict(eager.named_parameters())
    for name, p in model.named_parameters():
        found += [float((p.grad.full_tensor() - gradients[name].grad).abs().max())]
    norms = model.clip_grad_norm_(1.0), torch.nn.utils.clip_grad_norm_(eager.parameters(), 1.0)
    return max(abs(float(loss) - float(wanted)), abs(float(norms[0] - norms[1])), *found)


def test_a_masked_loss_of_a_pipeline_is_that_of_the_whole_batch(ranks4: Any) -> None:
    assert max(ranks4.run(on_rank_masked, timeout=250)) < 1e-12
