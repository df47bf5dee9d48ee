"""A program as a cost graph: a variable for every op, and one for every tensor that several readers may share a copy of."""

from __future__ import annotations

import functools
from collections import Counter
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
from ..sharding import layout as lay
from ..sharding.layout import Split
from ..sharding.value import Sharding
from .cost_graph import Between, Classes, CostGraph, Costs, FromEither, Same
from .dual_ascent import Certified, solve
from .labels import axis_labels, own_seconds, window_labels
from .strided import strided_layouts
from .reshard_costs import Atoms, exact_seconds, reshard_costs, whole_axes

Pair = tuple[Sharding, Sharding, TensorType]


class Prices:
    """Tables of reshards, in closed form but for the pairs whose exact price is known."""

    def __init__(self, atoms: Atoms) -> None:
        self.atoms = atoms
        self.exact: dict[Pair, float] = {}
        self._tables: dict[tuple[object, ...], Costs] = {}

    def table(self, sources: tuple[Sharding, ...], targets: tuple[Sharding, ...], ttype: TensorType) -> Costs:
        key = (sources, targets, ttype)
        found = self._tables.get(key)
        if found is None:
            found = self._tables[key] = reshard_costs(sources, targets, ttype, self.atoms)
        return found

    def correct(self, pairs: set[Pair]) -> bool:
        """Take the exact prices of these pairs; returns whether any was another than in its tables."""
        changed = False
        for pair in pairs - self.exact.keys():
            a, b, ttype = pair
            seconds = exact_seconds(a, b, ttype)
            self.exact[pair] = seconds
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


