"""Models cut into stages, on simulated ranks: losses and gradients of a step as those of eager torch."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import nn

import meshfuse as mf
from frontend_models import gradients_differ_by, pair, parameters_differ_by
from pipeline_models import Words, loss_of, words

PP = mf.DeviceMesh((2,), ("pp",))


@pytest.fixture(autouse=True)
def _plan_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Numbers are tested here, and not how good plans are."""
    monkeypatch.setenv("MESHFUSE_SEARCH", "fast")


def differ(model: Any, eager: nn.Module, rows: int = 8, seed: int = 0) -> float:
    """By how much the loss and the gradients of a step differ."""
    x, y = words(seed, rows), words(seed + 1, rows)
    loss, wanted = model.step(x, y), loss_of(eager(x), y)
    wanted.backward()
    return max(abs(loss.item() - wanted.item()), gradients_differ_by(model, eager))


@pytest.mark.parametrize(
    ("schedule", "microbatches", "rows"),
    [("gpipe", 2, 8), ("1f1b", 4, 7), ("zero-bubble", 3, 8), ("interleaved", 3, 8), ("zbv", 4, 9)],
)
def test_a_step_is_one_of_the_whole_batch(schedule: str, microbatches: int, rows: int) -> None:
    """Also with micro-batches of different sizes. In float64: sums of micro-batches are in another order."""
    model, eager = pair(lambda: Words().double())
    mf.parallelize(model, PP, pipeline=mf.Pipeline("pp", schedule, microbatches), loss=loss_of)
    assert differ(model, eager, rows) < 1e-12 and not any(p.grad.requires_grad for p in model.parameters())
    assert model.head.weight is model.embed.weight
    moved = {(e.collective.partition(" ")[0], e.axes) for e in model.bill().entries}
    assert moved == {("send", "pp")}


def test_what_crosses_a_border_is_the_activation_and_its_gradient() -> None:
    """A skip connection goes to the stage that reads it; views and biases' gradients do not cross by themselves."""
    model = mf.parallelize(Words(), PP, pipeline=mf.Pipeline("pp", microbatches=4), loss=loss_of)
    model.step(words(0), words(1))
    activation = 8 * 4 * 8 * 4  # rows, length, width, bytes
    assert [e.wire for e in model.bill().entries] == [activation] * 4
    assert "kept of each micro-batch, 2 at once" in model.memory()
    assert "stage 1" in model.explain("layers.3.up.weight")


def test_stages_over_data_and_tensor_parallel_ranks() -> None:
    """Three steps of AdamW with clipping, on eight ranks."""
    model, eager = pair(Words)
    mf.parallelize(
        model, mf.DeviceMesh((2, 2, 2), ("pp", "dp", "tp")),
        {"layers.*.up": "colwise", "layers.*.down": "rowwise"}, fsdp="dp",
        inputs={"words": ["dp", None], "target": ["dp", None]}, loss=loss_of,
        pipeline=mf.Pipeline("pp", "1f1b", 2, cut=["layers.1"]),
    )  # fmt: skip
    ours, theirs = (torch.optim.AdamW(m.parameters(), lr=1e-2) for m in (model, eager))
    for step in range(3):
        assert differ(model, eager, seed=step) < 1e-5
        norms = model.clip_grad_norm_(1.0), torch.nn.utils.clip_grad_norm_(eager.parameters(), 1.0)
        assert norms[0] == pytest.approx(norms[1].item(), rel=1e-5)
        for optimizer in (ours, theirs):
            optimizer.step()
            optimizer.zero_grad()
    assert parameters_differ_by(model, eager) < 1e-5
    with torch.no_grad():
        assert model.step(words(5), target=words(6)).item() == pytest.approx(loss_of(eager(words(5)), words(6)).item())
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize(("fsdp", "sums"), [(None, "all-reduce"), ("dp", "reduce-scatter")])
def test_gradients_are_summed_over_ranks_once_a_step(fsdp: Any, sums: str) -> None:
    """However many micro-batches there are: each leaves terms."""
    model, eager = pair(lambda: nn.Sequential(*[nn.Linear(8, 8) for _ in range(4)]))
    inputs = {"input": ["dp", None], "target": ["dp", None]}
    mf.parallelize(
        model, mf.DeviceMesh((2, 2), ("pp", "dp")), fsdp=fsdp, inputs=inputs, loss=nn.functional.mse_loss,
        pipeline=mf.Pipeline("pp", "1f1b", 4),
    )  # fmt: skip
    x, y = torch.randn(2, 1024, 8).unbind()
    model.step(x, y)
    nn.functional.mse_loss(eager(x), y).backward()
    assert gradients_differ_by(model, eager) < 1e-5
    found = [e for e in model.bill().entries if ".grad" in e.tensor]
    assert {e.collective for e in found} == {sums}  # and not "all-reduce x4"
    weights = sum(p.numel() for p in model.parameters()) * 4
    assert sum(e.wire for e in found) == (weights if fsdp is None else weights / 2)


def test_a_user_s_own_schedule_and_no_pipeline_at_all() -> None:
    model, eager = pair(lambda: Words(2).double())
    own = [["F0.0", "F0.1", "I0.1", "B0.0", "W0.1"], ["F1.0", "F1.1", "B1.1", "B1.0"]]
    mf.parallelize(model, PP, pipeline=mf.Pipeline("pp", own), loss=loss_of)
    assert differ(model, eager) < 1e-12
    model, eager = pair(lambda: Words(2).double())
    mf.parallelize(model, mf.DeviceMesh((2,), ("dp",)), inputs={"words": ["dp", None], "target": ["dp", None]},
                   loss=loss_of)  # fmt: skip
    assert differ(model, eager) < 1e-12


