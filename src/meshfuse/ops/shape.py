"""Ops that move or repeat elements along dims: broadcast, expand, squeeze, permute, slice, cat, pad, stride_order."""

from __future__ import annotations

from typing import Any

from ..dtypes import DataType
from ..errors import user_error
from .base import (
    Call,
    DimFactors,
    Emit,
    OpDef,
    Param,
    ParamKind,
    Partial,
    Rule,
    RuleBuilder,
    Sample,
    ScalarRef,
    TensorType,
)
from .shapes import (
    UNKNOWN,
    broadcast_shapes,
    check_dim,
    check_dims,
    check_dtypes,
    check_same_size,
    known_size,
)

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


def _reshape_emit(e: Emit) -> str:
    return f"{e.operands[0]}.reshape({list(e.result_shapes[0])})"


def _in_dim_infer(call: Call) -> tuple[TensorType, ...]:
    (arg,), shape, dims = call.types, call["shape"], call["broadcast_dims"]
    if len(dims) != arg.ndim or any(b <= a for a, b in zip(dims, dims[1:], strict=False)):
        raise user_error(
            "broadcast_in_dim: broadcast_dims", f"{list(dims)} for {arg}", f"{arg.ndim} ascending dims",
            "Name for each dim of the operand its dim in the result.",
        )  # fmt: skip
    sizes = [known_size(n) for n in shape]
    for source, dim in enumerate(dims):
        place = check_dim("broadcast_in_dim", dim, len(shape))
        check_same_size("broadcast_in_dim", "an operand's size and its result's", arg.shape[source], sizes[place]) if (
            arg.shape[source] != 1) else None  # fmt: skip
        sizes[place] = max(sizes[place], arg.shape[source])
    return (TensorType(tuple(sizes), arg.dtype),)


def _expanding_rule(call: Call, source_of: dict[int, int]) -> Rule:
    """Result dims that an operand dim of the same size feeds share its factor; the others are free."""
    builder, shape = RuleBuilder(), call.types[0].shape
    result = builder.dims(call.results[0].shape)
    operand: list[tuple[int, ...]] = [()] * len(shape)
    for dim, source in source_of.items():
        if shape[source] == call.results[0].shape[dim]:
            operand[source] = result[dim]
    dims: DimFactors = tuple(operand)
    return builder.build([dims], [result])


def _in_dim_rule(call: Call) -> Rule:
    ndim = len(call["shape"])
    return _expanding_rule(call, {dim % ndim: source for source, dim in enumerate(call["broadcast_dims"])})


def _in_dim_emit(e: Emit) -> str:
    shape, ndim = e.result_shapes[0], len(e.result_shapes[0])
    sizes = dict(zip((d % ndim for d in e.call["broadcast_dims"]), e.operand_shapes[0], strict=True))
    middle = [sizes.get(d, 1) for d in range(ndim)]
    return f"{e.operands[0]}.reshape({middle}).expand({list(shape)})"


def _expand_infer(call: Call) -> tuple[TensorType, ...]:
    (arg,), shape = call.types, call["shape"]
    offset = len(shape) - arg.ndim
    if offset < 0:
        raise user_error("expand: fewer sizes than dims", f"{list(shape)} for {arg}", f"at least {arg.ndim}", "")
    kept = (1,) * offset + arg.shape
    sizes = tuple(old if n == -1 else known_size(n) for old, n in zip(kept, shape, strict=True))
    return (TensorType(broadcast_shapes("expand", [kept, sizes]), arg.dtype),)


def _expand_rule(call: Call) -> Rule:
    offset = call.results[0].ndim - call.types[0].ndim
    return _expanding_rule(call, {offset + source: source for source in range(call.types[0].ndim)})


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
    builder, dims = RuleBuilder(), _squeezed(call)
    operand = tuple(builder.blocked(n) if d in dims and n > 1 else builder.factor(n)
                    for d, n in enumerate(call.types[0].shape))  # fmt: skip
    return builder.build([operand], [tuple(f for d, f in enumerate(operand) if d not in dims)])


def _squeeze_emit(e: Emit) -> str:
    dims, shape = _squeezed(e.call), e.operand_shapes[0]
    text = e.operands[0]
    for d in dims:
        text = text if shape[d] == 1 else f"{text}.narrow({d}, 0, 1)"
    return f"{text}.squeeze({tuple(dims)})" if dims else text


def _order(call: Call) -> tuple[int, ...]:
    ndim, dims = call.types[0].ndim, call.args[1]
    if len(dims) != ndim or {check_dim(call.op.name, d, ndim) for d in dims} != set(range(ndim)):
        raise user_error(f"{call.op.name}: dims", str(list(dims)), f"every dim of {call.types[0]} once", "Fix the list.")
    return tuple(d % ndim for d in dims)


def _permute_infer(call: Call) -> tuple[TensorType, ...]:
    return (TensorType(tuple(call.types[0].shape[d] for d in _order(call)), call.types[0].dtype),)


