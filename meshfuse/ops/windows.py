"""Windows of dims: their factors, and slice.

A dim that is cut into windows of one size at multiples of it (a fused q, k, v; a gate and up projection), or made of
such windows, has two factors: the window's number, and the index in it. The second passes through: a dim that is
sharded inside each window is sliced, padded and joined locally.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ..errors import user_error
from .nvfuser_lowering import sliced, step_index
from .opdef import Call, Emit, NvfuserEmit, OpDef, Partial, Sample, Writing
from .rules import Rule, RuleBuilder
from .shape_arithmetic import (
    UNKNOWN,
    known_size,
    one_dim_widths,
    shape_along,
)
from .values import Param, ParamKind, ScalarRef, TensorRef, TensorType
from .vjp import Backward, Tensor, each, sizes
from .window_gradients import WindowGradient, zero_padded

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


# A dim that is sharded inside each window lies in as many runs as there are windows.
_MOST_WINDOWS = 1 << 12


def windows_of(whole: int, start: int, size: int) -> WindowIndex | None:
    """(how many windows of this size the dim has, which of them begins at `start`).

    None where they do not line up, or are too many.
    """
    lines_up = size > 0 and whole <= size * _MOST_WINDOWS and whole % size == 0 and start % size == 0
    return (whole // size, start // size) if lines_up else None


def windowed(builder: RuleBuilder, whole: int, start: int, size: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The factors of a dim and of a window of it: shared if windows line up, else both are blocked."""
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
    """The factors of a dim and of its slice with steps: the number of the step passes, the place inside is blocked."""
    if not takes_one_of_each(whole, start, size, step):
        return builder.blocked(whole), builder.blocked(size)
    steps = builder.factor(size)
    return (*steps, *builder.blocked(step)), steps


def _slice_rule(call: Call) -> Rule:
    """A dim has the factors of its window, or with steps those of its steps."""
    builder, operand, result = RuleBuilder(), [], []
    for n, m, (start, _, step) in zip(call.types[0].shape, call.results[0].shape, slice_bounds(call), strict=True):
        dims = windowed(builder, n, start, m) if step == 1 else _stepped(builder, n, start, m, step)
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
        elif step > 1:  # A shard begins with a whole step.
            out.append((start, start + max(size * step - step + 1, 0), step))
        else:
            out.append((start, stop, step))
    return out


def _has_parts(call: Call) -> bool:
    """Whether a slice has steps, and some dim is not cut into whole steps."""
    rows = zip(call.types[0].shape, call.results[0].shape, slice_bounds(call), strict=True)
    cut = any(n != m if step == 1 else not takes_one_of_each(n, start, m, step) for n, m, (start, _, step) in rows)
    return cut and not set(call["strides"] or ()) <= {1}


def _distributed_slice(
    r: Writing, call: Call, operands: tuple[TensorRef, ...], dim: int, blocks: int
) -> Sequence[TensorRef] | None:
    """The slice along `dim` in ordinary ops; only a pad and a window communicate.

    Other dims are sliced first. Then `dim` is shifted and padded to whole steps, the same number in each block; the
    first element of each step is taken, and a window of these. The pad moves less than a step of each block, the window
    moves elements of the result.
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
    """A slice of x with these bounds by dim; x itself if that is all of it."""
    whole = [(0, n, 1) for n in r.type(x).shape]
    found = [bounds.get(d, bound) for d, bound in enumerate(whole)]
    return x if found == whole else r.call("slice", x, *[list(part) for part in zip(*found, strict=True)])


def _firsts(r: Writing, x: TensorRef, dim: int, steps: tuple[int, int, int]) -> TensorRef:
    """The first element of every step of a dim, after cutting and padding it to whole steps in each block."""
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
    """nvFuser has no steps: their indices are looked up."""
    tensor = n.operands[0]
    bounds, shape = local_bounds(n.call, n.result_shapes[0]), [*n.operand_shapes[0]]
    for d, (start, stop, step) in enumerate(bounds):
        if step != 1:
            tensor = n.ops.index_select(tensor, step_index(n, start, -(-(stop - start) // step), step), d)
            shape[d] = n.result_shapes[0][d]
            bounds[d] = (0, shape[d], 1)
    return sliced(n.ops, n.val, tensor, shape, [b[0] for b in bounds], [b[1] for b in bounds])


def _slice_bwd(b: Backward) -> Tensor | WindowGradient:
    """`grad` at its place in the operand, with zeros around it and, with steps, between its elements."""
    x, grad = b["arg"], b.grad
    steps = b["strides"] or (1,) * x.ndim
    starts = [_start(b.ops, n, a) for n, a in zip(sizes(x), b["start_indices"], strict=True)]
    for d, step in enumerate(steps):
        if step != 1:
            inside = starts[d] % step if isinstance(starts[d], int) else 0
            grad, starts[d] = _spread(b, grad, d, step, inside), starts[d] - inside
    ends = [a + m for a, m in zip(starts, sizes(grad), strict=True)]
    if all(isinstance(n, int) for n in (*ends, *sizes(x))) and all(e <= n for e, n in zip(ends, sizes(x), strict=True)):
        return WindowGradient(grad, tuple(starts))
    return zero_padded(b.ops, grad, starts, [n - end for n, end in zip(sizes(x), ends, strict=True)])


def _spread(b: Backward, grad: Tensor, dim: int, step: int, inside: int) -> Tensor:
    """Every element of a dim becomes `step` elements: itself at place `inside`, and zeros."""
    shape = sizes(grad)
    single = b.ops.broadcast(grad, [d == dim + 1 for d in range(grad.ndim + 1)])
    before, after = ([n if d == dim + 1 else 0 for d in range(grad.ndim + 1)] for n in (inside, step - 1 - inside))
    return b.ops.reshape(
        zero_padded(b.ops, single, before, after), [*shape[:dim], shape[dim] * step, *shape[dim + 1 :]]
    )


def _start(ops: Any, n: Any, start: Any) -> Any:
    """The first index of a slice of a dim of size n, counted from the front."""
    if isinstance(n, int) and isinstance(start, int):
        return _bound(n, start)
    if isinstance(start, int):
        return ops.minimum(start, n) if start > 0 else ops.maximum(n + start, 0) if start else 0
    counted = ops.where(ops.lt(start, 0), ops.add(start, n), start)
    return ops.minimum(ops.maximum(counted, 0), n)


def _bound(n: int, index: int) -> int:
    return min(max(index + n if index < 0 else index, 0), n)


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
          has_form=_has_parts, vjp=each(arg=_slice_bwd), order_free=("arg",), is_view=True, is_cheap=True,
          scheduler="resize",
          about="elements `start_indices` to `end_indices` of every dim, in steps of `strides`"),
)  # fmt: skip
