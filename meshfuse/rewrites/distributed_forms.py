"""Ops that need a dim whole, where it is sharded, written as a small graph of ordinary ops.

An op's `OpDef.distributed` writes it for one sharded dim, which the plain op would have to gather. This form is
propagated, resharded and run like anything that a user writes. It is taken where the plan's modelled time is less with
it than with the plain op, which may also move the sharding to another dim.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

from ..errors import DefinitionError
from ..graph import Graph, Node
from ..ops.rules import Factor, FactorKind, Rule
from ..ops.values import TensorRef
from ..propagation import Propagation, ShardedDefinition
from ..sharding.layout import Layout, axes, extent
from ..sharding.value import Sharding
from .graph_writer import GraphWriter, without_unread


class Blocked(NamedTuple):
    """A sharded dim of an operand that an op needs whole.

    `pieces`: in how many equal ones it is cut, so that each lies on one rank. `strided`: a rank has several that are
    not neighbours, as where a merged dim is sharded by its minor part.
    """

    operand: int
    dim: int
    pieces: int
    strided: bool = False

    @property
    def blocks(self) -> int:
        """In how many blocks the dim lies over ranks, 0 where it does not lie in blocks."""
        return 0 if self.strided else self.pieces


Forms = Mapping[int, Blocked]  # ops by number, and for which dim of theirs the form is


@dataclass(frozen=True, slots=True)
class Distributed:
    """The rewriting of ops, by number, in their distributed forms for these dims."""

    forms: tuple[tuple[int, Blocked], ...]
    sized: ClassVar[bool] = False

    def __call__(self, graph: Graph) -> Graph:
        forms = dict(self.forms)
        return without_unread(_FormWriter(graph, forms).run(forms)).with_rewrite(self)


def apply_distributed_forms(graph: Graph, plan: Propagation) -> ShardedDefinition:
    """A plan of the graph, with ops in their distributed forms where that is cheaper.

    To see which dims would be sharded if nothing had to be whole, the graph is first propagated as if that were so.
    Else a plan may gather a dim long before the op that, in its distributed form, would not need it whole.
    """
    if not any(node.call.has_form for node in graph.nodes):
        return plan(graph)
    probe = plan(_optimistic(graph))
    groups = _Chooser(graph, probe, plan).groups()
    if not groups and _holds(graph, probe):
        return dataclasses.replace(probe, graph=graph)
    return _settled(graph, groups, plan)


def _holds(graph: Graph, probe: ShardedDefinition) -> bool:
    """Whether that first plan leaves whole all that ops with a distributed form need whole."""
    return all(
        not layout
        for node, choice in zip(graph.nodes, probe.choices, strict=True)
        if node.call.has_form
        for factor, layout in zip(node.rule.factors, choice.placement.layouts, strict=True)
        if factor.kind is FactorKind.BLOCK
    )


def _settled(graph: Graph, groups: list[Forms], plan: Propagation) -> ShardedDefinition:
    """The best plan over these groups of forms: a group is dropped if the whole is no dearer without it."""
    best = plan(_written(graph, groups))
    for group in list(groups):
        without = [other for other in groups if other is not group]
        found = plan.simpler(best, _written(graph, without))
        if found is not best:
            groups, best = without, found
    return best


def _written(graph: Graph, groups: Sequence[Forms]) -> Graph:
    chosen = {node: where for group in groups for node, where in group.items()}
    return with_forms(graph, chosen) if chosen else graph


def with_forms(graph: Graph, forms: Forms) -> Graph:
    """The graph with these ops in their distributed forms, whatever that costs; ops without one stay."""
    return Distributed(tuple(forms.items()))(graph)


def _optimistic(graph: Graph) -> Graph:
    """The graph in which ops that have a distributed form take sharded dims as they are."""
    rules: dict[int, Rule] = {}
    nodes = []
    for node in graph.nodes:
        if node.call.has_form:
            node = dataclasses.replace(node, rule=rules.setdefault(id(node.rule), _opened(node.rule)))
        nodes.append(node)
    return dataclasses.replace(graph, nodes=tuple(nodes))


def _opened(rule: Rule) -> Rule:
    """The rule with its blocked factors passing through.

    The dim along which a cat joins becomes one factor of all operands: else all but one of them would be gathered for
    it.
    """
    factors = tuple([Factor(f.size) if f.kind is FactorKind.BLOCK else f for f in rule.factors])
    made = rule.results[0]
    joined = [d for d in range(len(made)) if _is_put_together(rule, d)]
    operands = [tuple([made[d] if d in joined else f for d, f in enumerate(dims)]) for dims in rule.operands]
    return dataclasses.replace(rule, factors=factors, operands=tuple(operands))


def _is_put_together(rule: Rule, dim: int) -> bool:
    """Whether this dim of the result is the operands' dims one after the other."""
    tensors = (*rule.results, *rule.operands)
    if len(rule.operands) == 1 or any(len(dims) <= dim or len(dims[dim]) != 1 for dims in tensors):
        return False
    made, *parts = (rule.factors[dims[dim][0]] for dims in tensors)
    return made.kind is FactorKind.BLOCK and made.size == sum(f.size for f in parts if f.kind is FactorKind.BLOCK)


