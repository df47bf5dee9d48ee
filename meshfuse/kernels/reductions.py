"""Terms of reductions, and their neutral elements."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def lowest(dtype: torch.dtype) -> Any:
    """The least number of a type."""
    if dtype == torch.bool:
        return False
    return float("-inf") if dtype.is_floating_point else torch.iinfo(dtype).min


def highest(dtype: torch.dtype) -> Any:
    """The largest number of a type."""
    if dtype == torch.bool:
        return True
    return float("inf") if dtype.is_floating_point else torch.iinfo(dtype).max


def neutral_element(reduce: str, dtype: torch.dtype) -> Any:
    """The number that leaves a reduction unchanged; complex numbers have no max and min."""
    return _NEUTRAL[reduce](dtype)


_NEUTRAL: dict[str, Callable[[torch.dtype], Any]] = {
    "sum": lambda _: 0, "prod": lambda _: 1, "max": lowest, "min": highest,
}  # fmt: skip


def neutral(shape: tuple[int, ...], reduce: str, dtype: torch.dtype, device: Any) -> torch.Tensor:
    """The term of a reduction from a rank that has nothing to reduce."""
    return torch.full(shape, neutral_element(reduce, dtype), dtype=dtype, device=device)


_TERMS = {"sum": torch.add, "prod": torch.mul, "max": torch.maximum, "min": torch.minimum}


def combine(a: torch.Tensor, b: torch.Tensor, reduce: str, out: torch.Tensor | None = None) -> torch.Tensor:
    """Two terms of a reduction, reduced."""
    if a.dtype == torch.bool:
        return (torch.logical_or if reduce in ("sum", "max") else torch.logical_and)(a, b, out=out)
    return _TERMS[reduce](a, b, out=out)


def fold(terms: torch.Tensor, reduce: str, out: torch.Tensor | None = None) -> torch.Tensor:
    """[n, *shape] terms of a reduction, reduced to [*shape]. Half types are summed in float32; NaN stays NaN."""
    if terms.dtype == torch.bool:
        return (torch.any if reduce in ("sum", "max") else torch.all)(terms, 0, out=out)
    if reduce in ("sum", "prod"):
        return (torch.sum if reduce == "sum" else torch.prod)(terms, 0, dtype=terms.dtype, out=out)
    return (torch.amax if reduce == "max" else torch.amin)(terms, 0, out=out)