def _classes(shardings: Sequence[Sharding]) -> tuple[tuple[Sharding, ...], Classes]:
    """The different ones, and which of them each is."""
    numbers = {s: n for n, s in enumerate(dict.fromkeys(shardings))}
    return tuple(numbers), Classes(np.array([numbers[s] for s in shardings]), len(numbers))


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
    limit: float = 0.0
    own: list[list[float]] = field(default_factory=list)
    variables: dict[int, int] = field(default_factory=dict)

    def build(self) -> None:
        self.costs, self.shared = CostGraph(), {}
        graph = self.graph
        self.inputs = {i: graph.annotations.get(i) or self._whole(i) for i in graph.input_tensors}
        if not self.labels:
            self._enumerate()
            for node in graph.nodes:
                for place, i in enumerate(node.outputs):
                    self.makers[i] = (node.id, place)
                for place, i in enumerate(node.inputs):
                    self.readers.setdefault(i, {}).setdefault(node.id, []).append(place)
        self.limit = 2 * self._replicated()
        self.variables, later = {}, []
        for i in self.inputs:
            later.append((self._input, i, self._reserve(i, None)))
        for node in graph.nodes:
            self.variables[node.id] = self.costs.add_variable(self.own[node.id])
            for i in node.outputs:
                later.append((self._made, i, self._reserve(i, node)))
        for build, i, variable in later:
            build(i, variable)

    def _enumerate(self) -> None:
        asked, dims = strided_layouts(self.graph)
        made: dict[int, dict[Sharding, None]] = {i: {s: None} for i, s in self.inputs.items()}
        for i, s in self.graph.annotations.items():
            made.setdefault(i, {})[s] = None
        for node in self.graph.nodes:
            labels = list(axis_labels(node.call, node.rule, self.mesh, self.prices.atoms, asked[node.id]))
            own = [own_seconds(node.call, p) for p in labels]
            if len(node.inputs) == 1 and node.call.op.window is not None:
                wanted = [Sharding(self.mesh, d) for d in dims.get(node.outputs[0], ())]
                note = self.graph.annotations.get(node.outputs[0])
                for p, seconds in window_labels(node.call, node.rule, self.mesh, made[node.inputs[0]], [*wanted, *([note] if note else [])]):
                    labels.append(p)
                    own.append(seconds)
            self.labels.append(tuple(labels))
            self.own.append(own)
            for i, k in zip(node.outputs, range(len(node.outputs))):
                there = made.setdefault(i, {})
                there.update(dict.fromkeys(p.results[k] for p in labels))
                there.update(dict.fromkeys([s.reduced() for s in there]))

    def _reserve(self, tensor: int, node) -> int:
        """A variable for a tensor that is shared."""
        readers = self.readers.get(tensor, {})
        alone = node is not None and tensor not in self.graph.outputs and tensor not in self.graph.annotations
        if not readers or (len(readers) == 1 and (node is None or alone)):
            return -1
        return self.costs.add_variable([0.0])

    def _whole(self, tensor: int) -> Sharding:
        return Sharding.replicated(self.mesh, len(self.graph.shape(tensor)))

    def _replicated(self) -> float:
        """Seconds of the plan in which every rank computes everything: the best one takes no more."""
        work = sum(own[0] for own in self.own)
        ends = [*((s, self._whole(i), i) for i, s in self.inputs.items()),
                *((self._whole(i), s, i) for i, s in self.graph.annotations.items())]
        return work + sum(float(self.prices.table((a,), (b,), self.ttype(i))[0, 0]) for a, b, i in ends if a is not b) + 1e-9

    def ttype(self, tensor: int) -> TensorType:
        return self.graph.tensors[tensor].type

    def _table(self, sources, targets, tensor) -> Costs:
        return np.minimum(self.prices.table(sources, targets, self.ttype(tensor)), self.limit)

    def _needs(self, tensor: int, node: int) -> tuple[list[tuple[Sharding, ...]], Classes]:
        """The sets of shardings in which a reader may need a tensor, and which one each of its labels needs."""
        places = self.readers[tensor][node]
        if len(places) == 1:
            needs, classes = _classes([p.operands[places[0]] for p in self.labels[node]])
            return [(s,) for s in needs], classes
        needed = [tuple(dict.fromkeys(p.operands[place] for place in places)) for p in self.labels[node]]
        return _classes(needed)

    def _read(self, have: tuple[Sharding, ...], needs: list[tuple[Sharding, ...]], tensor: int) -> Costs:
        """[have, needs]: bringing a tensor to where a reader needs it."""
        if all(len(need) == 1 for need in needs):
            return self._table(have, tuple([need[0] for need in needs]), tensor)
        each = tuple(dict.fromkeys(s for need in needs for s in need))
        table = self._table(have, each, tensor)
        at = {s: n for n, s in enumerate(each)}
        return np.stack([table[:, [at[s] for s in need]].sum(1) for need in needs], 1)

    def _input(self, tensor: int, variable: int) -> None:
        readers = self.readers.get(tensor, {})
        home = self.inputs[tensor]
        if len(readers) <= 1:
            for node in readers:
                needs, classes = self._needs(tensor, node)
                self.costs.add_costs(self.variables[node], self._read((home,), needs, tensor)[0][classes.of])
        else:
            self._share(variable, tensor, (home,), None)

    def _made(self, tensor: int, variable: int) -> None:
        node, place = self.makers[tensor]
        have, made = _classes([p.results[place] for p in self.labels[node]])
        readers = self.readers.get(tensor, {})
        note = self.graph.annotations.get(tensor)
        if not readers:
            self.costs.add_costs(self.variables[node], self._end_costs(tensor, have)[made.of])
        elif len(readers) == 1 and tensor not in self.graph.outputs and note is None:
            (reader,) = readers
            needs, classes = self._needs(tensor, reader)
            self.costs.edges.append(Between((self.variables[node], self.variables[reader]), self._read(have, needs, tensor), made, classes))
        else:
            self._share(variable, tensor, have, made)

    def _end_costs(self, tensor: int, have: tuple[Sharding, ...]) -> np.ndarray:
        """Seconds from where a tensor is made to its annotation, or of an output to where it is left."""
        note = self.graph.annotations.get(tensor)
        if note is not None:
            return self._table(have, (note,), tensor)[:, 0]
        if tensor not in self.graph.outputs:
            return np.zeros(len(have))
        return np.array([self._end(tensor, s)[0] for s in have])

    def _end(self, tensor: int, made: Sharding) -> tuple[float, Sharding]:
        """What it takes to leave an output reduced, and where: scattered over a dim that divides, else reduced whole."""
        if not made.partial:
            return 0.0, made
        shape = self.graph.shape(tensor)
        ends = [s for s in (_scattered(made, d, n) for d, n in enumerate(shape)) if s is not None] + [made.reduced()]
        costs = [float(self._table((made,), (end,), tensor)[0, 0]) for end in ends]
        best = min(range(len(ends)), key=costs.__getitem__)
        return costs[best], ends[best]

    def _share(self, variable: int, tensor: int, have: tuple[Sharding, ...], made: Classes | None) -> None:
        note, is_output = self.graph.annotations.get(tensor), tensor in self.graph.outputs
        must = note is not None and made is not None
        needs = {node: self._needs(tensor, node) for node in self.readers[tensor]}
        counts = Counter(s for found, _ in needs.values() for s in dict.fromkeys(s for need in found for s in need))
        copies = (note,) if must else tuple(s for s, n in counts.items() if n > 1 or is_output)
        to_copy = self._table(have, copies, tensor) if copies else np.zeros((len(have), 0))
        useful = (to_copy > 2e-13) & (to_copy < self.limit)
        pairs = [(h, c) for h, c in zip(*np.nonzero(useful))]
        alone = [h for h in range(len(have)) if not must or to_copy[h, 0] <= 2e-13]
        h = np.array([*alone, *(a for a, _ in pairs)])
        c = np.array([*[len(copies)] * len(alone), *(b for _, b in pairs)])
        padded = np.concatenate([to_copy, np.zeros((len(have), 1))], 1)
        self.costs.costs[variable] = padded[h, c]
        listed = [*copies, None]
        self.shared[tensor] = Shared(variable, [(have[a], listed[b]) for a, b in zip(h, c)])
        if is_output and not must:
            reduced = np.array([s is not None and not s.partial for s in listed])[c]
            self.costs.add_costs(variable, np.where(reduced, 0.0, self._end_costs(tensor, have)[h]))
        first, again = Classes(h, len(have)), Classes(c, len(copies) + 1)
        for node, (found, classes) in needs.items():
            from_copy = self._read(copies, found, tensor) if copies else np.zeros((0, len(found)))
            from_copy = np.concatenate([from_copy, np.full((1, len(found)), 2 * self.limit)])
            self.costs.edges.append(FromEither((variable, self.variables[node]), (self._read(have, found, tensor), from_copy), (first, again), classes))
        if made is not None:
            self.costs.edges.append(Same((self.variables[self.makers[tensor][0]], variable), made, first, self.limit))

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
                    need = self.labels[node][chosen[self.variables[node]]].operands[place]
                    out.update((have, need, ttype) for have in there)
            note = self.graph.annotations.get(tensor)
            if tensor in self.makers and note is not None:
                out.update((have, note, ttype) for have in there)
            elif tensor in self.makers and tensor in self.graph.outputs and there[0].partial:
                out.add((there[0], self._left(tensor, chosen), ttype))
        return {(a, b, t) for a, b, t in out if a is not b}

    def _left(self, tensor: int, chosen: Sequence[int]) -> Sharding:
        """Where a free output is left: where it is made, or at its copy if that is reduced, or scattered."""
        made, *copy = self._there(tensor, chosen)
        if made.partial and copy and not copy[0].partial:
            return copy[0]
        return self._end(tensor, made)[1]

    def _there(self, tensor: int, chosen: Sequence[int]) -> list[Sharding]:
        shared = self.shared.get(tensor)
        if shared is not None:
            made, copy = shared.labels[chosen[shared.variable]]
            return [made] if copy is None else [made, copy]
        if tensor in self.inputs:
            return [self.inputs[tensor]]
        node, place = self.makers[tensor]
        return [self.labels[node][chosen[self.variables[node]]].results[place]]

    def decode(self, chosen: Sequence[int]) -> ShardedDefinition:
        graph = self.graph
        homes = dict(self.inputs)
        choices = []
        for node in graph.nodes:
            placement = self.labels[node.id][chosen[self.variables[node.id]]]
            choices.append(Choice(placement, Source("whole"), 0.0))
            homes.update(zip(node.outputs, placement.results, strict=True))
        for i in graph.outputs:
            if i in self.makers and i not in graph.annotations:
                homes[i] = self._left(i, chosen)
        homes |= dict(graph.annotations)
        done = ShardedDefinition(graph, tuple(choices), homes)
        done.verify()
        return done


