"""Random numbers that depend on (seed, offset, place in the program, global index) and on nothing else.

The generator is Philox 4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011): a keyed
bijection of a 128-bit counter. Element i of a tensor reads counter (i, salt, offset), so a rank that holds some of the
elements draws exactly the numbers that one rank would draw for them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from .indices import Runs, linear_index

_MASK = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
_ROUNDS = 10


class RandomStream(NamedTuple):
    """What the numbers of one op depend on, beside the element's index.

    In compiled code seed and offset are int64 tensors without dims.
    """

    seed: int | torch.Tensor
    offset: int | torch.Tensor
    salt: int = 0


def _high_low(a: int, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The high and the low 32 bits of a product of unsigned 32-bit numbers; int64 wraps around to the same bits."""
    product = a * b
    return (product >> 32) & _MASK, product & _MASK


def philox(counter: Sequence[torch.Tensor], key: tuple[Any, Any]) -> tuple[torch.Tensor, ...]:
    """Four random 32-bit words (as int64) from four counter words, element by element."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(_ROUNDS):
        high0, low0 = _high_low(_MULTIPLIERS[0], c0)
        high1, low1 = _high_low(_MULTIPLIERS[1], c2)
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = (k0 + _WEYL[0]) & _MASK, (k1 + _WEYL[1]) & _MASK
    return c0, c1, c2, c3


def _filled(index: torch.Tensor, number: int | torch.Tensor) -> torch.Tensor:
    return number.expand_as(index) if isinstance(number, torch.Tensor) else torch.full_like(index, number)


def words(index: torch.Tensor, stream: RandomStream) -> tuple[torch.Tensor, ...]:
    """Four random 32-bit words (as int64) for every global index."""
    salt, offset = (_filled(index, number & _MASK) for number in (stream.salt, stream.offset))
    return philox((index & _MASK, index >> 32, salt, offset), (stream.seed & _MASK, (stream.seed >> 32) & _MASK))


def _fraction(high: torch.Tensor, low: torch.Tensor) -> torch.Tensor:
    """A float64 in [0, 1) with 53 random bits."""
    return ((high >> 5) * 2**26 + (low >> 6)).double() * 2.0**-53


def fractions(index: torch.Tensor, stream: RandomStream, dtype: torch.dtype) -> torch.Tensor:
    """Uniform numbers in [0, 1): 24 random bits in float32, 53 in float64."""
    high, low, _, _ = words(index, stream)
    return _fraction(high, low) if dtype == torch.float64 else (high >> 8).to(torch.float32) * 2.0**-24


def normals(index: torch.Tensor, stream: RandomStream) -> torch.Tensor:
    """Standard normal numbers in float64 (Box and Muller's transform).

    Devices differ in the last bits of float64, which rounding to float32 hides.
    """
    a, b, c, d = words(index, stream)
    radius = torch.sqrt(-2.0 * torch.log1p(-_fraction(a, b)))
    return radius * torch.cos(2.0 * math.pi * _fraction(c, d))


def _compute_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def _last_before(end: float, dtype: torch.dtype) -> float:
    """The number of a type before the one that `end` is in it: as it is for an infinite `end`, finite for others."""
    if not math.isfinite(end):
        return end
    info = torch.finfo(dtype)
    near = round(end / _spacing(end, info)) * _spacing(end, info)
    if not near:
        return -info.tiny
    if abs(near) > info.max:
        return math.copysign(info.max, near)
    # Below a power of two, numbers are twice as close together as above it.
    closer = near > 0.0 and math.frexp(near)[0] == 0.5
    return near - max(_spacing(near, info) * (0.5 if closer else 1.0), info.tiny * info.eps)


def _spacing(number: float, info: torch.finfo) -> float:
    """How far from it the next number of a type is, away from 0."""
    return max(info.eps * 2.0 ** (math.frexp(number)[1] - 1), info.tiny * info.eps)


def uniform(
    low: Any,
    high: Any,
    runs: Sequence[Runs],
    shape: Sequence[int],
    stream: tuple[int, ...],
    dtype: torch.dtype,
    device: Any,
) -> torch.Tensor:
    """The rank's part of a tensor of this shape, with numbers from [low, high).

    A number that rounding takes to `high`, here or in the result's type, becomes the one before what `high` is in that
    type.
    """
    drawn = fractions(linear_index(runs, shape, device), RandomStream(*stream), _compute_dtype(dtype))
    found = drawn * (high - low) + low
    return (found.clamp(max=max(low, _last_before(high, dtype))) if low < high else found).to(dtype)


def normal(
    mean: Any,
    std: Any,
    runs: Sequence[Runs],
    shape: Sequence[int],
    stream: tuple[int, ...],
    dtype: torch.dtype,
    device: Any,
) -> torch.Tensor:
    """The rank's part of a tensor of this shape with normally distributed numbers."""
    drawn = normals(linear_index(runs, shape, device), RandomStream(*stream)).to(_compute_dtype(dtype))
    return (drawn * std + mean).to(dtype)
