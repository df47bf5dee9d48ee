"""What a loss is divided by that depends on the data, such as how many targets are not left out, over micro-batches.

The mean over the targets of a batch is no mean of those of its parts, where these have different numbers of them. So
each micro-batch's loss is divided by the number of the whole batch: that becomes an argument of its graph, and what it
is added up of is computed for all micro-batches before the first forward.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from torch.utils import _pytree as pytree

from ..captured_graph import Captured, Source
from ..cut import Reads, draws
from ..steps import Setting

Node = torch.fx.Node
aten = torch.ops.aten
# How what micro-batches have is that of the batch: added up, or averaged by their rows.
Combined = Literal["sum", "mean"]

_SUMS, _MEANS = (aten.sum.default, aten.sum.dim_IntList), (aten.mean.default, aten.mean.dim)
_AS_IT_IS = (
    aten.view.default, aten._unsafe_view.default, aten.reshape.default, aten._to_copy.default, aten.clone.default,
    aten.neg.default, aten.squeeze.default, aten.squeeze.dim, aten.unsqueeze.default, aten.alias.default,
)  # fmt: skip
_PRODUCTS, _QUOTIENTS = (aten.mul.Tensor, aten.mul.Scalar), (aten.div.Tensor, aten.div.Scalar)
_ADDED = (aten.add.Tensor, aten.sub.Tensor)


@dataclass(frozen=True, slots=True)
class Normalizer:
    """A factor of the loss that is the same function of the batch as of a micro-batch.

    reduced, combined: the sum or mean over elements that it follows from. chain: the ops from there to it.
    divides: whether the loss is divided by it, rather than multiplied. numerator: how what it is a factor of combines.
    """

    node: Node
    reduced: Node
    combined: Combined
    chain: tuple[Node, ...]
    divides: bool
    numerator: Combined
    dtype: torch.dtype

    def of_batch(self, parts: Sequence[torch.Tensor], shares: Sequence[float]) -> list[torch.Tensor]:
        """By micro-batch what takes its place, of what each has of `reduced`: losses are averaged by `shares`."""
        weights = shares if self.combined == "mean" else [1] * len(parts)
        value = sum((part * weight for part, weight in zip(parts, weights, strict=True)), torch.zeros_like(parts[0]))
        before = self.reduced
        for node in self.chain:
            op: Any = node.target
            args, kwargs = torch.fx.map_arg((node.args, node.kwargs), {before: value}.__getitem__)
            value, before = op(*args, **kwargs), node
        value = value.to(self.dtype)
        scales = [1.0 if self.numerator == "mean" else share for share in shares]
        return [value * scale if self.divides else value / scale for scale in scales]


@dataclass(frozen=True, slots=True)
class Normalized:
    """A captured loss whose normalizers are arguments, from place `first` on.

    counts: the graph of what they are added up of; None where there are none.
    adds_up: whether losses of micro-batches are added up, rather than averaged by their rows.
    """

    graph: Captured
    first: int
    normalizers: tuple[Normalizer, ...] = ()
    counts: Captured | None = None
    adds_up: bool = False

    @property
    def places(self) -> range:
        return range(self.first, self.first + len(self.normalizers))

    def taken_into(self, setting: Setting) -> Setting:
        """The setting with what it says of arguments said of normalizers."""
        return replace(
            setting,
            names={**setting.names, **{place: "what the loss is divided by" for place in self.places}},
            shapes={**setting.shapes, **dict.fromkeys(self.places, ())},
        )


def normalized(graph: Captured, batch: Collection[int], rows: int, first: int) -> Normalized:
    """Have what a loss is divided by, where that is of its data, be arguments from place `first` on.

    batch: the places of the arguments that are cut into micro-batches, and `rows` how many these have.
    """
    loss = graph.of_kind("result")[0][0]
    found = _Terms(graph, batch, rows, Reads({}).ancestors([loss]))
    kinds = found.combined(loss)
    if not found.normalizers:
        return Normalized(graph, first, adds_up=kinds == {"sum"})
    made = tuple(found.normalizers.values())
    counts = _graph_of(graph, [one.reduced for one in made])
    inputs = [_as_argument(graph, one, first + i) for i, one in enumerate(made)]
    graph = replace(graph, inputs=(*graph.inputs, *inputs))
    return Normalized(graph, first, made, counts, kinds == {"sum"})


@dataclass(slots=True)
class _Terms:
    """Walks from a loss back through what is linear."""

    graph: Captured
    batch: Collection[int]
    rows: int
    forward: set[Node]
    normalizers: dict[Node, Normalizer] = field(default_factory=dict)
    _known: dict[Node, tuple[bool, bool]] = field(default_factory=dict)

    def combined(self, node: Node) -> set[Combined]:
        """How the terms of a node of the forward combine over micro-batches."""
        target, reads = node.target, node.all_input_nodes
        if target in _ADDED and len(reads) == 2:
            return self.combined(reads[0]) | self.combined(reads[1])
        if target in _AS_IT_IS or (target in (*_PRODUCTS, *_QUOTIENTS) and len(reads) == 1):
            return {"mean"} if self._is_count_of_rows(node) else self.combined(reads[0])
        if target in (aten.mul.Tensor, aten.div.Tensor) and (factor := self._factor(node)) is not None:
            other = next(read for read in reads if read is not factor)
            return self._normalized(node, factor, self.combined(other))
        if target in _SUMS and self._is_of_batch(node):
            return self._combined_elements(reads[0])
        return {"mean"}

    def _combined_elements(self, node: Node) -> set[Combined]:
        """How the sum of a node's elements combines: it may be they that are divided by a normalizer."""
        while node.target in _AS_IT_IS:
            node = node.all_input_nodes[0]
        if node.target in (aten.mul.Tensor, aten.div.Tensor) and (factor := self._factor(node)) is not None:
            return self._normalized(node, factor, {"sum"})
        return {"sum"}

    def _normalized(self, node: Node, factor: Node, numerator: set[Combined]) -> set[Combined]:
        """How a product with, or a quotient by, a number of the data combines."""
        made = self._normalizer(node, factor, numerator)
        if made is None:
            return numerator if not self._depends(factor)[1] else {"mean"}
        self.normalizers[factor] = made
        return {"mean"}

    def _normalizer(self, node: Node, factor: Node, numerator: set[Combined]) -> Normalizer | None:
        chain, at = list[Node](), factor
        while at.target not in (*_SUMS, *_MEANS):
            if at.op != "call_function" or len(at.all_input_nodes) != 1 or at.meta["val"].ndim:
                return None
            chain.append(at)
            at = at.all_input_nodes[0]
        divides = node.target is aten.div.Tensor
        used = [user for user in factor.users if user in self.forward]
        known = self.normalizers.get(factor)
        if len(numerator) != 1 or not self._is_of_batch(at) or len(used) != 1 or known is not None:
            return None
        dtype = factor.meta["val"].dtype
        dtype = dtype if dtype.is_floating_point else node.meta["val"].dtype
        (how,) = numerator
        combined: Combined = "sum" if at.target in _SUMS else "mean"
        return Normalizer(factor, at, combined, tuple(reversed(chain)), divides, how, dtype)

    def _factor(self, node: Node) -> Node | None:
        """The operand of a product or quotient that is a number of the data alone."""
        reads = node.all_input_nodes
        places = (1,) if node.target is aten.div.Tensor else (1, 0)
        for operand in [node.args[i] for i in places] if len(reads) == 2 else []:
            if isinstance(operand, Node) and not operand.meta["val"].ndim and self._depends(operand)[0]:
                return operand
        return None

    def _is_of_batch(self, node: Node) -> bool:
        """Whether a node is a number made of rows of the batch."""
        return not node.meta["val"].ndim and self._depends(node)[1]

    def _is_count_of_rows(self, node: Node) -> bool:
        """Whether a sum is divided by how many rows or elements a micro-batch has."""
        if node.target not in (*_PRODUCTS, *_QUOTIENTS):
            return False
        number = next((arg for arg in node.args if isinstance(arg, int | float)), 0)
        divisor = number if node.target in _QUOTIENTS else 1 / number if number else 0
        reduced = node.all_input_nodes[0]
        while reduced.target in _AS_IT_IS:
            reduced = reduced.all_input_nodes[0]
        shape = reduced.all_input_nodes[0].meta["val"].shape if reduced.target in _SUMS else ()
        counts = {math.prod(shape[:n]) for n in range(1, len(shape) + 1)} | {self.rows}
        return any(math.isclose(divisor, count) for count in counts)

    def _depends(self, node: Node) -> tuple[bool, bool]:
        """(whether a node depends on arguments and constants alone, whether on those of the batch)."""
        if not self._known:
            self._find()
        return self._known[node]

    def _find(self) -> None:
        for node, source in self.graph.inputs:
            self._known[node] = source.kind in ("argument", "constant"), source.place in self.batch
        for node in self.graph.module.graph.nodes:
            if node.op == "call_function":
                reads = [self._known[read] for read in node.all_input_nodes]
                free = not draws(node) and all(alone for alone, _ in reads)
                self._known[node] = free, any(of_batch for _, of_batch in reads)


