"""What of a plan follows from some inputs alone: it needs to be done but once while these stay as they are."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from ..graph import Node
from ..ops.base import ScalarRef
from ..ops.local import LocalCall
from ..propagation.factors import Placement
from ..propagation.outputs import ends
from ..propagation.sharded import ShardedDefinition
from ..sharding.value import Sharding


class Need(NamedTuple):
    """A tensor, and where it is read, its sums reduced."""

    tensor: int
    sharding: Sharding


@dataclass(frozen=True, slots=True)
class HalvedPlan:
    """A plan in two. `before` numbers the ops that are done once; `free` those that need no inputs, for either part.

    `needs[node][place]` is what another op reads of what is there before as this operand; `ends[i]` where output i ends
    that is there before.
    """

    plan: ShardedDefinition
    inputs: tuple[int, ...]
    before: frozenset[int]
    free: frozenset[int]
    needs: Mapping[int, Mapping[int, Need]]
    ends: Mapping[int, Need]

    @property
    def handed_on(self) -> tuple[Need, ...]:
        """All that the second part reads of the first, each once."""
        needs = [need for operands in self.needs.values() for need in operands.values()]
        return tuple(dict.fromkeys([*needs, *self.ends.values()]))

    @property
    def kept(self) -> int:
        """The bytes of what is handed on, on a rank."""
        return sum(map(self._nbytes, self.handed_on))

    @property
    def given(self) -> int:
        """The bytes of the inputs, on a rank."""
        return sum(self._nbytes(Need(i, self.plan.homes[i])) for i in self.inputs)

    def _nbytes(self, need: Need) -> int:
        kind = self.plan.graph.tensors[need.tensor].type
        return need.sharding.max_local_numel(kind.shape) * kind.dtype.itemsize


def halved(plan: ShardedDefinition, inputs: tuple[int, ...]) -> HalvedPlan:
    """The plan in what follows from these inputs alone, and the rest.

    (Partial evaluation of what is known early, as in Jones, Gomard and Sestoft's book; but what is larger than what it
    is made of, such as a bias that is broadcast, is left to the rest.)
    """
    found = _Following(plan, inputs)
    graph, there = plan.graph, found.there
    needs: dict[int, dict[int, Need]] = {}
    for node in graph.nodes:
        operands = {place: need for place, need in found.operands[node.id].items() if need.tensor in there}
        if operands and node.id not in found.before:
            needs[node.id] = operands
    left = {i: need for i, need in found.ends.items() if i in there}
    return HalvedPlan(plan, inputs, frozenset(found.before), frozenset(found.free), needs, left)


class _Following:
    """The ops of a plan that follow from some inputs alone, and the tensors that are there after them."""

    def __init__(self, plan: ShardedDefinition, inputs: tuple[int, ...]):
        self.graph, self.there = plan.graph, set(inputs)
        self.before, self.free = set[int](), set[int]()
        self.ends = {i: Need(i, end.reduced()) for i, end in ends(plan).items()}
        self.operands, self.results = dict[int, dict[int, Need]](), dict[int, dict[int, Need]]()
        self.readers: dict[int, list[tuple[int, Need]]] = {}
        for node, choice in zip(plan.graph.nodes, plan.choices, strict=True):
            self._note(node, choice.placement)
        self._follow(plan)
        for node in reversed(self.graph.nodes):
            if node.id in self.before and self._is_left(node):
                self.before.remove(node.id)
                self.there.difference_update(node.outputs)

    def _note(self, node: Node, placement: Placement) -> None:
        read = [Need(i, s.reduced()) for i, s in zip(node.inputs, placement.operands, strict=True)]
        self.operands[node.id] = dict(enumerate(read))
        self.results[node.id] = {i: Need(i, s) for i, s in zip(node.outputs, placement.results, strict=True)}
        for need in read:
            self.readers.setdefault(need.tensor, []).append((node.id, need))

    def _follow(self, plan: ShardedDefinition) -> None:
        made_of_nothing = set[int]()
        for node, choice in zip(plan.graph.nodes, plan.choices, strict=True):
            known = all(i in self.there or i in made_of_nothing for i in node.inputs)
            if known and _is_fixed(node, choice.placement):
                follows = not self.there.isdisjoint(node.inputs)
                (self.before if follows else self.free).add(node.id)
                (self.there if follows else made_of_nothing).update(node.outputs)

    def _is_left(self, node: Node) -> bool:
        """Whether an op is as well done by the rest: that alone reads what it makes, there, and that is larger."""
        made = self.results[node.id]
        reads = [read for i in made for read in self.readers.get(i, ())]
        if any(reader in self.before for reader, _ in reads):
            return False
        wanted = [*(need for _, need in reads), *(self.ends[i] for i in made if i in self.ends)]
        larger = self._nbytes(node.outputs) > self._nbytes(self.there.intersection(node.inputs))
        return larger and all(need == made[need.tensor] for need in wanted)

    def _nbytes(self, tensors: Collection[int]) -> int:
        return sum(self.graph.tensors[i].type.nbytes for i in tensors)


def _is_fixed(node: Node, placement: Placement) -> bool:
    """Whether an op makes the same of the same tensors at each call: it draws nothing and reads no scalar inputs."""
    if node.call.op.rounds is not None or any(map(_has_scalars, node.call.args)):
        return False
    return placement.move is not None or _text(node, placement, 0) == _text(node, placement, 1)


def _has_scalars(arg: object) -> bool:
    return isinstance(arg, ScalarRef) or (isinstance(arg, tuple) and any(map(_has_scalars, arg)))


def _text(node: Node, placement: Placement, number: int) -> tuple[str, ...]:
    """The op's text on a rank. Random numbers follow from the op's number."""
    names = [f"t{i}" for i in node.inputs]
    rank = placement.results[0].mesh.ranks[0]
    return LocalCall(node.call, names, placement.operands, placement.results, rank, number=number).text()
