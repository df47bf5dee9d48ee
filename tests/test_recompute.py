"""Modules that are computed again in the backward: less is kept, numbers stay."""

from __future__ import annotations

from typing import Any

import pytest

import meshfuse as mf
from frontend_models import gradients_differ_by, pair
from meshfuse.frontends.parallel_module import _ran
from pipeline_models import Words, loss_of, words

MESH = mf.DeviceMesh((2,), ("dp",))
ROWS = {"words": ["dp", None]}


@pytest.fixture(autouse=True)
def _plan_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MESHFUSE_SEARCH", "fast")


def kept(**more: Any) -> tuple[int, float]:
    """(how many tensors a forward keeps, by how much gradients are wrong)."""
    model, eager = pair(Words)
    mf.parallelize(model, MESH, inputs=ROWS, **more)
    for each in (model, eager):
        loss_of(each(words(0)), words(1)).backward()
    return _ran(model).step.saved, gradients_differ_by(model, eager)


def test_a_layer_keeps_its_result_alone() -> None:
    everything, wrong = kept()
    assert wrong < 1e-5
    layers, wrong = kept(checkpoint="layers.*")
    assert wrong < 1e-5
    one, wrong = kept(checkpoint=["layers.0", "layers.1"])
    assert wrong < 1e-5
    assert layers <= everything - 4 * 3 and layers < one < everything


def test_in_a_pipeline_and_fully_sharded() -> None:
    sizes = []
    for checkpoint in (None, "layers.*"):
        model, eager = pair(Words)
        mf.parallelize(
            model, mf.DeviceMesh((2, 2), ("pp", "dp")), inputs={**ROWS, "target": ["dp", None]}, fsdp="dp",
            pipeline=mf.Pipeline("pp", microbatches=2), loss=loss_of, checkpoint=checkpoint,
        )  # fmt: skip
        loss = model.step(words(0), words(1))
        wanted = loss_of(eager(words(0)), words(1))
        wanted.backward()
        assert abs(loss - wanted) < 1e-5 and gradients_differ_by(model, eager) < 1e-5
        sizes.append([int(row.split()[2].replace(",", "")) for row in model.memory().splitlines()])
    assert all(less < 0.7 * more for more, less in zip(*sizes, strict=True))


@pytest.mark.parametrize(
    ("given", "said"), [("blocks.*", "checkpoint='blocks.*' fits no module"), (3, "checkpoint: found 3")]
)
def test_what_is_said_of_mistakes(given: Any, said: str) -> None:
    with pytest.raises(mf.DefinitionError) as found:
        mf.parallelize(Words(), MESH, checkpoint=given)
    assert said in str(found.value)
