"""Scalars of a definition: inputs, sizes of tensors and arithmetic on them, kept as expressions."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .dtypes import Category, DataType, promote
from .ops.base import ScalarRef, TensorRef

Operand = Any  # ScalarRef, TensorRef (of `size`) or a Python number


@dataclass(frozen=True, slots=True)
class ScalarDef:
    """One scalar: an input ("input"), a constant ("const"), the size of a tensor's dim ("size") or an op on others."""

    op: str
    operands: tuple[Operand, ...]
    dtype: DataType


def _c_div(a: Any, b: Any) -> Any:
    """Division as in C: integers stay integers, rounded towards zero (and all their digits right)."""
    if not (isinstance(a, int) and isinstance(b, int)):
        return a / b
    quotient = abs(a) // abs(b)
    return quotient if (a < 0) == (b < 0) else -quotient


def _c_mod(a: Any, b: Any) -> Any:
    return a - b * _c_div(a, b) if isinstance(a, int) and isinstance(b, int) else math.fmod(a, b)


def _within_64_bits(value: Any) -> Any:
    """The number. Raises OverflowError for an int that no type holds: numbers that grow would never be done."""
    if isinstance(value, int) and value.bit_length() > 64:
        raise OverflowError("an int of more than 64 bits")
    return value


def _pow(a: Any, b: Any) -> Any:
    if isinstance(a, int) and isinstance(b, int) and abs(a) > 1 and b > 64:
        raise OverflowError("an int of more than 64 bits")
    return _within_64_bits(a**b)


def _left_shift(a: Any, b: Any) -> Any:
    return _within_64_bits(a << min(b, 65))


FUNCTIONS: dict[str, Callable[..., Any]] = {
    "add": lambda a, b: a + b, "sub": lambda a, b: a - b, "mul": lambda a, b: a * b,
    "div": _c_div, "truediv": lambda a, b: a / b, "mod": _c_mod, "fmod": math.fmod,
    "remainder": lambda a, b: a % b, "pow": _pow, "maximum": max, "minimum": min,
    "atan2": math.atan2, "gcd": math.gcd, "nextafter": math.nextafter,
    "eq": lambda a, b: a == b, "ne": lambda a, b: a != b, "lt": lambda a, b: a < b, "le": lambda a, b: a <= b,
    "gt": lambda a, b: a > b, "ge": lambda a, b: a >= b,
    "logical_and": lambda a, b: bool(a) and bool(b), "logical_or": lambda a, b: bool(a) or bool(b),
    "bitwise_and": lambda a, b: a & b, "bitwise_or": lambda a, b: a | b, "bitwise_xor": lambda a, b: a ^ b,
    "bitwise_left_shift": _left_shift, "bitwise_right_shift": lambda a, b: a >> b,
    "neg": lambda a: -a, "abs": abs, "logical_not": lambda a: not a, "bitwise_not": lambda a: ~a,
    "ceil": math.ceil, "floor": math.floor, "round": round, "trunc": math.trunc, "reciprocal": lambda a: 1.0 / a,
    "sqrt": math.sqrt, "rsqrt": lambda a: 1.0 / math.sqrt(a), "relu": lambda a: max(a, 0),
    "sign": lambda a: (a > 0) - (a < 0),
    "sigmoid": lambda a: 1.0 / (1.0 + math.exp(-a)), "silu": lambda a: a / (1.0 + math.exp(-a)),
    **{name: getattr(math, name) for name in (
        "acos", "acosh", "asin", "asinh", "atan", "atanh", "cos", "cosh", "erf", "erfc", "exp", "expm1", "lgamma",
        "log", "log10", "log1p", "log2", "sin", "sinh", "tan", "tanh", "isfinite", "isinf", "isnan")},
    "where": lambda c, a, b: a if c else b, "clamp": lambda x, low, high: min(max(x, low), high),
    "lerp": lambda a, b, w: a + w * (b - a), "addcmul": lambda a, b, c, v: a + v * b * c,
    "threshold": lambda x, t, v: x if x > t else v,
    "signbit": lambda a: math.copysign(1.0, a) < 0, "frac": lambda a: a - math.trunc(a), "exp2": lambda a: 2.0**a,
    "isneginf": lambda a: a == -math.inf, "isposinf": lambda a: a == math.inf,
    "isreal": lambda a: complex(a).imag == 0, "complex": complex,
    "set": lambda a: a, "segment_set": lambda a: a, "real": lambda a: a.real, "imag": lambda a: a.imag,
}  # fmt: skip
_PREDICATES = frozenset(
    (
        "eq",
        "ne",
        "lt",
        "le",
        "gt",
        "ge",
        "logical_and",
        "logical_or",
        "logical_not",
        "isfinite",
        "isinf",
        "isnan",
        "isneginf",
        "isposinf",
        "isreal",
        "signbit",
    )
)
_INTEGRAL = frozenset(
    ("add", "sub", "mul", "div", "mod", "remainder", "pow", "maximum", "minimum", "gcd", "neg", "abs", "relu", "sign",
     "bitwise_and", "bitwise_or", "bitwise_xor", "bitwise_not", "bitwise_left_shift", "bitwise_right_shift", "set",
     "segment_set", "where", "clamp")
)  # fmt: skip


