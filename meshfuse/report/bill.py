"""The bill: the bytes that each rank puts on the wire, by collective, axis, tensor and source line."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass

from ..compiler import CompiledProgram
from ..default_machine import default_machine, name_of
from ..html_text import html_lines, html_table
from ..layer_folding import FoldedRow, fold_rows
from ..number_text import duration, micro, number
from ..placement.exchanges import exchange_seconds, exchange_wire
from ..resharding import Compute, Reshard
from .alternatives import Alternative, Alternatives, Total, wire_bytes
from .causes import Cause, Causes, annotated_where


@dataclass(frozen=True, slots=True)
class Instead:
    """The runner-up of a collective: an annotation to change, and the whole plan's bytes and seconds then."""

    tensor: str
    line: str
    change: str
    total_wire: float
    total_seconds: float

    def __str__(self) -> str:
        cost = f"{number(self.total_wire)} bytes and {duration(self.total_seconds)} in all"
        return f"{self.tensor} as {self.change} at {self.line}: {cost}"


@dataclass(frozen=True, slots=True)
class BillEntry:
    """One collective of a program.

    wire: bytes per rank, counted as a ring; the mean over the ranks that it starts from.
    seconds: its modelled time.
    source, target: the shardings between which it moves the tensor.
    op: the op that reads the result, "" for outputs and annotations.
    held_by, needed_by: the annotations that source and target follow, with their lines.
    instead: the runner-up; None without `alternatives`, or where no other annotation is possible.
    """

    collective: str
    axes: str
    tensor: str
    wire: float
    why: str
    line: str
    move: str
    seconds: float
    source: str
    target: str
    op: str
    held_by: tuple[str, ...]
    needed_by: tuple[str, ...]
    instead: Instead | None = None


@dataclass(frozen=True, slots=True)
class Bill:
    """All collectives of a program, in order, and how good its plan is. `print` shows a table of them.

    In the table equal collectives of equal layers are one row, `h*.mlp.up x32`, with their bytes and time in all;
    `entries` and `to_dict` have each by itself.

    step_seconds: the modelled time of a step: of one rank's computation and of all moves.
    machine: that on whose links time is modelled where meshes have none of their own; "" where they have.
    gap: the part of it by which a better plan may take less; 0 where the plan is proven the best, None where that is
        not known, as of a plan that was made for other sizes.
    """

    entries: tuple[BillEntry, ...]
    step_seconds: float = 0.0
    gap: float | None = None
    machine: str = ""

    @property
    def total(self) -> float:
        """The bytes that a rank sends, the mean over ranks."""
        return sum(entry.wire for entry in self.entries)

    @property
    def seconds(self) -> float:
        """The modelled seconds of all collectives, one after the other."""
        return sum(entry.seconds for entry in self.entries)

    def to_dict(self) -> dict[str, object]:
        """The bill as types that JSON has."""
        entries = [asdict(entry) for entry in self.entries]
        plan = {"seconds": self.step_seconds, "gap": self.gap, "proven": self.gap == 0, "machine": self.machine}
        return {"total": self.total, "seconds": self.seconds, "plan": plan, "entries": entries}

    def __str__(self) -> str:
        if not self.entries:
            return f"no communication{self._certificate()}"
        return table(self._rows(), right=(2, 3)) + self._certificate()

    def __repr__(self) -> str:
        return str(self)

    def _repr_html_(self) -> str:
        if not self.entries:
            return html_lines(str(self))
        return html_table(self._rows(), right=(2, 3), caption=self._certificate().strip())

    def _rows(self) -> list[tuple[str, ...]]:
        """A heading, a row for each collective, or for equal ones of equal layers, and their total."""
        rows: list[tuple[str, ...]] = [("collective", "axis", "bytes", "us", "tensor", "why", "line")]
        rows += map(self._row, self.folded())
        count = len(self.entries)
        plural = f"{count} collective{'s' if count > 1 else ''}"
        return [*rows, ("total", "", number(self.total), micro(self.seconds), "", plural, "")]

    def folded(self) -> list[FoldedRow]:
        """The entries that differ only in the numbers of their layers, as one: collective, axes, tensor, why, line."""
        cells = [(e.collective, e.axes, e.tensor, e.why, e.line) for e in self.entries]
        return fold_rows(cells, (2, 3), [(e.wire, e.seconds) for e in self.entries])

    def _row(self, row: FoldedRow) -> tuple[str, ...]:
        wire, seconds = (sum(getattr(self.entries[i], part) for i in row.places) for part in ("wire", "seconds"))
        collective, axes, tensor, why, line = row.cells
        return collective, axes, number(wire), micro(seconds), tensor + row.times, why, line

    def _certificate(self) -> str:
        """How good the plan is, as a line of its own; "" where that is not known."""
        if self.gap is None:
            return ""
        how = "proven the least" if self.gap == 0 else f"at most {self.gap * 100:.2g} % above the least"
        where = f" on {self.machine} (no links are given)" if self.machine not in ("", "bytes") else ""
        return f"\na step takes {duration(self.step_seconds)} modelled{where}, {how} of all placements"

    def details(self) -> str:
        """For every collective its shardings, the annotations behind them, and its runner-up, as text."""
        rows = fold_rows([self._details(entry) for entry in self.entries], (0, 1))
        return "\n".join(f"{row.cells[0]}{row.times}\n{row.cells[1]}" for row in rows) or str(self)

    def _details(self, entry: BillEntry) -> tuple[str, str]:
        """A heading and the lines below it."""
        over = f" over {entry.axes}" if entry.axes else ""
        for_op = f" ({entry.op})" if entry.op else ""
        head = f"{entry.collective}{over} of {entry.tensor}, {number(entry.wire)} bytes, {duration(entry.seconds)}"
        lines = [f"  asked for by {entry.why}{for_op} at {entry.line}: {entry.source} -> {entry.target}"]
        lines += [f"  {entry.source} follows {text}" for text in entry.held_by]
        lines += [f"  {entry.target} follows {text}" for text in entry.needed_by]
        if entry.instead is not None:
            lines.append(f"  runner-up: {entry.instead}; now {number(self.total)} bytes and {duration(self.seconds)}")
        return head, "\n".join(lines)


