"""Ops that the user asked to be computed in rounds (`OpDef.ring_schedule`), written out as ordinary ops and moves.

Propagation treats such an op as if it were computed where its operands lie, so that nothing is gathered for it. Here it
becomes the rounds: ops that follow their operands' shardings, and blocks that travel from rank to rank in between.
Where the plain op is local anyway it stays.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence

from ..graph import Graph, Node
from ..ops.opdef import Call
from ..ops.rules import Rule
from ..ops.values import TensorRef
from ..placement.factors import NO_CARRY, Carry, Placement, carries, layouts_of, merged, placed, representable
from ..placement.options import Choice, Source
from ..propagation import ShardedDefinition
from ..reshard.prices import price
from ..reshard.windows import window_of, window_step
from ..sharding.layout import WHOLE
from ..sharding.value import Sharding
from .graph_writer import GraphWriter


def lower_ring_ops(sharded: ShardedDefinition) -> ShardedDefinition:
    """The plan with such ops written out; itself if there are none."""
    graph = sharded.graph
    if not any(node.call.op.ring_schedule for node in graph.nodes):
        return sharded
    pairs = list(zip(graph.nodes, sharded.choices, strict=True))
    plain = [_plain(node, choice, sharded.shardings) for node, choice in pairs]
    nodes, choices = zip(*(made or pair for made, pair in zip(plain, pairs, strict=True)), strict=True)
    settled = dataclasses.replace(sharded, graph=dataclasses.replace(graph, nodes=nodes), choices=choices)
    rounds = {node.id for node, made in zip(nodes, plain, strict=True) if made is None}
    if not rounds:
        return settled
    return _Follower(settled, _RoundsWriter(settled.graph).run(rounds)).run()


def _plain(node: Node, choice: Choice, shardings: Mapping[int, Sharding]) -> tuple[Node, Choice] | None:
    """The plain op's placement, if its operands lie as its own rule takes them; else None.

    So keys and values that are whole on every rank do not go round.
    """
    if node.call.op.ring_schedule is None:
        return node, choice
    rule, asked = node.call.op.rule(node.call), choice.placement
    for operands in (asked.operands, tuple(shardings[i].reduced() for i in node.inputs)):
        found = _following(node.call, rule, operands)
        if found is not None and (found.operands, found.results) == (operands, asked.results):
            return dataclasses.replace(node, rule=rule), dataclasses.replace(choice, placement=found)
    return None


def _following(call: Call, rule: Rule, operands: Sequence[Sharding], carry: Carry = NO_CARRY) -> Placement | None:
    """The op's placement where its operands lie."""
    rows = zip(rule.operands, call.types, operands, strict=True)
    votes = [layouts_of(rule, dims, ttype.shape, sharding.dims) for dims, ttype, sharding in rows]
    return placed(call, rule, operands[0].mesh, representable(rule, merged(votes, carry.axes)), carry)


class _RoundsWriter(GraphWriter):
    def form(self, node: Node) -> Sequence[TensorRef]:
        assert node.call.op.ring_schedule is not None
        return node.call.op.ring_schedule.write(self, node.call, tuple(map(TensorRef, node.inputs)))


class _Follower:
    """Places the ops of rounds where their operands lie; all other ops stay where they were."""

    def __init__(self, sharded: ShardedDefinition, graph: Graph):
        self.sharded, self.graph = sharded, graph
        self.shardings = dict(sharded.shardings)
        pairs = list(zip(sharded.graph.nodes, sharded.choices, strict=True))
        self.kept = {node.outputs: choice for node, choice in pairs}
        self.calls = {node.outputs: node.call for node, _ in pairs}
        self.asked = {node.origin: (node, choice.placement) for node, choice in pairs if node.call.op.ring_schedule}

    def run(self) -> ShardedDefinition:
        choices = [self._choice(node) for node in self.graph.nodes]
        done = ShardedDefinition(self.graph, tuple(choices), self.shardings)
        done.verify()
        return done

    def _choice(self, node: Node) -> Choice:
        if self.calls.get(node.outputs) is node.call:
            return self.kept[node.outputs]
        placement = self._placement(node)
        rows = zip(node.outputs, placement.results, strict=True)
        self.shardings.update((i, made) for i, made in rows if i not in self.graph.annotations)
        seconds = 0.0
        if placement.step is not None:
            ttype = node.call.types[0]
            seconds = price(placement.step, ttype.shape, ttype.dtype.itemsize).seconds
        return Choice(placement, Source("operand" if node.inputs else "whole"), seconds)

    def _placement(self, node: Node) -> Placement:
        operands = list(self._operands(node))
        window = window_of(node.call)
        if window is not None and any(dim and window.changes(d) for d, dim in enumerate(operands[0].dims)):
            (src,) = operands
            return Placement((WHOLE,) * len(node.rule.factors), (src,), (src,), step=window_step(src, src, window))
        found = self._unreduced(node, operands) if operands else self._everywhere(node)
        assert found is not None, node
        return found

    def _unreduced(self, node: Node, operands: Sequence[Sharding]) -> Placement | None:
        """The op's placement where its operands lie, carrying what is unreduced of them if it can."""
        carry = carries(node.call, node.rule, [[operand] for operand in operands])
        if carry is not None:
            return _following(node.call, node.rule, operands, carry)
        return _following(node.call, node.rule, [operand.reduced() for operand in operands])

    def _operands(self, node: Node) -> Iterator[Sharding]:
        """Where the op's operands lie; of the op in rounds, where it asked for them."""
        whole, asked = self.asked[node.origin]
        taken = dict(zip(whole.inputs, asked.operands, strict=True))
        return (taken.get(i) or self.shardings[i] for i in node.inputs)

    def _everywhere(self, node: Node) -> Placement | None:
        mesh = self.asked[node.origin][1].operands[0].mesh
        return placed(node.call, node.rule, mesh, (WHOLE,) * len(node.rule.factors))
