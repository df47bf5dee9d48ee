"""Axes that cut a dim in another order than the mesh names them, as torch's DTensor tells it.

The placements of a DTensor cut a dim one after another, in the order of the mesh's axes. One that is strided
(`_StridedShard`, as FSDP makes it over tensor parallelism) cuts each of the chunks that later axes make, instead of the
dim as a whole; or chunks that no axis makes, as views make it.

Factors of a dim say the same where its chunks are equal. Where they are not, torch cuts each chunk by itself, and a
layout that is cut in turn says that (`layout.is_cut_in_turn`).
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

from .layout import WHOLE, Layout, Split, canonical, is_cut_in_turn, is_even, runs
from .value import Sharding


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
    for split, chunks in reversed([cut for cut in cuts if cut.split.size != 1 or cut.chunks == 1]):
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


def _cutting(cuts: Sequence[Cut]) -> list[Cut]:
    """Without axes of one rank, which keeps all of its chunks."""
    return [cut for cut in cuts if cut.split.size != 1]


def cuts_of_layout(layout: Layout, names: Sequence[str]) -> tuple[Cut, ...] | None:
    """The cuts, in the order of the mesh's axes (`names`), that this layout means; None where none mean it.

    Each axis cuts the chunks that stand before it in the layout and that no earlier axis has made.
    """
    if is_cut_in_turn(layout):
        return tuple([Cut(split._replace(chunks=0), split.chunks) for split in layout])
    if not all(split.axis in (None, *names) for split in layout):
        return None
    found = [Cut(split, _chunks_before(layout, place, names)) for place, split in enumerate(layout) if split.bound]
    cuts = tuple(sorted(found, key=lambda cut: names.index(_axis(cut.split))))
    made = layout_of_cuts(cuts)
    return cuts if made is not None and without_single_ranks(made) == without_single_ranks(layout) else None


def without_single_ranks(layout: Layout) -> Layout:
    """The layout without axes of one rank, which are named there and cut nothing."""
    return tuple([split for split in layout if split.size != 1])


def _axis(split: Split) -> str:
    return split.axis or ""


def _chunks_before(layout: Layout, place: int, names: Sequence[str]) -> int:
    """How many chunks the axis at this place of a layout cuts: those of free factors and later axes before it."""
    here = names.index(_axis(layout[place]))
    before = [s for s in layout[:place] if not s.bound or names.index(_axis(s)) > here]
    return math.prod([split.size or 1 for split in before])


@functools.lru_cache(maxsize=1 << 12)
def layout_as_cut(cuts: tuple[Cut, ...], n: int) -> Layout:
    """The layout of a dim of size n that gives every rank what these cuts do: factors of it, where any do."""
    in_turn = tuple([split._replace(chunks=chunks) for split, chunks in _cutting(cuts)])
    layout = layout_of_cuts(_cutting(cuts))
    if layout is None or not (is_even(layout, n) or _alike(in_turn, layout, n)):
        return in_turn
    return canonical(layout, n)


def _alike(in_turn: Layout, layout: Layout, n: int) -> bool:
    """Whether both give every rank the same indices; each axis is in both once."""
    places = [[_axis(split) for split in in_turn].index(_axis(split)) for split in layout if split.bound]
    every = itertools.product(*[range(split.size or 1) for split in in_turn])
    return all(runs(in_turn, n, d) == runs(layout, n, tuple([d[place] for place in places])) for d in every)


def factors_of(layout: Layout) -> Layout | None:
    """Factors in the place of a dim's cuts in turn; None where chunks are not what later axes make."""
    return layout_of_cuts([Cut(s._replace(chunks=0), s.chunks) for s in layout]) if is_cut_in_turn(layout) else layout


def in_factors(sharding: Sharding, shape: Sequence[int]) -> Sharding:
    """The sharding with factors in the place of cuts in turn: itself where it has none."""
    if not any(map(is_cut_in_turn, sharding.dims)):
        return sharding
    layouts = list(map(factors_of, sharding.dims))
    assert None not in layouts, sharding
    return Sharding.make(sharding.mesh, [layout or WHOLE for layout in layouts], shape)
