"""Maxima of windows that slide along dims, and their gradient: max pooling.

Batch and channels pass through. A spatial dim passes where windows lie side by side; else ranks exchange the edges of
their blocks (`sliding_windows.py`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F

from ..dtypes import DataType
from ..kernels.indices import Runs, global_index, local_places
from ..kernels.table import kernel
from .halo import in_blocks
from .opdef import Call, Emit, OpDef, Partial, Sample, Writing
from .pooling import (
    AFTER,
    ARG,
    GRAD,
    NOT_NATIVE,
    SIZES,
    WINDOW,
    input_form,
    options_along,
    options_text,
    pooled_rule,
    pooled_shape,
    result_form,
    sample,
    spread_infer,
    spread_rule,
    torch_widths,
)
from .shape_arithmetic import check_index, check_ndim, check_same_size
from .sliding_windows import with_halo
from .values import Param, ParamKind, TensorRef, TensorType
from .vjp import Backward, Tensor, each, numel_along, sizes

K = ParamKind


def _max_infer(call: Call) -> tuple[TensorType, ...]:
    shape = pooled_shape(call)
    return TensorType(shape, call.types[0].dtype), TensorType(shape, DataType.Int)


def _max_emit(e: Emit) -> str:
    options = options_text(e, "kernel", "stride", "before", "dilation")
    place = [str(e.operand_runs(0)[2:]), str(e.call.types[0].shape[2:]), str(e.result_shapes[0])]
    return f"K.window_max({', '.join([e.operands[0], *options, *place])})"


@kernel
def window_max(
    x: torch.Tensor,
    size: tuple[int, ...],
    stride: tuple[int, ...],
    before: tuple[int, ...],
    dilation: tuple[int, ...],
    runs: Sequence[Runs],
    whole: tuple[int, ...],
    shape: tuple[int, ...],
) -> tuple[torch.Tensor, torch.Tensor]:
    """The maximum of each window and its place among all elements of the spatial dims, whose sizes are `whole`.

    Of equal elements it is the first; NaN counts as the largest.
    """
    if 0 in (*x.shape, *shape):
        return x.new_zeros(shape), x.new_zeros(shape, dtype=torch.int64)
    reach = [(m - 1) * s + d * (k - 1) + 1 for m, s, d, k in zip(shape[2:], stride, dilation, size, strict=True)]
    pool = (F.max_pool1d, F.max_pool2d, F.max_pool3d)[len(size) - 1]
    if tuple(x.shape[2:]) == tuple(whole) and _pads_itself(reach, size, before, whole):
        made = pool(x, size, stride, before, dilation, return_indices=True)
        values, places = (t[(..., *map(slice, shape[2:]))] for t in made)
        return values, places
    widths = [(b, n - b - m) for n, b, m in zip(reach, before, x.shape[2:], strict=True)]
    padded = F.pad(x, torch_widths(widths), value=float("-inf"))
    values, places = pool(padded, size, stride, 0, dilation, return_indices=True)
    by_dim = zip(_coordinates(places, padded.shape[2:]), before, x.shape[2:], runs, strict=True)
    found = [_global((c - b).clamp(0, n - 1), run) for c, b, n, run in by_dim]
    return values, _place(found, whole)


def _pads_itself(reach: Sequence[int], size: Sequence[int], before: Sequence[int], whole: Sequence[int]) -> bool:
    """Whether torch's own padding, the same before and after each dim, has all windows; they may be some of its."""
    rows = zip(reach, size, before, whole, strict=True)
    return all(2 * b <= k and n - b <= m + b for n, k, b, m in rows)


def _coordinates(places: torch.Tensor, shape: Sequence[int]) -> list[torch.Tensor]:
    """By dim the index of each place among all elements of this shape."""
    return list(torch.unravel_index(places, tuple(shape)))


def _place(coordinates: Sequence[torch.Tensor], shape: Sequence[int]) -> torch.Tensor:
    """The inverse of `_coordinates`."""
    found = coordinates[0]
    for index, n in zip(coordinates[1:], shape[1:], strict=True):
        found = found * n + index
    return found


def _global(index: torch.Tensor, runs: Runs) -> torch.Tensor:
    """Global indices of local ones, of which the rank has these runs."""
    if len(runs) == 1:
        return index + runs[0][0]
    return global_index(runs, index.device)[index]


