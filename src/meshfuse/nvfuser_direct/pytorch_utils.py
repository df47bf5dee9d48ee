"""torch's element types and nvFuser's."""

from __future__ import annotations

from typing import Any

import torch

from ..dtypes import DataType, from_torch, scalar_dtype

_SCALARS = {bool: DataType.Bool, int: DataType.Int, float: DataType.Double, complex: DataType.ComplexDouble}


def torch_dtype_to_nvfuser_dtype(dtype: Any) -> DataType:
    """The DataType of a torch.dtype or of a Python number type. Raises ValueError for one that has none."""
    return _SCALARS[dtype] if dtype in _SCALARS else from_torch(dtype)


def nvfuser_dtype_to_torch_dtype(dtype: DataType) -> torch.dtype:
    """The torch.dtype of a DataType. Raises ValueError for Null and for types that this torch lacks."""
    found = getattr(torch, dtype.value, None)
    if not isinstance(found, torch.dtype):
        raise ValueError(f"dtype: found {dtype!r}, needed a type that torch {torch.__version__} has")
    return found


def python_scalar_to_nvfuser_dtype(value: bool | int | float | complex) -> DataType:
    """The DataType of a Python number."""
    return scalar_dtype(value)
