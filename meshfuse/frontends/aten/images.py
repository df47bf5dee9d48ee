"""Gradients of aten's convolutions, and its pooling: by the ops of a definition and their own derivatives."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ...definition.tensor_view import TensorView
from .table import Translation, aten, rule


def _of_batches(spatial: int) -> Any:
    """A rule of pooling for tensors with a batch, also for one item without it."""

    def decorate(write: Any) -> Any:
        def of_any(t: Translation, *args: Any, **kwargs: Any) -> Any:
            if args[0].ndim != spatial + 1:
                return write(t, *args, **kwargs)
            made = write(t, *(t.unsqueeze(x, 0) if isinstance(x, TensorView) else x for x in args), **kwargs)
            found = tuple(t.ops.squeeze(x, [0]) for x in (made if isinstance(made, tuple) else (made,)))
            return found if isinstance(made, tuple) else found[0]

        return of_any

    return decorate


def _pooling(two: Any, three: Any) -> Any:
    """Enter a function for the ops of two and three spatial dims."""

    def enter(write: Any) -> Any:
        rule(two)(_of_batches(2)(write))
        rule(three)(_of_batches(3)(write))
        return write

    return enter


@rule(aten.convolution_backward.default)
def _convolution_gradients(
    t: Translation, grad: TensorView, x: TensorView, weight: TensorView, bias_sizes: Any, stride: Any, padding: Any,
    dilation: Any, transposed: bool, output_padding: Any, groups: int, mask: Sequence[bool],
) -> tuple[TensorView | None, ...]:  # fmt: skip
    """Of input, weight and bias, those in `mask`. The convolution itself is written for its derivative alone."""
    made = t.ops.convolution(x, weight, None, stride, padding, dilation, transposed, output_padding, groups)
    wanted = [operand for operand, needed in zip((x, weight), mask, strict=False) if needed]
    found = iter(t.fd.grad(made, wanted, grad) if wanted else ())
    by_bias = t.ops.sum(grad, [d for d in range(grad.ndim) if d != 1]) if mask[2] else None
    return *(next(found) if needed else None for needed in mask[:2]), by_bias


@_pooling(aten.max_pool2d_with_indices.default, aten.max_pool3d_with_indices.default)
def _max_pool(
    t: Translation, x: TensorView, kernel: Any, stride: Any = (), padding: Any = 0, dilation: Any = 1,
    ceil_mode: bool = False,
) -> tuple[TensorView, ...]:  # fmt: skip
    return t.ops.max_pool(x, kernel, stride or None, padding, dilation, ceil_mode)


@_pooling(aten.max_pool2d_with_indices_backward.default, aten.max_pool3d_with_indices_backward.default)
def _max_pool_gradient(
    t: Translation, grad: TensorView, x: TensorView, kernel: Any, stride: Any, padding: Any, dilation: Any,
    ceil_mode: bool, indices: TensorView,
) -> TensorView:  # fmt: skip
    return t.ops.window_max_bwd(grad, indices, list(x.type.shape[2:]), kernel, stride or kernel, padding, dilation)


@_pooling(aten.avg_pool2d.default, aten.avg_pool3d.default)
def _avg_pool(
    t: Translation, x: TensorView, kernel: Any, stride: Any = (), padding: Any = 0, ceil_mode: bool = False,
    count_include_pad: bool = True, divisor: int | None = None,
) -> TensorView:  # fmt: skip
    return t.ops.avg_pool(x, kernel, stride or None, padding, ceil_mode, count_include_pad, divisor)


@_pooling(aten.avg_pool2d_backward.default, aten.avg_pool3d_backward.default)
def _avg_pool_gradient(
    t: Translation, grad: TensorView, x: TensorView, kernel: Any, stride: Any, padding: Any, ceil_mode: bool,
    count_include_pad: bool, divisor: int | None,
) -> TensorView:  # fmt: skip
    made = _avg_pool(t, x, kernel, stride, padding, ceil_mode, count_include_pad, divisor)
    return t.fd.grad(made, [x], grad)[0]


@_pooling(aten._adaptive_avg_pool2d.default, aten._adaptive_avg_pool3d.default)
def _adaptive_avg_pool(t: Translation, x: TensorView, output_size: Any) -> TensorView:
    return t.ops.adaptive_avg_pool(x, output_size)


@_pooling(aten._adaptive_avg_pool2d_backward.default, aten._adaptive_avg_pool3d_backward.default)
def _adaptive_avg_pool_gradient(t: Translation, grad: TensorView, x: TensorView) -> TensorView:
    made = t.ops.adaptive_avg_pool(x, list(grad.type.shape[2:]))
    return t.fd.grad(made, [x], grad)[0]