class _PlaneOps:
    """Places among the elements of spatial dims of these sizes, of which one dim, `axis`, gets another size."""

    def __init__(self, r: Writing, shape: Sequence[int], axis: int):
        self.r, self.n, self.inner = r, shape[axis], math.prod(shape[axis + 1 :])

    def parts(self, place: TensorRef) -> tuple[TensorRef, TensorRef, TensorRef]:
        """What stands before the dim in a place, the index along it, and what stands after it."""
        rest, inner = self.r.call("div", place, self.inner), self.r.call("mod", place, self.inner)
        return self.r.call("div", rest, self.n), self.r.call("mod", rest, self.n), inner

    def joined(self, outer: TensorRef, index: TensorRef, inner: TensorRef, n: int) -> TensorRef:
        """The place, if the dim is of size n."""
        along = self.r.call("add", self.r.call("mul", outer, n), index)
        return self.r.call("add", self.r.call("mul", along, self.inner), inner)


def _distributed_max(
    r: Writing, call: Call, operands: tuple[TensorRef, ...], dim: int, blocks: int
) -> Sequence[TensorRef] | None:
    """As of the sum; places within a block are counted anew."""
    found = input_form(call, dim, blocks)
    if found is None:
        return None
    cut, window, m = found
    x = cut.merged(r, with_halo(r, operands[0], cut, window.before, float("-inf")))
    values, places = r.call("window_max", x, *options_along(call, dim), call["dilation"])
    shape, n = r.type(x).shape, call.types[0].shape[dim]
    plane = _PlaneOps(r, shape[2:], dim - 2)
    outer, index, inner = plane.parts(places)
    first = cut.starts(r, len(shape), cut.inputs, call.types[0].shape[0])
    index = r.call("sub", r.call("add", index, first), window.before)
    index = r.call("minimum", r.call("maximum", index, 0), n - 1)
    return [cut.split(r, t, m) for t in (values, plane.joined(outer, index, inner, n))]


def _max_vjp(b: Backward) -> Tensor:
    options = (b["kernel"], b["stride"], b["before"], b["dilation"])
    return b.ops.window_max_bwd(b.grad, b.results[1], sizes(b["arg"])[2:], *options)


def _max_bwd_infer(call: Call) -> tuple[TensorType, ...]:
    made = spread_infer(call)
    grad, index = call.types
    check_index(call, index)
    check_ndim(call.op.name, "the index", index, grad.ndim, grad.ndim)
    for d, (n, m) in enumerate(zip(grad.shape, index.shape, strict=True)):
        check_same_size(call.op.name, f"the sizes of dim {d}", n, m)
    return made


def _max_bwd_emit(e: Emit) -> str:
    whole = e.call.results[0].shape[2:]
    n, shape = math.prod(whole), str(e.result_shapes[0])
    index = f"K.checked({e.operands[1]}, {n})"
    return f"K.window_max_bwd({e.operands[0]}, {index}, {e.result_runs(0)[2:]}, {whole}, {shape})"


@kernel
def window_max_bwd(
    grad: torch.Tensor, index: torch.Tensor, runs: Sequence[Runs], whole: tuple[int, ...], shape: tuple[int, ...]
) -> torch.Tensor:
    """Each element added at its place among the elements of the spatial dims; the rank has the indices in `runs`."""
    if 0 in (*grad.shape, *shape):
        return grad.new_zeros(shape)
    if tuple(shape[2:]) != tuple(whole):
        found = [local_places(c, run) for c, run in zip(_coordinates(index, whole), runs, strict=True)]
        index = _place([places for places, _ in found], shape[2:])
        grad = torch.where(torch.stack([inside for _, inside in found]).all(0), grad, 0)
    out = grad.new_zeros((*shape[:2], math.prod(shape[2:])))
    return out.scatter_add_(2, index.flatten(2), grad.flatten(2)).reshape(shape)