def _permute_rule(call: Call) -> Rule:
    builder = RuleBuilder()
    operand = builder.dims(call.types[0].shape)
    return builder.build([operand], [tuple(operand[d] for d in _order(call))])


def _permute_emit(e: Emit) -> str:
    return f"{e.operands[0]}.permute({list(_order(e.call))})"


def _stride_order_infer(call: Call) -> tuple[TensorType, ...]:
    _order(call)
    return call.types


def same_rule(call: Call) -> Rule:
    """Operand and result share every factor."""
    builder = RuleBuilder()
    dims = builder.dims(call.types[0].shape)
    return builder.build([dims], [dims])


def _stride_order_emit(e: Emit) -> str:
    return f"K.in_stride_order({e.operands[0]}, {list(_order(e.call))})"


def slice_bounds(call: Call) -> list[tuple[int, int, int]]:
    """(start, stop, step) of every dim, within its size; symbolic bounds give the unknown size -1 as stop."""
    shape, strides = call.types[0].shape, call["strides"] or (1,) * call.types[0].ndim
    lists = (call["start_indices"], call["end_indices"], strides)
    if any(len(part) != len(shape) for part in lists):
        raise user_error("slice: one start, end and stride per dim", f"{[len(p) for p in lists]} entries",
                         f"{len(shape)} each", "Give full lists.")  # fmt: skip
    return [_bounds(*entry) for entry in zip(shape, *lists, strict=True)]


def _bounds(n: int, start: Any, stop: Any, step: Any) -> tuple[int, int, int]:
    start, stop, step = known_size(start), stop if isinstance(stop, ScalarRef) else int(stop), known_size(step)
    if step < 1 and step != UNKNOWN:
        raise user_error("slice: stride", str(step), "a stride >= 1", "Slice forwards.")
    if n == UNKNOWN or isinstance(stop, ScalarRef):
        return (start, UNKNOWN, step)
    low = min(max(start + n if start < 0 else start, 0), n)
    high = min(max(stop + n if stop < 0 else stop, low), n)
    return (low, high, step)


