"""Shape arithmetic and checks that op families share: unknown sizes, broadcasting, dims, numbers."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from ..dtypes import Category, DataType
from ..errors import DtypeError, user_error
from .opdef import Call
from .rules import DimFactors, FactorKind, Rule, RuleBuilder
from .values import ScalarRef, TensorRef, TensorType

UNKNOWN = -1


def known_size(n: object) -> int:
    """A size as passed to an op; UNKNOWN for a scalar of the definition."""
    return UNKNOWN if isinstance(n, ScalarRef) else int(n)  # type: ignore[call-overload]


def broadcast_size(a: int, b: int) -> int | None:
    """The size of two dims broadcast together; None where they do not fit. Unknown sizes fit anything."""
    if a == b:
        return a
    if a == 1 or b == 1:
        return b if a == 1 else a
    if a == UNKNOWN or b == UNKNOWN:
        return max(a, b)
    return None


def broadcast_shapes(op: str, shapes: Sequence[Sequence[int]]) -> tuple[int, ...]:
    """The shape of operands aligned at their last dims. Raises DefinitionError where two sizes differ."""
    ndim = max((len(shape) for shape in shapes), default=0)
    out = [1] * ndim
    for shape in shapes:
        for back in range(1, len(shape) + 1):
            size = broadcast_size(out[-back], shape[-back])
            if size is None:
                raise user_error(
                    f"{op}: shapes do not fit together", " and ".join(str(list(s)) for s in shapes),
                    f"equal sizes, or 1, in dim {-back}", "Broadcast or reshape one of them.",
                )  # fmt: skip
            out[-back] = size
    return tuple(out)


def agree(shape: Sequence[int], wanted: Sequence[int]) -> bool:
    """Whether two shapes are the same, as far as they are known."""
    return len(shape) == len(wanted) and all(n == m or UNKNOWN in (n, m) for n, m in zip(shape, wanted, strict=True))


def broadcasts_to(shape: Sequence[int], result: Sequence[int]) -> bool:
    """Whether an operand can be broadcast to exactly this shape."""
    pairs = zip(reversed(shape), reversed(result), strict=False)
    return len(shape) <= len(result) and all(n in (1, m) or UNKNOWN in (n, m) for n, m in pairs)


def aligned_dims(shape: Sequence[int], result: Sequence[int], factors: DimFactors) -> DimFactors:
    """The factors of an operand that is broadcast to a result: those of the result's dims; () for dims of size 1."""
    offset = len(result) - len(shape)
    return tuple(
        factors[offset + d] if n == result[offset + d] else () for d, n in enumerate(shape)
    )  # fmt: skip


def one_dim_widths(ndim: int, dim: int, before: int, after: int) -> list[int]:
    """The widths that pad one dim: pairs from the last dim backwards, as `pad` takes them."""
    return [0] * (2 * (ndim - 1 - dim)) + [before, after]


def shape_along(ndim: int, dim: int, n: int) -> list[int]:
    """n for one dim, 1 for all others."""
    return [n if d == dim else 1 for d in range(ndim)]


def check_dim(op: str, dim: int, ndim: int) -> int:
    """The dim counted from the front. Raises DefinitionError where there is none."""
    if not -ndim <= dim < ndim:
        needed = f"a dim from {-ndim} to {ndim - 1}" if ndim else "a tensor with dims"
        raise user_error(
            f"{op}: dim out of range",
            f"dim {dim} of a tensor of {ndim} dims",
            needed,
            "Pass an existing dim.",
        )
    return dim % ndim


def dim_of(call: Call) -> int:
    """A call's `dim` of its first operand, counted from the front. Raises DefinitionError where there is none."""
    return check_dim(call.op.name, call["dim"], call.types[0].ndim)


def with_size(shape: Sequence[int], dim: int, n: int) -> tuple[int, ...]:
    """The sizes, with n for one dim."""
    return (*shape[:dim], n, *shape[dim + 1 :])


def check_dims(op: str, dims: int | Iterable[int] | None, ndim: int) -> tuple[int, ...]:
    """The dims counted from the front, ascending; all of them for None.

    Raises DefinitionError for a dim that is given twice.
    """
    if dims is None:
        return tuple(range(ndim))
    listed = [dims] if isinstance(dims, int) else list(dims)
    found = [check_dim(op, dim, ndim) for dim in listed]
    if len(set(found)) != len(found):
        raise user_error(f"{op}: a dim is given twice", f"dims {listed}", "each dim once", "Remove the repeated dim.")
    return tuple(sorted(found))


def check_reduced(op: str, dims: int | Iterable[int] | None, ndim: int) -> tuple[int, ...]:
    """`check_dims` that refuses an empty list, which means all dims in torch and none in numpy."""
    found = check_dims(op, dims, ndim)
    if not found and ndim:
        raise user_error(f"{op}: dims", "none", "at least one", "Leave dims out for all of them.")
    return found


def check_order(op: str, tensor: TensorType) -> None:
    """Raises DefinitionError for a type whose elements have no order."""
    if tensor.dtype.category is Category.COMPLEX:
        raise user_error(f"{op}: complex numbers have no order", str(tensor), "a real type", "", cls=DtypeError)


def check_ndim(op: str, name: str, tensor: TensorType, low: int, high: int | None = None) -> None:
    """Raises DefinitionError where a tensor has too few or too many dims."""
    if tensor.ndim < low or (high is not None and tensor.ndim > high):
        wanted = f"{low}" if high == low else f"at least {low}" if high is None else f"{low} to {high}"
        raise user_error(
            f"{op}: {name} has the wrong number of dims", f"{tensor.ndim} ({tensor})", f"{wanted} dims",
            "Reshape it, or add or squeeze dims.",
        )  # fmt: skip


