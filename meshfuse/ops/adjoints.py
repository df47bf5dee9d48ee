"""Ops that gradients need beside those of nvFuser: contract, those of look-ups, sum_to, sized.

They are written so that a gradient is sharded like its primal without communication, or is an unreduced sum:
batch dims are reductions, the dim that was looked up in is free and each rank adds up its own part. An index that
the dim does not have is the error that the look-up gives.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from ..dtypes import Category, DataType
from ..errors import user_error
from ..kernels.indices import Runs, local_place, local_places
from ..kernels.table import kernel
from .indexing import checked_index, checked_place
from .nvfuser_lowering import cast
from .opdef import Call, Emit, NvfuserEmit, OpDef, Partial, Sample
from .promotion import dtype_text, widen
from .reductions import kept_factors
from .rules import FactorKind, Rule, RuleBuilder
from .shape import same_rule
from .shape_arithmetic import (
    aligned_dims,
    broadcast_shapes,
    check_dim,
    check_dtypes,
    check_index,
    check_ndim,
    check_place,
    check_same_size,
    known_size,
)
from .values import Param, ParamKind, TensorType
from .vjp import Backward, Tensor, each, sizes

K = ParamKind
_ADDS = "nvFuser has no scatter that adds"


def _contract_infer(call: Call) -> tuple[TensorType, ...]:
    (a, b), dims = call.types, call["dims"]
    if dims < 0:
        raise user_error("contract: dims", str(dims), "0 or more", "Say over how many first dims is summed.")
    for name, t in (("the first operand", a), ("the second operand", b)):
        check_ndim("contract", name, t, dims)
    for d in range(dims):
        check_same_size("contract", f"the sizes of dim {d}", a.shape[d], b.shape[d])
    return (TensorType((*a.shape[dims:], *b.shape[dims:]), check_dtypes(call)),)


def _contract_rule(call: Call) -> Rule:
    """r* a*, r* b* -> a* b*, summed over every r."""
    (a, b), dims, builder = call.types, call["dims"], RuleBuilder()
    rows = tuple(builder.reduction(n) for n in a.shape[:dims])
    left, right = builder.dims(a.shape[dims:]), builder.dims(b.shape[dims:])
    return builder.build([(*rows, *left), (*rows, *right)], [(*left, *right)])


def _contract_emit(e: Emit) -> str:
    return f"K.contract({e.operands[0]}, {e.operands[1]}, {e.call['dims']})"


@kernel
def contract(a: torch.Tensor, b: torch.Tensor, dims: int) -> torch.Tensor:
    """[*r, *m] and [*r, *n] to [*m, *n]: products summed over the first `dims` dims."""
    shape = (*a.shape[dims:], *b.shape[dims:])
    rows = a.shape[:dims].numel()
    left, right = a.reshape(rows, a.shape[dims:].numel()), b.reshape(rows, b.shape[dims:].numel())
    return torch.matmul(left.T, right).reshape(shape)


def _contract_flops(call: Call) -> float:
    return 2.0 * call.results[0].numel * math.prod(call.types[0].shape[: call["dims"]])


def _contract_nvfuser(n: NvfuserEmit) -> Any:
    """A matrix product of the rows."""
    dims, ops = n.call["dims"], n.ops
    rows = math.prod(n.operand_shapes[0][:dims])
    left, right = (
        ops.reshape(x, [rows, math.prod(shape[dims:])]) for x, shape in zip(n.operands, n.operand_shapes, strict=True)
    )
    return ops.reshape(ops.matmul(ops.permute(left, [1, 0]), right), list(n.result_shapes[0]))


def _first_dims_last(b: Backward, x: Tensor, dims: int) -> Tensor:
    return b.ops.permute(x, [*range(dims, x.ndim), *range(dims)])


def _contract_a_vjp(b: Backward) -> Tensor:
    """Summed over the other operand's own dims, which the gradient has last."""
    rows = b["dims"]
    other, kept = b.conj(b["b"]), b["a"].ndim - rows
    last = other.ndim - rows
    return b.ops.contract(_first_dims_last(b, other, rows), _first_dims_last(b, b.grad, kept), last)


def _contract_b_vjp(b: Backward) -> Tensor:
    rows, other = b["dims"], b.conj(b["a"])
    return b.ops.contract(_first_dims_last(b, other, rows), b.grad, other.ndim - rows)


