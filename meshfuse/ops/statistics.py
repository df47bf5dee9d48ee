"""Mean and variance over dims: var, var_mean, welford."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from ..dtypes import Category, DataType
from ..errors import DtypeError, user_error
from ..gradients.reductions import STATISTICS
from . import nvfuser_forms
from .nvfuser_lowering import cast
from .opdef import Call, Emit, Lowering, NvfuserEmit, OpDef, Sample, Writing, cast_to
from .promotion import cast_text, dtype_text, widen
from .reductions import keeps_dims, kept_factors, reduced_dims, reduced_shape
from .rules import FactorKind, Rule, RuleBuilder
from .values import Param, ParamKind, TensorRef, TensorType

K = ParamKind


def _variance_dtype(dtype: DataType) -> DataType:
    """The type of a variance: real and at least float32; for integers float64, as in nvFuser."""
    return DataType.Double if dtype.category < Category.FLOAT else widen(dtype).real


def _var_infer(call: Call) -> tuple[TensorType, ...]:
    return (TensorType(reduced_shape(call), _variance_dtype(call.types[0].dtype)),)


def _floating_only(call: Call) -> DataType:
    dtype = call.types[0].dtype
    if dtype.category < Category.FLOAT:
        raise user_error(
            f"{call.op.name}: the mean of integers is no integer",
            str(call.types[0]),
            "a floating point type",
            "Cast the operand with fd.ops.cast.",
            cls=DtypeError,
        )
    return dtype


def _var_mean_infer(call: Call) -> tuple[TensorType, ...]:
    dtype = _floating_only(call)
    if dtype.is_reduced_float:
        raise user_error(
            "var_mean: half precision",
            str(call.types[0]),
            "Float or Double",
            "Cast the operand to Float.",
            cls=DtypeError,
        )
    return (TensorType(reduced_shape(call), dtype.real), TensorType(reduced_shape(call), dtype))


def _welford_infer(call: Call) -> tuple[TensorType, ...]:
    shape, dtype = reduced_shape(call), _floating_only(call)
    return (TensorType(shape, dtype), TensorType(shape, dtype.real), TensorType(shape, DataType.Int))


def _rule(call: Call) -> Rule:
    """Kept dims pass through; the op needs the reduced dims whole."""
    dims, builder = reduced_dims(call), RuleBuilder()
    operand = builder.dims(call.types[0].shape, dims, FactorKind.BLOCK)
    result = kept_factors(operand, dims, keeps_dims(call))
    return builder.build([operand], [result] * len(call.results))


def _moments(r: Writing, x: TensorRef, dims: tuple[int, ...], dtype: DataType) -> tuple[TensorRef, TensorRef]:
    """(mean, sum of squared differences from it) over dims, which stay with size 1.

    Two passes (Chan, Golub & LeVeque 1983), each a local sum and one reduction of the result's size. That is as exact
    as on one rank, unlike the difference of sums of squares, and takes no more bytes than merging every rank's mean and
    sum of squares pair by pair. The dims may lie over ranks in any way.
    """
    wide = cast_to(r, x, widen(dtype))
    count = math.prod(r.type(x).shape[d] for d in dims)
    mean = r.call("truediv", r.call("sum", wide, list(dims), True), float(count))
    centred = r.call("sub", wide, mean)
    size = r.call("abs", centred) if r.type(centred).dtype.category is Category.COMPLEX else centred
    return mean, r.call("sum", r.call("mul", size, size), list(dims), True)


def _distributed(
    r: Writing, call: Call, operands: tuple[TensorRef, ...], dim: int, blocks: int
) -> Sequence[TensorRef] | None:
    """The statistics from `_moments`, in the types and dims of the op's own results."""
    dims, count = reduced_dims(call), math.prod(call.types[0].shape[d] for d in reduced_dims(call))
    if not count:
        return None
    mean, squares = _moments(r, operands[0], dims, call.types[0].dtype)
    if call.op.name == "welford":
        total = r.call("full", list(call.results[2].shape), count, DataType.Int)
        return [_like(r, mean, dims, call.results[0]), _like(r, squares, dims, call.results[1]), total]
    variance = r.call("truediv", squares, float(max(0, count - call["correction"])))
    found = zip((variance, mean), call.results, strict=False)
    return [_like(r, moment, dims, kind) for moment, kind in found]


