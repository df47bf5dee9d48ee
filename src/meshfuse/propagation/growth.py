"""How one op goes on from what a plan has so far: the options worth trying, and what exists after each."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from ..graph import Graph, Node
from ..mesh import DeviceMesh
from ..ops.base import Call, Rule, TensorType
from ..resharding.planner import plan
from ..sharding.layout import Layout
from ..sharding.value import Sharding
from .choose import Available, Option, Setting, cheapest, options

# Costs that differ by less than this many seconds (half a byte on the wire) are equal.
EPSILON = 1e-11


class Touched(NamedTuple):
    """One of the tensors that an op reads or makes: its type, its annotation, and whether it is an input.

    `read_again` tells whether a later op, or the outside, reads it; `is_near` whether one does before the choice of
    how it exists is final.
    """

    type: TensorType
    annotation: Sharding | None
    is_input: bool
    read_again: bool
    is_near: bool

    @property
    def unplaced(self) -> bool:
        """An input that no annotation places is whole on every rank, so on every mesh."""
        return self.is_input and self.annotation is None


@dataclass(frozen=True, slots=True, eq=False)
class Kind:
    """All that an op's options depend on but where its operands are and what is wanted; one object for equal ones.

    `tensors` are the distinct operands, then the results; `operands[i]` is the place of operand i among them.
    """

    call: Call
    rule: Rule
    mesh: DeviceMesh
    operands: tuple[int, ...]
    tensors: tuple[Touched, ...]
    reductions: tuple[Layout, ...]
    thorough: bool

    @property
    def read(self) -> int:
        """How many of the tensors are operands."""
        return len(self.tensors) - len(self.call.results)


@dataclass(frozen=True, slots=True, eq=False)
class Role:
    """An op's kind and what is wanted of each of its tensors; one object for equal ones."""

    kind: Kind
    wanted: tuple[Available, ...]

    def setting(self, known: Sequence[Available], thorough: bool) -> Setting:
        """The setting in which the distinct operands are known in these shardings."""
        kind = self.kind
        return Setting(
            kind.call, kind.rule, kind.mesh, self.operands(known), self.wanted[kind.read :],
            tuple(t.annotation is not None for t in kind.tensors[kind.read :]),
            kind.reductions,
            thorough,
        )  # fmt: skip

    def operands(self, held: Sequence[Available]) -> tuple[Available, ...]:
        """The shardings of each operand, from those of the distinct ones."""
        return tuple(self._here(i, held[i]) for i in self.kind.operands)

    def _here(self, place: int, available: Available) -> Available:
        touched, mesh = self.kind.tensors[place], self.kind.mesh
        if touched.unplaced and all(s.mesh != mesh for s in available):
            return (Sharding.replicated(mesh, touched.type.ndim), *available)
        return available


_kind = functools.lru_cache(maxsize=1 << 13)(Kind)
role_of = functools.lru_cache(maxsize=1 << 13)(Role)


class Growth(NamedTuple):
    """One option of an op in a plan, and the seconds that it adds: those that unreduced sums will need count.

    `after[i]` is how the i-th of the op's tensors exists then, () where it is not read again. `runner_up` is the best
    of the op's other options.
    """

    option: Option
    runner_up: Option | None
    seconds: float
    after: tuple[Available, ...]


@functools.lru_cache(maxsize=1 << 14)
def growths(
    role: Role, available: tuple[Available, ...], known: tuple[Available, ...], width: int
) -> tuple[Growth, ...]:
    """The best of the ways to go on that none of the others reaches at no greater cost, cheapest first.

    `available[i]` is how the i-th distinct operand exists; `known[i]` how it does in some plan.
    """
    found = options(role.setting(known, role.kind.thorough and width > 1), role.operands(available), role.kind.operands)
    first, second = found[0], found[1] if len(found) > 1 else None
    grown = [_growth(role, available, o, second if o is first else first) for o in found[: max(width, 2)]]
    grown.sort(key=lambda growth: growth.seconds)
    types = tuple(t.type for t in role.kind.tensors)
    kept: list[Growth] = []
    for growth in grown:
        if not any(reaches(k.seconds, k.after, growth.seconds, growth.after, types) for k in kept):
            kept.append(growth)
    return tuple(kept[:width])


