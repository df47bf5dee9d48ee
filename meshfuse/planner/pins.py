"""Other places for what ops make: a tensor beside a dear move is held elsewhere while all else is planned anew.

A beam drops what pays only after several ops have changed together, such as experts whose ranks share the hidden dim
and not the rows. So each tensor at a costly move is held in places next to its own, one at a time, as if the user had
annotated it, and the search finds places for all others. (A large neighbourhood search, as in Shaw, 1998.)
"""

from __future__ import annotations

import itertools
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from ..graph import Graph, Node
from ..resharding import ReshardedDefinition
from ..sharding import layout as lay
from ..sharding.layout import Split
from ..sharding.value import Axis, Sharding
from .starts import in_chunks

# A program is planned anew so many times at most, and so many of its ops in all.
_TIMES, _OPS = 80, 16000


class Pin(NamedTuple):
    """A tensor, and where it is held."""

    tensor: int
    sharding: Sharding


def most(graph: Graph) -> int:
    """How many pins are tried for a program of this size."""
    return min(_TIMES, _OPS // max(len(graph.nodes), 1))


def pins(resharded: ReshardedDefinition) -> list[Pin]:
    """The pins to try, one at a time; of equal layers those of one only."""
    graph, shardings = resharded.graph, resharded.sharded.shardings
    makers, kept = {i: node for node in graph.nodes for i in node.outputs}, in_chunks(graph)
    used = {(sharding.mesh, split.axis) for sharding in shardings.values() for split in sharding.splits}
    found: dict[tuple[int, int, Sharding, Sharding], Pin] = {}
    for tensor in _in_order(_beside_reshards(resharded, makers), graph, shardings):
        if tensor in makers and tensor not in graph.annotations and tensor not in kept:
            node, sharding = makers[tensor], shardings[tensor]
            for other in _next_to(sharding, graph.shape(tensor), used):
                key = (id(node.call), node.outputs.index(tensor), sharding, other)
                found.setdefault(key, Pin(tensor, other))
    return list(found.values())


def _beside_reshards(resharded: ReshardedDefinition, makers: Mapping[int, Node]) -> dict[int, None]:
    """The tensors that are moved, the dearest first, each followed by its op's operands and its readers' results."""
    spent: dict[int, float] = {}
    for reshard in resharded.reshards:
        tensor = resharded.values[reshard.source].tensor
        spent[tensor] = spent.get(tensor, 0.0) + resharded.seconds(reshard)
    made = _made_of(resharded.graph)
    order = sorted(spent, key=lambda i: -spent[i])
    beside = ((i, *(makers[i].inputs if i in makers else ()), *made.get(i, ())) for i in order)
    return dict.fromkeys(itertools.chain.from_iterable(beside))


def _in_order(tensors: Iterable[int], graph: Graph, shardings: Mapping[int, Sharding]) -> list[int]:
    """The largest first; last, those that some op has beside another in the same place: they follow it."""
    beside: dict[int, set[int]] = {}
    for node in graph.nodes:
        for i in (*node.inputs, *node.outputs):
            beside.setdefault(i, set()).update(node.inputs, node.outputs)
    first: dict[int, None] = {}
    alike: dict[int, None] = {}
    for i in tensors:
        like = (
            j
            for j in beside.get(i, ())
            if j in first and (shardings[j], graph.shape(j)) == (shardings[i], graph.shape(i))
        )
        (first if next(like, None) is None else alike)[i] = None
    return [*sorted(first, key=lambda i: -graph.tensors[i].type.numel), *alike]


def _made_of(graph: Graph) -> dict[int, list[int]]:
    """By tensor the results of its readers."""
    made: dict[int, list[int]] = {}
    for node in graph.nodes:
        for i in dict.fromkeys(node.inputs):
            made.setdefault(i, []).extend(node.outputs)
    return made


def _next_to(sharding: Sharding, shape: Sequence[int], used: Container[Axis]) -> Iterator[Sharding]:
    """Shardings next to this one: an axis, or all of a dim, on another dim or on none; or a used axis added."""
    dims = [lay.axes(layout) for layout in sharding.dims]
    for dim, axes in enumerate(dims):
        for left, gone in _taken(axes):
            rest = [left if d == dim else old for d, old in enumerate(dims)]
            yield from _evenly(sharding, rest, shape)
            for other in range(len(dims)):
                if other != dim:
                    yield from _evenly(sharding, _grown(rest, other, gone), shape)
    taken = {split.axis for axes in dims for split in axes}
    for name, size in zip(sharding.mesh.names, sharding.mesh.shape, strict=True):
        for dim in range(len(dims)) if name not in taken and (sharding.mesh, name) in used else ():
            yield from _evenly(sharding, _grown(dims, dim, (Split(size, name),)), shape)


_Axes = tuple[Split, ...]


def _taken(axes: _Axes) -> Iterator[tuple[_Axes, _Axes]]:
    """(axes that stay, axes that are taken away): one axis, or all."""
    for k, split in enumerate(axes):
        yield (*axes[:k], *axes[k + 1 :]), (split,)
    if len(axes) > 1:
        yield (), axes


def _grown(dims: Sequence[_Axes], dim: int, more: _Axes) -> list[_Axes]:
    return [(*axes, *more) if d == dim else axes for d, axes in enumerate(dims)]


def _evenly(sharding: Sharding, dims: Sequence[_Axes], shape: Sequence[int]) -> Iterator[Sharding]:
    found = Sharding.make(sharding.mesh, dims, shape)
    if all(n % lay.extent(layout) == 0 for n, layout in zip(shape, found.dims, strict=True)):
        yield found