def result_dtype(op: str, operands: list[DataType]) -> DataType:
    """The type of a scalar op's result."""
    if op in _PREDICATES:
        return DataType.Bool
    out = operands[0]
    for dtype in operands[1:]:
        out = promote(out, dtype)
    if op == "complex":
        return DataType.ComplexDouble
    if op in ("real", "imag", "abs"):
        out = out.real
    return out if op in _INTEGRAL or out.category >= Category.FLOAT else DataType.Double


def evaluate(
    ref: Operand, scalars: Mapping[int, ScalarDef], values: Mapping[int, Any], size: Callable[[TensorRef, int], int]
) -> Any:
    """The value of a scalar: `values` holds the inputs' by number; `size` tells the sizes of tensors.

    Raises KeyError where an input has no value.
    """
    found: dict[int, Any] = {}
    for number in _in_order(ref, scalars):
        made = scalars[number]
        if made.op == "input":
            found[number] = values[number]
        elif made.op == "size":
            found[number] = size(*made.operands)
        else:
            operands = [found[o.id] if isinstance(o, ScalarRef) else o for o in made.operands]
            found[number] = _computed(made, operands)
    return found[ref.id] if isinstance(ref, ScalarRef) else ref


def _computed(made: ScalarDef, operands: list[Any]) -> Any:
    if made.op == "const":
        return operands[0]
    if made.op == "cast":
        return python_cast(operands[0], made.dtype)
    return _within_64_bits(FUNCTIONS[made.op](*operands))


def steps(inputs: tuple[Any, ...], *made: tuple[Any, ...]) -> Any:
    """The last of the scalars made step by step: (op, operands), of which [i] is the i-th scalar so far."""
    values = list(inputs)
    for op, *operands in made:
        found = [values[o[0]] if isinstance(o, list) else o for o in operands]
        values.append(_within_64_bits(SCOPE[op](*found)))
    return values[-1]


# What programs' text calls as S: functions of scalars, and the casts between their types.
SCOPE: dict[str, Callable[..., Any]] = {**FUNCTIONS, "bool": bool, "int": int, "float": float, "steps": steps}
# The longest scalar that is written as one expression: what several read would be written again for each of them.
_LONGEST = 24


def scalar_text(
    ref: ScalarRef, scalars: Mapping[int, ScalarDef], size: Callable[[TensorRef, int], int], plain: Callable[[Any], str]
) -> str:
    """Python text of a scalar: a number, an input's name, an expression of them, or steps where that would be long."""
    order, known = _in_order(ref, scalars), {}
    for number in order:
        made = scalars[number]
        if made.op in _LEAVES:
            known[number] = _leaf(number, made, size, plain)
            continue
        op, operands = _called(made)
        words = [known[o.id] if isinstance(o, ScalarRef) else plain(o) for o in operands]
        known[number] = f"S[{op!r}]({', '.join(words)})"
        if known[number].count("S[") > _LONGEST:
            return _steps_text(order, scalars, size, plain)
    return known[ref.id]


_LEAVES = ("input", "const", "size")


def _leaf(number: int, made: ScalarDef, size: Callable[[TensorRef, int], int], plain: Callable[[Any], str]) -> str:
    if made.op == "input":
        return f"s{number}"
    return plain(made.operands[0]) if made.op == "const" else str(size(*made.operands))


def _called(made: ScalarDef) -> tuple[str, tuple[Operand, ...]]:
    """The function, by its name in SCOPE, and the operands of a scalar that is made of others."""
    if made.op != "cast":
        return made.op, made.operands
    return ("bool", "int", "float", "complex")[made.dtype.category], made.operands[:1]


def _steps_text(
    order: Sequence[int],
    scalars: Mapping[int, ScalarDef],
    size: Callable[[TensorRef, int], int],
    plain: Callable[[Any], str],
) -> str:
    """A call of `steps`: the leaves, then each scalar by the places of its operands."""
    ordered = sorted(order, key=lambda number: scalars[number].op not in _LEAVES)
    places = {number: f"[{place}]" for place, number in enumerate(ordered)}
    leaves = "".join(f"{_leaf(n, scalars[n], size, plain)}, " for n in ordered if scalars[n].op in _LEAVES)
    made = [_called(scalars[n]) for n in ordered if scalars[n].op not in _LEAVES]
    words = [[repr(op), *(places[o.id] if isinstance(o, ScalarRef) else plain(o) for o in given)] for op, given in made]
    calls = ", ".join(f"({', '.join(entry)})" for entry in words)
    return f"S['steps'](({leaves}), {calls})"


def _in_order(ref: Operand, scalars: Mapping[int, ScalarDef]) -> list[int]:
    """The numbers of the scalars that one is made of, operands first (an op's are made before it), itself last."""
    found: set[int] = set()
    ahead = [ref] if isinstance(ref, ScalarRef) else []
    while ahead:
        number = ahead.pop().id
        if number not in found:
            found.add(number)
            ahead += [o for o in scalars[number].operands if isinstance(o, ScalarRef)]
    return sorted(found)


def python_cast(value: Any, dtype: DataType) -> Any:
    """The number as the Python type that stands for a DataType's category."""
    return (bool, int, float, complex)[dtype.category](value)


def inputs_of(ref: Operand, scalars: Mapping[int, ScalarDef]) -> frozenset[int]:
    """The scalar inputs that a scalar depends on."""
    return frozenset(number for number in _in_order(ref, scalars) if scalars[number].op == "input")
