"""The rows of the page: every result of an op, and inputs, which fold away under the op that reads them first."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from typing import Any

from ..compiler import CompiledProgram
from ..graph import Node
from ..layer_folding import layer_key, merged_names, repeats
from ..mesh import DeviceMesh
from ..placement.factors import Placement
from ..sharding import layout as lay
from ..sharding.layout import Split
from ..sharding.value import Sharding
from .causes import quoted
from .explain import Explainer

Row = dict[str, Any]


class PageRows:
    """Rows in program order, by tensor and by node their places among them, and the repeated stretches (`folds`)."""

    def __init__(self, compiled: CompiledProgram):
        self.explainer = Explainer(compiled)
        self.compiled, self.graph = compiled, compiled.graph
        self.rows: list[Row] = []
        self.places: dict[int, int] = {}
        self.of_node: dict[int, int] = {}
        unread = set(self.graph.input_tensors) & set(compiled.sharded.shardings)
        for node in self.graph.nodes:
            unread -= self._inputs(i for i in node.inputs if i in unread)
            self._op(node)
        self._inputs(sorted(unread))
        self._close(len(self.rows))
        self.rows.append({"name": "outputs", "label": "", "shards": [], "line": "",
                          "in": list(dict.fromkeys(self.places[i] for i in self.graph.outputs))})  # fmt: skip
        self.folds = repeats([_key(row) for row in self.rows])
        self._name_layers()

    def _inputs(self, tensors: Iterable[int]) -> set[int]:
        found = list(dict.fromkeys(tensors))
        for tensor in found:
            self.places[tensor] = len(self.rows)
            self.rows.append({**self._tensor(tensor), "name": "input", "in": [], "under": None})
        return set(found)

    def _close(self, reader: int) -> None:
        """Say of the inputs just before a row that this one reads them first."""
        for row in reversed(self.rows):
            if row.get("under", 0) is not None:
                break
            row["under"] = reader

    def _op(self, node: Node) -> None:
        first = self.of_node[node.id] = len(self.rows)
        self._close(first)
        read = list(dict.fromkeys(self.places[i] for i in node.inputs))
        repeated = _repeated(self.compiled.sharded.choices[node.id].placement)
        for number, tensor in enumerate(node.outputs):
            self.places[tensor] = len(self.rows)
            row = {**self._tensor(tensor), "name": node.name, "in": read, "line": quoted(node.line)}
            if number:
                row |= {"more": first, "in": []}
            elif repeated > 1 and not node.call.op.is_view:
                row["repeated"] = repeated
            self.rows.append(row)

    def _tensor(self, tensor: int) -> Row:
        made = self.graph.tensors[tensor]
        return {
            "label": made.label, "type": str(made.type), "line": quoted(made.line),
            "shards": [_shard(self.compiled.sharded.shardings[tensor])],
            "why": [*self.explainer.lines(tensor, replanned=False)],
        }  # fmt: skip

    def _name_layers(self) -> None:
        """What the first of repeated stretches is called while the others are folded away."""
        for start, period, count in self.folds:
            for i in range(start, start + period):
                alike = [self.rows[i + again * period]["label"] for again in range(count)]
                self.rows[i]["layers"] = merged_names(alike)


def _key(row: Row) -> object:
    """Equal for rows that repeat from layer to layer: the same op, type, name, sharding and source line."""
    return (row["name"], row.get("type"), layer_key(row["label"]), row["line"], json.dumps(row["shards"]))


def _shard(sharding: Sharding) -> dict[str, Any]:
    """By dim its text and the first axis in it, and the axes over which the tensor is unreduced."""
    dims = [
        [lay.text(layout, sharding.mesh), next((s.axis for s in lay.axes(layout)), None)] for layout in sharding.dims
    ]
    return {"dims": dims, "partial": [str(split) for split in sharding.partial]}


def _repeated(placement: Placement) -> int:
    """On how many ranks the same work is done."""
    mesh = placement.results[0].mesh
    if placement.step is not None:
        return 1
    layouts = [split for layout in placement.layouts for split in layout]
    used = dict.fromkeys(s for s in (*layouts, *placement.carry.axes, *placement.exchange) if s.bound)
    return mesh.size // math.prod([split.size or 1 for split in used])


def parts_of_axes(shardings: Iterable[Sharding]) -> list[tuple[str, str, str]]:
    """The parts of axes that tensors lie over, for a legend: text, axis, and the place of a rank along it."""
    found = dict[tuple[str, str, str], None]()
    for sharding in shardings:
        for split in sharding.splits:
            if split.axis in sharding.mesh.names and split.size != sharding.mesh.axis_size(split.axis):
                found[lay.split_text(split, sharding.mesh), split.axis, _digit(split, sharding.mesh)] = None
    return sorted(found)


def _digit(split: Split, mesh: DeviceMesh) -> str:
    """The place of a rank along a part of an axis, computed from its place along the axis."""
    assert split.axis is not None and split.size is not None
    rest = mesh.axis_size(split.axis) // (split.pre * split.size)
    divided = f"{split.axis} // {rest}" if rest > 1 else split.axis
    return f"{divided} % {split.size}" if split.pre > 1 else divided


def rank_text(ranks: Sequence[int]) -> str:
    """Ranks as text, in which runs are written as 0–7."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][-1] + 1:
            runs[-1][1:] = [rank]
        else:
            runs.append([rank])
    return ", ".join("–".join(map(str, run)) for run in runs)
