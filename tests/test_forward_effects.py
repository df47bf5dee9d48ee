"""What a forward keeps besides its results, and reads besides its arguments: as in eager torch, or an error."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils import _pytree as pytree

import meshfuse as mf
from frontend_models import difference, gradients_differ_by

MESH = mf.DeviceMesh((3,), ("dp",))
SCALES, SHIFT, TABLE = {"s": 2.0}, 1.0, torch.ones(6)


@pytest.fixture(autouse=True)
def _plan_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MESHFUSE_SEARCH", "fast")


def rows(step: int = 0) -> torch.Tensor:
    return torch.randn(6, 4, generator=torch.Generator().manual_seed(step), dtype=torch.float64)


class Layer(nn.Module):
    """A layer, and what the classes below keep on it or read of it."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 6)
        self.last: Any = None
        self.seen: list[Any] = []
        self.notes: dict[str, Any] = {}
        self.count, self.is_used = 0, False
        self.plain = torch.ones(6, dtype=torch.float64)
        self.several = [torch.ones(6, dtype=torch.float64)]
        self.act: Callable[[torch.Tensor], torch.Tensor] = torch.sin
        self.register_buffer("mean", torch.zeros(6))

    def _made(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x)


class Stores(Layer):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self._made(x)
        self.last = {"y": y, "rows": x.shape[0], "all": [y.sum(), y * 2]}
        return y.square().sum()


class Auxiliary(Layer):
    """A loss of a module inside, which the model and the script read there."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Stores()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        total = self.inner(x) + self.inner.last["y"].mean()
        self.last = self.inner.last["all"][0] * total
        self.is_used = True
        return total


class Rebinds(Layer):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self._made(x)
        self.mean = 0.9 * self.mean + 0.1 * y.detach().mean(0)
        return y - self.mean


class Recurrent(Layer):
    """A state that a call takes over from the one before."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self._made(x) if self.last is None else self._made(x) + 0.5 * self.last
        self.last = y.detach()
        return y


def numbers_in(value: Any) -> list[Any]:
    return [leaf for leaf in pytree.tree_leaves(value) if leaf is not None]


def check_equal(found: Any, wanted: Any) -> None:
    pairs = zip(numbers_in(found), numbers_in(wanted), strict=True)
    assert all([difference(a, b) < 1e-10 if isinstance(b, torch.Tensor) else a == b for a, b in pairs])


@pytest.mark.parametrize("made", [Stores, Auxiliary, Rebinds, Recurrent])
def test_what_a_forward_stores_on_its_modules(made: type[Layer]) -> None:
    torch.manual_seed(0)
    eager = made().double()
    model = mf.parallelize(copy.deepcopy(eager), MESH, {"layer": ["dp", None]}, inputs={"x": ["dp", None]})
    for step in range(3):
        for each in (model, eager):
            out = each(rows(step))
            extra = each.last if isinstance(each.last, torch.Tensor) and each.last.requires_grad else 0 * out.sum()
            (out.square().sum() + extra).backward()
        for found, wanted in zip(model.modules(), eager.modules(), strict=True):
            if isinstance(wanted, Layer):
                check_equal([found.last, found.is_used], [wanted.last, wanted.is_used])
                check_equal(found.mean, wanted.mean)
        assert gradients_differ_by(model, eager) < 1e-10


class Reads(Layer):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.act(self._made(x)) * SCALES["s"] + SHIFT * TABLE
        y = (y * 2 if "twice" in self.notes else y) * sum(self.several)
        return y * self.plain


def _global(name: str, value: Any) -> Callable[[Any], None]:
    return lambda model: globals().__setitem__(name, value)


