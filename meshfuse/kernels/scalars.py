"""What scalars are computed with: Python's numbers, with the results that tensors would give.

Where C's doubles go on with inf or nan Python raises an error; there the result is that of torch's float64.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

Function = Callable[..., Any]


def within_64_bits(value: Any) -> Any:
    """The number. Raises OverflowError for an int of more than 64 bits: ints that grow would take ever longer."""
    if isinstance(value, int) and value.bit_length() > 64:
        raise OverflowError("an int of more than 64 bits")
    return value


def _wrapped(bits: int, signed: bool, value: Any) -> int:
    """The low bits of an int, as a cast to a narrower type leaves them."""
    low = int(value) & ((1 << bits) - 1)
    return low - (1 << bits) if signed and low >> (bits - 1) else low


# Casts of numbers by the types that they give; of other types Python's own stand for them.
NARROW: dict[str, Function] = {
    "int32": functools.partial(_wrapped, 32, True), "int16": functools.partial(_wrapped, 16, True),
    "int8": functools.partial(_wrapped, 8, True), "uint8": functools.partial(_wrapped, 8, False),
}  # fmt: skip


def _are_ints(*numbers: Any) -> bool:
    return all(isinstance(number, int) for number in numbers)


def _c_div(a: Any, b: Any) -> Any:
    """Division as in C: of ints an int, rounded towards zero, and exact at any size."""
    if not _are_ints(a, b):
        return a / b
    quotient = abs(a) // abs(b)
    return quotient if (a < 0) == (b < 0) else -quotient


def _c_mod(a: Any, b: Any) -> Any:
    return a - b * _c_div(a, b) if _are_ints(a, b) else math.fmod(a, b)


def _pow(a: Any, b: Any) -> Any:
    if not _are_ints(a, b):
        return a**b if isinstance(a, complex) or isinstance(b, complex) else math.pow(a, b)
    if b < 0:
        return int(a**b) if abs(a) == 1 else 0
    return within_64_bits(a ** min(b, 65) if abs(a) > 1 else a**b)


def _left_shift(a: Any, b: Any) -> Any:
    return within_64_bits(a << min(b, 65))


def _maximum(a: Any, b: Any) -> Any:
    return a if a != a else b if b != b else max(a, b)


def _minimum(a: Any, b: Any) -> Any:
    return a if a != a else b if b != b else min(a, b)


def _whole(rounding: Callable[[float], int], a: Any) -> Any:
    """A float rounded to a float, which keeps its sign where it becomes zero."""
    return math.copysign(rounding(a), a) if isinstance(a, float) else rounding(a)


PREDICATES: dict[str, Function] = {
    "eq": lambda a, b: a == b, "ne": lambda a, b: a != b, "lt": lambda a, b: a < b, "le": lambda a, b: a <= b,
    "gt": lambda a, b: a > b, "ge": lambda a, b: a >= b,
    "logical_and": lambda a, b: bool(a) and bool(b), "logical_or": lambda a, b: bool(a) or bool(b),
    "logical_not": lambda a: not a, "isfinite": math.isfinite, "isinf": math.isinf, "isnan": math.isnan,
    "isneginf": lambda a: a == -math.inf, "isposinf": lambda a: a == math.inf,
    "isreal": lambda a: complex(a).imag == 0, "signbit": lambda a: math.copysign(1.0, a) < 0,
}  # fmt: skip
# These give an int for ints.
INTEGRAL: dict[str, Function] = {
    "add": lambda a, b: a + b, "sub": lambda a, b: a - b, "mul": lambda a, b: a * b, "div": _c_div, "mod": _c_mod,
    "remainder": lambda a, b: a % b, "pow": _pow, "maximum": _maximum, "minimum": _minimum, "gcd": math.gcd,
    "neg": lambda a: -a, "abs": abs, "relu": lambda a: _maximum(a, type(a)(0)),
    "sign": lambda a: type(a)((a > 0) - (a < 0)),
    "bitwise_and": lambda a, b: a & b, "bitwise_or": lambda a, b: a | b, "bitwise_xor": lambda a, b: a ^ b,
    "bitwise_not": lambda a: not a if isinstance(a, bool) else ~a,
    "bitwise_left_shift": _left_shift, "bitwise_right_shift": lambda a, b: a >> b,
    "set": lambda a: a, "segment_set": lambda a: a, "where": lambda c, a, b: a if c else b,
    "clamp": lambda x, low, high: _minimum(_maximum(x, low), high),
    **{name: functools.partial(_whole, rounding) for name, rounding in (
        ("ceil", math.ceil), ("floor", math.floor), ("round", round), ("trunc", math.trunc))},
    "frac": lambda a: a - math.trunc(a), "fmod": _c_mod, "real": lambda a: a.real,
    "lerp": lambda a, b, w: a + w * (b - a), "addcmul": lambda a, b, c, v: a + v * b * c,
    "threshold": lambda x, t, v: v if x <= t else x,
}  # fmt: skip
_FLOATING: dict[str, Function] = {
    "truediv": lambda a, b: a / b, "atan2": math.atan2, "nextafter": math.nextafter,
    "reciprocal": lambda a: 1.0 / a, "sqrt": math.sqrt, "rsqrt": lambda a: 1.0 / math.sqrt(a),
    "sigmoid": lambda a: 1.0 / (1.0 + math.exp(-a)), "silu": lambda a: a / (1.0 + math.exp(-a)),
    **{name: getattr(math, name) for name in (
        "acos", "acosh", "asin", "asinh", "atan", "atanh", "cos", "cosh", "erf", "erfc", "exp", "expm1", "lgamma",
        "log", "log10", "log1p", "log2", "sin", "sinh", "tan", "tanh")},
    "exp2": lambda a: 2.0**a, "complex": complex, "imag": lambda a: a.imag,
}  # fmt: skip
_IN_TORCH = {"truediv": torch.true_divide, "mod": torch.fmod, "silu": F.silu}


def _as_tensors_do(name: str, function: Function) -> Function:
    """The function, but with the inf or nan of C's doubles where Python raises an error."""

    def computed(*numbers: Any) -> Any:
        try:
            return function(*numbers)
        except (ArithmeticError, ValueError):
            whole = name in INTEGRAL and _are_ints(*numbers)
            in_torch = _IN_TORCH.get(name, getattr(torch, name, None))
            if whole or in_torch is None or any(isinstance(number, complex) for number in numbers):
                raise
            return in_torch(*(torch.tensor(float(n), dtype=torch.float64, device="cpu") for n in numbers)).item()

    return computed


FUNCTIONS: dict[str, Function] = {
    name: _as_tensors_do(name, function) for name, function in {**PREDICATES, **INTEGRAL, **_FLOATING}.items()
}
