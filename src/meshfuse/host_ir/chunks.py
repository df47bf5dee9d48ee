"""A loop over chunks on one rank, written out chunk by chunk."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from ..dtypes import DataType
from ..graph import Graph
from ..resharding.insert import Compute, Set, Value
from ..resharding.moves import MoveKind, count, restricted
from ..sharding.layout import Runs
from ..streams.overlap import ChunkLoop
from .chunk_calls import ChunkCall
from .communicate import dense, local_box, local_shape, lower_move
from .instructions import (
    Allocate,
    Box,
    Fold,
    Instruction,
    Kernel,
    Launch,
    Pack,
    Part,
    Put,
    SendRecv,
    View,
    Wait,
    box_text,
    whole_box,
)
from .kernel_text import functions, scalar_params

if TYPE_CHECKING:
    from .lower import RankLowering


# Sending a message of so many bytes takes less than starting it, on all links of `costs.MACHINES`.
_SHORT = 64 * 1024


def lower_loop(low: RankLowering, loop: ChunkLoop) -> list[Instruction]:
    """The instructions of a loop on the lowering's rank; none outside of its mesh."""
    if low.rank not in loop.mesh:
        return []
    return _Loop(low, loop).run()


class _Loop:
    """Names: `v6` is a whole tensor, `v6_2` its chunk 2: a part of its memory, or a tensor of its own."""

    def __init__(self, low: RankLowering, loop: ChunkLoop):
        self.low, self.loop, self.rank = low, loop, low.rank
        self.out: list[Instruction] = []
        self.made = set(loop.outputs)
        self.known: dict[tuple[int, int], str] = {}
        self.kernels: dict[tuple[str, ...], Kernel] = {}
        self.whole = {v for v in loop.outputs if low.is_read_outside(loop, v)}
        self.parts = {v for v in self.whole if self._lies_in_parts(v)}
        self.into = {s.source: s.target for s in loop.moves if self._in_place(s)}
        self.wide = self._wide_term() if loop.ring == "scatter" else None

    @property
    def graph(self) -> Graph:
        return self.low.graph

    def run(self) -> list[Instruction]:
        for v in self.loop.outputs:
            if v in self.whole and not self._is_scattered(v):
                self.out.append(Allocate(self.low.name(v), local_shape(self._held(v)), self._dtype(v)))
        if self.loop.ring == "gather":
            self._gather_ring()
        elif self.loop.ring == "scatter":
            self._scatter_ring()
        else:
            self._in_turn()
        return self.out

    # facts

    def _value(self, v: int) -> Value:
        return self.low.values[v]

    def _dtype(self, v: int) -> DataType:
        return self.low.segmented.resharded.type_of(v).dtype

    def _held(self, v: int, chunk: int | None = None) -> tuple[Runs, ...]:
        """The global indices of the value's elements on this rank, all or a chunk's."""
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
        """Whether all chunks of a whole can be written in their places: by a collective where they are dense there."""
        shape, boxes = local_shape(self._held(v)), [self._box(v, c) for c in range(self.loop.chunks)]
        if any(v in s.outputs for s in self.loop.computes):
            return all("K." not in box_text(box, shape) for box in boxes)
        return all(dense(box, shape) for box in boxes)

    def _in_place(self, step: Set) -> bool:
        """An all-reduce whose source nothing else reads: its source is written where its target will be."""
        if step.move.kind is not MoveKind.ALL_REDUCE or step.target not in self.parts or self.loop.ring:
            return False
        return step.source in self.made and step.source not in self.whole and self.low.readers[step.source] == 1

    def _wide_term(self) -> Compute | None:
        """The op whose terms, of 16-bit floats, are made, sent and added in float32: rounded once, like a collective's.

        One whose tensors are so small that a ring takes no longer for it.
        """
        step = self.loop.moves[-1]
        maker = next((s for s in self.loop.computes if step.source in s.outputs), None)
        dtype = self._dtype(step.source)
        if maker is None or step.source in self.whole or step.move.src.reduce != "sum":
            return None
        if dtype not in (DataType.BFloat16, DataType.Half) or not self.graph.nodes[maker.node].call.op.widens:
            return None
        sizes = [count(self._held(v, c)) for v in (*maker.inputs, step.source) for c in self.loop.filled]
        return maker if max(sizes) * DataType.Float.itemsize <= _SHORT else None

    def _sum_type(self, step: Set) -> DataType:
        """The type of the sums that travel in a ring."""
        return DataType.Float if self.wide is not None else self._dtype(step.source)

    def _is_scattered(self, v: int) -> bool:
        """The result of a ring that scatters, of which this rank makes one chunk: the whole is that chunk."""
        if self.loop.ring != "scatter" or v != self.loop.moves[-1].target or self.wide is not None:
            return False
        return self._ring(self.loop.moves[-1]).inner == 1 and bool(count(self._held(v)))

    def _is_fresh(self, v: int) -> bool:
        """Whether chunks of a value lie in memory that nothing else reads, so that they may be written to."""
        return v in self.made and v not in self.whole and self.low.is_fresh(v)

    def _note(self, chunk: int) -> str:
        return f"chunk {chunk + 1} of {self.loop.chunks}"

    # chunks by name

    def _read(self, v: int, chunk: int) -> str:
        """The name of a chunk (or of the whole, of what is not cut), made a view if it comes from outside."""
        if (v, chunk) in self.known:
            return self.known[v, chunk]
        if self._only(v, chunk) is None:
            return self.low.name(v)
        assert v not in self.made
        name = self.known[v, chunk] = self.low.new_name(f"v{v}_{chunk}", self.loop.id)
        self.out.append(View(name, self.low.name(v), self._box(v, chunk), local_shape(self._held(v))))
        return name

    def _target(self, v: int, chunk: int) -> tuple[str, bool]:
        """The name of a chunk to be made, and whether it is a part of a whole that is there."""
        if (v, chunk) in self.known:
            return self.known[v, chunk], True
        if v in self.into:
            name, placed = self._target(self.into[v], chunk)
        else:
            name, placed = self.low.new_name(f"v{v}_{chunk}", self.loop.id), v in self.parts
            if placed:
                box, shape = self._box(v, chunk), local_shape(self._held(v))
                self.out.append(Part(name, self.low.name(v), box, shape, self._note(chunk)))
        self.known[v, chunk] = name
        return name, placed

    def _store(self, v: int, chunk: int) -> None:
        """Put a chunk that lies in memory of its own into the whole."""
        if v in self.whole and v not in self.parts:
            box, shape = self._box(v, chunk), local_shape(self._held(v))
            self.out.append(Put(self.low.name(v), box, shape, self.known[v, chunk]))

    # one step

    def _in_turn(self) -> None:
        """Chunk by chunk. What comes before the first op that reads a moved value, or where none does before the
        first op, is done for the next chunk before the rest is done for this one.
        """
        steps = self.loop.steps
        first = self._first_reader() or next(i for i, s in enumerate(steps) if isinstance(s, Compute))
        chunks = self.loop.filled
        for place in range(len(chunks) + 1):
            for step in steps[:first] if place < len(chunks) else ():
                self._step(step, chunks[place])
            for step in steps[first:] if place else ():
                self._step(step, chunks[place - 1])

    def _first_reader(self) -> int:
        """The place of the first op that reads what a move of the loop brings; 0 where there is none."""
        moved = {s.target for s in self.loop.moves}
        readers = (i for i, s in enumerate(self.loop.steps) if isinstance(s, Compute) and moved.intersection(s.inputs))
        return next(readers, 0)

    def _step(self, step: Compute | Set, chunk: int) -> None:
        if isinstance(step, Compute):
            self._compute(step, chunk)
        else:
            self._move(step, chunk)

    def _compute(self, step: Compute, chunk: int) -> None:
        inputs = [self._read(v, chunk) for v in step.inputs]
        targets = [self._target(v, chunk) for v in step.outputs]
        kernel, scalars = self._kernel(step, chunk, tuple(placed for _, placed in targets))
        placed = [name for name, is_there in targets if is_there]
        arguments = (*dict.fromkeys(inputs), *placed, *scalars)
        made = tuple(name for name, is_there in targets if not is_there)
        self.out.append(Launch(kernel, arguments, made, self._note(chunk)))
        for v in step.outputs:
            self._store(v, chunk)

    def _kernel(self, step: Compute, chunk: int, placed: tuple[bool, ...]) -> tuple[Kernel, tuple[str, ...]]:
        """The function of an op on a chunk, which chunks of equal text share."""
        call = self._call(step, chunk)
        given = list(dict.fromkeys(self.low.name(v) for v in step.inputs))
        targets = [f"v{v}" for v in step.outputs]
        filled = [t for t, is_there in zip(targets, placed, strict=True) if is_there]
        lines = call.lines(targets, filled)
        scalars = scalar_params(self.graph, [step], lines)
        params = (*given, *filled, *scalars)
        results = tuple(t for t in targets if t not in filled)
        key = (self.graph.nodes[step.node].name, *params, "", *lines)
        if key not in self.kernels:
            name = f"loop_{self.loop.id}" + (f"_{len(self.kernels)}" if self.kernels else "")
            flops, nbytes = self.low.cost(step)
            share, called = self._share(step, chunk), functions(self.graph, [step])
            written = tuple(range(len(given), len(given) + len(filled)))
            work = ((flops * share, nbytes * share),)
            origins = (self.low.origin(step),) * len(lines)
            self.kernels[key] = Kernel(name, params, tuple(lines), results, called, work, written, origins)
        return self.kernels[key], scalars

    def _share(self, step: Compute, chunk: int) -> float:
        """The part of an op's work that is in a chunk."""
        whole = count(self._held(step.outputs[0]))
        return count(self._held(step.outputs[0], chunk)) / whole if whole else 0.0

    def _call(self, step: Compute, chunk: int) -> ChunkCall:
        node, wide = self.graph.nodes[step.node], ".float()" if step is self.wide else ""
        return ChunkCall(
            node.call, [self.low.name(v) + wide for v in step.inputs], step.placement.operands, step.placement.results,
            self.rank, self.low.scalar_text, node.origin,
            tuple(self._only(v, chunk) for v in step.inputs), tuple(self._only(v, chunk) for v in step.outputs),
        )  # fmt: skip

    def _move(self, step: Set, chunk: int) -> None:
        source = self._read(step.source, chunk)
        fresh = self._is_fresh(step.source)
        target, placed = self._target(step.target, chunk)
        context = self.low.move_context(step, source, target, fresh)
        about = replace(context.about, why=f"{context.about.why}, {self._note(chunk)}")
        only = self._only(step.source, chunk)
        move = replace(step.move, only=only)
        context = replace(context, move=move, about=about, work=f"w{step.target}_{chunk}", placed=placed)
        context = replace(context, about=replace(about, wire=self.low.wire(move, step.source)))
        self.out.extend(lower_move(context))
        self._store(step.target, chunk)

    # rings

    def _ring(self, step: Set) -> Ring:
        group = step.move.group(self.rank)
        return Ring(group, group.index(self.rank), self.loop.chunks // len(group))

    def _message(self, step: Set, kind: str, peer: int, name: str, chunk: int, size: int) -> SendRecv:
        context = self.low.move_context(step, "", "", False)
        dtype = self._sum_type(step)
        wire = float(size * dtype.itemsize) if kind == "send" else 0.0
        about = replace(context.about, wire=wire, why=f"{step.why}, {self._note(chunk)}")
        work = f"w{step.target}_{chunk}_{'to' if kind == 'send' else 'from'}"
        return SendRecv(work, step.move.group(self.rank), kind, peer, name, about, (size, dtype.value))

    def _gather_ring(self) -> None:
        """Each shard goes to the rank before; a rank works on its own, then on that of the rank after it, and so on."""
        step = self.loop.moves[0]
        ring, makers = self._ring(step), self._makers(step.source)
        rest = [s for s in self.loop.steps if s is not step and s not in makers]
        for chunk in ring.block(ring.index):
            for maker in makers if count(self._global(step, chunk)) else ():
                self._step(maker, chunk)
            self._own_shard(step, chunk)
        for turn in range(ring.size):
            last = turn == ring.size - 1
            for here, there in zip(ring.block(ring.index + turn), ring.block(ring.index + turn + 1), strict=True):
                if not last:
                    self._pass_on(step, ring, here, there)
                if count(self._global(step, here)):
                    for other in rest:
                        self._step(other, here)

    def _makers(self, value: int) -> list[Compute | Set]:
        """The loop's steps that a value comes of, in order."""
        found: list[Compute | Set] = []
        wanted = {value}
        for step in reversed(self.loop.steps):
            if wanted.intersection(step.outputs):
                found.insert(0, step)
                wanted.update(step.inputs)
        return found

    def _global(self, step: Set, chunk: int) -> tuple[Runs, ...]:
        return self._held(step.target, chunk)

    def _own_shard(self, step: Set, chunk: int) -> None:
        """The rank's own shard as a chunk of the gathered tensor."""
        if not count(self._global(step, chunk)):
            return
        source = self._read(step.source, chunk)
        if step.target in self.parts:
            name, _ = self._target(step.target, chunk)
            shape = local_shape(self._held(step.target, chunk))
            self.out.append(Put(name, whole_box(shape), shape, source))
        else:
            self.known[step.target, chunk] = source
            self._store(step.target, chunk)

    def _pass_on(self, step: Set, ring: Ring, here: int, there: int) -> None:
        """Send the shard at hand to the rank before and get the next one from the rank after."""
        messages: list[tuple[int, list[Instruction]]] = []
        sent, got = count(self._global(step, here)), count(self._global(step, there))
        waits: list[Instruction] = []
        if sent:
            name = f"v{step.target}_{here}_sent"
            shape = local_shape(self._held(step.target, here))
            pack = Pack(name, self.known[step.target, here], (whole_box(shape),), shape)
            call = self._message(step, "send", ring.before, name, here, sent)
            messages.append((ring.index, [pack, call]))
            waits.append(Wait(call.work))
        if got:
            name, placed = self._target(step.target, there)
            shape = local_shape(self._held(step.target, there))
            call = self._message(step, "recv", ring.after, name, there, got)
            buffer = [] if placed else [Allocate(name, shape, self._dtype(step.target))]
            messages.append(((ring.index + 1) % ring.size, [*buffer, call]))
            waits.insert(0, Wait(call.work))
        for _, part in sorted(messages, key=lambda entry: entry[0]):
            self.out.extend(part)
        self.out.extend(waits)
        if got:
            self._store(step.target, there)

    def _scatter_ring(self) -> None:
        """The sum of each chunk goes round by way of all ranks, each adding its term, and ends where it belongs."""
        step = self.loop.moves[-1]
        ring, rest = self._ring(step), [s for s in self.loop.steps if s is not step]
        for turn in range(ring.size):
            here, there = ring.block(ring.index - 1 - turn), ring.block(ring.index - 2 - turn)
            for chunk, following in zip(here, there, strict=True):
                last = turn == ring.size - 1
                coming = [] if last else self._coming(step, ring, following)
                # Both ends of every message issue it at the same place in one order of all messages.
                self.out += coming if ring.index else []
                if count(self._held(step.source, chunk)):
                    self._add_term(step, ring, turn, chunk, rest)
                self.out += [] if ring.index else coming

    def _coming(self, step: Set, ring: Ring, chunk: int) -> list[Instruction]:
        """Ask for the sum so far of a chunk, which the rank before sends after this turn."""
        shape, size = local_shape(self._held(step.source, chunk)), count(self._held(step.source, chunk))
        name = f"v{step.target}_{chunk}_sum"
        call = self._message(step, "recv", ring.before, name, chunk, size)
        return [Allocate(name, shape, self._sum_type(step)), call] if size else []

    def _add_term(self, step: Set, ring: Ring, turn: int, chunk: int, rest: Sequence[Compute | Set]) -> None:
        """Compute the rank's term of a chunk, add it to the sum that came, and send that on or keep it."""
        shape, size = local_shape(self._held(step.source, chunk)), count(self._held(step.source, chunk))
        whole = whole_box(shape)
        for other in rest:
            self._step(other, chunk)
        mine = self.known[step.source, chunk]
        if turn:
            come, term, mine = f"v{step.target}_{chunk}_sum", mine, f"v{step.target}_{chunk}_sums"
            self.out.append(Wait(f"w{step.target}_{chunk}_from"))
            self.out.append(Fold(mine, come, 1, shape, step.move.src.reduce, term))
        if turn < ring.size - 1:
            sent = f"v{step.target}_{chunk}_sent"
            call = self._message(step, "send", ring.after, sent, chunk, size)
            self.out += [Pack(sent, mine, (whole,), shape), call, Wait(call.work)]
        elif self._is_scattered(step.target):
            self.out.append(View(self.low.name(step.target), mine, whole, shape))
        elif step.target in self.whole:
            box = self._box(step.target, chunk)
            self.out.append(Put(self.low.name(step.target), box, local_shape(self._held(step.target)), mine))


@dataclass(frozen=True, slots=True)
class Ring:
    """A rank's place among the ranks of a ring, and how many chunks each shard is cut into."""

    group: tuple[int, ...]
    index: int
    inner: int

    @property
    def size(self) -> int:
        return len(self.group)

    @property
    def before(self) -> int:
        return self.group[self.index - 1]

    @property
    def after(self) -> int:
        return self.group[(self.index + 1) % self.size]

    def block(self, place: int) -> range:
        """The chunks of the shard of the rank at this place, counted round."""
        start = place % self.size * self.inner
        return range(start, start + self.inner)
