"""Reductions, scans and sorts of local tensors, which may be empty; terms of reductions, and neutral elements."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch


def tensor_like(value: Any, like: Any) -> torch.Tensor:
    """A number as a tensor that promotes with `like` as the number would; a tensor as it is."""
    if isinstance(value, torch.Tensor):
        return value
    dtype = like.dtype if isinstance(like, torch.Tensor) else None
    device = like.device if isinstance(like, torch.Tensor) else "cpu"
    return torch.tensor(value, dtype=dtype, device=device)


def _reduced_empty(x: torch.Tensor, dims: list[int], keepdim: bool, fill: Any) -> torch.Tensor:
    """The neutral element in the shape of a reduction of a tensor without elements."""
    sizes = [1 if d in dims else n for d, n in enumerate(x.shape) if keepdim or d not in dims]
    return x.new_full(sizes, fill)


def _is_empty(x: torch.Tensor, dims: list[int]) -> bool:
    return any(x.shape[d] == 0 for d in dims)


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


def reduce_max(x: torch.Tensor, dims: list[int], keepdim: bool) -> torch.Tensor:
    """The largest elements; the lowest value of the type over a shard with nothing in it."""
    return _reduced_empty(x, dims, keepdim, lowest(x.dtype)) if _is_empty(x, dims) else torch.amax(x, dims, keepdim)


def reduce_min(x: torch.Tensor, dims: list[int], keepdim: bool) -> torch.Tensor:
    """The smallest elements; the highest value of the type over a shard with nothing in it."""
    return _reduced_empty(x, dims, keepdim, highest(x.dtype)) if _is_empty(x, dims) else torch.amin(x, dims, keepdim)


def reduce_prod(x: torch.Tensor, dims: list[int], keepdim: bool) -> torch.Tensor:
    """The products, in the type of x."""
    for d in sorted(dims, reverse=True):
        x = torch.prod(x, d, keepdim, dtype=x.dtype)  # else Int of every integer
    return x


def scan(name: str, x: torch.Tensor, dim: int, init: Any) -> torch.Tensor:
    """A scan along a dim that starts with `init`, in the operand's type; "cumsum_bwd" is a cumsum from the end."""
    wide = x.long() if x.dtype == torch.bool else x
    if name == "cumsum_bwd":
        return wide.flip(dim).cumsum(dim).flip(dim).to(x.dtype)
    found = getattr(torch, name)(wide, dim)
    out = found.values if name in ("cummax", "cummin") else found
    if init is not None:
        out = _BEGIN[name](out, tensor_like(init, wide))
    return out.to(x.dtype)


_BEGIN = {"cumsum": torch.add, "cumprod": torch.mul, "cummax": torch.maximum, "cummin": torch.minimum}


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


def topk(x: torch.Tensor, k: int, dim: int, largest: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """(values, indices), equal values in the order of their indices, so that every mesh makes the same choice."""
    order = torch.argsort(x, dim=dim, descending=largest, stable=True).narrow(dim, 0, k)
    return x.gather(dim, order), order


def welford(x: torch.Tensor, dims: list[int]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(mean, sum of squared differences from it, count) over the dims."""
    wide = x.float() if x.dtype in (torch.float16, torch.bfloat16) else x
    var, mean = torch.var_mean(wide, dims, correction=0)
    count = math.prod(x.shape[d] for d in dims)
    return mean.to(x.dtype), (var * count).to(x.real.dtype), torch.full(mean.shape, count, device=x.device)
