"""aten's look-ups and writes by index."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from ...definition.tensor_view import TensorView
from ...dtypes import DataType
from ...errors import MeshfuseError, user_error
from .table import Translation, aten, rule


@rule(aten.embedding.default)
def _embedding(t: Translation, weight: TensorView, index: TensorView, *_: Any, **__: Any) -> TensorView:
    return t.ops.embedding_fwd(index, weight)


@rule(aten._sparse_coo_tensor_with_dims_and_tensors.default)
def _sparse_gradient(t: Translation, *_: Any, **__: Any) -> TensorView:
    raise no_sparse_gradient()


def no_sparse_gradient() -> MeshfuseError:
    return user_error("a sparse gradient", "sparse=True", "a dense one", "Pass sparse=False to nn.Embedding.")


@rule(aten.embedding_dense_backward.default)
def _embedding_backward(
    t: Translation, grad: TensorView, index: TensorView, rows: int, padding: int, by_frequency: bool
) -> TensorView:
    """The padding's row gets no gradient; by frequency each row is divided by how often it was looked up."""
    if padding >= 0:
        keep = t.unsqueeze(t.ops.ne(index, padding), index.ndim)
        grad = t.ops.where(keep, grad, 0.0)
    found = t.ops.embedding_bwd(grad, index, rows)
    if not by_frequency:
        return found
    counts = t.cast(t.ops.maximum(_counts(t, index, rows), 1), found.dtype)
    return t.ops.truediv(found, t.unsqueeze(counts, 1))


def _counts(t: Translation, index: TensorView, rows: int) -> TensorView:
    """How often each row is looked up."""
    return t.ops.bincount(t.reshape(index, [index.type.numel]), rows)


@rule(aten.embedding_renorm.default)
def _embedding_renorm(
    t: Translation, weight: TensorView, index: TensorView, max_norm: float, norm_type: float
) -> TensorView:
    """Rows that are looked up are scaled down to the norm, as far as theirs is greater."""
    size = t.ops.abs(t.computing(weight))
    if math.isinf(norm_type):
        norms = t.ops.max(size, [1], True)
    else:
        norms = t.ops.pow(t.ops.sum(t.ops.pow(size, norm_type), [1], True), 1 / norm_type)
    is_read = t.unsqueeze(t.ops.gt(_counts(t, index, weight.type.shape[0]), 0), 1)
    scale = t.ops.truediv(max_norm, t.ops.add(norms, 1e-7))  # as torch has it
    scaled = t.ops.mul(t.computing(weight), scale)
    return t.cast(t.ops.where(t.ops.logical_and(is_read, t.ops.gt(norms, max_norm)), scaled, t.computing(weight)),
                  weight.dtype)  # fmt: skip


@rule(aten.repeat_interleave.Tensor)
def _repeated_places(t: Translation, repeats: TensorView, *, output_size: int | None = None) -> TensorView:
    """Which element each place of the result repeats: as many as end before it."""
    (count,) = t.shape
    ends = t.ops.cumsum(t.cast(repeats, DataType.Int), 0)
    is_behind = t.ops.le(t.unsqueeze(ends, 0), t.unsqueeze(t.ops.iota(count), 1))
    return t.ops.sum(t.cast(is_behind, DataType.Int), [1])


@rule(aten.gather.default)
def _gather(t: Translation, x: TensorView, dim: int, index: TensorView, sparse_grad: bool = False) -> TensorView:
    return t.ops.gather(x, index, dim % x.ndim) if x.ndim else x


@rule(aten.index_select.default)
def _index_select(t: Translation, x: TensorView, dim: int, index: TensorView) -> TensorView:
    return t.ops.index_select(x, t.reshape(index, [index.type.numel]), dim % x.ndim)


@rule(aten.scatter.src, aten.scatter.value)
def _scatter(t: Translation, x: TensorView, dim: int, index: TensorView, source: Any) -> TensorView:
    source = t.cast(source, x.dtype) if isinstance(source, TensorView) else source
    return t.ops.scatter(x, index, source, dim % x.ndim)


@rule(aten.scatter_add.default)
def _scatter_add(t: Translation, x: TensorView, dim: int, index: TensorView, source: TensorView) -> TensorView:
    return _combined(t, x, dim, index, source, "sum", True)


@rule(aten.scatter.reduce, aten.scatter.value_reduce)
def _scatter_combined(
    t: Translation, x: TensorView, dim: int, index: TensorView, source: Any, *, reduce: str
) -> TensorView:  # fmt: skip
    if not isinstance(source, TensorView):
        source = t.full(source, index.type.shape, x.dtype)
    return _combined(t, x, dim, index, source, {"add": "sum", "multiply": "prod"}[reduce], True)


