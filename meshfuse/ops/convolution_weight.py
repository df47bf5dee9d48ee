"""The gradient of a convolution by its weight. Batch and spatial dims are summed over, channels pass through."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
import torch.nn.grad as weight_gradients

from ..errors import user_error
from ..kernels.table import kernel
from .convolution import NOT_NATIVE, STRIDES, channel_factors, check_groups, convolution_sample, convolution_windows
from .halo import in_blocks
from .opdef import Call, Emit, OpDef, Partial, Sample, Writing
from .rules import Rule, RuleBuilder
from .shape_arithmetic import UNKNOWN, check_dtypes, check_ndim, check_same_size, known_size
from .sliding_windows import Window, check_windows, input_blocks, per_dim, window_factors, with_halo
from .values import Param, ParamKind, TensorRef, TensorType
from .vjp import Backward, sizes

K = ParamKind


def _weight_bwd_infer(call: Call) -> tuple[TensorType, ...]:
    grad, x = call.types
    check_ndim(call.op.name, "the input", x, 3, 5)
    check_ndim(call.op.name, "the gradient", grad, x.ndim, x.ndim)
    check_same_size(call.op.name, "the batches", grad.shape[0], x.shape[0])
    check_groups(call, ("the input's channels", x.shape[1]), ("the gradient's channels", grad.shape[1]))
    kernel = tuple(map(known_size, per_dim(call.op.name, "kernel", call["kernel"], x.ndim - 2)))
    if UNKNOWN not in kernel:
        windows = convolution_windows(call, kernel)
        check_windows(call.op.name, windows)
        for m, n, w in zip(grad.shape[2:], x.shape[2:], windows, strict=True):
            # Output padding makes fewer, where the operands of a transposed convolution change places.
            if UNKNOWN not in (m, n) and not 0 <= w.results(n) - m < w.dilation:
                raise user_error(f"{call.op.name}: gradient and input have different windows", f"{grad} for {x}",
                                 f"{w.results(n)} windows", "Pass the convolution's operands.")  # fmt: skip
    inside = UNKNOWN if x.shape[1] == UNKNOWN else x.shape[1] // call["groups"]
    return (TensorType((grad.shape[1], inside, *kernel), check_dtypes(call)),)


def _weight_bwd_rule(call: Call) -> Rule:
    """n (g o) *m, n (g c) *s -> (g o) c *k, summed over n."""
    (grad, x), groups, builder = call.types, call["groups"], RuleBuilder()
    batch, group = builder.reduction(x.shape[0]), builder.factor(groups)
    inside, outside = (channel_factors(builder, t.shape[1] // groups, groups) for t in (x, grad))
    made = call.results[0].shape
    spatial = [
        _summed_factors(builder, n, m, w)
        for n, m, w in zip(x.shape[2:], grad.shape[2:], convolution_windows(call, made[2:]), strict=True)
    ]
    taps = tuple(builder.blocked(k) for k in made[2:])
    return builder.build(
        [(batch, (*group, *outside), *(b for _, b in spatial)), (batch, (*group, *inside), *(a for a, _ in spatial))],
        [((*group, *outside), inside, *taps)],
    )


def _summed_factors(builder: RuleBuilder, n: int, m: int, window: Window) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """As `window_factors`; the steps are summed over where windows are patches."""
    if window.is_patch and n == m * window.stride:
        steps = builder.reduction(m)
        return (*steps, *(builder.blocked(window.stride) if window.stride > 1 else ())), steps
    return window_factors(builder, n, m, window)


def _weight_bwd_emit(e: Emit) -> str:
    spatial = e.call.types[0].ndim - 2
    options = [per_dim(e.call.op.name, what, e.call[what], spatial) for what in ("stride", "padding", "dilation")]
    return f"K.convolution_weight_bwd({', '.join([*e.operands, *map(str, (*options, e.result_shapes[0]))])})"


@kernel
def convolution_weight_bwd(
    grad: torch.Tensor,
    x: torch.Tensor,
    stride: tuple[int, ...],
    padding: tuple[int, ...],
    dilation: tuple[int, ...],
    shape: tuple[int, ...],
) -> torch.Tensor:
    """The gradient of a plain convolution's weight, of this shape: by those of the results, and the input.

    Windows that the gradient has not count as zeros.
    """
    if 0 in (*x.shape, *grad.shape, *shape):
        return x.new_zeros(shape)
    windows = [Window(*each) for each in zip(shape[2:], stride, padding, padding, dilation, strict=True)]
    results = [window.results(n) for n, window in zip(x.shape[2:], windows, strict=True)]
    lacking = [n - m for n, m in zip(results, grad.shape[2:], strict=True)]
    grad = F.pad(grad, [w for more in reversed(lacking) for w in (0, more)])
    like = x.new_empty(()).expand(shape)
    mask, groups = [False, True, False], x.shape[1] // shape[1]
    made = torch.ops.aten.convolution_backward(
        grad, x, like, None, stride, padding, dilation, False, [0] * len(stride), groups, mask
    )
    return made[1]


def _distributed_weight_bwd(
    r: Writing, call: Call, operands: tuple[TensorRef, ...], dim: int, blocks: int
) -> Sequence[TensorRef] | None:
    """Blocks of the dim as so many more images, over which is summed."""
    if not blocks or dim < 2:
        return None
    (grad, x), kernel = operands, call.results[0].shape[2:]
    window, n, m = convolution_windows(call, kernel)[dim - 2], call.types[1].shape[dim], call.types[0].shape[dim]
    if window.is_patch and n == m * window.stride:
        return None
    cut = input_blocks(dim, (n, m), window, blocks)
    x = cut.merged(r, with_halo(r, x, cut, window.before, 0))
    grad = cut.merged(r, in_blocks(r, grad, dim, blocks, cut.results, (0, 0), 0))
    stride, padding, dilation, *_ = _weight_options(call, dim)
    return [r.call(call.op, grad, x, kernel, stride, padding, dilation, call["groups"])]


def _weight_options(call: Call, dim: int) -> list[Any]:
    spatial = call.types[0].ndim - 2
    stride, padding, dilation = (
        per_dim(call.op.name, what, call[what], spatial) for what in ("stride", "padding", "dilation")
    )
    return [stride, tuple(0 if d == dim - 2 else p for d, p in enumerate(padding)), dilation]


def _weight_bwd_vjp(b: Backward) -> dict[str, Any]:
    """Linear in both: the convolution of the input by the weight's gradient, and the way back of the gradient by it."""
    found, (grad, x) = {}, (b["grad"], b["input"])
    options = (b["stride"], b["padding"], b["dilation"])
    spatial = x.ndim - 2
    if b.needs("grad"):
        made = b.ops.convolution(x, b.grad, None, *options, False, [0] * spatial, b["groups"])
        found["grad"] = made if made.type.shape == grad.type.shape else b.ops.slice(made, [0] * x.ndim, sizes(grad))
    if b.needs("input"):
        per = [per_dim(b.name, what, b[what], spatial) for what in ("stride", "padding", "dilation")]
        kernel, n, m = (sizes(t)[2:] for t in (b.result, x, grad))
        more = [_missing(n[d], m[d], kernel[d], [option[d] for option in per]) for d in range(spatial)]
        found["input"] = b.ops.convolution(grad, b.grad, None, *options, True, more, b["groups"])
    return found


