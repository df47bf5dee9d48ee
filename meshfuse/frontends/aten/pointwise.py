"""aten ops that work element by element."""

from __future__ import annotations

from typing import Any

from ...definition.tensor_view import TensorView
from ...dtypes import Category, DataType, from_torch
from .table import RULES, Translation, aten, rule

_FUNCTIONS = (
    "abs", "acos", "acosh", "asin", "asinh", "atan", "atanh", "cos", "cosh", "erf", "erfc", "erfinv", "exp", "exp2",
    "expm1", "lgamma", "log", "log10", "log1p", "log2", "reciprocal", "rsqrt", "sigmoid", "sin", "sinh", "sqrt", "tan",
    "tanh", "silu", "ceil", "floor", "round", "sign", "trunc", "relu", "frac", "neg", "isinf", "isnan", "logical_not",
    "bitwise_not", "signbit", "real", "imag",
)  # fmt: skip
_COMPARISONS = ("eq", "ne", "lt", "le", "gt", "ge")
_BITWISE = ("bitwise_and", "bitwise_or", "bitwise_xor")
_LOGICAL = ("logical_and", "logical_or")


def _enter_functions() -> None:
    for name in _FUNCTIONS:
        overload = getattr(aten, name, None)
        if overload is not None and "default" in overload.overloads():
            RULES[overload.default] = _function(name)


def _function(name: str) -> Any:
    """The rule of a function of one number. Integers are floats before a function that makes floats of them."""

    def write(t: Translation, x: TensorView) -> TensorView:
        made_float = t.dtype.category is Category.FLOAT and x.dtype.category < Category.FLOAT
        return t.fd.call(name, [t.cast(x, t.dtype) if made_float else x])

    return write


def _enter_binary() -> None:
    for name in _COMPARISONS:
        for overload in ("Tensor", "Scalar"):
            RULES[getattr(getattr(aten, name), overload)] = _binary(name)
    for name in _BITWISE:
        for overload in ("Tensor", "Scalar"):
            RULES[getattr(getattr(aten, name), overload)] = _binary(name)
    for name in (*_LOGICAL, "maximum", "minimum", "atan2", "nextafter"):
        RULES[getattr(aten, name).default] = _binary(name)
    for name in ("remainder", "fmod"):
        for overload in ("Tensor", "Scalar"):
            RULES[getattr(getattr(aten, name), overload)] = _binary(name)


def _binary(name: str) -> Any:
    def write(t: Translation, a: Any, b: Any) -> TensorView:
        return t.fd.call(name, [a, b])

    return write


_enter_functions()
_enter_binary()


@rule(aten.logical_xor.default)
def _logical_xor(t: Translation, a: TensorView, b: TensorView) -> TensorView:
    return t.ops.ne(t.cast(a, DataType.Bool), t.cast(b, DataType.Bool))


@rule(aten.sgn.default)
def _sgn(t: Translation, x: TensorView) -> TensorView:
    """The sign; of a complex number that on the unit circle with its angle."""
    if x.dtype.category is not Category.COMPLEX:
        return t.ops.sign(x)
    size = t.ops.abs(x)
    return t.ops.where(t.ops.eq(size, 0.0), t.full(0, [], x.dtype), t.ops.truediv(x, size))


@rule(aten.add.Tensor, aten.add.Scalar)
def _add(t: Translation, a: TensorView, b: Any, alpha: Any = 1) -> TensorView:
    return _sum(t, "add", a, b, alpha)


@rule(aten.sub.Tensor, aten.sub.Scalar)
def _sub(t: Translation, a: TensorView, b: Any, alpha: Any = 1) -> TensorView:
    return _sum(t, "sub", a, b, alpha)


@rule(aten.rsub.Tensor, aten.rsub.Scalar)
def _rsub(t: Translation, a: TensorView, b: Any, alpha: Any = 1) -> TensorView:
    return _sum(t, "sub", b, a, alpha)


def _sum(t: Translation, name: str, a: Any, b: Any, alpha: Any) -> TensorView:
    """a plus or minus alpha times b; of two bools it is an integer to be cast, or their union."""
    if t.dtype is DataType.Bool:
        return t.ops.logical_or(a, b)
    return t.fd.call(name, [a, b if alpha == 1 else t.ops.mul(b, alpha)])


@rule(aten.mul.Tensor, aten.mul.Scalar)
def _mul(t: Translation, a: TensorView, b: Any) -> TensorView:
    return t.ops.logical_and(a, b) if t.dtype is DataType.Bool else t.ops.mul(a, b)


