"""nvFuser's own sentences for wrong calls: scripts and tests written for it look for them in an error's text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ..definition.checks import number_fits, plain_number
from ..definition.tensor_view import TensorView, Val
from ..dtypes import DataType, from_torch
from ..errors import MeshfuseError
from .active import NvfuserDefinition
from .numbering import scalar_numbers

# How nvFuser spells the types that C++ spells in another way.
_CPP = {
    DataType.Half: "__half", DataType.BFloat16: "__bfloat", DataType.Int: "int64_t", DataType.Int32: "int",
    DataType.ComplexFloat: "std::complex<float>", DataType.ComplexDouble: "std::complex<double>",
}  # fmt: skip


def add_sentence(error: MeshfuseError, sentence: str | None) -> None:
    """Add nvFuser's sentence to an error, if there is one."""
    if sentence is not None:
        error.args = (f"{error.args[0]} {sentence}", *error.args[1:])


def unfit_argument(fd: NvfuserDefinition, arguments: Sequence[Any]) -> str | None:
    """nvFuser's sentence for the first argument that its input cannot be bound to; None where that is not wrong."""
    numbers, pairs = scalar_numbers(fd.recording), zip(fd.fusion.inputs(), arguments, strict=False)
    found = (_unfit(place, value, argument, numbers) for place, (value, argument) in enumerate(pairs))
    return next((sentence for sentence in found if sentence is not None), None)


def _unfit(place: int, value: TensorView | Val, argument: Any, numbers: Mapping[int, int]) -> str | None:
    if isinstance(value, Val):
        letter = "i" if value.dtype in (DataType.Int, DataType.Int32) else value.dtype.name[0].lower()
        return _unfit_scalar(f"Expected input {place}, {letter}{numbers[value.ref.id]},", value.dtype, argument)
    expected = f"Expected input {place}, {value},"
    if not isinstance(argument, torch.Tensor):
        return f"{expected} to be an at::Tensor but got scalar {_number(argument)}."
    wanted, found = _cpp(value.dtype), _cpp(_type_of(argument))
    if wanted != found:
        return f"{expected} to be bound to a tensor of dtype {wanted}, but got a tensor of dtype {found}."
    if value.ndim != argument.dim():
        return f"{expected} to be bound to a tensor of rank {value.ndim}, but got a tensor of rank {argument.dim()}."
    return None


def _unfit_scalar(expected: str, dtype: DataType, argument: Any) -> str | None:
    if isinstance(argument, torch.Tensor):
        if argument.dim() == 0:
            return None
        return f"{expected} to be a scalar but got {_cpp(_type_of(argument))} tensor of rank {argument.dim()}."
    number = plain_number(argument)
    if isinstance(number, (bool, int, float, complex)) and not number_fits(number, dtype):
        return f"Scalar value {_number(number)} is not compatible with the expected data type: {_cpp(dtype)}."
    return None


def _type_of(tensor: torch.Tensor) -> DataType | None:
    try:
        return from_torch(tensor.dtype)
    except ValueError:
        return None


def _cpp(dtype: DataType | None) -> str:
    return "unknown" if dtype is None else _CPP.get(dtype, dtype.name.lower())


def _number(value: Any) -> str:
    """A number as C++ prints it; anything else by its type."""
    if isinstance(value, complex):
        return f"({value.real:g},{value.imag:g})"
    return f"{value:g}" if isinstance(value, (int, float)) else f"of type {type(value).__name__}"
