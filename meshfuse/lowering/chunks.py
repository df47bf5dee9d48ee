"""The chunks of a loop on one rank: their names, where they lie, and a statement's instructions for one of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from ..dtypes import DataType
from ..graph import Graph
from ..ops.local import LocalCall
from ..reshard.steps import Step, box_numel, restricted
from ..resharding import Compute, Reshard, Value
from ..sharding.layout import Runs
from .boxes import Box, box_text
from .collectives import ReshardContext, is_dense, local_box, local_shape, lower_reshard
from .copies import put, view_box
from .instructions import Allocate, Instruction, Kernel, Launch, View
from .kernel_text import functions, origin, scalar_params
from .overlapped import ChunkLoop
from .segments import SegmentedDefinition


class Lowering(Protocol):
    """What lowers a program for one rank, `rank_lowering.RankLowering`, as the chunks of a loop see it."""

    segmented: SegmentedDefinition
    rank: int
    graph: Graph
    values: Sequence[Value]
    readers: dict[int, int]

    def name(self, value: int) -> str: ...

    def cost(self, compute: Compute) -> tuple[float, float]: ...

    def scalar_text(self, value: Any) -> str: ...

    def reshard_context(self, reshard: Reshard, source: str, target: str, fresh: bool) -> ReshardContext: ...

    def wire(self, step: Step, source: int) -> float: ...

    def is_fresh(self, value: int) -> bool: ...

    def new_name(self, name: str, loop: int) -> str: ...

    def is_read_outside(self, loop: ChunkLoop, value: int) -> bool: ...


class Chunks:
    """Writes the instructions of a loop on one rank into `out`; a subclass decides their order.

    `v6` is a whole tensor, `v6_2` its chunk 2: a part of the whole's memory, or a tensor of its own. Of the loop's
    values:

    whole: those that are read outside of it, and so have memory for all chunks.
    parts: those of the whole ones whose chunks are written straight into it; of the others chunks are copied there.
    into: values that are written where another value will be.
    known: the names of the chunks that are there.
    wide: an op whose results are float32 here.
    """

    def __init__(self, low: Lowering, loop: ChunkLoop):
        self.low, self.loop, self.rank = low, loop, low.rank
        self.out: list[Instruction] = []
        self.made = set(loop.outputs)
        self.known: dict[tuple[int, int], str] = {}
        self.kernels: dict[tuple[str, ...], Kernel] = {}
        self.whole = {v for v in loop.outputs if low.is_read_outside(loop, v)}
        self.parts = {v for v in self.whole if self._lies_in_parts(v)}
        self.into: dict[int, int] = {}
        self.wide: Compute | None = None

    @property
    def graph(self) -> Graph:
        return self.low.graph

    def run(self) -> list[Instruction]:
        """The instructions of the whole loop."""
        for v in self.loop.outputs:
            if v in self.whole and not self._is_only_chunk(v):
                self.out.append(Allocate(self.low.name(v), local_shape(self._held(v)), self._dtype(v)))
        self._write()
        return self.out

    def _write(self) -> None:
        """Append the instructions of all chunks."""
        raise NotImplementedError

    def _is_only_chunk(self, v: int) -> bool:
        """Whether this rank makes a whole value in one chunk, and so needs no other memory for it."""
        return False

    # facts

    def _value(self, v: int) -> Value:
        return self.low.values[v]

    def _dtype(self, v: int) -> DataType:
        return self.low.segmented.resharded.type_of(v).dtype

    def _held(self, v: int, chunk: int | None = None) -> tuple[Runs, ...]:
        """The global indices that the rank has of a value, or of a chunk of it."""
        value = self._value(v)
        runs = value.sharding.runs(self.graph.shape(value.tensor), self.rank)
        return runs if chunk is None else restricted(runs, self._only(v, chunk))

    def _only(self, v: int, chunk: int) -> tuple[int, Runs] | None:
        tensor = self._value(v).tensor
        if tensor not in self.loop.cuts:
            return None
        return self.loop.only(tensor, chunk)

    def _box(self, v: int, chunk: int) -> Box:
        return local_box(self._held(v), self._held(v, chunk))

    def _lies_in_parts(self, v: int) -> bool:
        """Whether chunks can be written straight into the whole: collectives need dense places for that."""
        shape, boxes = local_shape(self._held(v)), [self._box(v, c) for c in range(self.loop.chunks)]
        if any(v in s.outputs for s in self.loop.computes):
            return all("K." not in box_text(box, shape) for box in boxes)
        return all(is_dense(box, shape) for box in boxes)

    def _is_fresh(self, v: int) -> bool:
        """Whether nothing else reads the memory of a value's chunks, so that it may be written to."""
        return v in self.made and v not in self.whole and self.low.is_fresh(v)

    def _note(self, chunk: int) -> str:
        return f"chunk {chunk + 1} of {self.loop.chunks}"

    # chunks by name

    def _read(self, v: int, chunk: int) -> str:
        """The name of a chunk (of a whole value, if it is not cut); a view is made of what comes from outside."""
        if (v, chunk) in self.known:
            return self.known[v, chunk]
        if self._only(v, chunk) is None:
            return self.low.name(v)
        assert v not in self.made
        name = self.known[v, chunk] = self.low.new_name(f"v{v}_{chunk}", self.loop.id)
        self.out.append(view_box(name, self.low.name(v), self._box(v, chunk), local_shape(self._held(v))))
        return name

    def _target(self, v: int, chunk: int) -> tuple[str, bool]:
        """(name of a chunk to be made, whether it is a part of a whole that is there)."""
        if (v, chunk) in self.known:
            return self.known[v, chunk], True
        if v in self.into:
            name, placed = self._target(self.into[v], chunk)
        else:
            name, placed = self.low.new_name(f"v{v}_{chunk}", self.loop.id), v in self.parts
            if placed:
                box, shape = self._box(v, chunk), local_shape(self._held(v))
                self.out.append(View(name, self.low.name(v), box_text(box, shape), box, shape, self._note(chunk)))
        self.known[v, chunk] = name
        return name, placed

    def _store(self, v: int, chunk: int) -> None:
        """Copy a chunk from memory of its own into the whole."""
        if v in self.whole and v not in self.parts:
            box, shape = self._box(v, chunk), local_shape(self._held(v))
            self.out.append(put(self.low.name(v), box, shape, self.known[v, chunk]))

    # one statement

    def _statement(self, statement: Compute | Reshard, chunk: int) -> None:
        if isinstance(statement, Compute):
            self._compute(statement, chunk)
        else:
            self._reshard(statement, chunk)

    def _compute(self, statement: Compute, chunk: int) -> None:
        inputs = [self._read(v, chunk) for v in statement.inputs]
        targets = [self._target(v, chunk) for v in statement.outputs]
        kernel, scalars = self._kernel(statement, chunk, tuple(placed for _, placed in targets))
        placed = [name for name, is_there in targets if is_there]
        arguments = (*dict.fromkeys(inputs), *placed, *scalars)
        made = tuple(name for name, is_there in targets if not is_there)
        self.out.append(Launch(kernel, arguments, made, self._note(chunk)))
        for v in statement.outputs:
            self._store(v, chunk)

    def _kernel(self, statement: Compute, chunk: int, placed: tuple[bool, ...]) -> tuple[Kernel, tuple[str, ...]]:
        """The kernel of an op on a chunk; chunks with equal text share one."""
        call = self._call(statement, chunk)
        given = list(dict.fromkeys(self.low.name(v) for v in statement.inputs))
        targets = [f"v{v}" for v in statement.outputs]
        filled = [t for t, is_there in zip(targets, placed, strict=True) if is_there]
        lines = call.lines(targets, filled)
        scalars = scalar_params(self.graph, [statement], lines)
        params = (*given, *filled, *scalars)
        results = tuple(t for t in targets if t not in filled)
        key = (self.graph.nodes[statement.node].name, *params, "", *lines)
        if key not in self.kernels:
            name = f"loop_{self.loop.id}" + (f"_{len(self.kernels)}" if self.kernels else "")
            flops, nbytes = self.low.cost(statement)
            share, called = self._share(statement, chunk), functions(self.graph, [statement])
            written = tuple(range(len(given), len(given) + len(filled)))
            work = ((flops * share, nbytes * share),)
            origins = (origin(self.graph.nodes[statement.node]),) * len(lines)
            self.kernels[key] = Kernel(name, params, tuple(lines), results, called, work, written, origins)
        return self.kernels[key], scalars

    def _share(self, statement: Compute, chunk: int) -> float:
        """The part of an op's work that a chunk is."""
        whole = box_numel(self._held(statement.outputs[0]))
        return box_numel(self._held(statement.outputs[0], chunk)) / whole if whole else 0.0

    def _call(self, statement: Compute, chunk: int) -> ChunkCall:
        node, wide = self.graph.nodes[statement.node], ".float()" if statement is self.wide else ""
        return ChunkCall(
            node.call, [self.low.name(v) + wide for v in statement.inputs],
            statement.placement.operands, statement.placement.results,
            self.rank, self.low.scalar_text, node.salt,
            tuple(self._only(v, chunk) for v in statement.inputs),
            tuple(self._only(v, chunk) for v in statement.outputs),
        )  # fmt: skip

    def _reshard(self, reshard: Reshard, chunk: int) -> None:
        source = self._read(reshard.source, chunk)
        fresh = self._is_fresh(reshard.source)
        target, placed = self._target(reshard.target, chunk)
        context = self.low.reshard_context(reshard, source, target, fresh)
        about = replace(context.about, why=f"{context.about.why}, {self._note(chunk)}")
        only = self._only(reshard.source, chunk)
        step = replace(reshard.step, only=only)
        context = replace(context, step=step, about=about, work=f"w{reshard.target}_{chunk}", placed=placed)
        context = replace(context, about=replace(about, wire=self.low.wire(step, reshard.source)))
        self.out.extend(lower_reshard(context))
        self._store(reshard.target, chunk)


