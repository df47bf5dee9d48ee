"""Element types under nvFuser's names, and how they promote."""

from __future__ import annotations

import enum
import math

from .errors import shown, user_error


class Category(enum.IntEnum):
    """Kinds of element types, in promotion order."""

    BOOL = 0
    INTEGER = 1
    FLOAT = 2
    COMPLEX = 3


class DataType(enum.Enum):
    """An element type; its value is torch's name for it."""

    Double = "float64"
    Float = "float32"
    Half = "float16"
    BFloat16 = "bfloat16"
    Float8_e4m3fn = "float8_e4m3fn"
    Float8_e5m2 = "float8_e5m2"
    Float8_e8m0fnu = "float8_e8m0fnu"
    Float4_e2m1fn = "float4_e2m1fn_x2"
    Float4_e2m1fn_x2 = "float4_e2m1fn_x2"
    Int = "int64"
    Index = "int64"
    Int32 = "int32"
    Int16 = "int16"
    Char = "int8"
    Byte = "uint8"
    UInt64 = "uint64"
    Bool = "bool"
    ComplexFloat = "complex64"
    ComplexDouble = "complex128"
    Null = "null"

    # Enum's own __hash__ is written in Python, and most look-ups have types in their keys.
    __hash__ = object.__hash__

    def __repr__(self) -> str:
        return f"DataType.{self.name}"

    def __call__(self) -> DataType:
        """Itself: `tv.dtype()`, a method in nvFuser, means the same as `tv.dtype`."""
        return self

    @property
    def itemsize(self) -> int:
        """Bytes per element."""
        return _ITEMSIZE[self]

    @property
    def category(self) -> Category:
        return _CATEGORY[self]

    @property
    def is_reduced_float(self) -> bool:
        return self.category is Category.FLOAT and self.itemsize < 4

    @property
    def term_type(self) -> DataType:
        """The type in which ranks keep the terms of a sum of this type: one with float32's range, as sums have it."""
        return DataType.Float if self in _NARROW else self

    @property
    def real(self) -> DataType:
        """The type of the real part: itself unless complex."""
        return {DataType.ComplexFloat: DataType.Float, DataType.ComplexDouble: DataType.Double}.get(self, self)


_ITEMSIZE = {
    DataType.Double: 8, DataType.Float: 4, DataType.Half: 2, DataType.BFloat16: 2,
    DataType.Float8_e4m3fn: 1, DataType.Float8_e5m2: 1, DataType.Float8_e8m0fnu: 1, DataType.Float4_e2m1fn: 1,
    DataType.Int: 8, DataType.Int32: 4, DataType.Int16: 2, DataType.Char: 1, DataType.Byte: 1,
    DataType.UInt64: 8, DataType.Bool: 1, DataType.ComplexFloat: 8, DataType.ComplexDouble: 16, DataType.Null: 0,
}  # fmt: skip

_INTEGERS = (DataType.Byte, DataType.Char, DataType.Int16, DataType.Int32, DataType.Int, DataType.UInt64)
_COMPLEX = (DataType.ComplexFloat, DataType.ComplexDouble)
_CATEGORY = {
    **dict.fromkeys(DataType, Category.FLOAT),
    **dict.fromkeys(_INTEGERS, Category.INTEGER),
    **dict.fromkeys(_COMPLEX, Category.COMPLEX),
    DataType.Bool: Category.BOOL,
}
# Small float types, none of which holds all numbers of another.
_INCOMPARABLE = (
    DataType.Half, DataType.BFloat16, DataType.Float8_e4m3fn, DataType.Float8_e5m2, DataType.Float8_e8m0fnu,
)  # fmt: skip
# Float types with less range than float32, in which sums of them are accumulated.
_NARROW = frozenset((DataType.Half, *_INCOMPARABLE[2:]))
_RANK = {dtype: place for place, dtype in enumerate((
    DataType.Bool, *_INTEGERS, DataType.Float4_e2m1fn, DataType.Float8_e8m0fnu, DataType.Float8_e5m2,
    DataType.Float8_e4m3fn, DataType.Half, DataType.BFloat16, DataType.Float, DataType.Double, *_COMPLEX,
))}  # fmt: skip


def promote(a: DataType, b: DataType) -> DataType:
    """The type that holds both: for two tensors as in torch, for 8-bit floats as in nvFuser.

    Raises DefinitionError for UInt64 with another integer type, which neither of them promotes.
    """
    if a is b:
        return a
    low, high = sorted((a, b), key=_RANK.__getitem__)
    if low in _INCOMPARABLE and high in _INCOMPARABLE:
        return DataType.Float
    if low is DataType.Byte and high is DataType.Char:
        return DataType.Int16
    if high is DataType.UInt64:
        raise user_error("operands whose types promote to none", f"{a.name} and {b.name}", "types that torch promotes",
                         "Cast one of them.")  # fmt: skip
    if high is DataType.ComplexFloat and low is DataType.Double:
        return DataType.ComplexDouble
    return high


def scalar_dtype(value: object) -> DataType:
    """The type of a Python number: Bool, Int, Double or ComplexDouble."""
    if isinstance(value, bool):
        return DataType.Bool
    if isinstance(value, int):
        return DataType.Int
    return DataType.ComplexDouble if isinstance(value, complex) else DataType.Double


def is_negative_zero(value: complex) -> bool:
    """Whether a Python number is -0.0, or a complex 0 with such a part."""
    return value == 0 and -1.0 in (math.copysign(1.0, value.real), math.copysign(1.0, value.imag))


def from_torch(dtype: object) -> DataType:
    """The DataType of a `torch.dtype` (or of a DataType). Raises ValueError for a type meshfuse has no name for."""
    if isinstance(dtype, DataType):
        return dtype
    try:
        return DataType(str(dtype).removeprefix("torch."))
    except Exception:  # no such name, or nothing that can be printed
        raise ValueError(f"dtype: found {shown(dtype)}, needed one of {[d.value for d in DataType]}") from None
