"""Models that a script changes after they were captured, copies, and what torch does with gradients of gradients."""

from __future__ import annotations

import concurrent.futures
import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.modules import module as nn_module
from torch.nn.utils import parametrizations

import meshfuse as mf
from frontend_models import difference, gradients_differ_by

MESH = mf.DeviceMesh((2, 2), ("dp", "tp"), links="bytes")
PLAN = {"up": "colwise", "down": "rowwise"}


class Scaled(nn.Module):
    """Two layers, and numbers that its forward reads."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.drop = nn.Linear(8, 16), nn.Linear(16, 6), nn.Dropout(0.0)
        self.scale, self.options, self.unread = 2.0, {"shift": 1.0}, 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.drop(F.gelu(self.up(x)))) * self.scale + self.options["shift"]


def pair() -> tuple[Any, Scaled]:
    torch.manual_seed(0)
    eager = Scaled()
    return mf.parallelize(copy.deepcopy(eager), MESH, PLAN, inputs={"x": ["dp", None]}), eager


def rows() -> torch.Tensor:
    return torch.randn(4, 8, generator=torch.Generator().manual_seed(3))


def doubled(module: nn.Module, given: Any, out: torch.Tensor) -> torch.Tensor:
    return out * 2


def replaced(model: Any) -> None:
    torch.manual_seed(1)
    model.down = nn.Linear(16, 6)


def normalised(model: Any) -> None:
    parametrizations.weight_norm(model.down).parametrizations.weight.original0.data.mul_(2)


CHANGES: dict[str, Callable[[Any], object]] = {
    "a number": lambda model: setattr(model, "scale", 5.0),
    "an entry of a dict": lambda model: model.options.update(shift=-3.0),
    "a number of a module in it": lambda model: setattr(model.drop, "p", 1.0),
    "a hook": lambda model: model.down.register_forward_hook(doubled),
    "a hook before": lambda model: model.up.register_forward_pre_hook(lambda module, given: (given[0] * 2,)),
    "a forward": lambda model: setattr(model.up, "forward", lambda x: torch.cat([x, x * 2], -1)),
    "a module": replaced,
    "a parametrization": normalised,
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_model_that_is_changed_between_calls_runs_as_it_is_then(change: str) -> None:
    model, eager = pair()
    before = eager(rows())
    assert difference(model(rows()), before) < 1e-5
    for each in (model, eager):
        CHANGES[change](each)
    wanted = eager(rows())
    assert difference(wanted, before) > 1e-2
    assert difference(model(rows()), wanted) < 1e-5


def _noting(noted: list[float]) -> Callable[..., Any]:
    def hook(module: nn.Module, *given: Any) -> None:
        noted.append(sum(float(t.detach().abs().sum()) for t in given[-1] if t is not None))

    return hook


HOOKS: dict[str, Callable[[nn.Module], object]] = {
    "before": lambda model: model.register_forward_pre_hook(lambda module, given: (given[0] * 2,)),
    "before, with keywords": lambda model: model.register_forward_pre_hook(
        lambda module, given, named: ((given[0] * 2,), named), with_kwargs=True
    ),
    "behind": lambda model: model.register_forward_hook(doubled),
    "before the backward": lambda model: model.register_full_backward_pre_hook(lambda module, grads: (grads[0] * 2,)),
    "of gradients of weights": lambda model: model.up.weight.register_hook(lambda gradient: gradient * 2),
}


@pytest.mark.parametrize("hook", HOOKS)
def test_a_hook_of_the_whole_model_runs_once(hook: str) -> None:
    """Around the program, and not in it as well."""
    model, eager = pair()
    for call in range(2):
        for each in (model, eager):
            each.zero_grad()
            if call == 0:
                HOOKS[hook](each)
            each(rows()).square().sum().backward()
        assert gradients_differ_by(model, eager) < 1e-5


def test_what_hooks_of_the_whole_model_see() -> None:
    seen: tuple[list[float], list[float]] = [], []
    for each, noted in zip(pair(), seen, strict=True):
        each.register_full_backward_hook(_noting(noted))
        each(rows().requires_grad_()).square().sum().backward()
    assert len(seen[0]) == 1 and seen[0] == pytest.approx(seen[1])


def test_a_hook_of_all_modules_is_said_to_run_around_the_whole() -> None:
    model, eager = pair()
    handle = nn_module.register_module_forward_hook(
        lambda module, given, out: out * 2 if isinstance(module, Scaled) else None
    )
    try:
        with pytest.warns(UserWarning, match="run around Scaled as a whole"):
            assert difference(model(rows()), eager(rows())) < 1e-6
    finally:
        handle.remove()


@pytest.mark.parametrize("hook", ["register_full_backward_hook", "register_full_backward_pre_hook"])
def test_a_backward_hook_inside_of_a_model_says_where_to_put_it(hook: str) -> None:
    model, _ = pair()
    getattr(model.down, hook)(lambda module, *given: None)
    with pytest.raises(ValueError, match=r"a backward hook of a module inside.*Register it on the model itself"):
        model(rows())


def test_a_hook_that_is_removed_runs_no_more() -> None:
    model, eager = pair()
    hook = model.down.register_forward_hook(doubled)
    assert difference(model(rows()), eager(rows())) > 0.1
    hook.remove()
    assert difference(model(rows()), eager(rows())) < 1e-5


def test_what_no_forward_reads_captures_nothing_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    from meshfuse.frontends import call_graphs

    model, _ = pair()
    model(rows())
    monkeypatch.setattr(call_graphs, "captured", None)
    model.unread, model.new = 3, "text"
    model(rows())


def test_a_pipeline_runs_as_its_model_is_then() -> None:
    torch.manual_seed(0)
    eager = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.0), nn.Linear(8, 8), nn.Linear(8, 8))
    pipe = mf.Pipeline("pp", "1f1b", 2, cut=["2"])
    model = mf.parallelize(copy.deepcopy(eager), mf.DeviceMesh((2,), ("pp",)), pipeline=pipe, loss=F.mse_loss)
    x = rows()
    for p in (0.0, 1.0):
        model[1].p = eager[1].p = p  # type: ignore[assignment]
        assert difference(model.step(x, x), F.mse_loss(eager(x), x)) < 1e-5
    again = copy.deepcopy(model)
    model.zero_grad()
    again.zero_grad()
    F.mse_loss(eager(x), x).backward()
    assert difference(again.step(x, x), F.mse_loss(eager(x), x)) < 1e-5
    assert all(p.grad is None for p in model.parameters())


def test_a_copy_of_a_model_that_has_run_is_a_model_of_its_own() -> None:
    model, eager = pair()
    model(rows()).sum().backward()
    other = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    other.zero_grad()
    for each in (other, eager):
        each(rows()).sum().backward()
    assert difference(other(rows()), eager(rows())) < 1e-5 and gradients_differ_by(other, eager) < 1e-5
    assert difference(model(rows()), torch.ones(4, 6)) < 1e-5


def penalty(call: Callable[[torch.Tensor], torch.Tensor], weight: torch.Tensor) -> torch.Tensor:
    """The gradient of a gradient's size."""
    x = rows().requires_grad_()
    (gradient,) = torch.autograd.grad(call(x).tanh().sum(), x, create_graph=True)
    return torch.autograd.grad((gradient**2).sum(), weight)[0]


