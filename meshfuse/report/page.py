"""One HTML page with the bills of some programs; it works offline, as it holds all that it shows.

The page has the ops in program order with their shardings by colour, collectives as arcs whose width shows their bytes,
a timeline per rank, a search, and a table of all collectives (which works without JavaScript). Repeated layers are
folded. Its look and behaviour are in page.html; this module makes the data that it shows, as JSON.
"""

from __future__ import annotations

import html
import importlib.resources
import json
from collections.abc import Mapping, Sequence
from typing import Any

from ..compiler import CompiledProgram
from ..errors import user_error
from ..executor.spans import RankTime, Span, hidden_share
from ..number_text import micro, number
from ..resharding import Compute
from ..sharding.layout import Split
from .bill import Bill, BillEntry, bill_of
from .causes import quoted
from .page_rows import PageRows, parts_of_axes, rank_text
from .page_timeline import Bar, Lane, lanes


def page(
    programs: Sequence[CompiledProgram], title: str = "meshfuse", alternatives: bool = True, names: Sequence[str] = ()
) -> str:
    """The page of some compiled programs. With `alternatives` the runner-up of every collective is computed.

    names: what to call each program; without them they are numbered.
    """
    bills = [bill_of(compiled, alternatives) for compiled in programs]
    shown = [_program(compiled, bill) for compiled, bill in zip(programs, bills, strict=True)]
    template = _template()
    tables = "\n".join(_table(place, bill) for place, bill in enumerate(bills))
    parts = {"TITLE": html.escape(title), "TABLES": tables, "DATA": _script_text({"programs": shown, "names": names})}
    for name, text in parts.items():
        template = template.replace(f"@{name}@", text)
    return template


def _template() -> str:
    """The text of page.html. Raises DefinitionError where it cannot be read."""
    try:
        return importlib.resources.files("meshfuse.report").joinpath("page.html").read_text(encoding="utf-8")
    except OSError as error:
        found = error.strerror or str(error)
        raise user_error("meshfuse's page.html cannot be read", found, "the file as it was installed") from None


def _script_text(value: Any) -> str:
    """JSON for a script element: nothing in it ends the element or begins a comment."""
    return json.dumps(value, separators=(",", ":")).replace("<", "\\u003c").replace("\u2028", "\\u2028")


# the table ------------------------------------------------------------------------------------------------------


def _table(place: int, bill: Bill) -> str:
    """The bill as a table: equal layers as one row where there are any, then each collective by itself."""
    head = "".join(f"<th>{name}</th>" for name in ("", "collective", "axis", "bytes", "µs", "tensor", "for", "line"))
    rows, entries = bill.folded(), bill.entries
    most = max((sum(entries[i].wire for i in row.places) for row in rows), default=1.0) or 1.0
    layers = [_table_row([entries[i] for i in row.places], (row.cells[2] + row.times.replace("x", "×"), row.cells[3]),
                         most, f'class="layers" data-first="{row.places[0]}"') for row in rows]  # fmt: skip
    single = [_table_row([e], (e.tensor, f"{e.why} ({e.op})" if e.op else e.why), most, f'data-collective="{i}"')
              for i, e in enumerate(entries)]  # fmt: skip
    total = f"<td></td><td>total</td><td></td><td class='num'>{number(bill.total)}</td>"
    total += f"<td class='num'>{micro(bill.seconds)}</td><td colspan='3'>{len(entries)} collectives</td>"
    folded = len(layers) < len(single)
    return (
        f'<table class="bill" data-program="{place}"><thead><tr>{head}</tr></thead>'
        f"{'<tbody>' + ''.join(layers) + '</tbody>' if folded else ''}"
        f"<tbody{' class=each' if folded else ''}>{''.join(single)}</tbody><tfoot><tr>{total}</tr></tfoot></table>"
    )


def _table_row(entries: Sequence[BillEntry], names: tuple[str, str], most: float, attributes: str) -> str:
    """One row for equal collectives; names: the tensor, and what asks for it."""
    first, wire = entries[0], sum(e.wire for e in entries)
    cells = (first.collective, first.axes, number(wire), micro(sum(e.seconds for e in entries)), *names, first.line)
    kinds = ("", "", "num", "num", "", "", "")
    text = "".join(f'<td class="{k}">{html.escape(c)}</td>' for k, c in zip(kinds, cells, strict=True))
    return f'<tr {attributes}><td class="bar"><i style="width:{100 * wire / most:.1f}%"></i></td>{text}</tr>'


