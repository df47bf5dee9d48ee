"""Composites that look up, write and count by index, as torch's functions of these names."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from ..argument_checks import as_int
from ..dtypes import Category, DataType
from ..errors import DtypeError, shown, user_error
from .shape_arithmetic import check_dim, check_same_size
from .vjp import is_tensor, numel_along, sizes

# The longest dim whose elements are turned round one by one; others are looked up.
_MOST_BLOCKS = 1 << 10


def _along(fd: Any, x: Any, dim: int, ndim: int) -> Any:
    """A vector as a tensor of `ndim` dims, along one of them."""
    return fd.ops.broadcast(x, [d != dim for d in range(ndim)])


def _widths(ndim: int, dim: int, before: Any, after: Any) -> list[Any]:
    """What `pad` takes for one dim."""
    return [*[0] * (2 * (ndim - 1 - dim)), before, after]


# orders -----------------------------------------------------------------------------------------------------------


def flip(fd: Any, x: Any, dims: int | Sequence[int]) -> Any:
    """The elements in the opposite order along dims."""
    for d in [dims] if isinstance(dims, int) else dims:
        dim = check_dim("flip", d, x.ndim)
        n = x.type.shape[dim]
        if n == -1 or n > _MOST_BLOCKS:
            x = fd.ops.index_select(x, fd.ops.iota(sizes(x)[dim], sizes(x)[dim] - 1, -1), dim)
        elif n > 1:
            x = fd.ops.reorder_blocks(x, dim, [*range(n)][::-1])
    return fd.ops.set(x)


def roll(fd: Any, x: Any, shifts: int | Sequence[int], dims: int | Sequence[int] | None = None) -> Any:
    """The elements moved on along dims, those of the end to the beginning; without dims, of the flattened tensor."""
    if dims is None:
        flat = fd.ops.reshape(x, [numel_along(x, range(x.ndim))])
        return fd.ops.reshape(roll(fd, flat, shifts, 0), sizes(x))
    moves, along = ([given] if isinstance(given, int) else list(given) for given in (shifts, dims))
    if len(moves) != len(along):
        raise user_error("roll: shifts and dims", f"{len(moves)} and {len(along)}", "as many", "Give one for each dim.")
    for shift, d in zip(moves, along, strict=True):
        x = _rolled(fd, x, shift, check_dim("roll", d, x.ndim))
    return fd.ops.set(x)


def _rolled(fd: Any, x: Any, shift: int, dim: int) -> Any:
    n, whole = sizes(x)[dim], sizes(x)
    if not isinstance(n, int):
        places = fd.ops.remainder(fd.ops.sub(fd.ops.iota(n), shift), n)
        return fd.ops.index_select(x, places, dim)
    if not n or not shift % n:
        return x
    first, start, cut = [0] * x.ndim, [0] * x.ndim, list(whole)
    start[dim] = cut[dim] = n - shift % n
    return fd.ops.cat([fd.ops.slice(x, start, whole), fd.ops.slice(x, first, cut)], dim)


def sort(fd: Any, x: Any, dim: int = -1, descending: bool = False) -> tuple[Any, Any]:
    """(the elements in order along a dim, their indices). Equal elements keep their order."""
    order = fd.ops.argsort(x, dim, descending)
    return fd.ops.take_along_axis(x, order, dim), order


# several indices --------------------------------------------------------------------------------------------------


class _Indexed:
    """The dims of a tensor that are indexed, merged into one: [*before, merged, *after]."""

    def __init__(self, fd: Any, x: Any, indices: Sequence[Any]):
        self.fd, self.shape = fd, sizes(x)
        given = [d for d, index in enumerate(indices) if index is not None]
        if not given or len(indices) > x.ndim:
            raise user_error("indices", shown(list(indices)), f"1 to {x.ndim} tensors, and None for whole dims", "")
        adjacent = given == list(range(given[0], given[-1] + 1))
        left = [d for d in range(x.ndim) if d not in given]
        self.first = given[0] if adjacent else 0  # As in numpy, what was indexed comes first if it was not adjacent.
        self.order = [*left[: self.first], *given, *left[self.first :]]
        self.dims = [self.shape[d] for d in given]
        self.before = [self.shape[d] for d in left[: self.first]]
        self.after = [self.shape[d] for d in left[self.first :]]
        found = fd.ops.linear_index([indices[d] for d in given], self.dims)
        self.index_shape = sizes(found)
        self.index = fd.ops.reshape(found, [numel_along(found, range(found.ndim))])

    def merged(self, x: Any) -> Any:
        if self.order != sorted(self.order):
            x = self.fd.ops.permute(x, self.order)
        if len(self.dims) == 1:
            return x
        total = self.dims[0]
        for n in self.dims[1:]:
            total = total * n
        return self.fd.ops.reshape(x, [*self.before, total, *self.after])

    def split(self, x: Any) -> Any:
        """The inverse of `merged`."""
        if len(self.dims) > 1:
            x = self.fd.ops.reshape(x, [*self.before, *self.dims, *self.after])
        if self.order == sorted(self.order):
            return x
        return self.fd.ops.permute(x, [self.order.index(d) for d in range(len(self.order))])

    def values(self, values: Any) -> Any:
        """Values that broadcast to [*before, *index, *after], as [*before, indices, *after]."""
        whole = self.fd.ops.expand(values, [*self.before, *self.index_shape, *self.after])
        return self.fd.ops.reshape(whole, [*self.before, *sizes(self.index), *self.after])


def _is_mask(index: Any) -> bool:
    return is_tensor(index) and index.dtype is DataType.Bool


def _no_masks(name: str, indices: Sequence[Any]) -> None:
    for index in indices:
        if _is_mask(index):
            raise user_error(f"{name}: an index of bools", str(index.type), "integers",
                             "How many elements a mask picks is only known as it runs. Use fd.ops.where with the mask.",
                             cls=DtypeError)  # fmt: skip


def index(fd: Any, x: Any, indices: Sequence[Any]) -> Any:
    """x[indices]: a tensor of integers, or None for all, by dim from the first on; negative ones count from the end.

    Indices broadcast against each other. Raises DefinitionError for a mask of bools, whose result has no known size.
    """
    _no_masks("index", indices)
    found = _Indexed(fd, x, indices)
    picked = fd.ops.index_select(found.merged(x), found.index, found.first)
    return fd.ops.reshape(picked, [*found.before, *found.index_shape, *found.after])


def index_put(fd: Any, x: Any, indices: Sequence[Any], values: Any, accumulate: bool = False) -> Any:
    """x with values at the places that `index` would read, or with `accumulate` added to what stands there.

    Where places are equal, all are added, and one of them is written. A single mask of bools takes values that
    broadcast to x.
    """
    if len(indices) == 1 and _is_mask(indices[0]):
        return _put_where(fd, x, indices[0], values, accumulate)
    _no_masks("index_put", indices)
    found = _Indexed(fd, x, indices)
    target, source = found.merged(x), found.values(values)
    places = _along(fd, found.index, found.first, target.ndim)
    if accumulate:
        added = fd.ops.take_along_axis_bwd(source, places, found.first, sizes(target)[found.first])
        return found.split(fd.ops.add(target, added))
    return found.split(fd.ops.scatter(target, fd.ops.expand(places, sizes(source)), source, found.first))


def _put_where(fd: Any, x: Any, mask: Any, values: Any, accumulate: bool) -> Any:
    missing = x.ndim - mask.ndim
    if missing < 0 or (is_tensor(values) and any(n != 1 for n in values.type.shape[: values.ndim - missing])):
        raise user_error("index_put: values for a mask", str(values.type if is_tensor(values) else values),
                         "one value for all that the mask picks", "Use fd.ops.where(mask, values, x).")  # fmt: skip
    if is_tensor(values) and values.ndim > missing:
        values = fd.ops.squeeze(values, [*range(values.ndim - missing)])
    picked = fd.ops.broadcast(mask, [d >= mask.ndim for d in range(x.ndim)])
    return fd.ops.where(picked, fd.ops.add(x, values) if accumulate else values, x)


# one index --------------------------------------------------------------------------------------------------------


def index_add(fd: Any, x: Any, dim: int, index: Any, source: Any, alpha: float = 1) -> Any:
    """x with the slices of source, times alpha, added to those that the index [m] names along a dim."""
    dim = check_dim("index_add", dim, x.ndim)
    check_same_size("index_add", "the index' size and the source's", index.type.numel, source.type.shape[dim])
    places = _along(fd, index, dim, x.ndim) if index.ndim else fd.ops.broadcast(index, [True] * x.ndim)
    added = fd.ops.take_along_axis_bwd(source, places, dim, sizes(x)[dim])
    return fd.ops.add(x, added if alpha == 1 else fd.ops.mul(added, alpha))


def scatter_add(fd: Any, x: Any, dim: int, index: Any, src: Any) -> Any:
    """x with the elements of src added to those that the index, of its shape or shorter, names along a dim."""
    dim = check_dim("scatter_add", dim, x.ndim)
    check_same_size("scatter_add", "the dims of the index and the source", index.ndim, src.ndim)
    if index.type.shape != src.type.shape:
        src = fd.ops.slice(src, [0] * src.ndim, sizes(index))
    added = fd.ops.take_along_axis_bwd(src, index, dim, sizes(x)[dim])
    rows = zip(sizes(x), sizes(index), strict=True)
    lacking = [0 if d == dim else n - m for d, (n, m) in enumerate(rows)]
    if any(not isinstance(n, int) or n for n in lacking):
        added = fd.ops.pad(added, [w for n in reversed(lacking) for w in (0, n)])
    return fd.ops.add(x, added)


_FOLDS = {"prod": ("scatter_prod", 1), "amax": ("scatter_max", -float("inf")), "amin": ("scatter_min", float("inf"))}


def scatter_reduce(fd: Any, x: Any, dim: int, index: Any, src: Any, reduce: str, include_self: bool = True) -> Any:
    """x with the elements of src combined into those that the index names: by "sum", "mean", "prod", "amax", "amin".

    Without `include_self`, what stands at these places in x does not count.
    """
    if reduce not in ("sum", "mean", *_FOLDS):
        raise user_error("scatter_reduce: reduce", shown(reduce), "'sum', 'mean', 'prod', 'amax' or 'amin'", "")
    if x.dtype.category is not Category.FLOAT and (reduce == "mean" or not include_self):
        raise user_error(f"scatter_reduce: {reduce} of", str(x.type), "floating point", "Cast it.", cls=DtypeError)
    fold, start = _FOLDS.get(reduce, ("", 0))
    base = x if include_self else fd.ops.scatter(x, index, float(start), dim)
    if fold:
        return getattr(fd.ops, fold)(base, index, src, dim)
    total = scatter_add(fd, base, dim, index, src)
    if reduce == "sum":
        return total
    ones = fd.ops.full(sizes(x), 1.0, x.dtype)
    before = ones if include_self else fd.ops.scatter(ones, index, 0.0, dim)
    return fd.ops.truediv(total, scatter_add(fd, before, dim, index, fd.ops.full(sizes(src), 1.0, x.dtype)))


# windows ----------------------------------------------------------------------------------------------------------

# The most elements of a window that are sliced one by one, which moves only edges of a sharded dim.
_MOST_SLICES = 32


def unfold(fd: Any, x: Any, dim: int, size: int, step: int) -> Any:
    """Windows of a dim, `size` elements each and `step` apart: [.., windows, .., size]."""
    dim = check_dim("unfold", dim, x.ndim)
    n = sizes(x)[dim]
    if size < 1 or step < 1 or (isinstance(n, int) and size > n):
        raise user_error("unfold: size and step", f"{size} and {step}", f"1 or more, and a size of at most {n}", "")
    count = (n - size) // step + 1
    if isinstance(count, int) and size <= _MOST_SLICES:
        taps = [_tap(fd, x, dim, tap, (count, step)) for tap in range(size)]
        return fd.ops.cat(taps, x.ndim) if size > 1 else taps[0]
    starts = fd.ops.broadcast(fd.ops.iota(count, 0, step), [False, True])
    places = fd.ops.reshape(fd.ops.add(starts, fd.ops.iota(size)), [count * size])
    whole = sizes(x)
    parts = fd.ops.reshape(fd.ops.index_select(x, places, dim), [*whole[:dim], count, size, *whole[dim + 1 :]])
    return fd.ops.permute(parts, [*range(dim + 1), *range(dim + 2, x.ndim + 1), dim + 1])


def _tap(fd: Any, x: Any, dim: int, start: int, windows: tuple[int, int]) -> Any:
    """Element `start` of each window, as [.., windows, .., 1]."""
    count, step = windows
    first, last, steps = [0] * x.ndim, sizes(x), [1] * x.ndim
    first[dim], last[dim], steps[dim] = start, start + (count - 1) * step + 1, step
    return fd.ops.broadcast(fd.ops.slice(x, first, last, steps), [False] * x.ndim + [True])


def slice_scatter(
    fd: Any, x: Any, src: Any, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1
) -> Any:
    """x with src in place of the elements start, start + step, ... below end of a dim."""
    dim = check_dim("slice_scatter", dim, x.ndim)
    n, m = sizes(x)[dim], sizes(src)[dim]
    first = _from_front(0 if start is None else start, n)
    if isinstance(n, int) and isinstance(first, int):
        last = n if end is None else _from_front(end, n)
        count = max(0, -(-(last - first) // step)) if isinstance(last, int) else m
        check_same_size("slice_scatter", f"the sizes of dim {dim} of src and of the slice", src.type.shape[dim], count)
    if (first, n) == (0, m) and step == 1:
        return fd.ops.set(src)
    placed = fd.ops.pad(_spread(fd, src, dim, step), _widths(x.ndim, dim, first, n - first - m * step))
    index = fd.ops.iota(n)
    inside = fd.ops.logical_and(fd.ops.ge(index, first), fd.ops.lt(index, first + m * step))
    if step > 1:
        inside = fd.ops.logical_and(inside, fd.ops.eq(fd.ops.remainder(fd.ops.sub(index, first), step), 0))
    return fd.ops.where(_along(fd, inside, dim, x.ndim), placed, x)


def _from_front(place: Any, n: Any) -> Any:
    """A bound of a slice counted from the front; one beyond the end is the end."""
    if isinstance(place, int) and isinstance(n, int):
        return min(max(place + n if place < 0 else place, 0), n)
    return place + n if isinstance(place, int) and place < 0 else place


def _spread(fd: Any, x: Any, dim: int, step: int) -> Any:
    """Every element of a dim with zeros behind it, `step` elements in all."""
    if step == 1:
        return x
    parts = fd.ops.broadcast(x, [d == dim + 1 for d in range(x.ndim + 1)])
    whole = sizes(x)
    padded = fd.ops.pad(parts, _widths(x.ndim + 1, dim + 1, 0, step - 1))
    return fd.ops.reshape(padded, [*whole[:dim], whole[dim] * step, *whole[dim + 1 :]])


def select_scatter(fd: Any, x: Any, src: Any, dim: int, index: Any) -> Any:
    """x with src in place of one index of a dim, which may be a scalar; a sharded dim needs no communication."""
    dim = check_dim("select_scatter", dim, x.ndim)
    n, place = sizes(x)[dim], as_int(index)
    if place is not None and isinstance(n, int) and not -n <= place < n:
        raise user_error("select_scatter: index", str(place), f"{-n} to {n - 1}", "Pass an existing index.")
    if place is None:
        index = fd.ops.where(fd.ops.lt(index, 0), fd.ops.add(index, n), index)
    elif place < 0:
        index = n + place
    chosen = _along(fd, fd.ops.eq(fd.ops.iota(n), index), dim, x.ndim)
    return fd.ops.where(chosen, fd.ops.broadcast(src, [d == dim for d in range(x.ndim)]), x)


# counts -----------------------------------------------------------------------------------------------------------


def bincount(fd: Any, x: Any, bins: int, weights: Any = None) -> Any:
    """How often each of the numbers 0 to bins - 1 is in x, or the sum of its weights.

    torch's has as many bins as the largest number needs; here there are `bins`, and another number is an error.
    """
    flat = fd.ops.reshape(x, [numel_along(x, range(x.ndim))])
    ones = weights is None
    counted = fd.ops.full(sizes(flat), 1, DataType.Int) if ones else fd.ops.reshape(weights, sizes(flat))
    return fd.ops.take_along_axis_bwd(counted, flat, 0, bins)


def histc(fd: Any, x: Any, bins: int = 100, min: float = 0, max: float = 0) -> Any:
    """How many elements lie in each of `bins` equal intervals from min to max; others, and NaN, do not count.

    With min = max they are the least and the greatest element.
    """
    ops, wide = fd.ops, x if x.dtype is DataType.Double else fd.ops.cast(x, DataType.Double)
    if min > max or bins < 1:
        raise user_error("histc: min, max and bins", f"{min}, {max} and {bins}", "min <= max, and 1 bin or more", "")
    low, high = (float(min), float(max)) if min < max else _range_of(fd, wide)
    inside = ops.logical_and(ops.ge(wide, low), ops.le(wide, high))
    share = ops.truediv(ops.mul(ops.sub(ops.where(inside, wide, low), low), bins), high - low)
    place = ops.minimum(ops.cast(share, DataType.Int), bins - 1)
    return bincount(fd, place, bins, ops.cast(inside, x.dtype))


def _range_of(fd: Any, x: Any) -> tuple[Any, Any]:
    """The least and the greatest element, one less and one more where they are equal."""
    every = list(range(x.ndim))
    low, high = (fd.ops.min(x, every), fd.ops.max(x, every)) if every else (x, x)
    same = fd.ops.eq(low, high)
    return fd.ops.where(same, fd.ops.sub(low, 1.0), low), fd.ops.where(same, fd.ops.add(high, 1.0), high)


# complex numbers --------------------------------------------------------------------------------------------------


def conj(fd: Any, x: Any) -> Any:
    """The complex conjugate; a real tensor as it is."""
    if x.dtype.category is not Category.COMPLEX:
        return fd.ops.set(x)
    return fd.ops.complex(fd.ops.real(x), fd.ops.neg(fd.ops.imag(x)))


def view_as_real(fd: Any, x: Any) -> Any:
    """Real and imaginary parts as a last dim of size 2."""
    if x.dtype.category is not Category.COMPLEX:
        raise user_error("view_as_real", str(x.type), "a complex tensor", "", cls=DtypeError)
    last = [False] * x.ndim + [True]
    return fd.ops.cat([fd.ops.broadcast(part(x), last) for part in (fd.ops.real, fd.ops.imag)], x.ndim)


def view_as_complex(fd: Any, x: Any) -> Any:
    """Complex numbers from real and imaginary parts, which are the last dim, of size 2."""
    if not x.ndim or x.type.shape[-1] not in (-1, 2) or x.dtype.category is not Category.FLOAT:
        raise user_error("view_as_complex", str(x.type), "real numbers with a last dim of size 2", "Reshape it.")
    return fd.ops.complex(fd.ops.select(x, 0, x.ndim - 1), fd.ops.select(x, 1, x.ndim - 1))


INDEX_COMPOSITES: dict[str, Callable[..., Any]] = {
    function.__name__: function
    for function in (
        flip, roll, sort, index, index_put, index_add, scatter_add, scatter_reduce, unfold, slice_scatter,
        select_scatter, bincount, histc, conj, view_as_real, view_as_complex,
    )
}  # fmt: skip
