"""A captured joint graph cut into stages: a graph for each, which takes and gives what crosses its borders.

A node of the forward belongs to the stage in whose stretch of the graph it stands; a node of the backward to the last
stage that has all it reads. What depends on no weight, such as masks and tables of angles, is computed by every stage
that reads it. Sums of a weight's gradients over several stages are left to the ranks that share the weight.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch.utils import _pytree as pytree

from ...errors import MeshfuseError, SourceLine, user_error
from ..captured_graph import Captured, Source
from ..cut import Reads, draws, is_size, is_view
from ..lines import line_of, module_paths
from .borders import Borders, Crossing

Node = torch.fx.Node


@dataclass(frozen=True, slots=True)
class StageGraph(Borders):
    """What one stage computes, as a graph with a forward and a backward."""

    graph: Captured


def stage_graphs(graph: Captured, cuts: Sequence[str], first_place: int, line: SourceLine) -> list[StageGraph]:
    """Cut a joint graph, whose only result is a loss, before each of these modules.

    cuts: full names of modules.
    first_place: the number of the first crossing tensor.

    Raises DefinitionError for modules that do not run in this order.
    """
    owners = _Owners(graph, cuts, line)
    count = len(cuts) + 1
    outputs = _outputs(graph, owners)
    crossing = _crossings(owners, outputs, count, first_place, line)
    return [_Builder(graph, owners, outputs[stage], crossing, stage).made() for stage in range(count)]


class _Owners:
    """By node the stage that computes it; None for what each stage computes for itself."""

    def __init__(self, graph: Captured, cuts: Sequence[str], line: SourceLine) -> None:
        self.inputs = dict(graph.inputs)
        self.nodes = [node for node in graph.module.graph.nodes if node.op == "call_function"]
        ends = [node for node, source in graph.outputs if source.kind != "gradient" and node is not None]
        self.forward = Reads({}).ancestors(ends)
        self.forward |= {n for n in self.nodes if n.target is operator.getitem and n.args[0] in self.forward}
        self.last = len(cuts)
        named = {source: node for node, source in graph.inputs}
        gradients = [(node, source) for node, source in graph.outputs if source.kind == "gradient" and node is not None]
        self.weights = {node: named[source.of_input()] for node, source in gradients}
        self._free: set[Node] = set()
        self.stretch = self._stretches(cuts, line)
        self.stage: dict[Node, int] = {}
        self._own()

    def _stretches(self, cuts: Sequence[str], line: SourceLine) -> dict[Node, int]:
        """By node of the forward the stage in whose stretch it stands."""
        found, stage = dict[Node, int](), 0
        for node in self.nodes:
            if node in self.forward:
                if stage < len(cuts) and cuts[stage] in module_paths(node):
                    stage += 1
                found[node] = stage
        if stage < len(cuts):
            raise user_error(
                f"pipeline: {cuts[stage]}", "does not run after the one cut at before" if stage else "does not run",
                "modules of the forward, in the order in which they run", "Cut at others.", line,
            )  # fmt: skip
        return found

    def _own(self) -> None:
        for node in self.nodes:
            if self._is_free(node):
                self._free.add(node)
            elif node in self.forward:
                self.stage[node] = self.stretch[node]
        having = self._having()
        for node in self.nodes:
            if node not in self._free and node not in self.stage:
                self.stage[node] = self._stage_of_backward(node, having)
        for node in reversed(self.nodes):
            if node in self.stage and node not in self.forward:
                self._follow_readers(node, having)

    def _follow_readers(self, node: Node, having: Mapping[Node, set[int]]) -> None:
        """Move what is made of gradients alone, such as that of a bias, to its last reader, where these arrive anyway.

        The gradient of a weight is read where the weight is.
        """
        reads = [read for read in node.all_input_nodes if not self.is_everywhere(read)]
        readers = [self.stage[user] for user in node.users if user in self.stage]
        if node in self.weights:
            readers.append(max(having.get(self.weights[node], {0})))
        if (
            not readers
            or max(readers) >= self.stage[node]
            or any(r not in self.stage or r in self.forward for r in reads)
        ):
            return
        there = max(readers)
        arrives = all(any(self.stage.get(u, there + 1) <= there for u in r.users if u is not node) for r in reads)
        if node in self.weights or arrives:
            self.stage[node] = there

    def _is_free(self, node: Node) -> bool:
        """Whether a node depends on no weight and no gradient, and draws no random numbers; or is a size."""
        if is_size(node):
            return True
        return not draws(node) and all(self.is_everywhere(read) for read in node.all_input_nodes)

    def is_everywhere(self, node: Node) -> bool:
        """Whether every stage has a node's value: arguments, buffers and what follows from them."""
        if node in self.inputs:
            return self.inputs[node].kind in ("argument", "buffer", "constant")
        return node in self._free

    def _having(self) -> dict[Node, set[int]]:
        """By node of the forward, and by weight, the stages that have its value: the one that makes it, and readers."""
        found: dict[Node, set[int]] = {node: {stage} for node, stage in self.stage.items()}
        for node, stage in self.stage.items():
            for read in node.all_input_nodes:
                found.setdefault(read, set()).add(stage)
        return found

    def _stage_of_backward(self, node: Node, having: Mapping[Node, set[int]]) -> int:
        """The last stage that has all that a node reads, and none after what it reads of the backward."""
        reads = [read for read in node.all_input_nodes if not self.is_everywhere(read)]
        top = min([self.stage[r] for r in reads if r in self.stage and r not in self.forward], default=self.last)
        kept = [having.get(r, set()) for r in reads if r in self.forward or self._is_weight(r)]
        for stage in range(top, -1, -1):
            if all(stage in stages for stages in kept):
                return stage
        return top

    def _is_weight(self, node: Node) -> bool:
        return node in self.inputs and self.inputs[node].kind == "parameter"