def _slice_infer(call: Call) -> tuple[TensorType, ...]:
    sizes = tuple(UNKNOWN if b == UNKNOWN else -(-(b - a) // s) for a, b, s in slice_bounds(call))
    return (TensorType(sizes, call.types[0].dtype),)


def _kept_or_blocked(call: Call, changed: set[int]) -> Rule:
    """Dims that the op leaves alone pass through; along the others it needs the whole tensor."""
    builder = RuleBuilder()
    operand = tuple(builder.blocked(n) if d in changed else builder.factor(n) for d, n in enumerate(call.types[0].shape))
    sizes = call.results[0].shape
    return builder.build([operand], [tuple(builder.blocked(sizes[d]) if d in changed else f for d, f in enumerate(operand))])


def _slice_rule(call: Call) -> Rule:
    bounds, shape = slice_bounds(call), call.types[0].shape
    return _kept_or_blocked(call, {d for d, b in enumerate(bounds) if b != (0, shape[d], 1)})


def _slice_emit(e: Emit) -> str:
    shape, parts = e.call.types[0].shape, []
    for n, (a, b, s) in zip(shape, slice_bounds(e.call), strict=True):
        parts.append(":" if (a, b, s) == (0, n, 1) else f"{a}:{b}" if s == 1 else f"{a}:{b}:{s}")
    return f"{e.operands[0]}[{', '.join(parts)}]"


def pad_widths(call: Call) -> dict[int, tuple[int, int]]:
    """(before, after) of every padded dim; widths come from the last dim backwards, as in torch."""
    widths, ndim = [known_size(w) for w in call["pad_widths"]], call.types[0].ndim
    if len(widths) % 2 or len(widths) > 2 * ndim:
        raise user_error("pad: widths", str(widths), f"pairs, at most {ndim}", "Give (before, after) from the last dim on.")
    pairs = [(widths[i], widths[i + 1]) for i in range(0, len(widths), 2)]
    return {ndim - 1 - i: pair for i, pair in enumerate(pairs) if pair != (0, 0)}


def _pad_infer(call: Call) -> tuple[TensorType, ...]:
    widths = pad_widths(call)
    sizes = [n if n == UNKNOWN else n + sum(widths.get(d, ())) for d, n in enumerate(call.types[0].shape)]
    if any(n < 0 and old != UNKNOWN for n, old in zip(sizes, call.types[0].shape, strict=True)):
        raise user_error("pad: more is cut off than there is", str(list(call["pad_widths"])), "sizes >= 0", "")
    return (TensorType(tuple(sizes), call.types[0].dtype),)


def _pad_rule(call: Call) -> Rule:
    return _kept_or_blocked(call, set(pad_widths(call)))


def _pad_emit(e: Emit) -> str:
    value = "0" if e.call["value"] is None else e.scalar("value")
    return f"F.pad({e.operands[0]}, {[known_size(w) for w in e.call['pad_widths']]}, value={value})"


def _cat_infer(call: Call) -> tuple[TensorType, ...]:
    ndim, first = call.types[0].ndim, call.types[0]
    dim = check_dim("cat", call["dim"], ndim)
    if any(t.ndim != ndim for t in call.types):
        raise user_error("cat: operands of different numbers of dims", str([t.ndim for t in call.types]), f"{ndim} each", "")
    sizes = list(first.shape)
    for t in call.types[1:]:
        for d, n in enumerate(t.shape):
            if d != dim:
                check_same_size("cat", f"sizes in dim {d}", sizes[d], n)
                sizes[d] = max(sizes[d], n)
    joined = [t.shape[dim] for t in call.types]
    sizes[dim] = UNKNOWN if UNKNOWN in joined else sum(joined)
    return (TensorType(tuple(sizes), check_dtypes(call)),)


def _cat_rule(call: Call) -> Rule:
    builder, dim = RuleBuilder(), call["dim"] % call.types[0].ndim
    shared = {d: builder.factor(n) for d, n in enumerate(call.results[0].shape) if d != dim}
    tensors = [tuple(shared[d] if d != dim else builder.blocked(n) for d, n in enumerate(t.shape))
               for t in (*call.types, *call.results)]  # fmt: skip
    return builder.build(tensors[:-1], tensors[-1:])


def _cat_emit(e: Emit) -> str:
    return f"torch.cat([{', '.join(e.operands)}], {e.call['dim'] % e.call.types[0].ndim})"


def _sample(*args: Any) -> Sample:
    return Sample(tuple(TensorType(a, DataType.Float) if isinstance(a, tuple) else a for a in args))


_ARG = Param("arg", K.TENSOR)
OPS = (
    OpDef("broadcast", (_ARG, Param("is_broadcast_dim", K.BOOLS)), _broadcast_infer, _broadcast_rule, _reshape_emit,
          Partial.MOVE, samples=lambda: [_sample((4, 6), [False, True, False])]),
    OpDef("broadcast_in_dim", (_ARG, Param("shape", K.SHAPE), Param("broadcast_dims", K.INTS)),
          _in_dim_infer, _in_dim_rule, _in_dim_emit, Partial.MOVE,
          samples=lambda: [_sample((6,), [4, 6], [1]), _sample((4,), [4, 6, 2], [0]), _sample((1, 6), [4, 6], [0, 1])]),
    OpDef("expand", (_ARG, Param("shape", K.SHAPE)), _expand_infer, _expand_rule, _expand_emit, Partial.MOVE,
          samples=lambda: [_sample((4, 1), [4, 6]), _sample((1, 6), [4, -1])]),
    OpDef("squeeze", (_ARG, Param("dims", K.DIMS), Param("squeeze_expanded", K.BOOL, False)),
          _squeeze_infer, _squeeze_rule, _squeeze_emit, Partial.MOVE, samples=lambda: [_sample((4, 1, 6), [1])]),
    OpDef("permute", (_ARG, Param("dims", K.INTS)), _permute_infer, _permute_rule, _permute_emit, Partial.MOVE,
          samples=lambda: [_sample((4, 6, 2), [2, 0, 1]), _sample((4, 6), [-1, 0])]),
    OpDef("stride_order", (_ARG, Param("stride_order", K.INTS)), _stride_order_infer, same_rule, _stride_order_emit,
          Partial.MOVE, samples=lambda: [_sample((4, 6, 2), [0, 2, 1])]),
    OpDef("slice", (_ARG, Param("start_indices", K.SHAPE), Param("end_indices", K.SHAPE), Param("strides", K.SHAPE, None),
                    Param("manual_normalization", K.BOOL, False)),
          _slice_infer, _slice_rule, _slice_emit, Partial.MOVE,
          samples=lambda: [_sample((6, 8), [0, 2], [6, 7]), _sample((6, 8), [1, 0], [6, 8], [2, 1])]),
    OpDef("pad", (_ARG, Param("pad_widths", K.SHAPE), Param("value", K.OPTIONAL_SCALAR, None)),
          _pad_infer, _pad_rule, _pad_emit, samples=lambda: [_sample((6, 8), [1, 2]), _sample((6, 8), [0, 0, 2, 1], 1.5)]),
    OpDef("cat", (Param("tensors", K.TENSORS), Param("dim", K.DIM, 0), Param("manual_padding", K.BOOL, False)),
          _cat_infer, _cat_rule, _cat_emit, Partial.JOINT,
          samples=lambda: [Sample(([TensorType((4, 6), DataType.Float), TensorType((2, 6), DataType.Float)],)),
                           Sample(([TensorType((4, 6), DataType.Float), TensorType((4, 3), DataType.Float)], -1))]),
)  # fmt: skip
