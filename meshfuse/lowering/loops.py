"""A loop over chunks on one rank, written out chunk by chunk."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from ..dtypes import DataType
from ..reshard.steps import MoveKind, box_numel
from ..resharding import Compute, Set
from ..sharding.layout import Runs
from .boxes import whole_box
from .chunks import Chunks, Lowering
from .collectives import local_shape
from .instructions import Allocate, Instruction, MessageKind, Pack, Put, Reduce, SendRecv, Slice, Wait
from .overlapped import ChunkLoop, RingKind

# Sending a message of so many bytes takes less than starting it, on all links of `costs.MACHINES`.
_SHORT = 64 * 1024


def lower_loop(low: Lowering, loop: ChunkLoop) -> list[Instruction]:
    """The instructions of a loop on the lowering's rank; none outside the loop's mesh."""
    if low.rank not in loop.mesh:
        return []
    return _WRITERS[loop.ring](low, loop).run()


class _InTurn(Chunks):
    """One chunk after the other, with collectives for each."""

    def __init__(self, low: Lowering, loop: ChunkLoop):
        super().__init__(low, loop)
        self.into = {s.source: s.target for s in loop.moves if self._in_place(s)}

    def _in_place(self, step: Set) -> bool:
        """Whether a move is an all-reduce of what nothing else reads: then its source is written into the target."""
        if step.move.kind is not MoveKind.ALL_REDUCE or step.target not in self.parts:
            return False
        return step.source in self.made and step.source not in self.whole and self.low.readers[step.source] == 1

    def _write(self) -> None:
        """By chunk the steps before the first op that reads a moved value, then the others for the chunk before."""
        steps = self.loop.steps
        first = self._first_reader() or next(i for i, s in enumerate(steps) if isinstance(s, Compute))
        chunks = self.loop.filled
        for place in range(len(chunks) + 1):
            for step in steps[:first] if place < len(chunks) else ():
                self._step(step, chunks[place])
            for step in steps[first:] if place else ():
                self._step(step, chunks[place - 1])

    def _first_reader(self) -> int:
        """The place of the first op that reads a value moved in the loop; 0 where there is none."""
        moved = {s.target for s in self.loop.moves}
        readers = (i for i, s in enumerate(self.loop.steps) if isinstance(s, Compute) and moved.intersection(s.inputs))
        return next(readers, 0)


@dataclass(frozen=True, slots=True)
class Ring:
    """A rank's place in a ring of ranks, and into how many chunks each shard is cut."""

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
        """The chunks of the shard of the rank at this place, counted round the ring."""
        start = place % self.size * self.inner
        return range(start, start + self.inner)


