"""Which ops of a plan follow from some inputs alone, and so need to be done once only while these stay the same."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from ..graph import Node
from ..ops.local import LocalCall
from ..ops.values import ScalarRef
from ..placement.factors import Placement
from ..propagation import ShardedDefinition, ends
from ..resharding import shard_bytes
from ..sharding.value import Sharding


class Need(NamedTuple):
    """A tensor, and a sharding in which it is read (reduced)."""

    tensor: int
    sharding: Sharding


@dataclass(frozen=True, slots=True)
class HalvedPlan:
    """A plan cut in two: what is done once, and the rest.

    given: how the inputs are passed that the first part takes.
    before: the numbers of the ops that are done once.
    free: those of ops that depend on no input; both parts may do them.
    needs: by node of the rest and place, the operands that come from the first part.
    ends: by output that the first part makes, where it is left.
    made: by tensor of the first part, how its op makes it (reduced), or how it is passed.
    makers: by tensor of the first part, the number of its op.
    follows: by tensor of the first part, the inputs that it follows from.
    """

    plan: ShardedDefinition
    given: Mapping[int, Sharding]
    before: frozenset[int]
    free: frozenset[int]
    needs: Mapping[int, Mapping[int, Need]]
    ends: Mapping[int, Need]
    made: Mapping[int, Need]
    makers: Mapping[int, int]
    follows: Mapping[int, frozenset[int]]

    @property
    def inputs(self) -> tuple[int, ...]:
        """The inputs that the first part takes."""
        return tuple(self.given)

    @property
    def handed_on(self) -> tuple[Need, ...]:
        """All that the rest reads of what the first part makes, each once."""
        needs = [need for operands in self.needs.values() for need in operands.values()]
        return tuple(dict.fromkeys([*needs, *self.ends.values()]))

    @property
    def kept(self) -> int:
        """Bytes on a rank of what is handed on."""
        return sum(map(self.nbytes, self.handed_on))

    @property
    def taken(self) -> int:
        """Bytes on a rank of the inputs."""
        return sum([self.nbytes(Need(i, sharding)) for i, sharding in self.given.items()])

    def nbytes(self, need: Need) -> int:
        """Bytes of a tensor on the rank that has most of it."""
        return shard_bytes(need.sharding, self.plan.graph.tensors[need.tensor].type)


def halved(
    plan: ShardedDefinition, given: Mapping[int, Sharding], late: frozenset[int] = frozenset(),
    handed: Mapping[Need, Need] | None = None,
) -> HalvedPlan:  # fmt: skip
    """The plan cut in two: what follows from these inputs alone, and the rest, to which the ops in `late` are left.

    `given` is how the inputs are passed, and `handed` what is handed on in the place of what the rest reads.

    (Partial evaluation by binding times, as in Jones, Gomard and Sestoft's book. But results that are larger than what
    they are made of, such as a bias that is broadcast, are left to the rest.)
    """
    found, handed = _Following(plan, given, late), handed or {}
    graph, there = plan.graph, found.there
    needs: dict[int, dict[int, Need]] = {}
    for node in graph.nodes:
        read = found.operands[node.id].items()
        operands = {place: handed.get(need, need) for place, need in read if need.tensor in there}
        if operands and node.id not in found.before:
            needs[node.id] = operands
    # An input that is an output, too, stays as it is passed, whatever a plan without its annotation makes of it.
    left = {i: Need(i, given[i]) if i in given else need for i, need in found.ends.items() if i in there}
    made = {i: Need(i, sharding) for i, sharding in given.items()}
    made |= {i: Need(i, need.sharding.reduced()) for n in found.before for i, need in found.results[n].items()}
    makers = {i: n for n in found.before for i in found.results[n]}
    before, free = frozenset(found.before), frozenset(found.free)
    return HalvedPlan(plan, given, before, free, needs, left, made, makers, found.follows)


class _Following:
    """The ops that follow from some inputs alone (`before`), and the tensors that are then `there`."""

    def __init__(self, plan: ShardedDefinition, inputs: Collection[int], late: frozenset[int]):
        self.graph, self.there, self.late = plan.graph, set(inputs), late
        self.follows = {i: frozenset((i,)) for i in inputs}
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
            if known and node.id not in self.late and _is_fixed(node, choice.placement):
                follows = not self.there.isdisjoint(node.inputs)
                (self.before if follows else self.free).add(node.id)
                (self.there if follows else made_of_nothing).update(node.outputs)
                sources = frozenset[int]().union(*(self.follows.get(i, ()) for i in node.inputs))
                self.follows.update(dict.fromkeys(node.outputs, sources))

    def _is_left(self, node: Node) -> bool:
        """Whether the rest does an op better: it alone reads the result, as it is made, and the result is larger."""
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
    """Whether an op gives the same results for the same tensors at each call: no random numbers, no scalar inputs."""
    if node.call.op.ring_schedule is not None or any(map(_has_scalars, node.call.args)):
        return False
    return placement.step is not None or _text(node, placement, 0) == _text(node, placement, 1)


def _has_scalars(arg: object) -> bool:
    return isinstance(arg, ScalarRef) or (isinstance(arg, tuple) and any(map(_has_scalars, arg)))


def _text(node: Node, placement: Placement, number: int) -> tuple[str, ...]:
    """The op's text on a rank, if its number in the program is `number`: random numbers depend on that."""
    names = [f"t{i}" for i in node.inputs]
    rank = placement.results[0].mesh.ranks[0]
    return LocalCall(node.call, names, placement.operands, placement.results, rank, number=number).text()
