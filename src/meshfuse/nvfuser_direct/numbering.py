"""The numbers that scalars have in nvFuser's texts, where the sizes of dims are scalars, too."""

from __future__ import annotations

from ..definition.builder import DefinitionBuilder
from ..dtypes import scalar_dtype
from ..ops.base import ScalarRef, TensorRef


def scalar_numbers(fd: DefinitionBuilder) -> dict[int, int]:
    """The number of every scalar but those that texts write as plain numbers: 1 (after the zero that each fusion begins
    with), and one more for each dim of an input and each scalar before it.
    """
    numbers: dict[int, int] = {}
    before = 1
    for step in fd.history:
        if isinstance(step, TensorRef):
            before += fd.tensors[step.id].type.ndim
        elif isinstance(step, ScalarRef) and not is_plain(fd, step):
            numbers[step.id] = before
            before += 1
    return numbers


def is_plain(fd: DefinitionBuilder, ref: ScalarRef) -> bool:
    """Whether a scalar is a constant of the type that its number has by itself."""
    made = fd.scalars[ref.id]
    return made.op == "const" and scalar_dtype(made.operands[0]) is made.dtype
