"""aten ops that make tensors of numbers, random ones among them."""

from __future__ import annotations

import math
from typing import Any

from ...definition.tensor_view import TensorView
from ...dtypes import Category, DataType
from .table import Translation, aten, rule


@rule(aten.full.default, aten.full_like.default, aten.new_full.default)
def _full(t: Translation, *args: Any, **_: Any) -> TensorView:
    return t.full(args[-1], t.shape, t.dtype)


@rule(
    aten.zeros.default, aten.zeros_like.default, aten.new_zeros.default, aten.empty.memory_format,
    aten.empty_like.default, aten.new_empty.default, aten.empty_permuted.default, aten.empty_strided.default,
    aten.new_empty_strided.default, aten._efficientzerotensor.default,
)  # fmt: skip
def _zeros(t: Translation, *_: Any, **__: Any) -> TensorView:
    return t.full(False if t.dtype is DataType.Bool else 0, t.shape, t.dtype)


@rule(aten.ones.default, aten.ones_like.default, aten.new_ones.default)
def _ones(t: Translation, *_: Any, **__: Any) -> TensorView:
    return t.full(True if t.dtype is DataType.Bool else 1, t.shape, t.dtype)


@rule(aten.scalar_tensor.default)
def _scalar_tensor(t: Translation, value: Any, **_: Any) -> TensorView:
    return t.full(value, [], t.dtype)


@rule(aten.arange.start_step, aten.arange.start, aten.arange.default)
def _arange(t: Translation, *args: Any, **_: Any) -> TensorView:
    start, step = (0 if len(args) == 1 else args[0]), (args[2] if len(args) == 3 else 1)
    return t.ops.iota(t.shape[0], start, step, t.dtype)


@rule(aten.eye.default, aten.eye.m)
def _eye(t: Translation, *_: Any, **__: Any) -> TensorView:
    rows, columns = t.shape
    return t.ops.eq(t.along(t.ops.iota(rows), 0, 2), t.along(t.ops.iota(columns), 1, 2))


# Random numbers follow the global index, so that they are the same on every mesh; they are not torch's.


def _uniform(t: Translation, shape: Any, dtype: DataType) -> TensorView:
    return t.ops.uniform(0.0, 1.0, [int(n) for n in shape], dtype=dtype)


def _wide(dtype: DataType) -> DataType:
    return DataType.Float if dtype.is_reduced_float or dtype.category is not Category.FLOAT else dtype


@rule(aten.rand.default, aten.rand_like.default)
def _rand(t: Translation, *_: Any, **__: Any) -> TensorView:
    return _uniform(t, t.shape, _wide(t.dtype))


@rule(aten.randn.default, aten.randn_like.default)
def _randn(t: Translation, *_: Any, **__: Any) -> TensorView:
    return t.ops.normal(0.0, 1.0, t.shape, dtype=_wide(t.dtype))


@rule(aten.bernoulli.p)
def _bernoulli_p(t: Translation, x: TensorView, p: float = 0.5, **_: Any) -> TensorView:
    return t.ops.lt(_uniform(t, t.shape, DataType.Float), p)


@rule(aten.bernoulli.default)
def _bernoulli(t: Translation, p: TensorView, **_: Any) -> TensorView:
    return t.ops.lt(_uniform(t, t.shape, DataType.Float), p)


@rule(aten.bernoulli.Tensor)
def _bernoulli_of(t: Translation, x: TensorView, p: TensorView, **_: Any) -> TensorView:
    return _bernoulli(t, p)


@rule(aten.randperm.default)
def _randperm(t: Translation, n: int, **_: Any) -> TensorView:
    """The order of random numbers."""
    return t.ops.argsort(_uniform(t, [n], DataType.Double), 0, False, True)


