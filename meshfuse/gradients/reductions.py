"""VJPs of reductions, statistics and scans."""

from __future__ import annotations

from typing import Any, NamedTuple

from ..dtypes import DataType
from ..ops.vjp import Backward, Tensor, Vjp, dim_of, each, kept, listed_dims, numel_along, restored, sizes


def _dims(b: Backward) -> list[int]:
    return listed_dims(b["dims"], b["arg"].ndim)


def _sum(b: Backward) -> Tensor:
    return restored(b, b.grad, b["arg"], _dims(b), b["keepdim"])


class _Factors(NamedTuple):
    """The factors of a product, with the zeros apart, so that what is made of them can be differentiated again.

    is_zero: which ones are 0.
    zeros: those, and 0 for the others: their sum stands for their product where there is one of them.
    rest: the others, and 1 for the zeros: these can be divided by.
    """

    is_zero: Tensor
    zeros: Tensor
    rest: Tensor


def _factors(b: Backward) -> _Factors:
    o, x = b.ops, b["arg"]
    is_zero = o.eq(x, 0)
    return _Factors(is_zero, b.conj(o.where(is_zero, x, 0.0)), o.where(is_zero, 1.0, x))


def _product_without(o: Any, left_out: int, count: Tensor, total: Tensor) -> Tensor:
    """The product of `count` zeros but for some that are left out; `total` is the sum of the others.

    It is 1 where no other is left, that other where it is one, and else 0, as are then its derivatives.
    """
    return o.where(o.eq(count, left_out), 1.0, o.where(o.eq(count, left_out + 1), total, 0.0))


def _prod(b: Backward) -> Tensor:
    """By x the product of the other elements."""
    o, dims = b.ops, _dims(b)
    is_zero, zeros, rest = _factors(b)
    count, total = o.sum(is_zero, dims, True), o.sum(zeros, dims, True)
    grad = o.mul(kept(b, b.grad, b["arg"], dims, b["keepdim"]), b.conj(o.prod(rest, dims, True)))
    by_rest = o.mul(o.truediv(grad, b.conj(rest)), _product_without(o, 0, count, total))
    return o.where(is_zero, o.mul(grad, _product_without(o, 1, count, o.sub(total, zeros))), by_rest)


def _extreme(b: Backward) -> Tensor:
    """Equal extremes share the gradient, as in torch.amax; a NaN equals nothing, and all get NaN."""
    o, x, dims = b.ops, b["arg"], _dims(b)
    is_top = o.eq(x, kept(b, b.result, x, dims, b["keepdim"]))
    share = o.where(is_top, kept(b, b.grad, x, dims, b["keepdim"]), 0.0)
    return o.truediv(share, o.sum(is_top, dims, True))


def _over(b: Backward, grad: Tensor, numerator: float, n: Any) -> Tensor:
    """grad * numerator / n; NaN for n = 0, as the division of an open n gives."""
    if isinstance(n, int):
        return b.ops.mul(grad, numerator / n if n else float("nan"))
    return b.ops.truediv(b.ops.mul(grad, numerator), n)


def _deviation(b: Backward, mean: Tensor, grad: Tensor, n: Any) -> Tensor:
    """2 / n * grad * (x - mean); mean and grad have the reduced dims of size 1."""
    return b.ops.mul(_over(b, grad, 2.0, n), b.ops.sub(b["arg"], mean))


def _degrees_of_freedom(b: Backward) -> Any:
    """The divisor of a variance: n - correction."""
    return numel_along(b["arg"], _dims(b)) - b["correction"]


def _var(b: Backward) -> Tensor:
    x, dims = b["arg"], _dims(b)
    mean = b.ops.truediv(b.ops.sum(x, dims, True), numel_along(x, dims))
    return _deviation(b, mean, kept(b, b.grad, x, dims, b["keepdim"]), _degrees_of_freedom(b))


def _moments(b: Backward, spread: int, mean: int, n: Any, keepdim: bool) -> Tensor:
    """The operand's gradient from those of two results: squared deviations over n (at place `spread`), and a mean."""
    x, dims = b["arg"], _dims(b)
    parts: list[Tensor] = []
    if b.grads[spread] is not None:
        grad = kept(b, b.grads[spread], x, dims, keepdim)
        parts.append(_deviation(b, kept(b, b.results[mean], x, dims, keepdim), grad, n))
    if b.grads[mean] is not None:
        share = _over(b, kept(b, b.grads[mean], x, dims, keepdim), 1.0, numel_along(x, dims))
        parts.append(share if parts else restored(b, share, x, dims, True))
    return parts[0] if len(parts) == 1 else b.ops.add(*parts)


def _var_mean(b: Backward) -> Tensor:
    return _moments(b, 0, 1, _degrees_of_freedom(b), b["keepdim"])


def _welford(b: Backward) -> Tensor:
    """Its second result is the sum of squared deviations."""
    return _moments(b, 1, 0, 1, False)


def _cumsum(b: Backward) -> Tensor:
    return b.ops.cumsum_bwd(b.grad, dim_of(b))


def _cumprod(b: Backward) -> Tensor:
    """By x_i the sum of grad_j y_j / x_i over j >= i, with the zeros up to j apart from the other factors of y_j."""
    o, dim = b.ops, dim_of(b)
    is_zero, zeros, rest = _factors(b)
    count, total = o.cumsum(o.cast(is_zero, DataType.Int), dim), o.cumsum(zeros, dim)
    grad = b.times(o.cumprod(rest, dim, b["init"]))
    by_rest = o.cumsum_bwd(o.mul(grad, _product_without(o, 0, count, total)), dim)
    with_own = o.cumsum_bwd(o.mul(grad, _product_without(o, 1, count, total)), dim)
    of_own = o.mul(zeros, o.cumsum_bwd(o.where(o.eq(count, 2), grad, 0.0), dim))
    return o.where(is_zero, o.sub(with_own, of_own), o.truediv(by_rest, b.conj(rest)))


def _cumulative_extreme(b: Backward) -> Tensor:
    """The gradient goes to the last element that is the extreme so far, as in torch; to none where that is `init`.

    From the first NaN on that is the last NaN.
    """
    o, x, dim = b.ops, b["arg"], dim_of(b)
    index = o.broadcast(o.iota(sizes(x)[dim]), [d != dim for d in range(x.ndim)])
    is_extreme = o.logical_or(o.eq(x, b.result), o.isnan(x))
    found = o.cummax(o.where(is_extreme, index, -1), dim)
    grad = o.where(o.ge(found, 0), b.grad, 0.0)
    return o.take_along_axis_bwd(grad, o.maximum(found, 0), dim, sizes(x)[dim])


REDUCTIONS: dict[str, Vjp] = {
    "sum": each(arg=_sum),
    "prod": each(arg=_prod),
    "max": each(arg=_extreme),
    "min": each(arg=_extreme),
}
STATISTICS: dict[str, Vjp] = {"var": each(arg=_var), "var_mean": each(arg=_var_mean), "welford": each(arg=_welford)}
SCANS: dict[str, Vjp] = {
    "cumsum": each(arg=_cumsum),
    "cumprod": each(arg=_cumprod),
    "cummax": each(arg=_cumulative_extreme),
    "cummin": each(arg=_cumulative_extreme),
}
CUMSUM_BWD: Vjp = each(grad=lambda b: b.ops.cumsum(b.grad, b["dim"]))
