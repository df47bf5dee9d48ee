"""Arithmetic of two and three numbers, element by element.

Gradients at kinks, ties, NaN and infinities are those of torch; a NaN operand gives a NaN gradient.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ..dtypes import Category, DataType
from ..errors import DtypeError, user_error
from ..kernels.table import kernel
from .opdef import NvfuserEmit, Partial
from .pointwise import binary, both_tensors, nvfuser_arithmetic, nvfuser_integral, pointwise
from .promotion import floating, keep, promoted
from .vjp import Backward, Tensor, Vjp, each, elementwise, is_tensor, sum_to

# sums, products, quotients ----------------------------------------------------------------------------------------


@kernel
def div(a: Any, b: Any) -> torch.Tensor:
    """Division; of two integers an integer, rounded towards zero (as in C)."""
    a, b = both_tensors(a, b)
    if a.dtype.is_floating_point or a.dtype.is_complex or b.dtype.is_floating_point or b.dtype.is_complex:
        return a / b
    return torch.div(a, b, rounding_mode="trunc")


@kernel
def lerp(start: Any, end: Any, weight: Any) -> torch.Tensor:
    """Linear interpolation: `start` at weight 0, `end` at weight 1."""
    return start + weight * (end - start)


def _lerp_nvfuser(n: NvfuserEmit) -> Any:
    """Casts the result: nvFuser computes with numbers first, in their own type."""
    return n.ops.cast(nvfuser_arithmetic(n), n.dtype(n.call.results[0].dtype))


def _mul_bwd(b: Backward) -> dict[str, Tensor]:
    x, y = b["a"], b["b"]
    if is_tensor(x) and is_tensor(y) and x.id == y.id:
        return {"a": b.times(b.ops.mul(x, 2.0))}
    return dict(_mul_apart(b))


_mul_apart = elementwise(a=lambda b: b.times(b["b"]), b=lambda b: b.times(b["a"]))


def _divisor_bwd(b: Backward) -> Tensor:
    """-grad * result / b; where b was broadcast, summed first and then divided."""
    total = sum_to(b, b.times(b.result), b["b"])
    return b.ops.neg(b.ops.truediv(total, b.conj(b["b"])))


def _same(b: Backward) -> Tensor:
    return b.grad


_QUOTIENT_BWD = elementwise(a=lambda b: b.over(b["b"]), b=_divisor_bwd)
_ADDCMUL_BWD = elementwise(
    a=_same,
    b=lambda b: b.times(b.ops.mul(b["c"], b["value"])),
    c=lambda b: b.times(b.ops.mul(b["b"], b["value"])),
)
_LERP_BWD = elementwise(
    start=lambda b: b.times(b.ops.sub(1.0, b["weight"])),
    end=lambda b: b.times(b["weight"]),
    weight=lambda b: b.times(b.ops.sub(b["end"], b["start"])),
)

# remainders -------------------------------------------------------------------------------------------------------


@kernel
def remainder(a: Any, b: Any) -> torch.Tensor:
    """The remainder with the sign of the divisor."""
    return torch.remainder(a, b)


@kernel
def fmod(a: Any, b: Any) -> torch.Tensor:
    """The remainder with the sign of the dividend."""
    return torch.fmod(*both_tensors(a, b))


@kernel
def gcd(a: Any, b: Any) -> torch.Tensor:
    return torch.gcd(*both_tensors(a, b))


def _remainder_divisor(b: Backward) -> Tensor:
    """Minus grad times the quotient rounded down.

    A rounded floating point quotient may be off by one, therefore it is computed from the remainder.
    """
    o, x, y = b.ops, b["a"], b["b"]
    rest = o.fmod(x, y)
    is_above = o.logical_and(o.ne(rest, 0), o.ne(o.lt(rest, 0), o.lt(y, 0)))
    quotient = o.sub(o.truediv(o.sub(x, rest), y), o.where(is_above, 1.0, 0.0))
    return o.neg(b.times(o.round(o.where(o.eq(y, 0), o.truediv(x, y), quotient))))


def _fmod_divisor(b: Backward) -> Tensor:
    """Minus grad times the quotient rounded towards 0."""
    return b.ops.neg(b.times(b.ops.trunc(b.ops.truediv(b["a"], b["b"]))))


# the greater, the less, bounds ------------------------------------------------------------------------------------


@kernel
def maximum(a: Any, b: Any) -> torch.Tensor:
    return torch.maximum(*both_tensors(a, b))


@kernel
def minimum(a: Any, b: Any) -> torch.Tensor:
    return torch.minimum(*both_tensors(a, b))


def _extreme_bwd(other_is_taken: str) -> Vjp:
    """The larger (smaller) operand gets the gradient, equal operands half each; with a NaN both get all of it."""

    def part(mine: str, other: str) -> Callable[[Backward], Tensor]:
        def grad(b: Backward) -> Tensor:
            x, y = b[mine], b[other]
            shared = b.ops.where(b.ops.eq(x, y), b.ops.mul(b.grad, 0.5), b.grad)
            return b.ops.where(getattr(b.ops, other_is_taken)(x, y), 0.0, shared)

        return grad

    return elementwise(a=part("a", "b"), b=part("b", "a"))


def _clamp_bwd(b: Backward) -> Tensor:
    """`grad` where the result is x, bounds included; 0 elsewhere, and everywhere if `min` is above `max`."""
    x, low, high = b["x"], b["min"], b["max"]
    kept = b.ops.eq(x, b.result)
    if not (low is None or high is None or _is_interval(low, high)):
        kept = b.ops.logical_and(kept, b.ops.ge(x, low))
    return b.ops.where(kept, b.grad, 0.0)


def _is_interval(low: Any, high: Any) -> bool:
    """Whether the bounds are numbers that are known to be in order."""
    return isinstance(low, (int, float)) and isinstance(high, (int, float)) and low <= high


def _threshold_bwd(b: Backward) -> Tensor:
    return b.ops.where(b.ops.le(b["x"], b["threshold"]), 0.0, b.grad)


# powers -----------------------------------------------------------------------------------------------------------


@kernel
def pow(a: Any, b: Any) -> torch.Tensor:
    return torch.pow(a, b)


def _base_bwd(b: Backward) -> Tensor:
    """grad * b * a^(b - 1), 0 where b is 0."""
    o, x, exponent = b.ops, b["a"], b["b"]
    if isinstance(exponent, (int, float)):
        if exponent == 0:
            return o.mul(b.grad, 0.0)
        power = x if exponent == 2 else o.pow(x, exponent - 1)
        return b.times(o.mul(power, exponent))
    slope = o.mul(exponent, o.pow(x, o.sub(exponent, 1)))
    return o.where(o.eq(exponent, 0), 0.0, b.times(slope))


def _exponent_bwd(b: Backward) -> Tensor:
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


# angles, neighbours -----------------------------------------------------------------------------------------------


@kernel
def atan2(a: Any, b: Any) -> torch.Tensor:
    return torch.atan2(*both_tensors(a, b))


def _angle_bwd(name: str, sign: float) -> Callable[[Backward], Tensor]:
    """Minus the other operand over the square of the distance; 0 at the origin, as in torch."""

    def grad(b: Backward) -> Tensor:
        o, x, y = b.ops, b["a"], b["b"]
        square = o.add(o.mul(x, x), o.mul(y, y))
        return o.mul(b.grad, o.where(o.eq(square, 0.0), 0.0, o.truediv(o.mul(b[name], sign), square)))

    return grad


@kernel
def nextafter(a: Any, b: Any) -> torch.Tensor:
    return torch.nextafter(*both_tensors(a, b))


def _single_or_double(dtypes: Sequence[DataType]) -> DataType:
    """The promoted type, Float or Double. Raises DefinitionError for others, for which torch has no next number."""
    dtype = promoted(dtypes)
    if dtype not in (DataType.Float, DataType.Double):
        raise user_error("nextafter: operand type", dtype.name, "Float or Double", "Cast the operands.",
                         cls=DtypeError)  # fmt: skip
    return dtype


_INT, _INTEGERS = DataType.Int, (Category.INTEGER,)
OPS = (
    binary("add", "a + b", "({a} + {b})", partial=Partial.JOINT, vjp=elementwise(a=_same, b=_same)),
    binary("sub", "a - b", "({a} - {b})", partial=Partial.JOINT,
           vjp=elementwise(a=_same, b=lambda b: b.ops.neg(sum_to(b, b.grad, b["b"])))),
    binary("mul", "a * b", "({a} * {b})", partial=Partial.EACH, vjp=_mul_bwd),
    binary("div", "a / b; of integers the quotient cut towards 0, as C has it; `a // b` as well", "K.div({a}, {b})",
           partial=Partial.OVER, domain=(0.2, 4.0), jumps=True, vjp=_QUOTIENT_BWD),
    binary("truediv", "a / b, in floating point", "({a} / {b})", floating, partial=Partial.OVER, domain=(0.2, 4.0),
           vjp=_QUOTIENT_BWD),
    binary("maximum", "the greater of a and b", "K.maximum({a}, {b})", partial=Partial.MAX, vjp=_extreme_bwd("lt")),
    binary("minimum", "the less of a and b", "K.minimum({a}, {b})", partial=Partial.MIN, vjp=_extreme_bwd("gt")),
    binary("pow", "a to the power b; `a ** b` as well", "K.pow({a}, {b})", domain=(0.2, 3.0),
           vjp=elementwise(a=_base_bwd, b=_exponent_bwd)),
    binary("remainder", "a - b * floor(a / b): the sign is b's", "K.remainder({a}, {b})", domain=(0.2, 4.0),
           jumps=True, vjp=elementwise(a=_same, b=_remainder_divisor)),
    binary("fmod", "a - b * trunc(a / b): the sign is a's", "K.fmod({a}, {b})", domain=(0.2, 4.0),
           jumps=True, vjp=elementwise(a=_same, b=_fmod_divisor)),
    binary("mod", "remainder, the sign is a's; `a % b` as well", "K.fmod({a}, {b})", dtype=_INT, domain=(0.2, 4.0),
           jumps=True, vjp=elementwise(a=_same, b=_fmod_divisor)),
    binary("gcd", "greatest common divisor", "K.gcd({a}, {b})", dtype=_INT, accepts=_INTEGERS,
           nvfuser=nvfuser_integral),
    binary("atan2", "angle of the point (b, a), in radians", "K.atan2({a}, {b})", floating,
           jumps=True, vjp=elementwise(a=_angle_bwd("b", 1.0), b=_angle_bwd("a", -1.0))),
    binary("nextafter", "the next number after a towards b", "K.nextafter({a}, {b})", _single_or_double,
           dtype=DataType.Double, jumps=True),
    pointwise("addcmul", "a b c value", "({a} + {value} * ({b} * {c}))", keep, "a + value * b * c", numbers=(0.5,),
              vjp=_ADDCMUL_BWD),
    pointwise("clamp", "x min max", "torch.clamp({x}, {min}, {max})", promoted,
              "x, at least min and at most max; None for no bound", numbers=(-0.5, 0.5), vjp=each(x=_clamp_bwd)),
    pointwise("lerp", "start end weight", "K.lerp({start}, {end}, {weight})", keep, "start + weight * (end - start)",
              nvfuser=_lerp_nvfuser, vjp=_LERP_BWD),
    pointwise("threshold", "x threshold value", "K.where({x} <= {threshold}, {value}, {x})", promoted,
              "x where it is greater than the threshold, else the value", numbers=(0.1, 2.0),
              jumps=True, vjp=each(x=_threshold_bwd)),
)  # fmt: skip
