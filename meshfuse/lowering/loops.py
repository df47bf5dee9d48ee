"""A loop over chunks on one rank, written out chunk by chunk."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from ..dtypes import DataType
from ..reshard.steps import StepKind, box_numel
from ..resharding import Compute, Reshard
from ..sharding.layout import Runs
from .boxes import whole_box
from .chunks import Chunks, Lowering
from .collectives import local_shape
from .copies import pack_boxes, put, view_box
from .instructions import Allocate, Instruction, MessageKind, Reduce, SendRecv, Wait
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
        self.into = {s.source: s.target for s in loop.reshards if self._in_place(s)}

    def _in_place(self, reshard: Reshard) -> bool:
        """Whether a reshard is an all-reduce of what nothing else reads: then its source is written into the target."""
        if reshard.step.kind is not StepKind.ALL_REDUCE or reshard.target not in self.parts:
            return False
        return (
            reshard.source in self.made and reshard.source not in self.whole and self.low.readers[reshard.source] == 1
        )

    def _write(self) -> None:
        """For each chunk the statements before the first reader of a reshard, then the others for the chunk before."""
        statements = self.loop.statements
        first = self._first_reader() or next(i for i, s in enumerate(statements) if isinstance(s, Compute))
        chunks = self.loop.filled
        for place in range(len(chunks) + 1):
            for statement in statements[:first] if place < len(chunks) else ():
                self._statement(statement, chunks[place])
            for statement in statements[first:] if place else ():
                self._statement(statement, chunks[place - 1])

    def _first_reader(self) -> int:
        """The place of the first op that reads a value moved in the loop; 0 where there is none."""
        moved = {s.target for s in self.loop.reshards}
        readers = (
            i for i, s in enumerate(self.loop.statements) if isinstance(s, Compute) and moved.intersection(s.inputs)
        )
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

    def _ring(self, reshard: Reshard) -> Ring:
        group = reshard.step.group(self.rank)
        return Ring(group, group.index(self.rank), self.loop.chunks // len(group))

    def _sum_type(self, reshard: Reshard) -> DataType:
        """The type of the sums that travel."""
        return DataType.Float if self.wide is not None else self._dtype(reshard.source)

    def _message(self, reshard: Reshard, kind: MessageKind, peer: int, name: str, chunk: int, size: int) -> SendRecv:
        context = self.low.reshard_context(reshard, "", "", False)
        dtype = self._sum_type(reshard)
        wire = float(size * dtype.itemsize) if kind == "send" else 0.0
        about = replace(context.about, wire=wire, why=f"{reshard.why}, {self._note(chunk)}")
        work = f"w{reshard.target}_{chunk}_{'to' if kind == 'send' else 'from'}"
        return SendRecv(work, reshard.step.group(self.rank), kind, peer, name, about, (size, dtype.value))


class _GatherRing(_InRing):
    """Each shard goes to the rank before: a rank works on its own, then on that of the rank after it, and so on."""

    def _write(self) -> None:
        reshard = self.loop.reshards[0]
        ring, makers = self._ring(reshard), self._makers(reshard.source)
        rest = [s for s in self.loop.statements if s is not reshard and s not in makers]
        for chunk in ring.block(ring.index):
            for maker in makers if box_numel(self._global(reshard, chunk)) else ():
                self._statement(maker, chunk)
            self._own_shard(reshard, chunk)
        for turn in range(ring.size):
            last = turn == ring.size - 1
            for here, there in zip(ring.block(ring.index + turn), ring.block(ring.index + turn + 1), strict=True):
                if not last:
                    self._pass_on(reshard, ring, here, there)
                if box_numel(self._global(reshard, here)):
                    for other in rest:
                        self._statement(other, here)

    def _makers(self, value: int) -> list[Compute | Reshard]:
        """The loop's statements that a value is made by, in order."""
        found: list[Compute | Reshard] = []
        wanted = {value}
        for statement in reversed(self.loop.statements):
            if wanted.intersection(statement.outputs):
                found.insert(0, statement)
                wanted.update(statement.inputs)
        return found

    def _global(self, reshard: Reshard, chunk: int) -> tuple[Runs, ...]:
        return self._held(reshard.target, chunk)

    def _own_shard(self, reshard: Reshard, chunk: int) -> None:
        """The rank's own shard as a chunk of the gathered tensor."""
        if not box_numel(self._global(reshard, chunk)):
            return
        source = self._read(reshard.source, chunk)
        if reshard.target in self.parts:
            name, _ = self._target(reshard.target, chunk)
            shape = local_shape(self._held(reshard.target, chunk))
            self.out.append(put(name, whole_box(shape), shape, source))
        else:
            self.known[reshard.target, chunk] = source
            self._store(reshard.target, chunk)

    def _pass_on(self, reshard: Reshard, ring: Ring, here: int, there: int) -> None:
        """Send the shard at hand to the rank before and get the next one from the rank after."""
        messages: list[tuple[int, list[Instruction]]] = []
        sent, got = box_numel(self._global(reshard, here)), box_numel(self._global(reshard, there))
        waits: list[Instruction] = []
        if sent:
            name = f"v{reshard.target}_{here}_sent"
            shape = local_shape(self._held(reshard.target, here))
            pack = pack_boxes(name, self.known[reshard.target, here], (whole_box(shape),), shape)
            call = self._message(reshard, "send", ring.before, name, here, sent)
            messages.append((ring.index, [pack, call]))
            waits.append(Wait(call.work))
        if got:
            name, placed = self._target(reshard.target, there)
            shape = local_shape(self._held(reshard.target, there))
            call = self._message(reshard, "recv", ring.after, name, there, got)
            buffer = [] if placed else [Allocate(name, shape, self._dtype(reshard.target))]
            messages.append(((ring.index + 1) % ring.size, [*buffer, call]))
            waits.insert(0, Wait(call.work))
        for _, part in sorted(messages, key=lambda entry: entry[0]):
            self.out.extend(part)
        self.out.extend(waits)
        if got:
            self._store(reshard.target, there)


