"""Axes that cut a dim in another order than the mesh names them, as torch's DTensor tells it.

The placements of a DTensor cut a dim one after another, in the order of the mesh's axes. One that is strided
(`_StridedShard`, as FSDP makes it over tensor parallelism) cuts each of the chunks that later axes make, instead of the
dim as a whole; or chunks that no axis makes, as views make it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

from .layout import Layout, Split


class Cut(NamedTuple):
    """An axis that cuts each of so many `chunks` of a dim; 1 for the dim as a whole."""

    split: Split
    chunks: int


def cut_of(split: Split, placement: Any) -> Cut | None:
    """How an axis with this placement of torch's cuts its dim; None where it does not."""
    chunks = getattr(placement, "split_factor", None)  # a _StridedShard is a Shard in some versions of torch
    return Cut(split, chunks or 1) if chunks is not None or placement.is_shard() else None


def layout_of_cuts(cuts: Sequence[Cut]) -> Layout | None:
    """The layout of a dim that these cut, in the mesh's order; None where chunks are not what later axes make."""
    layout: list[Split] = []
    for split, chunks in reversed(cuts):
        place, made = 0, 1
        while made < chunks and place < len(layout):
            made, place = made * (layout[place].size or 1), place + 1
        if chunks % made:
            return None
        if made < chunks:
            layout.append(Split(chunks // made))
            place += 1
        layout.insert(place, split)
    return tuple(layout)


def chunks_cut(layout: Layout, place: int, names: Sequence[str]) -> int:
    """How many chunks the axis at this place of a layout cuts: those of later axes of the mesh that stand before it."""
    here = names.index(layout[place].axis or "")
    return math.prod([split.size or 1 for split in layout[:place] if names.index(split.axis or "") > here])