@rule(aten.div.Tensor, aten.div.Scalar)
def _div(t: Translation, a: TensorView, b: Any) -> TensorView:
    return t.ops.truediv(a, b)


@rule(aten.div.Tensor_mode, aten.div.Scalar_mode)
def _div_mode(t: Translation, a: TensorView, b: Any, rounding_mode: str | None = None) -> TensorView:
    """Integers are divided as such: `remainder` has the divisor's sign, so that what is left divides exactly."""
    if rounding_mode is None:
        return t.ops.truediv(a, b)
    if t.dtype.category is Category.FLOAT:
        quotient = t.ops.truediv(a, b)
        return t.ops.floor(quotient) if rounding_mode == "floor" else t.ops.trunc(quotient)
    if rounding_mode == "floor":
        a = t.ops.sub(a, t.ops.remainder(a, b))
    return t.ops.div(a, b)


@rule(aten.floor_divide.default)
def _floor_divide(t: Translation, a: TensorView, b: Any) -> TensorView:
    return _div_mode(t, a, b, "floor")


@rule(aten.pow.Tensor_Scalar, aten.pow.Tensor_Tensor, aten.pow.Scalar)
def _pow(t: Translation, a: Any, b: Any) -> TensorView:
    if isinstance(b, (int, float)) and isinstance(a, TensorView):
        if b == 1:
            return a
        if b == 2:
            return t.ops.mul(a, a)
        if b == 3:
            return t.ops.mul(t.ops.mul(a, a), a)
    return t.ops.pow(a, b)


@rule(aten.clamp.default, aten.clamp.Tensor)
def _clamp(t: Translation, x: TensorView, low: Any = None, high: Any = None) -> TensorView:
    if isinstance(low, TensorView) or isinstance(high, TensorView):
        x = x if low is None else t.ops.maximum(x, low)
        return x if high is None else t.ops.minimum(x, high)
    return t.ops.clamp(x, low, high)


@rule(aten.clamp_min.default, aten.clamp_min.Tensor)
def _clamp_min(t: Translation, x: TensorView, low: Any) -> TensorView:
    return _clamp(t, x, low)


@rule(aten.clamp_max.default, aten.clamp_max.Tensor)
def _clamp_max(t: Translation, x: TensorView, high: Any) -> TensorView:
    return _clamp(t, x, None, high)


@rule(aten.where.self, aten.where.ScalarOther, aten.where.ScalarSelf)
def _where(t: Translation, condition: TensorView, a: Any, b: Any) -> TensorView:
    """Operands are cast first: torch promotes them before it picks."""
    a, b = (t.cast(x, t.dtype) if isinstance(x, TensorView) else x for x in (a, b))
    return t.ops.where(t.cast(condition, DataType.Bool), a, b)


@rule(aten.masked_fill.Scalar, aten.masked_fill.Tensor)
def _masked_fill(t: Translation, x: TensorView, mask: TensorView, value: Any) -> TensorView:
    return t.ops.where(mask, t.cast(value, t.dtype) if isinstance(value, TensorView) else value, x)


@rule(aten.lerp.Scalar, aten.lerp.Tensor)
def _lerp(t: Translation, start: TensorView, end: TensorView, weight: Any) -> TensorView:
    return t.ops.lerp(start, end, weight)


@rule(aten.addcmul.default)
def _addcmul(t: Translation, x: TensorView, a: TensorView, b: TensorView, value: Any = 1) -> TensorView:
    product = t.ops.mul(a, b)
    return t.ops.add(x, product if value == 1 else t.ops.mul(product, value))


@rule(aten._to_copy.default)
def _to_copy(t: Translation, x: TensorView, dtype: Any = None, **_: Any) -> TensorView:
    return x if dtype is None else t.cast(x, from_torch(dtype))


@rule(
    aten.clone.default, aten.detach.default, aten.alias.default, aten.lift_fresh_copy.default, aten.contiguous.default,
    aten.lift_fresh.default, aten.resolve_conj.default, aten.resolve_neg.default,
)  # fmt: skip
def _same(t: Translation, x: TensorView, **_: Any) -> TensorView:
    return x


@rule(aten.copy.default)
def _copy(t: Translation, x: TensorView, source: TensorView, non_blocking: bool = False) -> TensorView:
    return t.expand(t.cast(source, x.dtype), x.type.shape)


@rule(aten.complex.default)
def _complex(t: Translation, a: TensorView, b: TensorView) -> TensorView:
    return t.ops.complex(a, b)


@rule(aten.gelu.default)
def _gelu(t: Translation, x: TensorView, *, approximate: str = "none") -> TensorView:
    return t.ops.gelu(x, approximate)
