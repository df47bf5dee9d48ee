"""The bill: the bytes that each rank puts on the wire, by collective, axis, tensor and source line."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from ..compiler import CompiledProgram
from ..graph import Graph
from ..resharding.insert import Set
from ..resharding.moves import Move, MoveKind, wire_elements


@dataclass(frozen=True, slots=True)
class Entry:
    """One collective: `wire` is the bytes per rank, counted as a ring; the mean over the starting ranks."""

    collective: str
    axes: str
    tensor: str
    wire: float
    why: str
    line: str
    move: str


@dataclass(frozen=True, slots=True)
class Bill:
    """All collectives of a program in order."""

    entries: tuple[Entry, ...]

    @property
    def total(self) -> float:
        """Bytes per rank on the wire."""
        return sum(entry.wire for entry in self.entries)

    def to_json(self) -> str:
        return json.dumps({"total": self.total, "entries": [asdict(entry) for entry in self.entries]}, indent=1)

    def __str__(self) -> str:
        if not self.entries:
            return "no communication"
        rows = [("collective", "axis", "bytes", "tensor", "why", "line")]
        rows += [(e.collective, e.axes, number(e.wire), e.tensor, e.why, e.line) for e in self.entries]
        count = len(self.entries)
        rows.append(("total", "", number(self.total), "", f"{count} collective{'s' if count > 1 else ''}", ""))
        return table(rows, right=(2,))


def table(rows: Sequence[Sequence[str]], right: Sequence[int] = ()) -> str:
    """Aligned columns, those in `right` to the right; the first row is the heading."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        cells = [
            cell.rjust(w) if c in right else cell.ljust(w) for c, (cell, w) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)


def number(count: float) -> str:
    """A count with its thousands set off."""
    return f"{count:,.0f}"


def wire_bytes(graph: Graph, tensor: int, move: Move) -> float:
    """The bytes of a tensor that a move puts on the wire: the mean over the ranks that it starts from."""
    kind, ranks = graph.tensors[tensor].type, move.src.mesh.ranks
    return sum(wire_elements(move, kind.shape, rank) for rank in ranks) / len(ranks) * kind.dtype.itemsize


def bill_of(compiled: CompiledProgram) -> Bill:
    """The bill of a compiled program, the same for every rank: each collective's mean over its ranks."""
    resharded = compiled.resharded
    moves = [s for s in resharded.steps if isinstance(s, Set) and s.move.kind is not MoveKind.SLICE]
    return Bill(tuple(_entry(compiled, step) for step in moves))


def _entry(compiled: CompiledProgram, step: Set) -> Entry:
    tensor = compiled.resharded.values[step.source].tensor
    wire = wire_bytes(compiled.graph, tensor, step.move)
    axes, label = ", ".join(map(str, step.move.axes)), compiled.graph.tensors[tensor].label
    return Entry(step.move.kind.value, axes, label, wire, step.why, str(step.line), str(step.move))
