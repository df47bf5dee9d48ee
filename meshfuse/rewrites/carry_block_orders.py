"""Rows that a ring takes in another order, kept in that order by all that works row by row.

Let P put the blocks of a dim in another order, such as the zig-zag order of ring attention. Where an op's rule has the
dim as a plain factor, f(P x) = P f(x) if P is applied to all operands that have the factor; and where the op sums over
the factor, f(P x) = f(x). So P and its inverse move along such ops, and vanish where they meet. In a transformer they
are left at its ends: token ids and targets are put in that order, and positions made in it.

Which tensors are in order, which in P's, and which are made in both, is the cheapest choice by the bytes of those that
are made in both: a minimum cut, for which the planner's solver is exact. To put each operand of a ring in order for
itself is one of the choices, so the graph never gets worse.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from ..graph import Carried, Graph, Node, numbered
from ..ops.block_order import zigzag_order
from ..ops.opdef import BlockOrder, Call
from ..ops.rules import DimFactors, FactorKind, Rule
from ..ops.values import TensorRef
from ..planner.cost_graph import CostGraph, Dense
from ..planner.dual_ascent import solve
from .graph_writer import GraphWriter, with_nodes

# Tensors that depend on no input are made in any order at the cost of computing them once more.
_MADE_ANEW = 1 / 64
_CARRIED = 1  # The label of ops that work on carried tensors; 0 is in order.


class _Version(NamedTuple):
    """What a tensor is: another one (or itself) as it is, or with the blocks of a dim in the other order."""

    tensor: int
    is_carried: bool


class _Spot(NamedTuple):
    """Which part of a dim has the blocks: the dim is [outer, blocks, the rest]."""

    dim: int
    outer: int


class _Inside(NamedTuple):
    """The factor of an op's rule that has the blocks: it is [outer, blocks, the rest]."""

    factor: int
    outer: int


def carry_block_orders(graph: Graph) -> Graph:
    """The graph with a zig-zag order of rows carried as far as that is cheapest; itself where that saves nothing."""
    order = _zigzag_order(graph)
    if order is None:
        return graph
    orders = _Orders(graph, order)
    carried = _CarryingWriter(graph, orders, _chosen(graph, orders)).carried()
    return carried if _reordered_bytes(carried) < _reordered_bytes(graph) else graph


def _reordered_bytes(graph: Graph) -> int:
    types = (node.call.results[0] for node in graph.nodes if _block_order(node) is not None)
    return sum(t.numel * t.dtype.itemsize for t in types)


