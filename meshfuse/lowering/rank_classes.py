"""Ranks that do the same, as one: a program is lowered, verified and played once for each class of ranks.

Along an axis of the mesh that is *alike*, coordinates differ only in which peers they name. Then the program of rank
r + t is that of rank r, with every rank that it names moved by t, and with other numbers in kernels' texts and offsets
of parts. (Digits of a coordinate, which sub-axes are, are moved each for itself, modulo their sizes. Where some digits
of an axis are alike and others are not, each counts as an axis here.) A class has the ranks that differ along such axes
alone; the first of them stands for it.

Why the programs' shape moves with the rank. A rank's program follows from the sharding of each value: how much it holds
of a dim, and with whom it exchanges. Where a layout cuts a dim evenly all ranks hold equally much, and a step among the
ranks of a sub-axis relates each of them to the others by their digits' differences alone: blocks of equal size, one
from and for each. So axes are alike but for those of uneven dims, of windows, rings and transfers, in which ranks have
neighbours, of exchanges of unequal pieces, and of rows that are routed. That is checked on programs as well: those of
the first and of the last coordinate of each axis must be equal up to the move, for the first and for the last class,
else ranks along the axis are told apart.

Why it is enough to verify one program of each class, with groups in place of their members. A group of a program must
be U x N: U the coordinates that some digits of alike axes run through, N some coordinates along the others. A move of
U's digits leaves it as it is, so that all of its members name the same group: those of one class at the same place of
the same program, and those of other classes as their own representatives do. Take the system whose ranks are classes,
and in which the communication of a group waits for the classes of N. If it ends, so does the whole: do each of its
steps for all moves at once. When a communication has all classes of N, each moved copy of it has all its members, as
they stand at the same place of their programs. So no rank waits in a circle; members have equal orders and sizes; and
by the same induction all ranks of a class are at the same place at the same time in a modelled run. Messages have two
classes for ends: one whose ends are of one class goes along an axis that is not alike then, by the rule above.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from ..mesh import DeviceMesh
from ..reshard.steps import Step, StepKind
from ..resharding import Reshard
from ..sharding import layout as lay
from ..sharding.layout import Layout, Split
from ..sharding.value import Sharding
from .blocks import block_exchange_dims
from .effects import effects
from .instructions import (
    Channel,
    Collective,
    CommunicationCall,
    Free,
    Instruction,
    Launch,
    SendRecv,
)
from .overlapped import ChunkLoop
from .segments import SegmentedDefinition

# By rank the instructions of its program.
Program = Callable[[int], Sequence[Instruction]]
Group = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Span:
    """What ranks a group has: of each alike axis (step, size) of the digit that it runs through, and where it stands.

    shape: equal for groups that are moved copies of one another. base: a member with 0 for all these digits.
    """

    shape: object
    base: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class RankClasses:
    """The ranks of a mesh by what they do. apart: the axes whose coordinates are told apart; others are alike.

    mesh: that of the program, but that an axis of which a part is told apart is several.
    """

    mesh: DeviceMesh
    apart: frozenset[str]
    _spans: dict[Group, Span | None] = field(default_factory=dict, repr=False)
    _channels: dict[Group, Channel] = field(default_factory=dict, repr=False)

    @property
    def alike(self) -> tuple[str, ...]:
        """The axes along which ranks do the same."""
        sizes = zip(self.mesh.names, self.mesh.shape, strict=True)
        return tuple(name for name, size in sizes if size > 1 and name not in self.apart)

    @property
    def representatives(self) -> tuple[int, ...]:
        """The first rank of each class."""
        sizes = zip(self.mesh.names, self.mesh.shape, strict=True)
        ranges = [range(size) if name in self.apart else (0,) for name, size in sizes]
        return tuple(self._rank(place) for place in itertools.product(*ranges))

    @property
    def size(self) -> int:
        """How many ranks a class has."""
        return math.prod(self.mesh.axis_size(axis) for axis in self.alike)

    def representative(self, rank: int) -> int:
        """The rank that stands for a rank."""
        return self._rank(self._fixed(self.mesh.coordinate(rank)))

    def channel(self, rank: int, call: CommunicationCall) -> Channel:
        """The channel of a representative's call, among classes: `call_channel` with groups for their members."""
        span = self.span(call.group)
        assert span is not None, f"ranks of a class differ in group {call.group}"
        if isinstance(call, Collective):
            if call.group not in self._channels:
                members = tuple(dict.fromkeys(map(self.representative, call.group)))
                self._channels[call.group] = Channel(span.shape, members)
            return self._channels[call.group]
        ends = tuple(map(self.representative, call.ends(rank)))
        return Channel((span.shape, ends), ends)

    def span(self, group: Group) -> Span | None:
        """What ranks a group has; None where it is no U x N, so that the axes which it runs along are not alike."""
        if group not in self._spans:
            self._spans[group] = self._spanned(group)
        return self._spans[group]

    def _spanned(self, group: Group) -> Span | None:
        places = [self.mesh.coordinate(rank) for rank in group]
        along = [sorted({place[d] for place in places}) for d in range(self.mesh.ndim)]
        digits = [None if name in self.apart else _digit(values, size)
                  for name, size, values in zip(self.mesh.names, self.mesh.shape, along, strict=True)]  # fmt: skip
        if any(found is None and name not in self.apart for name, found in zip(self.mesh.names, digits, strict=True)):
            return None
        moves = math.prod(size for _, size in filter(None, digits))
        others = {self._fixed(place) for place in places}
        if len(places) != moves * len(others):
            return None
        base = tuple(values[0] for values in along)
        alike = [name not in self.apart for name in self.mesh.names]
        shape = tuple(tuple(c - b if a else c for a, c, b in zip(alike, place, base, strict=True)) for place in places)
        return Span(shape, base)

    def _hindered(self, rank: int, call: CommunicationCall) -> set[str]:
        """The alike axes along which a call does not move with its rank.

        Its group must be U x N, and the ends of a message have the same coordinates along U.
        """
        if self.span(call.group) is None:
            return self._runs_along(call.group)
        return self._runs_along((rank, call.peer)) if isinstance(call, SendRecv) else set()

    def _runs_along(self, group: Group) -> set[str]:
        """The alike axes along which a group has several coordinates."""
        places = [self.mesh.coordinate(rank) for rank in group]
        return {a for a in self.alike if len({p[self.mesh.names.index(a)] for p in places}) > 1}

    def misfits(self, program: Program) -> set[str]:
        """The axes that programs show not to be alike."""
        found = set[str]()
        for rank in self.representatives:
            calls = [i for i in program(rank) if isinstance(i, CommunicationCall)]
            found.update(axis for call in calls for axis in self._hindered(rank, call))
        if found:
            return found
        ends = dict.fromkeys((self.representatives[0], self.representatives[-1]))
        for rank, axis in itertools.product(ends, self.alike):
            if self.shape_of(rank, program(rank)) != self.shape_of(last := self._at_end(rank, axis), program(last)):
                found.add(axis)
        return found

    def shape_of(self, rank: int, instructions: Iterable[Instruction]) -> list[object]:
        """A program without what differs between ranks of a class."""
        return [self._shape(i) for i in instructions]

    def _shape(self, i: Instruction) -> object:
        if isinstance(i, Free):
            return i
        if isinstance(i, Launch):
            return (i.kernel.name, i.kernel.work, i.kernel.written, i.inputs, i.outputs, i.kernel.results)
        if isinstance(i, CommunicationCall):
            span = self.span(i.group)
            ends = self.representative(i.peer) if isinstance(i, SendRecv) else -1
            return (i.kind, i.work, effects(i), i.payload, i.about.wire, i.about.axes, span and span.shape, ends)
        return (type(i), effects(i))

    def _fixed(self, place: tuple[int, ...]) -> tuple[int, ...]:
        """A coordinate with 0 along alike axes."""
        return tuple(c if name in self.apart else 0 for name, c in zip(self.mesh.names, place, strict=True))

    def _at_end(self, rank: int, axis: str) -> int:
        """The rank at the last coordinate of an axis."""
        place, at = list(self.mesh.coordinate(rank)), self.mesh.names.index(axis)
        place[at] = self.mesh.shape[at] - 1
        return self._rank(tuple(place))

    def _rank(self, place: tuple[int, ...]) -> int:
        number = 0
        for size, coordinate in zip(self.mesh.shape, place, strict=True):
            number = number * size + coordinate
        return self.mesh.ranks[number]


