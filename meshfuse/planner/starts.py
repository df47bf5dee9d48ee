"""Other places for inputs: one whose parts a plan moves again and again may be moved once, at the start.

If a sequence is split and attention needs all of it, q, k and v each go to the heads by an all-to-all, and the results
come back by another. Rows brought to the batch before the first product leave nothing to move; but no op asks for that,
as nothing is wrong at the first one. So a search may start from inputs that lie elsewhere (`search.py`); the
all-to-alls that bring them there are paid for like any other move.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple, TypeVar

from ..graph import Graph, Node
from ..mesh import DeviceMesh
from ..ops.rules import FactorKind
from ..placement.growth import EPSILON
from ..propagation import ShardedDefinition
from ..reshard.search import plan
from ..reshard.steps import StepKind
from ..resharding import Reshard, ReshardedDefinition
from ..sharding import layout as lay
from ..sharding.layout import Layout, Split
from ..sharding.value import Axis, Sharding

Starts = Mapping[int, Sharding]
_InputDim = tuple[int, int]  # an input and a dim of it
_T = TypeVar("_T")
# Each is a search: no more are tried, and of inputs that are whole.
MOST, MOST_SHARED = 6, 3


class _InputGroup(NamedTuple):
    """All inputs of `ndim` dims on a mesh whose dim `dim` lies in the same layout."""

    mesh: DeviceMesh
    ndim: int
    dim: int
    layout: Layout


class _Origins(NamedTuple):
    """By dim of a tensor, the inputs that its split comes from; `terms`: those that its unreduced sum comes from."""

    dims: tuple[frozenset[_InputGroup], ...]
    terms: frozenset[_InputGroup] = frozenset()


def elsewhere(resharded: ReshardedDefinition) -> list[Starts]:
    """Inputs in other places, where bringing them there takes less than the moves of what is split after them.

    All inputs of a group go to another dim together, if that dim has one size, or are made whole (but not where the
    user asks for rounds). Those that may save most come first.
    """
    shardings, graph = resharded.sharded.shardings, resharded.graph
    spent, rounds, kept = _spent(resharded), in_rounds(graph), in_chunks(graph)
    found: dict[tuple[_InputGroup, int, int], dict[int, Sharding]] = {}
    for i in [i for i in _read_inputs(graph) if i not in kept]:
        for origin in filter(spent.__contains__, _own_origins(shardings[i])):
            for dim, start in _moved(shardings[i], origin, graph.shape(i)):
                found.setdefault((origin, dim, graph.shape(i)[dim]), {})[i] = start
            if not rounds:
                found.setdefault((origin, origin.dim, 0), {})[i] = _whole(shardings[i], origin.dim, graph.shape(i))
    saved = [(spent[origin] - _price(resharded, starts), starts) for (origin, _, _), starts in found.items()]
    worth = sorted([entry for entry in saved if entry[0] > EPSILON], key=lambda entry: -entry[0])
    return [starts for _, starts in worth[:MOST]]


def come_for_some(plan: ShardedDefinition) -> list[Starts]:
    """Inputs that a plan brings somewhere for one reader while others read them elsewhere, the largest first.

    One at a time may come there before all of its readers, at no cost: a plan may then use it there for all.
    """
    needs: dict[int, set[Sharding]] = {i: set() for i in plan.graph.input_tensors}
    for node, choice in zip(plan.graph.nodes, plan.choices, strict=True):
        for i, need in zip(node.inputs, choice.placement.operands, strict=True):
            if i in needs:
                needs[i].add(need)
    found = [(i, need) for i, here in needs.items() if len(here) > 1 for need in here if need is not plan.shardings[i]]
    found.sort(key=lambda place: (-plan.graph.tensors[place[0]].type.numel, place[0], str(place[1])))
    return [{i: need} for i, need in found[:MOST]]


def shared_starts(graph: Graph, shardings: Mapping[int, Sharding]) -> list[Starts]:
    """Inputs that are whole over used axes, as if each rank had a part of a dim: of dims that most computation follows.

    Where weights alone are split nobody asks for that, and it moves nothing. None where the user asks for rounds.
    """
    if in_rounds(graph):
        return []
    used = {(sharding.mesh, split.axis) for sharding in shardings.values() for split in sharding.splits}
    kept = in_chunks(graph)
    alike = {(graph.tensors[i].type, shardings[i]): i for i in reversed(_read_inputs(graph)) if i not in kept}
    parts = {(i, dim): part for i in alike.values() for dim, part in _parts(shardings[i], graph.shape(i), used)}
    reach = _reach(graph, parts)
    return [{place[0]: parts[place]} for place in sorted(parts, key=lambda p: (-reach[p], p))[:MOST_SHARED]]


def in_rounds(graph: Graph) -> bool:
    """Whether the user asks for an op in rounds: ranks then keep their own rows, whatever that costs elsewhere."""
    return any(node.call.op.ring_schedule for node in graph.nodes)


def in_chunks(graph: Graph) -> frozenset[int]:
    """The tensors of ops that the user streams: held elsewhere, ranks would have chunks of another size, or none."""
    touched, streamed = [{*node.inputs, *node.outputs} for node in graph.nodes], graph.streamed()
    return frozenset[int]().union(*[tensors for tensors in touched if not streamed.isdisjoint(tensors)])


def _reach(graph: Graph, places: Iterable[_InputDim]) -> dict[_InputDim, int]:
    """For these dims of inputs, how many elements are computed with a dim that follows them."""
    reach, none = dict.fromkeys(places, 0), frozenset[_InputDim]()
    follow = {i: tuple([frozenset({(i, dim)} & reach.keys()) for dim in range(len(graph.shape(i)))])
              for i in graph.input_tensors}  # fmt: skip
    for node in graph.nodes:
        known = _of_factors(node, follow)
        for i, dims, ttype in zip(node.outputs, node.rule.results, node.call.results, strict=True):
            follow[i] = tuple([none.union(*(known[f] for f in factors)) for factors in dims])
            for place in none.union(*follow[i]):
                reach[place] += ttype.numel
    return reach


def _parts(sharding: Sharding, shape: tuple[int, ...], used: Container[Axis]) -> Iterator[tuple[int, Sharding]]:
    """By dim, the sharding with the used axes that are free in it on that dim, as its minor splits.

    Where these do not divide the dim, as many of their ranks as do: four of eight for a batch of four.
    """
    mesh, taken = sharding.mesh, {split.axis for split in sharding.splits}
    axes = zip(mesh.names, mesh.shape, strict=True)
    free = [Split(n, axis) for axis, n in axes if (mesh, axis) in used and axis not in taken]
    for dim, layout in enumerate(sharding.dims):
        grown = (*layout, *_fitting(free, shape[dim] // lay.extent(layout)))
        if len(grown) > len(layout) and shape[dim] % lay.extent(grown) == 0:
            yield dim, Sharding.make(mesh, [*sharding.dims[:dim], grown, *sharding.dims[dim + 1 :]], shape)


def _fitting(axes: Sequence[Split], steps: int) -> tuple[Split, ...]:
    """The axes that together cut so many steps evenly, into most parts; the minor part of one axis where none does."""
    if not steps:
        return ()
    some = (kept for n in range(len(axes), 0, -1) for kept in itertools.combinations(axes, n))
    even = [kept for kept in some if steps % lay.extent(kept) == 0]
    if even:
        return max(even, key=lay.extent)
    parts = ((split, math.gcd(split.size or 1, steps)) for split in axes)
    minor = (split._replace(size=part, pre=(split.size or 1) // part) for split, part in parts if part > 1)
    return tuple(itertools.islice(minor, 1))


def _read_inputs(graph: Graph) -> list[int]:
    """The inputs that some op reads."""
    read = {i for node in graph.nodes for i in node.inputs}
    return [i for i in graph.input_tensors if i in read]


def _own_origins(sharding: Sharding) -> Iterator[_InputGroup]:
    for dim, layout in enumerate(sharding.dims):
        if lay.axes(layout):
            yield _InputGroup(sharding.mesh, sharding.ndim, dim, layout)


def _moved(sharding: Sharding, origin: _InputGroup, shape: tuple[int, ...]) -> Iterator[tuple[int, Sharding]]:
    """The sharding with the group's axes moved to another dim, as its minor splits, for each dim that they divide."""
    yield from _with_minor(sharding, shape, lay.axes(origin.layout), origin.dim)


