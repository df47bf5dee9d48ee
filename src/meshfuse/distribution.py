"""Ops that need a dim whole, rewritten where that dim is sharded: into a small graph of ordinary ops.

An op's `OpDef.distributed` writes its form for a dim that lies in equal blocks over ranks (the last may be short or
empty). What comes out is propagated, resharded and run like anything that a user writes.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from .graph import Graph, Kinds, Node, Tensor
from .ops import OPS
from .ops.base import FactorKind, TensorRef, TensorType
from .ops.binding import bind
from .propagation.sharded import ShardedDefinition
from .sharding.layout import axes, extent
from .sharding.value import Sharding


def distribute(sharded: ShardedDefinition) -> Graph:
    """The graph with distributed forms in the place of ops that would gather a sharded dim; itself if there are none."""
    chosen = {node.id: found for node in sharded.graph.nodes if (found := _blocks(sharded, node))}
    return _Rewriter(sharded.graph).run(chosen) if chosen else sharded.graph


def _blocks(sharded: ShardedDefinition, node: Node) -> tuple[int, int] | None:
    """(dim, number of blocks) where the op gathers a dim of an operand that lies in blocks over ranks."""
    if node.call.op.distributed is None:
        return None
    for tensor, dims in zip(node.inputs, node.rule.operands, strict=True):
        home = sharded.homes[tensor]
        for dim, factors in enumerate(dims):
            blocked = any(node.rule.factors[f].kind is FactorKind.BLOCK for f in factors)
            if blocked and _in_blocks(home, dim):
                return dim, extent(axes(home.dims[dim]))
    return None


def _in_blocks(home: Sharding, dim: int) -> bool:
    return bool(home.dims[dim]) and all(split.bound for split in home.dims[dim])


class Rewriter:
    """What a distributed form is written with: `call` appends an op of the table; `type` tells what a tensor is."""

    def __init__(self, graph: Graph):
        self.graph = graph
        self.tensors: list[Tensor] = list(graph.tensors)
        self.nodes: list[Node] = []
        self._kinds = Kinds()
        self._origin: Node | None = None

    def type(self, ref: TensorRef) -> TensorType:
        return self.tensors[ref.id].type

    def call(self, name: str, *args: Any, **kwargs: Any) -> Any:
        """Apply an op to tensors (by reference), sizes and numbers: a reference, or a tuple of them."""
        assert self._origin is not None
        op = OPS[name]
        bound = bind(op, args, kwargs, lambda value: value)
        inputs = [arg.id for arg in bound if isinstance(arg, TensorRef)]
        inputs += [ref.id for arg in bound if type(arg) is tuple for ref in arg if isinstance(ref, TensorRef)]
        call, rule = self._kinds.get(op, bound, tuple(self.tensors[i].type for i in inputs))
        made = [self._new(kind) for kind in call.results]
        ids = tuple(ref.id for ref in made)
        node = Node(len(self.nodes), call, rule, tuple(inputs), ids, self._origin.line, self._origin.origin)
        self.nodes.append(node)
        return made[0] if len(made) == 1 else tuple(made)

    def _new(self, kind: TensorType) -> TensorRef:
        assert self._origin is not None
        tensor = Tensor(len(self.tensors), kind, self._origin.line)
        self.tensors.append(tensor)
        return TensorRef(tensor.id)


class _Rewriter(Rewriter):
    def run(self, chosen: dict[int, tuple[int, int]]) -> Graph:
        numbers: dict[int, int] = {}
        for node in self.graph.nodes:
            if node.id in chosen:
                self._replace(node, *chosen[node.id])
            else:
                numbers[node.id] = len(self.nodes)
                self.nodes.append(dataclasses.replace(node, id=len(self.nodes)))
        reductions = {numbers[i]: layouts for i, layouts in self.graph.reductions.items() if i in numbers}
        return dataclasses.replace(
            self.graph, tensors=tuple(self.tensors), nodes=tuple(self.nodes), reductions=reductions
        )

    def _replace(self, node: Node, dim: int, blocks: int) -> None:
        """Write the form, and let its last ops make the tensors that the op made."""
        self._origin = node
        form = node.call.op.distributed
        assert form is not None
        start = len(self.nodes)
        results = form(self, node.call, tuple(map(TensorRef, node.inputs)), dim, blocks)
        if results is None:
            self.nodes.append(dataclasses.replace(node, id=len(self.nodes)))
            return
        renamed = {made.id: old for made, old in zip(results, node.outputs, strict=True)}
        for place in range(start, len(self.nodes)):
            made = self.nodes[place]
            inputs = tuple(renamed.get(i, i) for i in made.inputs)
            outputs = tuple(renamed.get(i, i) for i in made.outputs)
            self.nodes[place] = dataclasses.replace(made, inputs=inputs, outputs=outputs)
        self._origin = None
