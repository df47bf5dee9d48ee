"""Pads moved behind other ops and slices before them: op(pad(x)) is pad(op(x)), and slice(op(x)) is op(slice(x)).

In a convolution by hand of relu(pad(x)) each tap is then a slice of a pad, which `shifts` looks for; in its gradient
the slice meets the sum of pads behind the relu's own gradient. A cat of a tensor with tensors of one number is a pad.

A slice also goes before what is made of a sum, as the last token of x + h @ w is that of x and that of h @ w: terms
that lie on the ranks are then summed for what is read of them. So does a sum over dims of such terms, as a mean over
tokens or a loss: the terms that lie on the ranks are summed over these dims before they are over the ranks.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, ClassVar, NamedTuple

import torch
import torch.nn.functional as F

from .. import kernels
from ..dtypes import is_negative_zero
from ..graph import CallTable, Graph, Node, users
from ..mesh import DeviceMesh
from ..ops.joins import pad_widths
from ..ops.local import LocalCall
from ..ops.opdef import Call, Partial
from ..ops.rules import FactorKind
from ..ops.shape_arithmetic import one_dim_widths
from ..ops.values import ParamKind, ScalarRef, TensorRef
from ..ops.windows import slice_bounds
from ..sharding.value import Sharding
from ..traversal import inner_first
from .graph_writer import GraphWriter, without_unread
from .split_concats import joined_dim
from .window_views import Number, Shifted, WindowFinder, own_window

# By dim (start, stop, step) of a slice.
Bounds = tuple[tuple[int, int, int], ...]
_OPERANDS = (ParamKind.TENSOR, ParamKind.TENSOR_OR_SCALAR)
_NUMBERS = (ParamKind.SCALAR, ParamKind.OPTIONAL_SCALAR, *_OPERANDS, ParamKind.DTYPE)


class Padded(NamedTuple):
    """A tensor with numbers around it; the widths are as `pad` takes them."""

    inner: TensorRef
    widths: tuple[int, ...]
    fill: Number


@dataclass(frozen=True, slots=True)
class Surrounded:
    """The rewriting of pads as late, and of slices as early, as they may come."""

    sized: ClassVar[bool] = True

    def __call__(self, graph: Graph) -> Graph:
        """The graph itself where there is nothing to change."""
        if not _applies(graph):
            return graph
        writer = _SurroundsWriter(graph)
        made = writer.run(range(len(graph.nodes)))
        return without_unread(made).with_rewrite(self) if writer.count else graph


class _SurroundsWriter(GraphWriter):
    """Moves pads and slices past the ops that may change places with them."""

    def __init__(self, graph: Graph):
        super().__init__(graph)
        self.makers = {i: node for node in graph.nodes for i in node.outputs}
        self.readers = users(graph.nodes)
        self.noted = {*graph.annotations, *graph.streams}
        self.kept = {*self.noted, *graph.outputs}
        self.known = WindowFinder(graph).known_all()
        self.pads: dict[int, Padded] = {}
        self.rising: set[int] = set()
        self._slices: dict[tuple[int, Bounds], TensorRef] = {}
        self.count = 0

    def form(self, node: Node) -> Sequence[TensorRef] | None:
        self.rising.update(node.outputs if self._goes_up(node) else ())
        padded = self._of_cat(node) or self._of_op(node)
        if padded is not None:
            self._note(node, padded)
            result = self.call("pad", padded.inner, list(padded.widths), padded.fill)
        elif node.name == "slice" and node.inputs[0] in self.rising:
            result = self._sliced(node.inputs[0], tuple(slice_bounds(node.call)))
        elif node.name == "sum" and self._is_of_terms(node):
            result = self._summed(node)
        else:
            self._note(node, _pad_of(node))
            return None
        self.count += 1
        return [result]

    def _note(self, node: Node, padded: Padded | None) -> None:
        """Note what an op makes as a pad, unless an annotation says where it is to lie."""
        if padded is not None and node.outputs[0] not in self.noted:
            self.pads[node.outputs[0]] = padded

    def _of_cat(self, node: Node) -> Padded | None:
        """The pad that a cat is, if it puts a tensor between tensors of one number."""
        if node.name != "cat":
            return None
        fills, dim = [self._number(i) for i in node.inputs], joined_dim(node)
        there = [place for place, fill in enumerate(fills) if fill is None]
        if not there or len(there) == len(fills):
            return None
        first, last = there[0], there[-1] + 1
        outside = {fill for fill in (*fills[:first], *fills[last:])}
        if len(outside) != 1:
            return None
        inner = [TensorRef(i) for i in node.inputs[first:last]]
        ref = inner[0] if len(inner) == 1 else self.call("cat", tuple(inner), dim)
        sizes = [ttype.shape[dim] for ttype in node.call.types]
        widths = one_dim_widths(node.call.results[0].ndim, dim, sum(sizes[:first]), sum(sizes[last:]))
        return Padded(ref, tuple(widths), outside.pop() or 0)

    def _number(self, tensor: int) -> Number | None:
        """The number that a tensor has everywhere, if it has one."""
        node = self.makers.get(tensor)
        told = node is not None and node.name == "full" and tensor not in self.noted
        value = node.call["fill_value"] if node is not None and told else None
        return value if isinstance(value, int | float) and _is_plain(value) else None

    def _of_op(self, node: Node) -> Padded | None:
        """The pad that a pointwise op on alike pads and numbers makes."""
        found = [self.pads.get(i) for i in node.inputs]
        if not found or None in found or not _is_pointwise(node) or node.id in self.graph.reductions:
            return None
        pads = [pad for pad in found if pad is not None]
        inner = {(pad.widths, self.type(pad.inner).shape) for pad in pads}
        if len(inner) != 1:
            return None
        fill = _value(node.call, [pad.fill for pad in pads])
        return (
            Padded(self._again(node, [pad.inner for pad in pads]), pads[0].widths, fill) if fill is not None else None
        )

    def _again(self, node: Node, operands: Sequence[TensorRef]) -> TensorRef:
        """The op on other operands."""
        given = iter(operands)
        return self.call(node.call.op, *_with_tensors(node.call.args, given))

    def _goes_up(self, node: Node) -> bool:
        """Whether an op may be computed on slices in place of slicing its result, if that helps the one or the other.

        It does where one operand is padded, or a sum.
        """
        return self._may_go_up(node) and any(
            self._is_padded(i) or self._is_sum(i) or i in self.rising for i in node.inputs
        )

    def _may_go_up(self, node: Node) -> bool:
        made, *_ = node.outputs
        alone = made not in self.kept and made not in self.known and len(self.readers.get(made, ())) == 1
        return alone and node.id not in self.graph.reductions and _is_elementwise(node)

    def _is_padded(self, tensor: int) -> bool:
        known = self.known.get(tensor)
        return tensor in self.pads or (isinstance(known, Shifted) and known.fill is not None)

    def _is_sum(self, tensor: int) -> bool:
        node = self.makers.get(tensor)
        return node is not None and any(factor.kind is FactorKind.REDUCE for factor in node.rule.factors)

    def _sliced(self, tensor: int, bounds: Bounds) -> TensorRef:
        """The slice of a tensor, taken of what the tensor is made of."""
        order = inner_first(tensor, lambda i: self.makers[i].inputs if i in self.rising else ())
        seen, made = {tensor: bounds}, dict[tuple[int, Bounds], TensorRef]()
        parts = dict[int, list[tuple[int, Bounds]]]()
        for i in reversed([i for i in order if i in self.rising]):
            parts[i] = [(j, _seen_of(self.makers[i], place, seen[i])) for place, j in enumerate(self.makers[i].inputs)]
            seen.update(parts[i])
        for i in (i for i in order if i in parts):
            operands = [made.get(part) or self._slice_of(*part) for part in parts[i]]
            made[i, seen[i]] = self._again(self.makers[i], operands)
        return made[tensor, bounds]

    def _is_of_terms(self, node: Node) -> bool:
        """Whether a sum over dims is of terms of its own type, some of which are no sums themselves.

        Terms in half precision, which are added in Float, are not: their sums would be rounded before they cancel out.
        """
        terms = [i for i in self._inner_terms(node) if not self._is_inner_term(i, node)]
        alike = {node.call.results[0].dtype} == {self.graph.tensors[i].type.dtype for i in (node.inputs[0], *terms)}
        return len(terms) > 1 and alike and not all(map(self._is_sum, terms)) and node.id not in self.graph.reductions

    def _inner_terms(self, node: Node) -> list[int]:
        """What a sum is of and all that is added to it, each after what it is made of."""
        return inner_first(node.inputs[0], lambda i: self.makers[i].inputs if self._is_inner_term(i, node) else ())

    def _is_inner_term(self, tensor: int, node: Node) -> bool:
        """Whether a tensor is made of terms of a sum; one that repeats along a dim is taken as it is."""
        return (
            tensor in self.rising and _is_linear(self.makers[tensor])
            and self.graph.shape(tensor) == self.graph.shape(node.inputs[0])
        )  # fmt: skip

    def _summed(self, node: Node) -> TensorRef:
        """The sum over dims of a tensor, in sums of the terms that the tensor is made of."""
        made = dict[int, TensorRef]()
        for i in self._inner_terms(node):
            if self._is_inner_term(i, node):
                made[i] = self._again(self.makers[i], [made[j] for j in self.makers[i].inputs])
            else:
                made[i] = self._again(node, [self._repeated(i, self.graph.shape(node.inputs[0]))])
        return made[node.inputs[0]]

    def _repeated(self, tensor: int, shape: tuple[int, ...]) -> TensorRef:
        """A tensor in the shape that an elementwise op takes it in."""
        own = self.graph.shape(tensor)
        if own == shape:
            return TensorRef(tensor)
        dims = range(len(shape) - len(own), len(shape))
        return self.call("broadcast_in_dim", TensorRef(tensor), list(shape), list(dims))

    def _slice_of(self, tensor: int, bounds: Bounds) -> TensorRef:
        if all(row == (0, n, 1) for row, n in zip(bounds, self.graph.shape(tensor), strict=True)):
            return TensorRef(tensor)
        key = tensor, bounds
        if key not in self._slices:
            self._slices[key] = self.call("slice", TensorRef(tensor), *map(list, zip(*bounds, strict=True)))
        return self._slices[key]


def _applies(graph: Graph) -> bool:
    """Whether there are pads, or slices or sums of what is computed element by element; a look at each op."""
    makers, summed = {i: node for node in graph.nodes for i in node.outputs}, set[int]()
    for node in graph.nodes:
        maker = makers.get(node.inputs[0]) if node.name in ("slice", "sum") else None
        if node.name in ("pad", "cat") or (node.name == "slice" and maker is not None and _is_elementwise(maker)):
            return True
        if maker is not None and _is_linear(maker):
            summed.add(node.inputs[0])
    return bool(summed) and not summed.issubset(_read_again(graph, summed))


def _read_again(graph: Graph, tensors: Collection[int]) -> set[int]:
    """Those of the tensors that several ops read, or that are outputs."""
    read = Counter([i for node in graph.nodes for i in node.inputs if i in tensors])
    return {i for i, count in read.items() if count > 1}.union(graph.outputs)


def _seen_of(node: Node, operand: int, seen: Bounds) -> Bounds:
    """What an elementwise op reads of an operand for a slice of its result."""
    rows = dict(zip(node.rule.results[0], seen, strict=True))
    dims, shape = node.rule.operands[operand], node.call.types[operand].shape
    return tuple([rows[dim] if dim else (0, n, 1) for dim, n in zip(dims, shape, strict=True)])


def _pad_of(node: Node) -> Padded | None:
    """The pad that a node is, if it cuts nothing off."""
    window = own_window(node) if not node.call.op.is_view else None
    if window is None or window[1] is None or min(map(min, pad_widths(node.call).values())) < 0:
        return None
    return Padded(TensorRef(node.inputs[0]), tuple(node.call["pad_widths"]), window[1])


def _is_pointwise(node: Node) -> bool:
    """Whether each element of the result follows from numbers and those in its place, of one shape."""
    return _is_elementwise(node) and all(dims == node.rule.results[0] for dims in node.rule.operands)


def _is_elementwise(node: Node) -> bool:
    """Whether each element of the result follows from numbers and those in its place, of operands that may repeat."""
    (made, *more), rule = node.rule.results, node.rule
    read = {dim for dims in rule.operands for dim in dims}
    placed = all(len(dim) == 1 for dim in made) and read <= {*made, ()}
    passes = all(factor.kind is FactorKind.PASS for factor in rule.factors)
    if not node.inputs or more or not placed or not passes:
        return False
    return node.call.op.concat_distributive and {param.kind for param in node.call.op.params} <= {*_NUMBERS}


def _is_linear(node: Node) -> bool:
    """Whether the result is a sum of its operands, which may repeat, or one of them times a number."""
    if not _is_elementwise(node):
        return False
    pairs, partial = zip(node.call.op.params, node.call.args, strict=True), node.call.op.partial
    read = [isinstance(arg, TensorRef) for param, arg in pairs if param.kind in _OPERANDS]
    scales = partial is Partial.EACH or (partial is Partial.FIRST and read[0])
    return all(read) if partial is Partial.JOINT else scales and sum(read) == 1


def _with_tensors(args: Sequence[Any], given: Iterator[Any]) -> list[Any]:
    return [next(given) if isinstance(arg, TensorRef) else arg for arg in args]


def _value(call: Call, fills: Sequence[Number]) -> Number | None:
    """The result of a pointwise op on numbers; None where it is no number that a pad takes."""
    if any(isinstance(arg, ScalarRef) for arg in call.args):
        return None
    small = CallTable().get(call.op, call.args, tuple(ttype._replace(shape=(1,)) for ttype in call.types))[0]
    one = Sharding.replicated(DeviceMesh((1,), ("x",)), 1)
    names = [f"a{i}" for i in range(len(fills))]
    local = LocalCall(small, names, [one] * len(fills), [one], 0)
    scope: dict[str, Any] = {"torch": torch, "F": F, "K": kernels}
    scope["OP"] = SimpleNamespace(**{call.op.name: call.op.compute})
    for name, fill, ttype in zip(names, fills, call.types, strict=True):
        scope[name] = torch.full((1,), fill, dtype=getattr(torch, ttype.dtype.value), device="cpu")
    exec("\n".join(local.statements(["out"])), scope)
    value = scope["out"].item()
    return value if _is_plain(value) else None


def _is_plain(value: Any) -> bool:
    """Whether adding zero to a number, or filling it in, gives the very same number."""
    return isinstance(value, int | float) and math.isfinite(value) and not is_negative_zero(value)