def test_gradients_of_gradients_are_an_error_and_not_wrong() -> None:
    model, _ = pair()
    said = (
        r"a parallel model's gradients have no gradients: found a backward through some taken with create_graph=True, "
        r"needed a loss without gradients in it\. Write the model as a definition, .* \(at test_changed_modules\.py:"
    )
    with pytest.raises(mf.DefinitionError, match=said):
        penalty(model, model.up.weight)
    x = rows().requires_grad_()
    torch.autograd.grad(model(x).sum(), x, create_graph=True)  # by itself it is right
    with mf.FusionDefinition() as fd:
        a, w = fd.define_tensor([4, 8]), fd.define_tensor([6, 8])
        fd.add_output(fd.ops.sin(fd.ops.linear(a, w)))
    fd.mesh_split(w, MESH, ["tp", None])
    weight = torch.randn(6, 8, requires_grad=True)
    wanted = penalty(lambda x: torch.sin(F.linear(x, weight)), weight)
    assert difference(penalty(lambda x: fd(x, weight)[0], weight), wanted) < 1e-5


class Counting(Scaled):
    """Counts its calls in a buffer that no state dict has."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros((), dtype=torch.long), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls = self.calls + 1
        return super().forward(x)


def test_a_buffer_that_is_not_saved_is_set_anew() -> None:
    model = mf.parallelize(Counting(), MESH, PLAN, inputs={"x": ["dp", None]})
    for _ in range(2):
        model(rows())
    assert int(model.calls) == 2 and "calls" not in model.state_dict()


@pytest.mark.parametrize("save", [pickle.dumps, lambda model: torch.save(model, io.BytesIO())])
def test_a_model_that_is_pickled_says_what_to_save(save: Callable[[Any], object]) -> None:
    model, _ = pair()
    with pytest.raises(mf.DefinitionError, match=r"a parallel Scaled is pickled.*Save model\.state_dict\(\)"):
        save(model)


def test_models_are_captured_in_threads() -> None:
    """Tracing changes torch for the whole process: nothing of it may stay, and none may meet another."""
    models = [pair() for _ in range(4)]

    def differs(which: int) -> float:
        model, eager = models[which]
        for each in (model, eager):
            each(rows()[: which + 1]).sum().backward()
        return gradients_differ_by(model, eager)

    with concurrent.futures.ThreadPoolExecutor(4) as threads:
        assert max(threads.map(differs, range(4))) < 1e-5
    assert not torch.is_anomaly_enabled()