# the data -------------------------------------------------------------------------------------------------------


def _program(compiled: CompiledProgram, bill: Bill) -> dict[str, Any]:
    made = PageRows(compiled)
    shardings = compiled.sharded.shardings.values()
    meshes = list(dict.fromkeys(sharding.mesh for sharding in shardings))
    return {
        "meshes": [str(mesh) for mesh in meshes],
        "axes": list(dict.fromkeys(name for mesh in meshes for name in mesh.names)),
        "sizes": {name: mesh.axis_size(name) for mesh in meshes for name in mesh.names},
        "parts": parts_of_axes(shardings),
        "rows": made.rows,
        "folds": made.folds,
        "collectives": _collectives(compiled, bill, made.places, len(made.rows) - 1),
        "total": bill.total,
        "seconds": bill.seconds,
        "timeline": _timeline(lanes(compiled), made.of_node),
    }


def _collectives(compiled: CompiledProgram, bill: Bill, places: dict[int, int], end: int) -> list[dict[str, Any]]:
    values, out = compiled.resharded.values, []
    readers = _readers(compiled)
    for statement, entry in zip(compiled.resharded.sends, bill.entries, strict=True):
        if isinstance(statement, Compute):
            out.append(_exchanged(compiled, statement, entry, places))
            continue
        tensor = values[statement.source].tensor
        node = statement.node if statement.node is not None else readers.get(statement.target)
        made = places[compiled.graph.nodes[node].outputs[0]] if node is not None else end
        target = places[tensor] if statement.why == "its annotation" else made
        ends = places[tensor], target
        out.append(_known(entry, quoted(statement.line), ends, statement.step.axes))
    return out


def _exchanged(
    compiled: CompiledProgram, compute: Compute, entry: BillEntry, places: dict[int, int]
) -> dict[str, Any]:  # fmt: skip
    node = compiled.graph.nodes[compute.node]
    ends = places[node.inputs[0]], places[node.outputs[0]]
    return _known(entry, quoted(node.line), ends, compute.placement.exchange)


def _known(entry: BillEntry, line: str, ends: tuple[int, int], axes: Sequence[Split]) -> dict[str, Any]:
    """What the page knows of a collective, which goes from one tensor to another."""
    return {
        "kind": entry.collective, "axes": entry.axes, "wire": entry.wire, "seconds": entry.seconds,
        "tensor": entry.tensor, "why": entry.why, "line": line, "move": entry.move,
        "held": entry.held_by, "needed": entry.needed_by, "from": ends[0], "to": ends[1],
        "axis": axes[0].axis if axes else None, "instead": str(entry.instead) if entry.instead else None,
    }  # fmt: skip


def _readers(compiled: CompiledProgram) -> dict[int, int]:
    """By value, the first op that reads it, directly or after more moves."""
    found: dict[int, int] = {}
    for statement in reversed(compiled.resharded.statements):
        if isinstance(statement, Compute):
            found.update(dict.fromkeys(statement.inputs, statement.node))
        elif statement.node is not None:
            found[statement.source] = statement.node
        elif statement.target in found:
            found[statement.source] = found[statement.target]
    return found


def _timeline(lanes: Sequence[Lane], rows: Mapping[int, int]) -> list[dict[str, Any]]:
    """By lane its ranks, its bars and what part of its communication is hidden behind ops.

    A bar: (start, seconds, place of the row or -1, place of the collective or -1, 1 if it is on the critical path).
    """
    return [
        {
            "ranks": rank_text(ranks),
            "bars": [
                (b.start, b.seconds, -1 if b.node is None else rows[b.node], b.collective, int(b.critical))
                for b in bars
            ],
            "hidden": hidden_share([_rank_time(bars)]),
        }
        for ranks, bars in lanes
    ]


def _rank_time(bars: Sequence[Bar]) -> RankTime:
    spans = [Span("kernel" if b.node is not None else "communication", "", b.start, b.end) for b in bars]
    return RankTime.of(0, spans)