def check_same_size(op: str, what: str, a: int, b: int) -> None:
    """Raises DefinitionError where two known sizes differ."""
    if UNKNOWN not in (a, b) and a != b:
        raise user_error(f"{op}: {what} differ", f"{a} and {b}", "equal sizes", "Check the operands' shapes.")


def check_dtypes(call: Call) -> DataType:
    """The one dtype of the operands. Raises DefinitionError where they differ."""
    found = {t.dtype for t in call.types}
    if len(found) > 1:
        raise user_error(
            f"{call.op.name}: operands of different dtypes", ", ".join(t.dtype.name for t in call.types), "one dtype",
            "Cast the operands with fd.ops.cast.", cls=DtypeError,
        )  # fmt: skip
    return call.types[0].dtype


_UNSIGNED = (DataType.Byte, DataType.UInt64)
_LARGEST_FLOAT = 3.4028234663852886e38  # float32


def check_number(op: str, value: object, dtype: DataType) -> None:
    """Raises DefinitionError for a number that tensors of this dtype cannot hold; scalars are only known later."""
    if isinstance(value, complex) and dtype.category < Category.COMPLEX:
        raise user_error(
            f"{op}: a complex number in a real tensor", f"{value} as {dtype.name}", "a complex dtype",
            "Pass DataType.ComplexFloat.",
        )  # fmt: skip
    if isinstance(value, float) and not math.isfinite(value) and dtype.category < Category.FLOAT:
        raise user_error(
            f"{op}: a number that no integer is", f"{value} as {dtype.name}", "a finite number", "Pass another dtype."
        )
    if isinstance(value, (int, float)) and math.isfinite(value) and not _held(value, dtype):
        raise user_error(f"{op}: a number is too large", f"{value} as {dtype.name}", "one that the dtype holds",
                         "Pass another dtype.")  # fmt: skip


def _held(value: float, dtype: DataType) -> bool:
    """Whether a tensor of this dtype can hold a finite number; unsigned ones take negative numbers too, as in torch."""
    if dtype.category is Category.INTEGER:
        low, high = _integer_range(dtype)
        return (low or -high) <= value <= high
    return abs(value) <= _LARGEST_FLOAT if dtype.real is DataType.Float else True


def _integer_range(dtype: DataType) -> tuple[int, int]:
    """The least and the greatest number of an integer type."""
    bits, unsigned = 8 * dtype.itemsize, dtype in _UNSIGNED
    return (0, 2**bits - 1) if unsigned else (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1)


def is_in_range(value: int, dtype: DataType) -> bool:
    """Whether an element of a tensor of this integer type may be the number."""
    low, high = _integer_range(dtype)
    return low <= value <= high


def check_index(call: Call, index: TensorType) -> None:
    """Raises DefinitionError for an index tensor of other than integers."""
    if index.dtype.category is not Category.INTEGER:
        raise user_error(f"{call.op.name}: index", str(index), "integers", "Cast the index to DataType.Int.",
                         cls=DtypeError)  # fmt: skip


def check_place(call: Call, index: object, n: int, dim: str) -> None:
    """Raises DefinitionError for a number that is no index of a dim of size n; a negative one counts from the end."""
    if isinstance(index, int) and n != UNKNOWN and not -n <= index < n:
        raise user_error(f"{call.op.name}: index", str(index), f"{-n} to {n - 1} in {dim}", "Pass an existing index.")


def check_positive(op: str, what: str, n: int) -> None:
    """Raises DefinitionError for a number below 1."""
    if n < 1:
        raise user_error(f"{op}: {what}", str(n), "1 or more", "Pass a positive number.")


def check_fits(op: str, result: TensorType) -> None:
    """Raises DefinitionError for a result that no memory holds, whatever its open sizes will be."""
    if math.prod(max(n, 1) for n in result.shape) * result.dtype.itemsize >= 2**63:
        raise user_error(f"{op}: the result is larger than any memory", str(result), "less than 2**63 bytes", "")


def check_rule(call: Call, rule: Rule) -> None:
    """Raises DefinitionError where an operand lacks the dims or sizes that the op's factor rule gives it.

    A last check for every op, after its own, which have better messages.
    """
    for place, (dims, found) in enumerate(zip(rule.operands, call.types, strict=True)):
        if len(dims) != found.ndim or not all(_made_of(rule, *dim) for dim in zip(dims, found.shape, strict=True)):
            sizes = [math.prod(rule.factors[f].size for f in factors) for factors in dims]
            raise user_error(f"{call.op.name}: operand {_operand_name(call, place)} does not fit the others",
                             str(found), f"the sizes {sizes}", "Check the operands' shapes.")  # fmt: skip


def _made_of(rule: Rule, factors: Sequence[int], size: int) -> bool:
    """Whether the product of these factors is a dim of this size; blocks of a dim may be short or empty."""
    product = math.prod(rule.factors[f].size for f in factors)
    in_blocks = len(factors) > 1 and rule.factors[factors[-1]].kind is FactorKind.BLOCK
    return product == size or (in_blocks and product > size)


def _operand_name(call: Call, place: int) -> str:
    """The name of the parameter that an operand was passed for; its number where a list was passed."""
    names = [param.name for param, arg in zip(call.op.params, call.args, strict=True) if isinstance(arg, TensorRef)]
    return names[place] if len(names) == len(call.types) else str(place)


def pointwise_rule_dims(
    builder: RuleBuilder, result: Sequence[int], shapes: Sequence[Sequence[int]]
) -> tuple[list[DimFactors], DimFactors]:
    """(factors of every operand, factors of the result) of an op that works element by element."""
    factors = builder.dims(result)
    return [aligned_dims(shape, result, factors) for shape in shapes], factors
