"""Local computations that generated programs call where torch has no single function for what nvFuser means."""

from __future__ import annotations

from typing import Any

import torch

Runs = tuple[tuple[int, int], ...]


def tensor_like(value: Any, like: Any) -> torch.Tensor:
    """A number as a tensor that promotes with `like`; a tensor as it is."""
    if isinstance(value, torch.Tensor):
        return value
    dtype = like.dtype if isinstance(like, torch.Tensor) else None
    device = like.device if isinstance(like, torch.Tensor) else None
    return torch.tensor(value, dtype=dtype, device=device)


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


def global_index(index: Runs, device: Any = None) -> torch.Tensor:
    """The global indices of a dim that a rank holds, int64, from their runs."""
    if not index:
        return torch.empty(0, dtype=torch.int64, device=device)
    return torch.cat([torch.arange(a, b, device=device) for a, b in index])


def _reduced_empty(x: torch.Tensor, dims: list[int], keepdim: bool, fill: Any) -> torch.Tensor:
    """The neutral element in the shape of a reduction over nothing."""
    sizes = [1 if d in dims else n for d, n in enumerate(x.shape) if keepdim or d not in dims]
    return x.new_full(sizes, fill)


def _is_empty(x: torch.Tensor, dims: list[int]) -> bool:
    return any(x.shape[d] == 0 for d in dims)


def _lowest(dtype: torch.dtype) -> Any:
    if dtype == torch.bool:
        return False
    return float("-inf") if dtype.is_floating_point else torch.iinfo(dtype).min


def _highest(dtype: torch.dtype) -> Any:
    if dtype == torch.bool:
        return True
    return float("inf") if dtype.is_floating_point else torch.iinfo(dtype).max


def reduce_max(x: torch.Tensor, dims: list[int], keepdim: bool) -> torch.Tensor:
    """The largest elements; the lowest value of the type over a shard with nothing in it."""
    return _reduced_empty(x, dims, keepdim, _lowest(x.dtype)) if _is_empty(x, dims) else torch.amax(x, dims, keepdim)


def reduce_min(x: torch.Tensor, dims: list[int], keepdim: bool) -> torch.Tensor:
    """The smallest elements; the highest value of the type over a shard with nothing in it."""
    return _reduced_empty(x, dims, keepdim, _highest(x.dtype)) if _is_empty(x, dims) else torch.amin(x, dims, keepdim)


def reduce_prod(x: torch.Tensor, dims: list[int], keepdim: bool) -> torch.Tensor:
    for d in sorted(dims, reverse=True):
        x = torch.prod(x, d, keepdim)
    return x


def stacked_linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """[b*, k] and [d, n, k] (and [d, n]) to [d, b*, n]."""
    out = torch.matmul(x.reshape(1, -1, x.shape[-1]), weight.transpose(-1, -2))
    if bias is not None:
        out = out + bias.unsqueeze(1)
    return out.reshape(weight.shape[0], *x.shape[:-1], weight.shape[1])


def in_stride_order(x: torch.Tensor, order: list[int]) -> torch.Tensor:
    """The same values with the memory order that nvFuser's stride order names (0 is the fastest dim)."""
    by_stride = sorted(range(x.ndim), key=lambda d: -order[d])
    back = [by_stride.index(d) for d in range(x.ndim)]
    return x.permute(by_stride).contiguous().permute(back)
