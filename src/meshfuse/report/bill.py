"""The bill: the bytes that each rank puts on the wire, by collective, axis, tensor and source line."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass

from ..compiler import CompiledProgram
from ..resharding.insert import Set
from ..resharding.moves import MoveKind, wire_elements


@dataclass(frozen=True, slots=True)
class Entry:
    """One collective: `wire` is the bytes of the rank that sends most, counted as a ring."""

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
        return json.dumps(
            {"total": self.total, "entries": [asdict(entry) for entry in self.entries]}, indent=1
        )

    def __str__(self) -> str:
        if not self.entries:
            return "no communication"
        rows = [("collective", "axis", "bytes", "tensor", "why", "line")]
        rows += [(e.collective, e.axes, _bytes(e.wire), e.tensor, e.why, e.line) for e in self.entries]
        rows.append(("total", "", _bytes(self.total), "", f"{len(self.entries)} collectives", ""))
        widths = [max(len(row[c]) for row in rows) for c in range(6)]
        lines = []
        for row in rows:
            cells = [
                cell.rjust(w) if c == 2 else cell.ljust(w)
                for c, (cell, w) in enumerate(zip(row, widths, strict=True))
            ]
            lines.append("  ".join(cells).rstrip())
        return "\n".join(lines)


def _bytes(count: float) -> str:
    return f"{count:,.0f}"


def bill_of(compiled: CompiledProgram) -> Bill:
    """The bill of a compiled program, the same for every rank: each collective at its busiest rank."""
    graph, resharded = compiled.graph, compiled.resharded
    entries = []
    for step in resharded.steps:
        if not isinstance(step, Set) or step.move.kind is MoveKind.SLICE:
            continue
        tensor = graph.tensors[resharded.values[step.source].tensor]
        ranks = {*step.move.src.mesh.ranks, *step.move.dst.mesh.ranks}
        wire = (
            max(wire_elements(step.move, tensor.type.shape, rank) for rank in ranks)
            * tensor.type.dtype.itemsize
        )
        axes = ",".join(map(str, step.move.axes))
        entries.append(
            Entry(step.move.kind.value, axes, tensor.label, wire, step.why, str(step.line), str(step.move))
        )
    return Bill(tuple(entries))
