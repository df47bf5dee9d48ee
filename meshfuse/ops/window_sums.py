"""Sums of windows that slide along dims, and their gradient: average pooling.

Batch and channels pass through. A spatial dim passes where windows lie side by side; else ranks exchange the edges of
their blocks (`sliding_windows.py`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F

from ..kernels.table import kernel
from .halo import in_blocks
from .opdef import Call, Emit, OpDef, Partial, Sample, Writing
from .pooling import (
    AFTER,
    ARG,
    GRAD,
    NOT_NATIVE,
    SIZES,
    WINDOW,
    input_form,
    options_along,
    options_text,
    pooled_rule,
    pooled_shape,
    result_form,
    sample,
    spread_infer,
    spread_rule,
    torch_widths,
)
from .sliding_windows import per_dim, with_halo
from .values import TensorRef, TensorType
from .vjp import Backward, Tensor, each, sizes


def _sum_infer(call: Call) -> tuple[TensorType, ...]:
    return (TensorType(pooled_shape(call), call.types[0].dtype),)


def _sum_emit(e: Emit) -> str:
    options = options_text(e, "kernel", "stride", "before")
    return f"K.window_sum({', '.join([e.operands[0], *options, str(e.result_shapes[0])])})"


@kernel
def window_sum(
    x: torch.Tensor, size: tuple[int, ...], stride: tuple[int, ...], before: tuple[int, ...], shape: tuple[int, ...]
) -> torch.Tensor:
    """The sum of each window, in a result of this shape; beyond the ends stand zeros."""
    if 0 in (*x.shape, *shape):
        return x.new_zeros(shape)
    reach = [(m - 1) * s + k for m, s, k in zip(shape[2:], stride, size, strict=True)]
    x = F.pad(x, torch_widths([(b, n - b - m) for n, b, m in zip(reach, before, x.shape[2:], strict=True)]))
    if len(size) == 1:
        return F.avg_pool2d(x.unsqueeze(2), (1, *size), (1, *stride), divisor_override=1).squeeze(2)
    return (F.avg_pool2d if len(size) == 2 else F.avg_pool3d)(x, size, stride, divisor_override=1)


def _distributed_sum(
    r: Writing, call: Call, operands: tuple[TensorRef, ...], dim: int, blocks: int
) -> Sequence[TensorRef] | None:
    """Blocks of the dim with the edges that windows read, as so many more images."""
    found = input_form(call, dim, blocks)
    if found is None:
        return None
    cut, window, m = found
    x = cut.merged(r, with_halo(r, operands[0], cut, window.before, 0))
    size, stride, before, after = options_along(call, dim)
    return [cut.split(r, r.call("window_sum", x, size, stride, before, after), m)]


def _sum_vjp(b: Backward) -> Tensor:
    return b.ops.window_spread(b.grad, sizes(b["arg"])[2:], b["kernel"], b["stride"], b["before"])


def _spread_emit(e: Emit) -> str:
    options = options_text(e, "kernel", "stride", "before")
    return f"K.window_spread({', '.join([e.operands[0], *options, str(e.result_shapes[0])])})"


@kernel
def window_spread(
    grad: torch.Tensor, size: tuple[int, ...], stride: tuple[int, ...], before: tuple[int, ...], shape: tuple[int, ...]
) -> torch.Tensor:
    """Each element added to all that its window reads, in a result of this shape."""
    if 0 in (*grad.shape, *shape):
        return grad.new_zeros(shape)
    reach = [(m - 1) * s + k for m, s, k in zip(grad.shape[2:], stride, size, strict=True)]
    like = grad.new_empty(()).expand(*grad.shape[:2], *reach)
    options = (False, True, 1)
    if len(size) == 1:
        given = (grad.unsqueeze(2), like.unsqueeze(2), (1, *size), (1, *stride), (0, 0))
        made = torch.ops.aten.avg_pool2d_backward(*given, *options).squeeze(2)
    else:
        of = torch.ops.aten.avg_pool2d_backward if len(size) == 2 else torch.ops.aten.avg_pool3d_backward
        made = of(grad, like, size, stride, (0,) * len(size), *options)
    return F.pad(made, torch_widths([(-b, n + b - m) for n, b, m in zip(shape[2:], before, reach, strict=True)]))


def _distributed_spread(
    r: Writing, call: Call, operands: tuple[TensorRef, ...], dim: int, blocks: int
) -> Sequence[TensorRef] | None:
    """Blocks of the result, from all windows that reach into them."""
    found = result_form(call, dim, blocks)
    if found is None:
        return None
    cut, halo, start, (n, _) = found
    grad = cut.merged(r, in_blocks(r, operands[0], dim, blocks, cut.results, halo, 0))
    made = [cut.inputs if d == dim - 2 else size for d, size in enumerate(call.results[0].shape[2:])]
    size, stride, before = (per_dim(call.op.name, w, call[w], len(made)) for w in ("kernel", "stride", "before"))
    before = tuple(start if d == dim - 2 else width for d, width in enumerate(before))
    return [cut.split(r, r.call("window_spread", grad, made, size, stride, before), n)]


def _spread_vjp(b: Backward) -> Tensor:
    """The sum of each window, with as much after each dim as its last window needs."""
    dims = b["grad"].ndim - 2
    size, stride, before = (per_dim(b.name, what, b[what], dims) for what in ("kernel", "stride", "before"))
    rows = zip(sizes(b.grad)[2:], sizes(b["grad"])[2:], size, stride, before, strict=True)
    after = [(m - 1) * s + (k - w) - n for n, m, k, s, w in rows]
    return b.ops.window_sum(b.grad, size, stride, before, after)


def _sum_samples() -> list[Sample]:
    return [
        sample((2, 3, 8), [3], [2], [1], [0]),
        sample((1, 2, 3, 6), [2, 3], [1, 3], [1, 0], [0]),
        sample((1, 1, 2, 3, 2), [2, 3, 1], [2, 1, 1], [0], [1, 0, 0]),
    ]


def _spread_samples() -> list[Sample]:
    return [
        sample((2, 3, 4), [8], [3], [2], [1]),
        sample((1, 2, 3, 2), [3, 6], [2, 3], [1, 3], [1, 0]),
    ]


def _sum_reference(x: torch.Tensor, size: Any, stride: Any, before: Any, after: Any) -> torch.Tensor:
    """Of an operand that is padded before."""
    dims = x.ndim - 2
    before, after = (list(w) * dims if len(w) == 1 else w for w in (before, after))
    x = F.pad(x, torch_widths([*zip(before, after, strict=True)]))
    for d, (k, s) in enumerate(zip(size, stride, strict=True)):
        x = x.unfold(d + 2, k, s).sum(-1)
    return x


def _spread_reference(grad: torch.Tensor, made: Any, size: Any, stride: Any, before: Any) -> torch.Tensor:
    before = list(before) * len(size) if len(before) == 1 else before
    out = torch.zeros(*grad.shape[:2], *made, dtype=grad.dtype)
    rows = zip(made, before, size, stride, grad.shape[2:], strict=True)
    for d, (n, b, k, s, m) in enumerate(rows):
        reads = torch.zeros(n, m, dtype=grad.dtype)
        for window in range(m):
            for place in range(window * s - b, window * s - b + k):
                if 0 <= place < n:
                    reads[place, window] = 1
        grad = torch.matmul(grad.movedim(d + 2, -1), reads.T).movedim(-1, d + 2)
    return out + grad


OPS = (
    OpDef(
        "window_sum", (ARG, *WINDOW, AFTER), _sum_infer, pooled_rule,
        _sum_emit, Partial.FIRST, lambda call: float(call.results[0].numel * math.prod(call["kernel"])), _sum_samples,
        nvfuser=NOT_NATIVE, distributed=_distributed_sum, vjp=each(arg=_sum_vjp),
        reference=_sum_reference,
        about="sums of windows that slide along 1 to 3 dims of [n, channels, ..], with zeros before and after",
    ),
    OpDef(
        "window_spread", (GRAD, SIZES, *WINDOW), spread_infer, spread_rule, _spread_emit, Partial.FIRST,
        lambda call: float(call.types[0].numel * math.prod(call["kernel"])), _spread_samples,
        nvfuser=NOT_NATIVE, distributed=_distributed_spread, vjp=each(grad=_spread_vjp), reference=_spread_reference,
        about="the gradient of `window_sum`: each element added to all that its window read",
    ),
)  # fmt: skip
