"""What models of torch take and return besides plain tensors: as in eager torch, or an error that says why."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import meshfuse as mf
from frontend_models import difference, gradients_differ_by, pair, parameters_differ_by

MESH = mf.DeviceMesh((3,), ("dp",))


@pytest.fixture(autouse=True)
def _plan_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MESHFUSE_SEARCH", "fast")


def numbers(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def compiled(function: Callable[..., Any], **more: Any) -> Any:
    return mf.compile(function, MESH, inputs={"x": ["dp", None]}, **more)


@pytest.mark.parametrize("dynamic", [None, {"x": [0]}])
def test_results_that_are_no_tensors(dynamic: Any) -> None:
    def function(x: torch.Tensor, k: int = 3) -> Any:
        return {"y": x * k, "shape": x.shape, "rest": (len(x), 2.5, True, "text", None, k, [x.sum()])}

    step = compiled(function, dynamic=dynamic)
    for x, k in ((numbers(6, 4), 3), (numbers(5, 4), 3), (numbers(5, 4), 7)):
        found, wanted = step(x, k), function(x, k)
        assert found["shape"] == tuple(wanted["shape"]) and found["rest"][:6] == wanted["rest"][:6]
        assert (
            difference(found["y"], wanted["y"]) < 1e-12
            and difference(found["rest"][6][0], wanted["rest"][6][0]) < 1e-12
        )


def test_only_numbers_that_need_no_gradient_beside_tensors_that_do() -> None:
    x = numbers(6, 4).requires_grad_()
    count, total = compiled(lambda x: (x.shape[0], x.square().sum()))(x)
    total.backward()
    assert count == 6 and x.grad is not None and difference(x.grad, 2 * x) < 1e-12


def test_gradients_of_complex_results() -> None:
    def function(x: torch.Tensor) -> Any:
        return x * x, x.real.sum()

    found = []
    for each in (function, compiled(function)):
        x = torch.complex(numbers(6, 4), numbers(6, 4) + 1).requires_grad_()
        square, total = each(x)
        (square.abs().sum() + total).backward()
        found.append(x.grad)
    assert found[0] is not None and float((found[0] - found[1]).abs().max()) < 1e-12


def test_numbers_that_are_equal_in_python_are_not_the_same_argument() -> None:
    step, counts = compiled(lambda x, k: x + k), torch.arange(12).view(6, 2)
    for k in (1, 1.0, True, 0.0, -0.0):
        wanted = counts + k
        assert step(counts, k).dtype == wanted.dtype, k
    divide = compiled(lambda x, k: x / k)
    assert [float(divide(numbers(6, 2).abs(), k)[0, 0]) for k in (0.0, -0.0)] == [float("inf"), -float("inf")]


@dataclasses.dataclass
class Batch:
    x: torch.Tensor
    scale: float = 1.0


torch.export.register_dataclass(Batch)


class Plain:
    def __init__(self, x: torch.Tensor) -> None:
        self.x = x


class OfBatches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 6)

    def forward(self, batch: Any) -> Batch:
        return Batch(self.layer(batch.x) * 2, 3.0)


def test_dataclasses_that_torch_knows() -> None:
    model, eager = pair(lambda: OfBatches().double())
    mf.parallelize(model, MESH, {"layer": ["dp", None]})
    for factor in (1, 2):
        batch = Batch(numbers(5, 4) * factor)
        found, wanted = model(batch), eager(batch)
        assert found.scale == 3.0 and difference(found.x, wanted.x) < 1e-12


def _overlapping(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    x.mul_(2)
    return (x * y).sum()


REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "nothing": (lambda: compiled(lambda x: None)(numbers(6, 4)), "returns no tensor"),
    "numbers alone": (lambda: compiled(lambda x: (len(x), 2))(numbers(6, 4)), "returns no tensor"),
    "a class": (lambda: compiled(lambda x: Plain(x * 2))(numbers(6, 4)), r"cannot look.*Plain.*register_dataclass"),
    "an object": (lambda: mf.parallelize(OfBatches(), MESH)(Plain(numbers(6, 4))), r"cannot look.*Plain"),
    "an argument twice": (lambda: compiled(_overlapping)(x := numbers(6, 4), x), r"shares memory with another.*clone"),
    "parts that overlap": (lambda: compiled(_overlapping)((x := numbers(8, 4))[:6], x[2:]), r"numbers? 1 and 2.*clone"),
}  # fmt: skip


@pytest.mark.parametrize("kind", REFUSED)
def test_what_is_refused_says_why(kind: str) -> None:
    call, wanted = REFUSED[kind]
    with pytest.raises(mf.MeshfuseError, match=wanted) as raised:
        call()
    assert "(at test_arguments_and_results.py:" in str(raised.value)


def test_an_argument_that_is_changed_beside_others_apart() -> None:
    found = []
    for each in (_overlapping, compiled(_overlapping)):
        x = numbers(12, 4)
        found += [each(x[:6], x[6:]), x]
    assert difference(found[2], found[0]) < 1e-12 and difference(found[3], found[1]) < 1e-12


class TwoHeads(nn.Module):
    """Rows of a table that is scaled down in place, and two results."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(7, 4, max_norm=0.5)
        self.first, self.second = nn.Linear(4, 3), nn.Linear(4, 6)

    def forward(self, ids: torch.Tensor) -> Any:
        x = self.table(ids)
        return self.first(x), self.second(x)


@pytest.mark.parametrize("used", [(0,), (1,), (0, 1)])
def test_gradients_of_what_a_loss_does_not_use_are_none_and_parameters_may_change_in_place(used: Any) -> None:
    model, eager = pair(lambda: TwoHeads().double())
    mf.parallelize(model, MESH, {"table": ["dp", None], "second": ["dp", None]})
    for ids in (torch.tensor([0, 3, 3, 6]), torch.tensor([1, 3, 5, 5])):
        for each in (model, eager):
            each.zero_grad()
            results = each(ids)
            torch.stack([results[i].square().sum() for i in used]).sum().backward()
        assert gradients_differ_by(model, eager) < 1e-10 and parameters_differ_by(model, eager) < 1e-10
