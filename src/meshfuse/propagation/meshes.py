"""Which mesh every op runs on, where a program spans several."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ..graph import Graph, Node
from ..mesh import DeviceMesh


@dataclass(frozen=True, slots=True)
class Meshes:
    """The mesh of every node and of every tensor that has one."""

    nodes: Mapping[int, DeviceMesh]
    tensors: Mapping[int, DeviceMesh]
    default: DeviceMesh

    def of_tensor(self, tensor: int) -> DeviceMesh:
        return self.tensors.get(tensor, self.default)


def node_meshes(graph: Graph, world: DeviceMesh) -> Meshes:
    """An op runs where its result is annotated to be, else where its first placed operand is, else where it is read."""
    tensors = {i: sharding.mesh for i, sharding in graph.annotations.items()}
    default = next(iter(tensors.values()), world)
    nodes: dict[int, DeviceMesh] = {}
    if all([mesh == default for mesh in tensors.values()]):
        return Meshes(dict.fromkeys([node.id for node in graph.nodes], default), tensors, default)
    for node in graph.nodes:
        mesh = _first(tensors, node.outputs) or _first(tensors, node.inputs)
        if mesh is not None:
            _place(node, mesh, nodes, tensors)
    for node in reversed(graph.nodes):
        mesh = nodes.get(node.id) or _first(tensors, node.outputs) or default
        _place(node, mesh, nodes, tensors)
        for i in node.inputs:
            tensors.setdefault(i, mesh)
    return Meshes(nodes, tensors, default)


def _first(tensors: Mapping[int, DeviceMesh], ids: tuple[int, ...]) -> DeviceMesh | None:
    return next((tensors[i] for i in ids if i in tensors), None)


def _place(node: Node, mesh: DeviceMesh, nodes: dict[int, DeviceMesh], tensors: dict[int, DeviceMesh]) -> None:
    nodes[node.id] = mesh
    for i in node.outputs:
        tensors.setdefault(i, mesh)
