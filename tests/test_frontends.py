"""Modules over simulated ranks: numbers as in eager torch, and what is remembered between calls."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel
from torch.utils.checkpoint import checkpoint

import meshfuse as mf
from frontend_models import (
    GPT_PLAN,
    VOCABULARY,
    Gpt,
    difference,
    gradients_differ_by,
    pair,
    parameters_differ_by,
    train,
)

MESH = mf.DeviceMesh((2, 2), ("dp", "tp"))


@pytest.fixture(autouse=True)
def _plan_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Numbers are tested here, and not how good plans are."""
    monkeypatch.setenv("MESHFUSE_SEARCH", "fast")


def ids(rows: int = 4, length: int = 8, seed: int = 1) -> torch.Tensor:
    return torch.randint(VOCABULARY, (rows, length), generator=torch.Generator().manual_seed(seed))


def test_a_gpt_trains_as_eager_does() -> None:
    model, eager = pair(Gpt)
    found = mf.parallelize(model, MESH, GPT_PLAN, inputs={"ids": ["dp", None], "targets": ["dp", None]}, fsdp="dp")
    assert found is model and type(model).__name__ == "Gpt" and isinstance(model, Gpt)
    assert list(model.state_dict()) == list(eager.state_dict())
    assert model.head.weight is model.tokens.weight
    arguments = {"ids": ids(), "targets": ids(seed=2)}
    assert train(model, arguments) == pytest.approx(train(eager, arguments), rel=1e-5)
    assert parameters_differ_by(model, eager) < 1e-5
    bill = str(model.bill())
    moves = [row for row in bill.splitlines() if "layers.*." in row and "gathered" not in row]
    assert moves and "test_frontends.py" not in moves[0] and "layers.*.up.weight.gathered" in bill
    assert "annotated so at test_frontends.py" in model.explain("layers.0.qkv.weight")


def test_weights_stay_along_the_tensor_axis_however_many_rows_there_are() -> None:
    """Megatron's plan: the sums of activations are sent; weights are gathered along the axes of fsdp alone."""
    model = nn.Sequential(nn.Linear(8, 32, bias=False), nn.ReLU(), nn.Linear(32, 8, bias=False))
    eager = nn.Sequential(*[type(part)(*args, **more) for part, args, more in zip(
        model, [(8, 32), (), (32, 8)], [{"bias": False}, {}, {"bias": False}], strict=True)])  # fmt: skip
    eager.load_state_dict(model.state_dict())
    mf.parallelize(model, MESH, {"0": "colwise", "2": "rowwise"}, inputs={"input": ["dp", None]}, fsdp="dp")
    x = torch.randn(4096, 8)
    for each in (model, eager):
        each(x).square().mean().backward()
    assert gradients_differ_by(model, eager) < 1e-5
    moved = [(entry.axes, entry.tensor.partition(" ")[0]) for entry in model.bill().entries]
    assert {name for axes, name in moved if "tp" in axes} == {"2.mm_1"}  # what the second layer's product makes
    assert {"0.weight.gathered", "2.weight.gathered"} <= {name for axes, name in moved if axes == "dp"}


