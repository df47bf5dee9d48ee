"""What reshards cost, in closed form but for the pairs whose exact price is known."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from ..ops.values import TensorType
from ..reshard.bounds import at_least
from ..sharding.value import Sharding
from .cost_graph import Costs, Numbers
from .reshard_costs import DISPLACED, GOOD, LOW, NONE, UNEVEN, AtomsOf, Block, exact_seconds, reshard_costs

Shardings = tuple[Sharding, ...]
# Two shardings of a tensor of this type.
Pair = tuple[Sharding, Sharding, TensorType]
_Exact = dict[tuple[Sharding, Sharding], float]
# Seconds by which prices count as equal.
_SAME = 1e-13
# Pairs of one table whose cheapest paths are searched at most.
_MOST_SEARCHED = 256


class Prices:
    """Tables for tensors of all types, [sources, targets]."""

    def __init__(self, atoms_of: AtomsOf):
        self.atoms_of = atoms_of
        self._of: dict[TensorType, _Matrix] = {}
        self._exact: dict[TensorType, _Exact] = {}

    def over(self, atoms_of: AtomsOf) -> Prices:
        """The prices of other parts of axes, with what is known exactly."""
        out = Prices(atoms_of)
        out._exact = self._exact
        return out

    def take(self, shardings: Mapping[TensorType, Iterable[Sharding]]) -> None:
        """Make the tables between these, by type, which others are parts of: all at once takes least time."""
        rows = [(self._matrix(ttype), found) for ttype, found in shardings.items()]
        new = [(matrix, matrix.unknown(found)) for matrix, found in rows]
        _extend([(matrix, found) for matrix, found in new if found], self.atoms_of)

    def table(self, sources: Shardings, targets: Shardings, ttype: TensorType) -> Costs:
        """Seconds from every source to every target, or a lower bound of them; inf where there is no way."""
        return self._matrix(ttype).table(sources, targets)

    def seconds(self, source: Sharding, target: Sharding, ttype: TensorType) -> float:
        """Seconds from one sharding to another."""
        return 0.0 if source is target else self._matrix(ttype).seconds(source, target)

    def most(self, source: Sharding, target: Sharding, ttype: TensorType) -> float:
        """Seconds from one sharding to another, no lower bound of them."""
        self._matrix(ttype).search_if_rough(source, target)
        return self.seconds(source, target, ttype)

    def correct(self, pairs: Iterable[Pair]) -> bool:
        """Take the exact prices of these pairs; returns whether any was another than in its table."""
        changed = False
        for source, target, ttype in pairs:
            if (source, target) not in self._exact.get(ttype, ()):
                changed = self._matrix(ttype).correct(source, target) or changed
        return changed

    def _matrix(self, ttype: TensorType) -> _Matrix:
        found = self._of.get(ttype)
        if found is None:
            found = self._of[ttype] = _Matrix(ttype, self.atoms_of, self._exact.setdefault(ttype, {}))
        return found


class _Matrix:
    """Seconds from each sharding of tensors of one type to each other, of those that were asked for so far.

    searched: whether the cheapest paths are searched for pairs at lower bounds. They are once one of these was too low:
        an answer that used it would use others like it next.
    """

    def __init__(self, ttype: TensorType, atoms_of: AtomsOf, exact: _Exact):
        self.ttype, self.atoms_of, self.exact = ttype, atoms_of, exact
        self.searched = False
        self.shardings: dict[Sharding, int] = {}
        self.costs = np.zeros((0, 0))
        self.quality = np.zeros((0, 0), dtype=np.int64)
        self._numbers: dict[Shardings, Numbers] = {}
        self._tables: dict[tuple[Shardings, Shardings], Costs] = {}  # at the prices of now

    def unknown(self, shardings: Iterable[Sharding]) -> list[Sharding]:
        """Those that it does not have yet."""
        return [s for s in dict.fromkeys(shardings) if s not in self.shardings]

    def numbers(self, shardings: Shardings) -> Numbers:
        """The rows, and columns, of some shardings."""
        found = self._numbers.get(shardings)
        if found is None:
            new = self.unknown(shardings)
            if new:
                _extend([(self, new)], self.atoms_of)
            found = self._numbers[shardings] = np.array([self.shardings[s] for s in shardings], dtype=np.int64)
        return found

    def table(self, sources: Shardings, targets: Shardings) -> Costs:
        """[sources, targets]: exact prices, lower bounds until one of these was found too low, or closed forms."""
        found = self._tables.get((sources, targets))
        if found is None:
            rows, columns = self.numbers(sources)[:, None], self.numbers(targets)
            quality = self.quality[rows, columns]
            is_final = not quality.any() or not self._improve(sources, targets, quality)
            found = self.costs[rows, columns]
            if is_final:
                self._tables[sources, targets] = found
        return found

    def _improve(self, sources: Shardings, targets: Shardings, quality: np.ndarray) -> bool:
        """Put in better prices than closed forms where these are rough; returns whether there were any."""
        rows, columns = self.numbers(sources), self.numbers(targets)
        bounded = (quality == DISPLACED) | (quality == NONE)
        for n, m in np.argwhere(bounded):
            place = rows[n], columns[m]
            self.costs[place] = self._least(sources[n], targets[m])
            self.quality[place] = LOW
        asked = (quality == UNEVEN) | ((quality == LOW) & self.searched)
        asked = asked & (asked.sum() <= _MOST_SEARCHED)
        for n, m in np.argwhere(asked):
            self.correct(sources[n], targets[m])
        return bool(bounded.any() or asked.any())

    def seconds(self, source: Sharding, target: Sharding) -> float:
        """The price of one pair, as in a table."""
        row, column = self.shardings.get(source), self.shardings.get(target)
        is_good = row is not None and column is not None and self.quality[row, column] == GOOD
        return float(self.costs[row, column] if is_good else self.table((source,), (target,))[0, 0])

    def _least(self, source: Sharding, target: Sharding) -> float:
        return at_least(source, target, self.ttype.shape, self.ttype.dtype.itemsize)

    def search_if_rough(self, source: Sharding, target: Sharding) -> None:
        """Put in a pair's exact price if its closed form may be another."""
        rows, columns = self.numbers((source,)), self.numbers((target,))
        if self.quality[rows[0], columns[0]] > GOOD:
            self.correct(source, target)

    def correct(self, source: Sharding, target: Sharding) -> bool:
        """Put in a pair's exact price; returns whether it was there at another one."""
        if (source, target) not in self.exact:
            self.exact[source, target] = exact_seconds(source, target, self.ttype)
        self.numbers((source, target))
        place = self.shardings[source], self.shardings[target]
        was_low = bool(self.quality[place] == LOW)
        changed = self._put(place, self.exact[source, target])
        self.searched = self.searched or (was_low and changed)
        return changed

    def _put(self, place: tuple[int, int], seconds: float) -> bool:
        before = self.costs[place]
        self._tables.clear()
        self.costs[place], self.quality[place] = seconds, GOOD
        return bool(before != seconds and not abs(before - seconds) <= _SAME)

    def blocks(self, new: Sequence[Sharding]) -> tuple[Block, Block]:
        """What is to be priced to add some: from the new ones to all, and from the others to them."""
        old = tuple(self.shardings)
        return Block(new, (*old, *new), self.ttype), Block(old, new, self.ttype)

    def add(self, new: Sequence[Sharding], priced: Sequence[tuple[Costs, np.ndarray]]) -> None:
        """Add rows and columns; `priced` are those of `blocks`."""
        count = len(self.shardings)
        self.shardings |= {s: n for n, s in enumerate(new, count)}
        shape = len(self.shardings), len(self.shardings)
        costs, quality = np.zeros(shape), np.zeros(shape, dtype=np.int64)
        costs[:count, :count], quality[:count, :count] = self.costs, self.quality
        (costs[count:], quality[count:]), (costs[:count, count:], quality[:count, count:]) = priced
        self.costs, self.quality = costs, quality
        for (source, target), seconds in self.exact.items():
            if source in self.shardings and target in self.shardings:
                self._put((self.shardings[source], self.shardings[target]), seconds)


def _extend(new: Sequence[tuple[_Matrix, Sequence[Sharding]]], atoms_of: AtomsOf) -> None:
    """Add shardings to matrices."""
    priced = reshard_costs([block for matrix, found in new for block in matrix.blocks(found)], atoms_of)
    for place, (matrix, found) in enumerate(new):
        matrix.add(found, priced[2 * place : 2 * place + 2])
