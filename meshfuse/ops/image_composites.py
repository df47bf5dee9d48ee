"""Composites of windows that slide: pooling and interpolation of [n, channels, ..], along 1 to 3 spatial dims."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from ..dtypes import DataType
from ..errors import user_error
from .composite import as_wide, in_type_of
from .shape_arithmetic import check_positive
from .sliding_windows import Window, per_dim
from .vjp import sizes

Ints = int | Sequence[int]


def _listed(name: str, what: str, given: Any, dims: int) -> tuple[Any, ...]:
    """An option by spatial dim."""
    return per_dim(name, what, given if isinstance(given, (list, tuple)) else [given], dims)


def _along(fd: Any, x: Any, dim: int, ndim: int) -> Any:
    return fd.ops.broadcast(x, [d != dim for d in range(ndim)])


# pooling ----------------------------------------------------------------------------------------------------------


def _windows(name: str, x: Any, options: Sequence[Any], ceil_mode: bool) -> list[Window]:
    """The windows of a pooling, which in ceil mode may reach beyond the padding, but begin before it."""
    dims = x.ndim - 2
    if dims not in (1, 2, 3):
        raise user_error(f"{name}: the operand", str(x.type), "[n, channels, ..] with 1 to 3 spatial dims", "")
    kernel, stride, padding, dilation = options
    names = ("kernel", "stride", "padding", "dilation")
    stride = kernel if stride is None else stride
    rows = zip(*[_listed(name, w, v, dims) for w, v in zip(names, (kernel, stride, padding, dilation), strict=True)],
               strict=True)  # fmt: skip
    plain = [Window(k, s, p, p, d) for k, s, p, d in rows]
    return [_reaching(name, w, n) for w, n in zip(plain, x.type.shape[2:], strict=True)] if ceil_mode else plain


def _reaching(name: str, window: Window, n: int) -> Window:
    if n == -1:
        raise user_error(f"{name}: ceil_mode with a size that is open", "?", "a known size", "Give the size.")
    count = -(-(n + 2 * window.before - window.reach - 1) // window.stride) + 1
    if (count - 1) * window.stride >= n + window.before:
        count -= 1
    after = (count - 1) * window.stride + window.reach + 1 - n - window.before
    return Window(window.size, window.stride, window.before, after, window.dilation)


def _options(windows: Sequence[Window]) -> list[list[int]]:
    return [[getattr(w, name) for w in windows] for name in ("size", "stride", "before", "after")]


def max_pool(
    fd: Any, x: Any, kernel: Ints, stride: Ints | None = None, padding: Ints = 0, dilation: Ints = 1,
    ceil_mode: bool = False,
) -> tuple[Any, Any]:  # fmt: skip
    """(the maximum of each window, its place among all elements of the spatial dims), as torch's max_pool1d to 3d.

    The stride is the window's size if none is given.
    """
    windows = _windows("max_pool", x, (kernel, stride, padding, dilation), ceil_mode)
    return fd.ops.window_max(x, *_options(windows), [w.dilation for w in windows])


def avg_pool(
    fd: Any, x: Any, kernel: Ints, stride: Ints | None = None, padding: Ints = 0, ceil_mode: bool = False,
    count_include_pad: bool = True, divisor: int | None = None,
) -> Any:  # fmt: skip
    """The mean of each window, as torch's avg_pool1d to 3d; with `divisor` its sum over that.

    Padding counts as zeros, or with `count_include_pad=False` not at all.
    """
    windows = _windows("avg_pool", x, (kernel, stride, padding, 1), ceil_mode)
    total = fd.ops.window_sum(as_wide(fd, x), *_options(windows))
    whole = all(w.after <= w.before for w in windows) and (count_include_pad or not any(w.before for w in windows))
    if divisor is not None or whole:
        return in_type_of(fd, fd.ops.truediv(total, divisor or math.prod(w.size for w in windows)), x)
    for d, window in enumerate(windows):
        count = _counts(fd, x, total, d + 2, window, count_include_pad)
        total = fd.ops.truediv(total, _along(fd, count, d + 2, x.ndim))
    return in_type_of(fd, total, x)


def _counts(fd: Any, x: Any, made: Any, dim: int, window: Window, with_padding: bool) -> Any:
    """How many elements each window has along a dim."""
    ops, n, beyond = fd.ops, sizes(x)[dim], window.before if with_padding else 0
    start = ops.iota(sizes(made)[dim], -window.before, window.stride)
    stop = ops.minimum(ops.add(start, window.size), n + beyond)
    return ops.cast(ops.sub(stop, ops.maximum(start, -beyond)), made.dtype)


def adaptive_avg_pool(fd: Any, x: Any, output_size: Sequence[int | None]) -> Any:
    """The means of as many windows as `output_size` says by spatial dim, of equal sizes up to one; None keeps a dim."""
    wanted = _listed("adaptive_avg_pool", "output_size", output_size, x.ndim - 2)
    made = as_wide(fd, x)
    for dim, count in enumerate(wanted, 2):
        n = sizes(made)[dim]
        if count is None or count == n:
            continue
        check_positive("adaptive_avg_pool", "output_size", count)
        if count == 1:
            made = fd.ops.mean(made, [dim], True)
        elif isinstance(n, int) and n % count == 0:
            made = _mean_of_parts(fd, made, dim, count)
        else:
            made = _weighed(fd, made, dim, _adaptive_weights(fd, n, count, made.dtype))
    return in_type_of(fd, made, x)


def _mean_of_parts(fd: Any, x: Any, dim: int, count: int) -> Any:
    whole = sizes(x)
    parts = fd.ops.reshape(x, [*whole[:dim], count, whole[dim] // count, *whole[dim + 1 :]])
    return fd.ops.mean(parts, [dim + 1])


def _adaptive_weights(fd: Any, n: Any, count: int, dtype: DataType) -> Any:
    """[count, n]: by window the weight of each element.

    Window i begins at i n / count, rounded down, and ends at (i + 1) n / count, rounded up.
    """
    ops = fd.ops
    window = ops.mul(ops.iota(count), n)
    first, last = ops.div(window, count), ops.div(ops.add(window, n + (count - 1)), count)
    first, last = (ops.broadcast(edge, [False, True]) for edge in (first, last))
    inside = ops.logical_and(ops.ge(ops.iota(n), first), ops.lt(ops.iota(n), last))
    return ops.truediv(ops.cast(inside, dtype), ops.cast(ops.sub(last, first), dtype))


def _weighed(fd: Any, x: Any, dim: int, weights: Any) -> Any:
    """Sums along a dim by weights [m, n]: the dim has m elements then."""
    order = [d for d in range(x.ndim) if d != dim] + [dim]
    made = fd.ops.linear(fd.ops.permute(x, order), weights)
    return fd.ops.permute(made, [order.index(d) for d in range(x.ndim)])


# interpolation ----------------------------------------------------------------------------------------------------


def upsample_nearest(fd: Any, x: Any, output_size: Sequence[int]) -> Any:
    """Each element of the result is the one of x at the same place, scaled and rounded down, as in torch.

    Where a size is a multiple, elements are repeated, and a sharded dim needs no communication.
    """
    wanted = _listed("upsample_nearest", "output_size", output_size, x.ndim - 2)
    for dim, count in enumerate(wanted, 2):
        n, whole = sizes(x)[dim], sizes(x)
        check_positive("upsample_nearest", "output_size", count)
        if isinstance(n, int) and count % max(n, 1) == 0:
            parts = fd.ops.broadcast(x, [d == dim + 1 for d in range(x.ndim + 1)])
            repeated = fd.ops.expand(parts, [*whole[: dim + 1], count // max(n, 1), *whole[dim + 1 :]])
            x = fd.ops.reshape(repeated, [*whole[:dim], count, *whole[dim + 1 :]])
        else:
            x = fd.ops.index_select(x, fd.ops.div(fd.ops.mul(fd.ops.iota(count), n), count), dim)
    return x


def upsample_linear(fd: Any, x: Any, output_size: Sequence[int], align_corners: bool = False) -> Any:
    """Linear interpolation along each spatial dim: torch's modes linear, bilinear and trilinear.

    Where a size is a multiple and corners are not aligned, ranks exchange only the edges of a sharded dim.
    """
    wanted = _listed("upsample_linear", "output_size", output_size, x.ndim - 2)
    made = as_wide(fd, x)
    for dim, count in enumerate(wanted, 2):
        n = sizes(made)[dim]
        check_positive("upsample_linear", "output_size", count)
        if count == n:
            continue
        if isinstance(n, int) and n and count % n == 0 and not align_corners:
            made = _by_phases(fd, made, dim, count // n)
        else:
            made = _by_neighbours(fd, made, dim, count, align_corners)
    return in_type_of(fd, made, x)


def _by_phases(fd: Any, x: Any, dim: int, scale: int) -> Any:
    """Element i scale + p lies at i + (p + 1/2) / scale - 1/2, between two elements whose weights depend on p alone."""
    whole, n = sizes(x), sizes(x)[dim]
    ends = [_cut(fd, x, dim, start, start + 1) for start in (0, n - 1)]
    wide = fd.ops.cat([ends[0], x, ends[1]], dim)  # Beyond its ends stand the first and the last element.
    parts = []
    for phase in range(scale):
        place = (phase + 0.5) / scale - 0.5
        low = math.floor(place)
        left, right = (_cut(fd, wide, dim, low + 1 + step, low + 1 + step + n) for step in (0, 1))
        mixed = fd.ops.add(fd.ops.mul(left, 1.0 - (place - low)), fd.ops.mul(right, place - low))
        parts.append(fd.ops.broadcast(mixed, [d == dim + 1 for d in range(x.ndim + 1)]))
    return fd.ops.reshape(fd.ops.cat(parts, dim + 1), [*whole[:dim], n * scale, *whole[dim + 1 :]])


def _cut(fd: Any, x: Any, dim: int, start: int, stop: int) -> Any:
    first, last = [0] * x.ndim, sizes(x)
    first[dim], last[dim] = start, stop
    return fd.ops.slice(x, first, last)


def _by_neighbours(fd: Any, x: Any, dim: int, count: int, align_corners: bool) -> Any:
    """The two elements at both sides of each place, looked up and mixed."""
    ops, n = fd.ops, sizes(x)[dim]
    index = ops.cast(ops.iota(count), DataType.Double)
    if align_corners:
        place = ops.mul(index, (n - 1) / float(count - 1) if count > 1 else 0.0)
    else:
        place = ops.maximum(ops.sub(ops.mul(ops.add(index, 0.5), n / float(count)), 0.5), 0.0)
    low = ops.cast(place, DataType.Int)
    low = ops.minimum(low, n - 1)
    share = ops.cast(ops.sub(place, ops.cast(low, DataType.Double)), x.dtype)
    left, right = (ops.index_select(x, at, dim) for at in (low, ops.minimum(ops.add(low, 1), n - 1)))
    share = _along(fd, share, dim, x.ndim)
    return ops.add(left, ops.mul(ops.sub(right, left), share))


IMAGE_COMPOSITES: dict[str, Callable[..., Any]] = {
    function.__name__: function
    for function in (max_pool, avg_pool, adaptive_avg_pool, upsample_nearest, upsample_linear)
}
