"""Windows of a larger dim: pad, and cat, which joins several."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..dtypes import DataType
from ..errors import user_error
from .nvfuser_lowering import of_category
from .opdef import Call, Emit, NvfuserEmit, OpDef, Partial, Sample, ToTorch, Writing
from .rules import Rule, RuleBuilder
from .shape_arithmetic import (
    UNKNOWN,
    check_dim,
    check_dtypes,
    check_number,
    check_same_size,
    known_size,
    one_dim_widths,
    shape_along,
)
from .values import Param, ParamKind, ScalarRef, TensorRef, TensorType
from .vjp import Backward, Tensor, each, sizes
from .windows import windowed, windows_of

K = ParamKind

# pad --------------------------------------------------------------------------------------------------------------


def pad_widths(call: Call) -> dict[int, tuple[int, int]]:
    """(before, after) of every padded dim; widths come from the last dim backwards, as in torch."""
    widths, ndim = [known_size(w) for w in call["pad_widths"]], call.types[0].ndim
    if len(widths) % 2 or len(widths) > 2 * ndim:
        raise user_error(
            "pad: widths", str(widths), f"pairs, at most {ndim}", "Give (before, after) from the last dim on."
        )
    pairs = [(widths[i], widths[i + 1]) for i in range(0, len(widths), 2)]
    return {ndim - 1 - i: pair for i, pair in enumerate(pairs) if pair != (0, 0)}


def _pad_infer(call: Call) -> tuple[TensorType, ...]:
    widths, (arg,) = pad_widths(call), call.types
    check_number("pad", call["value"], arg.dtype)
    by_scalar = {arg.ndim - 1 - i // 2 for i, width in enumerate(call["pad_widths"]) if isinstance(width, ScalarRef)}
    open_dims = by_scalar | {d for d, n in enumerate(arg.shape) if n == UNKNOWN}
    for d in sorted(widths.keys() - open_dims):
        _check_cut(arg, d, -sum(min(width, 0) for width in widths[d]))
    sizes = [UNKNOWN if d in open_dims else n + sum(widths.get(d, ())) for d, n in enumerate(arg.shape)]
    return (TensorType(tuple(sizes), arg.dtype),)


def _check_cut(arg: TensorType, dim: int, cut: int) -> None:
    """Raises DefinitionError where negative widths cut off more than a dim has."""
    if cut > arg.shape[dim]:
        raise user_error("pad: more is cut off than there is", f"{cut} of dim {dim} of {arg}",
                         f"at most {arg.shape[dim]}", "Cut less, or use fd.ops.full.")  # fmt: skip


def _pad_rule(call: Call) -> Rule:
    """In a padded dim the operand is a window of the result; in a dim that is cut, both are blocked."""
    builder, widths, operand, result = RuleBuilder(), pad_widths(call), [], []
    for d, (n, m) in enumerate(zip(call.types[0].shape, call.results[0].shape, strict=True)):
        before, after = widths.get(d, (0, 0))
        dims = windowed(builder, m, before, n) if min(before, after) >= 0 else (builder.blocked(m), builder.blocked(n))
        result.append(dims[0])
        operand.append(dims[1])
    return builder.build([tuple(operand)], [tuple(result)])


def _pad_window(call: Call) -> tuple[tuple[int, ...], Any] | None:
    widths, value = pad_widths(call), call["value"]
    return tuple(-widths.get(d, (0, 0))[0] for d in range(call.types[0].ndim)), 0 if value is None else value


def local_widths(call: Call, local: tuple[int, ...]) -> list[int]:
    """The pad widths of an operand's shard of this shape, from the last dim backwards."""
    out: list[int] = []
    for d, (before, after) in sorted(pad_widths(call).items(), reverse=True):
        n, m = call.types[0].shape[d], call.results[0].shape[d]
        window = windows_of(m, before, n) if min(before, after) >= 0 else None
        out += [0, 0] * (len(local) - 1 - d - len(out) // 2)
        out += [before, after] if window is None else [window[1] * local[d], (window[0] - 1 - window[1]) * local[d]]
    return out


def _pad_emit(e: Emit) -> str:
    value = "0" if e.call["value"] is None else e.scalar("value")
    return f"F.pad({e.operands[0]}, {local_widths(e.call, e.operand_shapes[0])}, value={value})"


def _pad_nvfuser(n: NvfuserEmit) -> Any:
    """Casts the value to the operand's category. nvFuser pads Bool with False only: for True the negation is padded."""
    dtype, value, ops = n.call.types[0].dtype, n.number("value"), n.ops
    widths = local_widths(n.call, n.operand_shapes[0])
    if value is None:
        return n.plain(pad_widths=widths)
    if dtype is not DataType.Bool:
        return n.plain(pad_widths=widths, value=of_category(n, "value", dtype))
    if not isinstance(value, (bool, int, float)):
        raise ToTorch("nvFuser pads Bool with constants only")
    if not value:
        return n.plain(pad_widths=widths, value=None)
    opposite = ops.pad(ops.logical_not(n.operands[0]), widths)
    return ops.logical_not(opposite)


def _pad_bwd(b: Backward) -> Tensor:
    """`grad` without the padding, and with zeros for elements that were cut off."""
    x, widths = b["arg"], list(b["pad_widths"])
    if not all(isinstance(w, int) and w >= 0 for w in widths) or -1 in x.type.shape:
        return b.ops.pad(b.grad, [0 - w for w in widths])
    before = [0] * (x.ndim - len(widths) // 2) + widths[-2::-2]
    return b.ops.slice(b.grad, before, [a + n for a, n in zip(before, x.type.shape, strict=True)])


# cat --------------------------------------------------------------------------------------------------------------


def _cat_infer(call: Call) -> tuple[TensorType, ...]:
    ndim, first = call.types[0].ndim, call.types[0]
    dim = check_dim("cat", call["dim"], ndim)
    if any(t.ndim != ndim for t in call.types):
        raise user_error(
            "cat: operands of different numbers of dims",
            str([t.ndim for t in call.types]),
            f"{ndim} each",
            "",
        )
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
    """Operands of one size are windows of the joined dim; of different sizes they are blocked."""
    builder, dim = RuleBuilder(), call["dim"] % call.types[0].ndim
    sizes = {t.shape[dim] for t in call.types}
    if len(sizes) == 1:
        joined, part = windowed(builder, call.results[0].shape[dim], 0, sizes.pop())
        parts = [part] * len(call.types)
    else:
        joined, parts = (
            builder.blocked(call.results[0].shape[dim]),
            [builder.blocked(t.shape[dim]) for t in call.types],
        )
    shared = {d: builder.dim(n) for d, n in enumerate(call.results[0].shape) if d != dim}
    tensors = [tuple(shared.get(d, part) for d in range(call.types[0].ndim)) for part in (*parts, joined)]
    return builder.build(tensors[:-1], tensors[-1:])


def _distributed_cat(
    r: Writing, call: Call, operands: tuple[TensorRef, ...], dim: int, blocks: int
) -> Sequence[TensorRef] | None:
    """Pads each operand to its place in the joined dim, then picks elements; only the pads communicate."""
    size, ndim = call.results[0].shape[dim], call.results[0].ndim
    if dim != call["dim"] % ndim:
        return None
    index = r.call("reshape", r.call("iota", size), shape_along(ndim, dim, size))
    out, start = None, 0
    for operand in operands:
        here = r.type(operand).shape[dim]
        placed = r.call("pad", operand, one_dim_widths(ndim, dim, start, size - start - here))
        out = placed if out is None else r.call("where", r.call("lt", index, start), out, placed)
        start += here
    return None if out is None else [out]


def _cat_emit(e: Emit) -> str:
    return f"torch.cat([{', '.join(e.operands)}], {e.call['dim'] % e.call.types[0].ndim})"


def _cat_bwd(b: Backward) -> dict[str, Any]:
    """The piece of each operand."""
    tensors, dim, start, parts = b["tensors"], b["dim"] % b.grad.ndim, 0, []
    for x in tensors:
        stop = sizes(x)[dim] + start
        parts.append(_piece(b, dim, start, stop) if x.id in b.active else None)
        start = stop
    return {"tensors": parts}


def _piece(b: Backward, dim: int, start: Any, stop: Any) -> Tensor:
    ends = sizes(b.grad)
    starts = [start if d == dim else 0 for d in range(len(ends))]
    ends[dim] = stop
    return b.ops.slice(b.grad, starts, ends)


_sample = Sample.of_floats
_ARG = Param("arg", K.TENSOR)
OPS = (
    OpDef("pad", (_ARG, Param("pad_widths", K.SHAPE), Param("value", K.OPTIONAL_SCALAR, None)),
          _pad_infer, _pad_rule, _pad_emit, Partial.PICKED,
          samples=lambda: [_sample((6, 8), [1, 2]), _sample((6, 8), [0, 0, 2, 1], 1.5),
                                                            _sample((4, 6), [0, 0, 4, 8]), _sample((4, 6), [-1, 2])],
          nvfuser=_pad_nvfuser, window=_pad_window, vjp=each(arg=_pad_bwd), order_free=("arg",), scheduler="resize",
          about="`value` (0) before and after; widths in pairs from the last dim on, as in torch; negative ones cut"),
    OpDef("cat", (Param("tensors", K.TENSORS), Param("dim", K.DIM, 0), Param("manual_padding", K.BOOL, False)),
          _cat_infer, _cat_rule, _cat_emit, Partial.JOINT, distributed=_distributed_cat,
          samples=lambda: [Sample(([TensorType((4, 6), DataType.Float), TensorType((2, 6), DataType.Float)],)),
                           Sample(([TensorType((4, 6), DataType.Float), TensorType((4, 3), DataType.Float)], -1)),
                           Sample(([TensorType((4, 6), DataType.Float), TensorType((4, 6), DataType.Float)], 1))],
          vjp=_cat_bwd, concat_distributive=True, scheduler="resize",
          about="tensors one behind the other along `dim`"),
)  # fmt: skip