Ends = list[tuple[Node, Source]]


def _outputs(graph: Captured, owners: _Owners) -> list[Ends]:
    """By stage what it gives beside what crosses borders: the loss, new buffers, and gradients of weights."""
    found: list[Ends] = [[] for _ in range(owners.last + 1)]
    for node, source in graph.outputs:
        if node is None:
            continue
        if source.kind == "gradient":
            for part in _terms(node, owners):
                found[owners.stage.get(part, 0)].append((part, source))
        elif source.kind == "mutation":
            found[owners.stretch.get(node, 0)].append((node, source))
        else:
            found[owners.last].append((node, source))
    return found


def _terms(node: Node, owners: _Owners) -> list[Node]:
    """The terms of a gradient that several stages make, by stage; itself if one stage makes it."""
    waiting, found = [node], list[Node]()
    while waiting:
        here = waiting.pop()
        parts = here.all_input_nodes
        is_sum = here.target is torch.ops.aten.add.Tensor and len(parts) == 2 and not here.kwargs
        if is_sum and len({owners.stage.get(part) for part in (here, *parts)}) > 1:
            waiting += parts
        else:
            found.append(here)
    by_stage: dict[int, list[Node]] = {}
    for part in found:
        by_stage.setdefault(owners.stage.get(part, 0), []).append(part)
    return found if all(len(parts) == 1 for parts in by_stage.values()) else [node]


def _crossings(
    owners: _Owners, outputs: Sequence[Ends], count: int, first_place: int, line: SourceLine
) -> dict[Node, Crossing]:
    """The tensors that cross borders, each with the stages that read it."""
    readers: dict[Node, set[int]] = {}
    for stage in range(count):
        for node in _needed([node for node, _ in outputs[stage]], owners, stage)[1]:
            readers.setdefault(node, set()).add(stage)
    waiting = list(readers)
    while waiting:  # What a stage sends may need more from others.
        node = waiting.pop()
        for more in _needed([node], owners, owners.stage[node])[1]:
            if owners.stage[node] not in readers.setdefault(more, set()):
                readers[more].add(owners.stage[node])
                waiting.append(more)
    ordered = [node for node in owners.nodes if node in readers]
    return {node: _crossing(owners, node, readers[node], first_place + i, line) for i, node in enumerate(ordered)}


def _crossing(owners: _Owners, node: Node, targets: set[int], place: int, line: SourceLine) -> Crossing:
    source, back, value = owners.stage[node], node not in owners.forward, node.meta["val"]
    fits = all(target < source if back else target > source for target in targets)
    if not fits or not isinstance(value, torch.Tensor):
        raise user_error(
            f"pipeline: {line_of(node).name} of stage {source}", f"read by stages {sorted(targets)}",
            "a cut that activations cross forwards, and gradients backwards", "Cut at other modules.", line,
        )  # fmt: skip
    return Crossing(
        place, line_of(node).name, tuple(int(n) for n in value.shape), value.dtype, source, tuple(sorted(targets)), back
    )