CHANGES: dict[str, Callable[[Any], Any]] = {
    "a tensor": lambda model: setattr(model, "plain", model.plain * 2),
    "a tensor in place": lambda model: model.plain.mul_(3),
    "a tensor of another type": lambda model: setattr(model, "plain", torch.full((6,), 4.0)),
    "a tensor in a list": lambda model: model.several.__setitem__(0, model.plain * 5),
    "one more in a list": lambda model: model.several.append(model.plain * 5),
    "a function": lambda model: setattr(model, "act", torch.cos),
    "a key": lambda model: model.notes.update(twice=None),
    "a global number": _global("SHIFT", 3.0),
    "a global tensor": _global("TABLE", torch.full((6,), 7.0)),
    "an entry of a global dict": lambda model: SCALES.update(s=5.0),
}


@pytest.mark.parametrize("change", CHANGES)
def test_what_a_forward_reads_is_as_it_is_then(change: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(SCALES, "s", 2.0)
    monkeypatch.setitem(globals(), "SHIFT", 1.0)
    monkeypatch.setitem(globals(), "TABLE", torch.ones(6))
    torch.manual_seed(0)
    eager = Reads().double()
    model = mf.parallelize(copy.deepcopy(eager), MESH, {}, inputs={"x": ["dp", None]})
    before = eager(rows())
    check_equal(model(rows()), before)
    CHANGES[change](model)
    if "global" not in change:
        CHANGES[change](eager)
    wanted = eager(rows())
    assert difference(wanted, before) > 1e-2
    check_equal(model(rows()), wanted)


def test_what_a_function_reads_is_as_it_is_then() -> None:
    scale, table = 2.0, torch.ones(6, dtype=torch.float64)

    def function(x: torch.Tensor) -> torch.Tensor:
        return x[:, :1] * scale * table

    step = mf.compile(function, MESH, inputs={"x": ["dp", None]})
    check_equal(step(rows()), function(rows()))
    scale = 3.0
    check_equal(step(rows()), function(rows()))
    table = torch.full((6,), 5.0, dtype=torch.float64)
    check_equal(step(rows()), function(rows()))


def test_a_tensor_that_changes_at_every_call_is_not_captured_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    from meshfuse.frontends import call_graphs

    model = mf.parallelize(Recurrent().double(), MESH, {}, inputs={"x": ["dp", None]})
    model(rows())
    model(rows())
    monkeypatch.setattr(call_graphs, "captured", None)
    model(rows())
    model.last = model.last * 2
    model(rows())


class Appends(Layer):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen.append(x.sum())
        return self._made(x)


class Notes(Layer):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.notes["x"] = x.sum()
        return self._made(x)


class Counts(Layer):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.count += 1
        return self._made(x) * self.count


class Globally(Layer):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        global SHIFT
        SHIFT = SHIFT + 1
        return self._made(x)


class InPlace(Layer):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.plain += 1
        return self._made(x) * self.plain


class Trained(Layer):
    def __init__(self) -> None:
        super().__init__()
        self.plain = torch.ones(6, dtype=torch.float64, requires_grad=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self._made(x) * self.plain


class NewWeight(Layer):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.layer.weight = nn.Parameter(self.layer.weight * 2)
        return self._made(x)


REFUSED: dict[type[Layer], str] = {
    Appends: r"the forward of Appends changes seen.*Return it",
    Notes: r"the forward of Notes changes notes.*Return it",
    Counts: r"the forward of Counts changes count at every call: found 1, then 2, needed a tensor.*register_buffer",
    Globally: r"the forward of Globally changes SHIFT.*Return it",
    InPlace: r"the forward of InPlace changes a tensor in place that is no buffer.*register_buffer",
    Trained: r"the forward of Trained reads a tensor that needs a gradient.*plain.*nn\.Parameter",
    NewWeight: r"NewWeight.*",
}


@pytest.mark.parametrize("made", REFUSED)
def test_what_is_refused_says_why_and_where(made: type[Layer], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(globals(), "SHIFT", 1.0)
    model = mf.parallelize(made().double(), MESH, {}, inputs={"x": ["dp", None]})
    with pytest.raises(mf.DefinitionError, match=REFUSED[made]) as raised:
        model(rows())
        model(rows())
    assert "(at test_forward_effects.py:" in str(raised.value)
