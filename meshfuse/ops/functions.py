"""Functions of one number, element by element.

Gradients at kinks, NaN and infinities are those of torch; a NaN operand gives a NaN gradient.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from ..dtypes import Category
from .opdef import Partial
from .pointwise import unary
from .promotion import floating, keep, promoted
from .vjp import Backward, Tensor, Vjp, each, nothing

# (ops, operand, result) -> a tensor.
_Formula = Callable[[Any, Tensor, Tensor], Tensor]


def _times(derivative: _Formula) -> Vjp:
    """The VJP of a function with this derivative."""
    return each(x=lambda b: b.times(derivative(b.ops, b["x"], b.result)))


def _over(divisor: _Formula) -> Vjp:
    """The VJP of a function with the derivative 1 / divisor."""
    return each(x=lambda b: b.over(divisor(b.ops, b["x"], b.result)))


def _acosh_bwd(o: Any, x: Tensor, _: Tensor) -> Tensor:
    """1 / sqrt(x² - 1), as the product of two roots: exact near 1, and right for complex numbers."""
    size = x if x.dtype.category is Category.COMPLEX else o.abs(x)
    return o.mul(o.rsqrt(o.sub(size, 1.0)), o.rsqrt(o.add(size, 1.0)))


def _silu_bwd(o: Any, x: Tensor, _: Tensor) -> Tensor:
    gate = o.sigmoid(x)
    return o.mul(gate, o.add(o.mul(x, o.sub(1.0, gate)), 1.0))


def _abs_bwd(b: Backward) -> Tensor:
    """By sign(x), for complex numbers x / |x|; 0 at 0."""
    o, x = b.ops, b["x"]
    if x.dtype.category < Category.COMPLEX:
        return b.times(o.sign(x))
    is_zero = o.eq(b.result, 0.0)
    unit = o.where(is_zero, 0.0, o.truediv(x, o.where(is_zero, 1.0, b.result)))
    return o.mul(unit, b.grad)


def _relu_bwd(b: Backward) -> Tensor:
    return b.ops.where(b.ops.le(b.result, 0.0), 0.0, b.grad)


_ROOT_PI = math.sqrt(math.pi)
OPS = (
    unary("acos", "arc cosine", domain=(-0.9, 0.9),
          vjp=_times(lambda o, x, _: o.neg(o.rsqrt(o.sub(1.0, o.mul(x, x)))))),
    unary("acosh", "inverse hyperbolic cosine", domain=(1.1, 4.0), vjp=_times(_acosh_bwd)),
    unary("asin", "arc sine", domain=(-0.9, 0.9), vjp=_times(lambda o, x, _: o.rsqrt(o.sub(1.0, o.mul(x, x))))),
    unary("asinh", "inverse hyperbolic sine", vjp=_times(lambda o, x, _: o.rsqrt(o.add(o.mul(x, x), 1.0)))),
    unary("atan", "arc tangent", vjp=_over(lambda o, x, _: o.add(o.mul(x, x), 1.0))),
    unary("atanh", "inverse hyperbolic tangent", domain=(-0.9, 0.9),
          vjp=_over(lambda o, x, _: o.sub(1.0, o.mul(x, x)))),
    unary("cos", "cosine, of radians", vjp=_times(lambda o, x, _: o.neg(o.sin(x)))),
    unary("cosh", "hyperbolic cosine", vjp=_times(lambda o, x, _: o.sinh(x))),
    unary("erf", "error function", vjp=_times(lambda o, x, _: o.mul(o.exp(o.neg(o.mul(x, x))), 2.0 / _ROOT_PI))),
    unary("erfc", "1 - erf(x)", vjp=_times(lambda o, x, _: o.mul(o.exp(o.neg(o.mul(x, x))), -2.0 / _ROOT_PI))),
    unary("erfinv", "inverse of `erf`", domain=(-0.9, 0.9),
          vjp=_times(lambda o, _, y: o.mul(o.exp(o.mul(y, y)), _ROOT_PI / 2.0))),
    unary("exp", "e to the power x", vjp=_times(lambda o, _, y: y)),
    unary("exp2", "2 to the power x", vjp=_times(lambda o, _, y: o.mul(y, math.log(2.0)))),
    unary("expm1", "exp(x) - 1, exact near 0", vjp=_times(lambda o, _, y: o.add(y, 1.0))),
    unary("lgamma", "logarithm of the gamma function's magnitude", domain=(0.1, 5.0)),
    unary("log", "natural logarithm", domain=(0.2, 4.0), vjp=_over(lambda o, x, _: x)),
    unary("log10", "logarithm to base 10", domain=(0.2, 4.0), vjp=_over(lambda o, x, _: o.mul(x, math.log(10.0)))),
    unary("log1p", "log(1 + x), exact near 0", domain=(0.2, 4.0), vjp=_over(lambda o, x, _: o.add(x, 1.0))),
    unary("log2", "logarithm to base 2", domain=(0.2, 4.0), vjp=_over(lambda o, x, _: o.mul(x, math.log(2.0)))),
    unary("reciprocal", "1 / x", domain=(0.2, 3.0), vjp=_times(lambda o, _, y: o.neg(o.mul(y, y)))),
    unary("rsqrt", "1 / sqrt(x)", domain=(0.2, 4.0),
          vjp=_times(lambda o, _, y: o.mul(o.mul(o.mul(y, y), y), -0.5))),
    unary("sigmoid", "1 / (1 + exp(-x))", vjp=_times(lambda o, _, y: o.mul(y, o.sub(1.0, y)))),
    unary("sin", "sine, of radians", vjp=_times(lambda o, x, _: o.cos(x))),
    unary("sinh", "hyperbolic sine", vjp=_times(lambda o, x, _: o.cosh(x))),
    unary("sqrt", "square root", domain=(0.2, 4.0), vjp=_over(lambda o, _, y: o.mul(y, 2.0))),
    unary("tan", "tangent, of radians", vjp=_times(lambda o, _, y: o.add(o.mul(y, y), 1.0))),
    unary("tanh", "hyperbolic tangent", vjp=_times(lambda o, _, y: o.sub(1.0, o.mul(y, y)))),
    unary("erfcinv", "inverse of `erfc`", "torch.special.erfinv(1.0 - {x})", domain=(0.1, 1.9),
          vjp=_times(lambda o, _, y: o.mul(o.exp(o.mul(y, y)), -_ROOT_PI / 2.0))),
    unary("silu", "x * sigmoid(x)", "F.silu({x})", promoted, compute=floating, vjp=_times(_silu_bwd)),
    unary("abs", "magnitude; Python's `abs(x)` as well", promotion=promoted, real=True, vjp=each(x=_abs_bwd)),
    unary("ceil", "least integer not below x, in x's type", promotion=promoted, jumps=True, vjp=nothing),
    unary("floor", "greatest integer not above x, in x's type", promotion=promoted, jumps=True, vjp=nothing),
    unary("round", "nearest integer, in x's type; halves go to the even one", promotion=promoted, jumps=True,
          vjp=nothing),
    unary("sign", "-1, 0 or 1", promotion=promoted, jumps=True, vjp=nothing),
    unary("trunc", "integer part, in x's type", promotion=promoted, jumps=True, vjp=nothing),
    unary("relu", "x where positive, else 0", promotion=promoted, vjp=each(x=_relu_bwd)),
    unary("frac", "x - trunc(x)", "({x} - torch.trunc({x}))", promoted, jumps=True,
          vjp=each(x=lambda b: b.grad)),
    unary("neg", "-x", promotion=keep, partial=Partial.JOINT, vjp=each(x=lambda b: b.ops.neg(b.grad))),
)  # fmt: skip
