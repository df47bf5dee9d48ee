"""A program as a cost graph: a variable for every op, and one for every tensor that several readers may share a copy of."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from ..graph import Graph, Node
from ..mesh import DeviceMesh
from ..ops.values import TensorType
from ..placement.factors import Placement
from ..placement.options import Choice
from ..placement.operand_layouts import Source
from ..propagation import ShardedDefinition
from ..sharding.value import Sharding
from .cost_graph import CostGraph, Costs
from .dual_ascent import Certified, solve
from .labels import axis_labels, own_seconds
from .reshard_costs import exact_seconds, reshard_costs

Pair = tuple[Sharding, Sharding, TensorType]


class Prices:
    """Tables of reshards, in closed form but for the pairs whose exact price is known."""

    def __init__(self) -> None:
        self.exact: dict[Pair, float] = {}
        self._tables: dict[tuple[object, ...], Costs] = {}
        self._where: dict[Pair, list[tuple[Costs, int, int]]] = {}

    def table(self, sources: tuple[Sharding, ...], targets: tuple[Sharding, ...], ttype: TensorType) -> Costs:
        key = (sources, targets, ttype)
        found = self._tables.get(key)
        if found is None:
            found = self._tables[key] = reshard_costs(sources, targets, ttype)
            if self.exact:
                at, to = ({s: n for n, s in enumerate(side)} for side in (sources, targets))
                for (a, b, t), seconds in self.exact.items():
                    if t == ttype and a in at and b in to:
                        found[at[a], to[b]] = seconds
        return found

    def correct(self, pairs: set[Pair]) -> bool:
        """Take the exact prices of these pairs; returns whether any was another than in its tables."""
        changed = False
        for pair in pairs - self.exact.keys():
            a, b, ttype = pair
            seconds = exact_seconds(a, b, ttype)
            self.exact[pair] = seconds
            old = float(self.table((a,), (b,), ttype)[0, 0]) if False else None
            for (sources, targets, t), table in self._tables.items():
                if t == ttype and a in sources and b in targets:
                    n, m = sources.index(a), targets.index(b)
                    if abs(table[n, m] - seconds) > 1e-13:
                        table[n, m], changed = seconds, True
        return changed


@dataclass(slots=True)
class Shared:
    """A tensor with several readers: its labels are (where it is made, a copy that readers may share or None)."""

    variable: int
    labels: list[tuple[Sharding, Sharding | None]]


@dataclass(slots=True)
class Program:
    graph: Graph
    mesh: DeviceMesh
    prices: Prices
    labels: list[tuple[Placement, ...]] = field(default_factory=list)
    costs: CostGraph = field(default_factory=CostGraph)
    shared: dict[int, Shared] = field(default_factory=dict)
    makers: dict[int, tuple[int, int]] = field(default_factory=dict)
    readers: dict[int, dict[int, list[int]]] = field(default_factory=dict)
    inputs: dict[int, Sharding] = field(default_factory=dict)

    def build(self) -> None:
        self.costs, self.shared = CostGraph(), {}
        graph = self.graph
        self.inputs = {i: graph.annotations.get(i) or Sharding.replicated(self.mesh, len(graph.shape(i))) for i in graph.input_tensors}
        if not self.labels:
            self.labels = [axis_labels(node.call, node.rule, self.mesh) for node in graph.nodes]
            for node in graph.nodes:
                for place, i in enumerate(node.outputs):
                    self.makers[i] = (node.id, place)
                for place, i in enumerate(node.inputs):
                    self.readers.setdefault(i, {}).setdefault(node.id, []).append(place)
        for node in graph.nodes:
            self.costs.add_variable([own_seconds(node.call, p) for p in self.labels[node.id]])
        for i in self.inputs:
            self._input(i)
        for i in self.makers:
            self._made(i)

    def ttype(self, tensor: int) -> TensorType:
        return self.graph.tensors[tensor].type

    def _needs(self, tensor: int, node: int) -> tuple[tuple[Sharding, ...], list[np.ndarray]]:
        """The shardings in which a reader may need a tensor, and by operand the one that each of its labels needs."""
        places = self.readers[tensor][node]
        needed = [[p.operands[place] for p in self.labels[node]] for place in places]
        distinct = {s: n for n, s in enumerate(dict.fromkeys(s for row in needed for s in row))}
        rows = [np.array([distinct[s] for s in row]) for row in needed]
        return tuple(distinct), rows

    def _read_costs(self, tensor: int, node: int, have: tuple[Sharding, ...]) -> Costs:
        """[have, labels of the reader]: bringing a tensor to where a reader's labels need it, equal needs once."""
        needs, rows = self._needs(tensor, node)
        table = self.prices.table(have, needs, self.ttype(tensor))
        out = table[:, rows[0]].copy()
        for k, row in enumerate(rows[1:], 1):
            repeated = np.logical_or.reduce([row == before for before in rows[:k]])
            out += np.where(repeated, 0.0, table[:, row])
        return out

    def _input(self, tensor: int) -> None:
        readers = self.readers.get(tensor, {})
        home = self.inputs[tensor]
        if len(readers) <= 1:
            for node in readers:
                self.costs.add_costs(node, self._read_costs(tensor, node, (home,))[0])
        else:
            self._share(tensor, (home,), None)

    def _made(self, tensor: int) -> None:
        node, place = self.makers[tensor]
        made = [p.results[place] for p in self.labels[node]]
        distinct = {s: n for n, s in enumerate(dict.fromkeys(made))}
        rows = np.array([distinct[s] for s in made])
        have = tuple(distinct)
        readers = self.readers.get(tensor, {})
        note = self.graph.annotations.get(tensor)
        if tensor in self.graph.outputs or note is not None:
            if len(readers) == 0:
                self.costs.add_costs(node, self._end_costs(tensor, have)[rows])
                return
        elif len(readers) == 1:
            (reader,) = readers
            self.costs.add_pair(node, reader, self._read_costs(tensor, reader, have)[rows])
            return
        if readers:
            self._share(tensor, have, rows)

    def _end_costs(self, tensor: int, have: tuple[Sharding, ...]) -> np.ndarray:
        note = self.graph.annotations.get(tensor)
        if note is not None:
            return self.prices.table(have, (note,), self.ttype(tensor))[:, 0]
        return np.array([float(self.prices.table((s,), (s.reduced(),), self.ttype(tensor))[0, 0]) if s.partial else 0.0 for s in have])

    def _share(self, tensor: int, have: tuple[Sharding, ...], rows: np.ndarray | None) -> None:
        note = self.graph.annotations.get(tensor)
        is_output = tensor in self.graph.outputs
        wanted: dict[Sharding, int] = {}
        needs = {node: self._needs(tensor, node)[0] for node in self.readers[tensor]}
        for found in needs.values():
            for s in found:
                wanted[s] = wanted.get(s, 0) + 1
        copies = tuple(s for s, n in wanted.items() if n > 1 or is_output)
        ttype = self.ttype(tensor)
        if note is not None and rows is not None:
            copies = (note,)
        to_copy = self.prices.table(have, copies, ttype) if copies else np.zeros((len(have), 0))
        pairs = [(h, c) for h in range(len(have)) for c in range(len(copies))
                 if have[h] is not copies[c] and np.isfinite(to_copy[h, c]) and to_copy[h, c] > 2e-13]
        must = note is not None and rows is not None
        labels = [(h, None) for h in range(len(have)) if not must or have[h] is note or to_copy[h, 0] <= 2e-13] + pairs
        h = np.array([a for a, _ in labels]); c = np.array([len(copies) if b is None else b for _, b in labels])
        padded = np.concatenate([to_copy, np.zeros((len(have), 1))], 1)
        variable = self.costs.add_variable(padded[h, c])
        self.shared[tensor] = Shared(variable, [(have[a], None if b is None else copies[b]) for a, b in labels])
        if is_output and not must:
            ends = self._end_costs(tensor, have)[h]
            reduced = np.array([b is not None and not copies[b].partial for _, b in labels])
            self.costs.add_costs(variable, np.where(reduced, 0.0, ends))
        for node in self.readers[tensor]:
            first = self._read_costs(tensor, node, have)[h]
            again = self._read_costs(tensor, node, copies) if copies else np.zeros((0, first.shape[1]))
            again = np.concatenate([again, np.full((1, first.shape[1]), np.inf)])[c]
            self.costs.add_pair(variable, node, np.minimum(first, again))
        if rows is not None:
            self.costs.add_pair(self.makers[tensor][0], variable, np.where(rows[:, None] == h[None, :], 0.0, np.inf))

    def used(self, chosen: Sequence[int]) -> set[Pair]:
        """The reshards that an assignment needs."""
        out = set[Pair]()
        for tensor in (*self.inputs, *self.makers):
            ttype = self.ttype(tensor)
            there = self._there(tensor, chosen)
            if len(there) > 1:
                out.add((there[0], there[1], ttype))
            for node, places in self.readers.get(tensor, {}).items():
                for place in places:
                    need = self.labels[node][chosen[node]].operands[place]
                    out.update((have, need, ttype) for have in there)
            note = self.graph.annotations.get(tensor)
            if tensor in self.makers and note is not None:
                out.update((have, note, ttype) for have in there)
            elif tensor in self.makers and tensor in self.graph.outputs and there[0].partial:
                out.add((there[0], there[0].reduced(), ttype))
        return {(a, b, t) for a, b, t in out if a is not b}

    def _there(self, tensor: int, chosen: Sequence[int]) -> list[Sharding]:
        shared = self.shared.get(tensor)
        if shared is not None:
            made, copy = shared.labels[chosen[shared.variable]]
            return [made] if copy is None else [made, copy]
        if tensor in self.inputs:
            return [self.inputs[tensor]]
        node, place = self.makers[tensor]
        return [self.labels[node][chosen[node]].results[place]]

    def decode(self, chosen: Sequence[int]) -> ShardedDefinition:
        graph = self.graph
        homes = dict(self.inputs)
        choices = []
        for node in graph.nodes:
            placement = self.labels[node.id][chosen[node.id]]
            choices.append(Choice(placement, Source("whole"), 0.0))
            homes.update(zip(node.outputs, placement.results, strict=True))
        for i in graph.outputs:
            if i in self.makers and i not in graph.annotations and homes[i].partial:
                shared = self.shared.get(i)
                copy = shared.labels[chosen[shared.variable]][1] if shared is not None else None
        homes |= dict(graph.annotations)
        done = ShardedDefinition(graph, tuple(choices), homes)
        done.verify()
        return done


def optimum(graph: Graph, mesh: DeviceMesh, rounds: int = 12) -> tuple[ShardedDefinition, Certified]:
    program = Program(graph, mesh, Prices())
    for n in range(rounds):
        program.build()
        found = solve(finite(program.costs))
        if not program.prices.correct(program.used(found.assignment.labels)):
            break
    return program.decode(found.assignment.labels), found, n+1, program


def finite(graph: CostGraph) -> CostGraph:
    """The same with a number in place of inf that no plan of finite costs reaches."""
    tables = [*graph.costs, *graph.pairs.values()]
    most = sum([float(t[np.isfinite(t)].max()) for t in tables if np.isfinite(t).any()]) * 2 + 1e-6
    out = CostGraph([np.where(np.isfinite(c), c, most) for c in graph.costs],
                    {k: np.where(np.isfinite(t), t, most) for k, t in graph.pairs.items()}, graph.neighbours)
    return out
