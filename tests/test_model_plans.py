"""`mf.plan`: which parallelism comes out for a model, and that the model trains with it as eager torch does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import meshfuse as mf
from frontend_models import gradients_differ_by, pair

ONE = mf.DeviceMesh((8,), ("x",), links="dgx-h100")
TWO = mf.DeviceMesh((2, 4), ("dp", "tp"), links="dgx-h100")


class Mlp(nn.Module):
    def __init__(self, width: int, hidden: int, layers: int = 2) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            [nn.Sequential(nn.Linear(width, hidden, bias=False), nn.GELU(), nn.Linear(hidden, width, bias=False))
             for _ in range(layers)]
        )  # fmt: skip

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return x


def loss_of(result: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return (result - target).square().mean()


def planned(mesh: mf.DeviceMesh, rows: int, width: int, hidden: int, **more: Any) -> Any:
    with torch.device("meta"):
        model, x = Mlp(width, hidden), torch.empty(rows, width)
    return mf.plan(model, mesh, x, x, loss=loss_of, **more)


def test_a_small_model_on_many_rows_is_data_parallel() -> None:
    found = planned(ONE, 65536, 256, 1024)
    assert found.family == "x: data" and found.spec("x") == ("x", None) == found.spec("target")
    assert set(found.parameters.values()) == {(None, None)}


def test_a_wide_model_on_few_rows_is_tensor_parallel() -> None:
    found = planned(ONE, 64, 8192, 32768)
    assert found.family == "x: tensor"
    assert found.spec("layers.1.0.weight") == ("x", None) and found.spec("layers.1.2.weight") == (None, "x")


def test_two_axes_and_what_does_not_fit() -> None:
    free = planned(TWO, 8192, 2048, 8192)
    assert free.family.startswith("dp: data, tp: ") and free.family.endswith("tensor")
    bounded = planned(TWO, 8192, 2048, 8192, max_memory=free.memory * 0.9)
    assert bounded.family.startswith("dp: fully sharded") and bounded.memory <= free.memory * 0.9
    with pytest.raises(mf.DefinitionError, match="the least that was found"):
        planned(TWO, 8192, 2048, 8192, max_memory=1e6)


def test_a_plan_is_kept_printed_and_read_back(tmp_path: Path) -> None:
    found = planned(TWO, 8192, 2048, 8192, keep={"layers.0.0": ["dp", None]}, inputs={"x": [None, None]})
    assert found.spec("layers.0.0.weight") == ("dp", None) and found.spec("x") == (None, None)
    found.save(tmp_path / "plan.json")
    assert mf.plan.__module__ and type(found).load(tmp_path / "plan.json") == found
    text = str(planned(ONE, 64, 8192, 32768))
    assert "'layers.*.0.weight': ['x', None]," in text and "inputs={'x': [None, None]" in text


@pytest.mark.parametrize("mesh", [mf.DeviceMesh((4,), ("x",), links="bytes"), mf.DeviceMesh((2, 2), ("a", "b"))])
def test_a_model_trains_with_its_plan(mesh: mf.DeviceMesh) -> None:
    model, eager = pair(lambda: Mlp(16, 32))
    x, y = torch.randn(32, 16), torch.randn(32, 16)
    found = mf.plan(model, mesh, x, y, loss=loss_of)
    mf.parallelize(model, mesh, found, loss=loss_of)
    loss, wanted = model.step(x, y), loss_of(eager(x), y)
    wanted.backward()
    assert abs(loss - wanted) < 1e-5 and gradients_differ_by(model, eager) < 1e-5


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: mf.plan(3, ONE), "plan: module: found 3"),
        (lambda: planned(ONE, 64, 16, 32).spec("q"), "no parameter or argument of this name: found 'q'"),
        (lambda: planned(ONE, 64, 16, 32, keep={"q": ["x"]}), "plan: 'q' matches nothing"),
        (lambda: planned(ONE, 64, 16, 32, inputs={"q": ["x"]}), "no argument is called 'q'"),
        (lambda: mf.plan(Mlp(16, 32), ONE, torch.empty(4, 16)), "loss of the model: found a result of shape [4, 16]"),
        (lambda: mf.parallelize(Mlp(16, 32), TWO, planned(ONE, 64, 16, 32)), "made for another mesh"),
        (lambda: mf.parallelize(Mlp(16, 32), TWO, "auto"), "Pass plan=mf.plan(model, mesh, *arguments)"),
    ],
)  # fmt: skip
def test_what_is_said_of_mistakes(call: Any, said: str) -> None:
    with pytest.raises(mf.DefinitionError) as found:
        call()
    assert said in str(found.value)
