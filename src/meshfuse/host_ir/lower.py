"""From segments and moves to the program of one rank."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..errors import SourceLine
from ..graph import Graph
from ..moves.move import Move, wire_elements
from ..ops import OPS
from ..ops.base import FactorKind, OpDef, Rule, ScalarRef
from ..resharding.early import local_cost
from ..resharding.resharded import Compute, Set, Value
from ..segmentation import Segment, SegmentedDefinition
from ..sharding import layout as lay
from ..streams.overlap import ChunkLoop
from .absorb import absorbed
from .bucket import buckets, lower_bucket
from .communicate import MoveContext, lower_move
from .cost import CostModel
from .fusing import fusible_parts, spared
from .instructions import Communication, Instruction, Kernel, Launch
from .kernel_text import dying, functions, origin, scalar_params, scalar_text
from .liveness import with_frees
from .loops import lower_loop
from .op_text import OpText
from .program import HostProgram
from .schedule import IN_FLIGHT, schedule


def lower_to_host_ir(segmented: SegmentedDefinition, rank: int, digest: str, in_flight: int = IN_FLIGHT) -> HostProgram:
    """The program of a rank: its kernels, its part in every collective, and the frees of its buffers.

    `in_flight` is the most bytes of communications that are issued before they are needed.
    """
    return RankLowering(segmented, rank, digest).run(in_flight)


class RankLowering:
    """What the instructions of all parts of a program are made from.

    By value: `names` (for an input that is several values, that of the first one), `readers`, the number of steps and
    outputs that read it, and `fresh`: it is in memory of its own, so that an only reader may write there. `fusible`
    tells beside which values each segment's kernel may do the copies.
    """

    def __init__(self, segmented: SegmentedDefinition, rank: int, digest: str):
        self.segmented, self.rank, self.digest = segmented, rank, digest
        # Asked for at every op: looked up once.
        self.graph: Graph = segmented.resharded.graph
        self.values: Sequence[Value] = segmented.resharded.values
        self.instructions: list[Instruction] = []
        self.names = [f"v{v}" for v in range(len(self.values))]
        self._taken: set[str] = set()
        self.readers = _reader_counts(segmented)
        self.fresh = _fresh_values(segmented)
        self.fusible = fusible_parts(segmented)
        self._spared = spared(segmented, self.fusible)
        self._texts = OpText(rank, self.scalar_text)
        self._costs: dict[tuple[int, int], tuple[float, float]] = {}
        self._move_texts: dict[Move, tuple[str, str, str]] = {}

    def run(self, in_flight: int) -> HostProgram:
        """The whole program, scheduled and with frees."""
        self._name_inputs()
        for part in buckets(self.segmented.resharded, self.segmented.parts):
            if isinstance(part, Segment):
                self._launch(part)
            elif isinstance(part, ChunkLoop):
                self.instructions.extend(lower_loop(self, part))
            else:
                self._communicate(part)
        resharded = self.segmented.resharded
        outputs = tuple(self.name(v) if self.rank in self.values[v].sharding.mesh else None for v in resharded.outputs)
        model = CostModel.of(dict.fromkeys(v.sharding.mesh for v in self.values))
        kept = {*filter(None, outputs)}
        body = absorbed(schedule(self.instructions, model, in_flight), self.fusible, kept, in_flight)
        body = with_frees(body, keep=kept)
        return HostProgram(self.rank, self._params(), tuple(body), outputs, self.digest)

    def _name_inputs(self) -> None:
        """Give an input that is whole on several meshes, a value on each, one name."""
        first: dict[int, str] = {}
        for v in self.segmented.resharded.inputs:
            self.names[v] = first.setdefault(self.values[v].tensor, self.names[v])

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
        lines, origins = self._kernel_lines(part)
        inputs = tuple(dict.fromkeys(map(self.name, part.inputs)))
        outputs = tuple(f"v{v}" for v in part.outputs)
        params = (*inputs, *scalar_params(self.graph, part.computes, lines))
        work = tuple(map(self.cost, part.computes))
        called = functions(self.graph, part.computes)
        kernel = Kernel(part.name, params, tuple(lines), outputs, called, work, origins=tuple(origins))
        self.instructions.append(Launch(kernel, params, outputs))

    def cost(self, compute: Compute) -> tuple[float, float]:
        """(operations, bytes read and written at least) of an op on one rank."""
        call = self.graph.nodes[compute.node].call
        key = (id(call), id(compute.placement))
        if key not in self._costs:
            self._costs[key] = local_cost(call, compute.placement)
        return self._costs[key]

    def _kernel_lines(self, part: Segment) -> tuple[list[str], list[tuple[str, SourceLine]]]:
        """(the ops' lines, with values dropped after their last use; for each line the op and the user's line)."""
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

    # moves ----------------------------------------------------------------------------------------------------

    def _communicate(self, steps: Sequence[Set]) -> None:
        """Lower moves; several at once may be one call."""
        mine = [s for s in steps if self.rank in s.move.src.mesh or self.rank in s.move.dst.mesh]
        moves = [self.move_context(s, self.name(s.source), f"v{s.target}", self.is_fresh(s.source)) for s in mine]
        if len(moves) > 1 and len(moves[0].group) > 1:
            self.instructions += lower_bucket(moves)
        else:
            self.instructions += [made for c in moves for made in lower_move(c)]

    def move_context(self, step: Set, source: str, target: str, fresh: bool) -> MoveContext:
        """A move on this rank, from a buffer to a new one of these names."""
        tensor = self.graph.tensors[self.values[step.source].tensor]
        kind, axes, text = self._move_text(step.move)
        wire = self.wire(step.move, step.source)
        about = Communication(kind, axes, tensor.label, wire, step.why, step.line, text)
        work, is_spared = f"w{step.target}", step.target in self._spared
        return MoveContext(self.rank, step.move, tensor.type, source, target, about, fresh, work, is_spared)

    def _move_text(self, move: Move) -> tuple[str, str, str]:
        """(kind, axes, text) of a move; worked out once for equal moves."""
        found = self._move_texts.get(move)
        if found is None:
            found = self._move_texts[move] = (move.kind.value, ",".join(map(str, move.axes)), str(move))
        return found

    def wire(self, move: Move, source: int) -> float:
        """The bytes that this rank sends in a move of a value."""
        kind = self.segmented.resharded.type_of(source)
        return wire_elements(move, kind.shape, self.rank) * kind.dtype.itemsize

    def is_fresh(self, value: int) -> bool:
        """Whether a value is in memory that only one reader sees, which may write there."""
        return value in self.fresh and self.readers[value] == 1

    def new_name(self, name: str, loop: int) -> str:
        """The name, with the loop's number added if another loop has it already."""
        found = name if name not in self._taken else f"{name}_{loop}"
        self._taken.add(found)
        return found

    def is_read_outside(self, loop: ChunkLoop, value: int) -> bool:
        """Whether a value is read by more than the loop's own steps."""
        inside = sum(step.inputs.count(value) for step in loop.steps)
        return self.readers.get(value, 0) > inside