def _growth(role: Role, available: Sequence[Available], option: Option, other: Option | None) -> Growth:
    kind, after = role.kind, _after(role.kind, available, option)
    added = 0.0
    for touched, wanted, found in zip(kind.tensors, role.wanted, after, strict=True):
        added += _owed(touched.type, wanted, found)
    for touched, wanted, found in zip(kind.tensors, role.wanted, available, strict=False):
        added -= _owed(touched.type, wanted, found)
    return Growth(option, other, option.seconds + added, after)


def _after(kind: Kind, available: Sequence[Available], option: Option) -> tuple[Available, ...]:
    held: list[Available] = list(available)
    for place, needed in zip(kind.operands, option.placement.operands, strict=True):
        if needed not in held[place]:
            held[place] = (*held[place], needed)
    for touched, made in zip(kind.tensors[kind.read :], option.placement.results, strict=True):
        held.append((made,) if touched.annotation in (None, made) else (touched.annotation, made))
    return tuple(found if t.read_again else () for t, found in zip(kind.tensors, held, strict=True))


def _owed(kind: TensorType, wanted: Available, available: Available) -> float:
    """The seconds that a tensor's reduction will take at least, where it exists unreduced only."""
    if not available or not all(s.partial for s in available):
        return 0.0
    return _reduction(kind, wanted, available[0])


@functools.lru_cache(maxsize=1 << 14)
def _reduction(kind: TensorType, wanted: Available, home: Sharding) -> float:
    targets = [home.reduced(), *(w for w in wanted if w.mesh == home.mesh)]
    plans = [plan(home, target, kind.shape, kind.dtype.itemsize) for target in targets]
    return min(p.seconds for p in plans if p is not None)


def reaches(
    cost: float, held: Sequence[Available], limit: float, wanted: Sequence[Available], types: Sequence[TensorType]
) -> bool:
    """True where resharding turns what one plan holds into what another does, at no greater cost."""
    limit += EPSILON
    for have, need, kind in zip(held, wanted, types, strict=True):
        if have is not need and have != need:
            cost += conversion(have, need, kind)
            if cost > limit:
                return False
    return cost <= limit


@functools.lru_cache(maxsize=1 << 15)
def conversion(held: Available, wanted: Available, kind: TensorType) -> float:
    """Seconds to reshard what exists so that everything wanted does."""
    return sum(cheapest(held, sharding, kind.shape, kind.dtype.itemsize) for sharding in wanted)


class Roles:
    """The kinds of a graph's nodes, for a search in which choices are final after `horizon` ops."""

    def __init__(self, graph: Graph, meshes: Mapping[int, DeviceMesh], horizon: int, thorough: bool):
        self.graph, self.meshes, self.horizon, self.thorough = graph, meshes, horizon, thorough
        self._inputs = set(graph.input_tensors)
        self._known: dict[Any, Kind] = {}
        self._next_read = dict.fromkeys(graph.outputs, len(graph.nodes))
        self._of = [self._kind_of(node) for node in reversed(graph.nodes)][::-1]

    def kind(self, node: int) -> tuple[Kind, tuple[int, ...]]:
        """The kind of a node and its tensors' numbers."""
        return self._of[node]

    def _kind_of(self, node: Node) -> tuple[Kind, tuple[int, ...]]:
        read = tuple(dict.fromkeys(node.inputs))
        tensors = (*read, *node.outputs)
        operands = tuple(map(read.index, node.inputs))
        touched = tuple([self._touched(i, node.id) for i in tensors])
        self._next_read.update(dict.fromkeys(read, node.id))
        # The tensors' types follow from the call, which is cheaper to compare.
        key = (node.call, node.rule, self.meshes[node.id], operands, touched, self.graph.reductions.get(node.id, ()))
        kind = self._known.get(key)
        if kind is None:
            types = [self.graph.tensors[i].type for i in tensors]
            told = tuple(Touched(t, *facts) for t, facts in zip(types, touched, strict=True))
            kind = self._known[key] = _kind(*key[:4], told, key[5], self.thorough)
        return kind, tensors

    def _touched(self, tensor: int, now: int) -> tuple[Sharding | None, bool, bool, bool]:
        """The facts of `Touched` but the type. Outputs are read after all nodes."""
        then = self._next_read.get(tensor)
        near = then is not None and then <= now + self.horizon
        return self.graph.annotations.get(tensor), tensor in self._inputs, then is not None, near
