"""Where a sequence repeats itself: the layers of a model among its ops."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

# A stretch of at most so many entries counts as repeated if it comes so many times in a row.
LONGEST = 400
LEAST = 3


def repeats(keys: Sequence[Hashable]) -> list[tuple[int, int, int]]:
    """(start, period, count) of parts of a sequence that are repeated `count` >= 3 times in a row, from the left.

    Where several begin at one place, the one that covers most counts; of these the one with the shortest period, from
    2.
    """
    numbers: dict[Hashable, int] = {}
    ids = [numbers.setdefault(key, len(numbers)) for key in keys]
    found, start = [], 0
    while start < len(ids):
        best = max(((_count(ids, start, p) * p, -p) for p in _periods(ids, start)), default=(0, 0))
        covered, period = best[0], -best[1]
        if period and covered // period >= LEAST:
            found.append((start, period, covered // period))
            start += covered
        else:
            start += 1
    return found


def _periods(ids: Sequence[int], start: int) -> list[int]:
    """The distances at which the first element occurs again."""
    reach = min(len(ids), start + LONGEST + 1)
    return [place - start for place in range(start + 2, reach) if ids[place] == ids[start]]


def _count(ids: Sequence[int], start: int, period: int) -> int:
    """How often the first `period` elements are repeated in a row."""
    part, count = ids[start : start + period], 1
    while ids[start + count * period : start + (count + 1) * period] == part:
        count += 1
    return count