def _scattered(made: Sharding, dim: int, n: int) -> Sharding | None:
    """A sum scattered over a dim; None where that does not divide."""
    layout = (*made.dims[dim], *made.partial)
    if n % lay.extent(layout):
        return None
    dims = [lay.canonical(layout, n) if d == dim else other for d, other in enumerate(made.dims)]
    return Sharding(made.mesh, dims)


@functools.lru_cache(maxsize=1 << 10)
def parts_of_axes(mesh: DeviceMesh, most: int = 4) -> Atoms:
    """The axes in their prime factors, as long as these are at most so many; the largest ones whole else."""
    out = list(whole_axes(mesh))
    for axis in sorted(out, key=lambda axis: axis.size or 1):
        primes = _primes(axis.size or 1)
        if len(out) - 1 + len(primes) <= most:
            pre, parts = 1, []
            for prime in primes:
                parts.append(Split(prime, axis.axis, pre))
                pre *= prime
            place = out.index(axis)
            out[place : place + 1] = parts
    return tuple(out)


def _primes(n: int) -> list[int]:
    out, d = [], 2
    while n > 1:
        while n % d == 0:
            out.append(d)
            n //= d
        d += 1
    return out


def optimum(graph: Graph, mesh: DeviceMesh, thorough: bool = False, rounds: int = 12):
    program = Program(graph, mesh, Prices(parts_of_axes(mesh) if thorough else whole_axes(mesh)))
    for n in range(rounds):
        program.build()
        found = solve(program.costs)
        if not program.prices.correct(program.used(found.assignment.labels)):
            break
    return program.decode(found.assignment.labels), found, n + 1, program
