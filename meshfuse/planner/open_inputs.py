"""Inputs whose shardings are to be found with the plan: each is a variable of the same cost graph.

An open input may be in any sharding whose axes divide its dims. It pays for the memory that it takes there, at a price
per byte, and its readers bring it to where they need it. Its gradient, or its new value, is left where it lies.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from ..graph import Graph
from ..mesh import DeviceMesh
from ..ops.values import TensorType
from ..sharding import layout as lay
from ..sharding.layout import Layout, Split
from ..sharding.value import Sharding
from .prices import Shardings
from .reshard_costs import whole_axes

# Seconds per byte at the least: of plans that take as long, the one that holds less is taken.
_LEAST = 1e-21


@dataclass(frozen=True, slots=True)
class OpenInputs:
    """The inputs that are open.

    places: by open input the shardings that it may have.
    follow: by output the open input in whose sharding it is left.
    held: what ops make that is in memory when a rank holds most.
    price: the seconds that a byte of an input, of what follows it, and of what is held, counts as.
    more: by open input how many more tensors of its size lie as it does, such as the states of an optimiser.
    """

    places: Mapping[int, Shardings] = field(default_factory=dict)
    follow: Mapping[int, int] = field(default_factory=dict)
    held: frozenset[int] = frozenset()
    price: float = 0.0
    more: Mapping[int, float] = field(default_factory=dict)

    @classmethod
    def of(
        cls, graph: Graph, mesh: DeviceMesh, follow: Mapping[int, int], given: Mapping[int, Shardings] | None = None
    ) -> OpenInputs:  # fmt: skip
        """All inputs of a graph that have no annotation, on a mesh; others, whose places are given, as well."""
        free = [i for i in graph.input_tensors if i not in graph.annotations]
        known = dict[tuple[int, ...], Shardings]()
        places = {i: known.setdefault(shape := graph.shape(i), even_shardings(mesh, shape)) for i in free}
        places |= given or {}
        return cls(places, {i: of for i, of in follow.items() if of in places and i not in graph.annotations})

    def followers(self, tensor: int) -> tuple[int, ...]:
        """The outputs that are left where an open input lies."""
        return tuple([i for i, of in self.follow.items() if of == tensor])

    def seconds(self, places: Shardings, types: Sequence[TensorType], more: float = 0.0) -> np.ndarray:
        """What the memory of tensors of these types, and of so many more of the first, counts as in some places."""
        price, first = max(self.price, _LEAST), types[0]
        return np.array([price * (sum(nbytes_of(t, s) for t in types) + more * nbytes_of(first, s)) for s in places])


NOTHING_OPEN = OpenInputs()


def nbytes_of(ttype: TensorType, sharding: Sharding) -> float:
    """The bytes of a tensor that the rank with the most of it holds."""
    return sharding.max_local_numel(ttype.shape) * float(ttype.dtype.itemsize)


def even_shardings(mesh: DeviceMesh, shape: tuple[int, ...]) -> Shardings:
    """All ways to put whole axes on dims that they divide, in the mesh's order where several are on one dim."""
    places = (None, *range(len(shape)))
    each = (_sharding(mesh, shape, at) for at in itertools.product(places, repeat=len(whole_axes(mesh))))
    return tuple([sharding for sharding in each if sharding is not None])


def _sharding(mesh: DeviceMesh, shape: tuple[int, ...], at: tuple[int | None, ...]) -> Sharding | None:
    dims: list[list[Split]] = [[] for _ in shape]
    for axis, dim in zip(whole_axes(mesh), at, strict=True):
        if dim is not None:
            dims[dim].append(axis)
    layouts: list[Layout] = [tuple(dim) for dim in dims]
    fits = all(not n % lay.extent(layout) for layout, n in zip(layouts, shape, strict=True))
    return Sharding(mesh, [lay.canonical(dim, n) for dim, n in zip(layouts, shape, strict=True)]) if fits else None
