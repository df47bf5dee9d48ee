"""A definition with every size known: what the compiler's passes work on."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from .dtypes import DataType, scalar_dtype
from .errors import SourceLine, located, user_error
from .ops.base import Call, OpDef, ParamKind, Rule, ScalarRef, TensorRef, TensorType, count_tensors
from .ops.shape_arithmetic import check_fits, check_rule
from .scalars import ScalarDef, evaluate, inputs_of, python_cast
from .sharding.layout import Layout, stream_count
from .sharding.value import Sharding

if TYPE_CHECKING:
    from .definition.annotation import Annotation
    from .definition.builder import DefinitionBuilder
    from .definition.records import OpNode

_SIZES = (ParamKind.SIZE, ParamKind.SHAPE)


@dataclass(frozen=True, slots=True)
class Tensor:
    """A tensor of the graph: its number, its concrete type and the line of the script that made it."""

    id: int
    type: TensorType
    line: SourceLine

    @property
    def name(self) -> str:
        return f"t{self.id}"

    @property
    def label(self) -> str:
        """The script's variable, if its line shows one, with the name: `x (t0)`."""
        return self.line.label(self.name)


@dataclass(frozen=True, slots=True)
class Stream:
    """A dim that is worked on in chunks: one chunk is communicated while another is computed.

    `layout` has the dim's factors, that of the chunks bound to the stream; None leaves it to the compiler where they
    lie. `ring`: every rank begins with its own shard, and shards travel from rank to rank.
    """

    dim: int
    chunks: int
    layout: Layout | None
    ring: bool
    line: SourceLine


@dataclass(frozen=True, slots=True)
class Node:
    """One op: the call with concrete types, its factor rule, and the tensors that it reads and makes.

    `origin` is the number of the definition's op that it is, or is a part of. `salt` counts the ops before that one
    that draw random numbers: what this op draws depends on it.
    """

    id: int
    call: Call
    rule: Rule
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    line: SourceLine
    origin: int
    salt: int = 0

    @property
    def name(self) -> str:
        return self.call.op.name


class Rewriting(Protocol):
    """A function that writes some ops of a graph, known by their numbers, in other ops.

    It is kept with the graph and done again for other sizes, unless `sized`: then it is right for these sizes only.
    """

    sized: ClassVar[bool]

    def __call__(self, graph: Graph) -> Graph: ...


@dataclass(frozen=True, slots=True)
class Graph:
    """Ops, each after those whose results it reads, and the user's annotations.

    `reductions[node]` are the layouts that the user gave the reduction dims of a node's result, in the rule's order.
    `streams` are the tensors to be worked on in chunks. `rewritings` are those that made this graph of the definition's
    own ops, first one first.
    """

    tensors: tuple[Tensor, ...]
    nodes: tuple[Node, ...]
    inputs: tuple[TensorRef | ScalarRef, ...]
    outputs: tuple[int, ...]
    annotations: Mapping[int, Sharding]
    reductions: Mapping[int, tuple[Layout, ...]]
    annotation_lines: Mapping[int, SourceLine]
    scalars: Mapping[int, ScalarDef]
    streams: Mapping[int, Stream] = field(default_factory=dict)
    rewritings: tuple[Rewriting, ...] = ()

    def shape(self, tensor: int) -> tuple[int, ...]:
        return self.tensors[tensor].type.shape

    def noting(self, rewriting: Rewriting) -> Graph:
        """The graph, with this rewriting noted as the one that made it."""
        return replace(self, rewritings=(*self.rewritings, rewriting))

    @property
    def input_tensors(self) -> tuple[int, ...]:
        return tuple(ref.id for ref in self.inputs if isinstance(ref, TensorRef))

    def __str__(self) -> str:
        lines = [f"inputs: {', '.join(f'{self.tensors[i].label}: {self.tensors[i].type}' for i in self.input_tensors)}"]
        for node in self.nodes:
            made = ", ".join(f"t{i}: {self.tensors[i].type}" for i in node.outputs)
            taken = ", ".join(f"t{i}" for i in node.inputs)
            lines.append(f"  {made} = {node.name}({taken})  # {node.rule}  {node.line}")
        lines.append("outputs: " + ", ".join(f"t{i}" for i in self.outputs))
        return "\n".join(lines)


def shape_scalars(fd: DefinitionBuilder) -> frozenset[int]:
    """The scalar inputs that some size depends on: a plan is made for their values."""
    found: set[int] = set()
    given = any(isinstance(ref, ScalarRef) for ref in fd.inputs)
    for node in fd.nodes if given else ():
        for param, arg in zip(node.op.params, node.args, strict=True):
            if param.kind in _SIZES:
                for entry in _entries(param.kind, arg):
                    found |= inputs_of(entry, fd.scalars)
    return frozenset(found)


