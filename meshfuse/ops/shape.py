"""Dims that are added, repeated, removed or reordered: broadcast, expand, squeeze, permute, stride_order."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

from ..errors import user_error
from .nvfuser_lowering import with_local_shape
from .opdef import Call, Emit, NvfuserEmit, OpDef, Partial, Sample
from .reshape import reshape_emit
from .rules import DimFactors, Rule, RuleBuilder
from .shape_arithmetic import UNKNOWN, broadcast_shapes, check_dim, check_dims, check_same_size, known_size
from .values import Param, ParamKind, TensorType
from .vjp import Backward, Tensor, each, sizes, sum_to
from .window_gradients import zero_padded

K = ParamKind


def _broadcast_infer(call: Call) -> tuple[TensorType, ...]:
    (arg,), flags = call.types, call["is_broadcast_dim"]
    if len(flags) - sum(flags) != arg.ndim:
        raise user_error(
            "broadcast: is_broadcast_dim needs one False per dim of the operand", f"{list(flags)} for {arg}",
            f"{arg.ndim} times False", "Mark only the new dims True.",
        )  # fmt: skip
    sizes = iter(arg.shape)
    return (TensorType(tuple(1 if new else next(sizes) for new in flags), arg.dtype),)


def _broadcast_rule(call: Call) -> Rule:
    builder = RuleBuilder()
    operand = builder.dims(call.types[0].shape)
    factors = iter(operand)
    return builder.build([operand], [tuple(() if new else next(factors) for new in call["is_broadcast_dim"])])


def _broadcast_bwd(b: Backward) -> Tensor:
    new = [d for d, flag in enumerate(b["is_broadcast_dim"]) if flag]
    return b.ops.squeeze(b.grad, new) if new else b.grad


def _in_dim_infer(call: Call) -> tuple[TensorType, ...]:
    (arg,), shape, dims = call.types, call["shape"], call["broadcast_dims"]
    if len(dims) != arg.ndim or any(b <= a for a, b in itertools.pairwise(dims)):
        raise user_error(
            "broadcast_in_dim: broadcast_dims", f"{list(dims)} for {arg}", f"{arg.ndim} ascending dims",
            "Name for each dim of the operand its dim in the result.",
        )  # fmt: skip
    sizes = [known_size(n) for n in shape]
    for source, dim in enumerate(dims):
        place = check_dim("broadcast_in_dim", dim, len(shape))
        if arg.shape[source] != 1:
            check_same_size("broadcast_in_dim", "an operand's size and its result's", arg.shape[source], sizes[place])
            sizes[place] = max(sizes[place], arg.shape[source])
    return (TensorType(tuple(sizes), arg.dtype),)


def _expanding_rule(call: Call, places: Sequence[int]) -> Rule:
    """A result dim has the factor of its operand dim if the sizes are equal; other dims are free."""
    builder, shape = RuleBuilder(), call.types[0].shape
    result = builder.dims(call.results[0].shape)
    operand: list[tuple[int, ...]] = [()] * len(shape)
    for source, dim in enumerate(places):
        if shape[source] == call.results[0].shape[dim]:
            operand[source] = result[dim]
    dims: DimFactors = tuple(operand)
    return builder.build([dims], [result])


def _in_dim_places(call: Call) -> list[int]:
    return [d % len(call["shape"]) for d in call["broadcast_dims"]]


def _in_dim_emit(e: Emit) -> str:
    shape = e.result_shapes[0]
    sizes = dict(zip(_in_dim_places(e.call), e.operand_shapes[0], strict=True))
    middle = [sizes.get(d, 1) for d in range(len(shape))]
    return f"{e.operands[0]}.reshape({middle}).expand({list(shape)})"


def _in_dim_bwd(b: Backward) -> Tensor:
    """`grad` summed over the new dims and over those that are, or may be, repeated."""
    x = b["arg"]
    found = _over_known_dims(b)
    return b.ops.sum_to(found, sizes(x)) if -1 in x.type.shape else found


def _over_known_dims(b: Backward) -> Tensor:
    ndim, x, shape = b.grad.ndim, b["arg"], b.grad.type.shape
    source = {d % ndim: n for d, n in zip(b["broadcast_dims"], x.type.shape, strict=True)}
    repeated = [d for d, n in source.items() if n == 1 and shape[d] != 1]
    new = [d for d in range(ndim) if d not in source]
    if not repeated:
        return b.ops.sum(b.grad, new) if new else b.grad
    total = b.ops.sum(b.grad, sorted([*repeated, *new]), True)
    return b.ops.squeeze(total, new) if new else total


def _expand_infer(call: Call) -> tuple[TensorType, ...]:
    (arg,), shape = call.types, call["shape"]
    offset = len(shape) - arg.ndim
    if offset < 0:
        raise user_error("expand: fewer sizes than dims", f"{list(shape)} for {arg}", f"at least {arg.ndim}", "")
    kept = (1,) * offset + arg.shape
    sizes = tuple(old if n == -1 else known_size(n) for old, n in zip(kept, shape, strict=True))
    for old, n in zip(kept, sizes, strict=True):
        if n == 1:
            check_same_size("expand", "an operand's size and its result's", old, n)
    return (TensorType(broadcast_shapes("expand", [kept, sizes]), arg.dtype),)


def _expand_places(call: Call) -> list[int]:
    return list(range(call.results[0].ndim - call.types[0].ndim, call.results[0].ndim))


def _expand_emit(e: Emit) -> str:
    return f"{e.operands[0]}.expand({list(e.result_shapes[0])})"


def _squeezed(call: Call) -> tuple[int, ...]:
    return check_dims("squeeze", call["dims"], call.types[0].ndim)


def _squeeze_infer(call: Call) -> tuple[TensorType, ...]:
    (arg,), dims = call.types, _squeezed(call)
    wrong = [d for d in dims if arg.shape[d] not in (1, UNKNOWN)]
    if wrong and not call["squeeze_expanded"]:
        raise user_error(f"squeeze: dim {wrong[0]}", f"size {arg.shape[wrong[0]]}", "size 1", "Use select or slice.")
    return (TensorType(tuple(n for d, n in enumerate(arg.shape) if d not in dims), arg.dtype),)


def _squeeze_rule(call: Call) -> Rule:
    builder, dims, shape = RuleBuilder(), _squeezed(call), call.types[0].shape
    operand = tuple(
        builder.dim(n) if d not in dims else builder.blocked(n) if n > 1 else () for d, n in enumerate(shape)
    )
    return builder.build([operand], [tuple(f for d, f in enumerate(operand) if d not in dims)])


def _squeeze_emit(e: Emit) -> str:
    dims, shape = _squeezed(e.call), e.operand_shapes[0]
    text = e.operands[0]
    for d in dims:
        text = text if shape[d] == 1 else f"{text}.narrow({d}, 0, 1)"
    return f"{text}.squeeze({tuple(dims)})" if dims else text


def _squeeze_nvfuser(n: NvfuserEmit) -> Any:
    """Reads dims of repeated elements (squeeze_expanded) at index 0."""
    tensor, shape = n.operands[0], n.operand_shapes[0]
    dims = _squeezed(n.call)
    ones = [d for d in dims if shape[d] == 1]
    for d in reversed([d for d in dims if shape[d] != 1]):
        tensor, ones = n.ops.select(tensor, n.val(0), d), [one - (one > d) for one in ones]
    return n.ops.squeeze(tensor, ones) if ones else tensor


def _squeeze_bwd(b: Backward) -> Tensor:
    """`grad` with the dims added again. Of a dim larger than 1 only the first element was read: the others get 0."""
    x = b["arg"]
    given = (b["dims"],) if isinstance(b["dims"], int) else b["dims"]
    dims = {d % x.ndim for d in given}
    grad = b.ops.broadcast(b.grad, [d in dims for d in range(x.ndim)]) if dims else b.grad
    after = [n - 1 if d in dims else 0 for d, n in enumerate(sizes(x))]
    return zero_padded(b.ops, grad, [0] * x.ndim, after)


def _order(call: Call) -> tuple[int, ...]:
    ndim, dims = call.types[0].ndim, call.args[1]
    if len(dims) != ndim or {check_dim(call.op.name, d, ndim) for d in dims} != set(range(ndim)):
        raise user_error(
            f"{call.op.name}: dims", str(list(dims)), f"every dim of {call.types[0]} once", "Fix the list."
        )
    return tuple(d % ndim for d in dims)


def _permute_infer(call: Call) -> tuple[TensorType, ...]:
    return (TensorType(tuple(call.types[0].shape[d] for d in _order(call)), call.types[0].dtype),)


def _permute_rule(call: Call) -> Rule:
    builder = RuleBuilder()
    operand = builder.dims(call.types[0].shape)
    return builder.build([operand], [tuple(operand[d] for d in _order(call))])


def _permute_emit(e: Emit) -> str:
    return f"{e.operands[0]}.permute({list(_order(e.call))})"


def _permute_bwd(b: Backward) -> Tensor:
    order = [d % b.grad.ndim for d in b["dims"]]
    return b.ops.permute(b.grad, [order.index(d) for d in range(len(order))])


def _stride_order_infer(call: Call) -> tuple[TensorType, ...]:
    _order(call)
    return call.types


def same_rule(call: Call) -> Rule:
    """The rule of an op whose operand and result share every factor."""
    builder = RuleBuilder()
    dims = builder.dims(call.types[0].shape)
    return builder.build([dims], [dims])


def _stride_order_emit(e: Emit) -> str:
    return f"K.in_stride_order({e.operands[0]}, {list(_order(e.call))})"


_sample = Sample.of_floats
_ARG = Param("arg", K.TENSOR)
OPS = (
    OpDef("broadcast", (_ARG, Param("is_broadcast_dim", K.BOOLS)), _broadcast_infer, _broadcast_rule, reshape_emit,
          Partial.MOVE, samples=lambda: [_sample((4, 6), [False, True, False])], vjp=each(arg=_broadcast_bwd),
          concat_distributive=True, is_view=True, keeps_elements=True, is_cheap=True,
          about="new dims of size 1 where `is_broadcast_dim` is True"),
    OpDef("broadcast_in_dim", (_ARG, Param("shape", K.SHAPE), Param("broadcast_dims", K.INTS)),
          _in_dim_infer, lambda call: _expanding_rule(call, _in_dim_places(call)), _in_dim_emit, Partial.MOVE,
          samples=lambda: [_sample((6,), [4, 6], [1]), _sample((4,), [4, 6, 2], [0]), _sample((1, 6), [4, 6], [0, 1])],
          nvfuser=with_local_shape("shape"), vjp=each(arg=_in_dim_bwd), concat_distributive=True, is_view=True,
          keeps_elements=True, repeats=_in_dim_places,
          about="to `shape`: dim i of the operand is dim `broadcast_dims[i]` of the result, the others repeat"),
    OpDef("expand", (_ARG, Param("shape", K.SHAPE)), _expand_infer,
          lambda call: _expanding_rule(call, _expand_places(call)), _expand_emit, Partial.MOVE,
          samples=lambda: [_sample((4, 1), [4, 6]), _sample((1, 6), [4, -1])], nvfuser=with_local_shape("shape"),
          vjp=each(arg=lambda b: sum_to(b, b.grad, b["arg"])), concat_distributive=True, is_view=True,
          keeps_elements=True, repeats=_expand_places,
          about="dims of size 1, and new ones in front, repeated to `shape`; -1 leaves a dim as it is"),
    OpDef("squeeze", (_ARG, Param("dims", K.DIMS), Param("squeeze_expanded", K.BOOL, False)),
          _squeeze_infer, _squeeze_rule, _squeeze_emit, Partial.MOVE, samples=lambda: [_sample((4, 1, 6), [1])],
          nvfuser=_squeeze_nvfuser, vjp=each(arg=_squeeze_bwd), concat_distributive=True, is_view=True,
          keeps_elements=True, is_cheap=True,
          about="without `dims`, which have size 1"),
    OpDef("permute", (_ARG, Param("dims", K.INTS)), _permute_infer, _permute_rule, _permute_emit, Partial.MOVE,
          samples=lambda: [_sample((4, 6, 2), [2, 0, 1]), _sample((4, 6), [-1, 0])], vjp=each(arg=_permute_bwd),
          concat_distributive=True, is_view=True, is_cheap=True,
          about="dims in another order: dim i of the result is dim `dims[i]` of the operand"),
    OpDef("stride_order", (_ARG, Param("stride_order", K.INTS)), _stride_order_infer, same_rule, _stride_order_emit,
          Partial.MOVE, samples=lambda: [_sample((4, 6, 2), [0, 2, 1])], vjp=each(arg=lambda b: b.grad),
          about="the same tensor, laid out in memory in this order of dims (0 is the fastest)"),
)  # fmt: skip
