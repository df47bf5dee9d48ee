"""The copies and views that reshards are made of."""

from __future__ import annotations

import math
from collections.abc import Sequence

from .blocks import is_dense
from .boxes import Box, box_text
from .instructions import Copy, View, blocks_text, tuple_text


def view_box(target: str, source: str, box: Box, shape: Sequence[int]) -> View:
    """A box of a tensor of this shape."""
    return View(target, source, box_text(box, shape))


def unflatten(target: str, source: str, start: int, stop: int, shape: Sequence[int]) -> View:
    """A part of a flat buffer as a tensor of this shape."""
    return View(target, source, f"[{start}:{stop}].view({tuple_text(shape)})")


def own(target: str, source: str, fresh: bool) -> Copy:
    """A contiguous tensor that may be written to: a copy, unless the source is fresh and dies here."""
    return Copy(target, ((source, ""),), "dense" if fresh else "clone", aliases=fresh, takes=fresh)


def pack_boxes(target: str, source: str, boxes: Sequence[Box], shape: Sequence[int]) -> Copy:
    """Boxes of a tensor in a flat buffer, one after the other."""
    sources = tuple([(source, box_text(box, shape)) for box in boxes])
    if len(sources) > 1:
        return Copy(target, sources, "cat")
    if not sources:
        return Copy(target, ((source, ".new_empty(0)"),), "")
    return Copy(target, sources, "dense", ".view(-1)", aliases=is_dense(boxes[0], shape))


def pack_blocks(target: str, source: str, blocks: int, shape: Sequence[int], dim: int) -> Copy:
    """Equal blocks of a tensor along one dim in a flat buffer, one after the other: `join` undoes it."""
    cut = (*shape[:dim], blocks, shape[dim] // blocks, *shape[dim + 1 :])
    return Copy(target, ((source, f".view({tuple_text(cut)}).movedim({dim}, 0)"),), "dense", ".view(-1)")


def pack_all(target: str, sources: Sequence[tuple[str, str]]) -> Copy:
    """Tensors, or of each the part that a Python text takes, in a flat buffer, one after the other."""
    return Copy(target, tuple(sources), "cat")


def put(target: str, box: Box, shape: Sequence[int], source: str, part: str = "") -> Copy:
    """A tensor, or a part of it, in a box of a buffer of this shape."""
    return Copy(target, ((source, part),), "", box=box, shape=tuple(shape))


def joins_by_view(block_shape: Sequence[int], dim: int) -> bool:
    """Whether the blocks of a flat buffer, one after the other, are the tensor that they make along a dim."""
    return dim == 0 or [*block_shape[:dim]].count(1) == dim


def joined_text(blocks: int, block_shape: Sequence[int], dim: int) -> str:
    """Python text that makes a tensor of the blocks in a flat buffer, put together along one dim."""
    shape = tuple_text(_joined_shape(blocks, block_shape, dim))
    if joins_by_view(block_shape, dim):
        return f".view({shape})"
    return f"{blocks_text(blocks, block_shape, None)}.movedim(0, {dim}).reshape({shape})"


def join(
    target: str, source: str, blocks: int, block_shape: Sequence[int], dim: int, among: tuple[int, int] | None = None
) -> Copy | View:
    """The blocks of a flat buffer put together along one dim. `among`: see `blocks_text`."""
    if among is None and joins_by_view(block_shape, dim):
        return View(target, source, joined_text(blocks, block_shape, dim))
    shape = tuple_text(_joined_shape(blocks, block_shape, dim))
    part = f"{blocks_text(blocks, block_shape, among)}.movedim(0, {dim})"
    return Copy(target, ((source, part),), "clone", f".view({shape})")


def lies_in_blocks(shape: Sequence[int], dim: int) -> bool:
    """Whether the blocks of a tensor along a dim lie one after the other already, so that packing copies nothing."""
    return math.prod(shape[:dim]) == 1


def _joined_shape(blocks: int, block_shape: Sequence[int], dim: int) -> tuple[int, ...]:
    return tuple([n * blocks if d == dim else n for d, n in enumerate(block_shape)])
