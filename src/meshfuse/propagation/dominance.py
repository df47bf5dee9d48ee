"""What it costs to reshard tensors from how one plan holds them to how another does: the test that drops plans.

Plans are compared by the thousand. So the ways in which a tensor may exist are numbered, and costs are looked up by
these numbers.
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
    """Seconds to reshard a tensor that exists as `held` into all of `wanted`."""
    return sum(map(reshards(held, kind).__getitem__, wanted))


def conversion_at_least(held: Available, wanted: Available, kind: TensorType) -> float:
    """A lower bound of `conversion` that takes no search."""
    lacking = [want for want in wanted if want not in held]
    return sum(map(reshards(held, kind).at_least, lacking))


_LOCK = threading.Lock()


class _Numbers(dict[Available, int]):
    """A number for each way, given when it is first looked up; by number, the ways and their known costs.

    Threads share tables: a number can be found only once its entries are there. Entries that an interrupt (Ctrl-C) left
    half written are written over.
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
    """Numbers for the ways in which tensors of one type may exist, and the costs between these.

    `costs[b][a]` are the seconds from way a to way b, `_least[b][a]` a lower bound; both as far as they were asked for.
    Which number a way gets depends on what was seen before; its costs do not.
    """

    def __init__(self, kind: TensorType):
        self.kind, self.numbers = kind, _Numbers()
        self.ways, self.costs, self._least = self.numbers.ways, self.numbers.costs, self.numbers.least

    def cost(self, have: int, want: int, most: float = math.inf) -> float:
        """The seconds from one way to another; only a lower bound of them, if that is more than `most` already."""
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
    """Numbers for the ways in which several tensors exist together, from their numbers in each one's table.

    `bounds[b][a]` is a lower bound of the seconds from a to b, as far as it was asked for.
    """

    def __init__(self, tables: Sequence[Table]):
        self.tables = tables
        self.bounds: list[dict[int, float]] = []
        self._ways: list[tuple[int, ...]] = []
        # What tells, for each tensor, the known seconds to its way from another.
        self._known: list[list[Callable[[int], float | None]]] = []

    def __missing__(self, way: tuple[int, ...]) -> int:
        """A new number, for a combination that was not seen before."""
        found = self[way] = len(self._ways)
        self._ways.append(way)
        self._known.append([table.costs[number].get for table, number in zip(self.tables, way, strict=True)])
        self.bounds.append({found: 0.0})
        return found

    def cost(self, have: int, want: int, most: float) -> float:
        """The seconds from one way to another; only a part of them, if that is more than `most` already."""
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
