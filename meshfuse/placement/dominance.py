"""What it costs to reshard tensors from how one plan holds them to how another does: the test that drops plans.

Plans are compared by the thousand. So the ways in which a tensor may exist are numbered, and costs are looked up by
these numbers.
"""

from __future__ import annotations

import functools
import math
import threading
from collections.abc import Callable, Sequence

from ..ops.values import TensorType
from ..sharding.value import Sharding
from .operand_layouts import Available
from .options import reshards


def conversion(held: Available, wanted: Available, ttype: TensorType) -> float:
    """Seconds to reshard a tensor that exists as `held` into all of `wanted`."""
    return sum(map(reshards(held, ttype).__getitem__, wanted))


def conversion_at_least(held: Available, wanted: Available, ttype: TensorType) -> float:
    """A lower bound of `conversion` that takes no search."""
    lacking = [want for want in wanted if want not in held]
    return sum(map(reshards(held, ttype).at_least, lacking))


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
        self.grown: list[dict[Sharding, int]] = []

    def __missing__(self, way: Available) -> int:
        with _LOCK:
            if way not in self:
                number = len(self)
                self.ways[number:], self.least[number:], self.costs[number:] = [way], [{}], [{number: 0.0}]
                self.grown[number:] = [dict.fromkeys(way, number)]
                self[way] = number
        return self[way]


class Table:
    """Numbers for the ways in which tensors of one type may exist, and the costs between these.

    `costs[b][a]` are the seconds from way a to way b, `_least[b][a]` a lower bound; both as far as they were asked for.
    Which number a way gets depends on what was seen before; its costs do not.
    """

    def __init__(self, ttype: TensorType):
        self.kind, self.numbers = ttype, _Numbers()
        self.ways, self.costs, self._least = self.numbers.ways, self.numbers.costs, self.numbers.least
        self._grown = self.numbers.grown

    def grown(self, code: int, sharding: Sharding) -> int:
        """The number of a way with this sharding as well."""
        known = self._grown[code]
        found = known.get(sharding)
        if found is None:
            found = known[sharding] = self.numbers[(*self.ways[code], sharding)]
        return found

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

    `costs[b][a]` are the seconds from a to b, `bounds[b][a]` a lower bound of them; both as far as they were asked for.
    """

    def __init__(self, tables: Sequence[Table]):
        self.tables = tables
        self.costs: list[dict[int, float]] = []
        self.bounds: list[dict[int, float]] = []
        self._ways: list[tuple[int, ...]] = []
        # What tells, for each tensor, the known seconds to its way from another.
        self._known: list[list[Callable[[int], float | None]]] = []

    def __missing__(self, way: tuple[int, ...]) -> int:
        """A new number, for a combination that was not seen before."""
        with _LOCK:
            if way not in self:
                number = len(self)
                self._ways[number:], self.bounds[number:], self.costs[number:] = [way], [{}], [{number: 0.0}]
                self._known[number:] = [[t.costs[n].get for t, n in zip(self.tables, way, strict=True)]]
                self[way] = number
        return self[way]

    def cost(self, have: int, want: int, most: float) -> float:
        """The seconds from one way to another; only a part of them, if that is more than `most` (>= 0) already."""
        found = self.costs[want].get(have)
        if found is not None:
            return found
        known = self.bounds[want].get(have)
        return known if known is not None and known > most else self._cost(have, want, most)

    def _cost(self, have: int, want: int, most: float) -> float:
        cost = 0.0
        for place, (old, seconds) in enumerate(zip(self._ways[have], self._known[want], strict=False)):
            found = seconds(old)
            if found is None:
                found = self.tables[place].cost(old, self._ways[want][place], most - cost)
            if found:
                cost += found
                if cost > most:
                    self.bounds[want][have] = cost
                    return cost
        self.costs[want][have] = cost
        return cost


joint_table_of = functools.lru_cache(maxsize=1 << 7)(JointTable)