def _take_bwd_infer(call: Call) -> tuple[TensorType, ...]:
    grad, index = call.types
    check_ndim(call.op.name, "the index", index, grad.ndim, grad.ndim)
    check_index(call, index)
    dim = check_dim(call.op.name, call["dim"], grad.ndim)
    broadcast_shapes(call.op.name, [grad.shape, index.shape])
    return (TensorType((*grad.shape[:dim], known_size(call["size"]), *grad.shape[dim + 1 :]), grad.dtype),)


def _take_bwd_rule(call: Call) -> Rule:
    """b* m, b* m -> b* n, summed over m; n is free."""
    (grad, index), builder = call.types, RuleBuilder()
    dim = call["dim"] % grad.ndim
    dims = builder.dims(grad.shape, [dim], FactorKind.REDUCE)
    free = builder.factor(call.results[0].shape[dim])
    result = tuple(free if d == dim else factors for d, factors in enumerate(dims))
    return builder.build([dims, aligned_dims(index.shape, grad.shape, dims)], [result])


def _take_bwd_emit(e: Emit) -> str:
    dim = e.call["dim"] % e.call.types[0].ndim
    index = checked_index(e, 1, e.call.results[0].shape[dim])
    return f"K.take_bwd({e.operands[0]}, {index}, {dim}, {e.result_runs(0)[dim]})"


@kernel
def take_bwd(grad: torch.Tensor, index: torch.Tensor, dim: int, runs: Runs) -> torch.Tensor:
    """Add every element of `grad` at the place in `dim` that `index` names; the index broadcasts in the other dims.

    Of the result the rank has the indices in `runs`, and leaves out what belongs elsewhere.
    """
    places, inside = local_places(index, runs)
    wide = _accumulating(grad)
    size = sum(stop - start for start, stop in runs)
    shape = [size if d == dim else n for d, n in enumerate(grad.shape)]
    out = wide.new_zeros(shape)
    if size:
        out.scatter_add_(dim, places.expand(grad.shape), torch.where(inside, wide, 0))
    return out.to(grad.dtype)


def _accumulating(x: torch.Tensor) -> torch.Tensor:
    """The tensor in float32 where it is of half precision: many terms are to be summed."""
    return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x


def _select_bwd_infer(call: Call) -> tuple[TensorType, ...]:
    (grad,), size = call.types, known_size(call["size"])
    dim = check_dim(call.op.name, call["dim"], grad.ndim + 1)
    check_place(call, call["index"], size, f"a dim of size {size}")
    return (TensorType((*grad.shape[:dim], size, *grad.shape[dim:]), grad.dtype),)


def _select_bwd_rule(call: Call) -> Rule:
    """b* -> b* n; n is free."""
    builder = RuleBuilder()
    dims, dim = builder.dims(call.types[0].shape), call["dim"] % call.results[0].ndim
    return builder.build([dims], [(*dims[:dim], builder.factor(call.results[0].shape[dim]), *dims[dim:])])


def _select_bwd_emit(e: Emit) -> str:
    made = e.call.results[0]
    dim = e.call["dim"] % made.ndim
    index = checked_place(e, "index", made.shape[dim])
    return f"K.select_bwd({e.operands[0]}, {index}, {dim}, {e.result_runs(0)[dim]})"


@kernel
def select_bwd(grad: torch.Tensor, index: int, dim: int, runs: Runs) -> torch.Tensor:
    """Zeros with a new dim, of which the rank has the indices in `runs`, and with `grad` at one index of it."""
    size = sum(stop - start for start, stop in runs)
    out = grad.new_zeros([*grad.shape[:dim], size, *grad.shape[dim:]])
    place = local_place(index, runs)
    return out if place is None else out.select_scatter(grad, dim, place)


def _embedding_bwd_infer(call: Call) -> tuple[TensorType, ...]:
    grad, index = call.types
    check_ndim("embedding_bwd", "the gradient", grad, index.ndim + 1, index.ndim + 1)
    check_index(call, index)
    for d, n in enumerate(index.shape):
        check_same_size("embedding_bwd", f"the sizes of dim {d}", grad.shape[d], n)
    return (TensorType((known_size(call["rows"]), grad.shape[-1]), grad.dtype),)


