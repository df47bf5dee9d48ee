"""A row of costs cut into parts, the largest of which is as small as can be."""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from itertools import accumulate


def even_parts(costs: Sequence[int], parts: int) -> list[int]:
    """Where each part but the first begins. There are as many costs as parts at least."""
    sums = [0, *accumulate(costs)]
    low, high = max([*costs, 1]), max(sums[-1], 1)
    while low < high:
        middle = (low + high) // 2
        if _filled(sums, middle, parts) is None:
            low = middle + 1
        else:
            high = middle
    found = _filled(sums, low, parts)
    assert found is not None
    return found


def _filled(sums: Sequence[int], limit: int, parts: int) -> list[int] | None:
    """The beginnings of parts that are filled to a limit, one after the other; None where there are too few parts."""
    ends, start, count = list[int](), 0, len(sums) - 1
    for left in range(parts - 1, 0, -1):
        end = min(bisect.bisect_right(sums, sums[start] + limit) - 1, count - left)
        if end <= start:
            return None
        ends.append(end)
        start = end
    return ends if sums[-1] - sums[start] <= limit else None
