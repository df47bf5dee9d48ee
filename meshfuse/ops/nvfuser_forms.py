"""Lowerings to nvFuser of ops that take more than the nvFuser function of the same name."""

from __future__ import annotations

from typing import Any

from ..dtypes import Category, DataType
from ..sharding.layout import Runs
from .blocks import COMBINE
from .nvfuser_lowering import (
    along,
    cast,
    full,
    global_index,
    is_whole,
    local_places,
    of_category,
    zero_where_not,
    zeros,
)
from .opdef import NvfuserEmit, ToTorch
from .promotion import widen
from .shape_arithmetic import dim_of, one_dim_widths
from .values import TensorRef

# Ours are a function of the seed and the global index, the same on every mesh (see `kernels.random`).
RANDOM = "nvFuser's random numbers depend on how the tensor is cut and scheduled"


def check_real(n: NvfuserEmit) -> None:
    """Raises ToTorch for complex numbers: nvFuser squares their differences, where torch takes the absolute square."""
    if n.call.types[0].dtype.category is Category.COMPLEX:
        raise ToTorch("nvFuser's variance of complex numbers is complex")


def welford(n: NvfuserEmit) -> Any:
    """With the count as Int; nvFuser gives its index type."""
    check_real(n)
    dims, kind = n.call["dims"], n.call.types[0]
    listed = sorted(d % kind.ndim for d in _listed(dims, kind.ndim))
    mean, spread, count = n.plain(arg=cast(n, n.operands[0], kind.dtype, widen(kind.dtype)), dims=listed)
    mean, spread = (cast(n, t, widen(kind.dtype), kind.dtype) for t in (mean, spread))
    return mean, spread, n.ops.cast(count, n.dtype(DataType.Int))


def _listed(dims: Any, ndim: int) -> list[int]:
    return list(range(ndim)) if dims is None else [dims] if isinstance(dims, int) else list(dims)


def scan(n: NvfuserEmit) -> Any:
    """With `init` combined afterwards: nvFuser's scans take one and ignore it. Of partial terms one starts with it."""
    ops, dtype, name = n.ops, n.call.types[0].dtype, n.call.op.name
    init = n.call["init"] if name != "cumsum" or n.leads() else None
    if init is None and not dtype.is_reduced_float:
        return n.plain(init=None)
    wide = DataType.Int if dtype is DataType.Bool else widen(dtype)
    found = getattr(ops, name)(cast(n, n.operands[0], dtype, wide), dim_of(n.call))
    if init is not None:
        found = getattr(ops, COMBINE[name])(found, of_category(n, "init", wide))
    return ops.cast(found, n.dtype(dtype))


def sum_after(n: NvfuserEmit) -> Any:
    """The sum of all, less what is before: nvFuser scans from the start only, and keeps Bool."""
    ops, dim, dtype = n.ops, dim_of(n.call), n.call.types[0].dtype
    x = cast(n, n.operands[0], dtype, DataType.Int if dtype is DataType.Bool else widen(dtype))
    found = ops.sub(ops.add(ops.sum(x, [dim], True), x), ops.cumsum(x, dim))
    return ops.cast(found, n.dtype(n.call.results[0].dtype))


def iota(n: NvfuserEmit) -> Any:
    """start + step * global index, computed in Double for floating point types."""
    call, index, ops = n.call, global_index(n, n.result_runs(0)[0]), n.ops
    if call["dtype"].category is Category.FLOAT:
        index = ops.cast(index, n.dtype(DataType.Double))
    if call["step"] is not None:
        index = ops.mul(index, n.number("step"))
    if call["start"] is not None:
        index = ops.add(index, n.number("start"))
    return ops.cast(index, n.dtype(call["dtype"]))


def constant(n: NvfuserEmit) -> Any:
    """`full` on this rank's part of the shape."""
    return full(n, list(n.result_shapes[0]), n.val(n.number("fill_value")), n.call.results[0].dtype)


def triu(n: NvfuserEmit) -> Any:
    """The diagonal is counted from the rank's own first row and column; for shards in pieces, indices are compared."""
    rows, columns = n.result_runs(0)[-2:]
    diagonal, ndim = n.call["diagonal"], n.call.types[0].ndim
    if len(rows) == len(columns) == 1:
        return n.plain(diagonal=diagonal + rows[0][0] - columns[0][0])
    row, column = (
        along(n, global_index(n, rows), ndim - 2, ndim),
        along(n, global_index(n, columns), ndim - 1, ndim),
    )
    kept = n.ops.ge(n.ops.sub(column, row), diagonal)
    return zero_where_not(n, kept, n.operands[0], n.call.types[0].dtype)


def take(n: NvfuserEmit) -> Any:
    """A rank looks up the indices that it holds; the others give zero (see `kernels.lookup`)."""
    dim, runs = dim_of(n.call), n.operand_runs(0)[dim_of(n.call)]
    if is_whole(n, 0, dim):
        return n.plain()
    if not runs:
        return zeros(n)
    places, inside = local_places(n, n.operands[1], runs)
    return zero_where_not(n, inside, n.ops.take_along_axis(n.operands[0], places, dim), n.call.types[0].dtype)