def _distributed_max_bwd(
    r: Writing, call: Call, operands: tuple[TensorRef, ...], dim: int, blocks: int
) -> Sequence[TensorRef] | None:
    """Blocks of the result, from all windows that reach into them; of these, what lies in the block."""
    found = result_form(call, dim, blocks)
    if found is None:
        return None
    cut, halo, _, (n, _) = found
    made = call.results[0].shape[2:]
    index = r.call("linear_index", operands[1:], (math.prod(made),), False)  # For the error of a wrong one.
    pair = (operands[0], index)
    grad, places = (cut.merged(r, in_blocks(r, x, dim, blocks, cut.results, halo, 0)) for x in pair)
    plane = _PlaneOps(r, made, dim - 2)
    outer, index, inner = plane.parts(places)
    index = r.call("sub", index, cut.starts(r, len(made) + 2, cut.inputs, call.types[0].shape[0]))
    inside = r.call("logical_and", r.call("ge", index, 0), r.call("lt", index, cut.inputs))
    places = r.call("where", inside, plane.joined(outer, index, inner, cut.inputs), 0)
    grad = r.call("where", inside, grad, 0.0)
    size = [cut.inputs if d == dim - 2 else m for d, m in enumerate(made)]
    options = [call[what] for what in ("kernel", "stride", "before", "dilation")]
    return [cut.split(r, r.call("window_max_bwd", grad, places, size, *options), n)]


def _max_bwd_vjp(b: Backward) -> Tensor:
    """What stands at the places."""
    grad, index = b.grad, b["index"]
    flat = b.ops.reshape(grad, [*sizes(grad)[:2], numel_along(grad, range(2, grad.ndim))])
    places = b.ops.reshape(index, [*sizes(index)[:2], numel_along(index, range(2, index.ndim))])
    return b.ops.reshape(b.ops.take_along_axis(flat, places, 2), sizes(index))


def _max_samples() -> list[Sample]:
    return [
        sample((2, 3, 8), [3], [2], [1], [0]),
        sample((1, 2, 3, 6), [2, 3], [1, 3], [1, 0], [1, 0], [2, 1]),
    ]


def _max_bwd_samples() -> list[Sample]:
    index = [TensorType(shape, DataType.Int) for shape in ((2, 3, 4), (1, 2, 3))]
    return [
        sample((2, 3, 4), index[0], [8], [3], [2], [1], values={1: (0, 3, 4, 7)}),
        sample((1, 2, 3), index[1], [6], [2], [2], values={1: (1, 2, 5)}),
    ]


def _max_reference(x: torch.Tensor, size: Any, stride: Any, before: Any, after: Any, dilation: Any) -> Any:
    """By torch's own padding, with as much after as its last window needs."""
    of = (F.max_pool1d, F.max_pool2d, F.max_pool3d)[x.ndim - 3]
    padding = list(before) * (x.ndim - 2) if len(before) == 1 else list(before)
    values, index = of(x, size, stride, padding, dilation, return_indices=True)
    keep = tuple(slice(0, (n + b + a - d * (k - 1) - 1) // s + 1) for n, b, a, k, s, d in zip(
        x.shape[2:], padding, list(after) * len(padding) if len(after) == 1 else after, size, stride,
        list(dilation) * len(padding) if len(dilation) == 1 else dilation, strict=True))  # fmt: skip
    return values[(..., *keep)], index[(..., *keep)]


def _max_bwd_reference(grad: torch.Tensor, index: torch.Tensor, made: Any, *_: Any) -> torch.Tensor:
    flat = torch.zeros(*grad.shape[:2], math.prod(made), dtype=grad.dtype)
    return flat.scatter_add(2, index.flatten(2), grad.flatten(2)).reshape(*grad.shape[:2], *made)


_DILATION = Param("dilation", K.INTS, (1,))
OPS = (
    OpDef(
        "window_max", (ARG, *WINDOW, AFTER, _DILATION), _max_infer, pooled_rule, _max_emit,
        flops=lambda call: float(call.results[0].numel * math.prod(call["kernel"])), samples=_max_samples,
        nvfuser=NOT_NATIVE, distributed=_distributed_max, vjp=each(arg=_max_vjp), reference=_max_reference,
        about="maxima of windows that slide along 1 to 3 dims of [n, channels, ..], and their places in these dims",
    ),
    OpDef(
        "window_max_bwd", (GRAD, Param("index", K.TENSOR), SIZES, *WINDOW, _DILATION), _max_bwd_infer, spread_rule,
        _max_bwd_emit, Partial.FIRST, samples=_max_bwd_samples, nvfuser=NOT_NATIVE, distributed=_distributed_max_bwd,
        vjp=each(grad=_max_bwd_vjp), reference=_max_bwd_reference,
        about="the gradient of `window_max`: each element added at its place",
    ),
)  # fmt: skip