class Images(nn.Module):
    """Convolutions, batch norm and pooling of all kinds."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.second, self.up = nn.Conv2d(8, 4, 3, stride=2, groups=2), nn.ConvTranspose2d(4, 4, 2, stride=2)
        self.head = nn.Linear(4, 5)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        x = F.max_pool2d(F.relu(self.norm(self.first(x))), 2, ceil_mode=True)
        x = F.avg_pool2d(F.relu(self.up(self.second(x))), 3, stride=1, padding=1)
        return F.cross_entropy(self.head(F.adaptive_avg_pool2d(x, 1).flatten(1)), y)


def test_a_network_of_convolutions_trains_as_eager_does() -> None:
    model, eager = pair(lambda: Images().double())
    mf.parallelize(model, MESH, {}, inputs={"x": ["dp", None, None, None], "y": ["dp"]})
    draw = torch.Generator().manual_seed(0)
    x, y = torch.randn(4, 3, 11, 12, generator=draw).double(), torch.randint(5, (4,), generator=draw)
    for each in (model, eager):
        each(x, y).backward()
    assert gradients_differ_by(model, eager) < 1e-10
    assert difference(model.norm.running_var, eager.norm.running_var) < 1e-10


def test_gradients_of_other_results_than_the_loss() -> None:
    model, eager = pair(Gpt)
    mf.parallelize(model, MESH, GPT_PLAN, inputs={"ids": ["dp", None], "targets": ["dp", None]})
    for each in (model, eager):
        loss, logits = each(ids(), ids(seed=2))
        (loss + logits.square().mean()).backward()
    assert gradients_differ_by(model, eager) < 1e-5
    model.zero_grad()
    eager.zero_grad()
    for each in (model, eager):  # a plan for logits alone
        F.cross_entropy(each(ids()).flatten(0, 1), ids(seed=3).flatten()).backward()
    assert gradients_differ_by(model, eager) < 1e-5


class Net(nn.Module):
    """Layers whose buffers change, and dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(6, 16, bias=False), nn.BatchNorm1d(16), nn.Linear(16, 4)
        self.dropout = nn.Dropout(0.5)

    def forward(self, x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        return self.down(self.dropout(F.relu(self.norm(self.up(x))))) * scale


def test_modes_buffers_and_sizes() -> None:
    model, eager = pair(Net)
    plan = {"up": ColwiseParallel(), "down": RowwiseParallel(), "up:output": ["dp", "tp"]}
    mf.parallelize(model, MESH, plan, inputs={"x": ["dp", None]}, dynamic={"x": [0]})
    for each in (model, eager):
        each.dropout.p = 0.0
    x = torch.randn(8, 6, generator=torch.Generator().manual_seed(3), requires_grad=True)
    for rows in (8, 4, 6):
        for each in (model, eager):
            each(x[:rows]).square().sum().backward()
    assert gradients_differ_by(model, eager) < 1e-5
    for name, buffer in eager.named_buffers():
        assert difference(model.get_buffer(name), buffer) < 1e-5, name
    model.eval(), eager.eval()
    with torch.no_grad():
        assert difference(model(x, scale=2.0), eager(x, scale=2.0)) < 1e-5
    from meshfuse.frontends.module_state import STATE

    state = getattr(model, STATE)
    assert len(state.runners) == 4 and len(state.graphs) == 2  # three sizes of one graph, and one without gradients


def test_dropout_is_the_same_on_every_mesh_and_repeats() -> None:
    x = torch.randn(8, 6, generator=torch.Generator().manual_seed(3))
    found = []
    for mesh, plan in ((MESH, {"up": "colwise"}), (mf.DeviceMesh((3,), ("tp",)), {"up": "colwise", "down": "rowwise"})):
        model, _ = pair(Net)
        mf.parallelize(model, mesh, plan)
        torch.manual_seed(7)
        out = [model(x), model(x)]
        out[0].sum().backward()
        torch.manual_seed(7)
        assert torch.equal(model(x), out[0])
        assert not torch.equal(*out)
        found.append((out[0], model.down.weight.grad))
    assert difference(found[0][0], found[1][0]) < 1e-5 and difference(found[0][1], found[1][1]) < 1e-5


class Checkpointed(nn.Module):
    """Two regions that are computed again, under autocast."""

    def __init__(self, autocast: bool) -> None:
        super().__init__()
        self.first, self.second, self.autocast = nn.Linear(8, 32), nn.Linear(32, 8), autocast

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=self.autocast):
            h = checkpoint(lambda y: torch.tanh(self.first(torch.sin(y))), x, use_reentrant=False)
            return checkpoint(lambda y: self.second(torch.cos(y)), h, use_reentrant=False).float().square().mean()


