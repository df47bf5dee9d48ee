"""Functions of functions in a forward, such as branches and gradients: values and gradients as in eager torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch._higher_order_ops.while_loop import while_loop

import meshfuse as mf
from frontend_models import difference

MESH = mf.DeviceMesh((2, 2), ("dp", "tp"))
Function = Callable[[torch.Tensor, torch.Tensor], Any]


@pytest.fixture(autouse=True)
def _plan_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MESHFUSE_SEARCH", "fast")


def _branches(x: torch.Tensor, w: torch.Tensor) -> Any:
    def inner(x: torch.Tensor) -> torch.Tensor:
        return torch.cond(x[0, 0] > 0, lambda x: x * 2, lambda x: x.sin(), (x,))

    both = torch.cond(x.sum() > 1e3, lambda x, y: (x * 2, y.cos()), lambda x, y: (x - 1, y.sin()), (x, w))
    return [*both, torch.cond(x.sum() < 1e3, inner, lambda x: x - 1, (x,))]


def _forces(x: torch.Tensor, w: torch.Tensor) -> Any:
    """A model of an energy returns its gradient, and is trained by it."""
    energy = torch.tanh(x @ w).square().sum()
    (forces,) = torch.autograd.grad(energy, x, create_graph=True)
    return [energy, forces]


def _transformed(x: torch.Tensor, w: torch.Tensor) -> Any:
    return [
        torch.vmap(torch.dot)(x, w[:4]),
        torch.vmap(lambda row: row.cumsum(0))(x),
        torch.func.grad(lambda x: (x**3).sum())(x),
    ]


class Reversed(torch.autograd.Function):
    """A gradient of one's own."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, factor: float) -> torch.Tensor:
        ctx.factor = factor
        ctx.save_for_backward(x)
        return x * 2

    @staticmethod
    def backward(ctx: Any, *tangents: Any) -> Any:
        return -ctx.factor * tangents[0] * ctx.saved_tensors[0].sign(), None


def _own(x: torch.Tensor, w: torch.Tensor) -> Any:
    return [Reversed.apply(x, 0.5), (w + (w.round() - w).detach()) * x[0].detach()]


@pytest.mark.parametrize("function", [_branches, _forces, _transformed, _own])
def test_values_and_gradients(function: Function) -> None:
    def loss(x: torch.Tensor, w: torch.Tensor) -> Any:
        made = function(x, w)
        weights = (torch.cos(torch.arange(t.numel(), dtype=torch.float64)).view(t.shape) for t in made)
        return sum((t * c).sum() for t, c in zip(made, weights, strict=True)), *made

    step, found = mf.compile(loss, MESH, inputs={"x": ["dp", "tp"], "w": [None, "tp"]}), []
    for each in (step, loss):
        draw = torch.Generator().manual_seed(0)
        x, w = (torch.randn(n, 6, generator=draw, dtype=torch.float64).requires_grad_() for n in (4, 6))
        made = each(x, w)
        made[0].backward()
        found.append([*made, x.grad, w.grad])
    for place, (ours, wanted) in enumerate(zip(*found, strict=True)):
        assert (ours is None) == (wanted is None), place
        assert ours is None or difference(ours, wanted) < 1e-9, place


def test_a_loop_of_a_graph_is_refused() -> None:
    def looped(x: torch.Tensor) -> torch.Tensor:
        return while_loop(lambda i, x: i < 3, lambda i, x: (i + 1, x * 2), (torch.tensor(0), x))[1]

    with pytest.raises(mf.DefinitionError, match=r"while_loop has functions among its arguments.*a loop in Python"):
        mf.compile(looped, MESH)(torch.ones(4))
