"""How one op goes on from what a plan has so far: the options worth trying, and how tensors exist after each."""

from __future__ import annotations

import copy
import functools
import math
import operator
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from ..fast_dataclass import quickly_made
from ..graph import Graph, Node
from ..mesh import DeviceMesh
from ..ops.opdef import Call
from ..ops.rules import Rule
from ..ops.values import TensorType
from ..reshard.bounds import at_least
from ..reshard.search import plan
from ..sharding.layout import Layout
from ..sharding.value import Sharding
from .dominance import Table, table_of
from .factors import Placement, reduces
from .operand_layouts import Available, Setting, setting_of
from .options import Option, options
from .owing import Owing

# Costs that differ by less than this many seconds (half a byte on the wire) are equal.
EPSILON = 1e-11


class Touched(NamedTuple):
    """Facts about one of the tensors that an op reads or makes.

    `read_again`: a later op, or the outside, reads it. `owed` is the part of its reduction that it will need, seen from
    before the op, and `owes` from after it (`Owing.shares`). `streamed`: a dim of it is bound to a stream.
    """

    type: TensorType
    annotation: Sharding | None
    is_input: bool
    read_again: bool
    owed: float
    owes: float
    streamed: bool

    @property
    def unplaced(self) -> bool:
        """Whether it is an input without an annotation, which is whole on every rank of every mesh."""
        return self.is_input and self.annotation is None


@quickly_made
@dataclass(frozen=True, slots=True, eq=False)
class Kind:
    """What an op's options depend on, but for where its operands are and what is wanted; one object for equal ones.

    `tensors` are the distinct operands, `read` of them, then the results; `operands[i]` is the place of operand i among
    them. For each of the tensors `tables` number the ways in which it exists, and `read_again` tells whether it is.
    `said` are the results' annotations. `unplaced`: some operand is an input without an annotation.
    """

    call: Call
    rule: Rule
    mesh: DeviceMesh
    operands: tuple[int, ...]
    tensors: tuple[Touched, ...]
    reductions: tuple[Layout, ...]
    read: int
    tables: tuple[Table, ...]
    said: tuple[Sharding | None, ...]
    read_again: tuple[bool, ...]
    unplaced: bool

    @property
    def may_move(self) -> bool:
        """Whether thorough searches may find placements by moving axes between factors (`votes.reassigned`)."""
        return len(self.rule.operands) > 1 and not self.reductions and reduces(self.rule)

    @property
    def in_chunks(self) -> bool:
        """Whether the user cuts a dim of one of the tensors into chunks (a stream)."""
        return any([touched.streamed for touched in self.tensors])


@quickly_made
@dataclass(frozen=True, slots=True, eq=False)
class Role:
    """An op's kind and what is wanted of each of its tensors; one object for equal ones."""

    kind: Kind
    wanted: tuple[Available, ...]

    def setting(self, known: Sequence[Available], thorough: int) -> Setting:
        """The setting in which the distinct operands are known in these shardings."""
        kind = self.kind
        return setting_of(
            kind.call, kind.rule, kind.mesh, self.operands(known), self.wanted[kind.read :],
            tuple([said is not None for said in kind.said]),
            kind.reductions,
            thorough,
        )  # fmt: skip

    def operands(self, held: Sequence[Available]) -> tuple[Available, ...]:
        """The shardings of each operand, given those of the distinct ones."""
        if not self.kind.unplaced:
            return tuple([held[i] for i in self.kind.operands])
        return tuple([self._here(i, held[i]) for i in self.kind.operands])

    def _here(self, place: int, available: Available) -> Available:
        touched, mesh = self.kind.tensors[place], self.kind.mesh
        if touched.unplaced and all(s.mesh != mesh for s in available):
            return (Sharding.replicated(mesh, touched.type.ndim), *available)
        return available


@functools.lru_cache(maxsize=1 << 13)
def _kind(
    call: Call, rule: Rule, mesh: DeviceMesh, operands: tuple[int, ...], tensors: tuple[Touched, ...],
    reductions: tuple[Layout, ...],
) -> Kind:  # fmt: skip
    """The kind of these facts; equal kinds are one object."""
    read, tables = len(tensors) - len(call.results), tuple([table_of(t.type) for t in tensors])
    said, again = tuple([t.annotation for t in tensors[read:]]), tuple([t.read_again for t in tensors])
    unplaced = any([t.unplaced for t in tensors[:read]])
    return Kind(call, rule, mesh, operands, tensors, reductions, read, tables, said, again, unplaced)