def _needed(ends: Sequence[Node], owners: _Owners, stage: int) -> tuple[set[Node], list[Node]]:
    """(nodes that a stage computes for these, and the tensors of other stages that it reads for them).

    A view of another stage's tensor is taken here: the tensor crosses once, however many views there are.
    """
    inside, outside, waiting = set[Node](), dict[Node, None](), list(ends)
    while waiting:
        node = waiting.pop()
        if node in inside or node in outside:
            continue
        if node in owners.stage and owners.stage[node] != stage and not is_view(node):
            outside[node] = None
        else:
            inside.add(node)
            waiting += () if is_size(node) else node.all_input_nodes
    return inside, list(outside)


class _Builder:
    """Writes the graph of one stage."""

    def __init__(
        self, graph: Captured, owners: _Owners, ends: Ends, crossings: Mapping[Node, Crossing], stage: int
    ) -> None:
        self.whole, self.owners, self.stage, self.ends = graph, owners, stage, ends
        self.crossings = crossings
        self.sent = [node for node, crossing in crossings.items() if crossing.source == stage]
        self.new = torch.fx.Graph()
        self.made_of: dict[Node, Node] = {}
        self.inputs: list[tuple[Node, Source]] = []

    def made(self) -> StageGraph:
        """The stage's graph."""
        inside, outside = _needed([*self.sent, *(node for node, _ in self.ends)], self.owners, self.stage)
        self._take_inputs(inside)
        received = sorted(outside, key=lambda node: self.crossings[node].place)
        for node in received:
            self._placeholder(node, Source("argument", place=self.crossings[node].place))
        for node in self.owners.nodes:
            if node in inside and is_size(node):
                self._placeholder(node, Source("size", node.name))
            elif node in inside:
                self.made_of[node] = self.new.node_copy(node, self.made_of.__getitem__)
        outputs = self._outputs()
        self.new.output([node for node, _ in outputs])
        module = torch.fx.GraphModule(self.whole.module, self.new)
        captured = Captured(module, tuple(self.inputs), tuple(outputs), pytree.tree_structure(0), True)
        sent = [self.crossings[node] for node in self.sent]
        return StageGraph(tuple(self.crossings[node] for node in received), tuple(sent), captured)

    def _take_inputs(self, inside: set[Node]) -> None:
        losses = sum(source.kind == "result" for _, source in self.ends)
        place = sum(node in self.owners.forward for node in self.sent)
        for node, source in self.whole.inputs:
            if node not in inside and source.kind != "argument":  # Sizes follow from arguments.
                continue
            if node.op == "get_attr":
                self.made_of[node] = self.new.node_copy(node)
                self.inputs.append((self.made_of[node], source))
            else:
                assert source.kind != "tangent" or losses == 1
                self._placeholder(node, replace(source, place=place) if source.kind == "tangent" else source)

    def _placeholder(self, node: Node, source: Source) -> None:
        made = self.made_of[node] = self.new.placeholder(node.name)
        made.meta = dict(node.meta)
        self.inputs.append((made, source))

    def _outputs(self) -> list[tuple[Node, Source]]:
        """Results first: what the forward sends, and the loss."""
        forward = [node for node in self.sent if node in self.owners.forward]
        found = [(self.made_of[node], Source("result", place=i)) for i, node in enumerate(forward)]
        for node, source in self.ends:
            place = len(forward) if source.kind == "result" else source.place
            found.append((self.made_of[node], replace(source, place=place)))
        for node in self.sent:
            if node not in self.owners.forward:
                crossing = self.crossings[node]
                found.append((self.made_of[node], Source("gradient", place=crossing.place, of="argument")))
        return found


def check_weights(graphs: Sequence[StageGraph], owned: Mapping[str, Sequence[int]], line: SourceLine) -> None:
    """Raises DefinitionError where a stage reads a weight that its rank does not hold.

    owned: by parameter the stages that hold it.
    """
    for stage, made in enumerate(graphs):
        for source in (s for _, s in made.graph.inputs if s.kind == "parameter"):
            if stage not in owned[source.name]:
                raise _misplaced(source.name, stage, owned[source.name], line)


def _misplaced(name: str, stage: int, owned: Sequence[int], line: SourceLine) -> MeshfuseError:
    return user_error(
        f"pipeline: {name} is used by stage {stage}", f"and held by stage {', '.join(map(str, owned))}: its module is "
        "made in another order than it runs in", "weights where they are used",
        f'Say so: mf.Pipeline(..., modules={{"{name}": {stage}}}).', line,
    )  # fmt: skip
