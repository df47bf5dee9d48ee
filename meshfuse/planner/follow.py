"""Propagation by rules alone: shardings go along the ops' dims, forward and back, and nothing has a price.

As in GSPMD (Xu et al., 2021) and Shardy: ops that only pass their dims on come first, until nothing changes, and then
all ops. A tensor takes what its op's other tensors say of the dims that they share, and only ever takes more axes; an
annotated one stays as it is. Where tensors disagree the one with more axes decides, then a result, then the larger one;
but a reduction over axes on which all of its operands lie stays there, so that only what is reduced is moved. Sums are
reduced where they are made.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from ..graph import Graph, Node
from ..mesh import DeviceMesh
from ..ops.rules import DimFactors, FactorKind
from ..placement.factors import (
    Layouts,
    Placement,
    layouts_of,
    merged,
    placed,
    representable,
    tensor_layouts,
    without_reductions,
)  # fmt: skip
from ..placement.options import Choice, Source, op_seconds
from ..placement.roofline import stored_by, stored_tensors
from ..reshard.steps import group_size
from ..sharding import layout as lay
from ..sharding.layout import WHOLE, Layout
from ..sharding.value import Sharding
from .answer import Optimum
from .special_layouts import Dims, tensors_of
from .stationary import check_stationary, stationary_axes


def followed(graph: Graph, default_mesh: DeviceMesh) -> Optimum:
    """The plan that follows from a graph's annotations; `default_mesh` is the mesh where there are none.

    Raises DefinitionError where an op needs a stationary tensor elsewhere.
    """
    return _Follow(graph, default_mesh).plan()


@dataclass(slots=True)
class _Follow:
    """dims: by tensor what is known of it. lies_on: by tensor the mesh on which. meshes: by op the mesh it is on."""

    graph: Graph
    default_mesh: DeviceMesh
    dims: dict[int, Dims] = field(default_factory=dict)
    meshes: dict[int, DeviceMesh] = field(default_factory=dict)
    lies_on: dict[int, DeviceMesh] = field(default_factory=dict)

    def plan(self) -> Optimum:
        self._place_ops()
        self.dims = {i: sharding.dims for i, sharding in self.graph.annotations.items()}
        self._settle([node for node in self.graph.nodes if _passes_all(node)])
        self._settle(self.graph.nodes)
        placements = [self._placement(node) for node in self.graph.nodes]
        shardings = self._shardings(placements)
        kept = stationary_axes(self.graph)
        if kept:
            operands = {node.id: p.operands for node, p in zip(self.graph.nodes, placements, strict=True)}
            check_stationary(self.graph, kept, shardings, operands)
        choices = self._choices(placements, shardings)
        return Optimum(choices, shardings, sum([choice.seconds for choice in choices]), None)

    # meshes

    def _place_ops(self) -> None:
        """An op is on the mesh of its annotated result, else of its operands, else of a reader."""
        of = {i: note.mesh for i, note in self.graph.annotations.items()}
        for node in self.graph.nodes:
            self._place(node, of, (*node.outputs, *node.inputs))
        for node in reversed(self.graph.nodes):
            if node.id not in self.meshes:
                self._place(node, of, (*node.outputs, *node.inputs))
        first = next(iter(of.values()), self.default_mesh)
        self.lies_on = {i: note.mesh for i, note in self.graph.annotations.items()}
        for node in self.graph.nodes:
            mesh = self.meshes.setdefault(node.id, first)
            for i in (*node.inputs, *node.outputs):
                self.lies_on.setdefault(i, mesh)

    def _place(self, node: Node, of: dict[int, DeviceMesh], tensors: Iterable[int]) -> None:
        found = next((of[i] for i in tensors if i in of), None)
        if found is not None:
            self.meshes[node.id] = found
            for i in (*node.inputs, *node.outputs):
                of.setdefault(i, found)

    # propagation

    def _settle(self, nodes: Sequence[Node]) -> None:
        """Go through ops, forward and back, until nothing changes."""
        while sum([self._pass(node) for order in (nodes, nodes[::-1]) for node in order]):
            pass

    def _pass(self, node: Node) -> bool:
        """Let an op's tensors take over what the others say; whether any did."""
        changed = False
        for tensor, factors, shape in self._open_tensors(node):
            votes = self._votes(node, without=tensor)
            mine = layouts_of(node.rule, factors, shape, self._dims(tensor, shape))
            agreed = representable(node.rule, merged([mine, *votes]))
            dims = tensor_layouts(node.rule, factors, shape, _of_tensor(agreed, factors))
            if dims is not None and _axes(dims) > _axes(self._dims(tensor, shape)):
                self.dims[tensor], changed = dims, True
        return changed

    def _open_tensors(self, node: Node) -> Iterator[tuple[int, DimFactors, tuple[int, ...]]]:
        """The tensors of an op that are on its mesh, and are not annotated; each with its dims' factors and shape."""
        mesh, notes = self.meshes[node.id], self.graph.annotations
        yield from (row for row in tensors_of(node) if row[0] not in notes and self.lies_on[row[0]] == mesh)

    def _dims(self, tensor: int, shape: Sequence[int]) -> Dims:
        return self.dims.get(tensor, (WHOLE,) * len(shape))

    def _votes(self, node: Node, without: int | None = None) -> list[Layouts]:
        """What an op's tensors say of its factors, in the order in which they decide."""
        mesh, rows = self.meshes[node.id], list[tuple[tuple[int, ...], Layouts]]()
        for place, (tensor, factors, shape) in enumerate(tensors_of(node)):
            dims = self._dims(tensor, shape)
            if tensor != without and self.lies_on[tensor] == mesh:
                is_result, size = place >= len(node.inputs), self.graph.tensors[tensor].type.nbytes
                rows.append(((-_axes(dims), -is_result, -size), layouts_of(node.rule, factors, shape, dims)))
        return [layouts for _, layouts in sorted(rows, key=lambda row: row[0])]

    # placements

    def _placement(self, node: Node) -> Placement:
        """Where an op is computed: its results as they are known, and reductions as the operands are."""
        mesh, rule = self.meshes[node.id], node.rule
        made = [row for row in tensors_of(node) if row[0] in node.outputs and self.lies_on[row[0]] == mesh]
        results = [layouts_of(rule, factors, shape, self._dims(i, shape)) for i, factors, shape in made]
        wanted = merged([self._reductions(node), self._agreed_reductions(node), *results, *self._votes(node)])
        for layouts in (wanted, without_reductions(rule, wanted), (WHOLE,) * len(rule.factors)):
            found = placed(node.call, rule, mesh, representable(rule, layouts))
            if found is not None:
                return found
        raise AssertionError("an op can be computed whole")

    def _reductions(self, node: Node) -> Layouts:
        """The layouts that the user gave the factors that are reduced."""
        given = iter(self.graph.reductions.get(node.id, ()))
        return tuple([
            lay.canonical(next(given, WHOLE), f.size) if f.kind is FactorKind.REDUCE else WHOLE
            for f in node.rule.factors
        ])  # fmt: skip

    def _agreed_reductions(self, node: Node) -> Layouts:
        """The layouts of factors that are reduced, where all operands that have one say the same of it."""
        mesh, rule = self.meshes[node.id], node.rule
        said: list[set[Layout]] = [set() for _ in rule.factors]
        for tensor, factors, shape in list(tensors_of(node))[: len(node.inputs)]:
            dims = self._dims(tensor, shape) if self.lies_on[tensor] == mesh else (WHOLE,) * len(shape)
            layouts = layouts_of(rule, factors, shape, dims)
            for factor in {f for dim in factors for f in dim}:
                said[factor].add(layouts[factor])
        return tuple([
            next(iter(found)) if len(found) == 1 and f.kind is FactorKind.REDUCE else WHOLE
            for f, found in zip(rule.factors, said, strict=True)
        ])  # fmt: skip

    def _shardings(self, placements: Sequence[Placement]) -> dict[int, Sharding]:
        """Where every tensor is made, and where outputs are left; inputs that nobody places are whole."""
        first = next(iter(self.meshes.values()), self.default_mesh)
        found = {i: Sharding.replicated(first, len(self.graph.shape(i))) for i in self.graph.input_tensors}
        for node, placement in zip(self.graph.nodes, placements, strict=True):
            for i, made in zip(node.outputs, placement.results, strict=True):
                left = made.reduced().with_dims(self._dims(i, self.graph.shape(i))) if made.partial else made
                found[i] = left if i in self.graph.outputs else made
        return found | dict(self.graph.annotations)

    def _choices(self, placements: Sequence[Placement], shardings: Mapping[int, Sharding]) -> tuple[Choice, ...]:
        """By op its placement, with the seconds that it takes."""
        in_memory, out = stored_tensors(self.graph), list[Choice]()
        for node, placement in zip(self.graph.nodes, placements, strict=True):
            operands, results = (tuple([shardings[i] for i in side]) for side in (node.inputs, node.outputs))
            seconds = op_seconds(node.call, placement, operands, results, stored_by(node, in_memory))
            out.append(Choice(placement, _source(node, placement, shardings), seconds))
        return tuple(out)


def _passes_all(node: Node) -> bool:
    """Whether an op only passes its dims on, as ops do that work element by element."""
    return all(factor.kind is FactorKind.PASS for factor in node.rule.factors) and len(
        {frozenset(f for dim in dims for f in dim) for dims in (*node.rule.operands, *node.rule.results) if dims}
    ) <= 1  # fmt: skip


def _of_tensor(layouts: Layouts, factors: DimFactors) -> Layouts:
    """The layouts with those factors whole that a tensor does not have."""
    there = {f for dim in factors for f in dim}
    return tuple([layout if f in there else WHOLE for f, layout in enumerate(layouts)])


def _axes(dims: Dims) -> int:
    """Over how many ranks a tensor lies."""
    return group_size([axis for layout in dims for axis in lay.axes(layout)])


def _source(node: Node, placement: Placement, shardings: Mapping[int, Sharding]) -> Source:
    """What a placement follows."""
    for place, (i, need) in enumerate(zip(node.inputs, placement.operands, strict=True)):
        if need.splits and need == shardings[i]:
            return Source("operand", place)
    for place, made in enumerate(placement.results):
        if made.splits:
            return Source("result", place)
    return Source("whole")
