"""Programs of public reports about sharded tensors, as models: values and gradients as in eager torch."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils import _pytree as pytree

import meshfuse as mf
from frontend_models import difference, gradients_differ_by

ROWS, PLANE = mf.DeviceMesh((3,), ("dp",)), mf.DeviceMesh((2, 2), ("dp", "tp"))


@pytest.fixture(autouse=True)
def _plan_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MESHFUSE_SEARCH", "fast")


def numbers(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def _detached_in_place(x: torch.Tensor) -> Any:
    y = x * 2
    before = y.sum()
    y.detach_()
    return before + (y * x).sum(), y


def _written_views(x: torch.Tensor) -> torch.Tensor:
    y = x * 1
    y[2:4].mul_(3)
    y[:, 1] += y[:, 0]
    y.t()[0].zero_()
    y.view(-1)[3:9].copy_(torch.arange(6.0, dtype=x.dtype))
    return y.add_(1).clamp_(max=2)


def _of_mixture(x: torch.Tensor, gate: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    scores = x @ gate
    chosen = scores >= scores.topk(2, -1)[0][:, -1:]
    return torch.einsum("te,teo->to", scores.softmax(-1) * chosen, torch.einsum("ti,eio->teo", x, w))


Function = Callable[..., Any]
CASES: dict[str, tuple[Function, tuple[Any, ...], Any, dict[str, Any]]] = {
    # gradients that are those of results, passed on
    "straight through": (lambda x: x + (x.round() - x).detach(), (numbers(7, 4),), ROWS, {}),
    "a detached summand": (lambda x: (x * 2).detach() + x, (numbers(7, 4),), ROWS, {}),
    "pytorch: detach_": (_detached_in_place, (numbers(7, 4),), ROWS, {}),
    "a detached result": (lambda x: [(x * 2).detach(), x * x], (numbers(7, 4),), ROWS, {}),
    "a sum over two axes": (lambda x, y: x + y, (numbers(6, 4), numbers(6, 4)), PLANE, {"x": ["dp", "tp"]}),
    # results that are inputs, or views of these or of each other
    "arguments as results": (lambda x: (x, [x], x * 2), (numbers(7, 4),), ROWS, {}),
    "slices of arguments": (lambda x: (x[1:3], x.diagonal(), x.sum()), (numbers(7, 4),), ROWS, {}),
    "views of one another": (lambda x: [y := x * 2, y[1:3], y.T.sum(0), y.T], (numbers(7, 4),), ROWS, {}),
    "attributes": (lambda x: [x.T, x.mT, x.data], (numbers(7, 4),), ROWS, {}),
    "writing to views": (_written_views, (numbers(7, 4),), ROWS, {}),
    # partial sums, uneven dims, strided shards
    "pytorch#163193": (lambda x: [x.sum() + 10, 10 - x.mean(0), x.norm() + 2], (numbers(7, 3),), ROWS, {}),
    "pytorch#165962": (lambda x, w: [(x @ w).amax(0), (x @ w).amin(), torch.linalg.vector_norm(x @ w, 3, 0)],
                       (numbers(5, 6), numbers(6, 4)), PLANE, {"x": [None, "tp"], "w": ["tp", None]}),
    "pytorch#172288": (lambda x: [x.norm(dim=0).sum(), x.norm(p=1, dim=0).square().sum()], (numbers(7, 4),), ROWS, {}),
    "pytorch#178785": (lambda x: [x.softmax(0), F.layer_norm(x.T, (12,)), x[1:11:3], x.unbind(0)[3]],
                       (numbers(12, 4),), PLANE, {"x": [["tp", "dp"], None]}),
    "pytorch#185362": (lambda x: [torch.cumprod(x * (x > -0.5), 0), torch.cummax(x, 0)[0]], (numbers(7, 3),), ROWS, {}),
    "pytorch#191926": (lambda x, w: F.conv2d(x, w, stride=2, padding=1),
                       (numbers(2, 3, 6, 8), numbers(4, 3, 3, 3)), ROWS, {"x": [None, None, None, "dp"]}),
    "jax#16909": (lambda x: torch.view_as_real(torch.fft.fftn(x)), (numbers(7, 4),), ROWS, {}),
    "xla#42481": (lambda x, w: (x[:5] @ w).detach().index_add(0, torch.tensor([0, 1, 1, 4, 2, 2, 0]), x @ w),
                  (numbers(7, 6), numbers(6, 4)), PLANE, {"x": [None, "tp"], "w": ["tp", None]}),
    "torchtitan#1805": (_of_mixture, (numbers(6, 4), numbers(4, 4, seed=1), numbers(4, 4, 3)), PLANE,
                        {"x": ["dp", None], "w": ["tp", None, None]}),
    "Fuser#3488": (lambda x, y: x + y, (numbers(6), numbers(1)), ROWS, {"x": ["dp"], "y": ["dp"]}),
}  # fmt: skip


def _weighted(results: Any) -> torch.Tensor:
    leaves = [t for t in pytree.tree_leaves(results) if t.requires_grad]
    return torch.stack([(t * torch.cos(torch.arange(t.numel()).view(t.shape))).sum() for t in leaves]).sum()


@pytest.mark.parametrize("name", CASES)
def test_values_and_gradients(name: str) -> None:
    function, arguments, mesh, inputs = CASES[name]
    found = []
    for each in (mf.compile(function, mesh, inputs=inputs or {"x": ["dp", None]}), function):
        given = [t.clone().requires_grad_() for t in arguments]
        made = each(*given)
        _weighted(made).backward()
        found.append([*pytree.tree_leaves(made), *[t.grad for t in given]])
    for ours, wanted in zip(*found, strict=True):
        assert ours.requires_grad == wanted.requires_grad and ours.dtype == wanted.dtype
        assert difference(ours, wanted) < 1e-9


class Weights(nn.Module):
    """Returns its weights beside what it makes of them."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(numbers(4, 6))

    def forward(self, x: torch.Tensor) -> Any:
        return self.w, self.w.t(), self.w[:2], x @ self.w


