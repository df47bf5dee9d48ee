"""Writes by index: scatter. A rank writes to the indices that it holds, and leaves out the others."""

from __future__ import annotations

from typing import Any

import torch

from ..dtypes import DataType
from ..errors import user_error
from ..kernels.indices import local_places
from ..kernels.table import kernel
from ..sharding.layout import Runs
from .indexing import check_same_ndim, checked_index, holds_all
from .nvfuser_lowering import cast, is_whole, nvfuser_places, of_category
from .opdef import Call, Emit, NvfuserEmit, OpDef, Sample
from .rules import DimFactors, Rule, RuleBuilder
from .shape_arithmetic import UNKNOWN, check_index, dim_of, one_dim_widths
from .values import Param, ParamKind, TensorRef, TensorType
from .vjp import Backward, Tensor, each, sizes
from .window_gradients import zero_padded

K = ParamKind


def scatter_types(call: Call) -> tuple[TensorType, ...]:
    """The type of the result, which is the first operand's. Raises DefinitionError where operands do not fit."""
    arg, *others = call.types
    check_same_ndim(call, *others)
    check_index(call, others[0])
    index, dim = others[0], dim_of(call)
    for what, limit in (("the tensor", arg), ("the source", others[-1])):
        for d, (n, most) in enumerate(zip(index.shape, limit.shape, strict=True)):
            if UNKNOWN not in (n, most) and n > most and not (limit is arg and d == dim):
                raise user_error(f"{call.op.name}: dim {d} of the index is larger than that of {what}", str(n),
                                 f"{most} or less", "Check the operands' shapes.")  # fmt: skip
    return (arg,)


def _rule(call: Call) -> Rule:
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


def _emit(e: Emit) -> str:
    dim, source = dim_of(e.call), e.operand("src") or e.scalar("src")
    arg, index = e.call.types[0], checked_index(e, 1, e.call.types[0].shape[dim])
    if not holds_all(e, 0, dim):
        return f"K.scatter({e.operands[0]}, {index}, {source}, {dim}, {e.operand_runs(0)[dim]})"
    if isinstance(e.call["src"], TensorRef) and e.call.types[2].dtype is not arg.dtype:
        source = f"{source}.to({e.operands[0]}.dtype)"
    return f"{e.operands[0]}.scatter({dim}, {index}, {source})"


@kernel
def scatter(x: torch.Tensor, index: torch.Tensor, src: Any, dim: int, runs: Runs) -> torch.Tensor:
    """`torch.scatter` into the part of a dim that the rank holds; writes to other parts are left out."""
    places, inside = local_places(index, runs)
    n = x.shape[dim]
    spare = x.new_zeros([1 if d == dim else size for d, size in enumerate(x.shape)])
    source = src.to(x.dtype) if isinstance(src, torch.Tensor) else src
    return torch.cat([x, spare], dim).scatter(dim, torch.where(inside, places, n), source).narrow(dim, 0, n)


def _nvfuser(n: NvfuserEmit) -> Any:
    """With the source in the operand's type; writes to indices that the rank does not hold go to a row that is cut off.

    The `set` gives the result dims that nvFuser's other ops take.
    """
    arg, dim, index, tensor = n.call.types[0], dim_of(n.call), n.operands[1], n.operands[0]
    source = _source(n, arg.dtype)
    if is_whole(n, 0, dim):
        return n.ops.set(n.plain(src=source))
    if not n.operand_runs(0)[dim]:
        return n.ops.set(tensor)
    places, inside = nvfuser_places(n, index, n.operand_runs(0)[dim])
    shape = n.operand_shapes[0]
    spare = one_dim_widths(arg.ndim, dim, 0, 1)
    made = n.ops.scatter(n.ops.pad(tensor, spare), n.ops.where(inside, places, shape[dim]), source, dim)
    return n.ops.slice(n.ops.set(made), [0] * arg.ndim, list(shape))


def _source(n: NvfuserEmit, dtype: DataType) -> Any:
    if isinstance(n.call["src"], TensorRef):
        return cast(n, n.operands[2], n.call.types[2].dtype, dtype)
    return of_category(n, "src", dtype)


def _operand_vjp(b: Backward) -> Tensor:
    """Zero where an element was overwritten."""
    return b.ops.scatter(b.grad, b["index"], 0.0, b["dim"])


def _source_vjp(b: Backward) -> Tensor:
    source, index = b["src"], b["index"]
    found = b.ops.gather(b.grad, index, b["dim"])
    after = [n - m for n, m in zip(sizes(source), sizes(index), strict=True)]
    return zero_padded(b.ops, found, [0] * source.ndim, after)


def _samples() -> list[Sample]:
    index, source = TensorType((3, 8), DataType.Int), TensorType((3, 8), DataType.Float)
    values = {1: [5] * 8 + [0] * 8 + [2] * 8}
    return [
        Sample((TensorType((6, 8), DataType.Float), index, source, 0), values=values),
        Sample((TensorType((6, 8), DataType.Float), index, 1.5, 0), values=values),
        Sample((TensorType((6, 9), DataType.Float), index, TensorType((4, 8), DataType.Float), 0), values=values),
    ]


OPS = (
    OpDef(
        "scatter",
        (Param("arg", K.TENSOR), Param("index", K.TENSOR), Param("src", K.TENSOR_OR_SCALAR), Param("dim", K.DIM)),
        scatter_types,
        _rule,
        _emit,
        samples=_samples,
        nvfuser=_nvfuser,
        vjp=each(arg=_operand_vjp, src=_source_vjp),
        order_free=("arg", "index"),
        about="`arg` with `src` written along `dim` at the places that `index` names",
    ),
)
