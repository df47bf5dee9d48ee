"""Inputs and constants of a recording, as `fd.define_tensor` and its neighbours make them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..argument_checks import as_int, check_flags
from ..dtypes import DataType, scalar_dtype
from ..errors import SourceLine, shown, user_error
from ..ops.values import ScalarRef, TensorRef, TensorType
from ..scalars import ScalarDef
from .annotating import shard
from .checks import are_strides, check_contiguity, checked_dtype, checked_number, checked_order, checked_sizes
from .recording import Recording
from .tensor_view import Val

_MOST_SCALARS = 65536  # Of one define_vector: a larger number is a mistake, and would fill the memory.


def define_tensor(
    recording: Recording, given: Any, contiguity: Any, dtype: Any, stride_order: Any, strides: Any, static_sizes: Any,
    line: SourceLine,
) -> TensorRef:  # fmt: skip
    """A new input tensor of the `given` sizes; with strides, sizes other than 1 are open unless `static_sizes`."""
    if strides is None and contiguity is not None and are_strides(contiguity):
        strides = contiguity
    found = checked_sizes(given, line)
    check_contiguity(contiguity, line)
    if strides is not None and not static_sizes:
        found = _opened(found)
    order = checked_order(stride_order, strides, found, line)
    return recording.new_input(TensorType(found, checked_dtype("define_tensor", dtype, line)), line, order)


def _opened(sizes: Sequence[int]) -> tuple[int, ...]:
    return tuple([n if n == 1 else -1 for n in sizes])


def from_pytorch(recording: Recording, tensor: Any, static_sizes: bool, line: SourceLine) -> TensorRef:
    """A new input tensor like a torch tensor; of a DTensor also its mesh and placements."""
    check_flags(line, static_sizes=static_sizes)
    if not all(hasattr(tensor, name) for name in ("shape", "dtype", "stride")):
        raise user_error("from_pytorch", f"{type(tensor).__name__}", "a torch tensor", "Pass an example tensor.", line)
    shape = tuple(tensor.shape)
    found = shape if static_sizes else _opened(shape)
    dtype = checked_dtype("from_pytorch", tensor.dtype, line)
    made = recording.new_input(TensorType(found, dtype), line, checked_order(None, tensor.stride(), shape, line))
    if hasattr(tensor, "placements"):
        shard(recording, made.id, tensor.placements, tensor.device_mesh, line)
    return made


def define_scalar(recording: Recording, value: Any, dtype: Any, line: SourceLine) -> ScalarRef:
    """A new scalar input, or a constant where a number is given."""
    if isinstance(value, DataType):
        value, dtype = None, value
    found = None if dtype is None else checked_dtype("define_scalar", dtype, line)
    if value is None:
        made = recording.new_scalar(ScalarDef("input", (), found or DataType.Double))
        recording.inputs.append(made)
        return made
    number = checked_number("define_scalar", value, found, line)
    return recording.new_scalar(ScalarDef("const", (number,), found or scalar_dtype(number)))


def define_vector(recording: Recording, size: Any, dtype: Any, line: SourceLine) -> list[Any]:
    """Scalars: `size` inputs, or a constant for each number of a list. Entries that are scalars or -1 stay as they are.

    Raises DefinitionError for anything else.
    """
    count = as_int(size)
    if count is not None and 0 <= count <= _MOST_SCALARS:
        return [define_scalar(recording, None, dtype, line) for _ in range(count)]
    if not isinstance(size, (list, tuple)):
        raise user_error(
            "define_vector", shown(size), f"how many scalars (at most {_MOST_SCALARS}), or a list of numbers", "", line
        )
    return [
        entry if isinstance(entry, Val) or as_int(entry) == -1 else _constant(recording, entry, dtype, line)
        for entry in size
    ]


def _constant(recording: Recording, value: Any, dtype: Any, line: SourceLine) -> ScalarRef:
    return define_scalar(recording, checked_number("define_vector", value, None, line), dtype, line)


def define_size(recording: Recording, tensor: TensorRef, dim: Any, line: SourceLine) -> ScalarRef:
    """The size of a dim as a scalar. Raises DefinitionError for a dim that the tensor does not have."""
    made, place = recording.tensors[tensor.id], as_int(dim)
    ndim = made.type.ndim
    if place is None or not -ndim <= place < ndim:
        raise user_error(
            f"size of {made.label}: no such dim",
            f"{shown(dim)}",
            f"a dim of {made.type}",
            "Pass an existing dim.",
            line,
        )
    return recording.new_scalar(ScalarDef("size", (tensor, place % ndim), DataType.Int))
