"""VJPs of look-ups and sorts: a gradient is added where its element was read.

The dim that was read from is free in `take_along_axis_bwd` and `embedding_bwd`: each rank adds up what belongs to the
indices that it holds, so that the gradient of a sharded table is made in shards, without communication.
"""

from __future__ import annotations

from typing import Any

from ..errors import user_error
from ..ops.vjp import Backward, Tensor, Vjp, dim_of, each, sizes, sum_to
from ..ops.window_gradients import WindowGradient, zero_padded


def _written(b: Backward, index: Tensor) -> Tensor:
    return b.ops.take_along_axis_bwd(b.grad, index, dim_of(b), sizes(b["arg"])[dim_of(b)])


def _take_along_axis(b: Backward) -> Tensor:
    return sum_to(b, _written(b, b["index"]), b["arg"])


def _gather(b: Backward) -> Tensor:
    """As of take_along_axis, with zeros for what the operand has beyond a shorter index."""
    x, index, dim = b["arg"], b["index"], dim_of(b)
    pairs = zip(sizes(x), sizes(index), strict=True)
    after = [0 if d == dim else n - m for d, (n, m) in enumerate(pairs)]
    return zero_padded(b.ops, _written(b, index), [0] * x.ndim, after)


def _index_select(b: Backward) -> Tensor:
    index, ndim = b["index"], b["arg"].ndim
    flags = [d != dim_of(b) for d in range(ndim)]
    return _written(b, b.ops.broadcast(index, flags if index.ndim else [True] * ndim))


def _from_front(b: Backward, index: Any, n: Any) -> Any:
    """An index counted from the front, where a negative one counts from the end of a dim of size n.

    Both may be scalars.
    """
    if isinstance(index, int):
        return index if index >= 0 else n + index
    return b.ops.where(b.ops.lt(index, 0), b.ops.add(index, n), index)


def _select(b: Backward) -> Tensor | WindowGradient:
    """Zeros around what was selected."""
    x, dim, index = b["arg"], dim_of(b), b["index"]
    n = sizes(x)[dim]
    if isinstance(index, int) and isinstance(n, int):
        grad = b.ops.broadcast(b.grad, [d == dim for d in range(x.ndim)])
        return WindowGradient(grad, tuple(index % n if d == dim else 0 for d in range(x.ndim)))
    return b.ops.select_bwd(b.grad, index, dim, n)


def _embedding_weight(b: Backward) -> Tensor:
    """Rows of `padding_idx` get nothing; `scale_grad_by_freq` divides by how often a row was read."""
    index, weight = b["input"], b["weight"]
    if b["max_norm"] is not None:
        raise user_error(
            "embedding_fwd: no derivative here", "max_norm", "None", "Limit the norm of the table before the look-up."
        )
    grad, rows = b.grad, sizes(weight)[0]
    read = None
    if b["padding_idx"] is not None:
        read = b.ops.ne(index, _from_front(b, b["padding_idx"], rows))
        grad = b.ops.where(_column(b, read), grad, 0.0)
    found = b.ops.embedding_bwd(grad, index, rows)
    if not b["scale_grad_by_freq"]:
        return found
    ones = b.ops.full([*sizes(index), 1], 1.0, weight.dtype)
    return b.ops.truediv(found, b.ops.maximum(b.ops.embedding_bwd(ones, index, rows), 1.0))


def _column(b: Backward, x: Tensor) -> Tensor:
    return b.ops.broadcast(x, [False] * x.ndim + [True])


def _scattered_into(b: Backward) -> Tensor:
    """Zero where an element was overwritten."""
    return b.ops.scatter(b.grad, b["index"], 0.0, b["dim"])


def _scattered(b: Backward) -> Tensor:
    source, index = b["src"], b["index"]
    found = b.ops.gather(b.grad, index, b["dim"])
    after = [n - m for n, m in zip(sizes(source), sizes(index), strict=True)]
    return zero_padded(b.ops, found, [0] * source.ndim, after)


def _topk(b: Backward) -> Tensor:
    return _written(b, b.results[1])


INDEXING: dict[str, Vjp] = {
    "take_along_axis": each(arg=_take_along_axis),
    "gather": each(arg=_gather),
    "index_select": each(arg=_index_select),
    "select": each(arg=_select),
    "embedding_fwd": each(weight=_embedding_weight),
    "scatter": each(arg=_scattered_into, src=_scattered),
    "topk": each(arg=_topk),
    "take_along_axis_bwd": each(grad=lambda b: b.ops.take_along_axis(b.grad, b["index"], b["dim"])),
    "select_bwd": each(grad=lambda b: b.ops.select(b.grad, b["index"], b["dim"])),
    "embedding_bwd": each(grad=lambda b: b.ops.embedding_fwd(b["index"], b.grad)),
}
