"""Context parallelism of modules: numbers as in eager torch, and no more bytes than the closed forms of the methods."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

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

LINE, PLANE = mf.DeviceMesh((4,), ("cp",)), mf.DeviceMesh((2, 2), ("dp", "cp"))
BOTH = {"ids": ["dp", "cp"], "targets": ["dp", "cp"]}
RING, ULYSSES = mf.Context("cp", "ring"), mf.Context("cp", "ulysses")
IN_ORDER = mf.Context("cp", "ring", zigzag=False)
METHODS = {"ring": RING, "in order": IN_ORDER, "ulysses": ULYSSES}
# Rows over two axes: a ring along one and heads over the other, in both orders; and a ring along both.
GRID = mf.DeviceMesh((2, 2), ("cp", "up"))
OVER_BOTH: dict[str, tuple[mf.Context, str]] = {
    "ring and ulysses": (mf.Context(("cp", "up"), ("ring", "ulysses")), "in a ring of 2 over cp.*heads, over up"),
    "ulysses and ring": (mf.Context(("cp", "up"), ("ulysses", "ring")), "in a ring of 2 over up.*heads, over cp"),
    "ring": (mf.Context(("cp", "up"), "ring"), "in a ring of 4 over cp and up"),
}
WIDTH = 4  # of a head


@pytest.fixture(autouse=True)
def _plan_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MESHFUSE_SEARCH", "fast")


class Attention(nn.Module):
    """Attention in which heads of the query share those of keys and values."""

    def __init__(self, heads: int = 4, shared: int = 2, mask: str = "causal", columns: int = 0, dropout: float = 0.0):
        super().__init__()
        self.projections = nn.ModuleList([nn.Linear(16, n * WIDTH) for n in (heads, shared, shared)])
        self.out = nn.Linear(heads * WIDTH, 16)
        self.mask, self.columns, self.dropout = mask, columns, dropout

    def _mask(self, rows: int, columns: int) -> torch.Tensor | None:
        apart = (torch.arange(rows)[:, None] - torch.arange(columns)).abs()
        return {"window": apart < 4, "bias": apart.double() * -0.1, "columns": torch.arange(columns)[None] > 1}.get(
            self.mask
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x[:, : self.columns] if self.columns else x
        q, k, v = (f(z).unflatten(-1, (-1, WIDTH)).transpose(1, 2)
                   for f, z in zip(self.projections, (x, y, y), strict=True))  # fmt: skip
        mask = self._mask(q.shape[2], k.shape[2])
        made = F.scaled_dot_product_attention(
            q, k, v, mask, self.dropout, is_causal=self.mask == "causal", scale=0.3, enable_gqa=True
        )
        return self.out(made.transpose(1, 2).flatten(2))


class Tokens(nn.Module):
    """A loss of token ids: positions, attention, a layer behind a norm, and a head."""

    def __init__(self, heads: int, shared: int, layers: int = 1) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(VOCABULARY, 16), nn.Embedding(256, 16)
        self.layers = nn.ModuleList([Attention(heads, shared) for _ in range(layers)])
        self.norm, self.up, self.head = nn.LayerNorm(16), nn.Linear(16, 16), nn.Linear(16, VOCABULARY)

    def forward(self, ids: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        x = self.tokens(ids) + self.places(torch.arange(ids.shape[1]))
        for layer in self.layers:
            x = x + layer(x)
        x = x + F.gelu(self.up(self.norm(x)))
        return F.cross_entropy(self.head(x).flatten(0, 1), targets.flatten())


def ids(rows: int = 4, length: int = 16, seed: int = 1) -> torch.Tensor:
    return torch.randint(VOCABULARY, (rows, length), generator=torch.Generator().manual_seed(seed))


def run(model: nn.Module, *arguments: torch.Tensor) -> torch.Tensor:
    found = model(*arguments)
    loss = found.square().mean() if found.ndim else found
    loss.backward()
    return loss


TRAINED: dict[str, tuple[mf.DeviceMesh, mf.Context, dict[str, Any]]] = {
    "ring, fsdp over both, computed again": (PLANE, RING, {"fsdp": ["dp", "cp"], "checkpoint": "layers.*"}),
    "ring, tp": (mf.DeviceMesh((2, 2), ("cp", "tp")), RING, {"plan": GPT_PLAN}),
    "ulysses, tp": (mf.DeviceMesh((2, 2), ("cp", "tp")), ULYSSES, {"plan": GPT_PLAN}),
    "ulysses, fsdp, computed again": (PLANE, ULYSSES, {"fsdp": "dp", "checkpoint": "layers.*"}),
}


@pytest.mark.parametrize("name", TRAINED)
def test_a_gpt_trains_as_eager_does(name: str) -> None:
    mesh, context, more = TRAINED[name]
    specs = {key: [axis if axis in mesh.names else None for axis in spec] for key, spec in BOTH.items()}
    model, eager = pair(lambda: Gpt(1).double())
    mf.parallelize(model, mesh, inputs=specs, context=context, **more)
    arguments = {"ids": ids(), "targets": ids(seed=2)}
    assert train(model, arguments) == pytest.approx(train(eager, arguments), rel=1e-9)
    assert parameters_differ_by(model, eager) < 1e-6  # a step of AdamW makes much of a gradient of 0


CASES: dict[str, tuple[dict[str, Any], int]] = {
    "causal, rows that do not divide": ({}, 13),
    "rows that do not divide": ({"mask": ""}, 9),
    "a window, rows that do not divide": ({"mask": "window"}, 13),
    "a bias": ({"mask": "bias"}, 16),
    "hidden columns, rows that do not divide": ({"mask": "columns"}, 13),
    "keys of another length": ({"mask": "", "columns": 7}, 16),
    "heads that do not divide": ({"heads": 6, "shared": 3}, 16),
    "heads of their own that do not divide": ({"heads": 6, "shared": 6}, 16),
    "one head of keys": ({"shared": 1}, 16),
}


# One method for each kind in turn, but where a ring pads rows that no mask hides.
KINDS = [
    pytest.param(name, method, marks=pytest.mark.sampled if (i + j) % 2 and name != "rows that do not divide" else ())
    for i, name in enumerate(CASES) for j, method in enumerate(("ring", "ulysses"))
]  # fmt: skip


@pytest.mark.parametrize(("name", "method"), KINDS)
def test_attention_of_any_kind_is_as_in_eager_torch(name: str, method: str) -> None:
    options, rows = CASES[name]
    model, eager = pair(lambda: Attention(**options).double())
    mf.parallelize(model, LINE, inputs={"x": [None, "cp", None]}, context=METHODS[method])
    x = torch.randn(2, rows, 16, generator=torch.Generator().manual_seed(0)).double()
    assert difference(run(model, x), run(eager, x)) < 1e-12
    assert gradients_differ_by(model, eager) < 1e-10
    assert f"{'in a ring of 4' if method == 'ring' else 'all rows of some heads'}" in model.explain()


@pytest.mark.parametrize("name", CASES)
def test_attention_over_two_axes_is_as_in_eager_torch(name: str) -> None:
    options, rows = CASES[name]
    context, wanted = [*OVER_BOTH.values()][[*CASES].index(name) % len(OVER_BOTH)]
    model, eager = pair(lambda: Attention(**options).double())
    mf.parallelize(model, GRID, inputs={"x": [None, ["cp", "up"], None]}, context=context)
    x = torch.randn(2, rows, 16, generator=torch.Generator().manual_seed(0)).double()
    assert difference(run(model, x), run(eager, x)) < 1e-12
    assert gradients_differ_by(model, eager) < 1e-10
    assert re.search(wanted, model.explain())


@pytest.mark.parametrize("shared", [8, 2])
def test_a_ring_of_some_heads_sends_what_the_closed_forms_of_both_say(shared: int) -> None:
    """Each rank of a ring has the keys of half of the heads; what goes to heads and back is half of the rows."""
    rows, ring, heads = 128, 2, 2
    model, eager = pair(lambda: Tokens(8, shared).double())
    specs: Any = {key: [None, ["cp", "up"]] for key in ("ids", "targets")}
    mesh = mf.DeviceMesh((ring, heads), ("cp", "up"), links="bytes")
    mf.parallelize(model, mesh, inputs=specs, context=OVER_BOTH["ring and ulysses"][0])
    arguments = ids(1, rows), ids(1, rows, seed=2)
    assert difference(run(model, *arguments), run(eager, *arguments)) < 1e-12
    assert gradients_differ_by(model, eager) < 1e-10
    q, k = (rows * n * WIDTH * 8 for n in (8, shared))
    needed = (heads - 1) / heads**2 * 4 * (q + k) / ring + 6 * (ring - 1) / ring * k / heads
    assert 0.99 * needed < of_attention(model) < 1.1 * needed


def test_attention_with_dropout_goes_through_no_ring_and_draws_the_same_numbers() -> None:
    x, found = torch.randn(2, 16, 16, generator=torch.Generator().manual_seed(0)), dict[str, torch.Tensor]()
    for name, mesh in (("ring", LINE), ("ulysses", LINE), ("one rank", mf.DeviceMesh((1,), ("cp",)))):
        model, _ = pair(lambda: Attention(dropout=0.5))
        mf.parallelize(model, mesh, inputs={"x": [None, "cp", None]}, context=METHODS.get(name, RING))
        torch.manual_seed(3)
        found[name] = run(model, x)
        assert ("attention: as the planner finds" in model.explain()) == (name != "ulysses")
    assert difference(found["ring"], found["one rank"]) < 1e-5 > difference(found["ulysses"], found["one rank"])


def of_attention(model: Any) -> float:
    return sum(entry.wire for entry in model.bill().entries if "attention" in entry.tensor)


@pytest.mark.parametrize(("method", "shared"), [
    ("ring", 8), ("ring", 2), ("in order", 8), ("ulysses", 8), ("ulysses", 2),
])  # fmt: skip
def test_no_more_is_sent_than_the_closed_form_says(method: str, shared: int) -> None:
    """Ranks need one head of 2 on 4 ranks each, so that 4 are sent by Ulysses."""
    rows, n = 128, 4
    model, eager = pair(lambda: Tokens(8, shared).double())
    specs: Any = {"ids": [None, "cp"], "targets": [None, "cp"]}
    mf.parallelize(model, mf.DeviceMesh((n,), ("cp",), links="bytes"), inputs=specs, context=METHODS[method])
    arguments = ids(1, rows), ids(1, rows, seed=2)
    assert difference(run(model, *arguments), run(eager, *arguments)) < 1e-12
    assert gradients_differ_by(model, eager) < 1e-10
    q, k = (rows * heads * WIDTH * 8 for heads in (8, shared))
    needed = {"ulysses": (n - 1) / n**2 * (4 * q + 4 * (q if shared == 8 else q / 2))}.get(method, 6 * (n - 1) / n * k)
    assert 0.99 * needed < of_attention(model) < 1.1 * needed
    # What is put into zig-zag order is token ids and targets, and no activation.
    others = [
        entry for entry in model.bill().entries if entry.collective == "window" and "attention" not in entry.tensor
    ]
    assert (method == "ring") == bool(others) and sum(entry.wire for entry in others) <= 4 * rows * 8


def test_auto_takes_the_method_that_sends_less() -> None:
    mesh, specs = mf.DeviceMesh((4,), ("cp",), links="bytes"), {"ids": [None, "cp"], "targets": [None, "cp"]}
    for shared, wanted in (
        (8, "all rows of some heads, over cp"),
        (1, "in a ring of 4 over cp, rows in zig-zag order"),
    ):
        model, eager = pair(lambda: Tokens(8, shared).double())  # noqa: B023
        mf.parallelize(model, mesh, inputs=specs, context=mf.Context("cp"))
        assert difference(run(model, ids(1, 64), ids(1, 64)), run(eager, ids(1, 64), ids(1, 64))) < 1e-12
        assert wanted in model.explain().partition("forward")[0]


def test_sizes_that_change_and_gradients_that_are_summed_later() -> None:
    model, eager = pair(lambda: Tokens(4, 2).double())
    dynamic = {"ids": [0, 1], "targets": [0, 1]}
    specs = {"ids": [None, "cp"], "targets": [None, "cp"]}
    mf.parallelize(model, mf.DeviceMesh((2,), ("cp",)), inputs=specs, context=RING, dynamic=dynamic)
    for each in (model, eager):
        run(each, ids(2, 8), ids(2, 8, seed=2))
    with model.no_sync():
        run(model, ids(4, 13), ids(4, 13, seed=2))
    run(model, ids(4, 13), ids(4, 13, seed=3))
    for seed in (2, 3):
        run(eager, ids(4, 13), ids(4, 13, seed=seed))
    assert gradients_differ_by(model, eager) < 1e-10
    with torch.no_grad():
        assert difference(model(ids(), ids()), eager(ids(), ids())) < 1e-12


class Twice(nn.Module):
    """Attention whose result is the query of another one, and whose query is its keys."""

    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q = self.project(x).unflatten(-1, (4, 4)).transpose(1, 2)
        y = F.scaled_dot_product_attention(q, q, q, is_causal=True)
        return y + F.scaled_dot_product_attention(y, q, x.unflatten(-1, (4, 4)).transpose(1, 2))


@pytest.mark.parametrize("method", ["ring", "ulysses"])
def test_tensors_that_two_attentions_share(method: str) -> None:
    model, eager = pair(lambda: Twice().double())
    mf.parallelize(model, LINE, inputs={"x": [None, "cp", None]}, context=METHODS[method])
    x = torch.randn(2, 16, 16, generator=torch.Generator().manual_seed(0)).double()
    assert difference(run(model, x), run(eager, x)) < 1e-12
    assert gradients_differ_by(model, eager) < 1e-10


@pytest.mark.parametrize("method", ["ring", "ulysses"])
def test_stages_of_a_pipeline_have_a_context(method: str) -> None:
    model, eager = pair(lambda: Tokens(4, 2, layers=2).double())
    mesh, specs = mf.DeviceMesh((2, 2), ("pp", "cp")), {"ids": [None, "cp"], "targets": [None, "cp"]}
    pipeline = mf.Pipeline("pp", "zero-bubble", microbatches=2, cut=["layers.1"])
    mf.parallelize(model, mesh, inputs=specs, context=METHODS[method], pipeline=pipeline)
    arguments = ids(), ids(seed=2)
    assert difference(model.step(*arguments), run(eager, *arguments)) < 1e-12
    assert gradients_differ_by(model, eager) < 1e-10
    how = "in a ring of 2 over cp" if method == "ring" else "all rows of some heads, over cp"
    assert f"\nstage 1, layers.1.attention_1: {how}" in model.explain()


def parallel(context: Any, module: nn.Module | None = None) -> Any:
    return mf.parallelize(module or Attention(), LINE, inputs={"x": [None, "cp", None]}, context=context)


MISTAKES = [
    (lambda: mf.Context("cp", "rign"), r"Context: method: found 'rign', needed one of \['ring', 'ulysses', 'auto'\]"),
    (lambda: mf.Context(3), r"Context: axes: found 3, needed the name of an axis of the mesh, or of different ones"),
    (lambda: mf.Context(("cp", "cp")), r"Context: axes: found \('cp', 'cp'\), .* Pass \"cp\", or \(\"cp\", \"up\"\)"),
    (lambda: mf.Context(()), r"Context: axes: found \(\), needed the name of an axis"),
    (lambda: mf.Context(("cp", "up"), ("ring",)), r"Context: method: found \('ring',\), .* or 2 of them, one for each"),
    (lambda: mf.Context("cp", None), r"Context: method: found None, needed one of"),
    (lambda: mf.Context("cp", zigzag="yes"), r"Context: zigzag: found 'yes', needed True, False or None"),
    (lambda: mf.Context("cp", "ulysses", zigzag=True), r"found True with method=\"ulysses\", .* Leave it out"),
    (lambda: parallel("cp"), r"parallelize: context: found 'cp', needed an mf\.Context, or None"),
    (lambda: parallel(mf.Context("pc")), r"context: unknown mesh axis: found 'pc', needed one of \['cp'\]"),
    (lambda: mf.parallelize(nn.Linear(16, 4), LINE, context=RING)(torch.ones(2, 16)),
     r"context for a model without attention: found no call of torch\.nn\.functional\.scaled_dot_product_attention"),
]  # fmt: skip


@pytest.mark.parametrize("number", range(len(MISTAKES)))
def test_a_wrong_context_says_what_is_needed(number: int) -> None:
    call, wanted = MISTAKES[number]
    with pytest.raises(mf.DefinitionError, match=wanted) as raised:
        call()
    assert "test_context_models.py" in str(raised.value)