@dataclass(frozen=True, slots=True)
class ChunkCall(LocalCall):
    """A call on one rank for one chunk: `operand_only` and `result_only` are (dim, indices) of the chunk in each."""

    operand_only: tuple[tuple[int, Runs] | None, ...] = ()
    result_only: tuple[tuple[int, Runs] | None, ...] = ()

    @property
    def operand_shapes(self) -> tuple[tuple[int, ...], ...]:
        return tuple(local_shape(self.operand_runs(i)) for i in range(len(self.call.types)))

    @property
    def result_shapes(self) -> tuple[tuple[int, ...], ...]:
        return tuple(local_shape(self.result_runs(i)) for i in range(len(self.call.results)))

    def operand_runs(self, operand: int) -> tuple[Runs, ...]:
        runs = self.operand_shardings[operand].runs(self.call.types[operand].shape, self.rank)
        return restricted(runs, self.operand_only[operand])

    def result_runs(self, result: int) -> tuple[Runs, ...]:
        runs = self.result_shardings[result].runs(self.call.results[result].shape, self.rank)
        return restricted(runs, self.result_only[result])

    def lines(self, targets: Sequence[str], filled: Sequence[str]) -> list[str]:
        """Python that makes the results; those in `filled` are written into tensors of these names."""
        if len(targets) == 1 and filled and (text := self.into(targets[0])) is not None:
            return text
        names = [f"{t}_new" if t in filled else t for t in targets]
        return [*self.statements(names), *(f"{t}.copy_({t}_new)" for t in filled)]
