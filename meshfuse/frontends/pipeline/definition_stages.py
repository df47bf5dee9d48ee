"""The programs of one stage of a plain definition: its forward and its backward for a micro-batch.

A stage is written as one definition first, forward and gradients. Its plan decides what is kept for the backward and
how it lies; then the two halves are written, as they are of a model's stages.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ...definition import annotating
from ...definition.annotation import layouts_of_spec
from ...definition.fsdp import UnitGroup
from ...definition.reverse import append_gradients
from ...definition.tensor_view import TensorView
from ...definition.units import units_of_gradients
from ...graph import Graph, Node, specialize
from ...mesh import DeviceMesh
from ...ops.values import TensorRef
from ...plans.halves import PartWriter
from ...sharding.value import Sharding
from ..captured_graph import Source
from ..plans import Spec
from ..steps import Half, Step
from ..traced import TracedDefinition
from .borders import Crossing
from .definition_cut import Asked, StageOps, tangents_of
from .program import StageProgram, spec_of_border

_HALVES = "fast"  # What matters of them the plan of both has decided.


@dataclass(frozen=True, slots=True)
class StageSetting:
    """What a stage of a definition is planned with.

    graph: the whole definition, with the sizes of a micro-batch.
    rows: (size, axes) of the first dim of the batch.
    is_split: whether the backward comes in two parts.
    microbatches: of a step; gradients are summed over ranks once in it.
    """

    asked: Asked
    graph: Graph
    mesh: DeviceMesh
    rows: tuple[int, Any] | None
    max_memory: float | None
    search: str
    is_split: bool
    microbatches: int


def weight_name(tensor: int) -> str:
    """What sources call a weight."""
    return f"t{tensor}"


def definition_stage(ops: StageOps, stages: Sequence[StageOps], setting: StageSetting) -> StageProgram:
    """Plan a stage."""
    specs = {c.place: spec_of_border(c.shape, setting.mesh, setting.rows)
             for c in (*ops.borders.received, *ops.borders.sent)}  # fmt: skip
    joint = _Joint(ops, stages, setting, specs)
    joint.write()
    step, summing = _Halves(joint).step()
    return StageProgram(ops.borders, step, setting.mesh, specs, summing)


@dataclass(slots=True)
class _Joint:
    """A stage's forward and gradients in one definition.

    inputs, results, gradients: what its inputs, its forward's outputs and its gradients are, by tensor.
    """

    ops: StageOps
    stages: Sequence[StageOps]
    setting: StageSetting
    specs: Mapping[int, Spec]
    fd: TracedDefinition = field(init=False)
    inputs: dict[int, Source] = field(default_factory=dict)
    results: dict[int, Source] = field(default_factory=dict)
    gradients: dict[int, Source] = field(default_factory=dict)
    weights: dict[int, int] = field(default_factory=dict)
    _made: PartWriter = field(init=False)

    def write(self) -> None:
        asked, setting = self.setting.asked, self.setting
        self.fd = TracedDefinition(max_memory=setting.max_memory, search=setting.search)
        self.fd.at = asked.line
        self._made = PartWriter(asked.recording, setting.graph, self.fd.recording, on=setting.mesh)
        self._made.take_scalars()
        self._take()
        self._made.write(self.ops.nodes)
        self._made.keep_marks()
        self._declare_units()
        sent = self._send()
        self._backward(sent)

    def _take(self) -> None:
        asked = self.setting.asked
        places = {ref.id: place for place, ref in enumerate(asked.recording.inputs) if isinstance(ref, TensorRef)}
        for i in self.ops.inputs:
            self._made.take(i)
            is_weight = i in asked.weights
            source = Source("parameter", weight_name(i)) if is_weight else Source("argument", place=places[i])
            self.inputs[self._made.made[i].id] = source
        self._put_on_mesh([i for i in self.ops.inputs if i in asked.batch])
        for crossing in self.ops.borders.taken(back=False):
            self._made.made[self.ops.tensors[crossing.place]] = self._border_input(crossing)

    def _put_on_mesh(self, tensors: Iterable[int]) -> None:
        """Have tensors that nobody annotates be whole on the stage's ranks: so the program is theirs."""
        recording = self.fd.recording
        for i in tensors:
            made = self._made.made[i].id
            if not recording.is_annotated(made):
                sharding = Sharding.replicated(self.setting.mesh, recording.tensors[made].type.ndim)
                annotating.shard(recording, made, sharding, None, self.setting.asked.line)

    def _border_input(self, crossing: Crossing) -> TensorRef:
        ttype = self.setting.graph.tensors[self.ops.tensors[crossing.place]].type
        view = self.fd.new_input(ttype.shape, ttype.dtype, replace(self.setting.asked.line, name=crossing.name))
        self._annotate(view.id, crossing)
        self.inputs[view.id] = Source("argument", place=crossing.place)
        return TensorRef(view.id)

    def _annotate(self, tensor: int, crossing: Crossing) -> None:
        spec, line = self.specs[crossing.place], self.setting.asked.line
        layouts = layouts_of_spec(crossing.name, self.setting.mesh, spec, len(crossing.shape), line)
        annotating.annotate(self.fd.recording, tensor, self.setting.mesh, layouts, line)

    def _declare_units(self) -> None:
        made, recording = self._made.made, self.fd.recording
        for group in self.setting.asked.recording.units:
            members = {made[i].id: member for i, member in group.members.items() if i in made}
            recording.units.append(replace(group, members=members))

    def _view(self, tensor: int) -> TensorView:
        return TensorView(self.fd, self._made.made[tensor])

    def _send(self) -> dict[int, TensorView]:
        """Return what the forward sends, and the loss; by tensor of the whole definition."""
        found: dict[int, TensorView] = {}
        for place, i in enumerate(self.ops.sent):
            crossing = self.ops.borders.given(back=False)[place]
            found[i] = self.fd.ops.set(self._view(i))
            self._annotate(found[i].id, crossing)
            self.results[found[i].id] = Source("result", place=place)
        loss = self.setting.asked.loss
        if loss in self._made.made:
            found[loss] = self._view(loss)
            self.results[found[loss].id] = Source("result", place=len(self.ops.sent))
        self.fd.recording.outputs += self.results
        return found

    def _backward(self, sent: Mapping[int, TensorView]) -> None:
        """Append gradients of what was received, and of weights."""
        asked, outputs, given = self.setting.asked, list[TensorView](), list[TensorView]()
        for i, crossing in tangents_of(self.ops, self.stages):
            outputs.append(sent[i])
            given.append(TensorView(self.fd, self._border_input(crossing)))
        if asked.loss in sent:
            loss = sent[asked.loss]
            tangent = self.fd.new_input(loss.type.shape, loss.dtype, replace(asked.line, name="loss.grad"))
            self.inputs[tangent.id] = Source("tangent", place=len(self.ops.sent))
            annotating.shard(self.fd.recording, tangent.id, Sharding.replicated(self.setting.mesh, 0), None, asked.line)
            outputs, given = [*outputs, loss], [*given, tangent]
        weights = [i for i in self.ops.inputs if i in asked.weights]
        self._put_on_mesh(weights)
        wanted = [self._view(i) for i in (*self.ops.gradients, *weights)]
        if not wanted:
            return
        made = append_gradients(self.fd, outputs, wanted, given, asked.line)
        borders = list(self.ops.gradients.values())
        for view, crossing in zip(made, borders, strict=False):
            self._annotate(view.id, crossing)
            self.gradients[view.id] = Source("gradient", place=crossing.place, of="argument")
        for view, i in zip(made[len(borders) :], weights, strict=True):
            self.gradients[view.id] = Source("gradient", weight_name(i), of="parameter")
            self.weights[view.id] = self._made.made[i].id
            recording = self.fd.recording
            name = f"{asked.label(i).partition(' (')[0]}.grad"
            recording.name(view.id, name, recording.tensors[view.id].line)
            recording.once_in[view.id] = self.setting.microbatches
        self.fd.recording.outputs += self.gradients


