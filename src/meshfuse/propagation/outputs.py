"""Where outputs that no annotation places are left."""

from __future__ import annotations

import functools
import itertools
from collections import Counter
from collections.abc import Callable, Collection, Mapping

from ..graph import Graph, Node
from ..moves.planner import plan
from ..ops.base import Call, Rule, TensorType
from ..sharding import layout as lay
from ..sharding.layout import Split
from ..sharding.value import Sharding
from ..walks import inner_first
from .factors import following
from .sharded import ShardedDefinition


def followed(known: Mapping[int, Sharding], node: Node) -> tuple[Sharding | None, ...]:
    """The shardings of an op's results where they follow its operands, None where they cannot be laid out so."""
    return _followed(node.call, node.rule, tuple([known[i] for i in node.inputs]))


@functools.lru_cache(maxsize=1 << 13)
def _followed(call: Call, rule: Rule, operands: tuple[Sharding, ...]) -> tuple[Sharding | None, ...]:
    if not operands or any(s.mesh != operands[0].mesh for s in operands):
        return (None,) * len(call.results)
    made = following(call, rule, operands)
    return tuple(Sharding(operands[0].mesh, dims) if dims is not None else None for dims in made)


def all_followed(
    graph: Graph, inputs: Mapping[int, Sharding], otherwise: Callable[[int], Sharding]
) -> dict[int, Sharding]:
    """Every op's results if all ops followed the annotations and nothing were reduced or moved.

    `otherwise` gives the sharding of those that cannot be laid out so.
    """
    known, made = dict(inputs), dict[int, Sharding]()
    for node in graph.nodes:
        for i, sharding in zip(node.outputs, followed(known, node), strict=True):
            known[i] = made[i] = graph.annotations.get(i) or sharding or otherwise(i)
    return made


def ends(sharded: ShardedDefinition) -> dict[int, Sharding]:
    """For every output where it is left: where its op makes it, reduced.

    A free output that is a sum may be scattered to where the ops that carry it would follow their operands, if that
    takes less time: rows that are looked up in a split table by split indices stay split, by a reduce-scatter.
    """
    homes = sharded.homes
    done = {i: homes[i].reduced() for i in sharded.graph.outputs}
    if any(homes[i].partial for i in done):
        tracer = _Tracer(sharded)
        done = {i: tracer.end(i) if homes[i].partial else end for i, end in done.items()}
    return done


def over_whole_axes(graph: Graph, left: Mapping[int, Sharding], parts: Collection[str]) -> dict[int, Sharding]:
    """Places of outputs, but over all of an axis where one is over a part of it, if that divides the dim.

    `parts` are axes that are parts of one.
    """
    return {i: _over_whole_axes(end, graph.shape(i), parts) for i, end in left.items()}


def _over_whole_axes(end: Sharding, shape: tuple[int, ...], parts: Collection[str]) -> Sharding:
    sizes = dict(zip(end.mesh.names, end.mesh.shape, strict=True))
    on = [dict.fromkeys(split.axis for split in lay.axes(layout)) for layout in end.dims]
    on = [names if names.keys().isdisjoint(parts) else names | dict.fromkeys(parts) for names in on]
    used = Counter(itertools.chain.from_iterable(on))
    dims = list(end.dims)
    for d, (names, n) in enumerate(zip(on, shape, strict=True)):
        whole = tuple([Split(sizes[name], name) for name in sizes if name in names])
        grows = lay.extent(whole) > lay.extent(lay.axes(dims[d])) and not n % lay.extent(whole)
        if grows and all(used[name] == 1 for name in names):
            dims[d] = whole
    return Sharding.make(end.mesh, dims, shape)


def first_reduced(sharded: ShardedDefinition, left: Mapping[int, Sharding]) -> dict[int, Sharding]:
    """Where outputs are first reduced on their way to where they are left."""
    makers = {i: made for node, choice in zip(sharded.graph.nodes, sharded.choices, strict=True)
              for i, made in zip(node.outputs, choice.placement.results, strict=True)}  # fmt: skip
    types = sharded.graph.tensors
    return {i: _first_reduced(makers.get(i, end), end, types[i].type) for i, end in left.items()}


def _first_reduced(made: Sharding, end: Sharding, kind: TensorType) -> Sharding:
    path = plan(made, end, kind.shape, kind.dtype.itemsize) if made.mesh == end.mesh else None
    passed = [move.dst for move in path.moves] if path is not None else []
    return next((place for place in passed if not place.partial), end)


class _Tracer:
    """Follows unreduced sums back through the ops that make them."""

    def __init__(self, sharded: ShardedDefinition):
        self.graph, self.homes = sharded.graph, sharded.homes
        self.makers = {i: (node, place) for node in self.graph.nodes for place, i in enumerate(node.outputs)}
        self._known: dict[int, Sharding] = {}

    def end(self, output: int) -> Sharding:
        home, kind = self.homes[output], self.graph.tensors[output].type
        targets = [home.reduced(), self._follow(output)]
        plans = [plan(home, target, kind.shape, kind.dtype.itemsize) for target in targets]
        seconds = [p.seconds if p is not None else float("inf") for p in plans]
        return targets[1] if seconds[1] < seconds[0] else targets[0]

    def _follow(self, tensor: int) -> Sharding:
        """Where a sum would be if its op, and all ops that it carries sums from, followed their operands."""
        for i in inner_first(tensor, self._unknown_sums):
            self._known[i] = self._followed(i) if self._is_followed(i) else self.homes[i]
        return self._known[tensor]

    def _is_followed(self, tensor: int) -> bool:
        return bool(self.homes[tensor].partial) and tensor in self.makers

    def _unknown_sums(self, tensor: int) -> list[int]:
        inputs = self.makers[tensor][0].inputs if self._is_followed(tensor) else ()
        return [i for i in inputs if i not in self._known]

    def _followed(self, tensor: int) -> Sharding:
        home, (node, place) = self.homes[tensor], self.makers[tensor]
        found = followed({i: self._known[i] for i in node.inputs}, node)[place]
        return home.reduced() if found is None or found.mesh != home.mesh else found
