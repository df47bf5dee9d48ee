"""aten's views of memory by sizes and strides, as look-ups in all elements of a tensor in the order of its memory."""

from __future__ import annotations

import math
from collections.abc import Sequence

from ...definition.tensor_view import TensorView
from ...errors import user_error
from .table import Translation, aten, rule


@rule(aten.as_strided.default)
def _as_strided(
    t: Translation, x: TensorView, size: Sequence[int], stride: Sequence[int], storage_offset: int | None = None
) -> TensorView:
    """All elements in the order of memory are a reshape, others a look-up."""
    order, first = _memory(t, x, size, stride, storage_offset)
    flat = _flat(t, x, order)
    if first == 0 and math.prod(size) == x.type.numel and _is_dense(size, stride):
        return t.reshape(flat, size)
    return t.reshape(t.ops.index_select(flat, _places(t, size, stride, first), 0), size)


@rule(aten.as_strided_scatter.default)
def _as_strided_scatter(
    t: Translation, x: TensorView, source: TensorView, size: Sequence[int], stride: Sequence[int],
    storage_offset: int | None = None,
) -> TensorView:  # fmt: skip
    order, first = _memory(t, x, size, stride, storage_offset)
    values = t.reshape(t.cast(source, x.dtype), [math.prod(size)])
    flat = t.ops.scatter(_flat(t, x, order), _places(t, size, stride, first), values, 0)
    moved = t.reshape(flat, [x.type.shape[d] for d in order])
    return t.ops.permute(moved, [order.index(d) for d in range(x.ndim)]) if order != sorted(order) else moved


def _memory(
    t: Translation, x: TensorView, size: Sequence[int], stride: Sequence[int], storage_offset: int | None
) -> tuple[list[int], int]:
    """The dims of the operand in the order of its memory, and where in it the view begins.

    Raises DefinitionError where the operand is a part of its memory: what lies around it is unknown to the graph.
    """
    given = t.taken
    steps, begin = [t.sizes.number(n) for n in given.stride()], t.sizes.number(given.storage_offset())
    order = sorted(range(x.ndim), key=lambda d: (-steps[d], d))
    first = 0 if storage_offset is None else t.sizes.number(storage_offset) - begin
    last = first + sum((n - 1) * step for n, step in zip(size, stride, strict=True))
    is_inside = 0 in size or (first >= 0 and last < x.type.numel)
    if not _is_dense([x.type.shape[d] for d in order], [steps[d] for d in order]) or not is_inside:
        raise user_error(
            "as_strided of a part of the memory", f"sizes {list(size)}, strides {list(stride)} of {x.type}",
            "elements of the tensor itself, which is no part of another",
            "Write it with slices, reshapes and permutes.",
        )  # fmt: skip
    return order, first


def _is_dense(size: Sequence[int], stride: Sequence[int]) -> bool:
    """Whether elements follow each other in row-major order."""
    dense = [math.prod(size[d + 1 :]) for d in range(len(size))]
    return all(n == 1 or a == b for n, a, b in zip(size, stride, dense, strict=True)) or 0 in size


def _flat(t: Translation, x: TensorView, order: list[int]) -> TensorView:
    """All elements in the order of memory."""
    moved = t.ops.permute(x, order) if order != sorted(order) else x
    return t.reshape(moved, [x.type.numel])


def _places(t: Translation, size: Sequence[int], stride: Sequence[int], first: int) -> TensorView:
    """The place in memory of every element of a view, flattened."""
    found = t.full(first, [1] * len(size), t.ops.iota(1).dtype)
    for dim, (n, step) in enumerate(zip(size, stride, strict=True)):
        along = t.ops.iota(n, 0, step) if step else t.full(0, [n], found.dtype)
        found = t.ops.add(found, t.along(along, dim, len(size)))
    return t.reshape(t.expand(found, size), [math.prod(size)])