def _whole(sharding: Sharding, dim: int, shape: tuple[int, ...]) -> Sharding:
    return Sharding.make(sharding.mesh, [*sharding.dims[:dim], (), *sharding.dims[dim + 1 :]], shape)


def _with_minor(
    sharding: Sharding, shape: tuple[int, ...], axes: Sequence[Split], left: int | None = None
) -> Iterator[tuple[int, Sharding]]:
    """By dim that these axes divide, the sharding with them as its minor splits; dim `left` is made whole."""
    for dim, layout in enumerate(sharding.dims):
        grown = (*layout, *axes)
        if dim != left and shape[dim] and shape[dim] % lay.extent(grown) == 0:
            dims = [grown if d == dim else () if d == left else old for d, old in enumerate(sharding.dims)]
            yield dim, Sharding.make(sharding.mesh, dims, shape)


def _price(resharded: ReshardedDefinition, starts: Starts) -> float:
    types = {i: resharded.graph.tensors[i].type for i in starts}
    plans = [
        plan(resharded.sharded.shardings[i], s, types[i].shape, types[i].dtype.itemsize) for i, s in starts.items()
    ]
    return sum(math.inf if found is None else found.seconds for found in plans)


def _spent(resharded: ReshardedDefinition) -> dict[_InputGroup, float]:
    """By group of inputs, the modelled time of moves in which dims that follow them lose a split, or are summed."""
    origins, found = _origins(resharded.graph, resharded.sharded.shardings), dict[_InputGroup, float]()
    for reshard in resharded.reshards:
        for origin in _left(reshard, origins[resharded.values[reshard.source].tensor]):
            found[origin] = found.get(origin, 0.0) + resharded.seconds(reshard)
    return found


