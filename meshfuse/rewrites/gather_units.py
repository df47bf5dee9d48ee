"""Weights that are fully sharded, gathered unit by unit before they are read, and their gradients put side by side.

As in ZeRO (Rajbhandari et al. 2020) and PyTorch's FSDP (Zhao et al. 2023). A unit, such as a layer, is gathered before
the first op that reads it, in the forward and again in each backward, or with `prefetch` before that of a unit ahead of
it, so that its weights travel while others compute. The last units of the forward stay, as many as a backward would
gather at its beginning. What follows from a weight alone, such as its transpose, is made of what was gathered, right
before it is read, so that nothing else is held from the forward to the backward.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

from ..definition.fsdp import Member, UnitGroup
from ..definition.recording import Recording
from ..definition.units import units_of_gradients
from ..graph import CallTable, Graph, Node, Tensor, numbered
from ..ops.registry import find
from ..ops.rules import FactorKind
from ..ops.values import TensorRef
from ..sharding.value import Sharding
from .graph_writer import with_nodes

_AFTER = -1  # The phase of ops behind a backward: they read weights as they lie, as an optimiser does.


def gather_units(graph: Graph, recording: Recording) -> Graph:
    """The graph with the weights of each unit gathered before their use; itself where there are no units."""
    for group in recording.units:
        ends = {grad: unit for grad, unit in units_of_gradients(recording, group).items() if grad in graph.annotations}
        members = {i: m for i, m in group.members.items() if i in graph.annotations and _is_cut(graph, i, m)}
        graph = _with_ends_last(graph, ends)
        graph = _Gathering(graph, replace(group, members=members), recording.sweeps).gathered() if members else graph
    return graph


def is_by_rule(graph: Graph, recording: Recording) -> bool:
    """Whether weights are fully sharded and all axes are of rows: what a user then asks for is a rule and no search."""
    groups = [group for group in recording.units if group.members]
    if not groups or not all(group.is_rule for group in groups):
        return False
    weights = {i for group in groups for i in group.members}
    rows = {axis for group in groups for member in group.members.values() for axis in member.axes}
    rows |= {group.replicate for group in groups if group.replicate is not None}
    for i in set(graph.input_tensors) & graph.annotations.keys() - weights:
        rows |= {split.axis for layout in graph.annotations[i].dims[:1] for split in layout if split.axis is not None}
    meshes = {sharding.mesh for sharding in graph.annotations.values()}
    return all(name in rows for mesh in meshes for name in mesh.names if mesh.axis_size(name) > 1)


def _is_cut(graph: Graph, tensor: int, member: Member) -> bool:
    return any(split.axis in member.axes for layout in graph.annotations[tensor].dims for split in layout)


def _gathered(graph: Graph, tensor: int, axes: Sequence[str]) -> Sharding:
    """How a weight lies once it is gathered."""
    lies = graph.annotations[tensor]
    dims = [tuple(split for split in layout if split.axis not in axes) for layout in lies.dims]
    return Sharding.make(lies.mesh, dims, graph.shape(tensor))


def _passes_on(graph: Graph, node: Node) -> bool:
    """Whether an op has the elements of its one operand, one by one: as views and casts do."""
    if len(node.inputs) != 1 or len(node.outputs) != 1 or node.call.op.draws is not None:
        return False
    same = math.prod(graph.shape(node.inputs[0])) == math.prod(graph.shape(node.outputs[0]))
    return same and all(factor.kind is FactorKind.PASS for factor in node.rule.factors)


def last_units(units: Iterable[str], prefetch: int) -> set[str]:
    """Of units, in the order in which a forward gathers them, those that a backward of it has gathered at its start."""
    return {*[*dict.fromkeys(units)][-1 - prefetch :]}


# gradients


def _with_ends_last(graph: Graph, ends: Mapping[int, str]) -> Graph:
    """The graph with what passes gradients on to outputs moved behind the last gradient of their unit.

    A sum over ranks is due where it is first read: those of a unit then stand side by side, and are one call.
    """
    makers = {i: node for node in graph.nodes for i in node.outputs}
    readers = Counter(i for node in graph.nodes for i in node.inputs)
    chains: dict[str, list[Node]] = {}
    last: dict[str, int] = {}
    labels: dict[int, str] = {}
    for end, unit in ends.items():
        *passing, base = _chain_to(graph, end, makers, readers)
        chains.setdefault(unit, []).extend(reversed(passing))
        last[unit] = max(last.get(unit, -1), base.id)
        labels.update((i, f"gradients of {unit}") for node in (*passing, base) for i in node.outputs)
    moved = {node.id for chain in chains.values() for node in chain}
    behind: dict[int, list[int]] = {}
    for unit, base in last.items():
        behind.setdefault(base, []).extend(node.id for node in chains[unit])
    order = [x for node in graph.nodes if node.id not in moved for x in (node.id, *behind.get(node.id, ()))]
    return replace(_in_order(graph, order), units={**graph.units, **labels})


def _chain_to(graph: Graph, end: int, makers: Mapping[int, Node], readers: Mapping[int, int]) -> list[Node]:
    """The op that makes a gradient, and those above it that it passes on, whose results nobody else reads."""
    found = [makers[end]]
    if readers[end]:
        return found
    while _passes_on(graph, found[-1]) and found[-1].inputs[0] in makers:
        above = found[-1].inputs[0]
        if readers[above] > 1 or above in graph.outputs:
            break
        found.append(makers[above])
    return found


def _in_order(graph: Graph, order: Sequence[int]) -> Graph:
    nodes = [numbered(graph.nodes[old], new) for new, old in enumerate(order)]
    return with_nodes(graph, graph.tensors, nodes, {old: new for new, old in enumerate(order)})


# weights


class _Gathering:
    """A graph while its weights are gathered.

    derived: by tensor the op that makes it of one weight, element by element.
    """

    def __init__(self, graph: Graph, group: UnitGroup, sweeps: Sequence[range]) -> None:
        self.graph, self.group, self.sweeps = graph, group, sweeps
        self.tensors: list[Tensor] = list(graph.tensors)
        self.nodes: list[Node] = []
        self.numbers: dict[int, int] = {}
        self.annotations, self.lines = dict(graph.annotations), dict(graph.annotation_lines)
        self.units = dict(graph.units)
        self.derived: dict[int, Node] = {}
        self._calls = CallTable()
        fixed = {*graph.outputs, *graph.annotations, *graph.streams}
        for node in graph.nodes:
            there = node.inputs[:1] and (node.inputs[0] in group.members or node.inputs[0] in self.derived)
            if there and _passes_on(graph, node) and fixed.isdisjoint(node.outputs):
                self.derived[node.outputs[0]] = node

    def gathered(self) -> Graph:
        """The graph with gathers."""
        nodes = [node for node in self.graph.nodes if node.outputs[0] not in self.derived]
        kept: Mapping[int, int] = {}
        for number, (phase, some) in enumerate(itertools.groupby(nodes, key=self._phase)):
            there = _Phase(self, number, phase != _AFTER, kept)
            there.write(list(some))
            kept = there.of_last_units() if not phase else {}
        made = with_nodes(self.graph, self.tensors, self.nodes, self.numbers)
        return replace(made, annotations=self.annotations, annotation_lines=self.lines, units=self.units)

    def _phase(self, node: Node) -> int:
        """0 for the forward, and a number for each backward; 0 for these as well if what is gathered is kept."""
        if not self.sweeps or node.origin < self.sweeps[0].start:
            return 0
        place = next((n for n, sweep in enumerate(self.sweeps, 1) if node.origin in sweep), _AFTER)
        return 0 if self.group.is_kept and place != _AFTER else place

    def weight_of(self, tensor: int) -> int | None:
        """The weight that a tensor is, or follows from alone; None for any other."""
        while tensor in self.derived:
            tensor = self.derived[tensor].inputs[0]
        return tensor if tensor in self.group.members else None

    def gather_of(self, node: Node) -> int | None:
        """The weight of which an op of the definition itself is the gather: its result is annotated so."""
        weight = node.inputs[0] if node.name == "set" and node.inputs else None
        if weight is None or weight not in self.group.members or node.outputs[0] not in self.annotations:
            return None
        lies = _gathered(self.graph, weight, self.group.members[weight].axes)
        return weight if self.annotations[node.outputs[0]] == lies else None

    def emit(self, node: Node, inputs: tuple[int, ...], outputs: tuple[int, ...] | None = None) -> None:
        """Append an op with these operands; `outputs` for a copy of it."""
        if outputs is None:
            self.numbers[node.id] = len(self.nodes)
            self.nodes.append(numbered(node, len(self.nodes), inputs))
        else:
            self.nodes.append(replace(node, id=len(self.nodes), inputs=inputs, outputs=outputs))

    def new_tensor(self, like: int, name: str = "") -> int:
        """A tensor of the type of another one."""
        old = self.graph.tensors[like]
        line = replace(old.line, name=name, given="") if name else old.line
        self.tensors.append(Tensor(len(self.tensors), old.type, line))
        return self.tensors[-1].id

    def gather(self, weight: int, reader: Node, label: str) -> int:
        """Append the gather of a weight before its reader."""
        op, old = find("set"), self.graph.tensors[weight]
        assert op is not None
        call, rule = self._calls.get(op, (TensorRef(weight),), (old.type,))
        made = self.new_tensor(weight, f"{old.line.label(old.name).partition(' (')[0]}.gathered")
        line = self.tensors[made].line
        self.nodes.append(Node(len(self.nodes), call, rule, (weight,), (made,), line, reader.origin, reader.salt))
        self.annotations[made] = _gathered(self.graph, weight, self.group.members[weight].axes)
        self.lines[made], self.units[made] = self.graph.annotation_lines[weight], label
        return made


class _Phase:
    """One pass over weights, the forward or a backward; `is_gathering` unless it reads them as they lie.

    kept: by weight what an earlier pass has gathered of it and left for this one.
    """

    def __init__(self, whole: _Gathering, number: int, is_gathering: bool, kept: Mapping[int, int]) -> None:
        self.whole, self.number, self.is_gathering = whole, number, is_gathering
        self._made = dict(kept) if is_gathering else {}
        self._given: dict[int, Node] = {}

    def write(self, nodes: Sequence[Node]) -> None:
        """Append these ops, and before them what they read of weights."""
        gathers = {node.id: weight for node in nodes if (weight := self.whole.gather_of(node)) is not None}
        if self.is_gathering:
            self._given = {weight: node for node in nodes if (weight := gathers.get(node.id)) is not None}
            self._made = {weight: made for weight, made in self._made.items() if weight not in self._given}
        others = [node for node in nodes if node.id not in gathers or not self.is_gathering]
        members, group = self.whole.group.members, self.whole.group
        units = {i: member.unit for i, member in members.items()}
        before = gathers_before([node.id for node in others], units, group.prefetch, self._reads(others))
        for node in others:
            for weight in before.get(node.id, ()) if self.is_gathering else ():
                if weight not in self._made:
                    self._gather(weight, node)
            self.whole.emit(node, tuple([self._operand(i) for i in node.inputs]))
        for weight in [weight for weight in self._given if weight not in self._made]:
            self._gather(weight, self._given[weight])

    def of_last_units(self) -> dict[int, int]:
        """What was gathered of the units that a backward of these begins with, one after the other or ahead of it."""
        units = {weight: self.whole.group.members[weight].unit for weight in self._made if self._is_weight(weight)}
        last = last_units(units.values(), self.whole.group.prefetch)
        return {weight: self._made[weight] for weight, unit in units.items() if unit in last}

    def _is_weight(self, tensor: int) -> bool:
        return tensor in self.whole.group.members

    def _reads(self, nodes: Sequence[Node]) -> Callable[[int], Iterator[int]]:
        found = {node.id: [w for i in node.inputs if (w := self.whole.weight_of(i)) is not None] for node in nodes}
        return lambda node: iter(found[node])

    def _gather(self, weight: int, reader: Node) -> None:
        label = f"{self.number} {self.whole.group.members[weight].unit}"
        if weight in self._given:
            node = self._given[weight]
            self.whole.emit(node, node.inputs)
            self._made[weight] = node.outputs[0]
            self.whole.units[node.outputs[0]] = label
        else:
            self._made[weight] = self.whole.gather(weight, reader, label)

    def _operand(self, tensor: int) -> int:
        """What stands for a tensor in this phase: what was gathered of a weight, or is made of that."""
        if tensor in self._made:
            return self._made[tensor]
        node = self.whole.derived.get(tensor)
        if node is None:
            return tensor
        operand = self._operand(node.inputs[0])
        is_first = node.id not in self.whole.numbers
        made = tensor if is_first else self.whole.new_tensor(tensor)
        self.whole.emit(node, (operand,), None if is_first else (made,))
        self._made[tensor] = made
        return made


def gathers_before(
    nodes: Sequence[int], unit_of: Mapping[int, str], prefetch: int, read: Callable[[int], Iterable[int]]
) -> dict[int, list[int]]:
    """By op the weights that are gathered before it, unit by unit, each before the first op of the unit ahead.

    unit_of: by weight its unit. read: by op the weights that it reads.
    """
    first: dict[str, int] = {}
    wanted: dict[str, dict[int, None]] = {}
    for node in nodes:
        for weight in read(node):
            first.setdefault(unit_of[weight], node)
            wanted.setdefault(unit_of[weight], {})[weight] = None
    starts, found = list(first.values()), dict[int, list[int]]()
    for place, unit in enumerate(first):
        found.setdefault(starts[max(place - prefetch, 0)], []).extend(wanted[unit])
    return found