class _Chooser:
    """Compares an op's distributed forms with the plain op, by itself, from the shardings that its operands have."""

    def __init__(self, graph: Graph, probe: ShardedDefinition, plan: Propagation):
        self.graph, self.shardings, self.plan = graph, probe.shardings, plan
        self.read = {i for node in graph.nodes for i in node.inputs} | set(graph.outputs)

    def groups(self) -> list[Forms]:
        """The forms that pay, one group for all ops that have the same choice, such as those of a model's layers."""
        alike: dict[Any, list[Node]] = {}
        for node in self.graph.nodes:
            if node.call.has_form:
                alike.setdefault(self._kind(node), []).append(node)
        found = [(nodes, self._cheapest(nodes[0])) for nodes in alike.values()]
        return [dict.fromkeys((n.id for n in nodes), where) for nodes, where in found if where is not None]

    def _kind(self, node: Node) -> Any:
        """Equal for ops that have the same choice to make."""
        places = tuple(node.inputs.index(i) for i in node.inputs)
        asked = tuple(self.graph.annotations.get(i, i in self.read) for i in node.outputs)
        return (node.call, places, tuple(self.shardings[i] for i in node.inputs), asked)

    def _cheapest(self, node: Node) -> Blocked | None:
        """The dim whose distributed form is the cheapest; None where the plain op is as cheap."""
        found = list(_blocked(node, [self.shardings[i] for i in node.inputs]))
        if not found:
            return None
        alone = self._alone(node)
        forms = [(form, with_forms(alone, {0: form})) for form in found]
        written = [(form, graph) for form, graph in forms if graph.nodes != alone.nodes]
        costs = [(self._seconds(graph), form) for form, graph in written]
        best = min(costs, key=lambda entry: entry[0], default=None)
        # The form leaves the result where readers have it; what does not pay in the whole is dropped by `_settled`.
        plain = self._seconds(self._alone(node, back=True))
        return best[1] if best is not None and best[0] < plain else None

    def _seconds(self, graph: Graph) -> float:
        """The modelled time of a graph; without end where it moves a tensor that is to stay."""
        try:
            return self.plan(graph).seconds
        except DefinitionError:
            return math.inf

    def _alone(self, node: Node, back: bool = False) -> Graph:
        """A graph of this op alone, its operands annotated where they are; with `back` its results as well."""
        inputs = tuple(dict.fromkeys(node.inputs))
        known = {i: self.shardings[i].reduced() for i in inputs}
        known |= {i: self.shardings[i].reduced() for i in node.outputs if back and i in self.read}
        known |= {i: self.graph.annotations[i] for i in node.outputs if i in self.graph.annotations}
        return dataclasses.replace(
            self.graph,
            nodes=(dataclasses.replace(node, id=0),),
            inputs=tuple(map(TensorRef, inputs)),
            outputs=tuple(i for i in node.outputs if i in self.read),
            annotations=known,
            reductions={},
            stationary={i: kept for i, kept in self.graph.stationary.items() if i in inputs},
            annotation_lines=dict.fromkeys(known, node.line),
        )


def _blocked(node: Node, shardings: Sequence[Sharding]) -> Iterator[Blocked]:
    """The sharded dims of operands that the op needs whole; if it needs none whole, those that it sums over."""
    kinds = [factor.kind for factor in node.rule.factors]
    asked = FactorKind.BLOCK if FactorKind.BLOCK in kinds else FactorKind.REDUCE
    for operand, (sharding, dims) in enumerate(zip(shardings, node.rule.operands, strict=True)):
        for dim, factors in enumerate(dims):
            if axes(sharding.dims[dim]) and any(kinds[f] is asked for f in factors):
                yield blocked(operand, dim, sharding.dims[dim])


def blocked(operand: int, dim: int, layout: Layout) -> Blocked:
    """A dim that is sharded in this layout."""
    return Blocked(operand, dim, extent(layout), not all(split.bound for split in layout))


class _FormWriter(GraphWriter):
    """Writes ops in their forms for sharded dims."""

    def __init__(self, graph: Graph, forms: Forms):
        super().__init__(graph)
        self.forms = forms

    def form(self, node: Node) -> Sequence[TensorRef] | None:
        assert node.call.op.distributed is not None
        where = self.forms[node.id]
        self.operand, self.pieces = where.operand, where.pieces
        return node.call.op.distributed(self, node.call, tuple(map(TensorRef, node.inputs)), where.dim, where.blocks)