role_of = functools.lru_cache(maxsize=1 << 13)(Role)


class Growth(NamedTuple):
    """One option of an op in a plan.

    `seconds` is what it adds to the plan, with what unreduced sums will need. `codes[i]` is the number, in the kind's
    tables, of how the i-th of the op's tensors then exists; of () if it is not read again. `runner_up` is the best of
    the op's other options.
    """

    option: Option
    runner_up: Option | None
    seconds: float
    codes: tuple[int, ...]


class Ways:
    """The ways in which an op can go on from operands that exist as `available`; one object for equal ones."""

    def __init__(self, role: Role, setting: Setting, available: tuple[Available, ...]):
        kind = role.kind
        self.role = role
        self.found = options(setting, role.operands(available), kind.operands)
        rows = zip(kind.tables, kind.read_again, available, strict=False)
        self._before = [table.numbers[found if again else ()] for table, again, found in rows]
        self._owed_before = self._owed(available, [touched.owed for touched in kind.tensors])
        self._owed_after: list[dict[int, float]] = [{} for _ in kind.tensors]
        self._best: dict[int, tuple[Growth, ...]] = {}

    def best(self, width: int) -> tuple[Growth, ...]:
        """The cheapest growths that no other reaches by resharding at no greater cost."""
        count = min(max(width, 2), len(self.found))
        if count not in self._best:
            self._best[count] = self._unreached(count)
        return self._best[count][:width]

    def _unreached(self, count: int) -> tuple[Growth, ...]:
        first, second = self.found[0], self.found[1] if len(self.found) > 1 else None
        grown = [self._growth(option, second if option is first else first) for option in self.found[:count]]
        grown.sort(key=_seconds)
        kept = list[Growth]()
        for growth in grown:
            if not _is_reached(growth, self.role.kind.tables, kept):
                kept.append(growth)
        return tuple(kept)

    def _growth(self, option: Option, other: Option | None) -> Growth:
        codes, known = self._codes(option.placement), self._owed_after
        owed = 0.0
        for place, code in enumerate(codes):
            left = known[place].get(code)
            owed += self._owing(place, code) if left is None else left
        return Growth(option, other, option.seconds + (owed - self._owed_before), codes)

    def _owing(self, place: int, code: int) -> float:
        """The least seconds that reducing the tensor at this place will take after the op."""
        touched, found = self.role.kind.tensors[place], self.role.kind.tables[place].ways[code]
        left = self._owed_after[place][code] = self._reducing(place, found, touched.owes)
        return left

    def _owed(self, available: Sequence[Available], shares: Sequence[float]) -> float:
        """The least seconds that reducing these tensors takes; those that exist reduced as well need none."""
        rows = enumerate(zip(available, shares, strict=False))
        return sum([self._reducing(place, found, share) for place, (found, share) in rows])

    def _reducing(self, place: int, found: Available, share: float) -> float:
        if not (found and found[0].partial and all([s.partial for s in found])):
            return 0.0
        touched, asked = self.role.kind.tensors[place], self.role.wanted[place]
        return (share if found[0].reduce == "sum" else 1.0) * _reduction(touched.type, asked, found[0])

    def _codes(self, placement: Placement) -> tuple[int, ...]:
        """How the op's tensors exist after a placement, as numbers in their tables."""
        kind, codes = self.role.kind, self._before.copy()
        tables, again = kind.tables, kind.read_again
        for place, needed in zip(kind.operands, placement.operands, strict=True):
            if again[place]:
                codes[place] = tables[place].grown(codes[place], needed)
        for said, made in zip(kind.said, placement.results, strict=True):
            place = len(codes)
            way = ((made,) if said is None or said is made else (said, made)) if again[place] else ()
            codes.append(tables[place].numbers[way])
        return tuple(codes)


_seconds = operator.attrgetter("seconds")
_ways = functools.lru_cache(maxsize=1 << 14)(Ways)


def growths(role: Role, setting: Setting, available: tuple[Available, ...], width: int) -> tuple[Growth, ...]:
    """The best ways to go on over an op, cheapest first; `available[i]` is how the i-th distinct operand exists."""
    return _ways(role, setting, available).best(width)