def _reader_counts(segmented: SegmentedDefinition) -> dict[int, int]:
    """By value how many ops, moves and outputs read it."""
    counts: dict[int, int] = dict.fromkeys(segmented.resharded.outputs, 1)
    for step in segmented.resharded.steps:
        for v in step.inputs:
            counts[v] = counts.get(v, 0) + 1
    return counts


def _fresh_values(segmented: SegmentedDefinition) -> set[int]:
    """The values that are surely in memory of their own: results of ops that sum."""
    nodes, found = segmented.resharded.graph.nodes, set[int]()
    known: dict[tuple[int, int], bool] = {}  # of equal calls in equal placements, which are the same objects
    for part in segmented.parts:
        for compute in () if isinstance(part, Set) else part.computes:
            node = nodes[compute.node]
            key = (id(node.call), id(compute.placement))
            if key not in known:
                known[key] = sums_in_new_memory(node.call.op, node.rule, compute.placement.layouts)
            if known[key]:
                found.update(compute.outputs)
    return found


def sums_in_new_memory(op: OpDef, rule: Rule, layouts: Sequence[lay.Layout]) -> bool:
    """Whether an op sums over what is sharded, and so makes results that share no memory with its operands.

    `select` sums, too, but a rank that has the index views it. What a user's function returns is not known: it may be
    its argument where there is one term.
    """
    if op.is_view or OPS.get(op.name) is not op:
        return False
    pairs = zip(rule.factors, layouts, strict=True)
    return any(factor.kind is FactorKind.REDUCE and bool(lay.axes(layout)) for factor, layout in pairs)
