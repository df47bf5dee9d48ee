"""Sorts: argsort and topk. Equal elements are in the order of their indices, on every mesh."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ..dtypes import DataType
from ..errors import user_error
from ..kernels.table import kernel
from .blocks import block_size
from .indexing import add_where_read
from .opdef import Call, Emit, NvfuserEmit, OpDef, Sample, Writing
from .rules import FactorKind, Rule, RuleBuilder
from .scans import whole_dim_rule
from .shape_arithmetic import UNKNOWN, check_order, dim_of, known_size
from .values import Param, ParamKind, TensorRef, TensorType
from .vjp import Backward, Tensor, each

K = ParamKind


def _argsort_infer(call: Call) -> tuple[TensorType, ...]:
    dim_of(call)
    check_order("argsort", call.types[0])
    return (TensorType(call.types[0].shape, DataType.Int),)


def _argsort_emit(e: Emit) -> str:
    """Always stable, as the order of equal elements must not depend on the mesh."""
    return f"torch.argsort({e.operands[0]}, dim={dim_of(e.call)}, descending={e.call['descending']}, stable=True)"


def _argsort_nvfuser(n: NvfuserEmit) -> Any:
    """Always stable, as the order of equal elements must not depend on the mesh."""
    return n.plain(stable=True)


def _topk_infer(call: Call) -> tuple[TensorType, ...]:
    (arg,), dim, k = call.types, dim_of(call), known_size(call["k"])
    check_order("topk", arg)
    if UNKNOWN not in (k, arg.shape[dim]) and not 0 <= k <= arg.shape[dim]:
        raise user_error("topk: k", str(k), f"at most {arg.shape[dim]}, the size of dim {dim}", "Ask for fewer.")
    shape = (*arg.shape[:dim], k, *arg.shape[dim + 1 :])
    return (TensorType(shape, arg.dtype), TensorType(shape, DataType.Int))


def _topk_rule(call: Call) -> Rule:
    dim, builder = dim_of(call), RuleBuilder()
    operand = builder.dims(call.types[0].shape, [dim], FactorKind.BLOCK)
    result = (*operand[:dim], builder.blocked(call.results[0].shape[dim]), *operand[dim + 1 :])
    return builder.build([operand], [result, result])


def _topk_emit(e: Emit) -> str:
    k = e.call.results[0].shape[dim_of(e.call)]
    return f"K.topk({e.operands[0]}, {k}, {dim_of(e.call)}, {e.call['largest']})"


@kernel
def topk(x: torch.Tensor, k: int, dim: int, largest: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """(values, indices), equal values in the order of their indices, so that every mesh makes the same choice."""
    order = torch.argsort(x, dim=dim, descending=largest, stable=True).narrow(dim, 0, k)
    return x.gather(dim, order), order


def _topk_nvfuser(n: NvfuserEmit) -> Any:
    """By a stable sort: nvFuser's own topk leaves open which of equal elements it takes."""
    dim, x, shape = dim_of(n.call), n.operands[0], n.result_shapes[0]
    order = n.ops.argsort(x, dim, n.call["largest"], True)
    order = n.ops.slice(order, [0] * len(shape), list(shape))
    return n.ops.take_along_axis(x, order, dim), order


def _distributed_topk(
    r: Writing, call: Call, operands: tuple[TensorRef, ...], dim: int, blocks: int
) -> Sequence[TensorRef] | None:
    """Take the first k of each piece as candidates, then the first k of all candidates.

    Only candidates leave their ranks (local top-k, then a merge, as XLA partitions TopK). Equal elements keep the order
    of their indices, piece by piece.
    """
    (x,), largest = operands, call["largest"]
    k = call.results[0].shape[dim]
    if not k:
        return None
    local = min(k, block_size(r.type(x).shape[dim], r.pieces))
    values, index = r.call("block_topk", x, local, dim, largest, r.pieces)
    top, place = r.call("topk", values, k, dim, largest)
    return [top, r.call("take_along_axis", index, place, dim)]


def _topk_vjp(b: Backward) -> Tensor:
    return add_where_read(b, b.results[1])


_EXAMPLE, _INTEGERS = TensorType((6, 8), DataType.Float), TensorType((6, 8), DataType.Int)


def _argsort_samples() -> list[Sample]:
    return [Sample((_EXAMPLE, 1)), Sample((_INTEGERS, 0, True))]


def _topk_samples() -> list[Sample]:
    return [Sample((_EXAMPLE, 3)), Sample((_EXAMPLE, 2, 0, False)), Sample((_INTEGERS, 4, 1))]


_ARG = Param("arg", K.TENSOR)
OPS = (
    OpDef(
        "argsort",
        (_ARG, Param("dim", K.DIM), Param("descending", K.BOOL, False), Param("stable", K.BOOL, False)),
        _argsort_infer,
        lambda call: whole_dim_rule(call, dim_of(call)),
        _argsort_emit,
        samples=_argsort_samples,
        order_free=("arg",),
        nvfuser=_argsort_nvfuser,
        scheduler="expr_eval",
        about="the indices that sort `dim`; equal elements keep their order",
    ),
    OpDef(
        "topk",
        (
            _ARG,
            Param("k", K.SIZE),
            Param("dim", K.DIM, -1),
            Param("largest", K.BOOL, True),
            Param("sorted", K.BOOL, False),
        ),
        _topk_infer,
        _topk_rule,
        _topk_emit,
        samples=_topk_samples,
        order_free=("arg",),
        nvfuser=_topk_nvfuser,
        distributed=_distributed_topk,
        vjp=each(arg=_topk_vjp),
        scheduler="expr_eval",
        about="the `k` greatest (or least) along `dim`, and their indices",
    ),
)
