"""What reshards cost, in closed form but for the pairs whose exact price is known."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from ..ops.values import TensorType
from ..sharding.value import Sharding
from .cost_graph import Costs, Numbers
from .reshard_costs import NONE, ROUGH, AtomsOf, exact_seconds, reshard_costs

Shardings = tuple[Sharding, ...]
# Two shardings of a tensor of this type.
Pair = tuple[Sharding, Sharding, TensorType]
_Exact = dict[tuple[Sharding, Sharding], float]
# Seconds by which prices count as equal.
_SAME = 1e-13
# Pairs of one table whose cheapest paths are searched because closed forms are rough for them.
_MOST_EXACT = 256


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

    def take(self, ttype: TensorType, shardings: Shardings) -> None:
        """Make the table between these, which others are parts of."""
        self._matrix(ttype).numbers(shardings)

    def table(self, sources: Shardings, targets: Shardings, ttype: TensorType, rough: bool = False) -> Costs:
        """Seconds from every source to every target; inf where there is no way.

        rough: take closed forms where these are rough, too.
        """
        matrix = self._matrix(ttype)
        return matrix.table(matrix.numbers(sources), matrix.numbers(targets), rough)

    def seconds(self, source: Sharding, target: Sharding, ttype: TensorType) -> float:
        """Seconds from one sharding to another."""
        return 0.0 if source is target else float(self.table((source,), (target,), ttype)[0, 0])

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
    """Seconds from each sharding of tensors of one type to each other, of those that were asked for so far."""

    def __init__(self, ttype: TensorType, atoms_of: AtomsOf, exact: _Exact):
        self.ttype, self.atoms_of, self.exact = ttype, atoms_of, exact
        self.shardings: dict[Sharding, int] = {}
        self.costs = np.zeros((0, 0))
        self.quality = np.zeros((0, 0), dtype=np.int64)
        self._numbers: dict[Shardings, Numbers] = {}

    def numbers(self, shardings: Shardings) -> Numbers:
        """The rows, and columns, of some shardings."""
        found = self._numbers.get(shardings)
        if found is None:
            new = [s for s in dict.fromkeys(shardings) if s not in self.shardings]
            if new:
                self._add(new)
            found = self._numbers[shardings] = np.array([self.shardings[s] for s in shardings], dtype=np.int64)
        return found

    def table(self, rows: Numbers, columns: Numbers, rough: bool) -> Costs:
        """[rows, columns]: those for which closed forms are rough are searched, if they shall be and are not many."""
        at = np.ix_(rows, columns)
        quality = self.quality[at]
        if quality.any():
            searched, listed = np.argwhere(quality == ROUGH), [*self.shardings]
            for n, m in (
                *np.argwhere(quality == NONE),
                *(searched if len(searched) <= _MOST_EXACT and not rough else ()),
            ):
                self.correct(listed[rows[n]], listed[columns[m]])
        return self.costs[at]

    def correct(self, source: Sharding, target: Sharding) -> bool:
        """Put in a pair's exact price; returns whether it was there at another one."""
        if (source, target) not in self.exact:
            self.exact[source, target] = exact_seconds(source, target, self.ttype)
        self.numbers((source, target))
        return self._put((self.shardings[source], self.shardings[target]), self.exact[source, target])

    def _put(self, place: tuple[int, int], seconds: float) -> bool:
        before = self.costs[place]
        self.costs[place], self.quality[place] = seconds, 0
        return bool(before != seconds and not abs(before - seconds) <= _SAME)

    def _add(self, new: list[Sharding]) -> None:
        """Add rows and columns."""
        old = [*self.shardings]
        both, count = [*old, *new], len(old)
        costs, quality = np.zeros((len(both), len(both))), np.zeros((len(both), len(both)), dtype=np.int64)
        costs[:count, :count], quality[:count, :count] = self.costs, self.quality
        costs[count:], quality[count:] = reshard_costs(new, both, self.ttype, self.atoms_of)
        if old:
            costs[:count, count:], quality[:count, count:] = reshard_costs(old, new, self.ttype, self.atoms_of)
        self.costs, self.quality, self.shardings = costs, quality, {s: n for n, s in enumerate(both)}
        for (source, target), seconds in self.exact.items():
            if source in self.shardings and target in self.shardings:
                self._put((self.shardings[source], self.shardings[target]), seconds)
