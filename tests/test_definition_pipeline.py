"""`fd.pipeline`: plain definitions in stages, with the loss and the gradients of eager torch in float64."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch

import meshfuse as mf

WIDTH, LAYERS, ROWS = 8, 4, 18


@dataclass(frozen=True)
class Net:
    """A stack with a mask that depends on no weight, a skip connection over stages, and a weight tied over stages."""

    fd: mf.FusionDefinition
    mesh: mf.DeviceMesh
    batch: list[Any]
    weights: list[Any]
    hidden: list[Any]
    loss: Any

    def pipeline(self, schedule: Any = "1f1b", microbatches: int = 4, stages: int = 2, virtual: int = 1) -> Any:
        cut = [self.hidden[stage * LAYERS // stages - 1] for stage in range(1, stages)]
        options = mf.Pipeline("pp", schedule, microbatches, virtual=virtual)
        return self.fd.pipeline(self.mesh, options, loss=self.loss, wrt=self.weights, cut=cut, batch=self.batch)


def net(shape: Sequence[int] = (2, 2), names: Sequence[str] = ("pp", "dp"), rows: Any = "dp", size: int = -1) -> Net:
    mesh = mf.DeviceMesh(shape, names)
    with mf.FusionDefinition() as fd:
        x, y = (fd.define_tensor([size, WIDTH], name=name) for name in "xy")
        weights = [fd.define_tensor([WIDTH, WIDTH], name=f"layers.{i}") for i in range(LAYERS)]
        mask, h, hidden = fd.ops.cast(fd.ops.gt(x, 0.0), mf.DataType.Float), x, []
        for i, w in enumerate(weights):
            h = fd.ops.add(h, fd.ops.tanh(fd.ops.linear(h, w)))
            h = fd.ops.mul(h, mask) if i == 2 else h
            hidden.append(h)
        h = fd.ops.linear(fd.ops.add(h, hidden[0]), weights[0])
        wrong = fd.ops.sub(h, y)
        loss = fd.ops.mean(fd.ops.mul(wrong, wrong), [0, 1])
        for t in (x, y):
            fd.mesh_split(t, mesh, [rows, None])
    return Net(fd, mesh, [x, y], weights, hidden, loss)


def arguments(rows: int = ROWS) -> list[torch.Tensor]:
    draw = torch.Generator().manual_seed(0)
    batch = [torch.randn(rows, WIDTH, generator=draw) for _ in range(2)]
    return [*batch, *(torch.randn(WIDTH, WIDTH, generator=draw) * 0.3 for _ in range(LAYERS))]


def by_torch(given: Sequence[torch.Tensor]) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
    x, y, *weights = [t.double().requires_grad_(i > 1) for i, t in enumerate(given)]
    mask, h, hidden = (x > 0).double(), x, []
    for i, w in enumerate(weights):
        h = h + torch.tanh(h @ w.T)
        h = h * mask if i == 2 else h
        hidden.append(h)
    loss = ((h + hidden[0]) @ weights[0].T - y).square().mean()
    return loss.detach(), torch.autograd.grad(loss, weights)


def wrong_by(found: Sequence[Any], given: Sequence[torch.Tensor]) -> float:
    loss, gradients = by_torch(given)
    differences = [(f - w).abs().max().item() for f, w in zip(found[1], gradients, strict=True)]
    return max(abs(found[0] - loss).item(), *differences)


@pytest.mark.parametrize(
    ("schedule", "microbatches", "stages", "virtual"),
    [("1f1b", 4, 2, 1), ("gpipe", 3, 2, 1), ("interleaved", 2, 4, 2), ("zero-bubble", 4, 2, 1), ("zbv", 4, 4, 2)],
)
def test_losses_and_gradients(schedule: str, microbatches: int, stages: int, virtual: int) -> None:
    given, made = arguments(), net()
    step = made.pipeline(schedule, microbatches, stages, virtual)
    assert wrong_by(step.simulate(given), given) < 1e-6
    fewer = [t[: microbatches + 1] if i < 2 else t for i, t in enumerate(given)]  # of other sizes, and uneven
    assert wrong_by(step.simulate(fewer), fewer) < 1e-6


def test_without_another_axis_and_as_one_stage_each() -> None:
    given = arguments()
    assert wrong_by(net((4,), ("pp",), None).pipeline(stages=4).simulate(given), given) < 1e-6


def test_units_are_sharded_within_stages() -> None:
    given, made = arguments(16), net(size=4)
    made.fd.units(made.mesh, "dp", "layers.*")
    step = made.pipeline()
    assert wrong_by(step.simulate(given), given) < 1e-6
    entries, nbytes = step.bill().entries, 4 * WIDTH * WIDTH
    reduced = [e.wire for e in entries if e.collective.startswith("reduce-scatter")]
    assert sum(reduced) == pytest.approx(5 * nbytes / 2)  # once a step; the tied weight on both stages
    assert all(e.collective.endswith("x4") for e in entries if "gathered" in e.tensor)
    sends = sum(e.wire for e in entries if e.collective.startswith("send"))
    assert sends == pytest.approx(2 * 2 * 16 * WIDTH * 4 / 2)  # two tensors, there and back, half of the rows each


def test_it_tells_what_it_does() -> None:
    step = net().pipeline()
    with pytest.raises(mf.DefinitionError, match="the pipeline has not run a step yet"):
        step.bill()
    step.simulate(arguments())
    assert str(step.schedule()).startswith("1f1b: 2 stages on 2 ranks, 4 micro-batches")
    assert "send x2" in str(step.bill()) and "stage 1: " in step.memory()


def of_models(made: Net) -> Any:
    options = mf.Pipeline("pp", "1f1b", 2, cut=["layers.2"])
    return made.fd.pipeline(made.mesh, options, loss=made.loss, wrt=made.weights, cut=made.hidden[:1], batch=made.batch)


def asked(made: Net, **changed: Any) -> Any:
    given = {"loss": made.loss, "wrt": made.weights, "cut": made.hidden[:1], "batch": made.batch} | changed
    return made.fd.pipeline(made.mesh, mf.Pipeline("pp", "1f1b", 2), **given)


def with_gradients(made: Net) -> Any:
    made.fd.grad(made.loss, made.weights)
    return asked(made)


def annotated_over_stages(made: Net) -> Any:
    made.fd.mesh_split(made.weights[0], made.mesh, ["pp", None])
    return asked(made)


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (of_models, "cut and modules of an mf.Pipeline: found ('layers.2',), needed none"),
        (lambda m: m.fd.pipeline(m.mesh, "1f1b", loss=m.loss, wrt=[], cut=[], batch=[]), "needed an mf.Pipeline"),
        (lambda m: asked(m, cut=m.hidden[:2]), "pipeline: cut: found 2 tensors for 2 stages, needed 1"),
        (lambda m: asked(m, cut=m.weights[:1]), "found an input, needed the result of an op"),
        (lambda m: asked(m, loss=m.hidden[3]), "pipeline: loss: found Float[?, 8], needed a floating point number"),
        (lambda m: asked(m, wrt=m.hidden), "pipeline: wrt and batch: found h (t10)"),
        (lambda m: asked(m, batch=[]), "pipeline: batch: found none"),
        (lambda m: asked(m, wrt=[]), "pipeline: wrt: found none"),
        (with_gradients, "found gradients by fd.grad, needed the forward and the loss alone"),
        (annotated_over_stages, "cut over no pp"),
        (lambda m: asked(m).simulate([]), "pipeline: inputs: found 0, needed a list of 6"),
        (lambda m: asked(m).simulate([*arguments()[:5], None]), "pipeline: layers.3 (t5): found None"),
        (lambda m: asked(m).simulate(arguments(1)), "found 1 row, needed at least 2"),
    ],
)
def test_errors(make: Any, said: str) -> None:
    with pytest.raises((mf.DefinitionError, mf.ArgumentError)) as raised:
        make(net())
    assert said in str(raised.value)


def test_rows_other_than_defined() -> None:
    with pytest.raises(mf.ArgumentError, match="found 5 rows in a micro-batch, needed 4, as defined"):
        net(size=4).pipeline().simulate(arguments(17))


def test_a_step_is_played_on_tensors_of_meta() -> None:
    """Times scale with what is computed; nothing is, and no rank's memory is taken."""
    step = net((2, 2), size=-1).pipeline(microbatches=4)
    small, large = (step.play([torch.empty(t.shape if i > 1 else (rows, WIDTH), device="meta")
                               for i, t in enumerate(arguments())]) for rows in (1 << 16, 1 << 20))  # fmt: skip
    assert large.ranks == 4 and 8 < large.seconds / small.seconds < 17
    assert 0 < small.bubble < 0.5 and small.memory < large.memory
    assert [row.stages for row in large.rows] == [(0,), (1,)]
