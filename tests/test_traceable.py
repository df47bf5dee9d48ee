"""Functions of torch that read numbers while they run, in models: values and gradients as in eager torch."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._higher_order_ops.map import map as mapped

import meshfuse as mf
from frontend_models import difference, gradients_differ_by

MESHES = (mf.DeviceMesh((2, 2), ("dp", "tp")), mf.DeviceMesh((3,), ("dp",)))


@pytest.fixture(autouse=True)
def _plan_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MESHFUSE_SEARCH", "fast")


def numbers(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def _taken(x: torch.Tensor, i: torch.Tensor) -> Any:
    several = torch.tensor([0, 2])
    return [
        x[i], x[:, i], x[i, :, i], x[..., i], x[None, i], x[i, 1:3], x[i, None], x[i][i], x[i, :, several],
        x[several, i], x[:, i, several], x[x.sum((1, 2)).argmax()],
    ]  # fmt: skip


def _put(x: torch.Tensor, i: torch.Tensor) -> torch.Tensor:
    y = x.clone()
    y[i, :, i] = x[0, :, 0] * 2
    y[..., i] = x[..., 0]
    y[:, i] = 0
    y[i, 1:3] = x[0, 1:3]
    y[i, 0, i] = x.sum()
    y[i] += 1
    return y


ctc_loss: Any = F.ctc_loss  # takes lengths as tuples, too
FUNCTIONS: dict[str, tuple[Callable[..., Any], tuple[Any, ...]]] = {
    "an index without dims": (_taken, (numbers(4, 5, 3), torch.tensor(1))),
    "a negative one": (_taken, (numbers(4, 5, 3), torch.tensor(-2, dtype=torch.int32))),
    "writing": (_put, (numbers(4, 5, 3), torch.tensor(-1))),
    "cov": (lambda x: [torch.cov(x), x.cov(correction=0), torch.cov(x[0])], (numbers(6, 4),)),
    "cov with weights": (
        lambda x, f, w: [torch.cov(x, fweights=f), torch.cov(x, fweights=f, aweights=w), x.cov(aweights=w)],
        (numbers(6, 4), torch.tensor([1, 2, 3, 1]), numbers(4).abs()),
    ),
    "corrcoef": (lambda x: [torch.corrcoef(x), x[0].corrcoef()], (numbers(6, 4),)),
    "gaussian_nll_loss": (
        lambda x, y, v: [F.gaussian_nll_loss(x, y, v), F.gaussian_nll_loss(x, y, v[:, :1], True, 1.0, "sum"),
                         F.gaussian_nll_loss(x, y, v[:, 0], reduction="none"), F.gaussian_nll_loss(x, y, 0.5)],
        (numbers(6, 4), numbers(6, 4, seed=1), numbers(6, 4, seed=2).abs()),
    ),
    "ctc_loss": (
        lambda x, t, n, m: [F.ctc_loss(x, t, n, m), ctc_loss(x, t, (2, 8, 8, 8), (3, 2, 3, 1), 0, "none", True),
                            F.ctc_loss(x, t.flatten()[:9], n, m, 1, "sum"), F.ctc_loss(x[:, 0], t[0], n[0], m[0])],
        (numbers(8, 4, 6).log_softmax(-1), torch.arange(12).view(4, 3) % 4 + 2, torch.tensor([8, 7, 8, 6]),
         torch.tensor([3, 2, 3, 1])),
    ),
}  # fmt: skip


@pytest.mark.parametrize("mesh", MESHES, ids=str)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_values_and_gradients(name: str, mesh: Any) -> None:
    function, arguments = FUNCTIONS[name]
    cut = {"ctc_loss": [None, "dp", None]}.get(name, ["dp", *[None] * (arguments[0].ndim - 1)])
    first, found = next(iter(function.__code__.co_varnames)), []
    for each in (mf.compile(function, mesh, inputs={first: cut}), function):
        given = [t.clone().requires_grad_(t.is_floating_point()) for t in arguments]
        made = each(*given)
        made = made if isinstance(made, list) else [made]
        torch.stack([(t * torch.cos(torch.arange(t.numel()).view(t.shape))).sum() for t in made]).sum().backward()
        found.append([*made, *[t.grad for t in given if t.requires_grad]])
    assert all([difference(a, b) < 1e-9 for a, b in zip(*found, strict=True)])


def test_a_cumulative_average_of_batches() -> None:
    torch.manual_seed(0)
    eager = nn.Sequential(nn.Conv2d(2, 6, 2), nn.BatchNorm2d(6, momentum=None)).double()
    model = mf.parallelize(
        copy.deepcopy(eager), MESHES[0], {"0": "colwise"}, inputs={"input": ["dp", None, None, None]}
    )
    for step in range(4):
        for each in (model, eager):
            each.train(step < 3)
            each.zero_grad()
            each(numbers(4, 2, 3, 3, seed=step)).tanh().sum().backward()
        assert gradients_differ_by(model, eager) < 1e-10
        assert all([difference(a, b) < 1e-12 for a, b in zip(model.buffers(), eager.buffers(), strict=True)])


def test_an_index_out_of_range() -> None:
    with pytest.raises(mf.KernelError, match=r"found 7 .*needed 0 to 3"):
        mf.compile(lambda x, i: x[i], MESHES[0])(numbers(4, 3), torch.tensor(7))


class Sparse(nn.Module):
    def __init__(self, kind: Any) -> None:
        super().__init__()
        self.table = kind(8, 4, sparse=True)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.table(ids)


def _doubled(row: Any, *_: Any) -> Any:
    return row * 2


REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "embedding": (lambda: mf.parallelize(Sparse(nn.Embedding), MESHES[0])(torch.tensor([1, 2])),
                  r"a sparse gradient: found sparse=True, needed a dense one\. Pass sparse=False"),
    "bag": (lambda: mf.parallelize(Sparse(nn.EmbeddingBag), MESHES[0])(torch.tensor([[1, 2]])),
            r"a sparse gradient: found sparse=True, needed a dense one\. Pass sparse=False"),
    "item": (lambda: mf.compile(lambda x: x * x.sum().item(), MESHES[0])(numbers(4)),
             r"a number that is read from a tensor.*in the place of its \.item\(\)"),
    "a slice": (lambda: mf.compile(lambda x, i: x[i : i + 2], MESHES[0])(numbers(4), torch.tensor(1)),
                r"a size that depends on numbers"),
    "map": (lambda: mf.compile(lambda x: mapped(_doubled, x), MESHES[0])(numbers(4)),
            r"functions among its arg"),
}  # fmt: skip


@pytest.mark.parametrize("kind", REFUSED)
def test_what_is_refused_says_why(kind: str) -> None:
    call, wanted = REFUSED[kind]
    with pytest.raises(mf.DefinitionError, match=wanted) as raised:
        call()
    assert "(at test_traceable.py:" in str(raised.value)


def test_a_model_that_is_dropped_is_freed() -> None:
    """Dynamo leaves what it makes among the globals of the forward's module."""
    model = mf.parallelize(nn.Linear(4, 4), MESHES[0])
    model(torch.ones(2, 4)).sum().backward()
    weight = weakref.ref(model.weight)
    del model
    gc.collect()
    assert weight() is None


def test_a_model_of_stages_that_is_dropped_is_freed() -> None:
    model = mf.parallelize(
        nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), mf.DeviceMesh((2,), ("pp",)),
        pipeline=mf.Pipeline("pp", "1f1b", 2), loss=F.mse_loss,
    )  # fmt: skip
    model.step(torch.ones(4, 4), torch.zeros(4, 4))
    weight = weakref.ref(model[0].weight)
    del model
    gc.collect()
    assert weight() is None
