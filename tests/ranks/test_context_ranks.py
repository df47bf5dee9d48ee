"""Context parallelism on real ranks: a ring and Ulysses train as one process does."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import meshfuse as mf

sys.path.insert(0, str(Path(__file__).parent.parent))
from frontend_models import VOCABULARY, Gpt, pair, parameters_differ_by, train

pytestmark = pytest.mark.ranks


def ids(seed: int) -> torch.Tensor:
    return torch.randint(VOCABULARY, (2, 16), generator=torch.Generator().manual_seed(seed))


def on_rank_training() -> dict[str, Any]:
    """Train over two ranks that have half of a sequence each, by both methods."""
    import os

    os.environ["MESHFUSE_SEARCH"] = "fast"
    found: dict[str, Any] = {}
    rank, whole = mf.World.current().rank, {"ids": ids(1), "targets": ids(2)}
    mine = {name: each.chunk(2, 1)[rank] for name, each in whole.items()}
    for method in ("ring", "ulysses"):
        model, eager = pair(lambda: Gpt(1).double())
        specs = {"ids": [None, "cp"], "targets": [None, "cp"]}
        mf.parallelize(model, mf.DeviceMesh((2,), ("cp",)), inputs=specs, context=mf.Context("cp", method))
        local, wanted = train(model, mine), train(eager, whole)
        found[method] = max(abs(a - b) / b for a, b in zip(local, wanted, strict=True))
        found[f"{method}, parameters"] = parameters_differ_by(model, eager)
        found[f"{method}, words"] = model.explain().partition("\n\n")[0]
    return found


def test_both_methods_train_as_one_process_does(ranks2: Any) -> None:
    for found in ranks2.run(on_rank_training, timeout=250):
        assert found["ring"] < 1e-9 and found["ulysses"] < 1e-9
        assert found["ring, parameters"] < 1e-6 and found["ulysses, parameters"] < 1e-6
        assert "in a ring of 2 over cp, rows in zig-zag order" in found["ring, words"]
        assert "all rows of some heads, over cp" in found["ulysses, words"]
