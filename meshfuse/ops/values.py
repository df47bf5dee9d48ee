"""What ops are called with: types, references to tensors and scalars, and the kinds of parameters."""

from __future__ import annotations

import enum
import math
from dataclasses import dataclass
from typing import Any, NamedTuple

from ..dtypes import DataType


class TensorType(NamedTuple):
    """A tensor's global shape (-1 for a size that only the arguments tell) and element type.

    rows: 0 but for *ragged* tensors, which have the rows of tokens that went to experts: their first two dims are
        experts and tokens, and of these places only so many have a row (`ops/experts.py`).
    """

    shape: tuple[int, ...]
    dtype: DataType
    rows: int = 0

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def numel(self) -> int:
        """The elements that there are."""
        return self.rows * math.prod(self.shape[2:]) if self.rows else math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.numel * self.dtype.itemsize

    def __repr__(self) -> str:
        ragged = f", rows={self.rows}" if self.rows else ""
        return f"TensorType(shape={self.shape!r}, dtype={self.dtype!r}{ragged})"

    def __str__(self) -> str:
        ragged = f", {self.rows} rows" if self.rows else ""
        return f"{self.dtype.name}[{', '.join('?' if n < 0 else str(n) for n in self.shape)}{ragged}]"


class TensorRef(NamedTuple):
    """A tensor of the definition, by number."""

    id: int


class ScalarRef(NamedTuple):
    """A scalar (nvFuser's Val) of the definition, by number, and its type where it is known."""

    id: int
    dtype: DataType | None = None


class ParamKind(enum.Enum):
    """What an op's parameter takes; binding, concretising and printing a call follow from it."""

    TENSOR = "tensor"
    OPTIONAL_TENSOR = "tensor or None"
    TENSORS = "list of tensors"
    TENSOR_OR_SCALAR = "tensor or scalar"
    SCALAR = "scalar"
    OPTIONAL_SCALAR = "scalar or None"
    INT = "int"
    DIM = "dim"
    DIMS = "dim or list of dims"
    OPTIONAL_DIMS = "dim, list of dims or None"
    INTS = "list of ints"
    SIZE = "int or scalar"
    SHAPE = "list of ints or scalars"
    BOOL = "bool"
    BOOLS = "list of bools"
    DTYPE = "DataType"


REQUIRED = object()


@dataclass(frozen=True, slots=True)
class Param:
    """One parameter of an op. `alias` is another keyword it goes by."""

    name: str
    kind: ParamKind
    default: Any = REQUIRED
    alias: str = ""
