"""What it costs to come from how one plan holds some tensors to how another does: the test by which plans are dropped.

Plans are compared by the thousand, so that the ways in which a tensor of some type exists have numbers, and what it
costs to come from one to another is looked up by these.
"""

from __future__ import annotations

import functools
import math
import threading
from collections.abc import Callable, Sequence

from ..ops.base import TensorType
from .choose import reshards
from .votes import Available


def conversion(held: Available, wanted: Available, kind: TensorType) -> float:
    """Seconds to reshard what exists so that everything wanted does."""
    return sum(map(reshards(held, kind).__getitem__, wanted))


def conversion_at_least(held: Available, wanted: Available, kind: TensorType) -> float:
    """What it takes at least, without a search for the ways there."""
    lacking = [want for want in wanted if want not in held]
    return sum(map(reshards(held, kind).at_least, lacking))


_LOCK = threading.Lock()


class _Numbers(dict[Available, int]):
    """The numbers of ways, a new one where it was not seen before; and by number the ways, and what is known of costs.

    Threads share tables: a number is found only after all that it stands for. What an interrupt left half done, as
    Ctrl-C does, is written over.
    """

    def __init__(self) -> None:
        self.ways: list[Available] = []
        self.costs: list[dict[int, float]] = []
        self.least: list[dict[int, float]] = []

    def __missing__(self, way: Available) -> int:
        with _LOCK:
            if way not in self:
                number = len(self)
                self.ways[number:], self.least[number:], self.costs[number:] = [way], [{}], [{number: 0.0}]
                self[way] = number
        return self[way]


class Table:
    """The ways in which tensors of one type exist, and their `numbers`. `costs[b][a]`: the seconds to way b from a, if
    known.

    `_least[b][a]`: what they are at least. What a table has seen before changes numbers, but no costs.
    """

    def __init__(self, kind: TensorType):
        self.kind, self.numbers = kind, _Numbers()
        self.ways, self.costs, self._least = self.numbers.ways, self.numbers.costs, self.numbers.least

    def cost(self, have: int, want: int, most: float = math.inf) -> float:
        """The seconds from one way to another, or what they are at least if that is more than `most`."""
        known = self.costs[want]
        found = known.get(have)
        if found is None:
            least = self._at_least(have, want)
            if least > most:
                return least
            found = known[have] = conversion(self.ways[have], self.ways[want], self.kind)
        return found

    def _at_least(self, have: int, want: int) -> float:
        known = self._least[want]
        found = known.get(have)
        if found is None:
            found = known[have] = conversion_at_least(self.ways[have], self.ways[want], self.kind)
        return found


table_of = functools.lru_cache(maxsize=1 << 10)(Table)


class JointTable(dict[tuple[int, ...], int]):
    """Numbers for the ways in which some tensors exist together, from their numbers in each one's table.

    `bounds[b][a]`: what it costs at least to come to b from a, as far as that was asked.
    """

    def __init__(self, tables: Sequence[Table]):
        self.tables = tables
        self.bounds: list[dict[int, float]] = []
        self._ways: list[tuple[int, ...]] = []
        # What tells, for each tensor, the known seconds to its way from another.
        self._known: list[list[Callable[[int], float | None]]] = []

    def __missing__(self, way: tuple[int, ...]) -> int:
        """A new number, where the ways together were not seen before."""
        found = self[way] = len(self._ways)
        self._ways.append(way)
        self._known.append([table.costs[number].get for table, number in zip(self.tables, way, strict=True)])
        self.bounds.append({found: 0.0})
        return found

    def cost(self, have: int, want: int, most: float) -> float:
        """The seconds from one to another, or a part of them that is more than `most`."""
        bounds = self.bounds[want]
        known = bounds.get(have)
        if known is not None and known > most:
            return known
        cost = 0.0
        for place, (old, seconds) in enumerate(zip(self._ways[have], self._known[want], strict=False)):
            found = seconds(old)
            if found is None:
                found = self.tables[place].cost(old, self._ways[want][place], most - cost)
            if found:
                cost += found
                if cost > most:
                    break
        bounds[have] = cost
        return cost
