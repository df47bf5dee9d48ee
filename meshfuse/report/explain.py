"""`explain`: why a tensor is sharded as it is, what is communicated for it, and what else there was to choose."""

from __future__ import annotations

import contextlib
import difflib
import re
from collections.abc import Iterator, Sequence

from ..compiler import CompiledProgram
from ..errors import DefinitionError, SourceLine, shown, user_error
from ..graph import Graph, Node, users
from ..layer_folding import fold_rows
from ..number_text import duration, figures, number
from ..ops.promotion import widened_from
from ..placement.op_meshes import MeshCosts
from ..placement.options import Choice, RunnerUp, Source
from ..propagation import ShardedDefinition
from ..reshard.steps import StepKind
from ..resharding import Reshard
from .alternatives import Alternatives, wire_bytes
from .bill import table
from .causes import Causes, annotated_where, quoted
from .provenance import Origin, Provenance

_SHOWN = 6  # A longer chain of reasons is shown with so many tensors.
_SCREEN = 40  # A table of more rows has those of equal layers as one.


def explain_tensor(compiled: CompiledProgram, tensor: int) -> str:
    """Where a tensor's sharding comes from, what is communicated for it, and what other choices would cost."""
    return "\n".join(Explainer(compiled).lines(tensor))


def explain_all(compiled: CompiledProgram) -> str:
    """A table of all tensors: type, sharding, and why in a few words; of many, those of equal layers as one."""
    explainer, graph = Explainer(compiled), compiled.graph
    rows = list[tuple[str, ...]]()
    for tensor in graph.tensors:
        if tensor.id not in compiled.sharded.shardings:
            continue
        sharding = str(compiled.sharded.shardings[tensor.id])
        rows.append((tensor.label, str(tensor.type), sharding, explainer.in_short(tensor.id), str(tensor.line)))
    meshes = dict.fromkeys(str(sharding.mesh) for sharding in compiled.sharded.shardings.values())
    near = [] if compiled.taken_from is None else [f"taken over from {_plan_of(compiled.taken_from)}"]
    head = ("tensor", "type", "sharding", "why", "line")
    return "\n".join([f"on {', '.join(meshes)}", *near, table([head, *_folded(rows)])])


def _folded(rows: Sequence[tuple[str, ...]]) -> Sequence[tuple[str, ...]]:
    """The rows of a table; where these are many, those of equal layers as one."""
    if len(rows) <= _SCREEN:
        return rows
    return [(row.cells[0] + row.times, *row.cells[1:]) for row in fold_rows(rows, (0, 3))]


def _plan_of(graph: Graph) -> str:
    """The shapes that a plan was made for, as text."""
    sizes = [f"{graph.tensors[i].label} {list(graph.shape(i))}" for i in graph.input_tensors]
    return f"the plan for {', '.join(sizes)}"


def tensor_named(compiled: CompiledProgram, name: str, line: SourceLine | None = None) -> int:
    """The tensor of this name: t3, or the script's own variable (the last of several values).

    Raises DefinitionError where there is none.
    """
    tensors = compiled.graph.tensors
    for tensor in reversed(tensors):
        if name in (tensor.name, tensor.label, tensor.label.split(" ")[0]):
            return tensor.id
    known = ", ".join(tensor.label for tensor in tensors)
    if len(tensors) > _SHOWN:
        names = dict.fromkeys(tensor.label.split(" ")[0] for tensor in tensors)
        known = ", ".join(difflib.get_close_matches(name, names, 3) or [*names][:_SHOWN])
    raise user_error("no such tensor", shown(name), f"one of {known}", "Name one of these.", line)