def _entries(kind: ParamKind, arg: Any) -> tuple[Any, ...]:
    """The sizes in an argument that is one (SIZE) or a list of them (SHAPE, perhaps absent)."""
    if arg is None:
        return ()
    return arg if kind is ParamKind.SHAPE else (arg,)


def concretize(
    fd: DefinitionBuilder,
    shapes: Mapping[int, tuple[int, ...]],
    scalars: Mapping[int, Any],
) -> Graph:
    """The graph of a definition for inputs of these global shapes.

    `scalars` gives, by number, the values of the scalar inputs that sizes depend on. Raises DefinitionError without
    outputs and, at the line of the op, where an op cannot take the sizes that come out.
    """
    fd.check_complete(None)
    types: dict[int, TensorType] = {i: TensorType(shape, fd.tensors[i].type.dtype) for i, shape in shapes.items()}
    calls = _Calls(fd, types, scalars)
    salts = itertools.accumulate((node.draws for node in fd.nodes), initial=0)
    nodes = [_concrete_node(calls, number, *pair) for number, pair in enumerate(zip(fd.nodes, salts, strict=False))]
    tensors = tuple([Tensor(i, types[i], made.line) for i, made in enumerate(fd.tensors)])
    said = fd.all_annotations
    nodes = needed(_without_vanished(nodes, {*fd.outputs, *said, *fd.overlaps}), fd.outputs)
    producer = {out: node.id for node in nodes for out in node.outputs}
    there = {*producer, *fd.input_tensors()}
    noted = {i: a for i, a in said.items() if a.mesh is not None}
    # What is said of tensors that no output needs is checked, too, and then dropped with them.
    shardings = _shardings(noted, tensors)
    annotations = {i: found.placement(types[i].shape) for i, found in shardings.items() if i in there}
    lines = {i: noted[i].line for i in annotations}
    streams = _streams(fd, said, {i: types[i].shape for i in there})
    return Graph(
        tensors, nodes, tuple(fd.inputs), tuple(fd.outputs), annotations, _reductions(noted, producer), lines,
        fd.scalars, streams,
    )  # fmt: skip


def _shardings(noted: Mapping[int, Annotation], tensors: Sequence[Tensor]) -> dict[int, Sharding]:
    """The shardings that annotations mean; worked out once for those that say the same of tensors of one shape."""
    known: dict[Any, Sharding] = {}
    found: dict[int, Sharding] = {}
    for i, annotation in noted.items():
        shape = tensors[i].type.shape
        key = (annotation.said(), shape)
        if key not in known:
            known[key] = annotation.sharding(tensors[i].label, shape)
        found[i] = known[key]
    return found


def _without_vanished(nodes: Sequence[Node], named: Container[int]) -> Sequence[Node]:
    """The nodes without those that do nothing for these sizes, unless their result is in `named`."""
    if not any(node.call.op.vanishes for node in nodes):
        return nodes
    stands: dict[int, int] = {}
    kept: list[Node] = []
    for node in nodes:
        inputs = tuple(stands.get(i, i) for i in node.inputs)
        if node.call.op.vanishes and node.call.results == node.call.types and node.outputs[0] not in named:
            stands[node.outputs[0]] = inputs[0]
        else:
            kept.append(node if inputs == node.inputs else replace(node, inputs=inputs))
    return kept


def _reductions(noted: Mapping[int, Annotation], producer: Mapping[int, int]) -> dict[int, tuple[Layout, ...]]:
    """By node the layouts of its reduction dims, where an annotation of its result binds any of them."""
    found: dict[int, tuple[Layout, ...]] = {}
    for i, annotation in noted.items():
        layouts = tuple(annotation.named(reduction=True))
        if any(split.bound for layout in layouts for split in layout) and i in producer:
            found[producer[i]] = layouts
    return found


def _streams(
    fd: DefinitionBuilder, said: Mapping[int, Annotation], shapes: Mapping[int, tuple[int, ...]]
) -> dict[int, Stream]:
    """By tensor the stream that the user asked for; `fd.overlap` counts before annotations."""
    found: dict[int, Stream] = {}
    for i, shape in sorted(shapes.items()):
        if i in fd.overlaps:
            asked = fd.overlaps[i]
            found[i] = Stream(asked.dim, asked.chunks, None, asked.ring, asked.line)
        elif i in said:
            annotation = said[i]
            for dim, layout, ring in annotation.streams(shape):
                found.setdefault(i, Stream(dim, stream_count(layout), layout, ring, annotation.line))
    return found


