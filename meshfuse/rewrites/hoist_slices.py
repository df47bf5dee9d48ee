"""Rows that are picked of what an op sums, picked of its operands: slice(x @ w) is x @ slice(w), or slice(x) @ w.

Queries, keys, values and an MLP's input may be columns of one product, whose weight is split evenly: blocks of the
product are no blocks of its parts. Slices of the weight, which is smaller, are then brought where each part is wanted.
Of a layer's result the rows of the last token alone may be read, or those of some: then only these are summed over
ranks.

It goes through all ops that rows pass unchanged, back to where a tensor is read by something else, too.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

from ..graph import Graph, Node, users
from ..ops.rules import FactorKind
from ..ops.shape_arithmetic import dim_of as picked_dim
from ..ops.shape_arithmetic import with_size
from ..ops.values import TensorRef
from ..ops.windows import slice_bounds
from ..traversal import inner_first
from .graph_writer import GraphWriter, dims_of, is_whole_dim, without_unread

_PICKS = ("slice", "select", "index_select", "take_along_axis")
# Ops that repeat a tensor along dims, each of whose own dims is one of the result's.
_SPREADS = ("broadcast", "broadcast_in_dim", "expand")


class _Rows(NamedTuple):
    """Which rows of a dim are picked: from start to stop by steps, or `count` that an index names.

    `index` is a tensor, whose dims in `ones` are of size 1.
    """

    count: int
    bounds: tuple[int, int, int] | None = None
    index: int = -1
    ones: tuple[int, ...] = ()


class _Place(NamedTuple):
    """A tensor, the dim that rows are picked of, and the dim that each dim of the index goes along but those in `ones`.

    Along the picked dim an index has the rows' places, along others it has other rows at each place.
    """

    tensor: int
    dim: int
    along: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Picked:
    """The rewriting in which rows of sums are sums of rows."""

    sized: ClassVar[bool] = True

    def __call__(self, graph: Graph) -> Graph:
        """The graph itself where there is nothing to change."""
        if not any(node.name in _PICKS for node in graph.nodes):
            return graph
        writer = _PickedWriter(graph)
        chosen = {node.id for node in graph.nodes if writer.is_of_sums(node)}
        return without_unread(writer.run(chosen)).with_rewrite(self) if chosen else graph


class _PickedWriter(GraphWriter):
    """Picks rows as early as they may be picked."""

    def __init__(self, graph: Graph):
        super().__init__(graph)
        self._makers = {i: node for node in graph.nodes for i in node.outputs}
        self._rising = set(_rising(graph))
        self._made: dict[tuple[_Place, _Rows], TensorRef] = {}
        self._narrow: dict[tuple[int, tuple[int, ...]], TensorRef] = {}

    def is_of_sums(self, node: Node) -> bool:
        """Whether a node picks rows of what follows from a sum that they may be picked before.

        An index must be read somewhere: of rows that are one row repeated it would be lost, and with it the error where
        it names none of them.
        """
        found = self._pick_of(node)
        if found is None:
            return False
        order = self._order(found[0])
        above = [place for place in order if self._above(place) is not None]
        is_read = found[1].bounds is not None or len(above) < len(order)
        return is_read and any(
            any(factor.kind is FactorKind.REDUCE for factor in self._makers[place.tensor].rule.factors)
            for place in above
        )  # fmt: skip

    def form(self, node: Node) -> Sequence[TensorRef]:
        found = self._pick_of(node)
        assert found is not None
        (top, rows), made = found, dict[_Place, TensorRef]()
        for place in self._order(top):
            above = self._above(place)
            if above is None:
                made[place] = self._picked(place, rows)
                continue
            maker = self._makers[place.tensor]
            (factor,) = maker.rule.results[0][place.dim]
            read = [
                TensorRef(i) if there is None else made[there] for i, there in zip(maker.inputs, above, strict=True)
            ]
            made[place] = self.again(maker, factor, rows.count, read)
        return [self.call("squeeze", made[top], [top.dim]) if node.name == "select" else made[top]]

    def _order(self, top: _Place) -> list[_Place]:
        """What rows are to be picked of for those of a tensor, each place after those that it follows from."""
        return inner_first(top, lambda place: [there for there in self._above(place) or () if there is not None])

    def _above(self, place: _Place) -> list[_Place | None] | None:
        """By operand of the tensor's op, where rows are picked of it instead: None for nowhere, as it has no such dim.

        None where the rows cannot be picked of the operands.
        """
        node = self._makers.get(place.tensor)
        if node is None or place.tensor not in self._rising or not node.inputs:
            return None
        factors = [_alone(node, dim) for dim in (place.dim, *place.along)]
        if None in factors:
            return None
        dim, *along = [dims_of(node, factor) for factor in factors if factor is not None]
        found = list[_Place | None]()
        for k, i in enumerate(node.inputs):
            there, others = dim[k], [dims[k] for dims in along]
            if there is not None and None in others:
                return None
            found.append(_Place(i, there, tuple([d for d in others if d is not None])) if there is not None else None)
        return found

    # picking

    def _pick_of(self, node: Node) -> tuple[_Place, _Rows] | None:
        """What rows a node picks, and of what; None for other nodes, and where nothing is left."""
        if node.name not in _PICKS or 0 in node.call.results[0].shape:
            return None
        if node.name == "slice":
            return _cut(node)
        dim, tensor = picked_dim(node.call), node.inputs[0]
        if node.name == "select":
            index, n = node.call["index"], node.call.types[0].shape[dim]
            return (_Place(tensor, dim), _at(index % n)) if isinstance(index, int) else None
        return self._by_index(node, dim)

    def _by_index(self, node: Node, dim: int) -> tuple[_Place, _Rows] | None:
        (tensor, index), (source, shape) = node.inputs, (node.call.types[0].shape, node.call.types[1].shape)
        places: list[int | None] = [dim] * len(shape) if node.name == "index_select" else [*range(len(shape))]
        known = [d for d, n in zip(places, shape, strict=True) if d != dim and n != 1]
        if len(shape) not in (len(source), int(node.name == "index_select")) or any(
            d is None or shape[d] != source[d] for d in known
        ):
            return None
        index, places = self._unspread(index, [d if n != 1 else None for d, n in zip(places, shape, strict=True)])
        ones = tuple([k for k, d in enumerate(places) if d is None])
        along = tuple([d for d in places if d is not None])
        return _Place(tensor, dim, along), _Rows(node.call.results[0].shape[dim], None, index, ones)

    def _unspread(self, index: int, places: list[int | None]) -> tuple[int, list[int | None]]:
        """The tensor that an index repeats, and which dims its own are; None for those of size 1."""
        node = self._makers.get(index)
        while node is not None and node.name in _SPREADS:
            made = node.rule.results[0]
            places = [places[made.index(dim)] if dim else None for dim in node.rule.operands[0]]
            (index,) = node.inputs
            node = self._makers.get(index)
        return index, places

    def _picked(self, place: _Place, rows: _Rows) -> TensorRef:
        if (place, rows) not in self._made:
            make = self._slice if rows.bounds is not None else self._looked_up
            self._made[place, rows] = make(place, rows)
        return self._made[place, rows]

    def _slice(self, place: _Place, rows: _Rows) -> TensorRef:
        assert rows.bounds is not None
        shape = self.graph.shape(place.tensor)
        whole = ([0] * len(shape), shape, [1] * len(shape))
        bounds = [with_size(entries, place.dim, n) for entries, n in zip(whole, rows.bounds, strict=True)]
        return self.call("slice", TensorRef(place.tensor), *map(list, bounds))

    def _looked_up(self, place: _Place, rows: _Rows) -> TensorRef:
        index, shape = self._squeezed(rows), self.graph.shape(place.tensor)
        if all(d == place.dim for d in place.along):
            return self.call("index_select", TensorRef(place.tensor), index, place.dim)
        order = sorted(range(len(place.along)), key=place.along.__getitem__)
        turned = index if order == sorted(order) else self.call("permute", index, order)
        along = [place.along[k] for k in order]
        sizes = [rows.count if d == place.dim else shape[d] if d in along else 1 for d in range(len(shape))]
        return self.call("take_along_axis", TensorRef(place.tensor),
                         self.call("broadcast_in_dim", turned, sizes, along), place.dim)  # fmt: skip

    def _squeezed(self, rows: _Rows) -> TensorRef:
        key = rows.index, rows.ones
        if key not in self._narrow:
            ref = TensorRef(rows.index)
            self._narrow[key] = self.call("squeeze", ref, list(rows.ones)) if rows.ones else ref
        return self._narrow[key]


def _alone(node: Node, dim: int) -> int | None:
    """The factor of a result's dim, if it passes through and is a whole dim wherever it is."""
    factors, rule = node.rule.results[0][dim], node.rule
    if len(factors) != 1 or rule.factors[factors[0]].kind is not FactorKind.PASS:
        return None
    return factors[0] if is_whole_dim(rule, factors[0]) else None