class Explainer:
    """Writes what `explain` says of the tensors of one compiled program."""

    def __init__(self, compiled: CompiledProgram):
        self.compiled, self.graph = compiled, compiled.graph
        self.provenance = Provenance(compiled.sharded)
        self.causes = Causes(compiled, self.provenance)
        self._overlapped = compiled.segmented.overlapped
        self._loops = self._overlapped.loops
        self._by_tensor: dict[int, list[Reshard]] | None = None
        self._search: MeshCosts | None = None

    def lines(self, tensor: int, replanned: bool = True) -> Iterator[str]:
        """Everything there is to say about one tensor; `replanned`: also what takes a plan of its own."""
        made = self.graph.tensors[tensor]
        if tensor not in self.compiled.sharded.shardings:
            yield f"{made.label}: {made.type} at {quoted(made.line)}: no output needs it, so it is not computed"
            return
        sharding = self.compiled.sharded.shardings[tensor]
        yield f"{made.label}: {made.type}, sharded {sharding} on {sharding.mesh}"
        yield f"  {self._maker(tensor)} at {quoted(made.line)}"
        yield from self._promoted(tensor)
        if tensor in self.graph.carried:
            dim, _, order = self.graph.carried[tensor]
            yield f"  its dim {dim} is in zig-zag order, in {len(order)} chunks"
        yield from (f"  {line}" for line in self._why(tensor))
        yield from (f"  {line}" for line in (self._stationary(tensor) if replanned else ()))
        yield from (f"  {line}" for line in self._alternative(tensor))
        yield from (f"  {line}" for line in self._meshes(tensor))
        yield from (f"  {line}" for line in self._chunks(tensor))
        yield "communication for it:"
        yield from (f"  {line}" for line in self._moves(tensor))

    def _promoted(self, tensor: int) -> Iterator[str]:
        """That nvFuser's promotion makes it Float of half precision."""
        node = self.provenance.producer(tensor)
        narrow = widened_from(node.call) if node is not None else None
        if node is not None and narrow is not None:
            yield (f"  Float by nvFuser's promotion: {node.name} of {narrow.name} is not rounded; "
                   'FusionDefinition(promotion="torch") rounds it')  # fmt: skip

    def in_short(self, tensor: int) -> str:
        """Why a tensor is sharded as it is, in a cell of a table."""
        if tensor in self.graph.annotations:
            return self.graph.implied.get(tensor) or f"annotated at {self.graph.annotation_lines[tensor]}"
        if self.provenance.producer(tensor) is None:
            return "never annotated: replicated"
        origins = self.provenance.origins(tensor)
        return ", ".join(map(self._short_origin, origins)) or "whole: nothing splits it"

    def _short_origin(self, origin: Origin) -> str:
        if origin.way is None:
            return f"{origin.split}: cheapest"
        direction = "for" if origin.backward else "from"
        return f"{origin.split} {direction} {self._label(origin.way.end)}"

    def _label(self, tensor: int) -> str:
        return self.graph.tensors[tensor].label

    def _maker(self, tensor: int) -> str:
        node = self.provenance.producer(tensor)
        if node is None:
            return "an input, defined"
        return f"made by {node.name}({', '.join(map(self._label, node.inputs))})"

    # why

    def _why(self, tensor: int) -> Iterator[str]:
        if tensor in self.graph.annotations:
            yield self.graph.implied.get(tensor) or f"annotated so at {quoted(self.graph.annotation_lines[tensor])}"
            made = self.provenance.made_as(tensor)
            if made != self.compiled.sharded.shardings[tensor]:
                yield f"its op makes it as {made}, because:"
        elif self.provenance.producer(tensor) is None:
            yield "never annotated: an input without an annotation is replicated, whole on every rank"
        if self.provenance.producer(tensor) is None:
            return
        origins = self.provenance.origins(tensor)
        yield from map(self._origin, origins)
        if not origins:
            yield self._whole(tensor)

    def _whole(self, tensor: int) -> str:
        node, shardings = self.provenance.producer(tensor), self.compiled.sharded.shardings
        split = [i for i in node.inputs if shardings[i].splits] if node is not None else []
        if split:
            return f"computed whole: no split of {', '.join(map(self._label, dict.fromkeys(split)))} is left in it"
        return "computed whole: neither an operand nor an annotation splits it over an axis"

    def _origin(self, origin: Origin) -> str:
        what = f"{origin.split} on dim {origin.dim}" if origin.dim is not None else f"unreduced over {origin.split}"
        if origin.way is None:
            return f"{what}: no annotation asks for it; it was the cheapest"
        end = origin.way.end
        reason = f", {annotated_where(self.graph, end)}" if origin.annotated else ", where it was cheapest"
        through = self._through(origin.chain[:-1])
        if origin.backward:
            return f"{what}: wanted by {self._label(end)}{through}{reason}"
        reduced = "a dim summed over is split in" if origin.dim is None else "follows"
        return f"{what}: {reduced} {self._label(end)}{through}{reason}"

    def _through(self, chain: Sequence[int]) -> str:
        if not chain:
            return ""
        named = list(map(self._label, chain[-_SHOWN + 1 :] if len(chain) > _SHOWN else chain))[::-1]
        if len(chain) > _SHOWN:
            named += [f"... {len(chain) - _SHOWN} more ...", self._label(chain[0])]
        return f" through {', '.join(named)}"

    def _stationary(self, tensor: int) -> Iterator[str]:
        """For a split input: whether it stays where it is, and what a step takes if it must, or need not."""
        graph, seconds = self.graph, self.compiled.planned.seconds
        if tensor not in graph.input_tensors or tensor not in graph.annotations:
            return
        axes = tuple(dict.fromkeys([split.axis or "" for split in graph.annotations[tensor].splits if split.bound]))
        along = graph.stationary.get(tensor, ())
        if along:
            other = Alternatives(self.compiled).with_stationary(tensor, ()).seconds
            kept = f"stationary along {', '.join(along)}"
            yield f"{kept}: a step takes {duration(seconds)}; if it may move, {duration(other)}"
        elif axes and self._is_moved(tensor):
            with contextlib.suppress(DefinitionError):
                other = Alternatives(self.compiled).with_stationary(tensor, axes).seconds
                yield f"moved: a step takes {duration(seconds)}; if it is stationary, {duration(other)}"

    def _is_moved(self, tensor: int) -> bool:
        resharded = self.compiled.resharded
        return any(resharded.values[reshard.source].tensor == tensor for reshard in resharded.collectives)

    def _alternative(self, tensor: int) -> Iterator[str]:
        node = self.provenance.producer(tensor)
        if node is None:
            return
        choice = self.compiled.sharded.choices[node.id]
        cost = f"{duration(choice.seconds)} modelled, what happens to its result not counted"
        yield f"{node.name} is computed {self._source(node, choice.source)}: {cost}"
        other = choice.runner_up
        if other is None:
            yield self._no_other()
            return
        verdict = _verdict(choice.seconds, other.seconds)
        yield f"the alternative, {self._other(node, choice, other)}: {duration(other.seconds)} modelled{verdict}"

    def _other(self, node: Node, choice: Choice, other: RunnerUp) -> str:
        """What the runner-up follows; where that is what the op follows, too, also in what it differs."""
        source = self._source(node, other.source)
        same = source == self._source(node, choice.source)
        return f"{source}, {self._unlike(node, choice, other)}" if same else source

    def _unlike(self, node: Node, choice: Choice, other: RunnerUp) -> str:
        pairs = [
            *zip(node.outputs, choice.placement.results, other.results, strict=True),
            *zip(node.inputs, choice.placement.operands, other.operands, strict=True),
        ]
        unlike = [f"{self._label(tensor)} as {theirs}" for tensor, mine, theirs in pairs if theirs != mine]
        return f"with {', '.join(dict.fromkeys(unlike))}" if unlike else "in another order"

    def _meshes(self, tensor: int) -> Iterator[str]:
        """Why its op runs on its mesh, where it could have run on others."""
        node = self.provenance.producer(tensor)
        if node is None or any(i in self.graph.annotations for i in node.outputs):
            return
        if self._search is None:
            self._search = _meshes_of(self.compiled.sharded)
        search = self._search
        here = search.nodes[node.id]
        for other in search.others(node):
            sent, otherwise = (duration(search.sent(node, mesh)) for mesh in (here, other))
            yield f"it runs on {here}: sending between meshes takes {sent} for it; on {other} it would take {otherwise}"

    def _no_other(self) -> str:
        near = self.compiled.taken_from
        return "there was no other way to compute it" if near is None else f"taken over from {_plan_of(near)}"

    def _source(self, node: Node, source: Source) -> str:
        if source.kind == "operand":
            return f"following {self._label(node.inputs[source.place])}"
        if source.kind == "result":
            return f"as {self._label(node.outputs[source.place])} is wanted"
        if source.kind == "carry":
            return f"on the unreduced terms of {self._label(node.inputs[source.place])}"
        if source.kind == "pieces":
            return f"by moving the pieces of {self._label(node.inputs[0])} that ranks lack"
        assert source.kind == "whole", source
        return "whole on every rank"

    # chunks

    def _chunks(self, tensor: int) -> Iterator[str]:
        """Whether its op works in chunks, and why not where the user wants that."""
        for loop in self._loops:
            if tensor in loop.cuts and any(tensor in self.graph.nodes[c.node].outputs for c in loop.computes):
                how = ", in a ring" if loop.ring else ""
                origin = f"asked for at {quoted(loop.stream.line)}"
                yield f"made in {loop.chunks} chunks of {loop.cuts[tensor]}{how}, {origin}"
        if tensor in self._overlapped.refused:
            yield f"{self._overlapped.refused[tensor]} (asked for at {quoted(self.graph.streams[tensor].line)})"

    # communication

    def _moves(self, tensor: int) -> Iterator[str]:
        found = self._reshards_of().get(tensor, [])
        if not found:
            yield "none: every reader takes it as it is"
        for statement in found:
            moved = f"{statement.step.src} -> {statement.step.dst}"
            origin = f"asked for by {self._asker(statement.why)} at {quoted(statement.line)}"
            if statement.step.kind is StepKind.SLICE:
                yield f"each rank takes its part, no bytes: {moved}, {origin}"
            else:
                count = number(wire_bytes(self.graph, tensor, statement.step))
                took = duration(self.compiled.resharded.seconds(statement))
                yield f"{_collective(statement)}, {count} bytes per rank, {took}: {moved}, {origin}"
                yield from self._needed(statement)

    def _reshards_of(self) -> dict[int, list[Reshard]]:
        """By tensor, all of its moves in order."""
        if self._by_tensor is None:
            self._by_tensor = {}
            for statement in self.compiled.resharded.statements:
                if isinstance(statement, Reshard):
                    tensor = self.compiled.resharded.values[statement.source].tensor
                    self._by_tensor.setdefault(tensor, []).append(statement)
        return self._by_tensor

    def _needed(self, reshard: Reshard) -> Iterator[str]:
        """The annotations of other tensors that a collective is for."""
        tensor = self.compiled.resharded.values[reshard.source].tensor
        for other in self.causes.of(reshard).needed:
            if other != tensor:
                yield f"  for {self._label(other)}, {annotated_where(self.graph, other)}"

    def _asker(self, why: str) -> str:
        return re.sub(r"\bt(\d+)\b", lambda found: self._label(int(found.group(1))), why)


def _meshes_of(sharded: ShardedDefinition) -> MeshCosts:
    """What each op's mesh has sent between meshes, as the plan has placed the ops."""
    graph, shardings = sharded.graph, sharded.shardings
    placed = {i: sharding.mesh for i, sharding in graph.annotations.items()}
    nodes = {node.id: shardings[node.outputs[0]].mesh for node in graph.nodes}
    made = {i: shardings[i].mesh for node in graph.nodes for i in node.outputs}
    return MeshCosts(graph, placed, next(iter(nodes.values())), nodes, {**placed, **made}, users(graph.nodes))


def _collective(reshard: Reshard) -> str:
    over = f" over {', '.join(map(str, reshard.step.axes))}" if reshard.step.axes else ""
    return f"{reshard.step.kind.value}{over}"


def _verdict(taken: float, other: float) -> str:
    if other < taken:
        return ", cheaper here but dearer for the ops after it"
    if duration(other) == duration(taken):
        return ", as long: the first of equals was taken"
    return f" ({figures(other / taken)} times)" if taken > 0 else ""
