"""What a program's cost graph has variables for, whatever their labels are."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass

from ..graph import Graph
from ..mesh import DeviceMesh
from ..placement.roofline import stored_tensors
from ..sharding.value import Sharding
from .equal_layers import deciders
from .open_inputs import NOTHING_OPEN, OpenInputs
from .prices import Shardings
from .special_layouts import SpecialLayouts
from .stationary import stationary_axes
from .ties import numbers

# By tensor and op, at which operands.
_Readers = dict[int, dict[int, list[int]]]


@dataclass(frozen=True, slots=True)
class Frame:
    """A graph on its meshes, and which of its ops and tensors share their decisions.

    ends: whether the first and the last one of equal layers may differ from those between.
    given: where inputs and annotated tensors are read from. An input without an annotation is whole on all ranks of all
        meshes.
    makers: by tensor its op, and which result it is.
    readers: by tensor and op, at which operands.
    deciders: by op the one whose variable is its own, too. ops: by op that decides, for how many.
    alike: by tensor the first one of which all the same is asked. tensors: by such a tensor, for how many it stands.
    numbers: of tensors, to tell equal ones apart.
    kept: by stationary tensor the axes along which it stays.
    stored: the tensors that are in memory between kernels.
    opened: the inputs whose places are to be found. held: of what is in memory when a rank holds most, by tensor for
        how many it stands.
    has_terms: whether an annotated tensor is terms of a sum.
    """

    graph: Graph
    meshes: tuple[DeviceMesh, ...]
    ends: bool
    inputs: Mapping[int, Shardings]
    given: Mapping[int, Shardings]
    makers: Mapping[int, tuple[int, int]]
    readers: _Readers
    deciders: tuple[int, ...]
    ops: Counter[int]
    alike: Mapping[int, int]
    tensors: Counter[int]
    numbers: Mapping[int, float]
    streamed: frozenset[int]
    kept: Mapping[int, frozenset[str]]
    special: Mapping[DeviceMesh, SpecialLayouts]
    outputs: frozenset[int]
    stored: frozenset[int]
    opened: OpenInputs
    held: Counter[int]
    has_terms: bool

    @classmethod
    def of(cls, graph: Graph, meshes: tuple[DeviceMesh, ...], opened: OpenInputs = NOTHING_OPEN) -> Frame:
        """The frame of a graph on some meshes, all of equal layers alike."""
        inputs = {i: _given(graph, meshes, i) for i in graph.input_tensors} | {**opened.places}
        given = inputs | {i: (note,) for i, note in graph.annotations.items()}
        makers = {i: (node.id, place) for node in graph.nodes for place, i in enumerate(node.outputs)}
        alone = cls(
            graph, meshes, False, inputs, given, makers, _readers(graph), (), Counter(), {}, Counter(), numbers(graph),
            graph.streamed(), stationary_axes(graph), {}, frozenset(graph.outputs), stored_tensors(graph), opened,
            Counter(), any([note.partial for note in graph.annotations.values()]),
        )  # fmt: skip
        return alone._decided(ends=False)

    def with_rules_of(self, graph: Graph) -> Frame | None:
        """The same of a graph whose ops differ from this one's by their rules alone; None of any other.

        Ops that are equal in one of the graphs must be equal in the other, too.
        """
        kept = stationary_axes(graph)
        if self.ends or kept != self.kept or not _differ_by_rules(self.graph, graph):
            return None
        return dataclasses.replace(self, graph=graph, special=_special(graph, self.meshes, self.ops, self.alike))

    def with_ends(self) -> Frame:
        """The same, with a first and a last layer that decide for themselves."""
        return self._decided(ends=True)

    def _decided(self, ends: bool) -> Frame:
        found = dataclasses.replace(self, ends=ends, deciders=deciders(self.graph, ends))
        first = dict[Hashable, int]()
        alike = {i: first.setdefault(found._asked_of(i), i) for i in (*self.inputs, *self.makers)}
        ops, tensors = Counter(found.deciders), Counter(alike.values())
        special = _special(self.graph, self.meshes, ops, alike)
        # The graph of a single op, by which its forms are compared, has few of a program's tensors.
        held = Counter(alike[i] for i in self.opened.held if i in alike)
        return dataclasses.replace(found, ops=ops, alike=alike, tensors=tensors, special=special, held=held)

    def _asked_of(self, tensor: int) -> Hashable:
        """What a tensor's part of the costs follows from."""
        graph, decide, maker = self.graph, self.deciders, self.makers.get(tensor)
        made = graph.tensors[tensor].type if maker is None else (decide[maker[0]], maker[1])
        read = sorted([(decide[node], *places) for node, places in self.readers.get(tensor, {}).items()])
        note, is_output = graph.annotations.get(tensor), tensor in self.outputs
        said = note, self.kept.get(tensor), graph.once_in.get(tensor)
        return made, said, is_output, tensor in self.opened.places, tuple(read)

    def share_of(self, tensor: int) -> float:
        """In which part of all runs a tensor is brought to where it is left."""
        return 1.0 / self.graph.once_in.get(tensor, 1)

    def readers_of(self, tensor: int) -> Mapping[int, int]:
        """The ops that decide for a tensor's readers, and for how many of them."""
        return Counter(self.deciders[node] for node in self.readers.get(tensor, ()))


def _given(graph: Graph, meshes: tuple[DeviceMesh, ...], tensor: int) -> Shardings:
    note = graph.annotations.get(tensor)
    whole = [Sharding.replicated(mesh, len(graph.shape(tensor))) for mesh in meshes]
    return tuple(whole) if note is None else (note,)


def _readers(graph: Graph) -> _Readers:
    found: _Readers = {}
    for node in graph.nodes:
        for place, i in enumerate(node.inputs):
            found.setdefault(i, {}).setdefault(node.id, []).append(place)
    return found


def _special(
    graph: Graph, meshes: tuple[DeviceMesh, ...], ops: Iterable[int], alike: Mapping[int, int]
) -> dict[DeviceMesh, SpecialLayouts]:
    nodes = [graph.nodes[op] for op in sorted(ops)]
    return {mesh: SpecialLayouts.of(graph, mesh, nodes, alike) for mesh in meshes}


def _differ_by_rules(graph: Graph, other: Graph) -> bool:
    """Whether two graphs are the same but for their ops' rules, of which each stands for one of the other's."""
    said = [f.name for f in dataclasses.fields(Graph) if f.name != "nodes"]
    if any(getattr(graph, name) is not getattr(other, name) for name in said) or len(graph.nodes) != len(other.nodes):
        return False
    pairs = [*zip(graph.nodes, other.nodes, strict=True)]
    rules = {(id(a.rule), id(b.rule)) for a, b in pairs}
    one_to_one = len(rules) == len({a for a, _ in rules}) == len({b for _, b in rules})
    return one_to_one and all(
        a is b or (a.call is b.call and a.inputs == b.inputs and a.outputs == b.outputs) for a, b in pairs
    )