@rule(aten.scatter_reduce.two)
def _scatter_reduce(
    t: Translation, x: TensorView, dim: int, index: TensorView, source: TensorView, reduce: str, *,
    include_self: bool = True,
) -> TensorView:  # fmt: skip
    return _combined(t, x, dim, index, source, reduce, include_self)


@rule(aten.index_reduce.default)
def _index_reduce(
    t: Translation, x: TensorView, dim: int, index: TensorView, source: TensorView, reduce: str, *,
    include_self: bool = True,
) -> TensorView:  # fmt: skip
    index = t.expand(t.along(index, dim, x.ndim), source.type.shape)
    return _combined(t, x, dim, index, source, reduce, include_self)


def _combined(
    t: Translation, x: TensorView, dim: int, index: TensorView, source: TensorView, reduce: str, include_self: bool
) -> TensorView:
    """x with the part of source that has indices combined into the elements that these name."""
    if not x.ndim:
        x, index, source = (t.reshape(y, [1]) for y in (x, index, source))
        return t.reshape(_combined(t, x, 0, index, source, reduce, include_self), [])
    if 0 in index.type.shape:
        return x
    source = t.ops.slice(source, [0] * source.ndim, list(index.type.shape)) if index.ndim == source.ndim else source
    if reduce == "sum" and include_self:
        return t.ops.scatter_add(x, dim % x.ndim, index, source)
    return t.ops.scatter_reduce(x, dim % x.ndim, index, source, reduce, include_self)


@rule(aten.index_add.default)
def _index_add(
    t: Translation, x: TensorView, dim: int, index: TensorView, source: TensorView, *, alpha: Any = 1
) -> TensorView:
    order = [dim % x.ndim, *(d for d in range(x.ndim) if d != dim % x.ndim)]
    added = _added_rows(t, t.ops.permute(source, order), index, x.type.shape[dim])
    added = t.ops.permute(added, [order.index(d) for d in range(x.ndim)])
    return t.ops.add(x, added if alpha == 1 else t.ops.mul(added, alpha))


def _added_rows(t: Translation, rows: TensorView, index: TensorView, n: int) -> TensorView:
    """`n` rows of zeros with `rows` added where the index names them."""
    kept = list(rows.type.shape[1:])
    flat = t.ops.embedding_bwd(t.reshape(rows, [rows.type.shape[0], math.prod(kept)]), index, n)
    return t.reshape(flat, [n, *kept])


# Indices of several dims


class _Indexed:
    """The dims of a tensor that tensors of indices look up in, as one dim in front.

    rows: the tensor with these dims merged in front of all others.
    index: the places in that dim, [m]; `looked_up` are the dims that they stand for.
    """

    def __init__(self, t: Translation, x: TensorView, indices: Sequence[Any]) -> None:
        self.t, self.x = t, x
        self.dims = [d for d, index in enumerate(indices) if index is not None]
        self.others = [d for d in range(x.ndim) if d not in self.dims]
        self.looked_up, self.index = self._flat([indices[d] for d in self.dims])
        moved = (
            t.ops.permute(x, self.dims + self.others)
            if self.dims + self.others != sorted(self.dims + self.others)
            else x
        )
        self.kept = [x.type.shape[d] for d in self.others]
        self.n = math.prod(x.type.shape[d] for d in self.dims)
        self.rows = t.reshape(moved, [self.n, *self.kept])

    def _flat(self, indices: Sequence[TensorView]) -> tuple[list[int], TensorView]:
        t, ndim = self.t, max(index.ndim for index in indices)
        found, shape = None, [1] * ndim
        for dim, index in zip(self.dims, indices, strict=True):
            n = self.x.type.shape[dim]
            if index.dtype is DataType.Bool:
                raise user_error(
                    "an index of bools", str(index.type), "integers: how many are True is known only as it runs",
                    "Use torch.where, or multiply with the mask.",
                )  # fmt: skip
            wide = t.cast(index, DataType.Int)
            wide = t.ops.where(t.ops.lt(wide, 0), t.ops.add(wide, n), wide)
            wide = t.reshape(wide, [1] * (ndim - index.ndim) + list(index.type.shape))
            shape = [max(a, b) if 0 not in (a, b) else 0 for a, b in zip(shape, wide.type.shape, strict=True)]
            found = wide if found is None else t.ops.add(t.ops.mul(found, n), wide)
        assert found is not None
        return shape, t.reshape(t.expand(found, shape), [math.prod(shape)])

    @property
    def front(self) -> int:
        """Where the looked up dims stand in the result: in the place of adjacent ones, else in front."""
        adjacent = self.dims == list(range(self.dims[0], self.dims[0] + len(self.dims)))
        return self.dims[0] if adjacent else 0

    def placed(self, rows: TensorView) -> TensorView:
        """Looked up rows, [m, ...], in the shape of the result."""
        count, front = len(self.looked_up), self.front
        made = self.t.reshape(rows, [*self.looked_up, *self.kept])
        order = [*range(count, count + front), *range(count), *range(count + front, made.ndim)]
        return self.t.ops.permute(made, order) if order != sorted(order) else made

    def taken(self, values: TensorView) -> TensorView:
        """Values of the result's shape (broadcast to it) as rows, [m, ...]."""
        count, front = len(self.looked_up), self.front
        shape = [*self.kept[:front], *self.looked_up, *self.kept[front:]]
        values = self.t.expand(values, shape)
        order = [*range(front, front + count), *range(front), *range(front + count, len(shape))]
        values = self.t.ops.permute(values, order) if order != sorted(order) else values
        return self.t.reshape(values, [math.prod(self.looked_up), *self.kept])

    def restored(self, rows: TensorView) -> TensorView:
        """Changed rows, [n, ...], as the tensor."""
        shape = [self.x.type.shape[d] for d in self.dims] + self.kept
        order = self.dims + self.others
        made = self.t.reshape(rows, shape)
        return (
            self.t.ops.permute(made, [order.index(d) for d in range(self.x.ndim)]) if order != sorted(order) else made
        )


