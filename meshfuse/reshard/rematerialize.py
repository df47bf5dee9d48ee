"""The bytes that a rank holds at each statement, and what it reshards again in place of keeping it.

A tensor that was gathered for one op and is read again much later, such as a weight in the forward and in the backward,
is held all the time in between. Where that is more than a limit allows it is dropped after the one and gathered again
for the other, as in stage 3 of ZeRO (Rajbhandari et al. 2020). What costs the fewest seconds per byte goes first.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from ..errors import SourceLine
from ..mesh import DeviceMesh
from ..resharding import Compute, Reshard, ReshardedDefinition, Statement
from .steps import StepKind


@dataclass(frozen=True, slots=True)
class Peak:
    """Where a rank holds most: so many bytes while this statement is done, in these values, the largest first."""

    nbytes: int
    place: int
    held: tuple[int, ...]


def peak(resharded: ReshardedDefinition) -> Peak:
    """The most that a rank holds: arguments all the time, results to the end, all else until it is read last.

    A view, as a slice is, keeps what it is of. What ops need inside (a scratch buffer of a library) is not known, and
    what a kernel fuses is counted as if it were in memory.
    """
    return _Usage(resharded).peak()


def held_across(resharded: ReshardedDefinition, place: int) -> dict[int, int]:
    """By value the bytes of what statements up to one have made, and later ones read."""
    usage = _Usage(resharded)
    lives = (life for life in usage.all() if -1 < life.start <= place < life.end)
    return {life.value: usage.nbytes(life.value) for life in lives}


def rematerialize_gathers(resharded: ReshardedDefinition, limit: float) -> ReshardedDefinition:
    """The statements with reshards done again where a rank would hold more than `limit` bytes; as far as that helps."""
    usage = _Usage(resharded)
    while (found := usage.peak()).nbytes > limit and usage.lower(found, limit):
        pass
    return usage.rewritten()


def gather_again_after(resharded: ReshardedDefinition, place: int) -> ReshardedDefinition:
    """The statements in two halves, the second behind this place: what it reads gathered it gathers itself."""
    usage = _Usage(resharded)
    for life in [*usage.all()]:
        usage.halve(life, place)
    return usage.rewritten()


@dataclass(slots=True, eq=False)
class _Life:
    """A value from the statement that makes it (-1: it is an argument) to its last read.

    `again` is the reshard that makes it just before its first statement, where it is one that was dropped.
    """

    value: int
    start: int
    reads: list[int]
    again: Reshard | None = None

    @property
    def end(self) -> int:
        return self.reads[-1] if self.reads else self.start

    def covers(self, place: int) -> bool:
        return self.start <= place <= self.end


@dataclass(frozen=True, slots=True)
class _Gain:
    """What is saved by dropping a life until it is read `back`: reshards from what is there then, and their seconds."""

    life: _Life
    back: int
    reshards: tuple[Reshard, ...]
    nbytes: int
    seconds: float

    @property
    def worth(self) -> float:
        return self.nbytes / max(self.seconds, 1e-12)


class _Usage:
    """Lives of values, and the bytes that they take at each statement, for each group of ranks on the same meshes."""

    def __init__(self, resharded: ReshardedDefinition):
        self.resharded, self.values = resharded, resharded.values
        self.made_by: dict[int, Statement] = {}
        self.lives: dict[int, list[_Life]] = {}
        self._seen_through: set[int] = set()  # Values of which there are views.
        self._arguments: dict[int, list[_Life]] = {}  # By views of theirs, too.
        self._sizes: dict[int, int] = {}
        self._collect()
        meshes = list(dict.fromkeys(value.sharding.mesh for value in self.values))
        kinds = {tuple(rank in mesh for mesh in meshes) for mesh in meshes for rank in mesh.ranks}
        self.kinds = [{mesh for mesh, there in zip(meshes, kind, strict=True) if there} for kind in sorted(kinds)]
        self.held = [self._counted(kind) for kind in self.kinds]
        self._delayed: set[int] = set()

    def _collect(self) -> None:
        """The lives, one for each value that is no view; what reads a view reads what it is a view of."""
        resharded = self.resharded
        roots = {v: v for v in resharded.inputs}
        last = len(resharded.statements)
        for v in resharded.inputs:
            self.lives[v] = [_Life(v, -1, [])]
        for place, statement in enumerate(resharded.statements):
            for v in dict.fromkeys(statement.inputs):
                self._read(roots[v], place)
            root = roots[statement.inputs[0]] if self._is_view(statement) else None
            for v in statement.outputs:
                roots[v] = v if root is None else root
                if root is None:
                    self.made_by[v], self.lives[v] = statement, [_Life(v, place, [])]
                else:
                    self._seen_through.add(root)
        for v in (*resharded.inputs, *resharded.outputs):
            self._read(roots[v], last)
        inputs = set(resharded.inputs)
        self._arguments = {v: self.lives[root] for v, root in roots.items() if root in inputs}

    def _is_view(self, statement: Statement) -> bool:
        if isinstance(statement, Reshard):
            return statement.step.kind is StepKind.SLICE
        return self.resharded.graph.nodes[statement.node].call.op.is_view

    def _read(self, value: int, place: int) -> None:
        self.lives[value][-1].reads.append(place)

    def all(self) -> Iterator[_Life]:
        """The lives of all values."""
        return (life for lives in self.lives.values() for life in lives)

    def nbytes(self, value: int) -> int:
        """Of the largest shard."""
        if value not in self._sizes:
            self._sizes[value] = self.resharded.nbytes(value)
        return self._sizes[value]

    def _counted(self, meshes: Collection[DeviceMesh]) -> list[int]:
        """The bytes at each statement, and at the end, on ranks of these meshes."""
        changes = [0] * (len(self.resharded.statements) + 2)
        for life in self.all():
            if self.values[life.value].sharding.mesh in meshes:
                changes[max(life.start, 0)] += self.nbytes(life.value)
                changes[life.end + 1] -= self.nbytes(life.value)
        return list(itertools.accumulate(changes))[:-1]

    def _add(self, value: int, start: int, end: int, sign: int) -> None:
        """Count a value at the statements from `start` to `end`."""
        more, mesh = sign * self.nbytes(value), self.values[value].sharding.mesh
        for kind, held in zip(self.kinds, self.held, strict=True):
            if mesh in kind:
                for place in range(max(start, 0), end + 1):
                    held[place] += more

    def peak(self) -> Peak:
        """Where ranks of some kind hold most."""
        tops = [max(range(len(held)), key=held.__getitem__) for held in self.held]
        most = max(range(len(tops)), key=lambda k: self.held[k][tops[k]])
        place = tops[most]
        there = [v for v, lives in self.lives.items() if any(life.covers(place) for life in lives)]
        there = [v for v in there if self.values[v].sharding.mesh in self.kinds[most]]
        return Peak(self.held[most][place], place, tuple(sorted(there, key=self.nbytes, reverse=True)))

    # moving again

    def lower(self, peak: Peak, limit: float) -> bool:
        """Drop what is held at a peak and can be made again, the best first, until it is no more; whether any was."""
        lives = [life for v in peak.held for life in self.lives[v] if life.start < peak.place < life.end]
        gains = filter(None, (self._gain(life, peak) for life in lives))
        over, taken = peak.nbytes - limit, False
        for found in sorted(gains, key=lambda gain: gain.worth, reverse=True):
            gain = self._gain(found.life, peak)  # What it was to be made from may be gone by now.
            if over > 0 and gain is not None:
                self._take(gain)
                over, taken = over - gain.nbytes, True
        return taken

    def halve(self, life: _Life, place: int) -> None:
        """Drop a value behind a place and make it again from what it was gathered from; terms stay summed."""
        if not -1 < life.start <= place < life.end:
            return
        back = life.reads[bisect.bisect_right(life.reads, place)]
        reshards = self._moves(life.value, back) if back < len(self.resharded.statements) else None
        if reshards and not any(self.values[reshard.source].sharding.partial for reshard in reshards):
            self._take(_Gain(life, back, reshards, 0, 0.0))

    def _gain(self, life: _Life, peak: Peak) -> _Gain | None:
        """What dropping a value until its next read saves; None if that is now, or it cannot be made again."""
        at = bisect.bisect_left(life.reads, peak.place)
        back = life.reads[at]
        at_once = back == peak.place or back == len(self.resharded.statements) or life.value in self._seen_through
        reshards = None if at_once else self._moves(life.value, back)
        if not reshards:
            return None
        root = self._life_for(reshards[0].source, back)
        kept_until = life.reads[at - 1] if at else life.start
        saved = self.nbytes(life.value) - (self.nbytes(root.value) if root.end < peak.place else 0)
        if saved <= 0 or self._most(root.value, root.end + 1, kept_until) + self.nbytes(root.value) >= peak.nbytes:
            return None
        between = sum([self.nbytes(reshard.target) for reshard in reshards[:-1]])
        if between and self._most(life.value, back, back) + between >= peak.nbytes:
            return None
        seconds = sum(map(self.resharded.seconds, reshards))
        if not at:  # It was made ahead of its need.
            seconds -= self.resharded.seconds(reshards[-1])
        return _Gain(life, back, reshards, saved, seconds)

    def _moves(self, value: int, place: int) -> tuple[Reshard, ...] | None:
        """The reshards that make a value from what is there at a statement, or what an op made, kept until then."""
        statement = self.made_by.get(value)
        if not isinstance(statement, Reshard) or statement.node is not None or statement.step.kind is StepKind.TRANSFER:
            return None
        maker = self.made_by.get(statement.source)
        if self._life_at(statement.source, place) is not None or isinstance(maker, Compute):
            return (statement,)
        before = self._moves(statement.source, place)
        return (*before, statement) if before is not None else None

    def _life_for(self, value: int, place: int) -> _Life:
        """The life of a value that there is at a statement, or that can go on until then."""
        return self._life_at(value, place) or self.lives[value][-1]

    def _most(self, value: int, start: int, end: int) -> int:
        """The most that ranks of a value hold between two steps."""
        mesh = self.values[value].sharding.mesh
        held = [held[start : end + 1] for kind, held in zip(self.kinds, self.held, strict=True) if mesh in kind]
        return max((max(part, default=0) for part in held), default=0)

    def _life_at(self, value: int, place: int) -> _Life | None:
        """The life of a value that there is at a statement; of an argument's view the argument's."""
        lives = self.lives.get(value) or self._arguments.get(value, ())
        return next((life for life in lives if life.covers(place)), None)

    def _take(self, gain: _Gain) -> None:
        """Drop a value after the read before, and make it again for the next one; later, if there was none before."""
        life, back = gain.life, gain.back
        at = life.reads.index(back)
        later, life.reads = life.reads[at:], life.reads[:at]
        self._add(life.value, life.end + 1, back - 1, -1)
        if not life.reads:
            self._delayed.add(life.value)
            self.lives[life.value].remove(life)
            self._add(life.value, life.start, life.start, -1)
        for reshard in gain.reshards:
            source = self._life_for(reshard.source, back)
            self._add(source.value, source.end + 1, back, 1)
            bisect.insort(source.reads, back)
            if reshard.target != life.value:
                self._begin(_Life(reshard.target, back, [], reshard))
                self._add(reshard.target, back, back, 1)
        self._begin(_Life(life.value, back, later, gain.reshards[-1]))

    def _begin(self, life: _Life) -> None:
        self.lives[life.value].append(life)
        self.lives[life.value].sort(key=lambda other: other.start)

    # writing

    def rewritten(self) -> ReshardedDefinition:
        """The definition with its reshards done again; itself where there are none."""
        again = sorted((life for life in self.all() if life.again is not None), key=lambda life: life.start)
        if not again:
            return self.resharded
        values, ids = list(self.values), {}
        for life in again:
            ids[life.value, life.start] = len(values)
            values.append(replace(self.values[life.value], id=len(values)))
        statements = tuple(self._steps(again, ids))
        outputs = tuple(self._named(v, len(self.resharded.statements), ids) for v in self.resharded.outputs)
        done = replace(self.resharded, values=tuple(values), statements=statements, outputs=outputs).without_unread()
        done.verify()
        return done

    def _steps(self, again: Sequence[_Life], ids: dict[tuple[int, int], int]) -> Iterator[Statement]:
        waiting: dict[int, list[_Life]] = {}
        for life in again:
            waiting.setdefault(life.start, []).append(life)
        for place, statement in enumerate(self.resharded.statements):
            new = {life.value: life for life in waiting.get(place, ())}
            for life in _sources_first(new):
                assert life.again is not None
                source = self._named(life.again.source, place, ids)
                why, line = self._asked(life, new, statement)
                yield replace(life.again, source=source, target=ids[life.value, place], why=why, line=line)
            if not (isinstance(statement, Reshard) and statement.target in self._delayed):
                yield self._renamed(statement, place, ids)

    def _asked(self, life: _Life, new: Mapping[int, _Life], reader: Statement) -> tuple[str, SourceLine]:
        """Who asks, and at which line, for a value that is made again before a statement, perhaps by way of others."""
        reshard = life.again
        assert reshard is not None
        if life.value in self._delayed:
            return reshard.why, reshard.line
        if isinstance(reader, Compute) and life.value in reader.inputs:
            node = self.resharded.graph.nodes[reader.node]
            return f"operand {reader.inputs.index(life.value)} of {node.name}, again", node.line
        target = next((other for other in new.values() if other.again and other.again.source == life.value), None)
        return (f"{reshard.why}, again", reshard.line) if target is None else self._asked(target, new, reader)

    def _named(self, value: int, place: int, ids: dict[tuple[int, int], int]) -> int:
        """The number of a value as it is there at a statement; views keep theirs."""
        life = self._life_at(value, place)
        return ids.get((value, life.start), value) if life is not None and life.again is not None else value

    def _renamed(self, statement: Statement, place: int, ids: dict[tuple[int, int], int]) -> Statement:
        if isinstance(statement, Reshard):
            return replace(statement, source=self._named(statement.source, place, ids))
        inputs = tuple(self._named(v, place, ids) for v in statement.inputs)
        return statement if inputs == statement.inputs else replace(statement, inputs=inputs)


def _sources_first(new: dict[int, _Life]) -> Iterator[_Life]:
    """Of values that are made again at one statement those that others are made from first."""
    left = dict(new)
    while left:
        value, life = next(iter(left.items()))
        while life.again is not None and life.again.source in left:
            value, life = life.again.source, left[life.again.source]
        del left[value]
        yield life
