"""VJPs of matrix products.

A weight's gradient is one `contract` over all batch dims, however they are sharded: each rank computes its terms, and
one reduction follows.
"""

from __future__ import annotations

from ..ops.vjp import Backward, Tensor, Vjp, each, sum_to


def transposed(b: Backward, x: Tensor) -> Tensor:
    """The tensor with its last two dims swapped."""
    return b.ops.permute(x, [*range(x.ndim - 2), x.ndim - 1, x.ndim - 2])


def _with_dim(b: Backward, x: Tensor, dim: int) -> Tensor:
    """The tensor with a new dim of size 1 at `dim`, counted from the back."""
    ndim = x.ndim + 1
    return b.ops.broadcast(x, [d == ndim + dim for d in range(ndim)])


def _left(b: Backward) -> Tensor:
    left, right = b["a"], b.conj(b["b"])
    if right.ndim == 1:
        return b.ops.mul(_with_dim(b, b.grad, -1), right)
    if right.ndim == 2:
        return b.ops.linear(b.grad, right)
    if left.ndim > 2:
        return sum_to(b, b.ops.matmul(b.grad, transposed(b, right)), left)
    grad = b.grad if left.ndim == 1 else transposed(b, b.grad)
    return b.ops.contract(grad, transposed(b, right), right.ndim - 1)


def _right(b: Backward) -> Tensor:
    left, right = b.conj(b["a"]), b["b"]
    if right.ndim < 3:
        return b.ops.contract(left, b.grad, left.ndim - 1)
    if left.ndim == 1:
        return b.ops.mul(_with_dim(b, left, -1), _with_dim(b, b.grad, -2))
    return sum_to(b, b.ops.matmul(transposed(b, left), b.grad), right)


def _linear_input(b: Backward) -> Tensor:
    weight = b.conj(b["weight"])
    if weight.ndim == 1:
        return b.ops.mul(_with_dim(b, b.grad, -1), weight)
    if weight.ndim == 2:
        return b.ops.matmul(b.grad, weight)
    last = b.grad.ndim - 1
    return b.ops.contract(b.ops.permute(b.grad, [0, last, *range(1, last)]), weight, 2)


def _linear_weight(b: Backward) -> Tensor:
    x, grad = b.conj(b["input"]), b.grad
    rows = x.ndim - 1
    if b["weight"].ndim > 2:
        grad = b.ops.permute(grad, [*range(1, rows + 1), 0, rows + 1])
    return b.ops.contract(grad, x, rows)


def _linear_bias(b: Backward) -> Tensor:
    """`grad` summed over the input's dims; the dim of a stack of weights comes before these."""
    first = b["weight"].ndim - 2 if b["weight"].ndim > 2 else 0
    dims = list(range(first, first + b["input"].ndim - 1))
    return b.ops.sum(b.grad, dims) if dims else b.grad


def _grouped(b: Backward, first: Tensor, second: Tensor) -> Tensor:
    return b.ops.grouped_mm(first, second, b["offsets"])


MATMUL: Vjp = each(a=_left, b=_right)
LINEAR: Vjp = each(input=_linear_input, weight=_linear_weight, bias=_linear_bias)
GROUPED_MM: Vjp = each(
    mat1=lambda b: _grouped(b, b.grad, transposed(b, b["mat2"])),
    mat2=lambda b: _grouped(b, transposed(b, b["mat1"]), b.grad),
)
