"""The numbers that scalars have in nvFuser's texts, in which the sizes of dims are scalars, too."""

from __future__ import annotations

from typing import Any

from ..definition.recording import Recording
from ..dtypes import DataType, scalar_dtype
from ..ops.values import ScalarRef, TensorRef


def scalar_numbers(recording: Recording) -> dict[int, int]:
    """The number of every scalar but the plain ones.

    Numbers begin at 1, after the zero that each fusion begins with; each dim of an input and each earlier scalar takes
    one.
    """
    numbers: dict[int, int] = {}
    plain, before = plain_scalars(recording), 1
    for step in recording.history:
        if isinstance(step, TensorRef):
            before += recording.tensors[step.id].type.ndim
        elif isinstance(step, ScalarRef) and step.id not in plain:
            numbers[step.id] = before
            before += 1
    return numbers


def plain_scalars(recording: Recording) -> dict[int, Any]:
    """The constants that texts write as plain numbers.

    They have the type that the number itself has, and no other scalar is computed from them: on plain numbers alone
    Python would compute. A True is no such constant: beside other numbers it would be an int.
    """
    read = {
        operand.id for made in recording.scalars.values() for operand in made.operands if isinstance(operand, ScalarRef)
    }
    constants = {i: made for i, made in recording.scalars.items() if made.op == "const" and i not in read}
    return {i: m.operands[0] for i, m in constants.items() if _is_natural(m.operands[0], m.dtype)}


def _is_natural(number: Any, dtype: DataType) -> bool:
    return dtype is not DataType.Bool and scalar_dtype(number) is dtype
