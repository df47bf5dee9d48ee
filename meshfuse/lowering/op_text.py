"""The Python lines of ops on one rank, written once for equal ops in equal places, such as those of layers."""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from ..graph import Node
from ..ops.local import LocalCall, ScalarText
from ..placement.factors import Placement

# Where the name of an operand or a result goes, by its number.
_HOLE = re.compile("\x01(\\d+)\x01")
# A Python expression of tensors, which torch computes into new memory.
_ARITHMETIC = re.compile(r"v\d+ = (\(\w+ [-+*/] [\w.]+\)|K\.(maximum|minimum)\(.*\))")
# A text with `%s` for each name, and what picks these among the names of operands and results (one alone as it is).
Template = tuple[str, Callable[[Sequence[str]], Any]]


def _hole(place: int) -> str:
    return f"\x01{place}\x01"


def _template(line: str) -> Template:
    *places, last = map(int, _HOLE.findall(line))  # a result's name at least
    return _HOLE.sub("%s", line.replace("%", "%%")), operator.itemgetter(*places, last)


def _is_arithmetic(lines: Sequence[str]) -> bool:
    return _ARITHMETIC.fullmatch(lines[-1]) is not None


class _Learned(NamedTuple):
    """The lines of an op (None where they depend on its number), and whether its last result is in new memory."""

    templates: tuple[Template, ...]
    in_new_memory: bool


@dataclass(frozen=True, slots=True)
class _Watched(LocalCall):
    """A call that notes whether its number is used."""

    queried: list[bool] = field(default_factory=list)

    def salt(self) -> int:
        self.queried.append(True)
        return self.number


@dataclass(slots=True)
class OpText:
    """Lines of ops on a rank, with `scalar` for the text of scalars. What depends on the op's number is not kept."""

    rank: int
    scalar: ScalarText
    _known: dict[tuple[object, ...], _Learned] = field(default_factory=dict)

    def lines(self, node: Node, placement: Placement, operands: Sequence[str], results: Sequence[str]) -> list[str]:
        """The statements that assign the results' names, from the operands' names."""
        return self.statements(node, placement, operands, results)[0]

    def statements(
        self, node: Node, placement: Placement, operands: Sequence[str], results: Sequence[str]
    ) -> tuple[list[str], bool]:
        """(these lines, whether the last result is surely in memory of its own)."""
        names = list(dict.fromkeys(operands))
        places = tuple(map(names.index, operands))
        # Calls and placements of equal layers are the same objects, and live as long as the graph.
        key = (id(node.call), id(placement), places)
        found = self._known.get(key)
        if found is None:
            found = self._known[key] = self._learned(node, placement, places, len(results))
        if not found.templates:
            sides = (placement.operands, placement.results)
            lines = LocalCall(node.call, operands, *sides, self.rank, self.scalar, node.salt).statements(results)
            return lines, _is_arithmetic(lines)
        names += results
        return [text % pick(names) for text, pick in found.templates], found.in_new_memory

    def _learned(self, node: Node, placement: Placement, places: Sequence[int], results: int) -> _Learned:
        """The lines, with holes for the names."""
        operands = list(map(_hole, places))
        first = len(set(places))
        targets = list(map(_hole, range(first, first + results)))
        call = _Watched(node.call, operands, placement.operands, placement.results, self.rank, self.scalar, node.salt)
        lines = call.statements(targets)
        new = _is_arithmetic([_HOLE.sub("v0", line) for line in lines])
        return _Learned(() if call.queried else tuple(map(_template, lines)), new)
