"""VJPs of ops that move, repeat and cut elements along dims."""

from __future__ import annotations

from typing import Any

from ..ops.vjp import Backward, Tensor, Vjp, each, sizes, sum_to
from ..ops.window_gradients import WindowGradient, zero_padded


def _reshape(b: Backward) -> Tensor:
    return b.ops.reshape(b.grad, sizes(b["arg"]))


def _permute(b: Backward) -> Tensor:
    order = [d % b.grad.ndim for d in b["dims"]]
    return b.ops.permute(b.grad, [order.index(d) for d in range(len(order))])


def _broadcast(b: Backward) -> Tensor:
    new = [d for d, flag in enumerate(b["is_broadcast_dim"]) if flag]
    return b.ops.squeeze(b.grad, new) if new else b.grad


def _broadcast_in_dim(b: Backward) -> Tensor:
    """`grad` summed over the new dims, and over those that were repeated or may have been."""
    x = b["arg"]
    found = _over_known_dims(b)
    return b.ops.sum_to(found, sizes(x)) if -1 in x.type.shape else found


def _over_known_dims(b: Backward) -> Tensor:
    ndim, x, shape = b.grad.ndim, b["arg"], b.grad.type.shape
    source = {d % ndim: n for d, n in zip(b["broadcast_dims"], x.type.shape, strict=True)}
    repeated = [d for d, n in source.items() if n == 1 and shape[d] != 1]
    new = [d for d in range(ndim) if d not in source]
    if not repeated:
        return b.ops.sum(b.grad, new) if new else b.grad
    total = b.ops.sum(b.grad, sorted([*repeated, *new]), True)
    return b.ops.squeeze(total, new) if new else total


def _expand(b: Backward) -> Tensor:
    return sum_to(b, b.grad, b["arg"])


def _squeeze(b: Backward) -> Tensor:
    """`grad` with the dims put back. Of a dim larger than 1 only the first element was taken: the others get 0."""
    x = b["arg"]
    given = (b["dims"],) if isinstance(b["dims"], int) else b["dims"]
    dims = {d % x.ndim for d in given}
    grad = b.ops.broadcast(b.grad, [d in dims for d in range(x.ndim)]) if dims else b.grad
    after = [n - 1 if d in dims else 0 for d, n in enumerate(sizes(x))]
    return zero_padded(b.ops, grad, [0] * x.ndim, after)


def _reorder(b: Backward) -> Tensor:
    order = list(b["order"])
    return b.ops.reorder_blocks(b.grad, b["dim"], [order.index(block) for block in range(len(order))])


def _bound(n: int, index: int) -> int:
    return min(max(index + n if index < 0 else index, 0), n)


def _slice(b: Backward) -> Tensor | WindowGradient:
    """`grad` at the place that it was cut from, with zeros around it, and between its elements where it has steps."""
    x, grad = b["arg"], b.grad
    steps = b["strides"] or (1,) * x.ndim
    starts = [_start(b.ops, n, a) for n, a in zip(sizes(x), b["start_indices"], strict=True)]
    for d, step in enumerate(steps):
        if step != 1:
            inside = starts[d] % step if isinstance(starts[d], int) else 0
            grad, starts[d] = _spread(b, grad, d, step, inside), starts[d] - inside
    ends = [a + m for a, m in zip(starts, sizes(grad), strict=True)]
    if all(isinstance(n, int) for n in (*ends, *sizes(x))) and all(e <= n for e, n in zip(ends, sizes(x), strict=True)):
        return WindowGradient(grad, tuple(starts))
    return zero_padded(b.ops, grad, starts, [n - end for n, end in zip(sizes(x), ends, strict=True)])


def _spread(b: Backward, grad: Tensor, dim: int, step: int, inside: int) -> Tensor:
    """Every element of a dim becomes `step` elements: itself at place `inside` of them, and zeros."""
    shape = sizes(grad)
    single = b.ops.broadcast(grad, [d == dim + 1 for d in range(grad.ndim + 1)])
    before, after = ([n if d == dim + 1 else 0 for d in range(grad.ndim + 1)] for n in (inside, step - 1 - inside))
    return b.ops.reshape(
        zero_padded(b.ops, single, before, after), [*shape[:dim], shape[dim] * step, *shape[dim + 1 :]]
    )


def _start(ops: Any, n: Any, start: Any) -> Any:
    """Where a slice begins in a dim of size n, counted from the front."""
    if isinstance(n, int) and isinstance(start, int):
        return _bound(n, start)
    if isinstance(start, int):
        return ops.minimum(start, n) if start > 0 else ops.maximum(n + start, 0) if start else 0
    counted = ops.where(ops.lt(start, 0), ops.add(start, n), start)
    return ops.minimum(ops.maximum(counted, 0), n)


def _pad(b: Backward) -> Tensor:
    """`grad` with the padding cut off, and zeros for what the pad had cut off."""
    x, widths = b["arg"], list(b["pad_widths"])
    if not all(isinstance(w, int) and w >= 0 for w in widths) or -1 in x.type.shape:
        return b.ops.pad(b.grad, [0 - w for w in widths])
    before = [0] * (x.ndim - len(widths) // 2) + widths[-2::-2]
    return b.ops.slice(b.grad, before, [a + n for a, n in zip(before, x.type.shape, strict=True)])


def _cat(b: Backward) -> dict[str, Any]:
    """The piece of each operand."""
    tensors, dim, start, parts = b["tensors"], b["dim"] % b.grad.ndim, 0, []
    for x in tensors:
        stop = sizes(x)[dim] + start
        parts.append(_piece(b, dim, start, stop) if x.id in b.active else None)
        start = stop
    return {"tensors": parts}


def _piece(b: Backward, dim: int, start: Any, stop: Any) -> Tensor:
    ends = sizes(b.grad)
    starts = [start if d == dim else 0 for d in range(len(ends))]
    ends[dim] = stop
    return b.ops.slice(b.grad, starts, ends)


SHAPES: dict[str, Vjp] = {
    "broadcast": each(arg=_broadcast),
    "broadcast_in_dim": each(arg=_broadcast_in_dim),
    "expand": each(arg=_expand),
    "squeeze": each(arg=_squeeze),
    "permute": each(arg=_permute),
    "stride_order": each(arg=lambda b: b.grad),
}
RESHAPE: Vjp = each(arg=_reshape)
SLICE: Vjp = each(arg=_slice)
REORDER: Vjp = each(arg=_reorder)
PAD: Vjp = each(arg=_pad)
CAT: Vjp = _cat
