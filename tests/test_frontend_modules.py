"""Modules of torch's own that are written in functions which no graph has, as in eager torch: results and gradients."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import meshfuse as mf
from frontend_models import difference, gradients_differ_by, pair

MESH = mf.DeviceMesh((2, 2), ("dp", "tp"))


@pytest.fixture(autouse=True)
def _plan_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MESHFUSE_SEARCH", "fast")


class First(nn.Module):
    """The first result of a module that has several."""

    def __init__(self, module: nn.Module, *more: Any, **named: Any) -> None:
        super().__init__()
        self.module, self._more, self._named = module, more, named

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.module(x, *(x for _ in self._more), **self._named)[0]


class Again(nn.Module):
    """A layer whose activations torch computes again."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True, norm_first=True)

    def forward(self, x: torch.Tensor) -> Any:
        return checkpoint(self.layer, x, use_reentrant=False)


def attention(**named: Any) -> Callable[[], nn.Module]:
    return lambda: First(nn.MultiheadAttention(8, 2, batch_first=True), 1, 2, **named)


class Then(nn.Module):
    """A layer, and a function of its result."""

    def __init__(self, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.layer, self.function = nn.Linear(8, 8), function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(self.layer(x))


def rotated(x: torch.Tensor) -> torch.Tensor:
    """Rotary positions in complex numbers."""
    turns = torch.polar(torch.ones(3, 4), torch.arange(3.0)[:, None] * torch.arange(4.0))
    pairs = torch.view_as_complex(x.view(*x.shape[:-1], 4, 2))
    return torch.view_as_real(pairs * turns).flatten(2)


FUNCTIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "complex rotary positions": rotated, "a diagonal": lambda x: x.diagonal(1, 1, 2),
    "a diagonal by einsum": lambda x: torch.einsum("bii->b", x[..., :3]), "windows": lambda x: x.unfold(-1, 3, 2),
    "bilinear": lambda x: nn.functional.bilinear(x, x, torch.ones(2, 8, 8)),
}  # fmt: skip


def normed(norm: Callable[..., nn.Module]) -> Callable[[], nn.Module]:
    return lambda: norm(nn.Linear(8, 8))


ROWS, IDS = torch.randn(4, 3, 8, generator=torch.Generator().manual_seed(1)), torch.arange(12).view(4, 3)
CASES: dict[str, tuple[Callable[[], nn.Module], torch.Tensor, Any]] = {
    "attention": (attention(need_weights=False), ROWS, None),
    "attention and its weights": (attention(), ROWS, None),
    "a layer, checkpointed": (Again, ROWS, {"layer.linear1": "colwise", "layer.linear2": "rowwise"}),
    "LSTM": (lambda: First(nn.LSTM(8, 4, batch_first=True)), ROWS, None),
    "GRU": (lambda: First(nn.GRU(8, 4, batch_first=True)), ROWS, None),
    "weight norm": (normed(nn.utils.parametrizations.weight_norm), ROWS, None),
    "spectral norm": (normed(nn.utils.parametrizations.spectral_norm), ROWS, None),
    "bags": (lambda: nn.EmbeddingBag(12, 8, mode="sum"), IDS, {"weight": ["tp", None]}),
    "mean bags": (lambda: nn.EmbeddingBag(12, 8), IDS, None),
    **{name: (functools.partial(Then, function), ROWS, None) for name, function in FUNCTIONS.items()},
}


@pytest.mark.parametrize("name", CASES)
def test_a_module_is_as_in_eager_torch(name: str) -> None:
    make, x, plan = CASES[name]
    model, eager = pair(make)
    argument = next(iter(inspect.signature(model.forward).parameters))
    mf.parallelize(model, MESH, plan, inputs={argument: ["dp", *[None] * (x.ndim - 1)]})
    results = [each(x) for each in (model, eager)]
    for result in results:
        result.square().sum().backward()
    assert difference(*results) < 1e-5 and gradients_differ_by(model, eager) < 1e-5
    for key, buffer in eager.named_buffers():
        assert difference(model.get_buffer(key), buffer) < 1e-5, key


def test_torch_compile_leaves_a_parallel_model_as_it_is() -> None:
    model, eager = pair(lambda: nn.Linear(8, 8))
    mf.parallelize(model, MESH, inputs={"input": ["dp", None, None]})
    assert difference(torch.compile(model, backend="eager")(ROWS), eager(ROWS)) < 1e-6


class Numbers(nn.Module):
    """A layer that numbers and flags are passed to."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor, times: int = 2, halved: bool = True, factor: float = 1.5) -> torch.Tensor:
        for _ in range(times):
            x = self.layer(x) * times * factor
        return x.view(times, -1, 8).sum(0) if halved else x


@pytest.mark.parametrize("dynamic", [None, {"x": [0]}])
def test_numbers_and_flags_among_the_arguments(dynamic: Any) -> None:
    model, eager = pair(Numbers)
    mf.parallelize(model, MESH, inputs={"x": ["dp", None]}, dynamic=dynamic)
    x = ROWS.flatten(0, 1)
    for more in ((), (3,), (3, False), (2, True, 0.5)):
        assert difference(model(x, *more), eager(x, *more)) < 1e-5, more