def saved_by(model: Any) -> int:
    from meshfuse.frontends.module_state import STATE

    return getattr(model, STATE).last.step.saved


@pytest.mark.parametrize("autocast", [False, True])
def test_what_checkpoint_marks_is_computed_again(autocast: bool) -> None:
    model, eager = pair(Checkpointed, autocast)
    mf.parallelize(model, MESH, {"first": "colwise", "second": "rowwise"}, inputs={"x": ["dp", None]})
    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(3))
    for each in (model, eager):
        each(x).backward()
    assert gradients_differ_by(model, eager) < (5e-2 if autocast else 1e-5)
    assert saved_by(model) <= 3  # what the second region takes, and what the loss reads


def test_precision_computes_in_one_type_and_keeps_another() -> None:
    model, eager = pair(Gpt)
    precision = mf.Precision(param=torch.bfloat16, reduce=torch.float32)
    mf.parallelize(model, MESH, GPT_PLAN, inputs={"ids": ["dp", None], "targets": ["dp", None]}, fsdp="dp",
                   precision=precision)  # fmt: skip
    half = Gpt()
    half.load_state_dict(eager.state_dict())
    half.to(torch.bfloat16)
    for each in (model, eager, half):
        each(ids(), ids(seed=2))[0].backward()
    assert model.tokens.weight.grad is not None and model.tokens.weight.grad.dtype == torch.float32
    wanted = {name: p.grad for name, p in eager.named_parameters() if p.grad is not None}
    ours = max(difference(p.grad, wanted[n]) for n, p in model.named_parameters() if n in wanted)
    torchs = max(difference(p.grad.float(), wanted[n]) for n, p in half.named_parameters() if n in wanted)
    assert ours <= 1.5 * torchs


def test_activations_of_styles_that_name_a_dim() -> None:
    model, eager = pair(Gpt)
    plan = {**GPT_PLAN, "layers.*.norm2": SequenceParallel()}
    mf.parallelize(model, MESH, plan, inputs={"ids": ["dp", None], "targets": ["dp", None]})
    for each in (model, eager):
        each(ids(), ids(seed=2))[0].backward()
    assert gradients_differ_by(model, eager) < 1e-5
    assert "[dp, tp, -]" in model.explain("layers.0.norm2")


def test_functions_and_the_modules_in_them() -> None:
    model, eager = pair(Gpt)
    mf.parallelize(model, MESH, GPT_PLAN)

    def loss_of(tokens: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return (model(tokens).softmax(-1) * weight).sum()

    step = mf.compile(loss_of, inputs={"tokens": ["dp", None]})
    weight = torch.rand(VOCABULARY, generator=torch.Generator().manual_seed(4), requires_grad=True)
    step(ids(), weight).backward()
    found, weight.grad = weight.grad, None
    (eager(ids()).softmax(-1) * weight).sum().backward()
    assert gradients_differ_by(model, eager) < 1e-5 and difference(found, weight.grad) < 1e-5


def test_weights_on_meta_are_initialised_alike_on_every_mesh_and_loaded(tmp_path: Any) -> None:
    from safetensors.torch import save_file

    made = []
    for mesh in (MESH, mf.DeviceMesh((4,), ("tp",))):
        with torch.device("meta"):
            model = Net()
        mf.parallelize(model, mesh, {"up": "colwise"})
        model.init_weights(5)
        made.append(model)
    assert parameters_differ_by(*made) == 0 and float(made[0].norm.running_var.sum()) == 16
    _, eager = pair(Net)
    save_file(eager.state_dict(), str(tmp_path / "model.safetensors"))
    made[0].load(tmp_path)
    assert parameters_differ_by(made[0], eager) == 0
    x = torch.randn(8, 6, generator=torch.Generator().manual_seed(3))
    made[0].eval(), eager.eval()
    assert difference(made[0](x), eager(x)) < 1e-5
    with pytest.raises(mf.CheckpointError, match="no such file"):
        made[0].load(tmp_path / "none.safetensors")