def rewritten(graph: Graph, rewritings: Sequence[Rewriting]) -> Graph:
    """The graph after these rewritings, one after the other."""
    for rewriting in rewritings:
        graph = rewriting(graph)
    return graph


def needed(nodes: Sequence[Node], outputs: Sequence[int]) -> tuple[Node, ...]:
    """The nodes that some output depends on, numbered anew."""
    wanted, kept = set(outputs), []
    for node in reversed(nodes):
        if wanted.intersection(node.outputs):
            wanted.update(node.inputs)
            kept.append(node)
    return tuple(numbered(node, number) for number, node in enumerate(reversed(kept)))


def numbered(node: Node, number: int, inputs: tuple[int, ...] | None = None) -> Node:
    """The node with another number and, if given, other inputs; several times as fast as `dataclasses.replace`."""
    inputs = node.inputs if inputs is None else inputs
    if node.id == number and node.inputs == inputs:
        return node
    return Node(number, node.call, node.rule, inputs, node.outputs, node.line, node.origin, node.salt)


_ANY = TensorRef(-1)


class CallTable:
    """Calls that differ in nothing but which tensors they take share one `Call` and one `Rule`.

    Passes recognise repeated structure, such as layers, by the identity of the call: within a graph it is kept here,
    whatever `_call_of` drops.
    """

    def __init__(self) -> None:
        self._made: dict[Any, tuple[Call, Rule]] = {}

    def get(self, op: OpDef, args: tuple[Any, ...], types: tuple[TensorType, ...]) -> tuple[Call, Rule]:
        """The call of an op on operands of these types, and its rule. DefinitionError where they do not fit the op."""
        key = (op, tuple([_key(_anonymous(arg)) for arg in args]), types)
        found = self._made.get(key)
        if found is None:
            found = self._made[key] = _call_of(*key)
        return found


@functools.lru_cache(maxsize=1 << 13)
def _call_of(op: OpDef, args: tuple[_Key, ...], types: tuple[TensorType, ...]) -> tuple[Call, Rule]:
    """One object for equal calls of all graphs, as far as they are kept: of the forms of a definition most are equal,
    and what is worked out for one holds for the others.
    """
    given = tuple([arg for _, _, arg in args])
    call = Call(op, given, types, op.infer(Call(op, given, types)))
    rule = (op.rounds.rule if op.rounds else op.rule)(call)
    check_rule(call, rule)
    return call, rule


_Key = tuple[type, str, Any]


def _key(arg: Any) -> _Key:
    """Equal for arguments that mean the same: 1, 1.0 and True differ, and so do 0.0 and -0.0, also in a list."""
    return (type(arg), repr(arg) if isinstance(arg, (float, complex, tuple)) else "", arg)


_ANY_KEY = _key(_ANY)


def _anonymous(arg: Any) -> Any:
    """The argument without the numbers of the tensors in it."""
    if isinstance(arg, TensorRef):
        return _ANY
    return (_ANY,) * len(arg) if count_tensors(arg) else arg


def _concrete_node(calls: _Calls, number: int, node: OpNode, salt: int) -> Node:
    call, rule = calls.of(node)
    for out, made in zip(node.outputs, call.results, strict=True):
        assert made.dtype is calls.fd.tensors[out].type.dtype, (node, made)
        calls.types[out] = made
    return Node(number, call, rule, node.inputs, node.outputs, node.line, number, salt)


class _Calls:
    """The calls of a definition's ops and their rules. Ops that are written alike are worked out once."""

    def __init__(self, fd: DefinitionBuilder, types: dict[int, TensorType], scalars: Mapping[int, Any]):
        self.fd, self.types, self.scalars = fd, types, scalars
        self._kinds = CallTable()
        self._made: dict[Any, tuple[Call, Rule]] = {}

    def of(self, node: OpNode) -> tuple[Call, Rule]:
        types = tuple([self.types[i] for i in node.inputs])
        key = (
            node.op,
            tuple([_ANY_KEY if type(arg) is TensorRef else _key(_anonymous(arg)) for arg in node.args]),
            types,
        )
        found = self._made.get(key)
        if found is None:
            with located(node.line):
                found = self._made[key] = self._worked_out(node, types)
        return found

    def _worked_out(self, node: OpNode, types: tuple[TensorType, ...]) -> tuple[Call, Rule]:
        given = _KnownArguments(self.fd, node.op, self.types, self.scalars)
        args = tuple(given.concrete(param.kind, arg) for param, arg in zip(node.op.params, node.args, strict=True))
        call, rule = self._kinds.get(node.op, args, types)
        _check_sizes(call)
        return call, rule