def _is_reached(growth: Growth, tables: Sequence[Table], kept: Iterable[Growth]) -> bool:
    """Whether one of the others can be resharded into this growth at no greater cost."""
    limit, wanted = growth.seconds + EPSILON, growth.codes
    for other in kept:
        room = limit - other.seconds
        for table, have, want in zip(tables, other.codes, wanted, strict=True):
            if have != want:
                known = table.costs[want].get(have)
                room -= table.cost(have, want, room) if known is None else known
                if room < 0.0:
                    break
        else:
            return True
    return False


@functools.lru_cache(maxsize=1 << 14)
def _reduction(ttype: TensorType, wanted: Available, sharding: Sharding) -> float:
    """The least seconds to somewhere that a tensor is reduced: where it is, or where it is wanted on its mesh."""
    size, found = ttype.dtype.itemsize, math.inf
    targets = [sharding.reduced(), *(w for w in wanted if w.mesh == sharding.mesh)]
    for least, _, target in sorted([(at_least(sharding, w, ttype.shape, size), k, w) for k, w in enumerate(targets)]):
        if least >= found:
            break
        path = plan(sharding, target, ttype.shape, size)
        found = min(found, path.seconds) if path is not None else found
    return found


class Occurrence(NamedTuple):
    """A kind where it occurs in a graph: its tensors' numbers, and by tensor the next op that reads it, if any."""

    kind: Kind
    tensors: tuple[int, ...]
    next_read: tuple[int | None, ...]


class Roles:
    """The kind of every node of a graph, in order."""

    def __init__(self, graph: Graph, meshes: Mapping[int, DeviceMesh]):
        self.graph, self.meshes = graph, meshes
        self._inputs = set(graph.input_tensors)
        self._streamed = graph.streamed()
        self._known: dict[Any, Kind] = {}
        # Outputs are read after all nodes.
        self._next_read = dict.fromkeys(graph.outputs, len(graph.nodes))
        self._owing = Owing(graph)
        self.parts = [self._part(node) for node in reversed(graph.nodes)][::-1]
        self._near: dict[int, list[tuple[bool, ...]]] = {}

    def near(self, horizon: int) -> Sequence[tuple[bool, ...]]:
        """By op whether each of its tensors is read again before the horizon, so many ops later."""
        if horizon not in self._near:
            self._near[horizon] = [
                tuple([then is not None and then <= now + horizon for then in part.next_read])
                for now, part in enumerate(self.parts)
            ]
        return self._near[horizon]

    def holding(self, places: Mapping[int, Sharding]) -> Roles:
        """The same with these tensors annotated as well."""
        held = copy.copy(self)
        held.parts = [_holding(p, places) if not places.keys().isdisjoint(p.tensors) else p for p in self.parts]
        return held

    def _part(self, node: Node) -> Occurrence:
        read = tuple(dict.fromkeys(node.inputs))
        tensors = (*read, *node.outputs)
        operands = tuple(map(read.index, node.inputs))
        next_read = tuple(map(self._next_read.get, tensors))
        owes = self._owing.shares(tensors)
        self._owing.meet(node)
        said, inputs = self.graph.annotations, self._inputs
        rows = zip(tensors, next_read, self._owing.shares(tensors), owes, strict=True)
        # The facts of `Touched` but the type.
        streamed = self._streamed
        touched = tuple(
            [(said.get(i), i in inputs, then is not None, owed, after, i in streamed) for i, then, owed, after in rows]
        )
        self._next_read.update(dict.fromkeys(read, node.id))
        # The tensors' types follow from the call, which is cheaper to compare.
        key = (node.call, node.rule, self.meshes[node.id], operands, touched, self.graph.reductions.get(node.id, ()))
        kind = self._known.get(key)
        if kind is None:
            types = [self.graph.tensors[i].type for i in tensors]
            told = tuple(Touched(t, *facts) for t, facts in zip(types, touched, strict=True))
            kind = self._known[key] = _kind(*key[:4], told, key[5])
        return Occurrence(kind, tensors, next_read)


def _holding(part: Occurrence, places: Mapping[int, Sharding]) -> Occurrence:
    kind = part.kind
    rows = zip(kind.tensors, part.tensors, strict=True)
    tensors = tuple([touched._replace(annotation=places.get(i, touched.annotation)) for touched, i in rows])
    return part._replace(kind=_kind(kind.call, kind.rule, kind.mesh, kind.operands, tensors, kind.reductions))