class _Halves:
    """Writes the halves of a stage's definition.

    again: ops of the forward that the backward does once more, as they take no time: views and casts of inputs.
    """

    def __init__(self, joint: _Joint) -> None:
        self.joint, self.setting = joint, joint.setting
        recording = joint.fd.recording
        self.compiled = joint.fd.compile()
        shapes = {i: recording.tensors[i].type.shape for i in recording.input_tensors()}
        self.graph = specialize(recording, shapes, {})
        start = recording.sweeps[0].start if recording.sweeps else len(recording.nodes)
        self.forward = [node for node in self.graph.nodes if node.origin < start]
        self.backward = [node for node in self.graph.nodes if node.origin >= start]
        self.made_forward = {i for node in self.forward for i in node.outputs}
        self.again = self._cheap()
        wanted = {i for node in self.backward for i in node.inputs} | joint.gradients.keys()
        self.saved = sorted(i for i in wanted & self.made_forward if i not in self.again)
        self.left = self._left() if self.setting.microbatches > 1 else {}

    def _cheap(self) -> dict[int, Node]:
        found: dict[int, Node] = {}
        for node in self.forward:
            op = node.call.op
            is_light = (op.is_view or op.name in ("cast", "set")) and len(node.outputs) == 1
            if is_light and all(i in self.joint.inputs or i in found for i in node.inputs):
                found[node.outputs[0]] = node
        return {i: node for i, node in found.items() if i not in self.joint.results}

    def _left(self) -> dict[int, Sharding]:
        """By gradient of a weight where the plan makes it, if that is not where it is brought to once a step."""
        compiled, graph = self.compiled.sharded, self.graph
        made: dict[int, Sharding] = {}
        for node, choice in zip(compiled.graph.nodes, compiled.choices, strict=True):
            made.update(zip(node.outputs, choice.placement.results, strict=True))
        return {i: made[i] for i in self.joint.weights if i in made and made[i] != graph.annotations[i]}

    def step(self) -> tuple[Step, Half | None]:
        """The stage's programs, and what sums gradients over ranks once a step."""
        forward = self._forward()
        shardings = forward.fd.output_shardings()
        saved = dict(zip(self.saved, shardings[len(shardings) - len(self.saved) :], strict=True))
        halves: list[Half] = []
        held: dict[int, Sharding] = {}
        for nodes, ends, given in self._parts():
            halves.append(self._part(nodes, ends, given, {**saved, **held}))
            left = halves[-1].fd.output_shardings()
            held = dict(zip(given, left[len(ends) :], strict=True))
        backward, rest = (*halves, None, None)[:2]
        step = Step(forward, backward, self.joint.fd, tuple(shardings), len(self.saved), rest)
        return step, self._summing()

    def _writer(self) -> tuple[TracedDefinition, PartWriter]:
        by_rule = self.setting.search == "follow"
        fd = TracedDefinition(max_memory=self.setting.max_memory, search="follow" if by_rule else _HALVES)
        fd.at = self.setting.asked.line
        writer = PartWriter(self.joint.fd.recording, self.graph, fd.recording)
        writer.take_scalars()
        return fd, writer

    def _forward(self) -> Half:
        fd, writer = self._writer()
        taken = self._take(writer, self.forward)
        writer.write(node.id for node in self.forward)
        for i in self.saved:
            lies, made = self.compiled.sharded.shardings.get(i), writer.made[i].id
            if lies is not None and not fd.recording.is_annotated(made):
                annotating.shard(fd.recording, made, lies.reduced(), None, self.setting.asked.line)
        fd.recording.outputs += [writer.made[i].id for i in (*self.joint.results, *self.saved)]
        self._declare_units(fd, writer)
        outputs = [*self.joint.results.values(), *(Source("saved", place=n) for n in range(len(self.saved)))]
        return Half(fd, taken, tuple(outputs))

    def _take(self, writer: PartWriter, nodes: Sequence[Node]) -> tuple[Source, ...]:
        read = {i for node in nodes for i in node.inputs}
        for i in (taken := [i for i in self.joint.inputs if i in read]):
            writer.take(i)
        return tuple(self.joint.inputs[i] for i in taken)

    def _parts(self) -> list[tuple[list[Node], list[int], list[int]]]:
        """(ops, gradients that it returns, what it hands to the next) for each part of the backward."""
        ends, nodes = list(self.joint.gradients), self.backward
        early = [i for i in ends if self.joint.gradients[i].of == "argument"]
        if not ends:
            return []
        first = self._needed(nodes, early)
        rest = [node for node in nodes if node.id not in first]
        if not self.setting.is_split or not first or not rest:
            return [(nodes, ends, [])]
        sooner = [node for node in nodes if node.id in first]
        made = {i for node in sooner for i in node.outputs}
        late = [i for i in ends if i not in early]
        held = sorted(made & ({i for node in rest for i in node.inputs} | set(late)))
        return [(sooner, early, held), (rest, late, [])]

    def _needed(self, nodes: Sequence[Node], ends: Sequence[int]) -> set[int]:
        wanted, found = set(ends), set[int]()
        for node in reversed(nodes):
            if not wanted.isdisjoint(node.outputs):
                wanted.update(node.inputs)
                found.add(node.id)
        return found

    def _part(
        self, nodes: Sequence[Node], ends: Sequence[int], given: Sequence[int], handed: Mapping[int, Sharding]
    ) -> Half:  # fmt: skip
        """A part of the backward; `handed` is how what earlier halves hand on lies."""
        fd, writer = self._writer()
        wanted = {i for node in nodes for i in node.inputs} | set(ends)
        again = [node for node in self.forward if node.id in self._needed(list(self.again.values()), sorted(wanted))]
        sources: list[Source] = []
        for i, lies in handed.items():
            if i in wanted:
                made = self.graph.tensors[i]
                writer.made[i] = fd.recording.new_input(made.type, made.line, None)
                annotating.shard(fd.recording, writer.made[i].id, lies, None, self.setting.asked.line)
                is_saved = i in self.saved
                sources.append(Source("saved", place=self.saved.index(i)) if is_saved else Source("held", place=i))
        taken = self._take(writer, [*again, *nodes])
        writer.write([node.id for node in again])
        writer.write([node.id for node in nodes])
        for i in ends:
            self._leave(fd, writer, i)
        for i in given:
            self._hand_on(fd, writer, i)
        fd.recording.outputs += [writer.made[i].id for i in (*ends, *given)]
        self._declare_units(fd, writer)
        outputs = [*(self.joint.gradients[i] for i in ends), *(Source("held", place=i) for i in given)]
        return Half(fd, (*sources, *taken), tuple(outputs))

    def _hand_on(self, fd: TracedDefinition, writer: PartWriter, tensor: int) -> None:
        lies, made = self.compiled.sharded.shardings.get(tensor), writer.made[tensor].id
        if lies is not None and not fd.recording.is_annotated(made):
            annotating.shard(fd.recording, made, lies.reduced(), None, self.setting.asked.line)

    def _leave(self, fd: TracedDefinition, writer: PartWriter, gradient: int) -> None:
        """Have a gradient stay where the plan makes it, until the end of a step."""
        if gradient in self.left:
            made, recording = writer.made[gradient].id, fd.recording
            del recording.own_annotations[made]
            annotating.leave_as_made(recording, made, self.left[gradient], self.setting.asked.line)

    def _lies(self, gradient: int) -> Sharding:
        return self.graph.annotations[gradient]

    def _summing(self) -> Half | None:
        """What brings gradients to their weights."""
        if not self.left:
            return None
        fd, sources = TracedDefinition(), [self.joint.gradients[i].name for i in self.left]
        fd.at = self.setting.asked.line
        for gradient, left in self.left.items():
            made = self.graph.tensors[gradient]
            terms = fd.new_input(made.type.shape, made.type.dtype, made.line)
            annotating.leave_as_made(fd.recording, terms.id, left, self.setting.asked.line)
            whole = fd.ops.set(terms)
            annotating.shard(fd.recording, whole.id, self._lies(gradient), None, self.setting.asked.line)
            fd.add_output(whole)
        kinds = ("terms", "gradient")
        inputs, outputs = (tuple(Source(kind, name) for name in sources) for kind in kinds)
        return Half(fd, inputs, outputs)

    def _declare_units(self, fd: TracedDefinition, writer: PartWriter) -> None:
        for group in self.joint.fd.recording.units:
            members = {writer.made[i].id: member for i, member in group.members.items() if i in writer.made}
            ends = units_of_gradients(self.joint.fd.recording, group)
            found = {writer.made[i].id: unit for i, unit in ends.items() if i in writer.made and i not in self.left}
            fd.recording.units.append(UnitGroup(members, group.prefetch, True, group.replicate, found, group.is_rule))