def _like(r: Writing, moment: TensorRef, dims: tuple[int, ...], kind: TensorType) -> TensorRef:
    """A moment in this type; dims of size 1 that the type does not have are dropped."""
    kept = moment if r.type(moment).ndim == kind.ndim else r.call("squeeze", moment, list(dims))
    return cast_to(r, kept, kind.dtype)


def _options(call: Call) -> str:
    return f"{list(reduced_dims(call))}, correction={call['correction']}, keepdim={call['keepdim']}"


def _nothing(e: Emit) -> tuple[str, ...] | None:
    """Texts of empty results, for a rank that computes no element: torch warns of a variance of nothing. Else None."""
    if math.prod(e.result_shapes[0]):
        return None
    pairs = zip(e.result_shapes, e.call.results, strict=True)
    return tuple(f"{e.operands[0]}.new_empty({list(n)}, dtype={dtype_text(t.dtype)})" for n, t in pairs)


def _unless_empty(emit: Lowering) -> Lowering:
    return lambda e: _nothing(e) or emit(e)


def _var_emit(e: Emit) -> str:
    found, made = e.call.types[0].dtype, e.call.results[0].dtype
    wide = found if found.category is Category.COMPLEX else made
    return f"torch.var({cast_text(e.operands[0], found, wide)}, {_options(e.call)})"


def _var_mean_emit(e: Emit) -> str:
    return f"torch.var_mean({e.operands[0]}, {_options(e.call)})"


def _listed_dims(n: NvfuserEmit) -> Any:
    """In Float for half precision and less, as for all reductions."""
    arg = cast(n, n.operands[0], n.call.types[0].dtype, widen(n.call.types[0].dtype))
    return n.plain(arg=arg, dims=list(reduced_dims(n.call)))


def _real_variance(n: NvfuserEmit) -> Any:
    nvfuser_forms.check_real(n)
    return _listed_dims(n)


def _welford_emit(e: Emit) -> str:
    return f"K.welford({e.operands[0]}, {list(reduced_dims(e.call))})"


_ARG = Param("arg", K.TENSOR)
_DIMS = Param("dims", K.OPTIONAL_DIMS, alias="dim")
_MOMENTS = (_ARG, _DIMS, Param("correction", K.INT, 1), Param("keepdim", K.BOOL, False, "keep_dim"))
_EXAMPLE = TensorType((4, 6, 5), DataType.Float)


def _samples() -> list[Sample]:
    return [Sample((_EXAMPLE, [1])), Sample((_EXAMPLE, [0, 2], 0, True))]


OPS = (
    OpDef(
        "var",
        _MOMENTS,
        _var_infer,
        _rule,
        _unless_empty(_var_emit),
        vjp=STATISTICS["var"],
        nvfuser=_real_variance,
        distributed=_distributed,
        samples=lambda: [
            *_samples(),
            Sample((TensorType((4, 6), DataType.Half), [0])),
            Sample((TensorType((4, 6), DataType.Int), [0])),
        ],
        about="variance over `dims`, divided by n - `correction`",
    ),
    OpDef(
        "var_mean",
        _MOMENTS,
        _var_mean_infer,
        _rule,
        _unless_empty(_var_mean_emit),
        vjp=STATISTICS["var_mean"],
        samples=_samples,
        nvfuser=_listed_dims,
        distributed=_distributed,
        about="variance and mean over `dims`, in one pass",
    ),
    OpDef(
        "welford",
        (_ARG, _DIMS),
        _welford_infer,
        _rule,
        _unless_empty(_welford_emit),
        vjp=STATISTICS["welford"],
        samples=lambda: [Sample((_EXAMPLE, [1]))],
        nvfuser=nvfuser_forms.welford,
        distributed=_distributed,
        about="mean, sum of squared differences from it, and count, over `dims`",
    ),
)