def table(rows: Sequence[Sequence[str]], right: Sequence[int] = ()) -> str:
    """Aligned columns of text, those in `right` aligned to the right; the first row is the heading."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        cells = [
            cell.rjust(w) if c in right else cell.ljust(w) for c, (cell, w) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)


def bill_of(compiled: CompiledProgram, alternatives: bool = False) -> Bill:
    """The bill of a compiled program, which is the same for every rank.

    With `alternatives` every collective has its runner-up. Plans are made anew for that: it takes as long as several
    compilations.
    """
    causes, others = Causes(compiled), Alternatives(compiled) if alternatives else None
    entries = tuple([
        _entry(compiled, causes, others, found) if isinstance(found, Reshard) else _exchange(compiled, found)
        for found in compiled.resharded.sends
    ])  # fmt: skip
    return Bill(entries, compiled.planned.seconds, compiled.planned.gap, _machine(compiled))


def _machine(compiled: CompiledProgram) -> str:
    meshes = {sharding.mesh for sharding in compiled.sharded.shardings.values()}
    return "" if any(mesh.linked for mesh in meshes) else name_of(default_machine())


def _entry(compiled: CompiledProgram, causes: Causes, others: Alternatives | None, reshard: Reshard) -> BillEntry:
    graph, step, cause = compiled.graph, reshard.step, causes.of(reshard)
    tensor = compiled.resharded.values[reshard.source].tensor
    other = others.best(cause.annotated) if others is not None else None
    return BillEntry(
        step.kind.value, ", ".join(map(str, step.axes)), graph.tensors[tensor].label,
        wire_bytes(graph, tensor, step), reshard.why, str(reshard.line), str(step),
        compiled.resharded.seconds(reshard), str(step.src), str(step.dst), _op(compiled, cause),
        _annotations_of(causes, cause.held), _annotations_of(causes, cause.needed),
        _instead(causes, other) if other is not None else None,
    )  # fmt: skip


def _exchange(compiled: CompiledProgram, compute: Compute) -> BillEntry:
    """The entry of an op for which ranks send each other rows; with the bytes if every expert gets as many."""
    graph, placement, node = compiled.graph, compute.placement, compiled.graph.nodes[compute.node]
    made, axes = graph.tensors[node.outputs[0]].label, ", ".join(map(str, placement.exchange))
    ends = str(placement.operands[0]), str(placement.results[0])
    return BillEntry(
        "exchange", axes, made, exchange_wire(node.call, placement), f"rows of {node.name}", str(node.line),
        f"exchange over {axes} {ends[0]} -> {ends[1]}", exchange_seconds(node.call, placement), *ends,
        f"{made} = {node.name}", (), (),
    )  # fmt: skip


def _op(compiled: CompiledProgram, cause: Cause) -> str:
    if cause.reader is None:
        return ""
    made = compiled.graph.tensors[cause.reader.outputs[0]]
    return f"{made.label} = {cause.reader.name}"


def _annotations_of(causes: Causes, tensors: tuple[int, ...]) -> tuple[str, ...]:
    return tuple(f"{causes.graph.tensors[i].label}, {annotated_where(causes.graph, i)}" for i in tensors)


def _instead(causes: Causes, other: Alternative) -> Instead:
    found: Total = other.total
    label = ", ".join(causes.graph.tensors[i].label for i in other.tensors[:3])
    more = f" and {len(other.tensors) - 3} more" if len(other.tensors) > 3 else ""
    line = str(causes.line(next(iter(other.tensors))))
    return Instead(label + more, line, str(other), found.wire, found.seconds)
