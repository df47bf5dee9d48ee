"""Slices of what an op sums, taken of its operands: slice(x @ w) is x @ slice(w), or slice(x) @ w.

Queries, keys, values and an MLP's input may be columns of one product, whose weight is split evenly: blocks of the
product are no blocks of its parts. Slices of the weight, which is smaller, are then brought where each part is wanted.
Of a layer's result the rows of the last token alone may be read: then only these are summed over ranks.

It goes through all ops that the slice passes unchanged, back to where a tensor is read by something else, too.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

from ..graph import Graph, Node, users
from ..ops.base import FactorKind, TensorRef
from ..ops.shape_arithmetic import with_size
from ..ops.windows import slice_bounds
from ..walks import inner_first
from .graphs import GraphWriter, dims_of, without_unread

# A tensor, and one of its dims.
_Place = tuple[int, int]


class _Rows(NamedTuple):
    """What a slice reads of one dim; of all others it reads everything."""

    dim: int
    start: int
    stop: int
    step: int


@dataclass(frozen=True, slots=True)
class Picked:
    """The rewriting in which slices of sums are sums of slices."""

    sized: ClassVar[bool] = True

    def __call__(self, graph: Graph) -> Graph:
        """The graph itself where there is nothing to change."""
        if not any(node.name == "slice" for node in graph.nodes):
            return graph
        writer = _PickedWriter(graph)
        chosen = {node.id for node in graph.nodes if writer.is_of_sums(node)}
        return without_unread(writer.run(chosen)).noting(self) if chosen else graph


class _PickedWriter(GraphWriter):
    """Takes slices as early as they may come."""

    def __init__(self, graph: Graph):
        super().__init__(graph)
        self._makers = {i: node for node in graph.nodes for i in node.outputs}
        self._rising = set(_rising(graph))
        self._slices: dict[tuple[int, _Rows], TensorRef] = {}

    def is_of_sums(self, node: Node) -> bool:
        """Whether a node is a slice of what follows from a sum that the slice may come before."""
        rows = _rows_of(node)
        return rows is not None and any(
            any(factor.kind is FactorKind.REDUCE for factor in self._makers[i].rule.factors)
            for i, dim in self._order((node.inputs[0], rows.dim)) if self._above(i, dim) is not None
        )  # fmt: skip

    def form(self, node: Node) -> Sequence[TensorRef]:
        rows = _rows_of(node)
        assert rows is not None
        made, top = dict[_Place, TensorRef](), (node.inputs[0], rows.dim)
        for tensor, dim in self._order(top):
            above = self._above(tensor, dim)
            if above is None:
                made[tensor, dim] = self._slice(tensor, rows._replace(dim=dim))
                continue
            maker, (factor,) = self._makers[tensor], self._makers[tensor].rule.results[0][dim]
            read = [TensorRef(i) if there is None else made[i, there] for i, there in above]
            made[tensor, dim] = self.again(maker, factor, len(range(*rows[1:])), read)
        return [made[top]]

    def _order(self, top: _Place) -> list[_Place]:
        """What is to be sliced for a slice of a tensor, each place after those that it follows from."""
        return inner_first(top, lambda place: [(i, dim) for i, dim in self._above(*place) or () if dim is not None])

    def _above(self, tensor: int, dim: int) -> list[tuple[int, int | None]] | None:
        """By operand of the tensor's op, the dim that a slice of the tensor along `dim` is one along: None for no dim.

        None where the slice cannot be taken of the operands.
        """
        node = self._makers.get(tensor)
        if node is None or tensor not in self._rising or not node.inputs:
            return None
        factors = node.rule.results[0][dim]
        if len(factors) != 1 or node.rule.factors[factors[0]].kind is not FactorKind.PASS:
            return None
        sides = (*node.rule.operands, *node.rule.results)
        alone = all(found == factors for dims in sides for found in dims if factors[0] in found)
        return list(zip(node.inputs, dims_of(node, factors[0]), strict=True)) if alone else None

    def _slice(self, tensor: int, rows: _Rows) -> TensorRef:
        if (tensor, rows) not in self._slices:
            shape = self.graph.shape(tensor)
            bounds = [with_size(whole, rows.dim, n) for whole, n in zip(([0] * len(shape), shape, [1] * len(shape)),
                                                                        rows[1:], strict=True)]  # fmt: skip
            self._slices[tensor, rows] = self.call("slice", TensorRef(tensor), *map(list, bounds))
        return self._slices[tensor, rows]


def _rising(graph: Graph) -> Iterator[int]:
    """Tensors that only slices read, and ops that may be computed on slices: those whose results are such tensors."""
    readers, kept, found = users(graph.nodes), {*graph.annotations, *graph.streams, *graph.outputs}, set[int]()
    for node in reversed(graph.nodes):
        made, *more = node.outputs
        if more or made in kept or not node.call.op.pieced or node.id in graph.reductions:
            continue
        read = [graph.nodes[i] for i in readers.get(made, ())]
        if all(reader.name == "slice" or found.issuperset(reader.outputs) for reader in read):
            found.add(made)
            yield made


def _rows_of(node: Node) -> _Rows | None:
    """What a slice reads, if it is cut along one dim only, and something is left of it."""
    if node.name != "slice" or 0 in node.call.results[0].shape:
        return None
    cut = [_Rows(dim, *bounds) for dim, (bounds, n) in enumerate(zip(slice_bounds(node.call), node.call.types[0].shape,
                                                                     strict=True)) if bounds != (0, n, 1)]  # fmt: skip
    return cut[0] if len(cut) == 1 else None