def _left(reshard: Reshard, origins: _Origins) -> set[_InputGroup]:
    """The origins of the dims that a move changes, and of the sums that it reduces."""
    src, dst = reshard.step.src, reshard.step.dst
    window = reshard.step.kind is StepKind.WINDOW
    rows = zip(src.dims, dst.dims, origins.dims, strict=True)
    moved = {origin for before, after, here in rows if window or before != after for origin in here}
    return moved | _sharing(origins.terms, {(src.mesh, split.axis) for split in src.partial if not dst.partial})


def _origins(graph: Graph, shardings: Mapping[int, Sharding]) -> dict[int, _Origins]:
    """By tensor the inputs that its dims and its unreduced sums come from, in a plan.

    A dim that does not follow an operand's split got it by a move: it comes from whatever had those axes.
    """
    found: dict[int, _Origins] = {i: _of_input(shardings[i]) for i in graph.input_tensors}
    for node in graph.nodes:
        known = _of_factors(node, {j: found[j].dims for j in node.inputs})
        summed = (known[f] for f, factor in enumerate(node.rule.factors) if factor.kind is FactorKind.REDUCE)
        terms = frozenset().union(*summed, *(found[i].terms for i in node.inputs))
        anywhere = frozenset().union(*(here for i in node.inputs for here in found[i].dims))
        for dims, i in zip(node.rule.results, node.outputs, strict=True):
            made = zip(shardings[i].dims, dims, strict=True)
            mesh = shardings[i].mesh
            split = tuple([_of_dim(mesh, layout, [known[f] for f in factors], anywhere) for layout, factors in made])
            found[i] = _Origins(split, terms)
    return found


def _of_input(sharding: Sharding) -> _Origins:
    own = {origin.dim: frozenset((origin,)) for origin in _own_origins(sharding)}
    return _Origins(tuple([own.get(dim, frozenset()) for dim in range(sharding.ndim)]))


def _of_factors(node: Node, dims: Mapping[int, Sequence[frozenset[_T]]]) -> list[frozenset[_T]]:
    """By factor of the op, the origins of the operands' dims that it is in."""
    known = [frozenset[_T]()] * len(node.rule.factors)
    for i, rows in zip(node.inputs, node.rule.operands, strict=True):
        for here, factors in zip(dims[i], rows, strict=True):
            for f in factors if here else ():
                known[f] |= here
    return known


def _of_dim(
    mesh: DeviceMesh, layout: Layout, known: Iterable[frozenset[_InputGroup]], anywhere: frozenset[_InputGroup]
) -> frozenset[_InputGroup]:
    over = {(mesh, split.axis) for split in lay.axes(layout)}
    sharing = [_sharing(origins, over) for origins in (frozenset().union(*known), anywhere)] if over else []
    return next(filter(None, sharing), frozenset())


def _sharing(origins: frozenset[_InputGroup], over: Container[Axis]) -> frozenset[_InputGroup]:
    """Those of the origins that lie over one of these axes."""
    return frozenset([o for o in origins if any((o.mesh, split.axis) in over for split in lay.axes(o.layout))])
