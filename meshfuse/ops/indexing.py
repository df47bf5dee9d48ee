"""Lookups by index: take_along_axis, gather, index_select, select, embedding_fwd, scatter.

The dim that is looked up in is a reduction factor: a rank finds the indices that it holds, the others count
as zero, and the result is a partial sum of the result's size, however large the dim (masked local access, as
Megatron-LM looks up a vocabulary-parallel embedding: Shoeybi et al. 2019). An
index that the whole dim does not have is an error while the program runs, on every mesh.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ..dtypes import DataType
from ..errors import user_error
from ..kernels.indices import Runs, global_index, local_place, local_places
from ..kernels.table import kernel
from .nvfuser_lowering import along, is_whole, nvfuser_index, nvfuser_places, zero_where_not, zeros
from .opdef import Call, Emit, NvfuserEmit, OpDef, Partial, Sample, ToTorch, Writing, flops_of_lookup
from .rules import FactorKind, Rule, RuleBuilder
from .shape_arithmetic import (
    UNKNOWN,
    aligned_dims,
    broadcast_shapes,
    check_index,
    check_ndim,
    check_place,
    dim_of,
    with_size,
)
from .values import Param, ParamKind, TensorRef, TensorType
from .vjp import Backward, Tensor, each, sizes, sum_to
from .window_gradients import WindowGradient, zero_padded

K = ParamKind


def holds_all(e: Emit, operand: int, dim: int) -> bool:
    return e.operand_shapes[operand][dim] == e.call.types[operand].shape[dim]


def checked_index(e: Emit, operand: int, n: int) -> str:
    """Text of an operand as checked indices of a dim of size n."""
    return f"K.checked({e.operands[operand]}, {n})"


def checked_place(e: Emit, name: str, n: int) -> str:
    """Text of a scalar argument as one checked index of a dim of size n, counted from the front."""
    return f"K.checked_place({e.scalar(name)}, {n})"


def check_same_ndim(call: Call, *others: TensorType) -> None:
    for other in others:
        check_ndim(
            call.op.name,
            "the index" if other is others[0] else "the source",
            other,
            *[call.types[0].ndim] * 2,
        )


def _take_infer(call: Call) -> tuple[TensorType, ...]:
    arg, index = call.types
    check_same_ndim(call, index)
    check_index(call, index)
    dim = dim_of(call)
    shape = list(broadcast_shapes(call.op.name, [with_size(arg.shape, dim, 1), with_size(index.shape, dim, 1)]))
    shape[dim] = index.shape[dim]
    return (TensorType(tuple(shape), arg.dtype),)


def _take_rule(call: Call) -> Rule:
    """b* n, b* m -> b* m, summed over n."""
    arg, index = call.types
    dim, result, builder = dim_of(call), call.results[0].shape, RuleBuilder()
    factors = builder.dims(result)
    looked_up = list(aligned_dims(with_size(arg.shape, dim, 1), result, factors))
    looked_up[dim] = builder.reduction(arg.shape[dim])
    return builder.build([tuple(looked_up), aligned_dims(index.shape, result, factors)], [factors])


def _take_emit(e: Emit) -> str:
    dim = dim_of(e.call)
    index = checked_index(e, 1, e.call.types[0].shape[dim])
    if holds_all(e, 0, dim):
        return f"torch.take_along_dim({e.operands[0]}, {index}, {dim})"
    return f"K.take({e.operands[0]}, {index}, {dim}, {e.operand_runs(0)[dim]})"


@kernel
def take(x: torch.Tensor, index: torch.Tensor, dim: int, runs: Runs) -> torch.Tensor:
    """`torch.take_along_dim` of the indices in `runs`, zero for the others; all dims but `dim` broadcast."""
    places, inside = local_places(index, runs)
    if x.shape[dim] == 0:
        x = x.new_zeros([1 if d == dim else n for d, n in enumerate(x.shape)])
    return torch.where(inside, torch.take_along_dim(x, places, dim), torch.zeros((), dtype=x.dtype, device=x.device))


def _take_nvfuser(n: NvfuserEmit) -> Any:
    """A rank looks up the indices that it holds; the others give zero."""
    dim, runs = dim_of(n.call), n.operand_runs(0)[dim_of(n.call)]
    if is_whole(n, 0, dim):
        return n.plain()
    if not runs:
        return zeros(n)
    places, inside = nvfuser_places(n, n.operands[1], runs)
    return zero_where_not(n, inside, n.ops.take_along_axis(n.operands[0], places, dim), n.call.types[0].dtype)


def add_where_read(b: Backward, index: Tensor) -> Tensor:
    """The gradient added where its element was read.

    The dim that was read from is free in `take_along_axis_bwd`: each rank adds up what belongs to the indices that it
    holds, so that the gradient of a sharded operand is made in shards, without communication.
    """
    return b.ops.take_along_axis_bwd(b.grad, index, b.dim, sizes(b["arg"])[b.dim])


def _take_vjp(b: Backward) -> Tensor:
    return sum_to(b, add_where_read(b, b["index"]), b["arg"])


def _gather_infer(call: Call) -> tuple[TensorType, ...]:
    arg, index = call.types
    check_same_ndim(call, index)
    check_index(call, index)
    dim = dim_of(call)
    for d, (n, m) in enumerate(zip(arg.shape, index.shape, strict=True)):
        if d != dim and UNKNOWN not in (n, m) and m > n:
            raise user_error(
                f"gather: the index is larger than the operand in dim {d}",
                f"{index} for {arg}",
                f"at most {n}",
                "Slice the index.",
            )
    return (TensorType(index.shape, arg.dtype),)


def _gather_rule(call: Call) -> Rule:
    """As take_along_axis; the operand is needed whole in dims where the index is shorter."""
    arg, index = call.types
    dim, builder = dim_of(call), RuleBuilder()
    factors = builder.dims(index.shape)
    looked_up = tuple(
        builder.reduction(n) if d == dim else factors[d] if n == index.shape[d] else builder.blocked(n)
        for d, n in enumerate(arg.shape)
    )
    return builder.build([looked_up, factors], [factors])


def _gather_emit(e: Emit) -> str:
    (arg, index), dim, text = e.call.types, dim_of(e.call), e.operands[0]
    for d, (n, m) in enumerate(zip(arg.shape, index.shape, strict=True)):
        if d != dim and n != m:
            text = f"K.take_rows({text}, {d}, {e.operand_runs(1)[d]})"
    checked = checked_index(e, 1, arg.shape[dim])
    if holds_all(e, 0, dim):
        return f"{text}.gather({dim}, {checked})"
    return f"K.take({text}, {checked}, {dim}, {e.operand_runs(0)[dim]})"


@kernel
def take_rows(x: torch.Tensor, dim: int, runs: Runs) -> torch.Tensor:
    """The indices in `runs` of one dim of a whole tensor."""
    return x.index_select(dim, global_index(runs, x.device))


def _gather_nvfuser(n: NvfuserEmit) -> Any:
    """As take_along_axis; in dims where the index is shorter, only its part of the operand is read."""
    (arg, index), dim, tensor = n.call.types, dim_of(n.call), n.operands[0]
    for d in range(arg.ndim):
        if d != dim and arg.shape[d] != index.shape[d] and n.operand_runs(1)[d] != ((0, index.shape[d]),):
            tensor = n.ops.index_select(tensor, nvfuser_index(n, n.operand_runs(1)[d]), d)
    if is_whole(n, 0, dim):
        return n.plain(arg=tensor)
    if not n.operand_runs(0)[dim]:
        return zeros(n)
    places, inside = nvfuser_places(n, n.operands[1], n.operand_runs(0)[dim])
    return zero_where_not(n, inside, n.ops.gather(tensor, places, dim), arg.dtype)


def _gather_vjp(b: Backward) -> Tensor:
    """As of take_along_axis, with zeros for what the operand has beyond a shorter index."""
    x, index, dim = b["arg"], b["index"], b.dim
    pairs = zip(sizes(x), sizes(index), strict=True)
    after = [0 if d == dim else n - m for d, (n, m) in enumerate(pairs)]
    return zero_padded(b.ops, add_where_read(b, index), [0] * x.ndim, after)


def _index_select_infer(call: Call) -> tuple[TensorType, ...]:
    arg, index = call.types
    check_ndim("index_select", "the index", index, 0, 1)
    check_index(call, index)
    dim = dim_of(call)
    return (TensorType((*arg.shape[:dim], index.shape[0] if index.ndim else 1, *arg.shape[dim + 1 :]), arg.dtype),)


def _index_select_rule(call: Call) -> Rule:
    """a* n b*, m -> a* m b*, summed over n."""
    (arg, index), dim, builder = call.types, dim_of(call), RuleBuilder()
    kept = builder.dims(arg.shape, [dim], FactorKind.REDUCE)
    places = builder.dims(index.shape)
    result = (*kept[:dim], places[0] if places else (), *kept[dim + 1 :])
    return builder.build([kept, places], [result])


def _index_select_emit(e: Emit) -> str:
    dim = dim_of(e.call)
    index = checked_index(e, 1, e.call.types[0].shape[dim])
    if holds_all(e, 0, dim):
        return f"{e.operands[0]}.index_select({dim}, {index})"
    return f"K.index_select({e.operands[0]}, {index}, {dim}, {e.operand_runs(0)[dim]})"


@kernel
def index_select(x: torch.Tensor, index: torch.Tensor, dim: int, runs: Runs) -> torch.Tensor:
    """`torch.index_select` of the indices in `runs`, zero for the others."""
    places, inside = local_places(index.reshape(-1), runs)
    if x.shape[dim] == 0:
        return x.new_zeros([len(places) if d == dim else n for d, n in enumerate(x.shape)])
    return x.index_select(dim, places).masked_fill(~inside.reshape(_sized(-1, dim, x.ndim)), 0)


def _sized(n: int, dim: int, ndim: int) -> list[int]:
    return [n if d == dim else 1 for d in range(ndim)]


def _index_select_nvfuser(n: NvfuserEmit) -> Any:
    dim = dim_of(n.call)
    return _rows(n, n.operands[0], n.operands[1], dim, n.operand_runs(0)[dim], is_whole(n, 0, dim))


def _rows(n: NvfuserEmit, tensor: Any, index: Any, dim: int, runs: Runs, whole: bool) -> Any:
    """The rows of a dim that an index vector names; zero for those that the rank does not hold."""
    if whole:
        return n.ops.index_select(tensor, index, dim)
    if not runs:
        return zeros(n)
    places, inside = nvfuser_places(n, index, runs)
    ttype, ndim = n.call.types[0], n.call.types[0].ndim
    made = n.ops.index_select(tensor, places, dim)
    kept = along(n, inside, dim, ndim) if n.call.types[1].ndim else inside
    return zero_where_not(n, kept, made, ttype.dtype)


def _index_select_vjp(b: Backward) -> Tensor:
    index, ndim = b["index"], b["arg"].ndim
    flags = [d != b.dim for d in range(ndim)]
    return add_where_read(b, b.ops.broadcast(index, flags if index.ndim else [True] * ndim))


def _select_infer(call: Call) -> tuple[TensorType, ...]:
    (arg,), dim = call.types, dim_of(call)
    check_place(call, call["index"], arg.shape[dim], f"dim {dim} of {arg}")
    return (TensorType((*arg.shape[:dim], *arg.shape[dim + 1 :]), arg.dtype),)


def _select_rule(call: Call) -> Rule:
    (arg,), dim, builder = call.types, dim_of(call), RuleBuilder()
    operand = builder.dims(arg.shape, [dim], FactorKind.REDUCE)
    return builder.build([operand], [(*operand[:dim], *operand[dim + 1 :])])


def _select_emit(e: Emit) -> str:
    dim = dim_of(e.call)
    index = checked_place(e, "index", e.call.types[0].shape[dim])
    if holds_all(e, 0, dim):
        return f"{e.operands[0]}.select({dim}, {index})"
    return f"K.select({e.operands[0]}, {index}, {dim}, {e.operand_runs(0)[dim]})"


@kernel
def select(x: torch.Tensor, index: int, dim: int, runs: Runs) -> torch.Tensor:
    """`torch.select` where the rank holds the index, zeros elsewhere."""
    place = local_place(index, runs)
    return x.new_zeros([n for d, n in enumerate(x.shape) if d != dim]) if place is None else x.select(dim, place)


def _select_nvfuser(n: NvfuserEmit) -> Any:
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


def _select_vjp(b: Backward) -> Tensor | WindowGradient:
    """Zeros around what was selected."""
    x, dim, index = b["arg"], b.dim, b["index"]
    n = sizes(x)[dim]
    if isinstance(index, int) and isinstance(n, int):
        grad = b.ops.broadcast(b.grad, [d == dim for d in range(x.ndim)])
        return WindowGradient(grad, tuple(index % n if d == dim else 0 for d in range(x.ndim)))
    return b.ops.select_bwd(b.grad, index, dim, n)


def _has_place(call: Call) -> bool:
    return isinstance(call["index"], int)


def _sliced_select(
    r: Writing, call: Call, operands: tuple[TensorRef, ...], dim: int, blocks: int
) -> Sequence[TensorRef] | None:
    """A slice of one element, which moves only that element. The sum over ranks would reduce zeros of all but one."""
    (arg,), index = call.types, call["index"]
    if dim != dim_of(call) or arg.shape[dim] == 1:
        return None
    start, stop = [0] * arg.ndim, list(arg.shape)
    start[dim] = index % arg.shape[dim]
    stop[dim] = start[dim] + 1
    return [r.call("squeeze", r.call("slice", operands[0], start, stop), [dim])]


def _t(*shape: int, dtype: DataType = DataType.Float) -> TensorType:
    return TensorType(shape, dtype)


def _lookup(arg: TensorType, index: tuple[int, ...], dim: int, *values: int) -> Sample:
    return Sample((arg, _t(*index, dtype=DataType.Int), dim), values={1: values})


def _take_samples() -> list[Sample]:
    return [
        _lookup(_t(6, 8), (6, 3), 1, 0, 7, 3, 5, 2),
        _lookup(_t(6, 8), (4, 8), -2, 5, 0, 2, 4, 1),
        _lookup(_t(8), (8,), 0, 7, 1, 4),
        _lookup(_t(4, 6, dtype=DataType.Int), (4, 1), 1, 5, 0, 3),
    ]


_ARG, _INDEX, _DIM = Param("arg", K.TENSOR), Param("index", K.TENSOR), Param("dim", K.DIM)
OPS = (
    OpDef(
        "take_along_axis",
        (_ARG, _INDEX, _DIM),
        _take_infer,
        _take_rule,
        _take_emit,
        Partial.FIRST,
        flops_of_lookup,
        samples=lambda: [*_take_samples(), _lookup(_t(6, 8), (1, 3), 1, 0, 7, 3)],
        nvfuser=_take_nvfuser,
        vjp=each(arg=_take_vjp),
        order_free=("arg", "index"),
        about="elements along `dim` by an index that broadcasts against the other dims",
    ),
    OpDef(
        "gather",
        (_ARG, _INDEX, _DIM),
        _gather_infer,
        _gather_rule,
        _gather_emit,
        Partial.FIRST,
        flops_of_lookup,
        samples=lambda: [*_take_samples()[::2], _lookup(_t(6, 8), (4, 3), 1, 0, 7, 3, 5, 2)],
        nvfuser=_gather_nvfuser,
        vjp=each(arg=_gather_vjp),
        order_free=("arg", "index"),
        about="elements along `dim` by an index of the result's shape, as torch.gather",
    ),
    OpDef(
        "index_select",
        (_ARG, _INDEX, _DIM),
        _index_select_infer,
        _index_select_rule,
        _index_select_emit,
        Partial.FIRST,
        flops_of_lookup,
        samples=lambda: [_lookup(_t(6, 8), (5,), 1, 7, 0, 3, 3, 6), _lookup(_t(6, 8), (), 0, 4)],
        nvfuser=_index_select_nvfuser,
        vjp=each(arg=_index_select_vjp),
        about="the slices of `dim` that a list of indices names",
    ),
    OpDef(
        "select",
        (_ARG, Param("index", K.SCALAR), _DIM),
        _select_infer,
        _select_rule,
        _select_emit,
        Partial.MOVE,
        samples=lambda: [Sample((_t(6, 8), 5, 1)), Sample((_t(6, 8), -1, 0))],
        nvfuser=_select_nvfuser,
        distributed=_sliced_select,
        has_form=_has_place,
        vjp=each(arg=_select_vjp),
        is_view=True,
        about="one slice of `dim`, which goes",
    ),
)
