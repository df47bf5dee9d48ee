"""The Python lines of ops on one rank: written once for equal ops in equal places, such as those of layers."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field

from ..graph import Node
from ..ops.local import LocalCall, ScalarText
from ..propagation.factors import Placement

# Where the name of an operand or a result goes, by its number.
_HOLE = re.compile("\x01(\\d+)\x01")
# Text, and between its parts the numbers of names.
Template = tuple[str | int, ...]


def _hole(place: int) -> str:
    return f"\x01{place}\x01"


def _template(line: str) -> Template:
    parts = _HOLE.split(line)
    return tuple(int(part) if place % 2 else part for place, part in enumerate(parts))


@dataclass(slots=True)
class OpText:
    """Lines of ops on a rank, with `scalar` for the text of scalars. What depends on the op's number is not kept."""

    rank: int
    scalar: ScalarText
    _known: dict[tuple[object, ...], tuple[Template, ...] | None] = field(default_factory=dict)

    def lines(self, node: Node, placement: Placement, operands: Sequence[str], results: Sequence[str]) -> list[str]:
        """The statements that make the results' names of the operands'."""
        names = list(dict.fromkeys(operands))
        places = tuple(map(names.index, operands))
        # Calls and placements of equal layers are the same objects, and live as long as the graph.
        key = (id(node.call), id(placement), places)
        if key not in self._known:
            self._known[key] = self._learned(node, placement, places, len(results))
        found = self._known[key]
        if found is None:
            return self._written(node, placement, operands, results, node.salt)
        names += results
        return ["".join([names[p] if type(p) is int else p for p in template]) for template in found]  # type: ignore[misc]

    def _learned(
        self, node: Node, placement: Placement, places: Sequence[int], results: int
    ) -> tuple[Template, ...] | None:
        """The lines with holes for the names; None where they depend on the op's number."""
        operands = list(map(_hole, places))
        first = len(set(places))
        targets = list(map(_hole, range(first, first + results)))
        one, other = (self._written(node, placement, operands, targets, node.salt + more) for more in (0, 1))
        return tuple(map(_template, one)) if one == other else None

    def _written(
        self, node: Node, placement: Placement, operands: Sequence[str], results: Sequence[str], number: int
    ) -> list[str]:
        sides = (placement.operands, placement.results)
        return LocalCall(node.call, operands, *sides, self.rank, self.scalar, number).statements(results)