def _zigzag_order(graph: Graph) -> tuple[int, ...] | None:
    """The zig-zag order that an op puts blocks into, or takes them out of."""
    for node in graph.nodes:
        found = _block_order(node)
        if found is not None and len(found.order) > 2:
            order = zigzag_order(len(found.order) // 2)
            if found.order in (order, _inverse(order)):
                return order
    return None


def _inverse(order: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(sorted(range(len(order)), key=order.__getitem__))


def _block_order(node: Node) -> BlockOrder | None:
    window = node.call.op.window(node.call) if node.call.op.window is not None else None
    return window if isinstance(window, BlockOrder) else None


class _Orders:
    """What may be carried in an order.

    versions: by tensor that an op made by reordering another (or of which it did) what it is a version of.
    dropped: the numbers of these ops; makers: by version the first of them that makes it.
    spots: by tensor that may be carried where its blocks are.
    factors: by op that may work on carried tensors the factor of its rule that has the blocks.
    """

    def __init__(self, graph: Graph, order: tuple[int, ...]) -> None:
        self.graph, self.order = graph, order
        self.inverse = _inverse(order)
        self.versions: dict[int, _Version] = {}
        self.dropped: set[int] = set()
        self.makers: dict[_Version, Node] = {}
        self.spots: dict[int, _Spot] = {}
        self.factors: dict[int, _Inside] = {}
        self._near: dict[int, list[Node]] = {}
        for node in graph.nodes:
            self._read_order(node)
        for node in graph.nodes:
            for version, _ in self._sides(node) if node.id not in self.dropped else ():
                self._near.setdefault(version.tensor, []).append(node)
        self._spread()

    def version(self, tensor: int) -> _Version:
        return self.versions.get(tensor, _Version(tensor, False))

    def _read_order(self, node: Node) -> None:
        """See what an op that reorders blocks makes as a version of what it reads, or the other way round."""
        found = _block_order(node)
        if found is None or found.order not in (self.order, self.inverse):
            return
        (given,), (made,) = node.inputs, node.outputs
        ndim = node.call.results[0].ndim
        spot, known = _Spot(found.dim % ndim, 1), self.version(given)
        if found.order == self.order and not known.is_carried:
            self._relate(node, made, known.tensor, True, spot)
        elif found.order == self.inverse and known.is_carried:
            self._relate(node, made, known.tensor, False, spot)
        elif found.order == self.inverse and given not in self.spots:
            self._relate(node, given, made, True, spot)

    def _relate(self, node: Node, tensor: int, of: int, is_carried: bool, spot: _Spot) -> None:
        streams = self.graph.streams
        if self.spots.get(of, spot) == spot and tensor not in streams and of not in streams:
            self.spots[of] = spot
            self.versions[tensor] = _Version(of, is_carried)
            self.dropped.add(node.id)
            self.makers.setdefault(self.version(node.outputs[0]), node)

    def _spread(self) -> None:
        """Find all tensors that may be carried with those of the rings."""
        waiting = list(self.spots)
        while waiting:
            tensor = waiting.pop()
            for node in self._near.get(tensor, ()):
                if node.id not in self.factors:
                    waiting += self._join(node, tensor)

    def _join(self, node: Node, tensor: int) -> list[int]:
        """Let an op work on a carried tensor if it may; the tensors that may then be carried as well."""
        spots = (_inside_at(node.rule, dims, self.spots[tensor], len(self.order))
                 for version, dims in self._sides(node) if version == (tensor, False))  # fmt: skip
        inside = next(filter(None, spots), None)
        if inside is None or not keeps_order(node.call, node.rule, inside.factor):
            return []
        found: dict[int, _Spot] = {}
        for (i, is_carried), dims in self._sides(node):
            spot = _spot_of(node.rule, dims, inside)
            if spot is None:
                continue
            if is_carried or i in self.graph.streams or found.get(i, self.spots.get(i, spot)) != spot:
                return []
            found[i] = spot
        new = [i for i in found if i not in self.spots]
        self.spots.update(found)
        self.factors[node.id] = inside
        return new

    def _sides(self, node: Node) -> Iterator[tuple[_Version, DimFactors]]:
        """(what it is, factors of its dims) of all operands and results."""
        for i, dims in (*zip(node.inputs, node.rule.operands, strict=True),
                        *zip(node.outputs, node.rule.results, strict=True)):  # fmt: skip
            yield self.version(i), dims

    def uses(self, node: Node) -> list[tuple[_Version, bool]]:
        """(what it is, whether it has the op's factor in blocks) of all operands and then all results."""
        inside = self.factors.get(node.id)
        return [(version, inside is not None and _spot_of(node.rule, dims, inside) is not None)
                for version, dims in self._sides(node)]  # fmt: skip


def keeps_order(call: Call, rule: Rule, factor: int) -> bool:
    """Whether an op commutes with another order of a factor, in all operands and results that have it."""
    op = call.op
    read = [any(factor in factors for factors in dims) for dims in rule.operands]
    kind = rule.factors[factor].kind
    if kind is FactorKind.BLOCK:
        return False
    if op.order_free:
        places = [call.first_operand(name) for name in op.order_free]
        return all(read[place] for place in places)
    return op.concat_distributive and (kind is FactorKind.PASS or all(read))


def _inside_at(rule: Rule, dims: DimFactors, spot: _Spot, blocks: int) -> _Inside | None:
    """The factor of a dim that has its blocks, if it is one by itself that they divide."""
    before = 1
    for factor in dims[spot.dim]:
        size = rule.factors[factor].size
        outer, rest = divmod(spot.outer, before)
        if not rest and outer and size % (outer * blocks) == 0:
            return _Inside(factor, outer)
        before *= size
    return None


def _spot_of(rule: Rule, dims: DimFactors, inside: _Inside) -> _Spot | None:
    """Where a tensor has the blocks of a factor; None where it has not that factor."""
    for dim, factors in enumerate(dims):
        if inside.factor in factors:
            before = factors[: factors.index(inside.factor)]
            return _Spot(dim, math.prod(rule.factors[f].size for f in before) * inside.outer)
    return None


# the choice -------------------------------------------------------------------------------------------------------


def _chosen(graph: Graph, orders: _Orders) -> frozenset[int]:
    """The ops that work on carried tensors: the cheapest choice of a label for each, and of versions of tensors."""
    weights = _weights(graph, orders)
    never = 2 * sum(weights.values()) + 1.0
    problem = CostGraph()
    tensors = {i: problem.add_variable([0.0, 0.0, weight]) for i, weight in weights.items()}
    nodes = {node: problem.add_variable([0.0, 0.0]) for node in orders.factors}
    agree = np.array([[0.0, never, 0.0], [never, 0.0, 0.0]])

    def ask(version: _Version) -> None:
        """Have a version of a tensor be there, whatever is chosen."""
        if version.tensor in tensors:
            problem.add_costs(tensors[version.tensor], agree[int(version.is_carried)])

    for i in (*graph.outputs, *graph.input_tensors):
        ask(orders.version(i))
    for node in graph.nodes:
        if node.id in orders.dropped:
            continue
        for version, is_in_blocks in orders.uses(node):
            if is_in_blocks:
                problem.edges.append(Dense((nodes[node.id], tensors[version.tensor]), agree))
            else:
                ask(version)
    labels = solve(problem).assignment.labels
    return frozenset(node for node, variable in nodes.items() if labels[variable] == _CARRIED)


def _weights(graph: Graph, orders: _Orders) -> dict[int, float]:
    """By tensor that may be carried what it costs to have it in both orders."""
    given = set(graph.input_tensors)
    for node in graph.nodes:
        if given.intersection(node.inputs):
            given.update(node.outputs)
    types = {i: graph.tensors[i].type for i in orders.spots}
    return {i: float(t.numel * t.dtype.itemsize) * (1.0 if i in given else _MADE_ANEW) for i, t in types.items()}


# the graph --------------------------------------------------------------------------------------------------------


class _CarryingWriter(GraphWriter):
    """Writes the graph in which these ops work on carried tensors.

    A tensor has its number in the order in which it is made; its other version is a new tensor.
    """

    def __init__(self, graph: Graph, orders: _Orders, chosen: frozenset[int]) -> None:
        super().__init__(graph)
        self.orders, self.chosen = orders, chosen
        self._numbers: dict[_Version, int] = {orders.version(i): i for i in graph.input_tensors}
        self._is_carried: set[int] = set()

    def carried(self) -> Graph:
        numbers: dict[int, int] = {}
        for node in self.graph.nodes:
            if node.id not in self.orders.dropped:
                self._origin = node
                uses = self._uses(node)
                inputs = [self._number(version) for version in uses[: len(node.inputs)]]
                made = [self._make(version) for version in uses[len(node.inputs) :]]
                numbers[node.id] = len(self.nodes)
                self.nodes.append(replace(numbered(node, len(self.nodes), tuple(inputs)), outputs=tuple(made)))
        outputs = tuple(self._number(self.orders.version(i)) for i in self.graph.outputs)
        graph = with_nodes(self.graph, self.tensors, self.nodes, numbers)
        carried = {i: Carried(*self.orders.spots[i], self.orders.order) for i in self._is_carried}
        return self._with_annotations(replace(graph, outputs=outputs, carried=carried))

    def _uses(self, node: Node) -> list[_Version]:
        """In which versions an op reads and makes tensors."""
        is_chosen = node.id in self.chosen
        return [_Version(version.tensor, version.is_carried or (is_chosen and is_in_blocks))
                for version, is_in_blocks in self.orders.uses(node)]  # fmt: skip

    def _make(self, version: _Version) -> int:
        self._numbers[version] = version.tensor
        self._is_carried |= {version.tensor} if version.is_carried else set()
        return version.tensor

    def _number(self, version: _Version) -> int:
        """The number of a version of a tensor, which is made of the other one if it is not there."""
        if version not in self._numbers:
            order = self.orders.order if version.is_carried else self.orders.inverse
            other = version._replace(is_carried=not version.is_carried)
            self._origin = self.orders.makers.get(version, self._origin)  # the user's line
            self._numbers[version] = self._reordered(self._numbers[other], self.orders.spots[version.tensor], order)
        return self._numbers[version]

    def _reordered(self, tensor: int, spot: _Spot, order: tuple[int, ...]) -> int:
        shape, (dim, outer) = self.graph.shape(tensor), spot
        if outer == 1:
            return self.call("reorder_blocks", TensorRef(tensor), dim, order).id
        apart = (*shape[:dim], outer, shape[dim] // outer, *shape[dim + 1 :])
        parts = self.call("reorder_blocks", self.call("reshape", TensorRef(tensor), apart), dim + 1, order)
        return self.call("reshape", parts, shape).id

    def _with_annotations(self, graph: Graph) -> Graph:
        """Each version of a tensor lies as the user has said of it, or else of the other."""
        said = {i for i in self.graph.annotations if i not in self.graph.input_tensors}
        of = {version.tensor: i for i, version in self.orders.versions.items() if i in said} | {i: i for i in said}
        of = {number: of[version.tensor] for version, number in self._numbers.items() if version.tensor in of}
        of |= {i: i for i in self.graph.input_tensors}
        names = ("annotations", "annotation_lines", "implied", "stationary", "once_in")
        tables = {name: getattr(self.graph, name) for name in names}
        return replace(graph, **{name: {i: table[j] for i, j in of.items() if j in table}
                                 for name, table in tables.items()})  # fmt: skip
