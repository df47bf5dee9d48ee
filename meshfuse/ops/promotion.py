"""Type promotion of elementwise ops, as in nvFuser, and the text of casts."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

from ..dtypes import Category, DataType, promote, scalar_dtype
from .opdef import Call, OpDef
from .values import ParamKind, ScalarRef, TensorRef

K = ParamKind
Promotion = Callable[[Sequence[DataType]], DataType]


def widen(dtype: DataType) -> DataType:
    """The type of arithmetic and its results: at least float32, as in nvFuser."""
    return DataType.Float if dtype.is_reduced_float else dtype


def promoted(dtypes: Sequence[DataType]) -> DataType:
    """The smallest type that holds all of these; half precision stays half."""
    return functools.reduce(promote, dtypes)


def keep(dtypes: Sequence[DataType]) -> DataType:
    """The promoted type; float32 for half precision."""
    return widen(promoted(dtypes))


def floating(dtypes: Sequence[DataType]) -> DataType:
    """The promoted type, at least float32: for functions of real numbers."""
    dtype = promoted(dtypes)
    return DataType.Float if dtype.category < Category.FLOAT else widen(dtype)


def widened_from(call: Call) -> DataType | None:
    """The type of half precision that torch gives the result of a call which nvFuser's rule makes Float; else None.

    It is said by the types alone: one result, of a type that no parameter names, and operands of half precision.
    """
    if len(call.results) != 1 or call.results[0].dtype is not DataType.Float:
        return None
    dtypes = operand_dtypes(call)
    if any(param.kind is K.DTYPE for param in call.op.params) or not dtypes:
        return None
    found = promoted(dtypes)
    return found if found.is_reduced_float else None


def predicate(_: Sequence[DataType]) -> DataType:
    """Bool: the type of comparisons and tests."""
    return DataType.Bool


def complex_dtype(dtypes: Sequence[DataType]) -> DataType:
    """The complex type of two real parts."""
    return DataType.ComplexDouble if promoted(dtypes) is DataType.Double else DataType.ComplexFloat


def operand_dtypes(call: Call) -> list[DataType]:
    """The types that take part in promotion.

    Those of tensors with dims always do; those of 0-d tensors, and after them of scalars, only if their category (bool,
    integer, floating point, complex) is higher than all before.
    """
    names = typed_operands(call.op)
    types = [t for name in names if (t := call.type_of(name)) is not None]
    scalars = [scalar_type(call[name]) for name in names if not isinstance(call[name], TensorRef)]
    out = [t.dtype for t in types if t.ndim]
    for group in ([t.dtype for t in types if not t.ndim], scalars):
        top = max((d.category for d in out), default=-1)
        out += [_beside(d, out) for d in group if d.category > top]
    return out


def typed_operands(op: OpDef) -> list[str]:
    """The parameters that determine the result's type: all but a condition."""
    return [p.name for p in op.params if p.kind in (K.TENSOR, K.TENSOR_OR_SCALAR) and p.name != "condition"]


def scalar_type(value: Any) -> DataType:
    """The type that a number has in promotion; a Python bool counts as an integer, as in nvFuser."""
    found = value.dtype if isinstance(value, ScalarRef) and value.dtype is not None else scalar_dtype(value)
    return DataType.Int if found is DataType.Bool and not isinstance(value, ScalarRef) else found


def _beside(dtype: DataType, others: Sequence[DataType]) -> DataType:
    """The type of a complex number beside tensors: single precision if they are."""
    single = any(d.category is Category.FLOAT for d in others) and DataType.Double not in others
    return DataType.ComplexFloat if dtype is DataType.ComplexDouble and single else dtype


def dtype_text(dtype: DataType) -> str:
    """Python text of the torch dtype."""
    return f"torch.{dtype.value}"


def cast_text(name: str, found: DataType, wanted: DataType) -> str:
    """Python text of a tensor cast to a type; its name where it has that type."""
    return name if found is wanted else f"{name}.to({dtype_text(wanted)})"
