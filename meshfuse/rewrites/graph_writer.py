"""Writing some ops of a graph in other ops of the table."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

from ..graph import CallTable, Graph, Node, Tensor, needed, numbered
from ..ops.binding import bind
from ..ops.opdef import OpDef, tensor_refs
from ..ops.registry import find
from ..ops.rules import DimFactors, Rule
from ..ops.shape_arithmetic import with_size
from ..ops.values import ParamKind, TensorRef, TensorType


class GraphWriter:
    """Writes ops of a graph in other ops. A subclass says in which, by `form`.

    It implements `ops.opdef.Writing`, in which ops' own forms are written: `call` appends an op, `type` tells what a
    tensor is, `operand` is the place of the operand that a distributed form is for, and `pieces` in how many
    that operand's dim is cut.
    """

    def __init__(self, graph: Graph):
        self.graph = graph
        self.operand = self.pieces = 0
        self.tensors: list[Tensor] = list(graph.tensors)
        self.nodes: list[Node] = []
        self._kinds = CallTable()
        self._origin: Node | None = None

    def type(self, ref: TensorRef) -> TensorType:
        """The type of a tensor, whether of the graph or a new one."""
        return self.tensors[ref.id].type

    def call(self, name: str | OpDef, *args: Any, **kwargs: Any) -> Any:
        """Append an op, by name or itself, on references, sizes and numbers: gives a reference, or a tuple of them."""
        assert self._origin is not None
        op = find(name)
        assert op is not None, name
        bound = bind(op, args, kwargs, lambda value: value)
        inputs = [ref.id for ref in tensor_refs(bound)]
        call, rule = self._kinds.get(op, bound, tuple(self.tensors[i].type for i in inputs))
        made = [self._new(kind) for kind in call.results]
        ids = tuple(ref.id for ref in made)
        node = Node(
            len(self.nodes), call, rule, tuple(inputs), ids, self._origin.line, self._origin.origin, self._origin.salt
        )
        self.nodes.append(node)
        return made[0] if len(made) == 1 else tuple(made)

    def again(self, node: Node, factor: int, size: int, operands: Sequence[TensorRef]) -> TensorRef:
        """A node's op on other operands, with another size of one of its factors."""
        given, dim = iter(operands), dim_of(node.rule.results[0], factor)
        args = [_sized(param.kind, with_tensors(arg, given), dim, size)
                for param, arg in zip(node.call.op.params, node.call.args, strict=True)]  # fmt: skip
        return self.call(node.call.op, *args)

    def _new(self, ttype: TensorType) -> TensorRef:
        """A new tensor. It does not have the name of the variable that the user's line assigns."""
        assert self._origin is not None
        tensor = Tensor(len(self.tensors), ttype, dataclasses.replace(self._origin.line, given=""))
        self.tensors.append(tensor)
        return TensorRef(tensor.id)

    def run(self, chosen: Collection[int]) -> Graph:
        """The graph with these ops, by number, in their forms. Tensors keep their numbers, and new ones follow."""
        numbers: dict[int, int] = {}
        for node in self.graph.nodes:
            if node.id not in chosen or not self._replace(node):
                numbers[node.id] = len(self.nodes)
                self.nodes.append(numbered(node, len(self.nodes)))
        self._number_tensors()
        return with_nodes(self.graph, self.tensors, self.nodes, numbers)

    def form(self, node: Node) -> Sequence[TensorRef] | None:
        """Write the op by calls of `call`, and give its results; None leaves it as it is."""
        raise NotImplementedError

    def _replace(self, node: Node) -> bool:
        """Write the form and let its last ops make the op's own results; False where there is no form."""
        start, self._origin = len(self.nodes), node
        results = self.form(node)
        self._origin = None
        if results is None:
            del self.nodes[start:]
            return False
        self._check(node, results, start)
        self._rename({made.id: old for made, old in zip(results, node.outputs, strict=True)}, start)
        return True

    def _check(self, node: Node, results: Sequence[TensorRef], start: int) -> None:
        """Assert that the form makes each result, in the op's own types."""
        made = {i for new in self.nodes[start:] for i in new.outputs}
        assert len({ref.id for ref in results}) == len(results) and made.issuperset(ref.id for ref in results)
        assert tuple(map(self.type, results)) == node.call.results, (node.name, results)

    def _rename(self, names: dict[int, int], start: int) -> None:
        """Give tensors other numbers, in the nodes from `start` on."""
        for place in range(start, len(self.nodes)):
            made = self.nodes[place]
            inputs, outputs = (tuple(names.get(i, i) for i in ids) for ids in (made.inputs, made.outputs))
            self.nodes[place] = dataclasses.replace(made, inputs=inputs, outputs=outputs)

    def _number_tensors(self) -> None:
        """Drop new tensors that no op makes any more, and number the others without gaps."""
        old = len(self.graph.tensors)
        made = [i for node in self.nodes for i in node.outputs if i >= old]
        names = {i: old + place for place, i in enumerate(made)}
        kept = [dataclasses.replace(self.tensors[i], id=names[i]) for i in made]
        self.tensors = [*self.graph.tensors, *kept]
        self._rename(names, 0)


def dim_of(dims: DimFactors, factor: int) -> int | None:
    """The dim that consists of this factor."""
    return next((dim for dim, factors in enumerate(dims) if factor in factors), None)


def is_whole_dim(rule: Rule, factor: int) -> bool:
    """Whether a factor is a dim by itself wherever it is."""
    sides = (*rule.operands, *rule.results)
    return all(factors == (factor,) for dims in sides for factors in dims if factor in factors)


def dims_of(node: Node, factor: int) -> list[int | None]:
    """By operand the dim that consists of this factor."""
    return [dim_of(dims, factor) for dims in node.rule.operands]


def with_tensors(arg: Any, given: Iterator[TensorRef]) -> Any:
    """An argument with its tensors replaced by the next ones."""
    if isinstance(arg, TensorRef):
        return next(given)
    return tuple(next(given) for _ in arg) if type(arg) is tuple and arg and isinstance(arg[0], TensorRef) else arg


def _sized(kind: ParamKind, arg: Any, dim: int | None, size: int) -> Any:
    """A SHAPE argument with another size in a dim; any other argument as it is."""
    if kind is not ParamKind.SHAPE or dim is None or arg is None:
        return arg
    return with_size(arg, dim, size)


def with_nodes(graph: Graph, tensors: Sequence[Tensor], nodes: Sequence[Node], numbers: Mapping[int, int]) -> Graph:
    """The graph with these tensors and ops; `numbers` has the new numbers of its own ops that are still there."""
    reductions = {numbers[i]: layouts for i, layouts in graph.reductions.items() if i in numbers}
    return dataclasses.replace(graph, tensors=tuple(tensors), nodes=tuple(nodes), reductions=reductions)


def without_unread(graph: Graph) -> Graph:
    """The graph without ops that no output follows from."""
    nodes = needed(graph.nodes, graph.outputs)
    numbers = {node.outputs: node.id for node in nodes}
    kept = [(numbers.get(graph.nodes[i].outputs), layouts) for i, layouts in graph.reductions.items()]
    reductions = {number: layouts for number, layouts in kept if number is not None}
    return dataclasses.replace(graph, nodes=nodes, reductions=reductions)
