"""Ops that need a dim whole, rewritten where that dim is sharded: into a small graph of ordinary ops.

An op's `OpDef.distributed` writes its form for one sharded dim that its plain form would put together. The form is
propagated, resharded and run like anything that a user writes. It is taken where the modelled time of the plan is
less with it than with the plain op, which may also move the sharding to another dim.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from .graph import Graph, Kinds, Node, Tensor, numbered
from .mesh import DeviceMesh
from .ops.base import Factor, FactorKind, OpDef, Rule, TensorRef, TensorType
from .ops.binding import bind
from .ops.registry import find
from .propagation.growth import EPSILON
from .propagation.propagate import SMALL, propagate, total_seconds
from .propagation.sharded import ShardedDefinition
from .sharding.layout import axes, extent
from .sharding.value import Sharding


class Blocked(NamedTuple):
    """A sharded dim of an operand that the op needs whole, in so many blocks over ranks (0: not in blocks)."""

    operand: int
    dim: int
    blocks: int


Forms = dict[int, Blocked]  # ops by number, and for which dim of theirs the form is


def distribute(graph: Graph, world: DeviceMesh) -> ShardedDefinition:
    """The graph propagated, with distributed forms in the place of ops where they are cheaper.

    To see which dims would be sharded if nothing had to be whole, the graph is first propagated as if it
    were so: else a plan may put a dim together long before the op that would not have needed it.
    """
    if not any(node.call.op.distributed for node in graph.nodes):
        return propagate(graph, world)
    probe = propagate(_optimistic(graph), world, twice=False)
    groups = _Chooser(graph, probe, world).groups()
    if not groups and len(graph.nodes) > SMALL and _holds(graph, probe):
        return dataclasses.replace(probe, graph=graph)
    return _settled(graph, groups, world)


def _holds(graph: Graph, probe: ShardedDefinition) -> bool:
    """Whether the plan of the optimistic graph left whole what the ops need whole."""
    return all(
        not layout
        for node, choice in zip(graph.nodes, probe.choices, strict=True)
        if node.call.op.distributed is not None
        for factor, layout in zip(node.rule.factors, choice.placement.layouts, strict=True)
        if factor.kind is FactorKind.BLOCK
    )


def _settled(graph: Graph, groups: list[Forms], world: DeviceMesh) -> ShardedDefinition:
    """The plan with those of the forms without which the whole would be dearer."""
    best = propagate(_written(graph, groups), world)
    for group in list(groups):
        without = [other for other in groups if other is not group]
        found = propagate(_written(graph, without), world)
        if total_seconds(found) <= total_seconds(best) + EPSILON:
            groups, best = without, found
    return best


def _written(graph: Graph, groups: Sequence[Forms]) -> Graph:
    chosen = {node: where for group in groups for node, where in group.items()}
    return FormWriter(graph).run(chosen) if chosen else graph


def with_forms(graph: Graph, forms: Forms) -> Graph:
    """The graph with these ops in their forms, whatever they cost; itself where they have none."""
    return FormWriter(graph).run(forms)


def _seconds(graph: Graph, world: DeviceMesh) -> float:
    return total_seconds(propagate(graph, world))


def _optimistic(graph: Graph) -> Graph:
    """The graph with every op that has a distributed form taking sharded dims as they are."""
    rules: dict[int, Rule] = {}
    nodes = []
    for node in graph.nodes:
        if node.call.op.distributed is not None:
            node = dataclasses.replace(node, rule=rules.setdefault(id(node.rule), _opened(node.rule)))
        nodes.append(node)
    return dataclasses.replace(graph, nodes=tuple(nodes))


def _opened(rule: Rule) -> Rule:
    factors = [Factor(f.size) if f.kind is FactorKind.BLOCK else f for f in rule.factors]
    return dataclasses.replace(rule, factors=tuple(factors))


class _Chooser:
    """Compares, one op at a time, its form with the plain op, from the shardings that its operands have."""

    def __init__(self, graph: Graph, probe: ShardedDefinition, world: DeviceMesh):
        self.graph, self.homes, self.world = graph, probe.homes, world
        self.read = {i for node in graph.nodes for i in node.inputs} | set(graph.outputs)

    def groups(self) -> list[Forms]:
        """The forms that pay: alike ops, such as those of a model's layers, together."""
        alike: dict[Any, list[Node]] = {}
        for node in self.graph.nodes:
            if node.call.op.distributed is not None:
                alike.setdefault(self._kind(node), []).append(node)
        found = [(nodes, self._cheapest(nodes[0])) for nodes in alike.values()]
        return [dict.fromkeys((n.id for n in nodes), where) for nodes, where in found if where is not None]

    def _kind(self, node: Node) -> Any:
        """Equal for ops with the same choice to make."""
        places = tuple(node.inputs.index(i) for i in node.inputs)
        asked = tuple(self.graph.annotations.get(i, i in self.read) for i in node.outputs)
        return (node.call, places, tuple(self.homes[i] for i in node.inputs), asked)

    def _cheapest(self, node: Node) -> Blocked | None:
        """The dim for which to write the op's form; None where the plain op is as good."""
        found = list(_blocked(node, [self.homes[i] for i in node.inputs]))
        if not found:
            return None
        alone = self._alone(node)
        forms = [(form, FormWriter(alone).run({0: form})) for form in found]
        written = [(form, graph) for form, graph in forms if graph.nodes != alone.nodes]
        costs = [(_seconds(graph, self.world), form) for form, graph in written]
        best = min(costs, key=lambda entry: entry[0], default=None)
        return best[1] if best is not None and best[0] < _seconds(alone, self.world) - EPSILON else None

    def _alone(self, node: Node) -> Graph:
        """A graph of this op alone, its operands annotated as they are."""
        inputs = tuple(dict.fromkeys(node.inputs))
        known = {i: self.homes[i].reduced() for i in inputs}
        known |= {i: self.graph.annotations[i] for i in node.outputs if i in self.graph.annotations}
        return dataclasses.replace(
            self.graph,
            nodes=(dataclasses.replace(node, id=0),),
            inputs=tuple(map(TensorRef, inputs)),
            outputs=tuple(i for i in node.outputs if i in self.read),
            annotations=known,
            reductions={},
            annotation_lines=dict.fromkeys(known, node.line),
        )


