"""What is sent between meshes where a program spans several."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from .. import costs
from ..graph import Graph, Node
from ..mesh import DeviceMesh
from ..reshard.prices import between


@dataclass(slots=True)
class MeshCosts:
    """What the ops have sent between meshes, given the mesh of every op.

    `tensors` has the mesh of every tensor but inputs without an annotation, which are on all meshes.
    """

    graph: Graph
    placed: Mapping[int, DeviceMesh]
    default: DeviceMesh
    nodes: dict[int, DeviceMesh] = field(default_factory=dict)
    tensors: dict[int, DeviceMesh] = field(default_factory=dict)
    readers: dict[int, list[int]] = field(default_factory=dict)

    def others(self, node: Node) -> Iterable[DeviceMesh]:
        """The other meshes that the op's operands are on, or that its results are read on."""
        beside = [self.tensors[i] for i in node.inputs if i in self.tensors]
        beside += [self.nodes[n] for i in node.outputs for n in self.readers.get(i, ())]
        return [mesh for mesh in dict.fromkeys(beside) if mesh != self.nodes[node.id]]

    def sent(self, node: Node, mesh: DeviceMesh) -> float:
        """The seconds of sending between meshes for the op if it runs on this one."""
        readers = [(i, other) for i in node.outputs for other in self._meshes_but(i, mesh)]
        return self._brought(node, mesh) + sum([self._seconds(i, mesh, other) for i, other in readers])

    def _brought(self, node: Node, mesh: DeviceMesh) -> float:
        """The seconds for operands that are on another mesh, without those that other ops need on this one, too."""
        away = [i for i in dict.fromkeys(node.inputs) if self.tensors.get(i, mesh) != mesh]
        return sum([self._seconds(i, self.tensors[i], mesh) for i in away if not self._read_on(i, mesh, node)])

    def _seconds(self, tensor: int, source: DeviceMesh, target: DeviceMesh) -> float:
        """The modelled time of a message with all of a tensor, as how it will be cut is not known yet."""
        return costs.permute(between(source, target), self.graph.tensors[tensor].type.nbytes)

    def _read_on(self, tensor: int, mesh: DeviceMesh, but: Node) -> bool:
        return any(n != but.id and self.nodes.get(n) == mesh for n in self.readers.get(tensor, ()))

    def _meshes_but(self, tensor: int, mesh: DeviceMesh) -> list[DeviceMesh]:
        """The other meshes that a tensor is read on, as far as ops are placed."""
        there = dict.fromkeys([self.nodes[n] for n in self.readers.get(tensor, ()) if n in self.nodes])
        return [other for other in there if other != mesh]
