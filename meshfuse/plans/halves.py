"""A planned definition written as two: what follows from some inputs alone, and the rest."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping

from ..definition.annotating import shard
from ..definition.recording import Recording
from ..graph import Graph, Node
from ..mesh import DeviceMesh
from ..ops.opdef import count_tensors
from ..ops.registry import find
from ..ops.values import ScalarRef, TensorRef
from ..scalars import ScalarDef
from ..sharding.value import Sharding
from .binding_times import HalvedPlan, Need

NOTHING: Mapping[int, Mapping[int, TensorRef]] = {}


def write_halves(whole: Recording, cut: HalvedPlan, first: Recording, rest: Recording) -> None:
    """Fill two empty definitions from a plan cut in two.

    `first` returns what `cut.handed_on` names, in that order. `rest` takes the inputs that are left, in their order,
    and then what `first` returns.
    """
    once = PartWriter(whole, cut.plan.graph, first)
    for tensor in cut.inputs:
        once.take(tensor)
    once.write(cut.before | cut.free, {})
    for need in cut.handed_on:
        once.hand_on(need)
    each = PartWriter(whole, cut.plan.graph, rest)
    each.take_scalars()
    for ref in cut.plan.graph.inputs:
        if isinstance(ref, ScalarRef):
            rest.inputs.append(ref)
        elif ref.id not in cut.inputs:
            each.take(ref.id)
    handed = {need: each.take_handed(need) for need in cut.handed_on}
    others = [node.id for node in cut.plan.graph.nodes if node.id not in cut.before]
    each.write(others, {n: {p: handed[need] for p, need in needs.items()} for n, needs in cut.needs.items()})
    ends = {i: handed[need] for i, need in cut.ends.items()}
    for i in cut.plan.graph.outputs:
        rest.outputs.append((ends[i] if i in ends else each.made[i]).id)


class PartWriter:
    """Writes a part of a definition into another one; `made` are its tensors, by their numbers in the graph.

    on: the mesh that annotations are moved to, in the place of the one that they name; None for that.
    """

    def __init__(self, whole: Recording, graph: Graph, new: Recording, on: DeviceMesh | None = None):
        self.whole, self.graph, self.new, self.on = whole, graph, new, on
        self.made: dict[int, TensorRef] = {}
        self._annotations, self._names_mesh = whole.all_annotations, bool(whole.annotations)

    def take(self, tensor: int) -> None:
        """Take an input of the whole definition."""
        made = self.graph.tensors[tensor]
        self.made[tensor] = self.new.new_input(made.type, made.line, self.whole.tensors[tensor].stride_order)
        self._annotate(tensor)

    def take_handed(self, need: Need) -> TensorRef:
        """Take what the first definition returns."""
        made = self.graph.tensors[need.tensor]
        given = self.new.new_input(made.type, made.line, None)
        self._place(given, need.sharding)
        return given

    def take_scalars(self) -> None:
        """Take all scalars, under their own numbers; sizes become constants."""
        for made in self.whole.scalars.values():
            self.new.new_scalar(self._sized(made))

    def _sized(self, made: ScalarDef) -> ScalarDef:
        if made.op != "size":
            return made
        tensor, dim = made.operands
        return ScalarDef("const", (self.graph.shape(tensor.id)[dim],), made.dtype)

    def write(self, nodes: Iterable[int], handed: Mapping[int, Mapping[int, TensorRef]] = NOTHING) -> None:
        """Append these ops. `handed` has, by op and place, the operands that the first definition returned."""
        for number in sorted(nodes):
            node = self.graph.nodes[number]
            read = handed.get(number, {})
            operands = [read[p] if p in read else self.made[i] for p, i in enumerate(node.inputs)]
            self._apply(node, iter(operands))

    def keep_marks(self) -> None:
        """Let no gradient pass what none passes in the whole definition."""
        self.new.constants |= {self.made[i].id for i in self.whole.constants if i in self.made}

    def _apply(self, node: Node, operands: Iterator[TensorRef]) -> None:
        bound = []
        for arg in node.call.args:
            many = [next(operands) for _ in range(count_tensors(arg))]
            bound.append((many[0] if isinstance(arg, TensorRef) else tuple(many)) if many else arg)
        made = self.new.append(node.call.op, tuple(bound), node.line)
        self.made.update(zip(node.outputs, made, strict=True))
        for tensor in node.outputs:
            self._annotate(tensor)

    def _annotate(self, tensor: int) -> None:
        """Annotate a tensor as the user did if it is made by the same op, else with the sharding that this means."""
        made = self.made[tensor]
        own = self._annotations.get(tensor)
        if own is not None and self.new.reduction_flags(made.id) == self.whole.reduction_flags(tensor):
            copied = dataclasses.replace(own, domain=own.domain.copy())
            copied.mesh = copied.mesh if self.on is None else self.on
            self.new.own_annotations[made.id] = copied
        elif tensor in self.graph.annotations:
            self._place(made, self.graph.annotations[tensor])
        if tensor in self.whole.overlaps:
            self.new.overlaps[made.id] = self.whole.overlaps[tensor]

    def _place(self, made: TensorRef, sharding: Sharding) -> None:
        """Annotate a tensor with a sharding, unless the user names no mesh: then the program runs on any."""
        if self._names_mesh:
            moved = sharding if self.on is None else Sharding(self.on, sharding.dims, sharding.partial, sharding.reduce)
            shard(self.new, made.id, moved, None, self.new.line_of_change())

    def hand_on(self, need: Need) -> None:
        """Return a tensor in the sharding in which it will be read."""
        op = find("set")
        assert op is not None
        (given,) = self.new.append(op, (self.made[need.tensor],), self.graph.tensors[need.tensor].line)
        self._place(given, need.sharding)
        self.new.outputs.append(given.id)
