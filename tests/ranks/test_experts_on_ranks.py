"""Experts over real ranks: rows of any number travel, results and gradients are those of the whole layer."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import meshfuse as mf

sys.path.insert(0, str(Path(__file__).parent.parent))
from test_experts import in_torch, layer, operands

pytestmark = pytest.mark.ranks
SIZES = (32, 8, 2)


def on_rank_with_experts(shape: tuple[int, int], routes: list[str]) -> list[float]:
    """The largest difference from torch, for each way in which tokens choose their experts."""
    mesh = mf.DeviceMesh(shape, ("dp", "ep"), links="bytes")
    fd = layer(mesh, ["dp", "ep"], None, SIZES)
    found = []
    for kind in routes:
        given = operands(kind, SIZES)
        pairs = zip(fd(*given), in_torch(*given), strict=True)
        found.append(max(float((ours - wanted).abs().max()) for ours, wanted in pairs))
    return found


@pytest.mark.parametrize("shape", [(1, 4), (2, 2)])
def test_results_and_gradients_are_torchs(ranks4: Any, shape: tuple[int, int]) -> None:
    routes = ["any", "all to the first", "all to the last", "any"]
    for differences in ranks4.run(on_rank_with_experts, shape, routes, timeout=250):
        assert max(differences) < 1e-9