@rule(aten.multinomial.default)
def _multinomial(
    t: Translation, weights: TensorView, count: int, replacement: bool = False, **_: Any
) -> TensorView:  # fmt: skip
    """Places drawn by weights that need not sum to 1: the first of exponential waiting times, or by running sums."""
    weights, n = t.computing(weights), weights.type.shape[-1]
    if not replacement:
        waits = t.ops.neg(t.ops.log1p(t.ops.neg(_uniform(t, weights.type.shape, weights.dtype))))
        return t.ops.topk(t.ops.truediv(weights, t.ops.maximum(waits, 1e-30)), count, weights.ndim - 1, True, True)[1]
    sums = t.ops.cumsum(weights, weights.ndim - 1)
    total = t.ops.slice(sums, [*[0] * (sums.ndim - 1), n - 1], list(sums.type.shape))
    drawn = t.ops.mul(_uniform(t, t.shape, weights.dtype), total)
    is_before = t.ops.le(t.unsqueeze(sums, sums.ndim - 1), t.unsqueeze(drawn, drawn.ndim))
    return t.ops.minimum(t.ops.sum(t.cast(is_before, DataType.Int), [is_before.ndim - 1]), n - 1)


@rule(aten.rrelu_with_noise_functional.default)
def _rrelu(
    t: Translation, x: TensorView, noise: TensorView, low: float = 0.125, high: float = 1 / 3, train: bool = False,
    **_: Any,
) -> tuple[TensorView, ...]:  # fmt: skip
    """(slopes times x, slopes): random ones below 0, and 1 above it."""
    if not train:
        return t.ops.where(t.ops.gt(x, 0.0), x, t.ops.mul(x, (low + high) / 2)), noise
    slopes = t.ops.where(t.ops.gt(x, 0.0), 1.0, t.ops.uniform(low, high, t.shape, dtype=_wide(x.dtype)))
    return t.ops.mul(x, slopes), slopes


@rule(aten.range.step, aten.range.default)
def _range(t: Translation, start: Any, end: Any, step: Any = 1, **_: Any) -> TensorView:
    return t.ops.iota(t.shape[0], start, step, t.dtype)


@rule(aten.uniform.default)
def _uniform_between(t: Translation, x: TensorView, low: float = 0.0, high: float = 1.0, **_: Any) -> TensorView:
    return t.ops.uniform(low, high, t.shape, dtype=_wide(t.dtype))


@rule(aten.normal_functional.default)
def _normal(t: Translation, x: TensorView, mean: float = 0.0, std: float = 1.0, **_: Any) -> TensorView:
    return t.ops.normal(mean, std, t.shape, dtype=_wide(t.dtype))


@rule(
    aten.randint.default, aten.randint.low, aten.randint_like.default, aten.randint_like.low_dtype, aten.random.to,
    getattr(aten.random, "from"),
)  # fmt: skip
def _randint(t: Translation, *args: Any, **_: Any) -> TensorView:
    numbers = [a for a in args if isinstance(a, int)]
    low, high = (0, numbers[0]) if len(numbers) == 1 else numbers[:2]
    return t.ops.cast(t.ops.floor(t.ops.uniform(float(low), float(high), t.shape, dtype=DataType.Double)), t.dtype)


@rule(aten.native_dropout.default)
def _native_dropout(t: Translation, x: TensorView, p: float, train: Any = None) -> tuple[TensorView, ...]:
    """(what is kept, divided by 1 - p; which elements are kept)."""
    if train is False or p == 0:
        return x, t.full(True, x.type.shape, DataType.Bool)
    keep = t.ops.ge(_uniform(t, x.type.shape, DataType.Float), p)
    scale = 0.0 if p == 1 else 1 / (1 - p)
    return t.ops.mul(t.ops.mul(t.computing(x), keep), scale), keep


@rule(aten.native_dropout_backward.default)
def _native_dropout_backward(t: Translation, grad: TensorView, mask: TensorView, scale: float) -> TensorView:
    return t.ops.mul(t.ops.mul(t.computing(grad), mask), 0.0 if math.isinf(scale) else scale)
