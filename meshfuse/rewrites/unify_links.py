"""One set of links per grid of ranks: links given in one annotation hold for all annotations on the same grid."""

from __future__ import annotations

import dataclasses

from ..errors import user_error
from ..graph import Graph
from ..mesh import DeviceMesh
from ..sharding.value import Sharding


def unify_links(graph: Graph) -> Graph:
    """The graph with every annotation on the mesh that has its grid's links; itself where that changes none.

    Raises DefinitionError where two annotations give one grid different links.
    """
    said: dict[object, tuple[DeviceMesh, int]] = {}
    linked = {mesh: mesh.linked for mesh in {sharding.mesh for sharding in graph.annotations.values()}}
    for tensor, sharding in graph.annotations.items():
        mesh = sharding.mesh
        if linked[mesh] and said.setdefault(mesh.grid, (mesh, tensor))[0] != mesh:
            _refuse(graph, said[mesh.grid], mesh, tensor)
    changed = {
        tensor: Sharding(said[old.mesh.grid][0], old.dims, old.partial, old.reduce)
        for tensor, old in graph.annotations.items()
        if old.mesh.grid in said
    }
    if all(graph.annotations[tensor] is sharding for tensor, sharding in changed.items()):
        return graph
    return dataclasses.replace(graph, annotations={**graph.annotations, **changed})


def _refuse(graph: Graph, first: tuple[DeviceMesh, int], mesh: DeviceMesh, tensor: int) -> None:
    other, where = first
    raise user_error(
        f"{graph.tensors[tensor].label} is on a mesh whose links differ from those of the same mesh elsewhere",
        f"{mesh}", f"{other}, as at {graph.annotation_lines[where]}", "Make one DeviceMesh and use it throughout.",
        graph.annotation_lines[tensor],
    )  # fmt: skip