def _check_sizes(call: Call) -> None:
    for made in call.results:
        if any(n < 0 for n in made.shape):
            raise user_error(
                f"{call.op.name}: a size is negative", str(list(made.shape)), "sizes >= 0", "Correct the sizes."
            )
        check_fits(call.op.name, made)


@dataclass(frozen=True, slots=True)
class _KnownArguments:
    """The arguments of an op: sizes as ints, scalar constants as numbers; scalars that follow inputs stay references.

    Each raises DefinitionError where there is no such number.
    """

    fd: DefinitionBuilder
    op: OpDef
    types: Mapping[int, TensorType]
    scalars: Mapping[int, Any]

    def concrete(self, kind: ParamKind, arg: Any) -> Any:
        """An argument as it stands in the call."""
        if kind in _SIZES:
            found = tuple(map(self._size, _entries(kind, arg)))
            return found if kind is ParamKind.SHAPE and arg is not None else found[0] if found else None
        if not isinstance(arg, ScalarRef) or inputs_of(arg, self.fd.scalars):
            return arg
        assert arg.dtype is not None
        found = python_cast(self._value(arg), arg.dtype)
        # A number is taken as Int, Double or ComplexDouble: any other type stays with its reference.
        plain = arg.dtype is scalar_dtype(found) and arg.dtype is not DataType.Bool
        return found if plain or kind is not ParamKind.TENSOR_OR_SCALAR else arg

    def _value(self, ref: Any) -> Any:
        try:
            return evaluate(ref, self.fd.scalars, self.scalars, lambda tensor, dim: self.types[tensor.id].shape[dim])
        except (ArithmeticError, ValueError, TypeError) as error:
            raise user_error(
                f"{self.op.name}: a scalar has no value", f"{error} in s{ref.id}", "a number", "Check its operands."
            ) from error

    def _size(self, ref: Any) -> int:
        found = self._value(ref)
        if isinstance(found, complex) or not math.isfinite(found) or int(found) != found:
            raise user_error(f"{self.op.name}: a size is no whole number", str(found), "an int", "Round it.")
        return int(found)


def users(nodes: Sequence[Node]) -> dict[int, list[int]]:
    """For every tensor the nodes that read it."""
    found: dict[int, list[int]] = {}
    for node in nodes:
        for tensor in dict.fromkeys(node.inputs):
            found.setdefault(tensor, []).append(node.id)
    return found


# What at most so many ops make of one output alone comes right after the last tensor of which they make it.
_SHORT = 16


def depth_first(graph: Graph) -> tuple[int, ...]:
    """The nodes, each after what it reads, in an order that depends on the outputs alone.

    It is the same however independent ops were permuted, and keeps what is read together close together: the few ops
    that only one output needs, such as a weight's gradient, stand right behind what they read.
    """
    producer = {out: node.id for node in graph.nodes for out in node.outputs}
    places: dict[int, tuple[int, ...]] = {}
    for number, root in enumerate(producer[i] for i in [*graph.outputs, *sorted(producer)] if i in producer):
        if root in places:
            continue
        group = _missing(graph, producer, root, places)
        read = {producer[i] for node in group for i in graph.nodes[node].inputs if i in producer}.difference(group)
        start = max((places[node] for node in read), default=()) if len(group) <= _SHORT else ()
        places.update((node, (*start, number, place)) for place, node in enumerate(group))
    return tuple(sorted(places, key=places.__getitem__))


def _missing(graph: Graph, producer: Mapping[int, int], root: int, have: Container[int]) -> list[int]:
    """The nodes that a node still lacks, in depth-first order, and the node itself last."""
    found: dict[int, None] = {}
    stack = [root]
    while stack:
        node = stack[-1]
        before = [producer[i] for i in graph.nodes[node].inputs if i in producer]
        missing = [i for i in reversed(before) if i not in found and i not in have]
        if node in found or not missing:
            found[node] = None
            stack.pop()
        else:
            stack += missing
    return list(found)


def reordered(graph: Graph, order: Sequence[int]) -> Graph:
    """The graph with its nodes in this order, numbered anew."""
    nodes = tuple(numbered(graph.nodes[old], new) for new, old in enumerate(order))
    reductions = {new: graph.reductions[old] for new, old in enumerate(order) if old in graph.reductions}
    return replace(graph, nodes=nodes, reductions=reductions)
