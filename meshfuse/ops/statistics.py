"""Mean and variance over dims: var, var_mean, welford."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from ..dtypes import Category, DataType
from ..errors import DtypeError, user_error
from ..kernels.table import kernel
from .nvfuser_lowering import cast
from .opdef import Call, Emit, Lowering, NvfuserEmit, OpDef, Sample, ToTorch, Writing, cast_to
from .promotion import cast_text, dtype_text, widen
from .reductions import keeps_dims, kept_factors, reduced_dims, reduced_shape
from .rules import FactorKind, Rule, RuleBuilder
from .values import Param, ParamKind, TensorRef, TensorType
from .vjp import Backward, Tensor, each, kept, numel_along, restored

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
    return [_like(r, moment, dims, ttype) for moment, ttype in found]


def _like(r: Writing, moment: TensorRef, dims: tuple[int, ...], ttype: TensorType) -> TensorRef:
    """A moment in this type; dims of size 1 that the type does not have are dropped."""
    kept = moment if r.type(moment).ndim == ttype.ndim else r.call("squeeze", moment, list(dims))
    return cast_to(r, kept, ttype.dtype)


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
    _check_real(n)
    return _listed_dims(n)


def _welford_emit(e: Emit) -> str:
    return f"K.welford({e.operands[0]}, {list(reduced_dims(e.call))})"


@kernel
def welford(x: torch.Tensor, dims: list[int]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(mean, sum of squared differences from it, count) over the dims."""
    wide = x.float() if x.dtype in (torch.float16, torch.bfloat16) else x
    var, mean = torch.var_mean(wide, dims, correction=0)
    count = math.prod(x.shape[d] for d in dims)
    return mean.to(x.dtype), (var * count).to(x.real.dtype), torch.full(mean.shape, count, device=x.device)


def _check_real(n: NvfuserEmit) -> None:
    """Raises ToTorch for complex numbers: nvFuser squares their differences, where torch takes the absolute square."""
    if n.call.types[0].dtype.category is Category.COMPLEX:
        raise ToTorch("nvFuser's variance of complex numbers is complex")


def _welford_nvfuser(n: NvfuserEmit) -> Any:
    """With the count as Int; nvFuser gives its index type."""
    _check_real(n)
    dtype = n.call.types[0].dtype
    mean, spread, count = _listed_dims(n)
    mean, spread = (cast(n, t, widen(dtype), dtype) for t in (mean, spread))
    return mean, spread, n.ops.cast(count, n.dtype(DataType.Int))


def _over(b: Backward, grad: Tensor, numerator: float, n: Any) -> Tensor:
    """grad * numerator / n; NaN for n = 0, as the division of an open n gives."""
    if isinstance(n, int):
        return b.ops.mul(grad, numerator / n if n else float("nan"))
    return b.ops.truediv(b.ops.mul(grad, numerator), n)


def _deviation(b: Backward, mean: Tensor, grad: Tensor, n: Any) -> Tensor:
    """2 / n * grad * (x - mean); mean and grad have the reduced dims of size 1."""
    return b.ops.mul(_over(b, grad, 2.0, n), b.ops.sub(b["arg"], mean))


def _degrees_of_freedom(b: Backward) -> Any:
    """The divisor of a variance: n - correction."""
    return numel_along(b["arg"], b.dims) - b["correction"]


def _var_vjp(b: Backward) -> Tensor:
    x, dims = b["arg"], b.dims
    mean = b.ops.truediv(b.ops.sum(x, dims, True), numel_along(x, dims))
    return _deviation(b, mean, kept(b, b.grad, x, dims, b["keepdim"]), _degrees_of_freedom(b))


def _moments_vjp(b: Backward, spread: int, mean: int, n: Any, keepdim: bool) -> Tensor:
    """The operand's gradient from those of two results: squared deviations over n (at place `spread`), and a mean."""
    x, dims = b["arg"], b.dims
    parts: list[Tensor] = []
    if b.grads[spread] is not None:
        grad = kept(b, b.grads[spread], x, dims, keepdim)
        parts.append(_deviation(b, kept(b, b.results[mean], x, dims, keepdim), grad, n))
    if b.grads[mean] is not None:
        share = _over(b, kept(b, b.grads[mean], x, dims, keepdim), 1.0, numel_along(x, dims))
        parts.append(share if parts else restored(b, share, x, dims, True))
    return parts[0] if len(parts) == 1 else b.ops.add(*parts)


def _var_mean_vjp(b: Backward) -> Tensor:
    return _moments_vjp(b, 0, 1, _degrees_of_freedom(b), b["keepdim"])


def _welford_vjp(b: Backward) -> Tensor:
    """Its second result is the sum of squared deviations."""
    return _moments_vjp(b, 1, 0, 1, False)


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
        vjp=each(arg=_var_vjp),
        order_free=("arg",),
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
        vjp=each(arg=_var_mean_vjp),
        order_free=("arg",),
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
        vjp=each(arg=_welford_vjp),
        order_free=("arg",),
        samples=lambda: [Sample((_EXAMPLE, [1]))],
        nvfuser=_welford_nvfuser,
        distributed=_distributed,
        about="mean, sum of squared differences from it, and count, over `dims`",
    ),
)
