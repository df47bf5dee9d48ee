"""Gradients where derivatives are special: at zeros, ties, NaN and infinities they are those that torch gives."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import meshfuse as mf
from gradient_checks import Pair, both
from meshfuse.ops import OPS
from meshfuse.ops.pointwise import pointwise_rule
from meshfuse.ops.values import ParamKind
from op_references import REFERENCES

INF, NAN = math.inf, math.nan
NUMBERS = [0.0, -0.0, 1.0, -1.0, 2.0, -2.0, 0.5, -0.5, 2.5, -2.5, INF, -INF, NAN]
# Where torch has a function of its own, its derivative counts and not that of how the reference writes it.
OWN: dict[str, Callable[..., torch.Tensor]] = {
    "silu": F.silu, "erfcinv": lambda x: torch.special.erfinv(1 - x), "mod": torch.fmod, "frac": torch.frac,
}  # fmt: skip


def _pointwise() -> list[str]:
    """The differentiable ones of real numbers."""
    return [name for name, op in OPS.items() if op.rule is pointwise_rule and op.vjp is not None and name != "imag"]


def _grid(count: int) -> list[torch.Tensor]:
    """All combinations of so many of the numbers."""
    rows = torch.tensor(list(itertools.product(NUMBERS, repeat=count)), dtype=torch.float64)
    return [column.contiguous() for column in rows.T]


def _assert_as_torch(pair: Pair, is_first: bool) -> None:
    """Equal; but a second gradient may be a number where torch, on its way there, divides 0 by 0."""
    found, wanted = pair
    if not is_first:
        found = torch.where(wanted.isnan(), wanted, found)
    torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-12, equal_nan=True)


def _check(build: Callable[..., Any], reference: Callable[..., Any], operands: list[torch.Tensor], **kept: Any) -> None:
    first, second = both(lambda fd, *t: [build(fd, *t)], lambda *t: [reference(*t)], operands, **kept)
    for pair in first:
        _assert_as_torch(pair, True)
    for pair in second:
        _assert_as_torch(pair, False)


@pytest.mark.parametrize("name", _pointwise())
def test_pointwise_at_all_combinations_of_special_numbers(name: str) -> None:
    op, numbers = OPS[name], OPS[name].samples()[0].args
    kinds = (ParamKind.TENSOR, ParamKind.TENSOR_OR_SCALAR)
    operands = _grid(sum(param.kind in kinds for param in op.params))
    if "condition" in op.places:
        operands[0] = operands[0] > 0
    rest = list(numbers[len(operands) :])
    reference = OWN.get(name, REFERENCES[name])
    _check(lambda fd, *t: fd.call(name, (*t, *rest)), lambda *t: reference(*t, *rest), operands)


COMPLEX = [0j, 1 + 0j, -1 + 0j, 1j, -1j, 2 + 1j, -0.5 + 2j, 0.5 - 0.3j]
HOLOMORPHIC = (
    "acos acosh asin asinh atan atanh cos cosh exp exp2 expm1 log log10 log1p log2 reciprocal rsqrt sigmoid sin sinh "
    "sqrt tan tanh abs neg real imag add sub mul div truediv pow where addcmul lerp set segment_set"
)


@pytest.mark.parametrize("name", HOLOMORPHIC.split())
def test_pointwise_at_complex_numbers(name: str) -> None:
    """Zeros, branch points and poles among them. Second gradients at poles are infinite in a direction that depends on
    the order of the products."""
    op = OPS[name]
    count = sum(param.kind in (ParamKind.TENSOR, ParamKind.TENSOR_OR_SCALAR) for param in op.params)
    rows = torch.tensor(list(itertools.product(COMPLEX, repeat=count)), dtype=torch.complex128)
    operands = [column.contiguous() for column in rows.T]
    if "condition" in op.places:
        operands[0] = operands[0].real > 0
    rest = list(op.samples()[0].args[count:])
    build, reference = lambda fd, *t: [fd.call(name, (*t, *rest))], lambda *t: [REFERENCES[name](*t, *rest)]
    first, second = both(build, reference, operands)
    for found, wanted in first:
        torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-12, equal_nan=True)
    for found, wanted in second:
        finite = wanted.isfinite()
        torch.testing.assert_close(found[finite], wanted[finite], rtol=1e-9, atol=1e-12)


# Functions of rows: (on a definition, in torch).
Function = tuple[Callable[[Any, Any], Any], Callable[[torch.Tensor], torch.Tensor]]
OF_ROWS: dict[str, Function] = {
    "max": (lambda o, x: o.max(x, [1]), lambda x: x.amax(1)),
    "max of all": (lambda o, x: o.max(x), lambda x: x.amax()),
    "min": (lambda o, x: o.min(x, [1]), lambda x: x.amin(1)),
    "cummax": (lambda o, x: o.cummax(x, 1), lambda x: x.cummax(1).values),
    "cummin": (lambda o, x: o.cummin(x, 1), lambda x: x.cummin(1).values),
    "prod": (lambda o, x: o.prod(x, [1]), lambda x: x.prod(1)),
    "cumprod": (lambda o, x: o.cumprod(x, 1), lambda x: x.cumprod(1)),
    "sum": (lambda o, x: o.sum(x, [1]), lambda x: x.sum(1)),
    "cumsum": (lambda o, x: o.cumsum(x, 1), lambda x: x.cumsum(1)),
    "var": (lambda o, x: o.var(x, [1]), lambda x: x.var(1)),
    "mean": (lambda o, x: o.mean(x, [1]), lambda x: x.mean(1)),
    "topk": (lambda o, x: o.topk(x, 2, 1)[0], lambda x: x.topk(2, 1).values),
    "gelu": (lambda o, x: o.gelu(x), F.gelu),
    "gelu by tanh": (lambda o, x: o.gelu(x, "tanh"), lambda x: F.gelu(x, approximate="tanh")),
    "softmax": (lambda o, x: o.softmax(x, 1), lambda x: x.softmax(1)),
    "log_softmax": (lambda o, x: o.log_softmax(x, 1), lambda x: x.log_softmax(1)),
    "logsumexp": (lambda o, x: o.logsumexp(x, [1]), lambda x: x.logsumexp(1)),
    "layer_norm": (lambda o, x: o.layer_norm(x, [3]), lambda x: F.layer_norm(x, [3])),
    "rms_norm": (lambda o, x: o.rms_norm(x, [3]), lambda x: F.rms_norm(x, [3])),
    **{f"clamp from {low} to {high}": (
        lambda o, x, low=low, high=high: o.clamp(x, low, high), lambda x, low=low, high=high: x.clamp(low, high),
    ) for low, high in ((0.0, 1.0), (1.0, 0.0), (1.0, 1.0), (None, 1.0), (0.0, None), (-INF, 0.0))},
    **{f"power {n}": (lambda o, x, n=n: o.pow(x, n), lambda x, n=n: x**n) for n in (-1, 0, 0.5, 1, 2, 2.5, 3)},
    **{f"{n} to the power": (lambda o, x, n=n: o.pow(n, x), lambda x, n=n: torch.pow(n, x)) for n in (-2.0, 0.0, 2.0)},
    "a square": (lambda o, x: o.mul(x, x), lambda x: x * x),
    "a quotient of one tensor": (lambda o, x: o.truediv(x, x), lambda x: x / x),
    "maximum with a number": (lambda o, x: o.maximum(x, 0.0), lambda x: torch.maximum(x, torch.zeros_like(x))),
}  # fmt: skip
# A 0 beside an infinity or NaN is not among them: there torch's derivative of `prod` depends on other lines.
ROWS = [
    [0.0, 0.0, 0.0], [1.0, 1.0, 1.0], [1.0, 1.0, -2.0], [0.0, 1.0, 2.0], [3.0, 0.0, 0.0], [INF, 1.0, 2.0],
    [-INF, 1.0, 2.0], [-INF, -INF, -INF], [INF, INF, 1.0], [INF, -INF, 1.0], [NAN, 1.0, 2.0], [1.0, NAN, 2.0],
    [2.0, 1.0, NAN], [NAN, NAN, 1.0], [NAN, NAN, NAN], [NAN, INF, 1.0], [1e30, 0.0, 1.0], [800.0, 0.0, -800.0],
]  # fmt: skip


# The functions' definitions by name, each of which is planned once for all rows.
WRITTEN: dict[str, mf.FusionDefinition] = {}


@pytest.mark.parametrize("name", OF_ROWS)
@pytest.mark.parametrize("row", ROWS, ids=str)
def test_functions_of_rows_with_special_numbers(name: str, row: list[float]) -> None:
    build, reference = OF_ROWS[name]
    _check(
        lambda fd, x: build(fd.ops, x), reference, [torch.tensor([row], dtype=torch.float64)], kept=WRITTEN, name=name
    )
