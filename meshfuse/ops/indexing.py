"""Lookups by index: take_along_axis, gather, index_select, select, embedding_fwd, scatter.

The dim that is looked up in is a reduction factor: a rank finds the indices that it holds, the others count
as zero, and the result is a partial sum of the result's size, however large the dim (see `kernels.lookup`). An
index that the whole dim does not have is an error while the program runs, on every mesh.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..argument_checks import as_int
from ..dtypes import DataType
from ..errors import user_error
from ..gradients.indexing import INDEXING
from . import index_text as lookups
from . import nvfuser_forms
from .opdef import Call, Emit, OpDef, Partial, Sample, Writing, picked
from .rules import DimFactors, FactorKind, Rule, RuleBuilder
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
from .values import Param, ParamKind, ScalarRef, TensorRef, TensorType

K = ParamKind


def _is_whole(e: Emit, operand: int, dim: int) -> bool:
    return e.operand_shapes[operand][dim] == e.call.types[operand].shape[dim]


def _same_ndim(call: Call, *others: TensorType) -> None:
    for other in others:
        check_ndim(
            call.op.name,
            "the index" if other is others[0] else "the source",
            other,
            *[call.types[0].ndim] * 2,
        )


def _take_infer(call: Call) -> tuple[TensorType, ...]:
    arg, index = call.types
    _same_ndim(call, index)
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
    index = lookups.checked_index(e, 1, e.call.types[0].shape[dim])
    if _is_whole(e, 0, dim):
        return f"torch.take_along_dim({e.operands[0]}, {index}, {dim})"
    return f"K.take({e.operands[0]}, {index}, {dim}, {e.operand_runs(0)[dim]})"


def _gather_infer(call: Call) -> tuple[TensorType, ...]:
    arg, index = call.types
    _same_ndim(call, index)
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
    checked = lookups.checked_index(e, 1, arg.shape[dim])
    if _is_whole(e, 0, dim):
        return f"{text}.gather({dim}, {checked})"
    return f"K.take({text}, {checked}, {dim}, {e.operand_runs(0)[dim]})"


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
    index = lookups.checked_index(e, 1, e.call.types[0].shape[dim])
    if _is_whole(e, 0, dim):
        return f"{e.operands[0]}.index_select({dim}, {index})"
    return f"K.index_select({e.operands[0]}, {index}, {dim}, {e.operand_runs(0)[dim]})"


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
    index = lookups.checked_place(e, "index", e.call.types[0].shape[dim])
    if _is_whole(e, 0, dim):
        return f"{e.operands[0]}.select({dim}, {index})"
    return f"K.select({e.operands[0]}, {index}, {dim}, {e.operand_runs(0)[dim]})"


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


def _embedding_infer(call: Call) -> tuple[TensorType, ...]:
    index, weight = call.types
    check_ndim("embedding_fwd", "the weight", weight, 2, 2)
    check_index(call, index)
    _check_padding(call["padding_idx"], weight)
    return (TensorType((*index.shape, weight.shape[1]), weight.dtype),)


def _check_padding(padding: Any, weight: TensorType) -> None:
    """Raises DefinitionError unless it is a row of the table, counted from the end if negative.

    Of a scalar the type counts.
    """
    n, place = weight.shape[0], as_int(padding)
    if padding is None or (isinstance(padding, ScalarRef) and padding.dtype in (None, DataType.Int, DataType.Int32)):
        return
    if place is None or (n != UNKNOWN and not -n <= place < n):
        found = "a scalar of another type" if isinstance(padding, ScalarRef) else str(padding)
        rows = f"an int from {-n} to {n - 1}" if n != UNKNOWN else "an int"
        raise user_error("embedding_fwd: padding_idx", found, f"{rows}, a row of {weight}",
                         "Pass an existing row, or None.")  # fmt: skip


def _embedding_rule(call: Call) -> Rule:
    """b*, v e -> b* e, summed over v; a norm limit needs the rows whole."""
    (index, weight), builder = call.types, RuleBuilder()
    places, rows = builder.dims(index.shape), builder.reduction(weight.shape[0])
    row = builder.factor(weight.shape[1]) if call["max_norm"] is None else builder.blocked(weight.shape[1])
    return builder.build([places, (rows, row)], [(*places, row)])


def _embedding_emit(e: Emit) -> str:
    """Text of the call; padding_idx, scale_grad_by_freq and sparse matter for gradients only."""
    weight, index = e.operands[1], lookups.checked_index(e, 0, e.call.types[1].shape[0])
    text = f"F.embedding({index}, {weight})"
    if not _is_whole(e, 1, 0):
        text = f"K.embedding({index}, {weight}, {e.operand_runs(1)[0]})"
    if e.call["max_norm"] is None:
        return text
    norm_type = "2.0" if e.call["norm_type"] is None else e.scalar("norm_type")
    return f"K.limit_norm({text}, {e.scalar('max_norm')}, {norm_type})"


def _scatter_infer(call: Call) -> tuple[TensorType, ...]:
    arg, *others = call.types
    _same_ndim(call, *others)
    check_index(call, others[0])
    index, dim = others[0], dim_of(call)
    for what, limit in (("the tensor", arg), ("the source", others[-1])):
        for d, (n, most) in enumerate(zip(index.shape, limit.shape, strict=True)):
            if UNKNOWN not in (n, most) and n > most and not (limit is arg and d == dim):
                raise user_error(f"scatter: dim {d} of the index is larger than that of {what}", str(n),
                                 f"{most} or less", "Check the operands' shapes.")  # fmt: skip
    return (arg,)


def _scatter_rule(call: Call) -> Rule:
    """The index is needed whole along its dim.

    Other dims pass through where all sizes are equal, else they are whole.
    """
    dim, builder, shape = dim_of(call), RuleBuilder(), call.types[0].shape
    written: list[tuple[int, ...]] = []
    sources: list[list[tuple[int, ...]]] = [[] for _ in call.types[1:]]
    for d, n in enumerate(shape):
        equal = all(t.shape[d] == n for t in call.types[1:])
        written.append(builder.factor(n) if d == dim or equal else builder.blocked(n))
        for t, dims in zip(call.types[1:], sources, strict=True):
            dims.append(written[d] if d != dim and equal else builder.blocked(t.shape[d]))
    target: DimFactors = tuple(written)
    return builder.build([target, *map(tuple, sources)], [target])


def _scatter_emit(e: Emit) -> str:
    dim, source = dim_of(e.call), e.operand("src") or e.scalar("src")
    arg, index = e.call.types[0], lookups.checked_index(e, 1, e.call.types[0].shape[dim])
    if not _is_whole(e, 0, dim):
        return f"K.scatter({e.operands[0]}, {index}, {source}, {dim}, {e.operand_runs(0)[dim]})"
    if isinstance(e.call["src"], TensorRef) and e.call.types[2].dtype is not arg.dtype:
        source = f"{source}.to({e.operands[0]}.dtype)"
    return f"{e.operands[0]}.scatter({dim}, {index}, {source})"


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


def _scatter_samples() -> list[Sample]:
    index = _t(3, 8, dtype=DataType.Int)
    values = {1: [5] * 8 + [0] * 8 + [2] * 8}
    return [
        Sample((_t(6, 8), index, _t(3, 8), 0), values=values),
        Sample((_t(6, 8), index, 1.5, 0), values=values),
        Sample((_t(6, 9), index, _t(4, 8), 0), values=values),
    ]


def _embedding_samples() -> list[Sample]:
    index, weight, values = _t(2, 6, dtype=DataType.Int), _t(10, 8), {0: (9, 0, 4, 7, 2)}
    return [Sample((index, weight), values=values), Sample((index, weight, None, 1.5), values=values)]


_ARG, _INDEX, _DIM = Param("arg", K.TENSOR), Param("index", K.TENSOR), Param("dim", K.DIM)
_EMBEDDING = tuple(
    Param(name, K.OPTIONAL_SCALAR, None)
    for name in ("padding_idx", "max_norm", "norm_type", "scale_grad_by_freq", "sparse")
)
OPS = (
    OpDef(
        "take_along_axis",
        (_ARG, _INDEX, _DIM),
        _take_infer,
        _take_rule,
        _take_emit,
        Partial.FIRST,
        picked,
        samples=lambda: [*_take_samples(), _lookup(_t(6, 8), (1, 3), 1, 0, 7, 3)],
        nvfuser=nvfuser_forms.take,
        vjp=INDEXING["take_along_axis"],
        about="elements along `dim` by an index that broadcasts against the other dims",
    ),
    OpDef(
        "gather",
        (_ARG, _INDEX, _DIM),
        _gather_infer,
        _gather_rule,
        _gather_emit,
        Partial.FIRST,
        picked,
        samples=lambda: [*_take_samples()[::2], _lookup(_t(6, 8), (4, 3), 1, 0, 7, 3, 5, 2)],
        nvfuser=nvfuser_forms.gather,
        vjp=INDEXING["gather"],
        about="elements along `dim` by an index of the result's shape, as torch.gather",
    ),
    OpDef(
        "index_select",
        (_ARG, _INDEX, _DIM),
        _index_select_infer,
        _index_select_rule,
        _index_select_emit,
        Partial.FIRST,
        picked,
        samples=lambda: [_lookup(_t(6, 8), (5,), 1, 7, 0, 3, 3, 6), _lookup(_t(6, 8), (), 0, 4)],
        nvfuser=nvfuser_forms.index_select,
        vjp=INDEXING["index_select"],
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
        nvfuser=nvfuser_forms.select,
        distributed=_sliced_select,
        has_form=_has_place,
        vjp=INDEXING["select"],
        is_view=True,
        about="one slice of `dim`, which goes",
    ),
    OpDef(
        "embedding_fwd",
        (Param("input", K.TENSOR), Param("weight", K.TENSOR), *_EMBEDDING),
        _embedding_infer,
        _embedding_rule,
        _embedding_emit,
        flops=picked,
        samples=_embedding_samples,
        nvfuser=nvfuser_forms.embedding,
        vjp=INDEXING["embedding_fwd"],
        about="rows of `weight` by index, as torch's embedding",
    ),
    OpDef(
        "scatter",
        (_ARG, _INDEX, Param("src", K.TENSOR_OR_SCALAR), _DIM),
        _scatter_infer,
        _scatter_rule,
        _scatter_emit,
        samples=_scatter_samples,
        nvfuser=nvfuser_forms.scatter,
        vjp=INDEXING["scatter"],
        about="`arg` with `src` written along `dim` at the places that `index` names",
    ),
)
