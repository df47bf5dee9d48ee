"""The program of one rank, and its lowering from segments and reshards."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from .errors import SourceLine, file_name
from .graph import Graph
from .html_text import html_lines
from .kernels.tensors import ROWS
from .lowering.bucketed_calls import buckets, lower_bucket
from .lowering.buffer_checker import BufferChecker
from .lowering.collectives import ReshardContext, lower_reshard
from .lowering.durations import CostModel
from .lowering.effects import Effects, effects, mentioned
from .lowering.exchanges import ExchangeContext, lower_exchange
from .lowering.fusable_copies import fusable_copies, fusible_parts
from .lowering.fuse_copies import fuse_copies
from .lowering.instructions import (
    CallKey,
    Collective,
    Communication,
    CommunicationCall,
    Free,
    Instruction,
    Kernel,
    Launch,
    SendRecv,
    View,
    Wait,
    call_channel,
    group_name,
)
from .lowering.kernel_text import dying, functions, origin, scalar_params, scalar_text
from .lowering.loops import lower_loop
from .lowering.op_text import OpText
from .lowering.overlapped import ChunkLoop
from .lowering.schedule import IN_FLIGHT, schedule, with_frees
from .lowering.segments import Segment, SegmentedDefinition
from .ops import OPS
from .ops.opdef import OpDef
from .ops.rules import FactorKind, Rule
from .ops.values import ScalarRef
from .placement.roofline import local_cost
from .reshard.steps import Step, wire_elements
from .resharding import Compute, Reshard, Value
from .sharding import layout as lay


@dataclass(frozen=True, slots=True)
class HostProgram:
    """The program of one rank.

    `params` are the names of the inputs, `outputs` the names that are returned (None where this rank holds no part of
    an output). `digest` identifies the definition and its shapes, and is equal on all ranks. `notes` are pairs of a
    kernel's name and a comment on what computes it and why.
    """

    rank: int
    params: tuple[str, ...]
    instructions: tuple[Instruction, ...]
    outputs: tuple[str | None, ...]
    digest: str
    notes: tuple[tuple[str, str], ...] = field(default=(), compare=False, repr=False)

    @property
    def kernels(self) -> tuple[Kernel, ...]:
        """Every kernel once, in the order of the first launches."""
        return tuple(dict.fromkeys(i.kernel for i in self.instructions if isinstance(i, Launch)))

    @property
    def functions(self) -> Mapping[str, Callable[..., Any]]:
        """The functions of registered ops that the kernels call as OP.name."""
        return {name: function for kernel in self.kernels for name, function in kernel.functions}

    @property
    def communications(self) -> tuple[Communication, ...]:
        """The communications of this rank in order; a call that does several counts as several."""
        calls = [i.about for i in self.instructions if isinstance(i, CommunicationCall)]
        return tuple(part for about in calls for part in about.parts or (about,))

    @property
    def groups(self) -> tuple[tuple[int, ...], ...]:
        """The groups that the program communicates in, in the order of their first use."""
        return tuple(dict.fromkeys(i.group for i in self.instructions if isinstance(i, CommunicationCall)))

    def source(self, simulated: bool = False) -> str:
        """The program as a Python function `main`; with `simulated`, a generator that yields instead of waiting."""
        return "\n".join(self.lines(simulated)[0])

    def lines(self, simulated: bool = False) -> tuple[list[str], Mapping[int, Instruction]]:
        """The lines of `source`, and the instruction of each line by its number, counted from 1."""
        out: list[str] = []
        where: dict[int, Instruction] = {}
        for kernel in self.kernels:
            out += [*kernel.source(), ""]
        out.append(f"def main({', '.join([*self.params, 'seed=0', 'offset=0'])}):")
        for instruction in self.instructions:
            out.append("    " + _text(instruction, simulated))
            where[len(out)] = instruction
        out.append(f"    return ({''.join(f'{name}, ' for name in self.outputs)})")
        if simulated and not any(isinstance(i, Wait) for i in self.instructions):
            out.append("    yield")
        return out, where

    def __str__(self) -> str:
        out = [f"# rank {self.rank}", "import torch", "import torch.nn.functional as F", "import meshfuse.kernels as K"]
        out.append("M = meshfuse.runtime.buffers.device_memory(device)")
        for group in self.groups:
            out.append(f"{group_name(group)} = world.group({group})")
        out += [f"# OP.{name}: {_where(function)}" for name, function in self.functions.items()]
        out.append("")
        lines, where = self.lines()
        known = dict(self.notes)
        notes = {kernel.head: f"  # {known[kernel.name]}" for kernel in self.kernels if kernel.name in known}
        for number, line in enumerate(lines, 1):
            out.append(line + (notes.get(line) or _comment(where.get(number))))
        return "\n".join(out)

    def _repr_html_(self) -> str:
        many = f"{len(self.instructions)} instructions, {len(self.communications)} communications"
        return html_lines(str(self), f"rank {self.rank}: {many}")


def _text(instruction: Instruction, simulated: bool) -> str:
    if simulated and isinstance(instruction, Wait):
        return f"yield {instruction.work}"
    return instruction.source()


def _comment(instruction: Instruction | None) -> str:
    if isinstance(instruction, (Launch, View)) and instruction.note:
        return f"  # {instruction.note}"
    if not isinstance(instruction, CommunicationCall):
        return ""
    about = instruction.about
    return f"  # {about.tensor}: {about.step}; {about.wire:.0f} bytes; {about.why} {about.line}"


def _where(function: Callable[..., Any]) -> str:
    """File and line of a registered op's function."""
    code = getattr(function, "__code__", None)
    return f"{file_name(code.co_filename)}:{code.co_firstlineno}" if code else repr(function)


