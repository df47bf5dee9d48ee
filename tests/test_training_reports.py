"""Programs of public reports about training loops of FSDP, pipelining, Megatron and others: as in eager torch."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import meshfuse as mf
from frontend_models import difference, gradients_differ_by, parameters_differ_by

PLANE, PP = mf.DeviceMesh((2, 2), ("dp", "tp"), links="bytes"), mf.DeviceMesh((2,), ("pp",))
PLAN = {"*up": "colwise", "*down": "rowwise"}


@pytest.fixture(autouse=True)
def _plan_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MESHFUSE_SEARCH", "fast")


class Mlp(nn.Module):
    def __init__(self, width: int = 6, hidden: int = 10, out: int = 4) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, hidden), nn.Linear(hidden, out)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(F.gelu(self.up(x)))


class Adapted(nn.Module):
    """A frozen layer, and a trained product of low rank beside it."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.a = nn.Parameter(torch.randn(3, base.in_features))
        self.b = nn.Parameter(torch.randn(base.out_features, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + x @ self.a.T @ self.b.T


def adapted() -> nn.Module:
    model = Mlp()
    model.up, model.down = Adapted(model.up), Adapted(model.down)  # pyright: ignore[reportAttributeAccessIssue]
    return model


class Scored(nn.Module):
    """Gives a loss and the features that it is of, and keeps statistics of these."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm = nn.Linear(6, 4), nn.BatchNorm1d(4)
        self.seen = nn.Buffer(torch.zeros(4))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        features = self.norm(self.up(x)) + self.seen
        self.seen.copy_(features.detach().mean(0))
        return features.square().sum(), features


class Recurrent(nn.Module):
    """Layers that run several times in a forward."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(6, 6) for _ in range(2)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(3):
            for layer in self.layers:
                x = torch.tanh(layer(x))
        return x


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(6, 2, 10, 0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.encoder(x.view(2, 3, 6))


def rows(seed: int = 0, count: int = 6) -> torch.Tensor:
    return torch.randn(count, 6, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def pair(make: Callable[[], nn.Module] = Mlp) -> tuple[Any, Any]:
    torch.manual_seed(0)
    eager, plan = make().double(), PLAN if make is Mlp else {}
    return mf.parallelize(copy.deepcopy(eager), PLANE, plan, inputs={"x": ["dp", None]}, fsdp="dp"), eager


def trained(model: nn.Module, steps: int = 2) -> None:
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.1)
    for step in range(steps):
        optimizer.zero_grad()
        model(rows(step)).square().mean().backward()
        optimizer.step()


def frozen_and_not(model: Any) -> None:
    for trains in (False, True):
        model.zero_grad()
        model.up.requires_grad_(trains)
        model(rows(int(trains))).square().mean().backward()


def averaged(model: Any) -> None:
    mean = torch.optim.swa_utils.AveragedModel(model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9))
    trained(model)
    mean.update_parameters(model)
    mean(rows(3)).square().sum().backward()
    for p, q in zip(model.parameters(), mean.module.parameters(), strict=True):
        p.data.copy_(q.data)


def scaled(model: Any) -> None:
    optimizer, scaler = torch.optim.SGD(model.parameters(), lr=0.1), torch.amp.GradScaler("cpu", init_scale=64.0)
    for step in range(3):
        x = rows(step)
        x[0, 0] = torch.inf if step == 1 else 0  # a step that is left out
        scaler.scale(model(x).square().mean()).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()


def stepped_in_backward(model: Any) -> None:
    optimizers = {p: torch.optim.AdamW([p], lr=0.1) for p in model.parameters()}

    def hook(parameter: torch.Tensor) -> None:
        optimizers[parameter].step()
        optimizers[parameter].zero_grad()

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(hook)
    for step in range(2):
        model(rows(step)).square().mean().backward()


def of_two_forwards(model: Any) -> None:
    first, second = model(rows(0)), model(rows(1))
    (second - first).square().sum().backward()


def of_features_of_two_forwards(model: Any) -> None:
    (_, first), (loss, second) = model(rows(0)), model(rows(1))
    (loss + (second - first).square().sum()).backward()


def of_losses_of_two_forwards(model: Any) -> None:
    first, second = model(rows(0))[0], model(rows(1))[0]
    (first - 2 * second).backward()
    model(rows(2))[1].sum().backward()


def cast(model: Any) -> None:
    model(rows()).sum().backward()
    model.zero_grad()
    model.float()
    model(rows().float()).square().mean().backward()


def assigned(model: Any) -> None:
    model.load_state_dict({name: tensor * 2 for name, tensor in model.state_dict().items()}, assign=True)
    model(rows()).square().mean().backward()


def called_with_other_weights(model: Any) -> None:
    weights = {name: (p * 2).detach().requires_grad_() for name, p in model.named_parameters()}
    torch.func.functional_call(model, weights, (rows(),)).square().sum().backward()
    for name, parameter in model.named_parameters():
        parameter.grad = weights[name].grad


def of_other_sizes(model: Any) -> None:
    for count in (6, 5, 1, 0):  # the last batch of an epoch
        model(rows(count, count)).square().sum().backward()


def evaluated(model: Any) -> None:
    model.eval()
    with torch.no_grad():
        model(rows())
    model(rows()).square().mean().backward()


REPORTS: dict[str, tuple[Callable[[Any], None], Callable[[], nn.Module]]] = {
    "pytorch#91167, #104690: parameters that are frozen beside others": (frozen_and_not, Mlp),
    "pytorch#100945: adapters": (trained, adapted),
    "pytorch#82070: averaged weights": (averaged, Mlp),
    "pytorch#139671: layers that run several times": (lambda m: m(rows()).sum().backward(), Recurrent),
    "accelerate#4219, a scaler's left out step": (scaled, Mlp),
    "torchtitan#1732: steps in the backward": (stepped_in_backward, Mlp),
    "DeepSpeed#846: a loss of two forwards": (of_two_forwards, Mlp),
    "pytorch#22095: two forwards that keep statistics": (of_losses_of_two_forwards, Scored),
    "two forwards that keep statistics, by their features": (of_features_of_two_forwards, Scored),
    "pytorch#144289: other types later": (cast, Mlp),
    "pytorch#109648: assigned state dicts": (assigned, Mlp),
    "functional_call": (called_with_other_weights, Mlp),
    "incomplete batches": (of_other_sizes, Mlp),
    "torch's encoder in evaluation": (evaluated, Encoder),
}


@pytest.mark.parametrize("report", REPORTS)
def test_a_training_loop(report: str) -> None:
    loop, make = REPORTS[report]
    model, eager = pair(make)
    for each in (model, eager):
        loop(each)
    bound = 1e-5 if loop is cast else 1e-9
    assert gradients_differ_by(model, eager) < bound and parameters_differ_by(model, eager) < bound
    torch.testing.assert_close(dict(model.named_buffers()), dict(eager.named_buffers()), rtol=1e-9, atol=1e-9)


class Twice(nn.Module):
    """Uses a weight at two places, one of which depends on the other."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(6, 6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(x @ self.w) @ self.w


class Stages(nn.Module):
    """Stages with keywords that some do not read, and a parameter that nothing uses."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Twice() for _ in range(4)])
        self.idle = nn.Parameter(torch.ones(2))

    def forward(self, x: torch.Tensor, scale: torch.Tensor | None = None) -> torch.Tensor:
        for place, layer in enumerate(self.layers):
            x = layer(x) if scale is None or place < 3 else layer(x) * scale
        return x


@pytest.mark.parametrize("frozen", ["", "layers.0", "layers.3"])
@pytest.mark.parametrize("schedule", ["1f1b", "zero-bubble"])
def test_stages(schedule: str, frozen: str) -> None:
    """pytorch#180952, #153484, #153498: weights used twice, keywords that stages do not read, frozen stages."""
    torch.manual_seed(0)
    eager = Stages().double()
    model = mf.parallelize(copy.deepcopy(eager), PP, loss=F.mse_loss, pipeline=mf.Pipeline("pp", schedule, 2))
    for each in (model, eager):
        for name, parameter in each.named_parameters():
            parameter.requires_grad_(not frozen or not name.startswith(frozen))
    for step in range(2):  # NeMo Automodel#3530, torchtitan#1732: gradients of several steps add up
        target, scale = rows(step + 5), rows(step + 9)[:, :1]
        wanted = F.mse_loss(eager(rows(step), scale), target)
        wanted.backward()
        assert difference(model.step(rows(step), scale=scale, target=target), wanted) < 1e-12
    assert gradients_differ_by(model, eager) < 1e-12
