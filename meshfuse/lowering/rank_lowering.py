"""Lowers a program for one rank: kernels, its part in every collective, frees of buffers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from ..errors import SourceLine
from ..graph import Graph
from ..kernels.tensors import ROWS
from ..ops import OPS
from ..ops.opdef import OpDef
from ..ops.rules import FactorKind, Rule
from ..ops.values import ScalarRef
from ..placement.roofline import Roofline, Stored, stored_by, stored_tensors
from ..reshard.steps import Step, wire_elements
from ..resharding import Compute, Reshard, Value
from ..sharding import layout as lay
from .bucketed_calls import buckets, lower_bucket
from .collectives import ReshardContext, lower_reshard
from .durations import CostModel
from .exchanges import ExchangeContext, lower_exchange
from .fusable_copies import fusable_copies, fusible_parts
from .fuse_copies import fuse_copies
from .instructions import (
    Communication,
    Instruction,
    Kernel,
    Launch,
    View,
)
from .kernel_text import dying, functions, origin, scalar_params, scalar_text
from .loops import lower_loop
from .op_text import OpText
from .overlapped import ChunkLoop
from .schedule import schedule, with_frees
from .segments import Segment, SegmentedDefinition


class RankProgram(NamedTuple):
    """What one rank runs: the names of its parameters, its instructions, and the names that it returns."""

    params: tuple[str, ...]
    instructions: tuple[Instruction, ...]
    outputs: tuple[str | None, ...]


class RankLowering:
    """Lowers a program for one rank; the state that its parts share.

    names: the name of each value. An input that is several values has the name of the first.
    readers: how many statements and outputs read each value.
    fresh: the values that have memory of their own, which a single reader may overwrite.
    fusible: by kernel, the values whose packing and unpacking the kernel may do itself.
    """

    def __init__(self, segmented: SegmentedDefinition, rank: int):
        self.segmented, self.rank = segmented, rank
        # Used at every op, so looked up once.
        self.graph: Graph = segmented.resharded.graph
        self.values: Sequence[Value] = segmented.resharded.values
        self.instructions: list[Instruction] = []
        self.names = [f"v{v}" for v in range(len(self.values))]
        self._taken: set[str] = set()
        self.readers = _reader_counts(segmented)
        self.fresh = _fresh_values(segmented)
        self.fusible = fusible_parts(segmented)
        self._fusable = fusable_copies(segmented, self.fusible)
        self._texts = OpText(rank, self.scalar_text)
        self._stored = stored_tensors(self.graph)
        self._costs: dict[tuple[int, int, Stored], tuple[float, float]] = {}
        self._step_texts: dict[Step, tuple[str, str, str]] = {}

    def run(self, in_flight: int) -> RankProgram:
        """The whole program, scheduled and with frees."""
        self._name_inputs()
        self._take_rows()
        for part in buckets(self.segmented.resharded, self.segmented.parts):
            if isinstance(part, Segment):
                self._launch(part)
            elif isinstance(part, ChunkLoop):
                self.instructions.extend(lower_loop(self, part))
            else:
                self._communicate(part)
        resharded = self.segmented.resharded
        here = [v if self.rank in self.values[v].sharding.mesh else None for v in resharded.outputs]
        outputs = tuple([None if v is None else self._returned(v) for v in here])
        model = CostModel.of(dict.fromkeys(v.sharding.mesh for v in self.values))
        kept = {*filter(None, outputs)}
        ordered = schedule(self.instructions, model, in_flight, waits=bool(resharded.graph.units))
        body = fuse_copies(ordered, self.fusible, kept, in_flight)
        body = with_frees(body, keep=kept)
        return RankProgram(self._params(), tuple(body), outputs)

    def _name_inputs(self) -> None:
        """An input that is replicated on several meshes has a value on each; they get one name."""
        first: dict[int, str] = {}
        for v in self.segmented.resharded.inputs:
            self.names[v] = first.setdefault(self.values[v].tensor, self.names[v])

    def _take_rows(self) -> None:
        """Take the rows out of what stands for a ragged tensor outside of programs."""
        resharded = self.segmented.resharded
        for v in resharded.inputs:
            if resharded.type_of(v).rows and self.rank in self.values[v].sharding.mesh:
                taken = f"{self.names[v]}_rows"
                self.instructions.append(View(taken, self.names[v], f".{ROWS}"))
                self.names[v] = taken

    def _returned(self, value: int) -> str:
        """The name under which an output is returned."""
        ttype, name = self.segmented.resharded.type_of(value), self.name(value)
        if not ttype.rows:
            return name
        shape = self.values[value].sharding.local_shape(ttype.shape, self.rank)
        made = f"v{value}_whole"
        kernel = Kernel(f"stand_in_{value}", (name,), (f"{made} = K.stand_in({name}, {shape})",), (made,))
        self.instructions.append(Launch(kernel, (name,), (made,)))
        return made

    def name(self, value: int) -> str:
        return self.names[value]

    def _params(self) -> tuple[str, ...]:
        graph = self.graph
        values = iter(self.segmented.resharded.inputs)
        return tuple(f"s{ref.id}" if isinstance(ref, ScalarRef) else f"v{next(values)}" for ref in graph.inputs)

    # kernels --------------------------------------------------------------------------------------------------

    def _launch(self, part: Segment) -> None:
        if self.rank not in part.computes[0].placement.results[0].mesh:
            return
        if part.is_exchange:
            self._exchange(part)
            return
        lines, origins = self._kernel_lines(part)
        inputs = tuple(dict.fromkeys(map(self.name, part.inputs)))
        outputs = tuple(f"v{v}" for v in part.outputs)
        params = (*inputs, *scalar_params(self.graph, part.computes, lines))
        work = tuple(map(self.cost, part.computes))
        called = functions(self.graph, part.computes)
        kernel = Kernel(part.name, params, tuple(lines), outputs, called, work, origins=tuple(origins))
        self.instructions.append(Launch(kernel, params, outputs))

    def _exchange(self, part: Segment) -> None:
        (compute,) = part.computes
        node = self.graph.nodes[compute.node]
        operands, results = (tuple(map(self.name, values)) for values in (compute.inputs, compute.outputs))
        label = self.graph.tensors[node.outputs[0]].label
        self.instructions += lower_exchange(
            ExchangeContext(self.rank, node, compute.placement, operands, results, label, part.name)
        )

    def cost(self, compute: Compute) -> tuple[float, float]:
        """Operations of an op on one rank, and the bytes of memory that it reads and writes, as they are planned."""
        node = self.graph.nodes[compute.node]
        key = (id(node.call), id(compute.placement), stored := stored_by(node, self._stored))
        if key not in self._costs:
            self._costs[key] = Roofline(node.call, stored).work(compute.placement)
        return self._costs[key]

    def _kernel_lines(self, part: Segment) -> tuple[list[str], list[tuple[str, SourceLine]]]:
        """The lines of the ops, which drop dead values; and for each line the op and the user's line."""
        dead = dying(part)
        lines: list[str] = []
        origins: list[tuple[str, SourceLine]] = []
        for place, compute in enumerate(part.computes):
            node, names = self.graph.nodes[compute.node], self.names
            operands, results = [names[v] for v in compute.inputs], [names[v] for v in compute.outputs]
            made, in_new_memory = self._texts.statements(node, compute.placement, operands, results)
            lines += made
            if in_new_memory:
                self.fresh.add(compute.outputs[-1])
            if dead[place] and place + 1 < len(part.computes):
                lines.append(f"del {', '.join(dead[place])}")
            origins += [origin(node)] * (len(lines) - len(origins))
        return lines, origins

    def scalar_text(self, value: Any) -> str:
        """Python text of a scalar argument."""
        return scalar_text(self.graph, value)

    # reshards -------------------------------------------------------------------------------------------------

    def _communicate(self, statements: Sequence[Reshard]) -> None:
        """Lower reshards that stand together; several may become one call."""
        mine = [s for s in statements if self.rank in s.step.src.mesh or self.rank in s.step.dst.mesh]
        contexts = [self.reshard_context(s, self.name(s.source), f"v{s.target}", self.is_fresh(s.source)) for s in mine]
        if len(contexts) > 1 and len(contexts[0].group) > 1:
            self.instructions += lower_bucket(contexts)
        else:
            self.instructions += [made for c in contexts for made in lower_reshard(c)]

    def reshard_context(self, reshard: Reshard, source: str, target: str, fresh: bool) -> ReshardContext:
        """A reshard on this rank, from one buffer to a new one, by their names."""
        tensor = self.graph.tensors[self.values[reshard.source].tensor]
        kind, axes, text = self._step_text(reshard.step)
        wire = self.wire(reshard.step, reshard.source)
        about = Communication(kind, axes, tensor.label, wire, reshard.why, reshard.line, text)
        work, is_fusable = f"w{reshard.target}", reshard.target in self._fusable
        return ReshardContext(self.rank, reshard.step, tensor.type, source, target, about, fresh, work, is_fusable)

    def _step_text(self, step: Step) -> tuple[str, str, str]:
        """Kind, axes and text of a step; computed once for equal steps."""
        found = self._step_texts.get(step)
        if found is None:
            found = self._step_texts[step] = (step.kind.value, ",".join(map(str, step.axes)), str(step))
        return found

    def wire(self, step: Step, source: int) -> float:
        """The bytes that this rank sends in a step of a value."""
        ttype = self.segmented.resharded.type_of(source)
        return wire_elements(step, ttype.shape, self.rank) * ttype.dtype.itemsize

    def is_fresh(self, value: int) -> bool:
        """Whether a value has memory of its own and one reader, which may overwrite it."""
        return value in self.fresh and self.readers[value] == 1

    def new_name(self, name: str, loop: int) -> str:
        """The name, with the loop's number added if it is taken."""
        found = name if name not in self._taken else f"{name}_{loop}"
        self._taken.add(found)
        return found

    def is_read_outside(self, loop: ChunkLoop, value: int) -> bool:
        """Whether anything outside of the loop reads a value."""
        inside = sum(statement.inputs.count(value) for statement in loop.statements)
        return self.readers.get(value, 0) > inside