def _embedding_bwd_rule(call: Call) -> Rule:
    """b* e, b* -> v e, summed over every b; v is free."""
    (grad, index), builder = call.types, RuleBuilder()
    places = tuple(builder.reduction(n) for n in index.shape)
    rows, row = builder.factor(call.results[0].shape[0]), builder.factor(grad.shape[-1])
    return builder.build([(*places, row), places], [(rows, row)])


def _embedding_bwd_emit(e: Emit) -> str:
    index = checked_index(e, 1, e.call.results[0].shape[0])
    return f"K.embedding_bwd({e.operands[0]}, {index}, {e.result_runs(0)[0]})"


@kernel
def embedding_bwd(grad: torch.Tensor, index: torch.Tensor, runs: Runs) -> torch.Tensor:
    """Add the rows of `grad` [.., D] to the rows that `index` [..] names; the rank has the rows in `runs`."""
    places, inside = local_places(index.reshape(-1), runs)
    wide = _accumulating(grad.reshape(len(places), grad.shape[-1]))
    out = wide.new_zeros(sum(stop - start for start, stop in runs), grad.shape[-1])
    return out.index_add_(0, places[inside], wide[inside]).to(grad.dtype)


def _sum_to_infer(call: Call) -> tuple[TensorType, ...]:
    (arg,), shape = call.types, tuple(map(known_size, call["shape"]))
    fits = len(shape) == arg.ndim and all(m in (1, n) or -1 in (m, n) for n, m in zip(arg.shape, shape, strict=True))
    if not fits:
        raise user_error("sum_to: the sizes", f"{list(shape)} of {arg}", "for each dim its own size, or 1",
                         "Pass the shape that was broadcast to this one.")  # fmt: skip
    return (TensorType(shape, arg.dtype),)


def _summed_dims(call: Call) -> tuple[int, ...]:
    pairs = zip(call.types[0].shape, call.results[0].shape, strict=True)
    return tuple(d for d, (n, m) in enumerate(pairs) if n != m)


def _sum_to_rule(call: Call) -> Rule:
    """Dims that become 1 are summed over."""
    dims, builder = _summed_dims(call), RuleBuilder()
    operand = builder.dims(call.types[0].shape, dims, FactorKind.REDUCE)
    return builder.build([operand], [kept_factors(operand, dims, True)])


def _sum_to_emit(e: Emit) -> str:
    dims, dtype = list(_summed_dims(e.call)), dtype_text(e.call.results[0].dtype)
    return f"torch.sum({e.operands[0]}, {dims}, keepdim=True, dtype={dtype})" if dims else e.operands[0]


def _sum_to_nvfuser(n: NvfuserEmit) -> Any:
    """nvFuser sums integers as Int, and nothing in half precision or less."""
    dims, dtype = list(_summed_dims(n.call)), n.call.results[0].dtype
    if not dims:
        return n.ops.set(n.operands[0])
    found = n.ops.sum(cast(n, n.operands[0], dtype, widen(dtype)), dims, True)
    return found if widen(dtype) is dtype and dtype.category >= Category.FLOAT else n.ops.cast(found, n.dtype(dtype))


def _sum_to_samples() -> list[Sample]:
    return [Sample((_t(4, 6), [1, 6])), Sample((_t(4, 6, 5), [1, 6, 1])), Sample((_t(4, 6), [4, 6]))]


def _sized_infer(call: Call) -> tuple[TensorType, ...]:
    (arg,), shape = call.types, tuple(map(known_size, call["shape"]))
    if len(shape) != arg.ndim or any(-1 not in (m, n) and m != n for n, m in zip(arg.shape, shape, strict=True)):
        owners = "Of grad_outputs they are their outputs', of a norm's parameters its normalized_shape; argmax takes "
        raise user_error("sized: the sizes of a tensor", str(arg), str(list(shape)), f"{owners}no empty dim.")
    return (TensorType(tuple(max(n, m) for n, m in zip(arg.shape, shape, strict=True)), arg.dtype),)


def _t(*shape: int, dtype: DataType = DataType.Float) -> TensorType:
    return TensorType(shape, dtype)


def _contract_samples() -> list[Sample]:
    return [
        Sample((_t(2, 6, 4), _t(2, 6, 8), 2)),
        Sample((_t(6, 4, 3), _t(6, 8), 1)),
        Sample((_t(4), _t(8), 0)),
        Sample((_t(6, 4), _t(6), 1)),
    ]