def _as_argument(graph: Captured, one: Normalizer, place: int) -> tuple[Node, Source]:
    """Let a normalizer be an argument, in the forward and the backward."""
    nodes, old = graph.module.graph, one.node
    with nodes.inserting_before(next(iter(nodes.nodes))):
        made = nodes.placeholder(f"normalizer_{place}")
    made.meta = {"val": old.meta["val"].new_empty((), dtype=one.dtype)}
    scaled = (aten.div.Tensor,) if one.divides else (aten.mul.Tensor,)
    old.replace_all_uses_with(made, delete_user_cb=lambda user: user.target in scaled, propagate_meta=False)
    return made, Source("argument", place=place)


def _graph_of(graph: Captured, ends: Sequence[Node]) -> Captured:
    """The graph that gives these nodes."""
    new, of = torch.fx.Graph(), dict[Node, Node]()
    needed, inputs = Reads({}).ancestors(ends), list(_copied_inputs(graph, ends, new, of))
    for node in graph.module.graph.nodes:
        if node.op == "call_function" and node in needed:
            of[node] = new.node_copy(node, of.__getitem__)
    outputs = tuple([(of[node], Source("result", place=i)) for i, node in enumerate(ends)])
    new.output([node for node, _ in outputs])
    module = torch.fx.GraphModule(graph.module, new)
    return Captured(module, tuple(inputs), outputs, pytree.tree_structure(0), True)


def _copied_inputs(
    graph: Captured, ends: Sequence[Node], new: torch.fx.Graph, of: dict[Node, Node]
) -> Iterator[tuple[Any, Source]]:
    reads = {read for node in Reads({}).ancestors(ends) for read in node.all_input_nodes}
    for node, source in graph.inputs:
        if node in reads:
            of[node] = new.node_copy(node, of.__getitem__)
            yield of[node], source
