"""A captured joint graph planned as one definition, and cut into one for the forward and one for the backward.

The joint plan decides what is saved for the backward and in which sharding: the forward's definition returns these
tensors so, and the backward's takes them so. Parameters are inputs of both, as they lie, so that what is gathered of
them is freed after its use.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch

from ..definition import annotating
from ..definition.fsdp import Member, UnitGroup
from ..definition.tensor_view import TensorView
from ..dtypes import from_torch
from ..errors import located
from ..executor.dtensor import placements_of
from ..gc_pause import no_collection
from ..graph import Carried
from ..plans.plan_cost import plan_cost
from ..rewrites.gather_units import last_units
from ..sharding.value import Sharding
from .accumulating import NO_TERMS, SYNCED, Terms, open_axes
from .activations import outputs_of_modules
from .attentions import in_words, spreads, with_borders
from .backward_parts import Part, parts_of
from .block_orders import in_order, in_sequence
from .captured_graph import Captured, Source, differentiable
from .context import ULYSSES
from .cut import Cut, Reads, cut, in_turn
from .lines import line_of
from .masks import recognised
from .plans import Spec
from .sizes import Sizes
from .steps import Half, Setting, Step
from .traced import TracedDefinition
from .translate import Translator

Node = torch.fx.Node
_HALVES = "fast"  # How the halves are planned: what matters of them the joint plan has decided.


def planned(graph: Captured, setting: Setting) -> Step:
    """Plan a captured graph for arguments of these shapes, and cut it."""
    with no_collection():
        if setting.context is None:
            return JointWriter(graph, setting).step()
        ways = setting.context.ways()
        writers = [JointWriter(with_borders(graph, not way.by(ULYSSES)), replace(setting, context=way)) for way in ways]
        return (writers[0] if len(ways) == 1 else min(writers, key=lambda writer: writer.seconds)).step()


class JointWriter:
    """Writes the joint definition and the two halves of one graph."""

    def __init__(self, graph: Captured, setting: Setting) -> None:
        self.graph, self.setting, self.sizes = graph, setting, Sizes()
        for node, source in graph.of_kind("argument"):
            if isinstance(node.meta.get("val"), torch.Tensor):
                self.sizes.bind(node.meta["val"].shape, setting.shapes[source.place])
            elif source.place in setting.numbers:
                self.sizes.bind([node.meta["val"]], [setting.numbers[source.place]])
        self.masks = recognised(graph.module.graph, self.sizes)
        self.spreads = spreads(graph, self.masks, setting, self.sizes)
        self._read = Reads(self.masks)
        self.sharded = self._sharded()
        self.cut: Cut = self._with_gathered(cut(graph, self.masks, setting.max_memory is not None))
        self.activations = outputs_of_modules(graph.module.graph, setting.plan.outputs, self.cut.forward)
        self.sources = dict(graph.inputs)
        has_gradient = any(node is not None for node, _ in graph.of_kind("gradient"))
        self.parts = parts_of(graph, self.cut, self._read, setting.is_split) if has_gradient else []
        self.held = [node for part in self.parts for node in part.given]
        self.left: Mapping[str, Sharding] = {}
        self._rows: dict[Node, int] = {}
        self.orders: Mapping[Node, Carried] = {}
        self._specs = {source.place: self._result_spec(node, source.place) for node, source in self._results()}

    def _result_spec(self, node: Node, place: int) -> Spec | None:
        """How a result lies; None for as the plan leaves it."""
        if place in self.setting.ends:
            return self.setting.ends[place]
        shape = self.sizes.shape(node.meta["val"])
        whole = (None,) * len(shape)
        if not shape or (self.setting.free and differentiable(node.meta["val"].dtype)):
            return None
        batch = self.setting.batch
        return (batch[1], *whole[1:]) if batch is not None and shape[0] == batch[0] else whole

    def step(self) -> Step:
        joint, shardings = self._joint
        forward = self._forward(shardings)
        results = tuple(forward.fd.output_shardings())
        saved = results[len(results) - len(self.cut.saved) :]
        halves: list[Half] = []
        held: Sequence[Sharding] = ()
        for part in self.parts:
            halves.append(self._backward(part, saved, held, shardings))
            held = halves[-1].fd.output_shardings()[len(part.ends) :] if part.given else ()
        backward, rest = (*halves, None, None)[:2]
        return Step(
            forward,
            backward,
            joint,
            results,
            len(self.cut.saved),
            rest,
            self.left,
            dict(self.setting.sync.taken),
            in_words(self.cut.forward, self.spreads) if self.setting.context is not None else {},
            {place: self.sizes.number(value) for place, value in self.graph.fixed.items()},
        )

    # the joint definition

    @property
    def seconds(self) -> float:
        """The modelled time of a step, with what travels in rings."""
        return plan_cost(self._joint[0].latest().sharded).seconds

    @functools.cached_property
    def _joint(self) -> tuple[TracedDefinition, dict[Node, Sharding]]:
        """The joint definition, and the shardings in which it has what the halves hand on."""
        made, kept = self.written()
        compiled = made.fd.compile()
        if self.setting.sync.leaves:
            self.left = self._gradients_left(made, compiled.sharded.shardings)
        left = compiled.output_shardings()
        found = {node: compiled.sharded.shardings.get(view.id) for node, view in kept.items()}
        results = self._results()
        ends = {node: left[place] for place, (node, _) in enumerate(results)}
        both = {node: s.reduced() for node, s in (found | ends).items() if s is not None}
        carried = compiled.graph.carried
        self.orders = {node: carried[view.id] for node, view in kept.items() if view.id in carried}
        return made.fd, {node: s for node, s in both.items() if _sayable(s, node, self.sizes)}

    def _gradients_left(self, made: Translator, shardings: Mapping[int, Sharding]) -> dict[str, Sharding]:
        """How gradients of parameters are left, by name, where that is not as these lie.

        As the plan makes them, where it counts their sums once in several runs. Else `.grad`, which users see, lies as
        the parameter does but for the axes along which ranks have terms.
        """
        ids = {node: view.id for node, view in made.values.items() if isinstance(view, TensorView)}
        there = {node: shardings[i] for node, i in ids.items() if i in shardings}
        found = dict[str, Sharding]()
        for node, name in [(node, source.name) for part in self.parts for node, source in part.ends if source.name]:
            shape = self.sizes.shape(node.meta["val"])
            axes = open_axes(node, there, self.setting.mesh)
            left = self.setting.gradient(name, shape, [axis for axis in self.setting.mesh.names if axis in axes])
            # A rule lets a view lie as the parameter does, though it shows terms.
            if self.setting.sync.runs > 1 and node in there and (there[node].partial or not axes):
                left = there[node]
            if left != self.setting.gradient(name, shape):
                found[name] = left
        return found

    def written(self) -> tuple[Translator, dict[Node, TensorView]]:
        """The joint definition, and what of it the halves hand on."""
        made = self._writer()
        self._take(made, self._inputs())
        made.write(self.cut.forward)
        self._annotate_activations(made)
        kept = {node: made.values[node] for node in self.cut.saved}
        self._finish_forward(made, kept=False)
        views = [made.values.get(node) for node in self.cut.forward]
        self.of_forward = frozenset(view.id for view in views if isinstance(view, TensorView))
        made.write(self.cut.again)
        made.write(self.cut.backward)
        kept |= {node: made.values[node] for node in self.held}
        self._rows = {node: view.type.rows for node, view in kept.items()}
        for part in self.parts:
            self._finish_backward(made, part)
        return made, kept

    def ends(self) -> list[Source]:
        """What the outputs of the joint definition are."""
        forward = [source for _, source in (*self._results(), *self._mutations())]
        return [*forward, *(source for part in self.parts for _, source in part.ends)]

    def _inputs(self) -> list[Node]:
        """All inputs that are read."""
        used = {x for node in (*self.cut.forward, *self.cut.backward) for x in self._read(node)}
        used |= {node for node, _ in self.graph.outputs if node is not None}
        return [node for node, _ in self.graph.inputs if node in used and _is_tensor(node)]

    # halves

    def _forward(self, shardings: Mapping[Node, Sharding]) -> Half:
        made = self._writer(_HALVES)
        ends = [node for node, _ in (*self._results(), *self._mutations())]
        used = {x for node in self.cut.forward for x in self._read(node)} | set(ends)
        taken = [node for node, _ in self.graph.inputs if node in used and _is_tensor(node)]
        self._take(made, taken)
        made.write(self.cut.forward)
        self._annotate_activations(made)
        outputs = self._finish_forward(made, kept=True)
        outputs += [Source("saved", place=place) for place in range(len(self.cut.saved))]
        self._annotate_as(made, shardings)
        return Half(made.fd, tuple(self.sources[node] for node in taken), tuple(outputs))

    def _annotate_as(self, made: Translator, shardings: Mapping[Node, Sharding]) -> None:
        """Have tensors lie as in the joint plan, unless they are inputs or annotated."""
        taken = set(made.fd.recording.input_tensors())
        for node, sharding in shardings.items():
            if node not in made.values:
                continue
            view = made.values[node]
            if view.id not in taken and not made.fd.recording.is_annotated(view.id):
                annotating.shard(made.fd.recording, view.id, sharding, None, self.setting.line)

    def _backward(
        self, part: Part, saved: Sequence[Sharding], held: Sequence[Sharding], shardings: Mapping[Node, Sharding]
    ) -> Half:
        made = self._writer(_HALVES, by_rule=self.setting.sync == SYNCED)
        taken: list[Source] = []
        for place in part.saved:
            self._take_as(made, self.cut.saved[place], saved[place], "saved")
            taken.append(Source("saved", place=place))
        for place, (node, sharding) in enumerate(zip(part.taken, held, strict=True)):
            self._take_as(made, node, sharding, "held")
            taken.append(Source("held", place=place))
        reads = [node for node in part.reads if _is_tensor(node)]
        self._take(made, reads)
        made.write(in_turn(part.again, part.nodes, self._read))
        earlier = dict(self.setting.sync.taken)
        outputs = self._finish_backward(made, part, earlier)
        terms = [Source("terms", source.name) for _, source in part.ends if source.name in earlier]
        for place, node in enumerate(part.given):
            self._hand_on(made, node)
            outputs.append(Source("held", place=place))
        self._annotate_as(made, {node: shardings[node] for node in part.given if node in shardings})
        return Half(made.fd, (*taken, *(self.sources[node] for node in reads), *terms), tuple(outputs))

    def _take_as(self, made: Translator, node: Node, sharding: Sharding, kind: str) -> None:
        """Define an input that another half hands over, as it lies."""
        view = made.input(node, self.setting.named(f"{kind}.{node.name}"), rows=self._rows.get(node, 0))
        annotating.shard(made.fd.recording, view.id, sharding, None, self.setting.line)
        if node in self.orders:
            made.values[node] = in_sequence(made.fd, view, self.orders[node])

    def _hand_on(self, made: Translator, node: Node) -> None:
        """Return a tensor for another half, in the order of rows in which the joint plan has it; a weight gathered."""
        view = made.values[node] if node not in self.sharded else self._gathered(made, node)
        made.fd.add_output(view if node not in self.orders else in_order(made.fd, view, self.orders[node]))

    # parts of definitions

    def _writer(self, search: str | None = None, by_rule: bool = True) -> Translator:
        found = "follow" if by_rule and self._is_data_parallel() else search
        fd = TracedDefinition(
            max_memory=self.setting.max_memory, search=found, takes_over=self.setting.is_dynamic
        )  # fmt: skip
        made = Translator(fd, self.sizes, replaced=self.masks, replicate=self.setting.replicate, spreads=self.spreads)
        for node, _ in self.graph.inputs:
            if not _is_tensor(node):
                made.values[node] = self.sizes.number(node.meta.get("val"))
        for node in self.graph.module.graph.nodes:
            value = node.meta.get("val")
            if node.op == "call_function" and isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)):
                with located(line_of(node)):
                    made.values[node] = self.sizes.number(value)
        return made

    def _take(self, made: Translator, nodes: Sequence[Node]) -> None:
        """Define inputs, annotated as the plan says."""
        for node in nodes:
            source = self.sources[node]
            name = self._name(source)
            kept = self.setting.dtypes.get(source.name or source.place) if source.kind != "tangent" else None
            view = made.input(node, self.setting.named(name), kept)
            spec = self._spec(source, view.ndim)
            self._annotate(made.fd, view, spec)
            self._keep(made.fd, view, source, spec)
            if kept is not None and kept != node.meta["val"].dtype:
                made.fd.at = replace(made.fd.recording.tensors[view.id].line, name=f"{name}.cast")
                cast = made.fd.ops.cast(view, from_torch(node.meta["val"].dtype))
                self._annotate(made.fd, cast, spec)
                made.values[node] = cast
        self._declare_units(made, [node for node in nodes if node in self.sharded])

    # fully sharded parameters

    def _sharded(self) -> dict[Node, str]:
        """By parameter that is cut over the axes of FSDP its unit."""
        plan = self.setting.plan
        named = [(node, source.name) for node, source in self.graph.of_kind("parameter")]
        return {node: plan.units[name] for node, name in named if plan.gathered(name) is not None}

    def _is_data_parallel(self) -> bool:
        """Whether parameters are fully sharded and all axes are the batch's.

        What a user then asks for is a rule and no search: ranks compute with rows of their own, whichever plan takes
        less time.
        """
        mesh, batch = self.setting.mesh, self.setting.batch[1] if self.setting.batch is not None else ()
        data = {batch} if isinstance(batch, str) else set(batch or ())
        others = [axis for axis in mesh.names if axis not in data and mesh.axis_size(axis) > 1]
        return self.setting.plan.sharding is not None and not others and not self.setting.plan.experts

    def _with_gathered(self, found: Cut) -> Cut:
        """The forward also saves parameters that it has gathered, where they stay so for the backward."""
        kept = [node for node in found.reads if node in self.sharded and self._stays_gathered(node)]
        reads = tuple(node for node in found.reads if node not in kept)
        return replace(found, saved=(*found.saved, *kept), reads=reads)

    def _stays_gathered(self, weight: Node) -> bool:
        """Whether the forward hands on a weight as it is gathered: any where the user says so, else those of its last
        units, which a backward that follows at once begins with."""
        fsdp = self.setting.plan.sharding
        if fsdp is not None and not fsdp.reshard_after_forward:
            return True
        return self.setting.sync.runs == 1 and self.sharded[weight] in self._last_units

    @functools.cached_property
    def _last_units(self) -> set[str]:
        fsdp, nodes = self.setting.plan.sharding, self.graph.module.graph.nodes
        read = (self.sharded[x] for node in nodes for x in node.all_input_nodes if x in self.sharded)
        return last_units(read, fsdp.prefetch if fsdp is not None else 0)

    def _declare_units(self, made: Translator, weights: Sequence[Node]) -> None:
        """Have weights be gathered unit by unit, before a unit's first op."""
        plan = self.setting.plan
        members = {made.values[node].id: Member(self.sharded[node], plan.gathered_over(self.sources[node].name))
                   for node in weights}  # fmt: skip
        if plan.sharding is not None and members:
            made.fd.recording.units.append(UnitGroup(members, plan.sharding.prefetch, True, is_rule=False))

    def _gathered(self, made: Translator, node: Node) -> TensorView:
        """A weight as it is gathered, to be handed on so."""
        source = self.sources[node]
        spec = self.setting.plan.gathered(source.name)
        made.fd.at = self.setting.named(f"{source.name}.gathered")
        whole = made.fd.ops.set(made.values[node])
        self._annotate(made.fd, whole, spec)
        return whole

    def _keep(self, fd: TracedDefinition, view: TensorView, source: Source, spec: Spec | None) -> None:
        """Have a parameter stay where the plan has it stay."""
        axes = self.setting.plan.stays(source.name, spec) if source.kind == "parameter" else []
        if axes:
            annotating.keep_stationary(fd.recording, view.id, axes, self.setting.line)

    def _name(self, source: Source) -> str:
        """What bills call an input or output."""
        found = source.name or self.setting.names.get(source.place, str(source.place))
        kinds = {"tangent": f"result.{source.place}.grad", "result": f"result.{source.place}"}
        return kinds.get(source.kind, f"{found}.grad" if source.kind == "gradient" else found)

    def _spec(self, source: Source, ndim: int) -> Spec | None:
        if source.kind == "parameter" or (source.kind == "gradient" and source.name):
            return self.setting.plan.spec(source.name, ndim)
        if source.kind in ("tangent", "result"):
            return self._specs.get(source.place)
        if source.name:
            return (None,) * ndim
        return self.setting.specs.get(source.place, (None,) * ndim)

    def _annotate(self, fd: TracedDefinition, view: TensorView, spec: Spec | None) -> None:
        if spec is not None:
            self.setting.annotate(fd, view, spec)

    def _annotate_activations(self, made: Translator) -> None:
        for node, spec in self.activations.items():
            view = made.values[node]
            self._annotate(made.fd, view, self._whole_spec(spec, self.sizes.shape(node.meta["val"])))

    def _whole_spec(self, spec: Spec, shape: Sequence[int]) -> Spec:
        """A spec for a result; torch's SequenceParallel names one dim alone, and rows of the batch stay where they are.

        An annotation binds: a dim that it leaves out is whole.
        """
        if not spec or spec[0] != "sequence":
            return spec
        _, dim, axis = spec
        size, rows = self.setting.batch or (None, None)
        return tuple(axis if d == dim else rows if d == 0 and n == size else None for d, n in enumerate(shape))

    def _results(self) -> list[tuple[Node, Source]]:
        return [(node, source) for node, source in self.graph.of_kind("result") if node is not None]

    def _mutations(self) -> list[tuple[Node, Source]]:
        return [(node, source) for node, source in self.graph.of_kind("mutation") if node is not None]

    def _finish_forward(self, made: Translator, kept: bool) -> list[Source]:
        """Add the forward's outputs: results, what is written back, and with `kept` what is saved."""
        outputs: list[Source] = []
        for node, source in (*self._results(), *self._mutations()):
            self._end(made, node, source, self._name(source))
            outputs.append(source)
        for node in self.cut.saved if kept else ():
            self._hand_on(made, node)
        return outputs

    def _end(
        self, made: Translator, node: Node, source: Source, name: str, taken: Sequence[str] = ()
    ) -> None:  # fmt: skip
        """Add an output; an annotated one is a tensor of its own, as another may be annotated otherwise.

        A gradient is reduced in the type for that, and returned in its parameter's; with the terms of earlier calls
        that ranks along the axes of `taken` have.
        """
        view = made.values[node]
        spec = self._spec(replace(source, kind=source.of) if source.kind == "mutation" else source, view.ndim)
        made.fd.at = replace(made.fd.at, name=name)
        left = self.left.get(source.name) if source.kind == "gradient" else None
        is_summed = source.kind == "gradient" and left is None
        if is_summed:
            view = self._cast(made, view, self.setting.reduce)
            view = self._with_terms(made, view, node, source, taken) if taken else view
        if left is not None:
            view = made.fd.ops.set(self._cast(made, view, self._kept_dtype(node, source)))
            annotating.leave_as_made(made.fd.recording, view.id, left, self.setting.line)
        elif spec is not None:
            view = made.fd.ops.set(view)
            self.setting.annotate(made.fd, view, spec)
        if is_summed and self.setting.sync.runs > 1 and source.name:
            made.fd.recording.once_in[view.id] = self.setting.sync.runs
        if is_summed:
            view = self._cast(made, view, self.setting.dtypes.get(source.name or source.place))
        made.fd.add_output(view)

    def _with_terms(
        self, made: Translator, view: TensorView, node: Node, source: Source, axes: Sequence[str]
    ) -> TensorView:  # fmt: skip
        """A gradient with the terms of earlier calls, which ranks along these axes have."""
        dtype = from_torch(self._kept_dtype(node, source))
        earlier = made.fd.new_input(view.type.shape, dtype, self.setting.named(f"{source.name}.grad before"))
        there = self.setting.gradient(source.name, view.type.shape, axes)
        annotating.leave_as_made(made.fd.recording, earlier.id, there, self.setting.line)
        found = made.fd.ops.add(view, earlier)
        return found if found.dtype is view.dtype else made.fd.ops.cast(found, view.dtype)

    def _kept_dtype(self, node: Node, source: Source) -> torch.dtype:
        """The type of a parameter, which is that of its gradient."""
        return self.setting.dtypes.get(source.name, node.meta["val"].dtype)

    def _cast(self, made: Translator, view: TensorView, dtype: torch.dtype | None) -> TensorView:
        wanted = view.dtype if dtype is None else from_torch(dtype)
        return view if view.dtype is wanted else made.fd.ops.cast(view, wanted)

    def _finish_backward(self, made: Translator, part: Part, taken: Terms = NO_TERMS) -> list[Source]:
        first, units = len(made.fd.recording.outputs), self.setting.plan.units
        for node, source in part.ends:
            self._end(made, node, source, self._name(source), taken.get(source.name, ()))
        ends = zip(made.fd.recording.outputs[first:], [source.name for _, source in part.ends], strict=True)
        found = {gradient: units[name] for gradient, name in ends if name in units}
        if self.sharded:
            made.fd.recording.units.append(UnitGroup({}, 0, True, ends=found, is_rule=False))
        return [source for _, source in part.ends]


def _is_tensor(node: Node) -> bool:
    return isinstance(node.meta.get("val"), torch.Tensor)


def _sayable(sharding: Sharding, node: Node, sizes: Sizes) -> bool:
    """Whether DTensor can say a sharding: results are returned as such."""
    return placements_of(sharding, sizes.shape(node.meta["val"])) is not None
