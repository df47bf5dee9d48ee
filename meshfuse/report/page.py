"""One HTML page with the bills of some programs; it works offline, as it holds all that it shows.

The page has the ops in program order with their shardings by colour, collectives as arcs whose width shows their bytes,
a timeline per rank, a search, and a table of all collectives (which works without JavaScript). Repeated layers are
folded. Its look and behaviour are in page.html; this module makes the data that it shows, as JSON.
"""

from __future__ import annotations

import html
import importlib.resources
import json
from collections.abc import Sequence
from typing import Any

from ..compiler import CompiledProgram
from ..errors import user_error
from ..graph import Node
from ..layer_folding import repeats
from ..number_text import micro, number
from ..resharding import Compute
from ..sharding import layout as lay
from ..sharding.layout import Split
from ..sharding.value import Sharding
from .bill import Bill, BillEntry, bill_of
from .causes import quoted
from .explain import Explainer
from .page_timeline import Lane, lanes


def page(programs: Sequence[CompiledProgram], title: str = "meshfuse", alternatives: bool = True) -> str:
    """The page of some compiled programs. With `alternatives` the runner-up of every collective is computed."""
    bills = [bill_of(compiled, alternatives) for compiled in programs]
    shown = [_program(compiled, bill) for compiled, bill in zip(programs, bills, strict=True)]
    template = _template()
    tables = "\n".join(_table(place, bill) for place, bill in enumerate(bills))
    parts = {"TITLE": html.escape(title), "TABLES": tables, "DATA": _script_text({"programs": shown})}
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
    head = "".join(f"<th>{name}</th>" for name in ("", "collective", "axis", "bytes", "µs", "tensor", "for", "line"))
    most = max((entry.wire for entry in bill.entries), default=1.0) or 1.0
    rows = []
    for i, e in enumerate(bill.entries):
        bar = f'<td class="bar"><i style="width:{100 * e.wire / most:.1f}%"></i></td>'
        reason = f"{e.why} ({e.op})" if e.op else e.why
        cells = (e.collective, e.axes, number(e.wire), micro(e.seconds), e.tensor, reason, e.line)
        kinds = ("", "", "num", "num", "", "", "")
        text = "".join(f'<td class="{k}">{html.escape(c)}</td>' for k, c in zip(kinds, cells, strict=True))
        rows.append(f'<tr data-collective="{i}">{bar}{text}</tr>')
    total = f"<td></td><td>total</td><td></td><td class='num'>{number(bill.total)}</td>"
    total += f"<td class='num'>{micro(bill.seconds)}</td><td colspan='3'>{len(bill.entries)} collectives</td>"
    return (
        f'<table class="bill" data-program="{place}"><thead><tr>{head}</tr></thead>'
        f"<tbody>{''.join(rows)}</tbody><tfoot><tr>{total}</tr></tfoot></table>"
    )


# the data -------------------------------------------------------------------------------------------------------


def _program(compiled: CompiledProgram, bill: Bill) -> dict[str, Any]:
    graph = compiled.graph
    explainer = Explainer(compiled)
    rows = [_input(explainer, i) for i in graph.input_tensors if i in compiled.sharded.shardings]
    places = {i: place for place, i in enumerate(j for j in graph.input_tensors if j in compiled.sharded.shardings)}
    for node in graph.nodes:
        places.update(dict.fromkeys(node.outputs, len(rows)))
        rows.append(_op(explainer, node, places))
    rows.append({"name": "outputs", "label": "", "shards": [], "in": [places[i] for i in graph.outputs], "line": ""})
    meshes = list(dict.fromkeys(s.mesh for s in compiled.sharded.shardings.values()))
    first = len(rows) - 1 - len(graph.nodes)
    return {
        "meshes": [str(mesh) for mesh in meshes],
        "axes": list(dict.fromkeys(name for mesh in meshes for name in mesh.names)),
        "rows": rows,
        "folds": repeats([_key(row) for row in rows]),
        "collectives": _collectives(compiled, bill, places, len(rows) - 1),
        "total": bill.total,
        "seconds": bill.seconds,
        "timeline": _timeline(lanes(compiled), first),
    }


def _key(row: dict[str, Any]) -> object:
    """Equal for rows that repeat from layer to layer: the same op, type, sharding and source line."""
    return (row["name"], row.get("type"), row["line"], json.dumps(row["shards"]))


def _input(explainer: Explainer, tensor: int) -> dict[str, Any]:
    made = explainer.graph.tensors[tensor]
    return {
        "name": "input", "label": made.label, "type": str(made.type), "line": quoted(made.line), "in": [],
        "shards": [_shard(explainer.compiled.sharded.shardings[tensor])],
        "why": [*explainer.lines(tensor, replanned=False)],
    }  # fmt: skip


def _op(explainer: Explainer, node: Node, places: dict[int, int]) -> dict[str, Any]:
    tensors, shardings = explainer.graph.tensors, explainer.compiled.sharded.shardings
    first = tensors[node.outputs[0]]
    return {
        "name": node.name, "label": first.label, "type": ", ".join(str(tensors[i].type) for i in node.outputs),
        "line": quoted(node.line), "in": list(dict.fromkeys(places[i] for i in node.inputs)),
        "shards": [_shard(shardings[i]) for i in node.outputs],
        "why": [*explainer.lines(node.outputs[0], replanned=False)],
    }  # fmt: skip


def _shard(sharding: Sharding) -> dict[str, Any]:
    """By dim its text and the first axis in it, and the axes over which the tensor is unreduced."""
    dims = [
        [lay.text(layout, sharding.mesh), next((s.axis for s in lay.axes(layout)), None)] for layout in sharding.dims
    ]
    return {"dims": dims, "partial": [str(split) for split in sharding.partial]}


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


def _timeline(lanes: Sequence[Lane], first: int) -> list[dict[str, Any]]:
    """By lane its ranks and bars: (start, seconds, place of the row or -1, place of the collective or -1)."""
    return [
        {
            "ranks": _ranks(ranks),
            "bars": [(b.start, b.seconds, -1 if b.node is None else first + b.node, b.collective) for b in bars],
        }
        for ranks, bars in lanes
    ]


def _ranks(ranks: Sequence[int]) -> str:
    """Ranks as text, in which runs are written as 0–7."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][-1] + 1:
            runs[-1][1:] = [rank]
        else:
            runs.append([rank])
    return ", ".join("–".join(map(str, run)) for run in runs)
