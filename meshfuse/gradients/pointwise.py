"""VJPs of ops that work element by element.

At kinks, ties, NaN and infinities they give what torch's derivatives give: no NaN of an operand gets lost.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from ..dtypes import Category
from ..ops.vjp import Backward, Tensor, Vjp, each, elementwise, is_tensor, nothing, sum_to

# (ops, operand, result) -> the derivative of the result.
_DERIVATIVES: dict[str, Callable[[Any, Tensor, Tensor], Tensor]] = {
    "acos": lambda o, x, _: o.neg(o.rsqrt(o.sub(1.0, o.mul(x, x)))),
    "acosh": lambda o, x, _: _acosh(o, x),
    "asin": lambda o, x, _: o.rsqrt(o.sub(1.0, o.mul(x, x))),
    "asinh": lambda o, x, _: o.rsqrt(o.add(o.mul(x, x), 1.0)),
    "cos": lambda o, x, _: o.neg(o.sin(x)),
    "cosh": lambda o, x, _: o.sinh(x),
    "erf": lambda o, x, _: o.mul(o.exp(o.neg(o.mul(x, x))), 2.0 / math.sqrt(math.pi)),
    "erfc": lambda o, x, _: o.mul(o.exp(o.neg(o.mul(x, x))), -2.0 / math.sqrt(math.pi)),
    "erfinv": lambda o, _, y: o.mul(o.exp(o.mul(y, y)), math.sqrt(math.pi) / 2.0),
    "erfcinv": lambda o, _, y: o.mul(o.exp(o.mul(y, y)), -math.sqrt(math.pi) / 2.0),
    "exp": lambda o, _, y: y,
    "exp2": lambda o, _, y: o.mul(y, math.log(2.0)),
    "expm1": lambda o, _, y: o.add(y, 1.0),
    "reciprocal": lambda o, _, y: o.neg(o.mul(y, y)),
    "rsqrt": lambda o, _, y: o.mul(o.mul(o.mul(y, y), y), -0.5),
    "sigmoid": lambda o, _, y: o.mul(y, o.sub(1.0, y)),
    "silu": lambda o, x, _: _silu(o, x),
    "sin": lambda o, x, _: o.cos(x),
    "sinh": lambda o, x, _: o.cosh(x),
    "tan": lambda o, _, y: o.add(o.mul(y, y), 1.0),
    "tanh": lambda o, _, y: o.sub(1.0, o.mul(y, y)),
}
# (ops, operand, result) -> what the gradient is divided by.
_DIVISORS: dict[str, Callable[[Any, Tensor, Tensor], Tensor]] = {
    "atan": lambda o, x, _: o.add(o.mul(x, x), 1.0),
    "atanh": lambda o, x, _: o.sub(1.0, o.mul(x, x)),
    "log": lambda o, x, _: x,
    "log10": lambda o, x, _: o.mul(x, math.log(10.0)),
    "log1p": lambda o, x, _: o.add(x, 1.0),
    "log2": lambda o, x, _: o.mul(x, math.log(2.0)),
    "sqrt": lambda o, _, y: o.mul(y, 2.0),
}
_CONSTANT = ["ceil", "floor", "round", "sign", "trunc"]


def _acosh(o: Any, x: Tensor) -> Tensor:
    """1 / sqrt(x² - 1). The root is taken of both factors apart: near 1 that is exact, and complex numbers need it."""
    size = x if x.dtype.category is Category.COMPLEX else o.abs(x)
    return o.mul(o.rsqrt(o.sub(size, 1.0)), o.rsqrt(o.add(size, 1.0)))


def _silu(o: Any, x: Tensor) -> Tensor:
    gate = o.sigmoid(x)
    return o.mul(gate, o.add(o.mul(x, o.sub(1.0, gate)), 1.0))


def _derivative(formula: Callable[[Any, Tensor, Tensor], Tensor]) -> Vjp:
    return each(x=lambda b: b.times(formula(b.ops, b["x"], b.result)))


def _divisor(formula: Callable[[Any, Tensor, Tensor], Tensor]) -> Vjp:
    return each(x=lambda b: b.over(formula(b.ops, b["x"], b.result)))


def _same(b: Backward) -> Tensor:
    return b.grad


def _negative(b: Backward) -> Tensor:
    return b.ops.neg(b.grad)


def _subtracted(b: Backward) -> Tensor:
    return b.ops.neg(sum_to(b, b.grad, b["b"]))


def _abs(b: Backward) -> Tensor:
    """By sign(x), for complex numbers x / |x|; 0 at 0."""
    o, x = b.ops, b["x"]
    if x.dtype.category < Category.COMPLEX:
        return b.times(o.sign(x))
    is_zero = o.eq(b.result, 0.0)
    unit = o.where(is_zero, 0.0, o.truediv(x, o.where(is_zero, 1.0, b.result)))
    return o.mul(unit, b.grad)


def _real(b: Backward) -> Tensor:
    if b["x"].dtype.category < Category.COMPLEX:
        return b.grad
    return b.ops.complex(b.grad, b.ops.mul(b.grad, 0.0))


def _imag(b: Backward) -> Tensor:
    return b.ops.complex(b.ops.mul(b.grad, 0.0), b.grad)


def _mul(b: Backward) -> dict[str, Tensor]:
    x, y = b["a"], b["b"]
    if is_tensor(x) and is_tensor(y) and x.id == y.id:
        return {"a": b.times(b.ops.mul(x, 2.0))}
    return dict(_mul_apart(b))


_mul_apart = elementwise(a=lambda b: b.times(b["b"]), b=lambda b: b.times(b["a"]))


def _divided_by(b: Backward) -> Tensor:
    """-grad * result / b; where b was broadcast, summed first and then divided."""
    total = sum_to(b, b.times(b.result), b["b"])
    return b.ops.neg(b.ops.truediv(total, b.conj(b["b"])))


def _remainder_divisor(b: Backward) -> Tensor:
    """Minus grad times the quotient rounded down.

    The rounded quotient of floating point numbers may be the next whole number, so it is found from the remainder.
    """
    o, x, y = b.ops, b["a"], b["b"]
    rest = o.fmod(x, y)
    is_above = o.logical_and(o.ne(rest, 0), o.ne(o.lt(rest, 0), o.lt(y, 0)))
    quotient = o.sub(o.truediv(o.sub(x, rest), y), o.where(is_above, 1.0, 0.0))
    return o.neg(b.times(o.round(o.where(o.eq(y, 0), o.truediv(x, y), quotient))))


def _fmod_divisor(b: Backward) -> Tensor:
    """Minus grad times the quotient rounded towards 0."""
    return b.ops.neg(b.times(b.ops.trunc(b.ops.truediv(b["a"], b["b"]))))


def _chosen(other_is_taken: str) -> Vjp:
    """maximum and minimum: the larger (smaller) operand gets all, equal ones half each, and NaN makes both get all."""

    def part(mine: str, other: str) -> Callable[[Backward], Tensor]:
        def grad(b: Backward) -> Tensor:
            x, y = b[mine], b[other]
            shared = b.ops.where(b.ops.eq(x, y), b.ops.mul(b.grad, 0.5), b.grad)
            return b.ops.where(getattr(b.ops, other_is_taken)(x, y), 0.0, shared)

        return grad

    return elementwise(a=part("a", "b"), b=part("b", "a"))


def _base(b: Backward) -> Tensor:
    """grad * b * a^(b - 1), 0 where b is 0."""
    o, x, exponent = b.ops, b["a"], b["b"]
    if isinstance(exponent, (int, float)):
        if exponent == 0:
            return o.mul(b.grad, 0.0)
        power = x if exponent == 2 else o.pow(x, exponent - 1)
        return b.times(o.mul(power, exponent))
    slope = o.mul(exponent, o.pow(x, o.sub(exponent, 1)))
    return o.where(o.eq(exponent, 0), 0.0, b.times(slope))


def _exponent(b: Backward) -> Tensor:
    """grad * result * log(a), 0 where a power of 0 is 0 or 1."""
    o, x = b.ops, b["a"]
    if isinstance(x, (int, float)) and x:
        return b.times(o.mul(b.result, math.log(x) if x > 0 else math.nan))
    log = o.log(x) if is_tensor(x) else -math.inf
    is_flat = o.logical_and(o.eq(x, 0), _is_finite_power_of_0(b))
    return b.times(o.where(is_flat, 0.0, o.mul(b.result, log)))


def _is_finite_power_of_0(b: Backward) -> Tensor:
    """Whether 0 to this power is a number: the exponent is real and not negative."""
    o, exponent = b.ops, b["b"]
    if not is_tensor(exponent) or exponent.dtype.category < Category.COMPLEX:
        return o.ge(exponent, 0)
    return o.logical_and(o.ge(o.real(exponent), 0), o.eq(o.imag(exponent), 0))


def _angle(name: str, sign: float) -> Callable[[Backward], Tensor]:
    """atan2: minus the other operand over the square of the distance; 0 at the origin, as in torch."""

    def grad(b: Backward) -> Tensor:
        o, x, y = b.ops, b["a"], b["b"]
        square = o.add(o.mul(x, x), o.mul(y, y))
        return o.mul(b.grad, o.where(o.eq(square, 0.0), 0.0, o.truediv(o.mul(b[name], sign), square)))

    return grad


def _where(kept: bool) -> Callable[[Backward], Tensor]:
    def grad(b: Backward) -> Tensor:
        return b.ops.where(b["condition"], *((b.grad, 0.0) if kept else (0.0, b.grad)))

    return grad


def _clamp(b: Backward) -> Tensor:
    """`grad` where the result is x, bounds included; 0 elsewhere, and everywhere if `min` is above `max`."""
    x, low, high = b["x"], b["min"], b["max"]
    kept = b.ops.eq(x, b.result)
    if not (low is None or high is None or _is_interval(low, high)):
        kept = b.ops.logical_and(kept, b.ops.ge(x, low))
    return b.ops.where(kept, b.grad, 0.0)


def _is_interval(low: Any, high: Any) -> bool:
    """Whether the bounds are numbers that are known to be in order."""
    return isinstance(low, (int, float)) and isinstance(high, (int, float)) and low <= high


def _relu(b: Backward) -> Tensor:
    return b.ops.where(b.ops.le(b.result, 0.0), 0.0, b.grad)


def _threshold(b: Backward) -> Tensor:
    return b.ops.where(b.ops.le(b["x"], b["threshold"]), 0.0, b.grad)


POINTWISE: dict[str, Vjp] = {
    **{name: _derivative(formula) for name, formula in _DERIVATIVES.items()},
    **{name: _divisor(formula) for name, formula in _DIVISORS.items()},
    **dict.fromkeys(_CONSTANT, nothing),
    "abs": each(x=_abs),
    "relu": each(x=_relu),
    "frac": each(x=_same),
    "neg": each(x=_negative),
    "real": each(x=_real),
    "imag": each(x=_imag),
    "add": elementwise(a=_same, b=_same),
    "sub": elementwise(a=_same, b=_subtracted),
    "mul": _mul,
    "div": elementwise(a=lambda b: b.over(b["b"]), b=_divided_by),
    "truediv": elementwise(a=lambda b: b.over(b["b"]), b=_divided_by),
    "maximum": _chosen("lt"),
    "minimum": _chosen("gt"),
    "pow": elementwise(a=_base, b=_exponent),
    "remainder": elementwise(a=_same, b=_remainder_divisor),
    "fmod": elementwise(a=_same, b=_fmod_divisor),
    "mod": elementwise(a=_same, b=_fmod_divisor),
    "atan2": elementwise(a=_angle("b", 1.0), b=_angle("a", -1.0)),
    "complex": elementwise(a=lambda b: b.ops.real(b.grad), b=lambda b: b.ops.imag(b.grad)),
    "where": elementwise(a=_where(True), b=_where(False)),
    "addcmul": elementwise(
        a=_same,
        b=lambda b: b.times(b.ops.mul(b["c"], b["value"])),
        c=lambda b: b.times(b.ops.mul(b["b"], b["value"])),
    ),
    "clamp": each(x=_clamp),
    "lerp": elementwise(
        start=lambda b: b.times(b.ops.sub(1.0, b["weight"])),
        end=lambda b: b.times(b["weight"]),
        weight=lambda b: b.times(b.ops.sub(b["end"], b["start"])),
    ),
    "threshold": each(x=_threshold),
    "cast": each(arg=_same),
    "set": each(arg=_same),
    "segment_set": each(arg=_same),
}
