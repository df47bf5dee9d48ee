"""Halo exchange in ordinary ops: blocks of a sharded dim with the edges of their neighbours.

Only the edges move. The dim becomes (block, index in the block); an edge is a slice of the second, shifted by one in
the first.
"""

from __future__ import annotations

from typing import Any

from .opdef import Writing
from .shape_arithmetic import one_dim_widths
from .values import TensorRef


def in_blocks(
    r: Writing, x: TensorRef, dim: int, blocks: int, size: int, halo: tuple[int, int], fill: Any
) -> TensorRef:
    """x with the dim as (blocks, before + size + after): each block with elements of its neighbours on both sides.

    Beyond the ends of the dim stands `fill`.
    """
    shape = r.type(x).shape
    lacking = blocks * size - shape[dim]
    if lacking:
        x = r.call("pad", x, one_dim_widths(len(shape), dim, 0, lacking), fill)
    x = r.call("reshape", x, (*shape[:dim], blocks, size, *shape[dim + 1 :]))
    reach = (blocks - 1) * size
    before = [_edge(r, x, dim, step, taken, fill) for step, taken in reversed(_steps(min(halo[0], reach), size))]
    after = [_edge(r, x, dim, -step, taken, fill) for step, taken in _steps(min(halo[1], reach), size)]
    parts = [*_filling(r, x, dim, halo[0] - reach, fill), *before, x, *after]
    parts += _filling(r, x, dim, halo[1] - reach, fill)
    return parts[0] if len(parts) == 1 else r.call("cat", tuple(parts), dim + 1)


def _steps(width: int, size: int) -> list[tuple[int, int]]:
    """(how many blocks away, how many of that block's elements), the nearest first."""
    return [(step + 1, min(size, width - step * size)) for step in range(-(-width // size))]


def _edge(r: Writing, x: TensorRef, dim: int, step: int, taken: int, fill: Any) -> TensorRef:
    """For each block the last `taken` elements of the block `step` before it; below 0 the first of one after it."""
    shape = r.type(x).shape
    blocks, size = shape[dim], shape[dim + 1]
    starts, ends = [0] * len(shape), list(shape)
    starts[dim], ends[dim] = (0, blocks - step) if step > 0 else (-step, blocks)
    starts[dim + 1], ends[dim + 1] = (size - taken, size) if step > 0 else (0, taken)
    edge = r.call("slice", x, starts, ends)
    return r.call("pad", edge, one_dim_widths(len(shape), dim, max(step, 0), max(-step, 0)), fill)


def _filling(r: Writing, x: TensorRef, dim: int, width: int, fill: Any) -> list[TensorRef]:
    """The part of a halo that is beyond the ends of the dim for every block, as a halo may be wider than the dim."""
    shape = r.type(x).shape
    if width <= 0:
        return []
    return [r.call("full", (*shape[: dim + 1], width, *shape[dim + 2 :]), fill, r.type(x).dtype)]


def whole_again(r: Writing, x: TensorRef, dim: int, n: int) -> TensorRef:
    """Merge dims `dim` (the block) and `dim + 1` (inside it), and keep the first n elements."""
    shape = r.type(x).shape
    merged = (*shape[:dim], shape[dim] * shape[dim + 1], *shape[dim + 2 :])
    x = r.call("reshape", x, merged)
    if merged[dim] == n:
        return x
    return r.call("slice", x, [0] * len(merged), [n if d == dim else m for d, m in enumerate(merged)])
