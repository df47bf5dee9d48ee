"""The layout of one dim: a mixed-radix factorisation of its index, some digits of which are bound to mesh axes.

A layout is a tuple of `Split`s, major to minor. Index i of a dim of size n is written in the radices of the splits;
a rank holds the indices whose bound digits equal its own coordinates, in ascending order. The product of the sizes
may exceed n: the indices from n on do not exist, which makes the last chunks short or empty, as `torch.chunk` does.
Unbound minor digits that are no larger than they must be are left out of the canonical form, so that `((4, tp),)`
means "four chunks" whatever the size, and a layout that is a prefix of another is coarser than it.
"""

from __future__ import annotations

import bisect
import functools
import itertools
import math
import operator
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from ..mesh import STREAM, DeviceMesh
from .nested_cuts import Runs, cut_in_turn


class Split(NamedTuple):
    """One factor of a dim: `size` steps, bound to a mesh axis or a part of it, to a stream, or (axis None) to nothing.

    `pre` tells which part of the axis: the product of the sizes of its more major parts, 1 for the first part or the
    whole axis (Shardy's sub-axes). Of an axis tp of 4 ranks, `Split(2, "tp")` is the major half and `Split(2, "tp", 2)`
    the minor one. A size of None is whatever the dim's size leaves; only annotations hold it.

    `chunks` is 0 but where a dim of a DTensor is cut in turn, as no factors cut it (`is_cut_in_turn`): the axis then
    cuts each of so many chunks of what the splits before it leave. Only inputs and outputs of programs lie so.
    """

    size: int | None
    axis: str | None = None
    pre: int = 1
    chunks: int = 0

    @property
    def bound(self) -> bool:
        """True for a factor that spreads over ranks."""
        return self.axis is not None and self.axis != STREAM

    def __str__(self) -> str:
        if self.axis is None:
            return str(self.size if self.size is not None else "?")
        part = f":({self.pre}){self.size}" if self.pre != 1 else ""
        chunks = f"/{self.chunks}" if self.chunks else ""
        return f"{self.axis}{part}{chunks}" if self.axis != STREAM else f"stream:{self.size}"


Layout = tuple[Split, ...]
WHOLE: Layout = ()


def is_cut_in_turn(layout: Layout) -> bool:
    """Whether each split cuts what those before it leave, as torch's placements do, instead of being a factor."""
    return any([split.chunks for split in layout])


def is_even(layout: Layout, n: int) -> bool:
    """Whether all ranks hold equally many indices of a dim of size n."""
    return not is_cut_in_turn(layout) and n % extent(layout) == 0


def extent(layout: Layout) -> int:
    """The product of the sizes of a layout without a free size."""
    return math.prod([split.size for split in layout if split.size is not None])


