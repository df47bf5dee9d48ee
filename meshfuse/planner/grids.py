"""An axis of the mesh written as two, so that a plan may use its parts on several dims.

By itself an op asks for the whole axis on one dim or, where that is too small, on its neighbours. Rows over two groups
of ranks and columns over the four ranks of each may move less than rows or columns over eight, as in products on grids
of ranks (van de Geijn & Watts 1997, SUMMA). On a mesh with axes of 2 and 4 all searches try that, and what they find is
a plan on the mesh with one axis of 8, using parts of it.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Iterator

from ..graph import Graph
from ..mesh import DeviceMesh
from ..propagation import ShardedDefinition
from ..sharding import layout as lay
from ..sharding.layout import Layout, Split
from ..sharding.value import Sharding
from .remap_mesh import remap_mesh
from .starts import in_rounds

# Each is a search: no more ways are tried to write an axis, those of most alike parts first, and one with its parts in
# turned order. Searches try either part on every dim, but find more where blocks need not lie in strides.
MOST_WAYS = 2


@dataclasses.dataclass(frozen=True, slots=True)
class Grid:
    """A mesh one `axis` of which is written as two (in `written`): the first of `major` ranks, and the rest."""

    mesh: DeviceMesh
    axis: str
    major: int
    written: DeviceMesh

    @classmethod
    def of(cls, mesh: DeviceMesh, axis: str, major: int) -> Grid:
        place = mesh.names.index(axis)
        shape, names, links = list(mesh.shape), list(mesh.names), list(mesh.links)
        shape[place : place + 1] = major, mesh.shape[place] // major
        names[place : place + 1] = (_unused(f"{axis}_{part}", mesh) for part in ("major", "minor"))
        links.insert(place, mesh.links[place])
        given = dict(zip(names, links, strict=True)) if mesh.linked else None
        flops = mesh.flops if mesh.linked else None
        return cls(mesh, axis, major, DeviceMesh(shape, names, ranks=mesh.ranks, links=given, flops=flops))

    @property
    def names(self) -> tuple[str, str]:
        """The names of the two axes."""
        place = self.mesh.names.index(self.axis)
        return self.written.names[place], self.written.names[place + 1]

    def holds(self, graph: Graph) -> bool:
        """Whether all sub-axes of the axis that the graph's annotations use are sub-axes of the two."""
        return all(self._nests(split) for split in _splits(graph) if split.axis == self.axis)

    def _nests(self, split: Split) -> bool:
        ends = split.pre, split.pre * (split.size or 1)
        return all(end % self.major == 0 or self.major % end == 0 for end in ends)

    def graph(self, graph: Graph) -> Graph:
        """The same graph, annotated on the grid."""
        annotations = {i: self._there(sharding, graph.shape(i)) for i, sharding in graph.annotations.items()}
        reductions = {node: tuple(map(self._apart, layouts)) for node, layouts in graph.reductions.items()}
        return dataclasses.replace(graph, annotations=annotations, reductions=reductions)

    def _there(self, sharding: Sharding, shape: tuple[int, ...]) -> Sharding:
        dims = [self._apart(layout) for layout in sharding.dims]
        return Sharding.make(self.written, dims, shape, self._apart(sharding.partial), sharding.reduce)

    def _apart(self, layout: Layout) -> Layout:
        return tuple(part for split in layout for part in self._parts(split))

    def _parts(self, split: Split) -> Layout:
        """A split over the axis as splits over the two."""
        if split.axis != self.axis:
            return (split,)
        first, last = split.pre, split.pre * (split.size or 1)
        outer, inner = min(first, self.major), max(first, self.major)
        both = (
            Split(min(last, self.major) // outer, self.names[0], outer),
            Split(max(last, self.major) // inner, self.names[1], inner // self.major),
        )
        return tuple(part for part in both if part.size != 1)

    def plan_back(self, graph: Graph, plan: ShardedDefinition) -> ShardedDefinition:
        """A plan made on the grid as a plan of `graph` on the mesh."""
        return remap_mesh(plan, graph, self.back, self._together)

    def back(self, sharding: Sharding, shape: tuple[int, ...]) -> Sharding:
        """A sharding on the grid as a sharding on the mesh."""
        dims = [self._together(layout) for layout in sharding.dims]
        return Sharding.make(self.mesh, dims, shape, self._together(sharding.partial), sharding.reduce)

    def _together(self, layout: Layout) -> Layout:
        before = dict(zip(self.names, (1, self.major), strict=True))
        return tuple(
            split._replace(axis=self.axis, pre=split.pre * before[split.axis]) if split.axis in before else split
            for split in layout
        )


def _unused(name: str, mesh: DeviceMesh) -> str:
    return name if name not in mesh.names else _unused(f"{name}_", mesh)


def _splits(graph: Graph) -> Iterable[Split]:
    for sharding in graph.annotations.values():
        yield from sharding.used()
    for layouts in graph.reductions.values():
        for layout in layouts:
            yield from lay.axes(layout)


def grids(graph: Graph, either: bool = False) -> Iterator[Grid]:
    """The ways to write one axis of the mesh as two, the smaller part as the major one; of the first way `either` is.

    None for a graph on several meshes, and where the user asks for chunks or rounds, which take whole axes.
    """
    meshes = {sharding.mesh for sharding in graph.annotations.values()}
    if len(meshes) > 1 or graph.streams or in_rounds(graph):
        return
    for mesh in meshes:
        ways = [*_ways(mesh)][:MOST_WAYS]
        turned = [(axis, mesh.axis_size(axis) // major) for axis, major in ways[:1] if either]
        for axis, major in dict.fromkeys([*ways, *turned]):
            grid = Grid.of(mesh, axis, major)
            if grid.holds(graph):
                yield grid


def _ways(mesh: DeviceMesh) -> Iterator[tuple[str, int]]:
    """(axis, major part): those of most alike parts first."""
    for axis, n in sorted(zip(mesh.names, mesh.shape, strict=True), key=lambda pair: -pair[1]):
        yield from ((axis, major) for major in range(math.isqrt(n), 1, -1) if n % major == 0)