@rule(aten.index.Tensor, aten._unsafe_index.Tensor)
def _index(t: Translation, x: TensorView, indices: Sequence[Any]) -> TensorView:
    found = _Indexed(t, x, indices)
    return found.placed(t.ops.index_select(found.rows, found.index, 0))


@rule(aten.index_put.default, aten._unsafe_index_put.default)
def _index_put(
    t: Translation, x: TensorView, indices: Sequence[Any], values: TensorView, accumulate: bool = False
) -> TensorView:
    """A mask of the tensor's own shape with one value is a choice; other indices write or add rows."""
    mask = indices[0] if len(indices) == 1 else None
    if mask is not None and mask.dtype is DataType.Bool and values.type.numel == 1:
        value = t.reshape(t.cast(values, x.dtype), [])
        mask = t.reshape(mask, [*mask.type.shape, *[1] * (x.ndim - mask.ndim)])
        return t.ops.where(mask, t.ops.add(x, value) if accumulate else value, x)
    found = _Indexed(t, x, indices)
    rows = found.taken(t.cast(values, x.dtype))
    if accumulate:
        return found.restored(t.ops.add(found.rows, _added_rows(t, rows, found.index, found.n)))
    index = t.expand(t.along(found.index, 0, rows.ndim), rows.type.shape)
    return found.restored(t.ops.scatter(found.rows, index, rows, 0))


@rule(aten.put.default)
def _put(t: Translation, x: TensorView, index: TensorView, source: TensorView, accumulate: bool = False) -> TensorView:
    """An index of the flattened tensor."""
    flat, places = (t.reshape(y, [y.type.numel]) for y in (x, index))
    return t.reshape(_index_put(t, flat, [places], t.reshape(source, [source.type.numel]), accumulate), x.type.shape)


@rule(aten.masked_scatter.default)
def _masked_scatter(t: Translation, x: TensorView, mask: TensorView, source: TensorView) -> TensorView:
    """The elements of source in their order, where the mask is True."""
    found = t.ops.index_select(t.reshape(source, [source.type.numel]), _ranks_of(t, mask), 0)
    return t.ops.where(t.expand(mask, t.shape), t.reshape(found, t.shape), x)


@rule(aten.masked_scatter_backward.default)
def _masked_scatter_gradient(t: Translation, grad: TensorView, mask: TensorView, sizes: Sequence[int]) -> TensorView:
    kept = t.ops.where(t.expand(mask, grad.type.shape), grad, 0.0)
    zeros = t.full(0, [math.prod(sizes)], grad.dtype)
    added = t.ops.scatter_add(zeros, 0, _ranks_of(t, mask, grad), t.reshape(kept, [grad.type.numel]))
    return t.reshape(added, sizes)


def _ranks_of(t: Translation, mask: TensorView, like: TensorView | None = None) -> TensorView:
    """Of every element how many are True before it, flattened."""
    shape = t.shape if like is None else list(like.type.shape)
    flat = t.reshape(t.cast(t.expand(mask, shape), DataType.Int), [math.prod(shape)])
    return t.ops.maximum(t.ops.sub(t.ops.cumsum(flat, 0), 1), 0)