def _blocked(node: Node, homes: Sequence[Sharding]) -> Iterator[Blocked]:
    """The sharded dims of an op's operands that the op needs whole, each operand's in turn."""
    for operand, (home, dims) in enumerate(zip(homes, node.rule.operands, strict=True)):
        for dim, factors in enumerate(dims):
            if axes(home.dims[dim]) and any(node.rule.factors[f].kind is FactorKind.BLOCK for f in factors):
                whole_blocks = all(split.bound for split in home.dims[dim])
                yield Blocked(operand, dim, extent(home.dims[dim]) if whole_blocks else 0)


class Rewriter:
    """What a distributed form is written with: `call` appends an op of the table; `type` tells what a tensor
    is.

    `operand` is the place of the operand whose dim the form is for.
    """

    def __init__(self, graph: Graph):
        self.graph = graph
        self.operand = 0
        self.tensors: list[Tensor] = list(graph.tensors)
        self.nodes: list[Node] = []
        self._kinds = Kinds()
        self._origin: Node | None = None

    def type(self, ref: TensorRef) -> TensorType:
        return self.tensors[ref.id].type

    def call(self, name: str | OpDef, *args: Any, **kwargs: Any) -> Any:
        """Apply an op (or an op by its name) to references, sizes and numbers: a reference, or a tuple of them."""
        assert self._origin is not None
        op = find(name)
        assert op is not None, name
        bound = bind(op, args, kwargs, lambda value: value)
        inputs = [ref.id for arg in bound for ref in _refs(arg)]
        call, rule = self._kinds.get(op, bound, tuple(self.tensors[i].type for i in inputs))
        made = [self._new(kind) for kind in call.results]
        ids = tuple(ref.id for ref in made)
        node = Node(len(self.nodes), call, rule, tuple(inputs), ids, self._origin.line, self._origin.origin)
        self.nodes.append(node)
        return made[0] if len(made) == 1 else tuple(made)

    def _new(self, kind: TensorType) -> TensorRef:
        """A tensor of ours: it is not the variable that the user's line assigns."""
        assert self._origin is not None
        tensor = Tensor(len(self.tensors), kind, dataclasses.replace(self._origin.line, given=""))
        self.tensors.append(tensor)
        return TensorRef(tensor.id)


def _refs(arg: Any) -> list[TensorRef]:
    """The tensors in an argument, in order."""
    if isinstance(arg, TensorRef):
        return [arg]
    return [ref for ref in arg if isinstance(ref, TensorRef)] if type(arg) is tuple else []


class FormWriter(Rewriter):
    """Writes ops of a graph in other forms."""

    def run(self, chosen: Forms) -> Graph:
        """The graph with these ops in their forms. Its tensors keep their numbers; new ones come after."""
        numbers: dict[int, int] = {}
        for node in self.graph.nodes:
            if node.id not in chosen or not self._replace(node, chosen[node.id]):
                numbers[node.id] = len(self.nodes)
                self.nodes.append(numbered(node, len(self.nodes)))
        self._number_tensors()
        reductions = {numbers[i]: layouts for i, layouts in self.graph.reductions.items() if i in numbers}
        return dataclasses.replace(
            self.graph, tensors=tuple(self.tensors), nodes=tuple(self.nodes), reductions=reductions
        )

    def _replace(self, node: Node, where: Blocked) -> bool:
        """Write the form, and let its last ops make what the op made; False where there is no form."""
        start, self._origin, self.operand = len(self.nodes), node, where.operand
        results = self.form(node, where)
        self._origin = None
        if results is None:
            del self.nodes[start:]
            return False
        self._check(node, results, start)
        self._rename({made.id: old for made, old in zip(results, node.outputs, strict=True)}, start)
        return True

    def form(self, node: Node, where: Blocked) -> Sequence[TensorRef] | None:
        """Write the op's distributed form: its results."""
        assert node.call.op.distributed is not None
        return node.call.op.distributed(self, node.call, tuple(map(TensorRef, node.inputs)), where.dim, where.blocks)

    def _check(self, node: Node, results: Sequence[TensorRef], start: int) -> None:
        """A form makes each result, of the type of the op's own."""
        made = {i for new in self.nodes[start:] for i in new.outputs}
        assert len({ref.id for ref in results}) == len(results) and made.issuperset(ref.id for ref in results)
        assert tuple(map(self.type, results)) == node.call.results, (node.name, results)

    def _rename(self, names: dict[int, int], start: int) -> None:
        """Give tensors other numbers in the nodes from `start` on."""
        for place in range(start, len(self.nodes)):
            made = self.nodes[place]
            inputs, outputs = (tuple(names.get(i, i) for i in ids) for ids in (made.inputs, made.outputs))
            self.nodes[place] = dataclasses.replace(made, inputs=inputs, outputs=outputs)

    def _number_tensors(self) -> None:
        """Drop the new tensors that no op makes any more, and number the others on."""
        old = len(self.graph.tensors)
        made = [i for node in self.nodes for i in node.outputs if i >= old]
        names = {i: old + place for place, i in enumerate(made)}
        kept = [dataclasses.replace(self.tensors[i], id=names[i]) for i in made]
        self.tensors = [*self.graph.tensors, *kept]
        self._rename(names, 0)
