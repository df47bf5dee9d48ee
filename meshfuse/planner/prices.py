"""Tables of what reshards cost, in closed form but for the pairs whose exact price is known."""

from __future__ import annotations

from collections.abc import Iterable

from ..ops.values import TensorType
from ..sharding.value import Sharding
from .cost_graph import Costs
from .reshard_costs import AtomsOf, exact_seconds, reshard_costs

Shardings = tuple[Sharding, ...]
# Two shardings of a tensor of this type.
Pair = tuple[Sharding, Sharding, TensorType]
# Seconds by which prices count as equal.
_SAME = 1e-13


class Prices:
    """Tables for tensors of all types, [sources, targets]; equal ones are one array."""

    def __init__(self, atoms_of: AtomsOf):
        self.atoms_of = atoms_of
        self._tables: dict[tuple[Shardings, Shardings, TensorType], Costs] = {}
        self._exact: dict[Pair, float] = {}

    def over(self, atoms_of: AtomsOf) -> Prices:
        """The prices of other parts of axes, with what is known exactly."""
        out = Prices(atoms_of)
        out._exact = self._exact
        return out

    def table(self, sources: Shardings, targets: Shardings, ttype: TensorType) -> Costs:
        """Seconds from every source to every target; inf where there is no way."""
        key = (sources, targets, ttype)
        found = self._tables.get(key)
        if found is None:
            found = self._tables[key] = reshard_costs(sources, targets, ttype, self.atoms_of)
            for pair, seconds in self._exact.items():
                _correct(key, found, pair, seconds)
        return found

    def seconds(self, source: Sharding, target: Sharding, ttype: TensorType) -> float:
        """Seconds from one sharding to another."""
        return 0.0 if source is target else float(self.table((source,), (target,), ttype)[0, 0])

    def correct(self, pairs: Iterable[Pair]) -> bool:
        """Take the exact prices of these pairs; returns whether any was another than in its tables."""
        changed = False
        for pair in pairs:
            if pair not in self._exact:
                seconds = self._exact[pair] = exact_seconds(*pair)
                corrected = [_correct(key, table, pair, seconds) for key, table in self._tables.items()]
                changed = any(corrected) or changed
        return changed


def _correct(key: tuple[Shardings, Shardings, TensorType], table: Costs, pair: Pair, seconds: float) -> bool:
    """Put a pair's price into a table; returns whether it was there at another price."""
    (sources, targets, ttype), (source, target, of) = key, pair
    if ttype != of or source not in sources or target not in targets:
        return False
    place = sources.index(source), targets.index(target)
    changed = abs(table[place] - seconds) > _SAME
    table[place] = seconds
    return bool(changed)