class _ScatterRing(_InRing):
    """The sum of each chunk goes round all ranks, each of which adds its term, and ends where it belongs."""

    def __init__(self, low: Lowering, loop: ChunkLoop):
        super().__init__(low, loop)
        self.wide = self._wide_term()

    def _wide_term(self) -> Compute | None:
        """The op whose terms, of 16-bit floats, are made, sent and added in float32, so that they are rounded once.

        Only where tensors are so small that this takes a ring no longer.
        """
        reshard = self.loop.reshards[-1]
        maker = next((s for s in self.loop.computes if reshard.source in s.outputs), None)
        dtype = self._dtype(reshard.source)
        if maker is None or reshard.source in self.whole or reshard.step.src.reduce != "sum":
            return None
        if dtype not in (DataType.BFloat16, DataType.Half) or not self.graph.nodes[maker.node].call.op.accumulates_wide:
            return None
        sizes = [box_numel(self._held(v, c)) for v in (*maker.inputs, reshard.source) for c in self.loop.filled]
        return maker if max(sizes) * DataType.Float.itemsize <= _SHORT else None

    def _is_only_chunk(self, v: int) -> bool:
        if v != self.loop.reshards[-1].target or self.wide is not None:
            return False
        return self._ring(self.loop.reshards[-1]).inner == 1 and bool(box_numel(self._held(v)))

    def _write(self) -> None:
        reshard = self.loop.reshards[-1]
        ring, rest = self._ring(reshard), [s for s in self.loop.statements if s is not reshard]
        for turn in range(ring.size):
            here, there = ring.block(ring.index - 1 - turn), ring.block(ring.index - 2 - turn)
            for chunk, following in zip(here, there, strict=True):
                last = turn == ring.size - 1
                coming = [] if last else self._coming(reshard, ring, following)
                # Both ends of every message issue it at the same place in one order of all messages.
                self.out += coming if ring.index else []
                if box_numel(self._held(reshard.source, chunk)):
                    self._add_term(reshard, ring, turn, chunk, rest)
                self.out += [] if ring.index else coming

    def _coming(self, reshard: Reshard, ring: Ring, chunk: int) -> list[Instruction]:
        """Ask for a chunk's sum so far, which the rank before sends after its own turn."""
        shape, size = local_shape(self._held(reshard.source, chunk)), box_numel(self._held(reshard.source, chunk))
        name = f"v{reshard.target}_{chunk}_sum"
        call = self._message(reshard, "recv", ring.before, name, chunk, size)
        return [Allocate(name, shape, self._sum_type(reshard)), call] if size else []

    def _add_term(self, reshard: Reshard, ring: Ring, turn: int, chunk: int, rest: Sequence[Compute | Reshard]) -> None:
        """Compute the rank's term of a chunk, add it to the sum that came, and send that on or keep it."""
        shape, size = local_shape(self._held(reshard.source, chunk)), box_numel(self._held(reshard.source, chunk))
        whole = whole_box(shape)
        for other in rest:
            self._statement(other, chunk)
        mine = self.known[reshard.source, chunk]
        if turn:
            come, term, mine = f"v{reshard.target}_{chunk}_sum", mine, f"v{reshard.target}_{chunk}_sums"
            self.out.append(Wait(f"w{reshard.target}_{chunk}_from"))
            self.out.append(Reduce(mine, come, 1, shape, reshard.step.src.reduce, term))
        if turn < ring.size - 1:
            sent = f"v{reshard.target}_{chunk}_sent"
            call = self._message(reshard, "send", ring.after, sent, chunk, size)
            self.out += [pack_boxes(sent, mine, (whole,), shape), call, Wait(call.work)]
        elif self._is_only_chunk(reshard.target):
            self.out.append(view_box(self.low.name(reshard.target), mine, whole, shape))
        elif reshard.target in self.whole:
            box = self._box(reshard.target, chunk)
            self.out.append(put(self.low.name(reshard.target), box, local_shape(self._held(reshard.target)), mine))


_WRITERS: dict[RingKind | None, type[Chunks]] = {None: _InTurn, "gather": _GatherRing, "scatter": _ScatterRing}