def _missing(n: Any, m: Any, k: Any, option: Sequence[int]) -> Any:
    """What a transposed convolution of m elements lacks to n."""
    stride, padding, dilation = option
    return n - ((m - 1) * stride + (k - 1) * dilation + (1 - 2 * padding))


def _weight_bwd_samples() -> list[Sample]:
    return [
        convolution_sample((2, 6, 6), (2, 4, 12), kernel=[3], stride=[2], padding=[1]),
        convolution_sample((2, 4, 4, 4), (2, 4, 5, 8), kernel=[2, 2], stride=[1, 2], groups=2),
    ]


def _weight_bwd_reference(grad: torch.Tensor, x: torch.Tensor, kernel: Any, stride: Any, padding: Any, dilation: Any,
                          groups: int) -> torch.Tensor:  # fmt: skip
    shape = (grad.shape[1], x.shape[1] // groups, *kernel)
    of = [weight_gradients.conv1d_weight, weight_gradients.conv2d_weight, weight_gradients.conv3d_weight][x.ndim - 3]
    stride, padding, dilation = (
        list(each) * (x.ndim - 2) if len(each) == 1 else list(each) for each in (stride, padding, dilation)
    )
    return of(x, shape, grad, stride, padding, dilation, groups)


OPS = (
    OpDef(
        "convolution_weight_bwd",
        (Param("grad", K.TENSOR), Param("input", K.TENSOR), Param("kernel", K.SHAPE), *STRIDES,
         Param("groups", K.INT, 1)),
        _weight_bwd_infer,
        _weight_bwd_rule,
        _weight_bwd_emit,
        Partial.EACH,
        lambda call: 2.0 * call.types[0].shape[0] * math.prod(call.types[0].shape[2:]) * call.results[0].numel,
        _weight_bwd_samples,
        nvfuser=NOT_NATIVE,
        distributed=_distributed_weight_bwd,
        vjp=_weight_bwd_vjp,
        reference=_weight_bwd_reference,
        about="the gradient of a convolution by its weight, of `kernel` taps",
    ),
)  # fmt: skip
