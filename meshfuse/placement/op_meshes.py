"""Which mesh every op runs on, where a program spans several."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from .. import costs
from ..graph import Graph, Node, users
from ..mesh import DeviceMesh
from ..reshard.prices import between


@dataclass(frozen=True, slots=True)
class Meshes:
    """The mesh of every node and of every tensor that has one."""

    nodes: Mapping[int, DeviceMesh]
    tensors: Mapping[int, DeviceMesh]
    default: DeviceMesh

    def of_tensor(self, tensor: int) -> DeviceMesh:
        return self.tensors.get(tensor, self.default)


def node_meshes(graph: Graph, default_mesh: DeviceMesh) -> Meshes:
    """An op runs where its result is annotated to be, else on the mesh for which sending takes the least time."""
    placed = {i: sharding.mesh for i, sharding in graph.annotations.items()}
    default = next(iter(placed.values()), default_mesh)
    if all([mesh == default for mesh in placed.values()]):
        return Meshes(dict.fromkeys([node.id for node in graph.nodes], default), placed, default)
    search = MeshSearch(graph, placed, default)
    search.run()
    return Meshes(search.nodes, search.tensors, default)


@dataclass(slots=True)
class MeshSearch:
    """Meshes for ops whose results are not annotated: first guesses, improved one op at a time.

    `tensors` has the mesh of every tensor but inputs without an annotation, which are on all meshes.
    """

    graph: Graph
    placed: Mapping[int, DeviceMesh]
    default: DeviceMesh
    nodes: dict[int, DeviceMesh] = field(default_factory=dict)
    tensors: dict[int, DeviceMesh] = field(default_factory=dict)
    readers: dict[int, list[int]] = field(default_factory=dict)

    def run(self) -> None:
        """Place every op. Each change takes less time, so this ends."""
        self.readers = users(self.graph.nodes)
        self.tensors.update(self.placed)
        self._guess()
        free = [node for node in self.graph.nodes if not any(i in self.placed for i in node.outputs)]
        while any([self._improve(node) for node in (*free, *reversed(free))]):
            pass

    def _guess(self) -> None:
        """An op where its operands are brought in the least time; where none is on a mesh, where its result is read."""
        for node in self.graph.nodes:
            mesh = self._annotated(node) or self._beside_operands(node)
            if mesh is not None:
                self.put(node, mesh)
        for node in reversed(self.graph.nodes):
            if node.id not in self.nodes:
                read = (self.nodes[n] for i in node.outputs for n in self.readers.get(i, ()))
                self.put(node, self._annotated(node) or next(read, self.default))

    def _annotated(self, node: Node) -> DeviceMesh | None:
        return next((self.placed[i] for i in node.outputs if i in self.placed), None)

    def _beside_operands(self, node: Node) -> DeviceMesh | None:
        """The mesh of an operand to which the others are brought in the least time."""
        there = [self.tensors[i] for i in node.inputs if i in self.tensors]
        return min(dict.fromkeys(there), key=lambda mesh: self._brought(node, mesh)) if there else None

    def put(self, node: Node, mesh: DeviceMesh) -> None:
        """Let an op run on a mesh, and leave its results there."""
        self.nodes[node.id] = mesh
        self.tensors.update((i, mesh) for i in node.outputs if i not in self.placed)

    def _improve(self, node: Node) -> bool:
        """Move an op to the mesh of a neighbour if that takes less time; whether it did."""
        here = self.nodes[node.id]
        best = min((here, *self.others(node)), key=lambda mesh: self.sent(node, mesh))
        if self.sent(node, best) >= self.sent(node, here):
            return False
        self.put(node, best)
        return True

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
