"""Scalars of a definition: inputs, sizes of tensors, and arithmetic on these, kept as expressions."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .dtypes import Category, DataType, promote, scalar_dtype
from .errors import user_error
from .kernels.scalars import FUNCTIONS, INTEGRAL, NARROW, PREDICATES, within_64_bits
from .ops.values import ScalarRef, TensorRef

Operand = Any  # ScalarRef, TensorRef (of `size`) or a Python number


@dataclass(frozen=True, slots=True)
class ScalarDef:
    """One scalar: an input ("input"), a constant ("const"), the size of a tensor's dim ("size") or an op on others."""

    op: str
    operands: tuple[Operand, ...]
    dtype: DataType


_ON_BITS = frozenset((
    "bitwise_and", "bitwise_or", "bitwise_xor", "bitwise_not", "bitwise_left_shift", "bitwise_right_shift", "gcd",
))  # fmt: skip


def result_dtype(op: str, operands: list[DataType]) -> DataType:
    """The type of a scalar op's result. Raises DefinitionError for types that the op does not take."""
    wrong = next((d for d in operands if op in _ON_BITS and d.category > Category.INTEGER), None)
    if wrong is not None:
        raise user_error(f"{op}: operand type", wrong.name, "Bool or integer operands", "Cast the operand.")
    if op in PREDICATES:
        return DataType.Bool
    out = operands[0]
    for dtype in operands[1:]:
        out = promote(out, dtype)
    if op == "complex":
        return DataType.ComplexDouble
    if op in ("real", "imag", "abs"):
        out = out.real
    return out if op in INTEGRAL or out.category >= Category.FLOAT else DataType.Double


def evaluate(
    ref: Operand, scalars: Mapping[int, ScalarDef], values: Mapping[int, Any], size: Callable[[TensorRef, int], int]
) -> Any:
    """The value of a scalar. `values` has those of scalar inputs by number; `size` gives the size of a tensor's dim.

    Raises KeyError where an input has no value.
    """
    found: dict[int, Any] = {}
    for number in in_order(ref, scalars):
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
        return within_64_bits(SCOPE[_kind(made.dtype)](operands[0]))
    return within_64_bits(SCOPE[_kind(made.dtype)](FUNCTIONS[made.op](*operands)))


def steps(inputs: tuple[Any, ...], *made: tuple[Any, ...]) -> Any:
    """The last of some scalars that are computed one by one.

    Each of `made` is (op, operands); an operand [i] is the i-th of the inputs and scalars so far. `steps((3,), ("add",
    [0], 1), ("mul", [1], [1]))` is 16.
    """
    values = list(inputs)
    for op, *operands in made:
        found = [values[o[0]] if isinstance(o, list) else o for o in operands]
        values.append(within_64_bits(SCOPE[op](*found)))
    return values[-1]


# What programs' text calls as S: functions of scalars, and the casts between their types.
SCOPE: dict[str, Callable[..., Any]] = {
    **FUNCTIONS, **NARROW, "bool": bool, "int": int, "float": float, "steps": steps,
}  # fmt: skip
# The longest scalar that is written as one expression: what several read would be written again for each of them.
_LONGEST = 24


def scalar_text(
    ref: ScalarRef, scalars: Mapping[int, ScalarDef], size: Callable[[TensorRef, int], int], plain: Callable[[Any], str]
) -> str:
    """Python text of a scalar: a number, an input's name, an expression, or where that is long a call of `steps`."""
    order, known = in_order(ref, scalars), {}
    for number in order:
        made = scalars[number]
        if made.op in _LEAVES:
            known[number] = _leaf(number, made, size, plain)
            continue
        words = [known[o.id] if isinstance(o, ScalarRef) else plain(o) for o in made.operands[: _taken(made)]]
        text = ", ".join(words)
        for function in _functions(made, scalars):
            text = f"S[{function!r}]({text})"
        known[number] = text
        if known[number].count("S[") > _LONGEST:
            return _steps_text(order, scalars, size, plain)
    return known[ref.id]


_LEAVES = ("input", "const", "size")


def _leaf(number: int, made: ScalarDef, size: Callable[[TensorRef, int], int], plain: Callable[[Any], str]) -> str:
    if made.op == "input":
        return f"s{number}"
    return plain(made.operands[0]) if made.op == "const" else str(size(*made.operands))


def _taken(made: ScalarDef) -> int:
    """How many of its operands are computed with: of a cast's only the first, as the second is its type."""
    return 1 if made.op == "cast" else len(made.operands)


def _functions(made: ScalarDef, scalars: Mapping[int, ScalarDef]) -> list[str]:
    """The functions that make a scalar, by their names in SCOPE, to be applied one after the other.

    The last is a cast, unless the first always gives a number of the scalar's type.
    """
    if made.op == "cast":
        return [_kind(made.dtype)]
    kinds = {_kind(scalars[o.id].dtype if isinstance(o, ScalarRef) else scalar_dtype(o)) for o in made.operands}
    wraps = made.dtype is DataType.Bool or made.dtype.value in NARROW
    sure = made.op in PREDICATES or (kinds == {_kind(made.dtype)} and not wraps)
    return [made.op] if sure else [made.op, _kind(made.dtype)]


def _kind(dtype: DataType) -> str:
    """The name in SCOPE of the cast to a type: the Python type of its category, or a narrower one."""
    return dtype.value if dtype.value in NARROW else ("bool", "int", "float", "complex")[dtype.category]


def _steps_text(
    order: Sequence[int],
    scalars: Mapping[int, ScalarDef],
    size: Callable[[TensorRef, int], int],
    plain: Callable[[Any], str],
) -> str:
    """Text of a call of `steps`: the leaves, then each other scalar with its operands' places."""
    ordered = sorted(order, key=lambda number: scalars[number].op not in _LEAVES)
    given = [number for number in ordered if scalars[number].op in _LEAVES]
    leaves = "".join(f"{_leaf(number, scalars[number], size, plain)}, " for number in given)
    places, calls = {number: f"[{place}]" for place, number in enumerate(given)}, list[str]()
    for number in ordered[len(given) :]:
        made = scalars[number]
        words = [places[o.id] if isinstance(o, ScalarRef) else plain(o) for o in made.operands[: _taken(made)]]
        for function in _functions(made, scalars):
            calls.append(f"({', '.join([repr(function), *words])})")
            words = [f"[{len(given) + len(calls) - 1}]"]
        (places[number],) = words
    return f"S['steps'](({leaves}), {', '.join(calls)})"


def in_order(ref: Operand, scalars: Mapping[int, ScalarDef]) -> list[int]:
    """The numbers of all scalars that one is made of, operands first and itself last.

    An op's operands are always made before it, and so have smaller numbers.
    """
    found: set[int] = set()
    ahead = [ref] if isinstance(ref, ScalarRef) else []
    while ahead:
        number = ahead.pop().id
        if number not in found:
            found.add(number)
            ahead += [o for o in scalars[number].operands if isinstance(o, ScalarRef)]
    return sorted(found)


def python_cast(value: Any, dtype: DataType) -> Any:
    """The number as the Python type of a DataType's category."""
    return (bool, int, float, complex)[dtype.category](value)


def inputs_of(ref: Operand, scalars: Mapping[int, ScalarDef]) -> frozenset[int]:
    """The scalar inputs that a scalar depends on."""
    return frozenset(number for number in in_order(ref, scalars) if scalars[number].op == "input")
