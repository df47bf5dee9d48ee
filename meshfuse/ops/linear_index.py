"""Indices of several dims as one index of these dims merged."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..dtypes import DataType
from ..errors import user_error
from ..kernels.indices import checked
from ..kernels.table import kernel
from .opdef import Call, Emit, OpDef, Sample
from .rules import Rule, RuleBuilder
from .shape_arithmetic import broadcast_shapes, check_index, known_size, pointwise_rule_dims
from .values import Param, ParamKind, TensorType
from .vjp import nothing

K = ParamKind


def _infer(call: Call) -> tuple[TensorType, ...]:
    if len(call["sizes"]) != len(call.types):
        raise user_error("linear_index: sizes", str(list(call["sizes"])), f"{len(call.types)} sizes",
                         "Give the size of the dim that each index is of.")  # fmt: skip
    for index in call.types:
        check_index(call, index)
    return (TensorType(broadcast_shapes(call.op.name, [t.shape for t in call.types]), DataType.Int),)


def _rule(call: Call) -> Rule:
    builder = RuleBuilder()
    operands, result = pointwise_rule_dims(builder, call.results[0].shape, [t.shape for t in call.types])
    return builder.build(operands, [result])


def _emit(e: Emit) -> str:
    options = f"{[known_size(n) for n in e.call['sizes']]}, {e.call['from_end']}"
    return f"K.linear_index([{', '.join(e.operands)}], {options})"


@kernel
def linear_index(indices: Sequence[torch.Tensor], sizes: Sequence[int], from_end: bool) -> torch.Tensor:
    """The index in row-major order; with `from_end` negative ones count from the end of their dim.

    Raises IndexOutOfRange.
    """
    found = None
    for index, n in zip(indices, sizes, strict=True):
        here = checked(torch.where(index < 0, index.long() + n, index) if from_end else index, n)
        found = here if found is None else found * n + here
    assert found is not None
    return found


def _reference(indices: Sequence[torch.Tensor], sizes: Sequence[int], _: bool) -> torch.Tensor:
    found = torch.zeros((), dtype=torch.int64)
    for index, n in zip(indices, sizes, strict=True):
        found = found * n + index % n
    return found


def _samples() -> list[Sample]:
    rows, columns = TensorType((4, 1), DataType.Int), TensorType((6,), DataType.Int32)
    return [
        Sample(([rows, columns], [3, 8]), values={0: (0, 2, -3, 1), 1: (7, 0, -8, 3, 3, -1)}),
        Sample(([columns], [8], False), values={0: (7, 0, 1, 3, 3, 2)}),
    ]


OPS = (
    OpDef("linear_index", (Param("indices", K.TENSORS), Param("sizes", K.SHAPE), Param("from_end", K.BOOL, True)),
          _infer, _rule, _emit,
          samples=_samples, vjp=nothing, nvfuser="an index that a dim has not is an error that torch raises",
          reference=_reference, about="indices of several dims as one index of these dims merged, in row-major order"),
)  # fmt: skip
