"""VJPs of matrix products.

A weight's gradient is one `contract` over all batch dims, however they are sharded: each rank computes its terms, and
one reduction follows.
"""

from __future__ import annotations

from ..ops.vjp import Backward, Tensor, Vjp, each


def _first_dims_last(b: Backward, x: Tensor, dims: int) -> Tensor:
    return b.ops.permute(x, [*range(dims, x.ndim), *range(dims)])


def _contract_a(b: Backward) -> Tensor:
    """Summed over the other operand's own dims, which the gradient has last."""
    rows = b["dims"]
    other, kept = b.conj(b["b"]), b["a"].ndim - rows
    last = other.ndim - rows
    return b.ops.contract(_first_dims_last(b, other, rows), _first_dims_last(b, b.grad, kept), last)


def _contract_b(b: Backward) -> Tensor:
    rows, other = b["dims"], b.conj(b["a"])
    return b.ops.contract(_first_dims_last(b, other, rows), b.grad, other.ndim - rows)


CONTRACT: Vjp = each(a=_contract_a, b=_contract_b)
