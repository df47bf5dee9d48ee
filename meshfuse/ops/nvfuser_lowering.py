"""What ops' lowerings to nvFuser are written with: its functions and values, without importing it.

An op without a lowering of its own goes to nvFuser's function of the same name, argument by argument. `OpDef.nvfuser`
holds what deviates: a function of an `NvfuserEmit`, or the reason to leave the op to torch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from ..dtypes import Category, DataType
from ..sharding.layout import Runs
from .opdef import NvfuserEmit, ToTorch

_MOST_RUNS = 8  # Each takes ops of its own in nvFuser's definition.
# By category: Bool, integers, floating point, complex.
ZERO: tuple[bool | int | float | complex, ...] = (False, 0, 0.0, 0j)
_CATEGORY: tuple[Callable[[Any], Any], ...] = (bool, int, float, complex)


def with_local_shape(name: str) -> Callable[[NvfuserEmit], Any]:
    """A lowering for ops with a shape argument, which becomes the result's local shape."""
    return lambda n: n.plain(**{name: list(n.result_shapes[0])})


def is_whole(n: NvfuserEmit, operand: int, dim: int) -> bool:
    """Whether the rank has all of an operand's dim."""
    return n.operand_shapes[operand][dim] == n.call.types[operand].shape[dim]


def cast(n: NvfuserEmit, tensor: Any, found: DataType, wanted: DataType) -> Any:
    """The tensor in another type; itself where it has that type."""
    return tensor if found is wanted else n.ops.cast(tensor, n.dtype(wanted))


def _few(runs: Runs) -> Runs:
    if len(runs) > _MOST_RUNS:
        raise ToTorch(f"the rank's indices lie in {len(runs)} pieces, more than {_MOST_RUNS}")
    return runs


def step_index(n: NvfuserEmit, start: int, length: int, step: int = 1) -> Any:
    """start, start + step, ... as an Int vector of so many elements."""
    return n.ops.iota(n.val(length), n.val(start), n.val(step), n.dtype(DataType.Int))


def sliced(
    ops: Any, val: Callable[[int], Any], tensor: Any, shape: Sequence[int], starts: Sequence[int], stops: Sequence[int]
) -> Any:
    """The elements of a tensor of this shape from `starts` to `stops`; `val` makes a constant.

    A single one that is not the first of its dim is selected: of a slice that leaves it, nvFuser's kernels read the
    first (0.2.36, seen on a GPU).
    """
    pairs = list(zip(starts, stops, strict=True))
    alone = [d for d, (a, b) in enumerate(pairs) if a > 0 and b - a == 1]
    kept = [(0, shape[d]) if d in alone else pair for d, pair in enumerate(pairs)]
    if not alone or kept != [(0, n) for n in shape]:
        tensor = ops.slice(tensor, [a for a, _ in kept], [b for _, b in kept])
    for d in reversed(alone):
        tensor = ops.select(tensor, val(starts[d]), d)
    return ops.broadcast(tensor, [d in alone for d in range(len(shape))]) if alone else tensor


def nvfuser_index(n: NvfuserEmit, runs: Runs) -> Any:
    """The global indices in the runs as an Int vector."""
    parts = [step_index(n, a, b - a) for a, b in _few(runs) or ((0, 0),)]
    return parts[0] if len(parts) == 1 else n.ops.cat(parts, 0)


def nvfuser_places(n: NvfuserEmit, index: Any, runs: Runs) -> tuple[Any, Any]:
    """(where each global index lies in a shard with these runs, whether it is there); place 0 for indices elsewhere.

    There is at least one run.
    """
    index, before, ops = n.ops.cast(index, n.dtype(DataType.Int)), 0, n.ops
    places = inside = None
    for a, b in _few(runs):
        here = ops.logical_and(ops.ge(index, a), ops.lt(index, b))
        place = ops.where(here, ops.add(index, before - a), 0)
        inside = here if inside is None else ops.logical_or(inside, here)
        places = place if places is None else ops.add(places, place)
        before += b - a
    return places, inside


def along(n: NvfuserEmit, vector: Any, dim: int, ndim: int) -> Any:
    """A vector as a tensor of `ndim` dims that broadcasts in all dims but `dim`."""
    return n.ops.broadcast(vector, [d != dim for d in range(ndim)])


def full(n: NvfuserEmit, shape: list[int], value: Any, dtype: DataType) -> Any:
    """A tensor of one number. nvFuser's kernels have no constants of half precision and less."""
    made = n.ops.full(shape, value, n.dtype(DataType.Float if dtype.is_reduced_float else dtype))
    return n.ops.cast(made, n.dtype(dtype)) if dtype.is_reduced_float else made


def repeated_to(ops: Any, boolean: Any, tensor: Any, shape: Sequence[int]) -> Any:
    """A tensor broadcast to a shape, without nvFuser's `expand` (see backends/nvfuser/repeated.py).

    `boolean` is nvFuser's Bool.
    """
    return ops.where(ops.full(list(shape), True, boolean), tensor, tensor)


def zeros(n: NvfuserEmit) -> Any:
    """Zeros as the first result, for a rank that holds nothing of what is looked up in."""
    dtype = n.call.results[0].dtype
    return full(n, list(n.result_shapes[0]), ZERO[dtype.category], dtype)


def zero_where_not(n: NvfuserEmit, kept: Any, tensor: Any, dtype: DataType) -> Any:
    """The tensor in this type, with zeros where `kept` is false."""
    if dtype.category is Category.BOOL:
        return n.ops.logical_and(kept, tensor)
    return n.ops.cast(n.ops.where(kept, tensor, ZERO[dtype.category]), n.dtype(dtype))


def of_category(n: NvfuserEmit, name: str, dtype: DataType) -> Any:
    """A scalar argument as a Val of the category (bool, integer, floating point, complex) of a type."""
    value = n.number(name)
    if isinstance(value, (bool, int, float, complex)):
        return n.val(_CATEGORY[dtype.category](value))
    kinds = (DataType.Bool, DataType.Int, DataType.Double, DataType.ComplexDouble)
    return n.ops.cast(value, n.dtype(kinds[dtype.category]))