def digest_of(text: str) -> str:
    """A short hash of a text."""
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def verify(program: HostProgram) -> None:
    """Check one program: names exist when they are used and are freed once, and memory is written before it is read.

    Each communication is waited for exactly once, before its result is read and before its operands are written or
    freed (`buffer_checker.BufferChecker`). Raises AssertionError.
    """
    for _ in checked(program):
        pass


def checked(program: HostProgram) -> Iterator[Instruction | None]:
    """`verify`, instruction by instruction: each is given before it is checked, and None before the end is."""
    tensors = [name for name in program.params if name.startswith("v")]
    alive, book = set(tensors), BufferChecker(tensors)
    for instruction in program.instructions:
        yield instruction
        if isinstance(instruction, Free):
            assert alive.issuperset(instruction.names), f"freed twice: {instruction}"
            book.free(instruction.names)
            alive.difference_update(instruction.names)
        elif isinstance(instruction, Wait):
            book.finish(instruction.work)
        else:
            found = effects(instruction)
            _verify_names(instruction, found, alive)
            book.step(instruction, found)
    yield None
    _verify_end(program, alive, book)


def _verify_end(program: HostProgram, alive: set[str], book: BufferChecker) -> None:
    outputs = set(filter(None, program.outputs))
    assert not book.in_flight, f"never waited for: {book.in_flight}"
    assert alive.issuperset(outputs), f"returned, and not there: {sorted(outputs - alive)}"
    book.read_all(outputs)
    left = (alive & mentioned(program.instructions)).difference(outputs)
    assert not left, f"never freed: {sorted(left)}"


def _verify_names(instruction: Instruction, found: Effects, alive: set[str]) -> None:
    needed = {*found.reads, *found.writes, *([found.shares] if found.shares else [])}
    assert alive.issuperset(needed), f"reads what is not there: {instruction}"
    assert alive.isdisjoint(found.makes), f"made twice: {instruction}"
    alive.update(found.makes)


def verify_together(programs: Sequence[HostProgram]) -> None:
    """Check that all ranks agree on the order of their communications, within every group and across groups.

    The ranks of a group issue the same collectives in the same order, with equal sizes. Every message is received.
    There is no deadlock, even if every communication waits for all ranks that take part.
    """
    orders: dict[tuple[int, ...], tuple[int, list[tuple[object, ...]]]] = {}
    sent: dict[tuple[int, int], list[tuple[int, str]]] = {}
    received: dict[tuple[int, int], list[tuple[int, str]]] = {}
    assert len({p.digest for p in programs}) == 1
    for program in programs:
        for group, order in _collective_orders(program).items():
            first = orders.setdefault(group, (program.rank, order))
            assert first[1] == order, f"ranks {first[0]} and {program.rank} differ in group {group}"
        for message in (i for i in program.instructions if isinstance(i, SendRecv)):
            ends = message.ends(program.rank)
            (sent if message.kind == "send" else received).setdefault(ends, []).append(message.payload)
    assert sent == received, "a message is sent and not received, or the other way round"
    _verify_members(orders, programs)
    _verify_no_deadlock(programs)