def _reader_counts(segmented: SegmentedDefinition) -> dict[int, int]:
    """By value, how many ops, reshards and outputs read it."""
    counts: dict[int, int] = dict.fromkeys(segmented.resharded.outputs, 1)
    for statement in segmented.resharded.statements:
        for v in statement.inputs:
            counts[v] = counts.get(v, 0) + 1
    return counts


def _fresh_values(segmented: SegmentedDefinition) -> set[int]:
    """The values that surely have memory of their own: results of ops that sum."""
    nodes, found = segmented.resharded.graph.nodes, set[int]()
    known: dict[tuple[int, int], bool] = {}  # Equal calls and placements are the same objects.
    for part in segmented.parts:
        for compute in () if isinstance(part, Reshard) else part.computes:
            node = nodes[compute.node]
            key = (id(node.call), id(compute.placement))
            if key not in known:
                known[key] = sums_in_new_memory(node.call.op, node.rule, compute.placement.layouts)
            if known[key]:
                found.update(compute.outputs)
    return found


def sums_in_new_memory(op: OpDef, rule: Rule, layouts: Sequence[lay.Layout]) -> bool:
    """Whether an op sums over sharded dims, so that its results share no memory with its operands.

    Excluded are `select`, which sums, but returns a view on the rank that has the index, and users' functions, which
    may return their argument.
    """
    if op.is_view or OPS.get(op.name) is not op:
        return False
    pairs = zip(rule.factors, layouts, strict=True)
    return any(factor.kind is FactorKind.REDUCE and bool(lay.axes(layout)) for factor, layout in pairs)