def _convolutions() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(2, 6, 2), nn.ReLU(), nn.Conv2d(6, 4, 2), nn.ReLU(), nn.ConvTranspose2d(4, 6, 2), nn.ReLU(),
        nn.ConvTranspose2d(6, 2, 2),
    ).double()  # fmt: skip


MODELS: dict[str, tuple[Callable[[], nn.Module], Any, dict[str, Any], tuple[int, ...]]] = {
    "weights as results": (Weights, {}, {"x": ["dp", None]}, (4, 4)),
    "styles of convolutions": (
        _convolutions, {"0": "colwise", "2": "rowwise", "4": "colwise", "6": "rowwise"},
        {"input": ["dp", None, None, None]}, (4, 2, 5, 5),
    ),
    "input channels of a convolution": (
        lambda: nn.Sequential(nn.Conv1d(2, 6, 2), nn.ReLU(), nn.Conv1d(6, 2, 2)).double(),
        {"0": [None, "tp", None], "0.bias": [None], "2": ["tp", None, None]}, {"input": ["dp", None, None]}, (4, 2, 6),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", MODELS)
def test_models(name: str) -> None:
    make, plan, inputs, shape = MODELS[name]
    torch.manual_seed(0)
    eager = make()
    model = mf.parallelize(copy.deepcopy(eager), PLANE, plan, inputs=inputs)
    for each in (model, eager):
        _weighted(each(numbers(*shape))).backward()
    assert gradients_differ_by(model, eager) < 1e-9


def test_a_bilinear_layer_is_cut_along_its_results() -> None:
    model = mf.parallelize(nn.Sequential(nn.Bilinear(4, 3, 6)), PLANE, {"0": "colwise"})
    assert model._meshfuse.plan.spec("0.weight", 3) == ("tp", None, None)


def test_a_state_that_is_returned_detached_and_passed_again() -> None:
    """A detached result has no history: backward through the second call does not enter the first."""

    def step(x: torch.Tensor, state: torch.Tensor) -> Any:
        y = torch.tanh(x + state)
        return y.square().sum(), y.detach()

    found = []
    for each in (mf.compile(step, ROWS, inputs={"x": ["dp", None]}), step):
        x, state = numbers(6, 4).requires_grad_(), torch.zeros(6, 4, dtype=torch.float64)
        for _ in range(3):
            loss, state = each(x, state)
            loss.backward()
        found.append((x.grad, state))
    assert all([difference(a, b) < 1e-10 for a, b in zip(*found, strict=True)])