def _rising(graph: Graph) -> Iterator[int]:
    """Tensors of which only rows are read, made by ops that may be computed on rows; and what only those read."""
    readers, kept, found = users(graph.nodes), {*graph.annotations, *graph.streams, *graph.outputs}, set[int]()
    for node in reversed(graph.nodes):
        made, *more = node.outputs
        if more or made in kept or not node.call.op.concat_distributive or node.id in graph.reductions:
            continue
        read = [graph.nodes[i] for i in readers.get(made, ())]
        if all(_picks(reader, made) or found.issuperset(reader.outputs) for reader in read):
            found.add(made)
            yield made


def _picks(node: Node, tensor: int) -> bool:
    """Whether a node only picks rows of a tensor, which is not its index."""
    return node.name in _PICKS and tensor not in node.inputs[1:]


def _cut(node: Node) -> tuple[_Place, _Rows] | None:
    """What a slice reads, if it is cut along one dim only."""
    rows = zip(slice_bounds(node.call), node.call.types[0].shape, strict=True)
    cut = [(dim, bounds) for dim, (bounds, n) in enumerate(rows) if bounds != (0, n, 1)]
    if len(cut) != 1:
        return None
    ((dim, bounds),) = cut
    return _Place(node.inputs[0], dim), _Rows(len(range(*bounds)), bounds)


def _at(place: int) -> _Rows:
    return _Rows(1, (place, place + 1, 1))
