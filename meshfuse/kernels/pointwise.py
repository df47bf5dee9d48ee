"""Pointwise functions as nvFuser has them where torch's differ; a number may be passed for any tensor."""

from __future__ import annotations

from typing import Any

import torch

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
    """A complex tensor from a real and an imaginary part."""
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
    """Shift right keeping the sign."""
    return torch.bitwise_right_shift(*_both(a, b))


def logical_right_shift(a: Any, b: Any) -> torch.Tensor:
    """Shift right filling with zeros, whatever the sign."""
    a, b = _both(a, b)
    bits = a.element_size() * 8
    mask = torch.where(b > 0, (1 << (bits - b.clamp(min=1))) - 1, -1).to(a.dtype)
    return torch.bitwise_and(torch.bitwise_right_shift(a, b), mask)


def where(condition: Any, a: Any, b: Any) -> torch.Tensor:
    """`torch.where` with numbers allowed everywhere; a condition that is no boolean means "is not zero"."""
    condition = condition if isinstance(condition, torch.Tensor) else torch.tensor(condition, device="cpu")
    return torch.where(condition if condition.dtype == torch.bool else condition != 0, a, b)


def lerp(start: Any, end: Any, weight: Any) -> torch.Tensor:
    """Linear interpolation: `start` at weight 0, `end` at weight 1."""
    return start + weight * (end - start)


def real(x: torch.Tensor) -> torch.Tensor:
    """The real part in memory of its own; a real tensor is returned as it is."""
    return torch.real(x).contiguous() if x.is_complex() else x


def imag(x: torch.Tensor) -> torch.Tensor:
    """The imaginary part in memory of its own; zeros for a real tensor."""
    return torch.imag(x).contiguous() if x.is_complex() else torch.zeros_like(x)


def in_stride_order(x: torch.Tensor, order: list[int]) -> torch.Tensor:
    """The same values in the memory order of nvFuser's stride order, in which 0 is the fastest dim."""
    by_stride = sorted(range(x.ndim), key=lambda d: -order[d])
    back = [by_stride.index(d) for d in range(x.ndim)]
    return x.permute(by_stride).contiguous().permute(back)
