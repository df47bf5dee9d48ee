"""Models of Hugging Face under context parallelism: AdamW steps as in eager torch, and heads that are not repeated."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import zoo

import meshfuse as mf
from frontend_models import parameters_differ_by, train

LINE, PLANE = mf.DeviceMesh((2,), ("cp",), links="bytes"), mf.DeviceMesh((2, 2), ("dp", "cp"), links="bytes")
CASES: dict[str, tuple[str, mf.DeviceMesh, mf.Context, Any]] = {
    "llama, ring": ("llama", LINE, mf.Context("cp", "ring"), None),
    "qwen3, ulysses, dp": ("qwen3", PLANE, mf.Context("cp", "ulysses"), None),
    "qwen3, ring, tp": ("qwen3", mf.DeviceMesh((2, 2), ("cp", "tp"), links="bytes"), mf.Context("cp", "ring"), "hf"),
}


@pytest.mark.parametrize("name", CASES)
def test_a_model_trains_as_eager_does(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MESHFUSE_SEARCH", "fast")
    family, mesh, context, plan = CASES[name]
    torch.manual_seed(0)
    found = zoo.MODELS[family]()
    model = found.model.train().double()
    eager = copy.deepcopy(model)
    spec = ["dp" if "dp" in mesh.names else None, "cp"]
    mf.parallelize(model, mesh, plan, inputs=dict.fromkeys(found.arguments, spec), context=context)
    assert train(model, found.arguments) == pytest.approx(train(eager, found.arguments), rel=1e-6)
    assert parameters_differ_by(model, eager) < 1e-4  # norms and the loss are in float32
    if name == "llama, ring":  # 3 hops of keys and of values, 2 heads of 8, in each of 2 layers
        rows, batch = found.arguments["input_ids"].shape[::-1]
        sent = sum(e.wire for e in model.bill().entries if "attention" in e.tensor and "reorder" in e.why)
        assert sent == 2 * 6 * batch * rows // 2 * 2 * 8 * 8
