"""From a definition and the sizes of its inputs to a graph."""

from __future__ import annotations

import itertools
import math
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ..definition.annotation import Annotation
from ..definition.recording import OpNode, Recording
from ..dtypes import DataType, scalar_dtype
from ..errors import located, user_error
from ..ops.opdef import Call, OpDef
from ..ops.rules import Rule
from ..ops.shape_arithmetic import check_fits
from ..ops.values import ParamKind, ScalarRef, TensorType
from ..scalars import evaluate, inputs_of, python_cast
from ..sharding.layout import Layout, stream_count
from ..sharding.value import Sharding
from .calls import CallTable
from .nodes import Graph, Node, Stream, Tensor, needed

_SIZES = (ParamKind.SIZE, ParamKind.SHAPE)


def shape_scalars(recording: Recording) -> frozenset[int]:
    """The scalar inputs that some size depends on: a plan is made for their values."""
    found: set[int] = set()
    given = any(isinstance(ref, ScalarRef) for ref in recording.inputs)
    for node in recording.nodes if given else ():
        for param, arg in zip(node.op.params, node.args, strict=True):
            if param.kind in _SIZES:
                for entry in _entries(param.kind, arg):
                    found |= inputs_of(entry, recording.scalars)
    return frozenset(found)


def _entries(kind: ParamKind, arg: Any) -> tuple[Any, ...]:
    """The sizes in an argument that is a single one (SIZE) or a list of them (SHAPE, may be None)."""
    if arg is None:
        return ()
    return arg if kind is ParamKind.SHAPE else (arg,)


def specialize(
    recording: Recording,
    shapes: Mapping[int, tuple[int, ...]],
    scalars: Mapping[int, Any],
) -> Graph:
    """The graph of a definition for inputs of these global shapes.

    `scalars` gives, by number, the values of the scalar inputs that sizes depend on. Raises DefinitionError for a
    definition without outputs and, at the line of the op, where an op cannot take the sizes that come out.
    """
    recording.check_complete(None)
    types, annotated = _input_types(recording, shapes), recording.all_annotations
    nodes = _nodes(recording, types, scalars)
    tensors = tuple([Tensor(i, types[i], made.line) for i, made in enumerate(recording.tensors)])
    nodes = needed(_without_vanished(nodes, {*recording.outputs, *annotated, *recording.overlaps}), recording.outputs)
    producer = {out: node.id for node in nodes for out in node.outputs}
    there = set(producer).union(recording.input_tensors())
    on_meshes = {i: a for i, a in annotated.items() if a.mesh is not None}
    # Annotations of tensors that no output needs are checked, too, and then dropped with them.
    shardings = _shardings(on_meshes, tensors)
    annotations = {i: found.placement(types[i].shape) for i, found in shardings.items() if i in there}
    implied = {i: on_meshes[i].implied for i in annotations if on_meshes[i].implied}
    lines = {i: tensors[i].line if i in implied else on_meshes[i].line for i in annotations}
    streams = _streams(
        recording, annotated, {i: types[i].shape for i in there.intersection((*annotated, *recording.overlaps))}
    )
    return Graph(
        tensors, nodes, tuple(recording.inputs), tuple(recording.outputs), annotations,
        _reductions(on_meshes, producer), lines, recording.scalars, streams, implied=implied,
        stationary={i: on_meshes[i].stationary for i in annotations if on_meshes[i].stationary},
        once_in=recording.once_in,
    )  # fmt: skip


def _nodes(recording: Recording, types: dict[int, TensorType], scalars: Mapping[int, Any]) -> list[Node]:
    """A node for each op, in their order; adds the types of their results to `types`."""
    calls = _Calls(recording, types, scalars)
    salts = itertools.accumulate((node.draws for node in recording.nodes), initial=0)
    pairs = enumerate(zip(recording.nodes, salts, strict=False))
    return [_concrete_node(calls, number, node, salt) for number, (node, salt) in pairs]


def _input_types(recording: Recording, shapes: Mapping[int, tuple[int, ...]]) -> dict[int, TensorType]:
    """The inputs' types at these shapes; equal ones are one object."""
    types = {i: recording.tensors[i].type for i in shapes}
    found = {i: TensorType(shape, types[i].dtype, types[i].rows) for i, shape in shapes.items()}
    known: dict[TensorType, TensorType] = {}
    return {i: known.setdefault(ttype, ttype) for i, ttype in found.items()}


def _shardings(on_meshes: Mapping[int, Annotation], tensors: Sequence[Tensor]) -> dict[int, Sharding]:
    """The shardings that annotations mean, made once for all that say the same about tensors of one shape."""
    known: dict[Any, Sharding] = {}
    found: dict[int, Sharding] = {}
    for i, annotation in on_meshes.items():
        shape = tensors[i].type.shape
        key = (annotation.key(), shape)
        if key not in known:
            known[key] = annotation.sharding(tensors[i].label, shape)
        found[i] = known[key]
    return found