def gather(n: NvfuserEmit) -> Any:
    """As take_along_axis; in dims where the index is shorter, only its part of the operand is read."""
    (arg, index), dim, tensor = n.call.types, dim_of(n.call), n.operands[0]
    for d in range(arg.ndim):
        if d != dim and arg.shape[d] != index.shape[d] and n.operand_runs(1)[d] != ((0, index.shape[d]),):
            tensor = n.ops.index_select(tensor, global_index(n, n.operand_runs(1)[d]), d)
    if is_whole(n, 0, dim):
        return n.plain(arg=tensor)
    if not n.operand_runs(0)[dim]:
        return zeros(n)
    places, inside = local_places(n, n.operands[1], n.operand_runs(0)[dim])
    return zero_where_not(n, inside, n.ops.gather(tensor, places, dim), arg.dtype)


def index_select(n: NvfuserEmit) -> Any:
    dim = dim_of(n.call)
    return _rows(n, n.operands[0], n.operands[1], dim, n.operand_runs(0)[dim], is_whole(n, 0, dim))


def _rows(n: NvfuserEmit, tensor: Any, index: Any, dim: int, runs: Runs, whole: bool) -> Any:
    """The rows of a dim that an index vector names; zero for those that the rank does not hold."""
    if whole:
        return n.ops.index_select(tensor, index, dim)
    if not runs:
        return zeros(n)
    places, inside = local_places(n, index, runs)
    kind, ndim = n.call.types[0], n.call.types[0].ndim
    made = n.ops.index_select(tensor, places, dim)
    kept = along(n, inside, dim, ndim) if n.call.types[1].ndim else inside
    return zero_where_not(n, kept, made, kind.dtype)


def select(n: NvfuserEmit) -> Any:
    """Zeros where the rank does not hold the index; a negative index counts from the end of the whole dim."""
    dim, index = dim_of(n.call), n.call["index"]
    if not isinstance(index, int):
        if is_whole(n, 0, dim):
            return n.plain()
        raise ToTorch("an index that is known at run time only, in a dim of which the rank has some")
    index += n.call.types[0].shape[dim] if index < 0 else 0
    before = 0
    for a, b in n.operand_runs(0)[dim]:
        if a <= index < b:
            return n.plain(index=n.val(before + index - a))
        before += b - a
    return zeros(n)


def embedding(n: NvfuserEmit) -> Any:
    """padding_idx, scale_grad_by_freq and sparse matter for gradients only."""
    index, weight = n.operands
    if n.call["max_norm"] is not None:
        raise ToTorch("nvFuser's max_norm changes the table in place")
    if is_whole(n, 1, 0):
        return n.ops.embedding_fwd(index, weight)
    if not n.operand_runs(1)[0]:
        return zeros(n)
    places, inside = local_places(n, index, n.operand_runs(1)[0])
    kept = n.ops.broadcast(inside, [*(False for _ in n.call.types[0].shape), True])
    return zero_where_not(n, kept, n.ops.embedding_fwd(places, weight), n.call.types[1].dtype)


def scatter(n: NvfuserEmit) -> Any:
    """With the source in the operand's type; writes to indices that the rank does not hold go to a row that is cut off.

    The `set` gives the result dims that nvFuser's other ops take.
    """
    arg, dim, index, tensor = n.call.types[0], dim_of(n.call), n.operands[1], n.operands[0]
    source = _scattered(n, arg.dtype)
    if is_whole(n, 0, dim):
        return n.ops.set(n.plain(src=source))
    if not n.operand_runs(0)[dim]:
        return n.ops.set(tensor)
    places, inside = local_places(n, index, n.operand_runs(0)[dim])
    shape = n.operand_shapes[0]
    spare = one_dim_widths(arg.ndim, dim, 0, 1)
    made = n.ops.scatter(n.ops.pad(tensor, spare), n.ops.where(inside, places, shape[dim]), source, dim)
    return n.ops.slice(n.ops.set(made), [0] * arg.ndim, list(shape))


def _scattered(n: NvfuserEmit, dtype: DataType) -> Any:
    if isinstance(n.call["src"], TensorRef):
        return cast(n, n.operands[2], n.call.types[2].dtype, dtype)
    return of_category(n, "src", dtype)


def argsort(n: NvfuserEmit) -> Any:
    """Always stable, as the order of equal elements must not depend on the mesh."""
    return n.plain(stable=True)


def topk(n: NvfuserEmit) -> Any:
    """By a stable sort: nvFuser's own topk leaves open which of equal elements it takes."""
    dim, x, shape = dim_of(n.call), n.operands[0], n.result_shapes[0]
    order = n.ops.argsort(x, dim, n.call["largest"], True)
    order = n.ops.slice(order, [0] * len(shape), list(shape))
    return n.ops.take_along_axis(x, order, dim), order