def _digit(values: Sequence[int], n: int) -> tuple[int, int] | None:
    """(step, size) of the digit of numbers below n that these run through, all others being fixed; None for others."""
    size = len(values)
    step = values[1] - values[0] if size > 1 else 1
    is_digit = all(v == values[0] + i * step for i, v in enumerate(values))
    return (step, size) if is_digit and not n % (step * size) and values[0] // step % size == 0 else None


def rank_classes(segmented: SegmentedDefinition, program: Program) -> RankClasses | None:
    """The classes of a program's ranks; None where values lie on several meshes, whose ranks are all told apart."""
    meshes = list(dict.fromkeys(value.sharding.mesh for value in segmented.resharded.values))
    if len(meshes) != 1:
        return None
    mesh, apart = _in_parts(meshes[0], set(_apart(segmented, meshes[0])))
    while True:
        found = RankClasses(mesh, apart)
        more = found.misfits(program)
        if not more:
            return found
        apart |= more


def _in_parts(mesh: DeviceMesh, apart: Collection[Split]) -> tuple[DeviceMesh, frozenset[str]]:
    """A mesh with an axis for each part that is told apart, or is between such, and the names of those told apart."""
    shape, names, found = list[int](), list[str](), set[str]()
    for axis, size in zip(mesh.names, mesh.shape, strict=True):
        here = [(split.pre, split.pre * (split.size or 1)) for split in apart if split.axis == axis]
        ends = sorted({1, size}.union(*here))
        if any(high % low for low, high in itertools.pairwise(ends)):  # Parts that overlap.
            here, ends = [(1, size)], [1, size]
        for low, high in itertools.pairwise(ends):
            name = axis if high // low == size else f"{axis}.{low}"
            shape.append(high // low)
            names.append(name)
            found.update([name] if any(a <= low and high <= b for a, b in here) else ())
        if size == 1:
            shape.append(1)
            names.append(axis)
    made = mesh if len(names) == mesh.ndim else DeviceMesh(tuple(shape), tuple(names), ranks=mesh.ranks)
    return made, frozenset(found)


def _apart(segmented: SegmentedDefinition, mesh: DeviceMesh) -> Iterator[Split]:
    """The axes, or parts of them, along which ranks hold unequally much, or have neighbours."""
    resharded, axes = segmented.resharded, set[str]()
    for sharding, shape in {(v.sharding, resharded.graph.shape(v.tensor)) for v in resharded.values}:
        axes.update(_uneven(sharding, shape))
    for step, shape in {(s.step, resharded.graph.shape(resharded.values[s.source].tensor))
                        for s in resharded.statements if isinstance(s, Reshard)}:  # fmt: skip
        if not _is_regular(step, shape):
            yield from _related(step, shape)
    for part in segmented.parts:
        if isinstance(part, ChunkLoop):
            axes.update(a for s in part.statements if isinstance(s, Reshard) for x in s.step.axes if (a := x.axis))
        elif not isinstance(part, Reshard):
            axes.update(s.axis for s in part.computes[0].placement.exchange if s.axis)
    yield from (Split(mesh.axis_size(axis), axis) for axis in axes.intersection(mesh.names))


def _uneven(sharding: Sharding, shape: Sequence[int]) -> Iterator[str]:
    for layout, n in zip(sharding.dims, shape, strict=True):
        if not lay.is_even(layout, n) or lay.is_cut_in_turn(layout):
            yield from (split.axis for split in layout if split.axis in sharding.mesh.names and split.axis)


def _related(step: Step, shape: Sequence[int]) -> Iterator[Split]:
    """The parts of axes whose digits say what ranks exchange in a step of unequal pieces, or with neighbours.

    Ranks of a group differ along the axes of the step alone. What one of them needs of another follows from these
    digits, and from those that the same dims are cut by; of all other dims they have the same before and after. In an
    exchange it follows from those digits alone that another stands for: what a digit cuts more finely, a rank has.
    """
    yield from (split for split in _digits_of(step, shape) if split.axis in step.src.mesh.names)


def _digits_of(step: Step, shape: Sequence[int]) -> list[Split]:
    before, after = step.src, step.dst
    if step.kind is StepKind.TRANSFER or len(before.dims) != len(after.dims):
        return [*itertools.chain(*before.dims, *after.dims), *before.partial, *after.partial]
    if step.kind is StepKind.EXCHANGE and step.window is None and step.only is None:
        cells = [_changed(*row) for row in zip(before.dims, after.dims, shape, strict=True)]
        if None not in cells:
            return [split for cell in cells for split in cell or ()]
    found = [*step.axes]
    for dim, (old, new) in enumerate(zip(before.dims, after.dims, strict=True)):
        is_moved = step.window is not None and step.window.changes(dim)
        if old != new or is_moved or (step.only is not None and step.only[0] == dim):
            found += (*old, *new)
    return found


def _changed(before: Layout, after: Layout, n: int) -> list[Split] | None:
    """The digits of a dim that are others before and after; None where the layouts have no common digits."""
    if not (lay.is_even(before, n) and lay.is_even(after, n)):
        return None
    found, old, new = list[Split](), [*lay.padded(before, n)[::-1]], [*lay.padded(after, n)[::-1]]
    while old and new:
        a, b = old.pop(), new.pop()
        size = min(a.size or 1, b.size or 1)
        if (a.size or 1) % size or (b.size or 1) % size:
            return None
        for split, rest in ((a, old), (b, new)):
            if split.size != size:
                rest.append(Split((split.size or 1) // size, split.axis, split.pre * size))
        a, b = Split(size, a.axis, a.pre), Split(size, b.axis, b.pre)
        found += [split for split in (a, b) if a.bound and a != b and split.bound]
    return found


def _is_regular(step: Step, shape: tuple[int, ...]) -> bool:
    """Whether blocks are equal, and each rank of a group has one from and for each."""
    if (
        step.kind in (StepKind.TRANSFER, StepKind.WINDOW, StepKind.EXCHANGE)
        or step.window is not None
        or step.only is not None
    ):
        return False
    group = step.group(step.src.mesh.ranks[0])
    return step.kind is not StepKind.ALL_TO_ALL or block_exchange_dims(step, shape, group) is not None
