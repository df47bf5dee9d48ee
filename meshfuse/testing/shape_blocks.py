"""Blocks of random programs: reshapes, slices, pads, concatenations and broadcasts."""

from __future__ import annotations

import math

from hypothesis import strategies as st

from .writer import DefinitionWriter, Var


def merge(w: DefinitionWriter) -> None:
    x = w.float(lambda v: v.ndim > 1)
    first = w.draw(st.integers(0, x.ndim - 2))
    last = w.draw(st.integers(first + 1, x.ndim - 1))
    shape = (*x.shape[:first], math.prod(x.shape[first : last + 1]), *x.shape[last + 1 :])
    w.like(x, "reshape", w.sizes_of(shape), shape=shape)


def split(w: DefinitionWriter) -> None:
    x = w.float(lambda v: 0 < v.ndim < 4 and max(v.shape) > 3)
    dim = max(range(x.ndim), key=lambda d: x.shape[d])
    n = x.shape[dim]
    major = w.choose([m for m in range(1, n + 1) if n % m == 0])
    shape = (*x.shape[:dim], major, n // major, *x.shape[dim + 1 :])
    w.like(x, "reshape", w.sizes_of(shape), shape=shape)


def reshape(w: DefinitionWriter) -> None:
    """A reshape to any other shape with as many elements."""
    x = w.float()
    rest, shape = math.prod(x.shape), []
    while rest > 1 and len(shape) < 3:
        shape.append(w.choose([m for m in range(2, rest + 1) if rest % m == 0]))
        rest //= shape[-1]
    shape = [*shape, rest] if rest > 1 else shape or [1]
    w.like(x, "reshape", w.sizes_of(shape), shape=shape)


def permute(w: DefinitionWriter) -> None:
    x = w.float(lambda v: v.ndim > 1)
    order = w.draw(st.permutations(range(x.ndim)))
    w.like(x, "permute", list(order), shape=[x.shape[d] for d in order])


def slice_(w: DefinitionWriter) -> None:
    x = w.float(lambda v: v.ndim > 0)
    dim, stride = w.dim(x), w.choose((1, 1, 2))
    start = w.draw(st.integers(0, x.shape[dim] - 1))
    stop = w.draw(st.integers(start + 1, x.shape[dim]))
    starts, stops = [0] * x.ndim, list(x.shape)
    starts[dim], stops[dim] = start, stop
    shape = [*x.shape[:dim], -(-(stop - start) // stride), *x.shape[dim + 1 :]]
    strides = [stride if d == dim else 1 for d in range(x.ndim)]
    w.like(x, "slice", starts, stops, strides, shape=shape)


def pad(w: DefinitionWriter) -> None:
    x = w.float(lambda v: v.ndim > 0 and math.prod(v.shape) < w.max_numel // 2)
    before, after, value = w.draw(st.integers(0, 2)), w.draw(st.integers(0, 2)), w.choose((0.0, 1.0))
    w.like(x, "pad", [before, after], value, shape=(*x.shape[:-1], x.shape[-1] + before + after))


def reorder(w: DefinitionWriter) -> None:
    x = w.float(lambda v: v.ndim > 0 and math.prod(v.shape) > 0)
    dim = w.dim(x)
    blocks = w.choose([n for n in range(1, x.shape[dim] + 1) if x.shape[dim] % n == 0])
    w.like(x, "reorder_blocks", dim, w.draw(st.permutations(range(blocks))))


def cat(w: DefinitionWriter) -> None:
    x = w.float(lambda v: v.ndim > 0 and math.prod(v.shape) < w.max_numel // 3)
    dim = w.dim(x)
    y = w.pick(lambda v: _cat_fits(v, x, dim, w.max_numel // 3)) or x
    shape = [*x.shape[:dim], x.shape[dim] + y.shape[dim], *x.shape[dim + 1 :]]
    w.add(w.fd.ops.cat([x.tv, y.tv], dim), shape, "float", max(x.bound, y.bound), x.exact and y.exact)


def _cat_fits(v: Var, x: Var, dim: int, limit: int) -> bool:
    if v.kind != "float" or v.ndim != x.ndim or v.tv.dtype != x.tv.dtype or math.prod(v.shape) > limit:
        return False
    return all(a == b for d, (a, b) in enumerate(zip(v.shape, x.shape, strict=True)) if d != dim)


def broadcast(w: DefinitionWriter) -> None:
    x = w.float(lambda v: v.ndim < 4)
    place = w.draw(st.integers(0, x.ndim))
    flags = [d == place for d in range(x.ndim + 1)]
    shape = (*x.shape[:place], 1, *x.shape[place:])
    y = w.like(x, "broadcast", flags, shape=shape)
    n = w.size()
    if w.flag() and math.prod(shape) * n <= w.max_numel:
        wide = [n if flag else m for flag, m in zip(flags, shape, strict=True)]
        w.like(y, "expand", w.sizes_of(wide), shape=wide)


def broadcast_in_dim(w: DefinitionWriter) -> None:
    x = w.float(lambda v: v.ndim < 3 and math.prod(v.shape) < w.max_numel // 8)
    place, n = w.draw(st.integers(0, x.ndim)), w.choose((1, 2, 3, 5))
    shape = [*x.shape[:place], n, *x.shape[place:]]
    w.like(x, "broadcast_in_dim", shape, [d for d in range(x.ndim + 1) if d != place], shape=shape)


def squeeze(w: DefinitionWriter) -> None:
    x = w.pick(lambda v: v.kind == "float" and 1 in v.shape and v.ndim > 1)
    if x is None:
        y = w.float(lambda v: v.ndim > 0)
        x = w.like(y, "sum", [0], True, shape=(1, *y.shape[1:]), bound=y.bound * y.shape[0])
    dim = x.shape.index(1)
    w.like(x, "squeeze", [dim], shape=(*x.shape[:dim], *x.shape[dim + 1 :]))


def triu(w: DefinitionWriter) -> None:
    w.like(w.float(lambda v: v.ndim > 1), "triu", w.draw(st.integers(-2, 2)))
