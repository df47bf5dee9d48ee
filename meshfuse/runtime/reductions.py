"""The dtypes in which a backend can move or reduce a tensor, and what it is given in place of the others."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist

from ..errors import ArgumentError, user_error

# By the names that programs have for them.
REDUCE_OPS = {
    "sum": dist.ReduceOp.SUM, "prod": dist.ReduceOp.PRODUCT, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN,
}  # fmt: skip

# For dtypes that some backend refuses: a dtype with the same bytes, and how many of its elements make one.
_SAME_BYTES: dict[torch.dtype, tuple[torch.dtype, int]] = {
    torch.bool: (torch.uint8, 1),
    torch.int16: (torch.float16, 1),
    torch.uint16: (torch.float16, 1),
    torch.bfloat16: (torch.float16, 1),
    torch.uint32: (torch.int32, 1),
    torch.uint64: (torch.int64, 1),
    torch.complex32: (torch.int32, 1),
    torch.complex64: (torch.int64, 1),
    torch.complex128: (torch.float64, 2),
    torch.float8_e4m3fn: (torch.uint8, 1),
    torch.float8_e5m2: (torch.uint8, 1),
}
_DIRECT = (
    torch.uint8, torch.int8, torch.int32, torch.int64, torch.float16, torch.float32, torch.float64,
)  # fmt: skip


def movable(tensor: torch.Tensor) -> torch.Tensor:
    """A flat view of the same bytes in a dtype that every backend can move. The tensor must be contiguous."""
    flat = dense(tensor.view(-1))
    way = _SAME_BYTES.get(flat.dtype)
    if way is None:
        return flat if flat.dtype in _DIRECT else flat.view(torch.uint8)
    return flat.view(way[0])


def dense(flat: torch.Tensor) -> torch.Tensor:
    """A contiguous tensor of one dim, with stride 1.

    A tensor of one element is contiguous whatever its stride, but only with stride 1 can it be viewed in a smaller
    type.
    """
    return flat if flat.numel() != 1 else flat.as_strided((1,), (1,))


def move_scale(dtype: torch.dtype) -> int:
    """Elements of `movable(t)` per element of t."""
    way = _SAME_BYTES.get(dtype)
    if way is not None:
        return way[1]
    return 1 if dtype in _DIRECT else dtype.itemsize


def check_reducible(dtype: torch.dtype, op: str) -> None:
    """Raises ArgumentError for a reduction that there is not, or that the dtype does not have."""
    if op not in REDUCE_OPS:
        raise user_error("an unknown reduction", repr(op), f"one of {', '.join(REDUCE_OPS)}", cls=ArgumentError)
    if dtype.is_complex and op in ("max", "min"):
        raise user_error(f"complex numbers have no {op}", str(dtype), "sum or prod, or a real dtype", cls=ArgumentError)


@dataclass(frozen=True, slots=True)
class GlooReduction:
    """An all-reduce that gloo computes right: its tensor, its op, and what takes the result back, if that is needed."""

    tensor: torch.Tensor
    op: str
    finish: Callable[[], object] | None = None


def gloo_form(tensor: torch.Tensor, op: str) -> GlooReduction | None:
    """How gloo can reduce `tensor` in place; None where it has no way."""
    make = _WAYS.get((tensor.dtype, op))
    return None if make is None else make(tensor, op)


def _same(tensor: torch.Tensor, op: str) -> GlooReduction:
    return GlooReduction(tensor, op)


def _logical(tensor: torch.Tensor, op: str) -> GlooReduction:
    return GlooReduction(tensor.view(torch.uint8), "max" if op in ("sum", "max") else "min")


def _as_real(tensor: torch.Tensor, op: str) -> GlooReduction:
    return GlooReduction(torch.view_as_real(tensor), op)


def _widened(tensor: torch.Tensor, op: str) -> GlooReduction:
    wide = tensor.to(torch.int32)
    return GlooReduction(wide, op, lambda: tensor.copy_(wide))


def _ordered(tensor: torch.Tensor, op: str) -> GlooReduction:
    # gloo compares floats with std::max, which loses a NaN depending on the ranks' order. Integers do not.
    keys = order_keys(tensor, op)
    return GlooReduction(keys, op, lambda: tensor.copy_(from_order_keys(keys)))


def order_keys(tensor: torch.Tensor, op: str) -> torch.Tensor:
    """Integers that compare as the floats do, of which NaN is the largest for max and the smallest for min."""
    values = tensor if tensor.itemsize >= 4 else tensor.float()
    bits = values.view(torch.int32 if values.itemsize == 4 else torch.int64)
    limits = torch.iinfo(bits.dtype)
    keys = torch.where(bits < 0, bits ^ limits.max, bits)
    return keys.masked_fill_(values.isnan(), limits.max if op == "max" else limits.min)


def from_order_keys(keys: torch.Tensor) -> torch.Tensor:
    """The floats from which `order_keys` made these keys; NaN for its two extreme keys."""
    bits = torch.where(keys < 0, keys ^ torch.iinfo(keys.dtype).max, keys)
    return bits.view(torch.float32 if keys.itemsize == 4 else torch.float64)


_HALF = (torch.float16, torch.bfloat16)
_FLOAT = (*_HALF, torch.float32, torch.float64)
_WAYS: dict[tuple[torch.dtype, str], Callable[[torch.Tensor, str], GlooReduction]] = (
    {(d, op): _same for d in (torch.uint8, torch.int8, torch.int32, torch.int64) for op in REDUCE_OPS}
    | {(d, op): _same for d in _FLOAT for op in ("sum", "prod")}
    | {(d, op): _ordered for d in _FLOAT for op in ("max", "min")}
    | {(torch.bool, op): _logical for op in REDUCE_OPS}
    | {(torch.int16, op): _widened for op in REDUCE_OPS}
    | {(d, "sum"): _as_real for d in (torch.complex64, torch.complex128)}
)
