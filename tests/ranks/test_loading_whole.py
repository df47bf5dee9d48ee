"""Whole plain tensors of a state dict on real ranks, and parameters that come after a model was parallelized."""

from __future__ import annotations

import copy
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import meshfuse as mf

sys.path.insert(0, str(Path(__file__).parent.parent))
from frontend_models import difference, gradients_differ_by

pytestmark = pytest.mark.ranks

MESH = mf.DeviceMesh((2, 2), ("dp", "tp"))


class Tied(nn.Module):
    """Layers of sizes that ranks do not divide, two of which may share a weight."""

    def __init__(self, shares: bool) -> None:
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(5, 6), nn.BatchNorm1d(6), nn.Linear(6, 5, bias=False)
        self.head = nn.Linear(6, 5, bias=False)
        if shares:
            self.head.weight = self.down.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.up(torch.tanh(self.down(self.norm(self.up(x))))))


def pair(shares: bool = True) -> tuple[Any, Tied]:
    torch.manual_seed(0)
    eager = Tied(shares).double()
    return mf.parallelize(copy.deepcopy(eager), MESH, {"up": "colwise"}, inputs={"x": ["dp", None]}, fsdp="dp"), eager


def on_rank_loads() -> dict[str, float]:
    """By way of loading how much the parameters, and the gradients after it, differ from eager torch's."""
    found: dict[str, float] = {}
    for way in ("copied", "assigned", "inside of another module"):
        model, eager = pair(shares=way != "assigned")  # torch unties what it assigns.
        with torch.no_grad():
            whole = {name: tensor * 2 for name, tensor in eager.state_dict().items()}
        eager.load_state_dict(whole)
        if way == "inside of another module":
            nn.ModuleDict({"model": model}).load_state_dict({f"model.{name}": t for name, t in whole.items()})
        else:
            model.load_state_dict(whole, assign=way == "assigned")
        held = model.state_dict()
        found[way] = max(difference(held[name], tensor) for name, tensor in whole.items() if tensor.ndim)
        x = torch.randn(6, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
        model(x.chunk(2)[mf.World.current().rank // 2]).square().mean().backward()
        eager(x).square().mean().backward()
        found[f"{way}, gradients"] = gradients_differ_by(model, eager)
    return found


def test_each_rank_takes_its_part_of_whole_tensors(ranks4: Any) -> None:
    for found in ranks4.run(on_rank_loads, timeout=200):
        assert max(found.values()) < 1e-9, found


def on_rank_replaced() -> str:
    model, _ = pair()
    model.norm = nn.Identity()
    model.up = nn.Linear(5, 6).double()
    try:
        model(torch.ones(3, 5, dtype=torch.float64))
    except mf.ArgumentError as error:
        return str(error)
    return ""


def test_parameters_that_come_later_are_said_to_be_too_late(ranks4: Any) -> None:
    for said in ranks4.run(on_rank_replaced, timeout=100):
        assert "parameter up.weight is not one that Tied was parallelized with" in said
        assert "before mf.parallelize" in said