class Normed(nn.Module):
    """Layers whose buffers change, a loss of their own, and one that is made before it runs."""

    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(6, 1)
        self.layers = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Linear(6, 6), nn.BatchNorm1d(6))

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        y = self.last(torch.relu(self.layers(x)))
        return {"scores": y, "loss": y.square().mean()}


def test_buffers_change_with_each_micro_batch() -> None:
    model, eager = pair(lambda: Normed().double())
    mf.parallelize(model, PP, pipeline=mf.Pipeline("pp", "1f1b", 2, cut=["layers.2"], modules={"last": 1}))
    x = torch.randn(8, 6, dtype=torch.float64)
    model.step(x)
    for part in x.chunk(2):
        (eager(part)["loss"] / 2).backward()
    assert gradients_differ_by(model, eager) < 1e-12
    for name, buffer in eager.named_buffers():
        torch.testing.assert_close(model.get_buffer(name), buffer)


def parallel(**more: Any) -> Any:
    given = {"pipeline": mf.Pipeline("pp", microbatches=4), "loss": loss_of, **more}
    return mf.parallelize(Words(), PP, **given)


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: parallel().step(words(0, 3), words(1, 3)), "4 micro-batches of a batch: found 3 rows"),
        (lambda: parallel()(words(0)), "a model with a pipeline is called: needed model.step(...)"),
        (lambda: parallel().step(), "the target of the loss: found no positional argument"),
        (lambda: parallel(loss=None).step(words(0)), "the loss of the model: found a result of shape [2, 4, 24]"),
        (lambda: parallel(loss=3), "loss: found 3"),
        (lambda: parallel(pipeline="1f1b"), "pipeline: found '1f1b', needed an mf.Pipeline"),
        (lambda: parallel(pipeline=mf.Pipeline("ppp")), "axis: found 'ppp', needed one of ['pp']"),
        (lambda: parallel(pipeline=mf.Pipeline("pp", cut=["layers.9"])), "cut at 'layers.9': found 0 modules; near"),
        (lambda: parallel(pipeline=mf.Pipeline("pp", cut=[])), "cut for 2 stages: found 0 modules: [], needed 1"),
        (lambda: parallel(pipeline=mf.Pipeline("pp", "interleaved", 2, virtual=3)), "found 4 layers"),
        (lambda: parallel(pipeline=mf.Pipeline("pp", [["F0.0", "B0.0"]])), "found 1 ranks, needed the 2 of axis pp"),
        (lambda: mf.Pipeline("pp", "2f2b"), "schedule: found '2f2b', needed one of ['1f1b'"),
        (lambda: mf.Pipeline("pp", microbatches=0), "microbatches: found 0"),
        (lambda: parallel().bill(), "has not run"),
    ],
)  # fmt: skip
def test_what_is_said_of_mistakes(call: Any, said: str) -> None:
    with pytest.raises((mf.DefinitionError, mf.ArgumentError)) as found:
        call()
    assert said in str(found.value) and "test_pipeline.py" in str(found.value)


def test_weights_are_where_they_are_used() -> None:
    model = mf.parallelize(Normed(), PP, pipeline=mf.Pipeline("pp", "1f1b", 2, cut=["layers.2"]))
    with pytest.raises(mf.DefinitionError) as found:
        model.step(torch.randn(8, 6))
    assert "last.weight is used by stage 1: found and held by stage 0" in str(found.value)
    assert 'mf.Pipeline(..., modules={"last.weight": 1})' in str(found.value)
    turned = mf.Pipeline("pp", cut=["layers.2", "layers.1"])
    model = mf.parallelize(Words(), mf.DeviceMesh((3,), ("pp",)), pipeline=turned, loss=loss_of)
    with pytest.raises(mf.DefinitionError, match=r"layers\.1: found does not run after the one cut at before"):
        model.step(words(0), words(1))


class Narrowing(nn.Module):
    """Equal layers, of which the first two see sixteen times as many rows as the others."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(512, 512) for _ in range(6)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for i, layer in enumerate(self.layers):
            x = layer(x[:, ::16] if i == 2 else x).relu()
        return x


def stages_of_layers(example: dict[str, torch.Tensor] | None, schedule: str = "1f1b", virtual: int = 1) -> list[str]:
    """The stage of each layer, after a step."""
    model = mf.parallelize(
        Narrowing(), mf.DeviceMesh((2,), ("pp",), links="dgx-h100"),
        pipeline=mf.Pipeline("pp", schedule, microbatches=2, virtual=virtual), example=example,
        loss=lambda y, target: (y[:, :, 0] - target).square().mean(),
    )  # fmt: skip
    model.step(torch.ones(2, 16, 512), torch.ones(2, 1))
    found = [re.findall(r"stage (\d)", model.explain(f"layers.{i}.weight")) for i in range(6)]
    return ["".join(dict.fromkeys(stages)) for stages in found]


def test_stages_are_cut_by_the_time_of_their_layers_where_sizes_are_known() -> None:
    example = {"x": torch.empty(1024, 64, 512, device="meta"), "target": torch.empty(1024, 4, device="meta")}
    assert stages_of_layers(example) == ["0", "1", "1", "1", "1", "1"]
    assert stages_of_layers(example, "interleaved", virtual=2) == ["0", "1", "2", "2", "2", "3"]
    assert stages_of_layers(None) == ["0", "0", "0", "1", "1", "1"]
