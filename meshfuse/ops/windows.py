"""Ops that take or leave windows of dims: slice, pad, cat.

Where a dim is cut into, or made of, windows of one size at its multiples (the three parts of a fused q, k, v, the two
of a gate and up projection), the dim is the product of two factors: which window, and where in it. The second passes
through, so that a dim sharded inside each window is sliced, padded and joined locally.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ..dtypes import DataType
from ..errors import user_error
from ..gradients.shapes import CAT, PAD, SLICE
from . import nvfuser_forms
from .nvfuser_lowering import sliced, step_index
from .opdef import Call, Emit, NvfuserEmit, OpDef, Partial, Sample, Writing
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

K = ParamKind


def slice_bounds(call: Call) -> list[tuple[int, int, int]]:
    """(start, stop, step) of every dim, within its size; stop is -1 where the bounds are not known yet."""
    shape, strides = call.types[0].shape, call["strides"] or (1,) * call.types[0].ndim
    lists = (call["start_indices"], call["end_indices"], strides)
    if any(len(part) != len(shape) for part in lists):
        raise user_error("slice: one start, end and stride per dim", f"{[len(p) for p in lists]} entries",
                         f"{len(shape)} each", "Give full lists.")  # fmt: skip
    return [_bounds(*entry) for entry in zip(shape, *lists, strict=True)]


def _bounds(n: int, start: Any, stop: Any, step: Any) -> tuple[int, int, int]:
    is_open = n == UNKNOWN or any(isinstance(part, ScalarRef) for part in (start, stop, step))
    start, stop, step = map(known_size, (start, stop, step))
    if step < 1 and step != UNKNOWN:
        raise user_error("slice: stride", str(step), "a stride >= 1", "Slice forwards.")
    if is_open:
        return (start, UNKNOWN, step)
    low = min(max(start + n if start < 0 else start, 0), n)
    high = min(max(stop + n if stop < 0 else stop, low), n)
    return (low, high, step)


def _slice_infer(call: Call) -> tuple[TensorType, ...]:
    sizes = tuple(UNKNOWN if b == UNKNOWN else -(-(b - a) // s) for a, b, s in slice_bounds(call))
    return (TensorType(sizes, call.types[0].dtype),)


WindowIndex = tuple[int, int]


# No dim is made of more windows on purpose. Sharded inside each, it would lie in as many runs.
_MOST_WINDOWS = 1 << 12


def windows_of(whole: int, start: int, size: int) -> WindowIndex | None:
    """(how many windows of this size the dim has, which of them begins at `start`).

    None where they do not line up, or are too many.
    """
    lines_up = size > 0 and whole <= size * _MOST_WINDOWS and whole % size == 0 and start % size == 0
    return (whole // size, start // size) if lines_up else None


def _windowed(builder: RuleBuilder, whole: int, start: int, size: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The factors of a dim and of a window of it: shared where windows line up, else both are needed whole."""
    window = windows_of(whole, start, size)
    if window is None:
        return builder.blocked(whole), builder.blocked(size)
    inside = builder.dim(size) if size == whole else builder.factor(size)
    return (*(builder.blocked(window[0]) if window[0] > 1 else ()), *inside), inside


def takes_one_of_each(whole: int, start: int, size: int, step: int) -> bool:
    """Whether a slice takes one element of every `step` elements of the dim, as [::2] and [1::2] do."""
    return start < step and whole == size * step


