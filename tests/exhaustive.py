"""The best plan of a small program by trying every placement of every op, to hold planning to.

A placement puts each axis of the mesh, whole, on one of the op's factors or on none; sums may stay unreduced as long as
ops carry them, and one that nobody places is left scattered over a dim or reduced. A plan costs the seconds of its
moves and of its computation. Parts of plans that cost more than the best one so far are not gone on with.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from meshfuse.graph import Graph, Node
from meshfuse.mesh import DeviceMesh
from meshfuse.ops.rules import FactorKind, Rule
from meshfuse.placement.factors import NO_CARRY, Carry, Layouts, Placement, carries, placed
from meshfuse.placement.options import cheapest
from meshfuse.sharding.layout import WHOLE, Layout, Split, canonical, extent
from meshfuse.sharding.value import Sharding

Homes = Mapping[int, tuple[Sharding, ...]]


def _layouts(rule: Rule, axes: Sequence[Split]) -> Iterator[Layouts]:
    """Every way to put axes on factors that they divide, in every order."""
    free = [None, *(f for f, factor in enumerate(rule.factors) if factor.kind is not FactorKind.BLOCK)]
    found: dict[Layouts, None] = {}
    for order in itertools.permutations(axes):
        for places in itertools.product(free, repeat=len(order)):
            made: list[Layout] = [WHOLE] * len(rule.factors)
            for place, axis in zip(places, order, strict=True):
                if place is not None:
                    made[place] = (*made[place], axis)
            sizes = [factor.size for factor in rule.factors]
            if all(n % extent(layout) == 0 for n, layout in zip(sizes, made, strict=True)):
                found[tuple([canonical(layout, n) for n, layout in zip(sizes, made, strict=True)])] = None
    yield from found


@dataclass(slots=True)
class Exhaustive:
    """The search; `limit` is what a plan must cost less than, and in the end what the best one costs."""

    graph: Graph
    mesh: DeviceMesh
    limit: float
    _seen: dict[object, float] = field(default_factory=dict)
    _placements: dict[tuple[int, Carry], list[Placement]] = field(default_factory=dict)

    def run(self) -> float:
        """What the best plan costs; the limit if none costs less."""
        graph = self.graph
        shardings = {i: (graph.annotations.get(i) or Sharding.replicated(self.mesh, len(graph.shape(i))),)
                 for i in graph.input_tensors}  # fmt: skip
        self._go_on(0, 0.0, 0.0, shardings)
        return self.limit

    def _go_on(self, at: int, moving: float, computing: float, shardings: Homes) -> None:
        if at == len(self.graph.nodes):
            moving += sum([self._to_the_end(i, shardings[i]) for i in self.graph.outputs])
            self.limit = min(self.limit, moving + computing)
            return
        cost, state = moving + computing, (at, frozenset(shardings.items()))
        if self._seen.get(state, math.inf) <= cost:
            return
        self._seen[state] = cost
        for more, work, then in sorted(self._ways(self.graph.nodes[at], shardings), key=lambda way: way[0] + way[1]):
            if cost + more + work >= self.limit:
                return
            self._go_on(at + 1, moving + more, computing + work, self._read_later(at, then))

    def _ways(self, node: Node, shardings: Homes) -> Iterator[tuple[float, float, Homes]]:
        """(seconds of moves, of computation, where everything then is), for each placement."""
        held = [shardings[i] for i in node.inputs]
        carry = carries(node.call, node.rule, held) if any(s.partial for here in held for s in here) else None
        for placement in (*self._placed(node, NO_CARRY), *(self._placed(node, carry) if carry else ())):
            moving, then = 0.0, dict(shardings)
            for i, need in zip(node.inputs, placement.operands, strict=True):
                moving += self._cheapest(i, then[i], need)
                then[i] = then[i] if need in then[i] else (*then[i], need)
            if math.isfinite(moving):
                then.update((i, (made,)) for i, made in zip(node.outputs, placement.results, strict=True))
                yield moving, max(node.call.op.flops(node.call), 1.0) / placement.ways / self.mesh.flops, then

    def _placed(self, node: Node, carry: Carry) -> list[Placement]:
        key = node.id, carry
        if key not in self._placements:
            taken = {split.axis for split in carry.axes}
            axes = [
                Split(n, name) for n, name in zip(self.mesh.shape, self.mesh.names, strict=True) if name not in taken
            ]
            made = [placed(node.call, node.rule, self.mesh, ways, carry) for ways in _layouts(node.rule, axes)]
            self._placements[key] = [placement for placement in made if placement is not None]
        return self._placements[key]

    def _cheapest(self, tensor: int, here: tuple[Sharding, ...], need: Sharding) -> float:
        kind = self.graph.tensors[tensor].type
        return cheapest(here, need, kind.shape, kind.dtype.itemsize)

    def _to_the_end(self, tensor: int, here: tuple[Sharding, ...]) -> float:
        note = self.graph.annotations.get(tensor)
        ends = [note] if note else [end for s in here for end in _ends(s, self.graph.shape(tensor))]
        return min([self._cheapest(tensor, here, end) for end in ends])

    def _read_later(self, at: int, shardings: Homes) -> Homes:
        later = {i for node in self.graph.nodes[at + 1 :] for i in node.inputs}.union(self.graph.outputs)
        return {i: here for i, here in shardings.items() if i in later}


def _ends(made: Sharding, shape: Sequence[int]) -> Iterator[Sharding]:
    """Where an output that nobody places may be left."""
    yield made.reduced()
    for d, n in enumerate(shape if made.partial else ()):
        layout = (*made.dims[d], *made.partial)
        if not n % extent(layout):
            yield made.reduced().with_dims([canonical(layout, n) if e == d else o for e, o in enumerate(made.dims)])