def _without_vanished(nodes: Sequence[Node], named: Container[int]) -> Sequence[Node]:
    """The nodes without those that do nothing at these sizes, unless their result is in `named`."""
    if not any(node.call.op.identity_when_same_shape for node in nodes):
        return nodes
    stands: dict[int, int] = {}
    kept: list[Node] = []
    for node in nodes:
        inputs = tuple(stands.get(i, i) for i in node.inputs)
        if (
            node.call.op.identity_when_same_shape
            and node.call.results == node.call.types
            and node.outputs[0] not in named
        ):
            stands[node.outputs[0]] = inputs[0]
        else:
            kept.append(node if inputs == node.inputs else replace(node, inputs=inputs))
    return kept


def _reductions(on_meshes: Mapping[int, Annotation], producer: Mapping[int, int]) -> dict[int, tuple[Layout, ...]]:
    """By node the layouts of its reduction dims, if an annotation of its result binds any of them."""
    found: dict[int, tuple[Layout, ...]] = {}
    for i, annotation in on_meshes.items():
        layouts = tuple(annotation.named(reduction=True))
        if any(split.bound for layout in layouts for split in layout) and i in producer:
            found[producer[i]] = layouts
    return found


def _streams(
    recording: Recording, annotated: Mapping[int, Annotation], shapes: Mapping[int, tuple[int, ...]]
) -> dict[int, Stream]:
    """By tensor the stream that the user asked for; `fd.overlap` goes before annotations."""
    found: dict[int, Stream] = {}
    for i, shape in sorted(shapes.items()):
        if i in recording.overlaps:
            overlap = recording.overlaps[i]
            found[i] = Stream(overlap.dim, overlap.chunks, None, overlap.ring, overlap.line)
        elif i in annotated:
            annotation = annotated[i]
            for dim, layout, ring in annotation.streams(shape):
                found.setdefault(i, Stream(dim, stream_count(layout), layout, ring, annotation.line))
    return found


def _concrete_node(calls: _Calls, number: int, node: OpNode, salt: int) -> Node:
    call, rule = calls.of(node)
    for out, made in zip(node.outputs, call.results, strict=True):
        assert made.dtype is calls.recording.tensors[out].type.dtype, (node, made)
        calls.types[out] = made
    return Node(number, call, rule, node.inputs, node.outputs, node.line, number, salt)


class _Calls:
    """The calls of a definition's ops, with their rules; equal calls are made once."""

    def __init__(self, recording: Recording, types: dict[int, TensorType], scalars: Mapping[int, Any]):
        self.recording, self.types, self.scalars = recording, types, scalars
        self._kinds = CallTable()
        self._made: dict[tuple[int, ...], tuple[Call, Rule]] = {}

    def of(self, node: OpNode) -> tuple[Call, Rule]:
        types = self.types
        # Forms and types live as long as the definition: by their numbers they are found in less time.
        key = (id(node.form), *[id(types[i]) for i in node.inputs])
        found = self._made.get(key)
        if found is None:
            with located(node.line):
                found = self._made[key] = self._worked_out(node)
        return found

    def _worked_out(self, node: OpNode) -> tuple[Call, Rule]:
        given = _KnownArguments(self.recording, node.op, self.types, self.scalars)
        args = tuple(given.concrete(param.kind, arg) for param, arg in zip(node.op.params, node.args, strict=True))
        call, rule = self._kinds.get(node.op, args, tuple([self.types[i] for i in node.inputs]))
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
    """The arguments of an op, with sizes as ints and scalar constants as numbers.

    Scalars that depend on inputs stay references. Raises DefinitionError where a size or constant has no such number.
    """

    recording: Recording
    op: OpDef
    types: Mapping[int, TensorType]
    scalars: Mapping[int, Any]

    def concrete(self, kind: ParamKind, arg: Any) -> Any:
        """An argument as the call has it."""
        if kind in _SIZES:
            found = tuple(map(self._size, _entries(kind, arg)))
            return found if kind is ParamKind.SHAPE and arg is not None else found[0] if found else None
        if not isinstance(arg, ScalarRef) or inputs_of(arg, self.recording.scalars):
            return arg
        assert arg.dtype is not None
        found = python_cast(self._value(arg), arg.dtype)
        # A number is taken as Int, Double or ComplexDouble: any other type stays with its reference.
        plain = arg.dtype is scalar_dtype(found) and arg.dtype is not DataType.Bool
        return found if plain or kind is not ParamKind.TENSOR_OR_SCALAR else arg

    def _value(self, ref: Any) -> Any:
        try:
            return evaluate(
                ref, self.recording.scalars, self.scalars, lambda tensor, dim: self.types[tensor.id].shape[dim]
            )
        except (ArithmeticError, ValueError, TypeError) as error:
            raise user_error(
                f"{self.op.name}: a scalar has no value", f"{error} in s{ref.id}", "a number", "Check its operands."
            ) from error

    def _size(self, ref: Any) -> int:
        found = self._value(ref)
        if isinstance(found, complex) or not math.isfinite(found) or int(found) != found:
            raise user_error(f"{self.op.name}: a size is no whole number", str(found), "an int", "Round it.")
        return int(found)