def resolve(layout: Layout, n: int) -> Layout:
    """The layout with its free size, if it has one, made as small as reaches n."""
    if not any(split.size is None for split in layout):
        return layout
    size = max(1, -(-n // extent(layout)))
    return tuple(split if split.size is not None else split._replace(size=size) for split in layout)


def _joined(a: Split, b: Split) -> Split | None:
    """The one split that two neighbouring splits amount to; None where they amount to no single one."""
    assert a.size is not None and b.size is not None
    if a.axis is None and b.axis is None:
        return Split(a.size * b.size)
    if a.bound and a.axis == b.axis and b.pre == a.pre * a.size:
        return Split(a.size * b.size, a.axis, a.pre)
    return None


def _merged(layout: Layout) -> list[Split]:
    merged: list[Split] = []
    for split in layout:
        if split.size == 1:
            continue
        joined = _joined(merged[-1], split) if merged else None
        if joined is not None:
            merged[-1] = joined
        else:
            merged.append(split)
    return merged


@functools.lru_cache(maxsize=1 << 16)
def canonical(layout: Layout, n: int) -> Layout:
    """The one form of all layouts of a dim of size n that give every rank the same indices."""
    merged = _merged(padded(layout, n))
    if not any(split.bound or split.axis for split in merged):
        return WHOLE
    tail = merged[-1]
    if tail.axis is None and tail.size == max(1, -(-n // extent(tuple(merged[:-1])))):
        merged.pop()
    return tuple(merged)


@functools.lru_cache(maxsize=1 << 16)
def padded(layout: Layout, n: int) -> Layout:
    """The layout with its minor unbound digits written out, so that its sizes reach n."""
    layout = resolve(layout, n)
    tail = max(1, -(-n // extent(layout)))
    return layout if tail == 1 else (*layout, Split(tail))


@functools.lru_cache(maxsize=1 << 16)
def without_streams(layout: Layout, n: int) -> Layout:
    """The layout without its stream factors, which order work in time and place no data."""
    if not any(split.axis == STREAM for split in layout):
        return layout
    return canonical(tuple(Split(s.size) if s.axis == STREAM else s for s in padded(layout, n)), n)


def stream_count(layout: Layout) -> int:
    """The number of chunks that a layout cuts a dim into."""
    return math.prod(s.size or 1 for s in layout if s.axis == STREAM)


@functools.lru_cache(maxsize=1 << 14)
def chunk_runs(layout: Layout, n: int, chunk: int) -> Runs:
    """The indices of one chunk of a dim of size n, whichever ranks hold them."""
    digits: list[int] = []
    for split in reversed([s for s in layout if s.axis == STREAM]):
        chunk, digit = divmod(chunk, split.size or 1)
        digits.append(digit)
    in_time = tuple(Split(s.size, "chunk") if s.axis == STREAM else Split(s.size) for s in layout)
    return runs(in_time, n, tuple(reversed(digits)))


@functools.lru_cache(maxsize=1 << 14)
def axes(layout: Layout) -> tuple[Split, ...]:
    """The bound splits of a layout."""
    return tuple([split for split in layout if split.bound])


def is_prefix(coarse: Layout, fine: Layout) -> bool:
    """True where `fine` splits the dim as `coarse` does, and perhaps further."""
    return len(coarse) <= len(fine) and fine[: len(coarse)] == coarse


# A run is a half-open interval of indices; the index set of a rank is an ascending tuple of runs (`cutting.Runs`).
@functools.lru_cache(maxsize=1 << 16)
def runs(layout: Layout, n: int, digits: tuple[int, ...]) -> Runs:
    """The indices of a dim of size n that the rank with these digits (one per bound split) holds."""
    if is_cut_in_turn(layout):
        return cut_in_turn(n, [(split.size or 1, split.chunks) for split in layout], digits)
    intervals: list[tuple[int, int]] = [(0, 1)]
    remaining, layout = list(digits), padded(layout, n)
    rest = extent(layout)
    for split in layout:
        assert split.size is not None
        # Only leading digits of indices below n: factors may be far larger than the dim.
        limit, rest = -(-n // rest), rest // split.size
        intervals = [(a, min(b, limit)) for a, b in intervals if a < limit]
        if split.bound:
            digit = remaining.pop(0)
            intervals = [
                (a * split.size + digit, a * split.size + digit + 1) for a, b in intervals for a in range(a, b)
            ]
        else:
            intervals = [(a * split.size, b * split.size) for a, b in intervals]
    return _clip(intervals, n)


def everything(n: int) -> Runs:
    """All indices of a dim of size n."""
    return ((0, n),) if n else ()


# The most runs in which a rank holds a dim: a million take seconds to plan.
MOST_RUNS = 1 << 20


@functools.lru_cache(maxsize=1 << 14)
def pieces(layout: Layout) -> int:
    """How many runs of indices a rank holds of a dim in this layout, if the dim is large enough."""
    last = max((place for place, split in enumerate(layout) if split.bound), default=0)
    return math.prod([split.size or 1 for split in layout[:last] if not split.bound])


def as_runs(intervals: list[tuple[int, int]]) -> Runs:
    """Ascending intervals as runs: touching neighbours joined, empty ones left out."""
    return _clip([(a, b) for a, b in intervals if a < b], max((b for _, b in intervals), default=0))


def _clip(intervals: list[tuple[int, int]], n: int) -> Runs:
    """Neighbouring intervals joined, and all cut at n."""
    joined: list[tuple[int, int]] = []
    for a, b in intervals:
        b = min(b, n)
        if a >= b:
            break
        if joined and joined[-1][1] == a:
            joined[-1] = (joined[-1][0], b)
        else:
            joined.append((a, b))
    return tuple(joined)


def digits(layout: Layout, mesh: DeviceMesh, rank: int) -> tuple[int, ...]:
    """The rank's coordinate along each bound split of a layout."""
    return tuple([mesh.digit(rank, s.axis, s.pre, s.size) for s in layout if s.bound])  # type: ignore[arg-type]


def count(intervals: Runs) -> int:
    """How many indices the runs hold."""
    return sum([b - a for a, b in intervals])


@functools.lru_cache(maxsize=1 << 16)
def largest(layout: Layout, n: int) -> int:
    """The number of indices of a dim of size n that the rank with the most holds: the first rank, of equal factors."""
    if is_cut_in_turn(layout):
        every = itertools.product(*[range(split.size or 1) for split in layout])
        return max([count(runs(layout, n, digits)) for digits in every])
    first = (0,) * len(axes(layout))
    return shared(layout, first, layout, first, n)


@functools.lru_cache(maxsize=1 << 16)
def intersect(a: Runs, b: Runs) -> Runs:
    """The indices in both."""
    out: list[tuple[int, int]] = []
    i = j = 0
    while i < len(a) and j < len(b):
        low, high = max(a[i][0], b[j][0]), min(a[i][1], b[j][1])
        if low < high:
            out.append((low, high))
        if a[i][1] < b[j][1]:
            i += 1
        else:
            j += 1
    return tuple(out)


# So many are looked through in less time than their digits take.
_FEW_RUNS = 16


def shared(a: Layout, a_digits: Sequence[int], b: Layout, b_digits: Sequence[int], n: int) -> int:
    """How many indices of a dim of size n two ranks both hold, one with some digits in layout a, one in layout b."""
    few = pieces(a) <= _FEW_RUNS and pieces(b) <= _FEW_RUNS
    places = None if few else _common_places(a, b, n)
    if places is None:
        return count(intersect(runs(a, n, tuple(a_digits)), runs(b, n, tuple(b_digits))))
    # Told by digits: a rank may hold a dim in a million runs.
    ours, theirs = _fixed(a, a_digits, n, places), _fixed(b, b_digits, n, places)
    if any(ours[place] != digit for place, digit in theirs.items() if place in ours):
        return 0
    return math.prod([high // low for low, high in itertools.pairwise(places) if low not in ours and low not in theirs])


@functools.lru_cache(maxsize=1 << 14)
def _common_places(a: Layout, b: Layout, n: int) -> tuple[int, ...] | None:
    """The place values, from 1 to n, at which both layouts' digits can be cut; None where there are none."""
    found = {1, n}
    if is_cut_in_turn(a) or is_cut_in_turn(b):
        return None
    for layout in (a, b):
        splits = padded(layout, n)
        if n == 0 or extent(splits) != n:
            return None
        found.update(itertools.accumulate([split.size or 1 for split in reversed(splits)], operator.mul))
    places = tuple(sorted(found))
    return None if any(high % low for low, high in itertools.pairwise(places)) else places


def holders(old: Layout, new: Layout, n: int) -> int | None:
    """How many parts of a dim in the old layout have some of one part in the new one.

    None where parts differ in that, as they do where blocks are not equal.
    """
    places = _common_places(old, new, n)
    if places is None:
        return None
    varying = _cells(old, n, places) - _cells(new, n, places)
    return math.prod([high // low for low, high in itertools.pairwise(places) if low in varying])


def _cells(layout: Layout, n: int, places: tuple[int, ...]) -> set[int]:
    """The places at which a rank has one digit alone of those of the indices."""
    return set(_fixed(layout, (0,) * len(axes(layout)), n, places))


def _fixed(layout: Layout, digits: Sequence[int], n: int, places: tuple[int, ...]) -> dict[int, int]:
    """For every such place, the digit that all indices share which a rank with these digits of the layout holds."""
    fixed, rest = dict[int, int](), list(digits)
    place = 1
    for split in reversed(padded(layout, n)):
        end = place * (split.size or 1)
        if split.bound:
            digit = rest.pop()
            cells = [cell for cell in itertools.pairwise(places) if place <= cell[0] < end]
            fixed.update({low: digit * place // low % (high // low) for low, high in cells})
        place = end
    return fixed


class Parts:
    """Parts of a dim that share no index, in their order along it.

    The parts that have some of a run of indices are then neighbours, and are found without looking at all others.
    """

    def __init__(self, parts: Iterable[Runs]):
        runs = sorted([(a, b, place) for place, runs in enumerate(parts) for a, b in runs])
        self._starts, self._ends, self._places = ([run[i] for run in runs] for i in range(3))
        self._count = len(set(self._places))

    def sharing(self, wanted: Runs) -> set[int]:
        """The places (in the order given) of the parts that have some of these indices."""
        found = set[int]()
        for a, b in wanted:
            found.update(self._places[bisect.bisect_right(self._ends, a) : bisect.bisect_left(self._starts, b)])
            if len(found) == self._count:
                break
        return found


def positions(part: Runs, whole: Runs) -> Runs:
    """Where the indices `part`, a subset of `whole`, stand within the ascending list of `whole`."""
    out: list[tuple[int, int]] = []
    offset = place = 0
    for a, b in part:
        while whole[place][1] <= a:
            offset += whole[place][1] - whole[place][0]
            place += 1
        start = offset + a - whole[place][0]
        if out and out[-1][1] == start:
            out[-1] = (out[-1][0], start + b - a)
        else:
            out.append((start, start + b - a))
    return tuple(out)


@functools.lru_cache(maxsize=1 << 16)
def project(layout: Layout, n: int, sizes: tuple[int, ...]) -> tuple[Layout, ...] | None:
    """The layouts of the factors (major to minor) whose product is the dim, or None where a split straddles them.

    Only the most major factor may be uneven: a short minor factor would leave holes inside the dim.
    """
    if len(sizes) == 1:
        return (canonical(layout, sizes[0]),)
    rest = list(padded(layout, n))
    out: list[Layout] = []
    for size in reversed(sizes[1:]):
        minor = _take_minor(rest, size)
        if minor is None:
            return None
        out.append(canonical(minor, size))
    out.append(canonical(tuple(rest), sizes[0]))
    return tuple(reversed(out))


def _take_minor(rest: list[Split], size: int) -> Layout | None:
    """Take the minor splits that make up exactly `size` off `rest`; None where that cannot be."""
    taken: list[Split] = []
    while size > 1:
        if not rest:
            return None
        split = rest.pop()
        assert split.size is not None
        if size % split.size == 0:
            taken.append(split)
            size //= split.size
        elif split.size % size == 0:
            major = split.size // size
            rest.append(Split(major, split.axis, split.pre))
            taken.append(Split(size, split.axis, split.pre * major if split.axis is not None else 1))
            size = 1
        else:
            return None
    return tuple(reversed(taken))


@functools.lru_cache(maxsize=1 << 16)
def concat(layouts: tuple[Layout, ...], sizes: tuple[int, ...], n: int | None = None) -> Layout | None:
    """The layout of the dim that factors (major to minor) of these layouts merge to; the inverse of `project`.

    The dim's size n is the product of the sizes unless given: it may be less, the last of the most major factor's
    steps being short. None where a factor below the most major one is uneven.
    """
    n = math.prod(sizes) if n is None else n
    if len(layouts) == 1:
        return canonical(layouts[0], n) if n != sizes[0] else layouts[0]
    full = [padded(layout, size) for layout, size in zip(layouts, sizes, strict=True)]
    if n == 0:  # every rank has nothing of it, however uneven
        return canonical(tuple(split for layout in layouts for split in axes(layout)), 0)
    if any(extent(layout) != size for layout, size in zip(full[1:], sizes[1:], strict=True)):
        return None
    return canonical(tuple(split for layout in full for split in layout), n)


def text(layout: Layout, mesh: DeviceMesh | None = None) -> str:
    """`-` for a whole dim, `tp` for one axis, `(3, tp)` and so on otherwise; with a mesh `tp:(1)4` for a first part."""
    if not layout:
        return "-"
    parts = [split_text(split, mesh) for split in layout]
    return parts[0] if len(parts) == 1 else f"({', '.join(parts)})"


def split_text(split: Split, mesh: DeviceMesh | None) -> str:
    """A split; the most major part of an axis of the mesh is told from the whole axis."""
    if mesh is None or split.axis is None or split.axis not in mesh.names or split.pre != 1:
        return str(split)
    return str(split) if split.size == mesh.axis_size(split.axis) else f"{split.axis}:(1){split.size}"