class _InRing(Chunks):
    """A loop in which shards, or sums of them, travel from rank to rank."""

    def _ring(self, step: Set) -> Ring:
        group = step.move.group(self.rank)
        return Ring(group, group.index(self.rank), self.loop.chunks // len(group))

    def _sum_type(self, step: Set) -> DataType:
        """The type of the sums that travel."""
        return DataType.Float if self.wide is not None else self._dtype(step.source)

    def _message(self, step: Set, kind: MessageKind, peer: int, name: str, chunk: int, size: int) -> SendRecv:
        context = self.low.move_context(step, "", "", False)
        dtype = self._sum_type(step)
        wire = float(size * dtype.itemsize) if kind == "send" else 0.0
        about = replace(context.about, wire=wire, why=f"{step.why}, {self._note(chunk)}")
        work = f"w{step.target}_{chunk}_{'to' if kind == 'send' else 'from'}"
        return SendRecv(work, step.move.group(self.rank), kind, peer, name, about, (size, dtype.value))


class _GatherRing(_InRing):
    """Each shard goes to the rank before: a rank works on its own, then on that of the rank after it, and so on."""

    def _write(self) -> None:
        step = self.loop.moves[0]
        ring, makers = self._ring(step), self._makers(step.source)
        rest = [s for s in self.loop.steps if s is not step and s not in makers]
        for chunk in ring.block(ring.index):
            for maker in makers if box_numel(self._global(step, chunk)) else ():
                self._step(maker, chunk)
            self._own_shard(step, chunk)
        for turn in range(ring.size):
            last = turn == ring.size - 1
            for here, there in zip(ring.block(ring.index + turn), ring.block(ring.index + turn + 1), strict=True):
                if not last:
                    self._pass_on(step, ring, here, there)
                if box_numel(self._global(step, here)):
                    for other in rest:
                        self._step(other, here)

    def _makers(self, value: int) -> list[Compute | Set]:
        """The loop's steps that a value is made by, in order."""
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
        if not box_numel(self._global(step, chunk)):
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
        sent, got = box_numel(self._global(step, here)), box_numel(self._global(step, there))
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


class _ScatterRing(_InRing):
    """The sum of each chunk goes round all ranks, each of which adds its term, and ends where it belongs."""

    def __init__(self, low: Lowering, loop: ChunkLoop):
        super().__init__(low, loop)
        self.wide = self._wide_term()

    def _wide_term(self) -> Compute | None:
        """The op whose terms, of 16-bit floats, are made, sent and added in float32, so that they are rounded once.

        Only where tensors are so small that this takes a ring no longer.
        """
        step = self.loop.moves[-1]
        maker = next((s for s in self.loop.computes if step.source in s.outputs), None)
        dtype = self._dtype(step.source)
        if maker is None or step.source in self.whole or step.move.src.reduce != "sum":
            return None
        if dtype not in (DataType.BFloat16, DataType.Half) or not self.graph.nodes[maker.node].call.op.accumulates_wide:
            return None
        sizes = [box_numel(self._held(v, c)) for v in (*maker.inputs, step.source) for c in self.loop.filled]
        return maker if max(sizes) * DataType.Float.itemsize <= _SHORT else None

    def _is_only_chunk(self, v: int) -> bool:
        if v != self.loop.moves[-1].target or self.wide is not None:
            return False
        return self._ring(self.loop.moves[-1]).inner == 1 and bool(box_numel(self._held(v)))

    def _write(self) -> None:
        step = self.loop.moves[-1]
        ring, rest = self._ring(step), [s for s in self.loop.steps if s is not step]
        for turn in range(ring.size):
            here, there = ring.block(ring.index - 1 - turn), ring.block(ring.index - 2 - turn)
            for chunk, following in zip(here, there, strict=True):
                last = turn == ring.size - 1
                coming = [] if last else self._coming(step, ring, following)
                # Both ends of every message issue it at the same place in one order of all messages.
                self.out += coming if ring.index else []
                if box_numel(self._held(step.source, chunk)):
                    self._add_term(step, ring, turn, chunk, rest)
                self.out += [] if ring.index else coming

    def _coming(self, step: Set, ring: Ring, chunk: int) -> list[Instruction]:
        """Ask for a chunk's sum so far, which the rank before sends after its own turn."""
        shape, size = local_shape(self._held(step.source, chunk)), box_numel(self._held(step.source, chunk))
        name = f"v{step.target}_{chunk}_sum"
        call = self._message(step, "recv", ring.before, name, chunk, size)
        return [Allocate(name, shape, self._sum_type(step)), call] if size else []

    def _add_term(self, step: Set, ring: Ring, turn: int, chunk: int, rest: Sequence[Compute | Set]) -> None:
        """Compute the rank's term of a chunk, add it to the sum that came, and send that on or keep it."""
        shape, size = local_shape(self._held(step.source, chunk)), box_numel(self._held(step.source, chunk))
        whole = whole_box(shape)
        for other in rest:
            self._step(other, chunk)
        mine = self.known[step.source, chunk]
        if turn:
            come, term, mine = f"v{step.target}_{chunk}_sum", mine, f"v{step.target}_{chunk}_sums"
            self.out.append(Wait(f"w{step.target}_{chunk}_from"))
            self.out.append(Reduce(mine, come, 1, shape, step.move.src.reduce, term))
        if turn < ring.size - 1:
            sent = f"v{step.target}_{chunk}_sent"
            call = self._message(step, "send", ring.after, sent, chunk, size)
            self.out += [Pack(sent, mine, (whole,), shape), call, Wait(call.work)]
        elif self._is_only_chunk(step.target):
            self.out.append(Slice(self.low.name(step.target), mine, whole, shape))
        elif step.target in self.whole:
            box = self._box(step.target, chunk)
            self.out.append(Put(self.low.name(step.target), box, local_shape(self._held(step.target)), mine))


_WRITERS: dict[RingKind | None, type[Chunks]] = {None: _InTurn, "gather": _GatherRing, "scatter": _ScatterRing}
