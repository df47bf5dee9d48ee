"""Propagation: forward, backward and forward again over the ops, each decision by modelled wire time.

The first sweep follows the data from the inputs, the second carries what results are wanted as back to where they
are made, the third decides every op for good, knowing in which shardings its operands really exist. Annotated tensors
never change. (The factor form of the rules is GSPMD's and Shardy's; deciding by wire time is our own.)
"""

from __future__ import annotations



from ..graph import Graph, Node, users
from ..mesh import DeviceMesh
from ..sharding import layout as lay
from ..sharding.value import Sharding
from .choose import Setting, choose
from .factors import Layouts, layouts_of, merged, representable, tensor_layouts
from .meshes import node_meshes
from .sharded import Choice, ShardedDefinition


def propagate(graph: Graph, world: DeviceMesh) -> ShardedDefinition:
    """A sharding for every tensor and a placement for every op. `world` is the mesh where no annotation names one."""
    state = _Propagation(graph, world)
    state.forward()
    state.backward()
    choices = state.forward()
    done = ShardedDefinition(graph, tuple(choices), dict(state.homes))
    done.verify()
    return done


class _Propagation:
    """The tables that the sweeps share."""

    def __init__(self, graph: Graph, world: DeviceMesh):
        self.graph = graph
        self.meshes = node_meshes(graph, world)
        self.readers = users(graph.nodes)
        self.wanted: dict[int, Sharding] = dict(graph.annotations)
        self.homes: dict[int, Sharding] = {}
        self.available: dict[int, list[Sharding]] = {}
        self.replicated_inputs: set[int] = set()

    def forward(self) -> list[Choice]:
        self._place_inputs()
        return [self._decide(node) for node in self.graph.nodes]

    def _place_inputs(self) -> None:
        for i in self.graph.input_tensors:
            home = self.graph.annotations.get(i)
            if home is None:
                self.replicated_inputs.add(i)
                home = Sharding.replicated(self.meshes.of_tensor(i), len(self.graph.shape(i)))
            self.homes[i] = home
            self.available[i] = [home]

    def _decide(self, node: Node) -> Choice:
        choice = choose(self._setting(node))
        for i, needed in zip(node.inputs, choice.placement.operands, strict=True):
            if needed not in self.available[i]:
                self.available[i].append(needed)
        for i, made in zip(node.outputs, choice.placement.results, strict=True):
            annotated = self.graph.annotations.get(i)
            self.homes[i] = annotated if annotated is not None else made
            self.available[i] = [self.homes[i]] if annotated in (None, made) else [self.homes[i], made]
            if annotated is None and i not in self.wanted:
                self.wanted[i] = made.reduced()
        return choice

    def _setting(self, node: Node) -> Setting:
        mesh = self.meshes.of_node(node.id)
        return Setting(
            node, mesh, tuple(self._shardings(i, mesh) for i in node.inputs),
            tuple(self.wanted.get(i) for i in node.outputs),
            tuple(i in self.graph.annotations for i in node.outputs),
            tuple(len(self.readers[i]) == 1 and i not in self.graph.outputs for i in node.inputs),
            self.graph.reductions.get(node.id, ()),
        )  # fmt: skip

    def _shardings(self, tensor: int, mesh: DeviceMesh) -> tuple[Sharding, ...]:
        """An input that no annotation places is whole on every rank, so on every mesh."""
        if tensor in self.replicated_inputs and self.homes[tensor].mesh != mesh:
            return (Sharding.replicated(mesh, len(self.graph.shape(tensor))), *self.available[tensor])
        return tuple(self.available[tensor])

    def backward(self) -> None:
        """Refine what is wanted of a tensor by what its readers are wanted to give."""
        for node in reversed(self.graph.nodes):
            layouts = self._wanted_layouts(node)
            for place, i in enumerate(node.inputs):
                if i not in self.graph.annotations and i not in self.replicated_inputs:
                    self._refine(node, place, i, layouts)

    def _wanted_layouts(self, node: Node) -> Layouts:
        rule, call = node.rule, node.call
        votes = [layouts_of(rule, rule.results[j], call.results[j].shape, self.wanted[i].dims)
                 for j, i in enumerate(node.outputs)]  # fmt: skip
        votes += [layouts_of(rule, rule.operands[j], call.types[j].shape, self.wanted[i].dims)
                  for j, i in enumerate(node.inputs) if i in self.wanted]  # fmt: skip
        return representable(rule, merged(votes))

    def _refine(self, node: Node, place: int, tensor: int, layouts: Layouts) -> None:
        old = self.wanted[tensor]
        asked = tensor_layouts(node.rule, node.rule.operands[place], layouts)
        if asked is None or old.mesh != self.meshes.of_node(node.id):
            return
        if all(lay.is_prefix(a, b) for a, b in zip(old.dims, asked, strict=True)):
            self.wanted[tensor] = Sharding(old.mesh, asked)