def _take_bwd_samples() -> list[Sample]:
    def sample(grad: tuple[int, ...], index: tuple[int, ...], dim: int, size: int, *values: int) -> Sample:
        return Sample((_t(*grad), _t(*index, dtype=DataType.Int), dim, size), values={1: values})

    return [
        sample((6, 3), (6, 3), 1, 8, 0, 7, 3, 3, 2),
        sample((6, 8), (6, 1), -2, 5, 4, 0, 4, 1),
        sample((4, 6), (1, 6), 1, 3, 2, 0, 1),
    ]


def _select_bwd_samples() -> list[Sample]:
    return [Sample((_t(6, 3), 5, 1, 8)), Sample((_t(6, 8), -1, 0, 4)), Sample((_t(), 2, 0, 3))]


def _embedding_bwd_samples() -> list[Sample]:
    index, values = _t(2, 6, dtype=DataType.Int), {1: (9, 0, 4, 9, 2)}
    return [
        Sample((_t(2, 6, 8), index, 10), values=values),
        Sample((_t(8), _t(dtype=DataType.Int), 10), values={1: (3,)}),
    ]


_GRAD, _INDEX = Param("grad", K.TENSOR), Param("index", K.TENSOR)
OPS = (
    OpDef("contract", (Param("a", K.TENSOR), Param("b", K.TENSOR), Param("dims", K.INT)),
          _contract_infer, _contract_rule, _contract_emit, Partial.EACH, _contract_flops, _contract_samples,
          nvfuser=_contract_nvfuser, vjp=each(a=_contract_a_vjp, b=_contract_b_vjp), concat_distributive=True,
          uses_library=True,
          about="sum over the first `dims` dims of both operands of their products: `linear`'s gradient by the weight"),
    OpDef("take_along_axis_bwd", (_GRAD, _INDEX, Param("dim", K.DIM), Param("size", K.SIZE)),
          _take_bwd_infer, _take_bwd_rule, _take_bwd_emit, Partial.FIRST, samples=_take_bwd_samples,
          nvfuser=_ADDS, vjp=each(grad=lambda b: b.ops.take_along_axis(b.grad, b["index"], b["dim"])),
          order_free=("grad", "index"),
          about="zeros with `grad` added along `dim` at the places that `index` names"),
    OpDef("select_bwd", (_GRAD, Param("index", K.SCALAR), Param("dim", K.DIM), Param("size", K.SIZE)),
          _select_bwd_infer, _select_bwd_rule, _select_bwd_emit, Partial.FIRST, samples=_select_bwd_samples,
          nvfuser="an index that is known at run time only",
          vjp=each(grad=lambda b: b.ops.select(b.grad, b["index"], b["dim"])),
          about="zeros with `grad` at one place of a new dim `dim`: the gradient of `select`"),
    OpDef("embedding_bwd", (_GRAD, _INDEX, Param("rows", K.SIZE)),
          _embedding_bwd_infer, _embedding_bwd_rule, _embedding_bwd_emit, Partial.FIRST,
          samples=_embedding_bwd_samples, nvfuser=_ADDS,
          vjp=each(grad=lambda b: b.ops.embedding_fwd(b["index"], b.grad)), order_free=("grad", "index"),
          about="`rows` rows of zeros with those of `grad` added where `index` names them"),
    OpDef("sum_to", (Param("arg", K.TENSOR), Param("shape", K.SHAPE)), _sum_to_infer, _sum_to_rule, _sum_to_emit,
          Partial.FIRST, samples=_sum_to_samples, nvfuser=_sum_to_nvfuser,
          vjp=each(arg=lambda b: b.ops.expand(b.grad, sizes(b["arg"]))), order_free=("arg",),
          identity_when_same_shape=True,
          about="sums over the dims that are of size 1 in `shape`: the gradient of what was repeated along them"),
    OpDef("sized", (Param("arg", K.TENSOR), Param("shape", K.SHAPE)), _sized_infer, same_rule,
          lambda e: e.operands[0], Partial.MOVE, samples=lambda: [Sample((_t(4, 6), [4, 6]))],
          nvfuser=lambda n: n.ops.set(n.operands[0]), vjp=each(arg=lambda b: b.grad), concat_distributive=True,
          is_view=True, keeps_elements=True, identity_when_same_shape=True,
          about="the operand, whose sizes must be `shape`: what is seen once open sizes are known"),
)  # fmt: skip