def _collective_orders(program: HostProgram) -> dict[tuple[int, ...], list[tuple[object, ...]]]:
    orders: dict[tuple[int, ...], list[tuple[object, ...]]] = {}
    for instruction in program.instructions:
        if isinstance(instruction, Collective):
            count, dtype = instruction.payload
            agreed = () if instruction.kind == "all_to_all" else (count,)
            orders.setdefault(instruction.group, []).append((instruction.kind, instruction.work, dtype, *agreed))
    return orders


def _verify_members(orders: Mapping[tuple[int, ...], object], programs: Sequence[HostProgram]) -> None:
    groups_of = {program.rank: set(_collective_orders(program)) for program in programs}
    for group in orders:
        assert all(group in groups_of.get(rank, ()) for rank in group), f"a rank is missing in {group}"


def _call_keys(program: HostProgram) -> list[tuple[CallKey, int]]:
    """The communications of a rank in order, and how many ranks take part in each.

    Before the first message in a group all of its ranks connect; that counts as a communication.
    """
    numbers: Counter[object] = Counter()
    known: set[tuple[int, ...]] = set()
    found: list[tuple[CallKey, int]] = []
    for i in program.instructions:
        if isinstance(i, CommunicationCall):
            place, size = call_channel(program.rank, i)
            if i.group not in known and isinstance(i, SendRecv):
                found.append(((("connecting", i.group), 1), len(i.group)))
            known.add(i.group)
            numbers[place] += 1
            found.append(((place, numbers[place]), size))
    return found


def _verify_no_deadlock(programs: Sequence[HostProgram]) -> None:
    """Play all programs, with every communication waiting for all its ranks: all programs must reach their ends."""
    left = {program.rank: _call_keys(program)[::-1] for program in programs}
    waiting: dict[object, list[int]] = {}
    moving = [program.rank for program in programs]
    while moving:
        rank = moving.pop()
        if not left[rank]:
            continue
        meeting, size = left[rank][-1]
        there = waiting.setdefault(meeting, [])
        there.append(rank)
        if len(there) == size:
            for member in waiting.pop(meeting):
                left[member].pop()
                moving.append(member)
    assert not waiting, f"ranks wait for each other: {waiting}"


def lower_to_host_ir(segmented: SegmentedDefinition, rank: int, digest: str, in_flight: int = IN_FLIGHT) -> HostProgram:
    """Lower a program for one rank: kernels, its part in every collective, and frees of buffers.

    `in_flight` limits the bytes of communications that are issued ahead of their use.
    """
    return RankLowering(segmented, rank, digest).run(in_flight)


class RankLowering:
    """Lowers a program for one rank; the state that its parts share.

    names: the name of each value. An input that is several values has the name of the first.
    readers: how many statements and outputs read each value.
    fresh: the values that have memory of their own, which a single reader may overwrite.
    fusible: by kernel, the values whose packing and unpacking the kernel may do itself.
    """

    def __init__(self, segmented: SegmentedDefinition, rank: int, digest: str):
        self.segmented, self.rank, self.digest = segmented, rank, digest
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
        self._costs: dict[tuple[int, int], tuple[float, float]] = {}
        self._step_texts: dict[Step, tuple[str, str, str]] = {}

    def run(self, in_flight: int) -> HostProgram:
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
        body = fuse_copies(schedule(self.instructions, model, in_flight), self.fusible, kept, in_flight)
        body = with_frees(body, keep=kept)
        return HostProgram(self.rank, self._params(), tuple(body), outputs, self.digest)

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
        """Operations of an op on one rank, and the least bytes that it reads and writes."""
        call = self.graph.nodes[compute.node].call
        key = (id(call), id(compute.placement))
        if key not in self._costs:
            self._costs[key] = local_cost(call, compute.placement)
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
