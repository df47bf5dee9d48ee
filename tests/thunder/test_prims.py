"""Every prim that has a rule, forward and backward, with its weight cut over simulated ranks, against eager torch."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import meshfuse as mf
import meshfuse.thunder
import thunder

MESH = mf.DeviceMesh((2,), ("tp",))
# What every function takes beside its weight: numbers [4, 6], indices [4, 4] and targets [4].
OTHER = torch.rand(4, 6, generator=torch.Generator().manual_seed(1)) + 0.3
INDEX = torch.tensor([[3, 0, 1, 2], [1, 2, 0, 5], [3, 0, 4, 2], [1, 0, 2, 5]])
TARGETS = torch.tensor([3, -100, 1, 0])


class Op(nn.Module):
    """A function of a weight and of inputs."""

    def __init__(self, function: Callable[..., Any], weight: torch.Tensor) -> None:
        super().__init__()
        self.function, self.weight = function, nn.Parameter(weight)

    def forward(self, *args: Any) -> Any:
        return self.function(self.weight, *args)


def weight(kind: str) -> torch.Tensor:
    """[4, 6]: any numbers, positive ones, or ones between 0.1 and 0.9."""
    made = torch.rand(4, 6, generator=torch.Generator().manual_seed(0))
    return {"any": made * 2 - 1, "positive": made + 0.2, "unit": made * 0.8 + 0.1, "large": made * 9 + 1.1}[kind]


FUNCTIONS = {
    "any": ("abs", "atan", "cos", "cosh", "erf", "exp", "exp2", "expm1", "neg", "sin", "sinh", "tan", "tanh", "asinh",
            "ceil", "floor", "round", "trunc", "sign"),
    "positive": ("log", "log10", "log1p", "log2", "rsqrt", "sqrt", "reciprocal", "lgamma"),
    "unit": ("acos", "asin", "atanh", "erfinv"),
    "large": ("acosh",),
}  # fmt: skip
BINARY = ("add", "sub", "mul", "div", "pow", "maximum", "minimum", "fmod", "remainder", "atan2")
COMPARISONS = ("eq", "ne", "lt", "le", "gt", "ge")
SHAPES: dict[str, Callable[..., Any]] = {
    "reshape": lambda w, x, i, t: w.reshape(2, 2, 6) * 2,
    "transpose": lambda w, x, i, t: w.t() * 2,
    "permute": lambda w, x, i, t: w.reshape(2, 2, 6).permute(2, 0, 1) * 2,
    "expand": lambda w, x, i, t: w.unsqueeze(1).expand(4, 3, 6) * 2,
    "squeeze": lambda w, x, i, t: (w[:1] * 2).squeeze(0),
    "slice": lambda w, x, i, t: w[1:4, ::2] * 2,
    "cat": lambda w, x, i, t: torch.cat([w, w * 2], 1),
    "flip": lambda w, x, i, t: torch.flip(w * 2, (0,)),
    "pad": lambda w, x, i, t: F.pad(w * 2, (1, 2, 0, 1), value=3.0),
    "crop": lambda w, x, i, t: F.pad(w * 2, (-1, 2), value=3.0),
    "contiguous": lambda w, x, i, t: w.t().contiguous() * 2,
    "sum": lambda w, x, i, t: w.sum(1) * 2,
    "sum_all": lambda w, x, i, t: w.sum() * 2,
    "mean": lambda w, x, i, t: w.mean(0) * 2,
    "amax": lambda w, x, i, t: w.amax(1) * 2,
    "amin": lambda w, x, i, t: w.amin((0, 1)) * 2,
    "prod": lambda w, x, i, t: (w * 2).prod(1),
    "var": lambda w, x, i, t: w.var(1) * 2,
    "var_mean": lambda w, x, i, t: sum(torch.var_mean(w * 2, 1)),
    "softmax": lambda w, x, i, t: F.softmax(w, 0) * 2,
    "layer_norm": lambda w, x, i, t: F.layer_norm(w, (6,)) * 2,
    "topk": lambda w, x, i, t: torch.topk(w * 2, 3, 1)[0],
    "sort": lambda w, x, i, t: torch.sort(w * 2, 1)[0],
    "to": lambda w, x, i, t: (w * 2).to(torch.float64) + 1,
}
OTHERS: dict[str, Callable[..., Any]] = {
    "linear": lambda w, x, i, t: F.linear(x, w) * 2,
    "linear_bias": lambda w, x, i, t: F.linear(x, w, torch.ones(4)) * 2,
    "matmul": lambda w, x, i, t: x @ w.t() * 2,
    "bmm": lambda w, x, i, t: w.reshape(2, 2, 6) @ x.reshape(2, 6, 2) * 2,
    "lerp": lambda w, x, i, t: torch.lerp(w, x, 0.3) * 2,
    "where": lambda w, x, i, t: torch.where(x > 0.7, w, w * 2),
    "masked": lambda w, x, i, t: (w * 2).masked_fill(x > 0.7, 5.0),
    "embedding": lambda w, x, i, t: F.embedding(i[:, :2].clamp(max=3), w) * 2,
    "embedding_padding": lambda w, x, i, t: F.embedding(i.clamp(max=3), w, padding_idx=1) * 2,
    "gather": lambda w, x, i, t: torch.gather(w * 2, 1, i),
    "take": lambda w, x, i, t: torch.index_select(w * 2, 0, i[0]),
    "take_along": lambda w, x, i, t: torch.take_along_dim(w * 2, i, 1),
    "scatter": lambda w, x, i, t: torch.scatter(w * 2, 1, i[:, :2], x[:, :2]),
    "scatter_add": lambda w, x, i, t: torch.scatter_add(w * 2, 1, i, x[:, :4]),
    "index_add": lambda w, x, i, t: torch.index_add(w * 2, 0, i[1][:3], x[:3]),
    "index": lambda w, x, i, t: (w * 2)[i[0]],
    "cross_entropy": lambda w, x, i, t: F.cross_entropy(w * 2, t),
    "cross_entropy_sum": lambda w, x, i, t: F.cross_entropy(w * 2, t, reduction="sum"),
    "cross_entropy_none": lambda w, x, i, t: F.cross_entropy(w * 2, t, reduction="none"),
    "cross_entropy_weight": lambda w, x, i, t: F.cross_entropy(w * 2, t, torch.arange(1.0, 7.0)),
    "cross_entropy_images": lambda w, x, i, t: F.cross_entropy((w * 2).reshape(2, 6, 2), i[:2, :2]),
    "mse": lambda w, x, i, t: F.mse_loss(w * 2, x),
    "gelu": lambda w, x, i, t: F.gelu(w * 2),
    "silu": lambda w, x, i, t: F.silu(w * 2),
    "iota": lambda w, x, i, t: w * torch.arange(6),
    "full": lambda w, x, i, t: w * torch.full((6,), 2.5),
}


def of_one(name: str) -> Any:
    function = getattr(torch, name)
    return lambda w, x, i, t: function(w * 1)


def of_two(name: str) -> Any:
    function = getattr(torch, name)
    return lambda w, x, i, t: function(w, x)


def of_number(name: str) -> Any:
    function = getattr(torch, name)
    return lambda w, x, i, t: function(w, 0.7) * 1.5


def comparing(name: str) -> Any:
    function = getattr(torch, name)
    return lambda w, x, i, t: torch.where(function(w, x), w, -w)


CASES = {
    **{name: (of_one(name), kind) for kind, names in FUNCTIONS.items() for name in names},
    **{f"{name}_of_two": (of_two(name), "positive") for name in BINARY},
    **{f"{name}_of_number": (of_number(name), "positive") for name in BINARY[:5]},
    **{name: (comparing(name), "positive") for name in COMPARISONS},
    **{name: (function, "any") for name, function in SHAPES.items()},
    **{name: (function, "any") for name, function in OTHERS.items()},
}
# What Thunder has no gradient of.
NO_GRADIENT = ("round", "trunc", "flip", "ceil", "floor", "sign", "lerp", "index_add", "minimum_of_two",
               "remainder_of_two")  # fmt: skip
# What gradients need that definitions do not have.
LEFT = {"lgamma": {"digamma"}}
ROWS, COLUMNS = ("tp", None), (None, "tp")


def symbols(traces: Any) -> set[str]:
    """The names of all symbols of the last trace that compute."""
    names = {bsym.sym.name for bsym in traces[-1].bound_symbols}
    return {n for n in names if not n.startswith(("unpack", "python_", "clear_mutable", "meshfuse"))}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("spec", [ROWS, COLUMNS], ids=["rows", "columns"])
@pytest.mark.parametrize("name", [*SHAPES, *OTHERS])
def test_equals_eager(name: str, spec: tuple[Any, Any]) -> None:
    check(name, spec)


@pytest.mark.parametrize("name", [name for name in CASES if name not in SHAPES and name not in OTHERS])
def test_functions_equal_eager(name: str) -> None:
    check(name, ROWS)


def check(name: str, spec: tuple[Any, Any]) -> None:
    function, kind = CASES[name]
    eager = Op(function, weight(kind))
    eager.requires_grad_(name not in NO_GRADIENT)
    split = meshfuse.thunder.MeshSplit(MESH, {"weight": list(spec)})
    jitted = thunder.jit(copy.deepcopy(eager), executors=[mf.thunder.executor()], transforms=[split])
    found, wanted = jitted(OTHER, INDEX, TARGETS), eager(OTHER, INDEX, TARGETS)
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)
    assert symbols(thunder.last_traces(jitted)) == set()
    if wanted.requires_grad:
        scale = torch.arange(1.0, wanted.numel() + 1).reshape(wanted.shape).to(wanted.dtype)
        (found * scale).sum().backward()
        (wanted * scale).sum().backward()
        torch.testing.assert_close(jitted.get_parameter("weight").grad, eager.weight.grad, rtol=1e-5, atol=1e-5)
        assert symbols(thunder.last_backward_traces(jitted)) == LEFT.get(name, set())