def _stepped(
    builder: RuleBuilder, whole: int, start: int, size: int, step: int
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The factors of a dim and of its slice with steps: which step passes through, the place inside is needed whole."""
    if not takes_one_of_each(whole, start, size, step):
        return builder.blocked(whole), builder.blocked(size)
    steps = builder.factor(size)
    return (*steps, *builder.blocked(step)), steps


def _slice_rule(call: Call) -> Rule:
    """A dim sliced without steps has the factors of its window; one sliced with steps has those of its steps."""
    builder, operand, result = RuleBuilder(), [], []
    for n, m, (start, _, step) in zip(call.types[0].shape, call.results[0].shape, slice_bounds(call), strict=True):
        dims = _windowed(builder, n, start, m) if step == 1 else _stepped(builder, n, start, m, step)
        operand.append(dims[0])
        result.append(dims[1])
    return builder.build([tuple(operand)], [tuple(result)])


def local_bounds(call: Call, local: tuple[int, ...]) -> list[tuple[int, int, int]]:
    """(start, stop, step) of a slice within the operand's shard, from the result's local shape."""
    out = []
    for n, m, (start, stop, step), size in zip(
        call.types[0].shape, call.results[0].shape, slice_bounds(call), local, strict=True
    ):
        window = windows_of(n, start, m) if step == 1 else None
        if window is not None:
            out.append((window[1] * size, (window[1] + 1) * size, 1))
        elif step > 1:  # a shard begins with a whole step
            out.append((start, start + max(size * step - step + 1, 0), step))
        else:
            out.append((start, stop, step))
    return out


def _has_parts(call: Call) -> bool:
    """Whether a slice has steps, and some dim is cut otherwise than into whole steps."""
    rows = zip(call.types[0].shape, call.results[0].shape, slice_bounds(call), strict=True)
    cut = any(n != m if step == 1 else not takes_one_of_each(n, start, m, step) for n, m, (start, _, step) in rows)
    return cut and not set(call["strides"] or ()) <= {1}


def _distributed_slice(
    r: Writing, call: Call, operands: tuple[TensorRef, ...], dim: int, blocks: int
) -> Sequence[TensorRef] | None:
    """The slice along `dim` in ordinary ops, of which only a pad and a window move anything.

    First the steps of the other dims are taken. Then `dim` is moved and padded to whole steps, the same number in each
    block, and the first element of each step is taken, and of these a window. The pad moves less than a step of each
    block, the window moves elements of the result.
    """
    bounds, n, m = dict(enumerate(slice_bounds(call))), call.types[0].shape[dim], call.results[0].shape[dim]
    start, _, step = bounds.pop(dim)
    if m in (0, n) or (step > 1 and takes_one_of_each(n, start, m, step)):
        return None
    x = _part(r, operands[0], {d: bound for d, bound in bounds.items() if bound[2] > 1})
    windows = {d: bound for d, bound in bounds.items() if bound[2] == 1}
    if step > 1:
        x, windows = _firsts(r, _part(r, x, windows), dim, (start, step, blocks)), {}
    return [_part(r, x, {**windows, dim: (start // step, start // step + m, 1)})]


def _part(r: Writing, x: TensorRef, bounds: Mapping[int, tuple[int, int, int]]) -> TensorRef:
    """A slice of x with these bounds by dim; x itself where that is all of it."""
    whole = [(0, n, 1) for n in r.type(x).shape]
    found = [bounds.get(d, bound) for d, bound in enumerate(whole)]
    return x if found == whole else r.call("slice", x, *[list(part) for part in zip(*found, strict=True)])


def _firsts(r: Writing, x: TensorRef, dim: int, steps: tuple[int, int, int]) -> TensorRef:
    """The first element of every step of a dim, which is first cut and padded to whole steps in each block."""
    (start, step, blocks), ndim, n = steps, len(r.type(x).shape), r.type(x).shape[dim]
    inside, whole = start % step, step * max(blocks, 1)
    widths = one_dim_widths(ndim, dim, -inside, -(n - inside) % whole)
    aligned = r.call("pad", x, widths) if any(widths) else x
    return r.call("slice", aligned, [0] * ndim, list(r.type(aligned).shape), shape_along(ndim, dim, step))


def _slice_window(call: Call) -> tuple[tuple[int, ...], Any] | None:
    bounds = slice_bounds(call)
    return (tuple(start for start, _, _ in bounds), 0) if all(step == 1 for _, _, step in bounds) else None


def _slice_emit(e: Emit) -> str:
    parts = []
    for n, (a, b, s) in zip(e.operand_shapes[0], local_bounds(e.call, e.result_shapes[0]), strict=True):
        parts.append(":" if (a, b, s) == (0, n, 1) else f"{a}:{b}" if s == 1 else f"{a}:{b}:{s}")
    return f"{e.operands[0]}[{', '.join(parts) or '...'}]"


def _slice_nvfuser(n: NvfuserEmit) -> Any:
    """Bounds are within local sizes. nvFuser has no steps: their indices are looked up."""
    tensor = n.operands[0]
    bounds, shape = local_bounds(n.call, n.result_shapes[0]), [*n.operand_shapes[0]]
    for d, (start, stop, step) in enumerate(bounds):
        if step != 1:
            tensor = n.ops.index_select(tensor, step_index(n, start, -(-(stop - start) // step), step), d)
            shape[d] = n.result_shapes[0][d]
            bounds[d] = (0, shape[d], 1)
    return sliced(n.ops, n.val, tensor, shape, [b[0] for b in bounds], [b[1] for b in bounds])


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
    told = {arg.ndim - 1 - i // 2 for i, width in enumerate(call["pad_widths"]) if isinstance(width, ScalarRef)}
    open_dims = told | {d for d, n in enumerate(arg.shape) if n == UNKNOWN}
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
    """The operand is a window of the result in each padded dim; where only some is cut off, both are needed whole."""
    builder, widths, operand, result = RuleBuilder(), pad_widths(call), [], []
    for d, (n, m) in enumerate(zip(call.types[0].shape, call.results[0].shape, strict=True)):
        before, after = widths.get(d, (0, 0))
        dims = _windowed(builder, m, before, n) if min(before, after) >= 0 else (builder.blocked(m), builder.blocked(n))
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
    return nvfuser_forms.pad(n, local_widths(n.call, n.operand_shapes[0]))


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
    """Operands of one size are windows of the joined dim; operands of different sizes are needed whole."""
    builder, dim = RuleBuilder(), call["dim"] % call.types[0].ndim
    sizes = {t.shape[dim] for t in call.types}
    if len(sizes) == 1:
        joined, part = _windowed(builder, call.results[0].shape[dim], 0, sizes.pop())
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
    """Pad each operand to its place in the joined dim, then pick each element; only the pads move anything."""
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


_sample = Sample.of_floats
_ARG = Param("arg", K.TENSOR)
OPS = (
    OpDef("slice", (_ARG, Param("start_indices", K.SHAPE), Param("end_indices", K.SHAPE),
                    Param("strides", K.SHAPE, None),
                    Param("manual_normalization", K.BOOL, False)),
          _slice_infer, _slice_rule, _slice_emit, Partial.MOVE,
          samples=lambda: [_sample((6, 8), [0, 2], [6, 7]), _sample((6, 8), [1, 0], [6, 8], [2, 1]),
                           _sample((7, 8), [1, 3], [6, 8], [2, 4]), _sample((13, 9), [4, 0], [11, 9], [3, 2]),
                           _sample((12, 8), [4, 0], [8, 8]), _sample((6, 8), [3, 1], [4, 7])],
          nvfuser=_slice_nvfuser, window=_slice_window, distributed=_distributed_slice,
          has_form=_has_parts, vjp=SLICE, is_view=True,
          about="elements `start_indices` to `end_indices` of every dim, in steps of `strides`"),
    OpDef("pad", (_ARG, Param("pad_widths", K.SHAPE), Param("value", K.OPTIONAL_SCALAR, None)),
          _pad_infer, _pad_rule, _pad_emit, Partial.PICKED,
          samples=lambda: [_sample((6, 8), [1, 2]), _sample((6, 8), [0, 0, 2, 1], 1.5),
                                                            _sample((4, 6), [0, 0, 4, 8]), _sample((4, 6), [-1, 2])],
          nvfuser=_pad_nvfuser, window=_pad_window, vjp=PAD,
          about="`value` (0) before and after; widths in pairs from the last dim on, as in torch; negative ones cut"),
    OpDef("cat", (Param("tensors", K.TENSORS), Param("dim", K.DIM, 0), Param("manual_padding", K.BOOL, False)),
          _cat_infer, _cat_rule, _cat_emit, Partial.JOINT, distributed=_distributed_cat,
          samples=lambda: [Sample(([TensorType((4, 6), DataType.Float), TensorType((2, 6), DataType.Float)],)),
                           Sample(([TensorType((4, 6), DataType.Float), TensorType((4, 3), DataType.Float)], -1)),
                           Sample(([TensorType((4, 6), DataType.Float), TensorType((4, 6), DataType.Float)], 1))],
          vjp=CAT, pieced=True,
          about="tensors one behind the other along `dim`"),
)  # fmt: skip
