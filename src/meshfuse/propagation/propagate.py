"""Propagation: forward, backward and forward again over the ops, each decision by modelled time.

The first sweep follows the data from the inputs, the second carries what results are wanted as back to where they
are made, the third decides every op for good with a beam of plans. Annotated tensors never change. (The factor form of
the rules is GSPMD's and Shardy's; deciding by modelled time is our own.)
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from ..graph import Graph, Node, depth_first, reordered
from ..mesh import DeviceMesh
from ..sharding import layout as lay
from ..sharding.layout import WHOLE
from ..sharding.value import Sharding
from .beam import WIDTH, Available, Beam, Step
from .choose import Setting
from .factors import Layouts, layouts_of, merged, representable, tensor_layouts
from .meshes import node_meshes
from .sharded import Choice, ShardedDefinition

# How many different shardings of one tensor the backward sweep keeps as wanted.
ASKED = 3


def propagate(graph: Graph, world: DeviceMesh) -> ShardedDefinition:
    """A sharding for every tensor and a placement for every op. `world` is the mesh where no annotation names one."""
    order = depth_first(graph)
    state = _Propagation(reordered(graph, order), world)
    state.want(state.forward(width=1))
    state.backward()
    steps = dict(zip(order, state.forward(WIDTH), strict=True))
    choices = [_choice(steps[node.id]) for node in graph.nodes]
    done = ShardedDefinition(graph, tuple(choices), state.homes(graph, choices))
    done.verify()
    return done


def _choice(step: Step) -> Choice:
    option, other = step.option, step.runner_up
    return Choice(option.placement, option.source, option.seconds, (other.source, other.seconds) if other else None)


class _Propagation:
    """The tables that the sweeps share."""

    def __init__(self, graph: Graph, world: DeviceMesh):
        self.graph = graph
        self.meshes = node_meshes(graph, world)
        self.wanted: dict[int, Available] = {i: (sharding,) for i, sharding in graph.annotations.items()}
        self.unplaced_inputs = {i for i in graph.input_tensors if i not in graph.annotations}
        self.inputs: dict[int, Available] = {i: (self._input_home(i),) for i in graph.input_tensors}

    def _input_home(self, tensor: int) -> Sharding:
        """Inputs that no annotation places are whole on every rank."""
        whole = Sharding.replicated(self.meshes.of_tensor(tensor), len(self.graph.shape(tensor)))
        return self.graph.annotations.get(tensor, whole)

    def forward(self, width: int) -> list[Step]:
        return Beam(self.graph, self.wanted, self._setting, self.inputs, width).run()

    def _setting(self, node: Node, available: tuple[Available, ...]) -> Setting:
        mesh = self.meshes.of_node(node.id)
        return Setting(
            node.call, node.rule, mesh,
            tuple(self._on_mesh(i, found, mesh) for i, found in zip(node.inputs, available, strict=True)),
            tuple(self.wanted.get(i, ()) for i in node.outputs),
            tuple(i in self.graph.annotations for i in node.outputs),
            self.graph.reductions.get(node.id, ()),
        )  # fmt: skip

    def _on_mesh(self, tensor: int, available: Available, mesh: DeviceMesh) -> Available:
        """An input that no annotation places is whole on every rank, so on every mesh."""
        if tensor in self.unplaced_inputs and all(s.mesh != mesh for s in available):
            return (Sharding.replicated(mesh, len(self.graph.shape(tensor))), *available)
        return available

    def want(self, steps: list[Step]) -> None:
        """Take what the first sweep made as what is wanted, where no annotation says otherwise."""
        for node, step in zip(self.graph.nodes, steps, strict=True):
            for i, made in zip(node.outputs, step.option.placement.results, strict=True):
                self.wanted.setdefault(i, (made.reduced(),))

    def backward(self) -> None:
        """Add to what is wanted of a tensor what its readers need to give what they are wanted to give."""
        for node in reversed(self.graph.nodes):
            results = [self.wanted[i] for i in node.outputs]
            for asked in itertools.islice(itertools.zip_longest(*results), ASKED):
                layouts = self._wanted_layouts(node, [new or old[0] for new, old in zip(asked, results, strict=True)])
                for place, i in enumerate(node.inputs):
                    if i not in self.graph.annotations and i not in self.inputs:
                        self._ask(node, place, i, layouts)

    def _wanted_layouts(self, node: Node, results: Sequence[Sharding]) -> Layouts:
        rule, call, mesh = node.rule, node.call, self.meshes.of_node(node.id)
        votes = [layouts_of(rule, rule.results[j], call.results[j].shape, sharding.dims)
                 for j, sharding in enumerate(results) if sharding.mesh == mesh]  # fmt: skip
        votes += [layouts_of(rule, rule.operands[j], call.types[j].shape, self.wanted[i][0].dims)
                  for j, i in enumerate(node.inputs)
                  if i in self.wanted and self.wanted[i][0].mesh == mesh]  # fmt: skip
        votes.append((WHOLE,) * len(rule.factors))
        return representable(rule, merged(votes))

    def _ask(self, node: Node, place: int, tensor: int, layouts: Layouts) -> None:
        """Refine what is wanted first where the new wish is finer; else it is one wish more, up to a few."""
        wanted = self.wanted[tensor]
        dims = tensor_layouts(node.rule, node.rule.operands[place], node.call.types[place].shape, layouts)
        if dims is None or wanted[0].mesh != self.meshes.of_node(node.id):
            return
        asked = Sharding(wanted[0].mesh, dims)
        if all(lay.is_prefix(a, b) for a, b in zip(wanted[0].dims, dims, strict=True)):
            self.wanted[tensor] = (asked, *(w for w in wanted[1:] if w != asked))
        elif asked not in wanted and len(wanted) < ASKED:
            self.wanted[tensor] = (*wanted, asked)

    def homes(self, graph: Graph, choices: list[Choice]) -> dict[int, Sharding]:
        """Where each tensor is after its op: its annotation, or what the op makes."""
        homes = {i: available[0] for i, available in self.inputs.items()}
        for node, choice in zip(graph.nodes, choices, strict=True):
            homes.update(zip(node.outputs, choice.placement.results, strict=True))
        return homes | dict(graph.annotations)
