"""Local computations that generated programs call where torch has no single function for them."""

from __future__ import annotations

import math
from typing import Any

import torch

from .indices import Runs, global_index
from .reductions import tensor_like


def _both(a: Any, b: Any) -> tuple[torch.Tensor, torch.Tensor]:
    return tensor_like(a, b), tensor_like(b, a)


def maximum(a: Any, b: Any) -> torch.Tensor:
    return torch.maximum(*_both(a, b))


def minimum(a: Any, b: Any) -> torch.Tensor:
    return torch.minimum(*_both(a, b))


def atan2(a: Any, b: Any) -> torch.Tensor:
    return torch.atan2(*_both(a, b))


def nextafter(a: Any, b: Any) -> torch.Tensor:
    return torch.nextafter(*_both(a, b))


def complex(a: Any, b: Any) -> torch.Tensor:
    return torch.complex(*torch.broadcast_tensors(*_both(a, b)))


def gcd(a: Any, b: Any) -> torch.Tensor:
    return torch.gcd(*_both(a, b))


def logical_and(a: Any, b: Any) -> torch.Tensor:
    return torch.logical_and(*_both(a, b))


def logical_or(a: Any, b: Any) -> torch.Tensor:
    return torch.logical_or(*_both(a, b))


def pow(a: Any, b: Any) -> torch.Tensor:
    return torch.pow(a, b)


def remainder(a: Any, b: Any) -> torch.Tensor:
    """The remainder with the sign of the divisor."""
    return torch.remainder(a, b)


def fmod(a: Any, b: Any) -> torch.Tensor:
    """The remainder with the sign of the dividend."""
    return torch.fmod(*_both(a, b))


mod = fmod


def div(a: Any, b: Any) -> torch.Tensor:
    """Division that stays an integer, rounded towards zero, where both operands are integers (as in C)."""
    a, b = _both(a, b)
    if a.dtype.is_floating_point or a.dtype.is_complex or b.dtype.is_floating_point or b.dtype.is_complex:
        return a / b
    return torch.div(a, b, rounding_mode="trunc")


def shift_left(a: Any, b: Any) -> torch.Tensor:
    return torch.bitwise_left_shift(*_both(a, b))


def shift_right(a: Any, b: Any) -> torch.Tensor:
    return torch.bitwise_right_shift(*_both(a, b))


def logical_right_shift(a: Any, b: Any) -> torch.Tensor:
    """Shift right filling with zeros, whatever the sign."""
    a, b = _both(a, b)
    bits = a.element_size() * 8
    mask = torch.where(b > 0, (1 << (bits - b.clamp(min=1))) - 1, -1).to(a.dtype)
    return torch.bitwise_and(torch.bitwise_right_shift(a, b), mask)


def where(condition: Any, a: Any, b: Any) -> torch.Tensor:
    """`torch.where` with numbers allowed everywhere; a condition that is no boolean means "is not zero"."""
    condition = torch.as_tensor(condition)
    return torch.where(condition if condition.dtype == torch.bool else condition != 0, a, b)


def lerp(start: Any, end: Any, weight: Any) -> torch.Tensor:
    return start + weight * (end - start)


def real(x: torch.Tensor) -> torch.Tensor:
    return torch.real(x).contiguous() if x.is_complex() else x


def imag(x: torch.Tensor) -> torch.Tensor:
    return torch.imag(x).contiguous() if x.is_complex() else torch.zeros_like(x)


def stacked_linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """[b*, k] and [d, n, k] (and [d, n]) to [d, b*, n]."""
    out = torch.matmul(x.reshape(1, math.prod(x.shape[:-1]), x.shape[-1]), weight.transpose(-1, -2))
    if bias is not None:
        out = out + bias.unsqueeze(1)
    return out.reshape(weight.shape[0], *x.shape[:-1], weight.shape[1])


def in_stride_order(x: torch.Tensor, order: list[int]) -> torch.Tensor:
    """The same values with the memory order that nvFuser's stride order names (0 is the fastest dim)."""
    by_stride = sorted(range(x.ndim), key=lambda d: -order[d])
    back = [by_stride.index(d) for d in range(x.ndim)]
    return x.permute(by_stride).contiguous().permute(back)


positions = global_index


def grid(*index: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Index tensors that together name every element of a box."""
    return torch.meshgrid(*index, indexing="ij")


_TERMS = {"sum": torch.add, "prod": torch.mul, "max": torch.maximum, "min": torch.minimum}


def combine(a: torch.Tensor, b: torch.Tensor, reduce: str, out: torch.Tensor | None = None) -> torch.Tensor:
    """Two terms of a reduction."""
    if a.dtype == torch.bool:
        return (torch.logical_or if reduce in ("sum", "max") else torch.logical_and)(a, b, out=out)
    return _TERMS[reduce](a, b, out=out)


def fold(terms: torch.Tensor, reduce: str, out: torch.Tensor | None = None) -> torch.Tensor:
    """[n, *shape] terms of a reduction to their result [*shape]."""
    if terms.dtype == torch.bool:
        return (torch.any if reduce in ("sum", "max") else torch.all)(terms, 0, out=out)
    if reduce in ("sum", "prod"):
        return (torch.sum if reduce == "sum" else torch.prod)(terms, 0, dtype=terms.dtype, out=out)
    return (torch.amax if reduce == "max" else torch.amin)(terms, 0, out=out)


def iota(length: Runs, start: Any, step: Any, dtype: torch.dtype, device: Any) -> torch.Tensor:
    """The rank's part of start, start + step, ...; worked out in float64 for floating point types."""
    index = global_index(length, device)
    return ((index.double() if dtype.is_floating_point else index) * step + start).to(dtype)


def topk(x: torch.Tensor, k: int, dim: int, largest: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Values and indices, equal values in the order of their indices: the choice is the same on every mesh."""
    order = torch.argsort(x, dim=dim, descending=largest, stable=True).narrow(dim, 0, k)
    return x.gather(dim, order), order


def welford(x: torch.Tensor, dims: list[int]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(mean, sum of squared differences from it, count) over the dims."""
    wide = x.float() if x.dtype in (torch.float16, torch.bfloat16) else x
    var, mean = torch.var_mean(wide, dims, correction=0)
    count = math.prod(x.shape[d] for d in dims)
    return mean.to(x.dtype), (var * count).to(x.dtype), torch.full(mean.shape, count, device=x.device)
