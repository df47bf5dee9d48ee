"""Texts of indices that are looked up by, or added at: the ones that a dim does not have are errors on every mesh."""

from __future__ import annotations

from .opdef import Emit


def checked_index(e: Emit, operand: int, n: int) -> str:
    """Text of an operand as checked indices of a dim of size n."""
    return f"K.checked({e.operands[operand]}, {n})"


def checked_place(e: Emit, name: str, n: int) -> str:
    """Text of a scalar argument as one checked index of a dim of size n, counted from the front."""
    return f"K.checked_place({e.scalar(name)}, {n})"
