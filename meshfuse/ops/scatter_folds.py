"""Writes by index that combine: the greatest, the least or the product of what is written to a place and stood there.

A rank writes to the indices that it holds. Where the source is sharded, ranks with a part of it give a maximum (or
minimum) each, which is reduced. (Sums: `fd.ops.scatter_add`, which is made of `take_along_axis_bwd`.)
"""

from __future__ import annotations

from typing import Any

import torch

from ..dtypes import DataType
from ..kernels.indices import local_places
from ..kernels.table import kernel
from ..sharding.layout import Runs
from .indexing import checked_index
from .opdef import Call, Emit, OpDef, Sample
from .rules import FactorKind, Rule, RuleBuilder
from .scatter import scatter_types
from .shape_arithmetic import check_order, dim_of
from .values import Param, ParamKind, TensorType
from .vjp import Backward, Tensor, sizes
from .window_gradients import zero_padded

K = ParamKind


def _infer(call: Call) -> tuple[TensorType, ...]:
    made = scatter_types(call)
    check_order(call.op.name, made[0])
    return made


def _rule(call: Call, reduce: str) -> Rule:
    """The dim of the result is free; that of the index and source is reduced, and whole for products.

    Other dims pass through where all sizes are equal, else they are whole.
    """
    dim, builder = dim_of(call), RuleBuilder()
    arg, index, src = call.types
    dims: list[tuple[tuple[int, ...], ...]] = []
    kind = FactorKind.BLOCK if reduce == "prod" else FactorKind.REDUCE
    for d, shape in enumerate(zip(arg.shape, index.shape, src.shape, strict=True)):
        if d == dim and shape[1] == shape[2]:
            written = builder.factor(shape[1], kind, reduce)
            dims.append((builder.factor(shape[0]), written, written))
        elif d != dim and len(set(shape)) == 1:
            dims.append((builder.factor(shape[0]),) * 3)
        else:
            dims.append(tuple(builder.blocked(n) for n in shape))
    operands = [tuple(factors) for factors in zip(*dims, strict=True)]
    return builder.build(operands, operands[:1])


def _emit(e: Emit, reduce: str) -> str:
    dim = dim_of(e.call)
    index = checked_index(e, 1, e.call.types[0].shape[dim])
    return f"K.scatter_fold({e.operands[0]}, {index}, {e.operands[2]}, {dim}, {e.operand_runs(0)[dim]}, {reduce!r})"


@kernel
def scatter_fold(
    x: torch.Tensor, index: torch.Tensor, src: torch.Tensor, dim: int, runs: Runs, reduce: str
) -> torch.Tensor:
    """`torch.scatter_reduce` into the part of a dim that the rank holds; what belongs elsewhere is left out."""
    places, inside = local_places(index, runs)
    n = x.shape[dim]
    spare = x.new_zeros([1 if d == dim else size for d, size in enumerate(x.shape)])
    made = torch.cat([x, spare], dim).scatter_reduce(dim, torch.where(inside, places, n), src.to(x.dtype), reduce)
    return made.narrow(dim, 0, n)


def _extreme_vjp(b: Backward) -> dict[str, Any]:
    """The gradient goes in equal parts to all that are equal to the result."""
    x, index, src, dim = b["arg"], b["index"], b["src"], b.dim
    read = b.ops.slice(src, [0] * src.ndim, sizes(index))
    is_own = b.ops.cast(b.ops.eq(x, b.result), x.dtype)
    is_written = b.ops.cast(b.ops.eq(read, b.ops.gather(b.result, index, dim)), x.dtype)
    count = b.ops.add(is_own, _added(b, is_written))
    share = b.ops.truediv(b.grad, count)
    found: dict[str, Any] = {}
    if b.needs("arg"):
        found["arg"] = b.ops.mul(is_own, share)
    if b.needs("src"):
        found["src"] = _padded(b, b.ops.mul(is_written, b.ops.gather(share, index, dim)), src)
    return found


def _added(b: Backward, x: Tensor) -> Tensor:
    """The elements added up where the index names them, in the shape of the result."""
    dim = b.dim
    made = b.ops.take_along_axis_bwd(x, b["index"], dim, sizes(b["arg"])[dim])
    rows = zip(sizes(b["arg"]), sizes(b["index"]), strict=True)
    return zero_padded(b.ops, made, [0] * x.ndim, [0 if d == dim else n - m for d, (n, m) in enumerate(rows)])


def _padded(b: Backward, x: Tensor, like: Tensor) -> Tensor:
    after = [n - m for n, m in zip(sizes(like), sizes(b["index"]), strict=True)]
    return zero_padded(b.ops, x, [0] * x.ndim, after)


def _samples() -> list[Sample]:
    index, source = TensorType((5, 8), DataType.Int), TensorType((5, 8), DataType.Float)
    return [
        Sample((TensorType((6, 8), DataType.Float), index, source, 0), values={1: (5, 0, 2, 2, 5, 1, 0)}),
        Sample((TensorType((6, 9), DataType.Float), index, source, 1), values={1: (8, 0, 2, 2, 5, 1, 0)}),
    ]  # fmt: skip


def _fold(name: str, reduce: str, torch_name: str, about: str) -> OpDef:
    params = (Param("arg", K.TENSOR), Param("index", K.TENSOR), Param("src", K.TENSOR), Param("dim", K.DIM))
    return OpDef(
        name, params, _infer, lambda call: _rule(call, reduce), lambda e: _emit(e, torch_name), samples=_samples,
        nvfuser="nvFuser has no scatter that combines", vjp=None if reduce == "prod" else _extreme_vjp,
        reference=lambda x, index, src, dim: x.scatter_reduce(dim, index, src, torch_name), about=about,
    )  # fmt: skip


OPS = (
    _fold("scatter_max", "max", "amax", "the greatest of what `src` writes along `dim` by `index`, and of `arg`"),
    _fold("scatter_min", "min", "amin", "the least of what `src` writes along `dim` by `index`, and of `arg`"),
    _fold("scatter_prod", "prod", "prod", "the product of what `src` writes along `dim` by `index`, and of `arg`"),
)
