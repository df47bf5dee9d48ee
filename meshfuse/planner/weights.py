"""Estimates of what a plan would save with weights gathered, or left where they are, made without planning anew.

Tensor parallelism (Megatron-LM: Shoeybi et al. 2019) reduces a sum of all rows for every few weights that are split.
From some number of rows on it takes less to bring these weights together and to split the rows instead, as FSDP does
(ZeRO: Rajbhandari et al. 2020). Which plan is best, a search finds out; these tell whether it is worth its time.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from ..costs import all_gather
from ..graph import Node
from ..placement.factors import Placement
from ..placement.options import cheapest
from ..propagation import ShardedDefinition
from ..reshard.prices import link_over
from ..reshard.steps import group_size
from ..resharding import shard_bytes
from ..sharding.layout import Split, axes, is_prefix
from ..sharding.value import Sharding


def saved_by_gathering(plan: ShardedDefinition) -> float:
    """How much of the time in which a plan reduces sums and gathers rows gathering weights would save: from 0 to 1.

    Weights are taken to be gathered along one axis, where that takes less. The axis where it saves most counts. Sums
    that no op reads, such as most gradients of weights, do not.
    """
    along = [_Parts(plan, axis) for axis in _reduced_over(plan)]
    saved = max([parts.saved() for parts in along], default=0.0)
    return saved / sum([parts.spent() for parts in along]) if saved else 0.0


def saved_by_leaving(plan: ShardedDefinition) -> float:
    """How much of the time in which a plan gathers weights bringing rows to them would save: from 0 to 1.

    Weights are taken to be left where that takes less, over all axes that they are gathered over, or over one of them.
    (In the backward both are needed once more, which changes nothing.)
    """
    unread, spent, saved = set(plan.graph.input_tensors), 0.0, 0.0
    for node, choice in zip(plan.graph.nodes, plan.choices, strict=True):
        for i, need in zip(node.inputs, choice.placement.operands, strict=True):
            if i in unread:
                unread.discard(i)
                lost = _lost(plan.shardings[i], need)
                if lost and len(node.inputs) > 1:
                    nbytes = shard_bytes(need, plan.graph.tensors[i].type)
                    gathering = _gathering(lost, need, nbytes)
                    spent += gathering
                    ways = dict.fromkeys([lost, *[(split,) for split in lost]])
                    left = min([_leaving(node, choice.placement, lost, way, nbytes) for way in ways])
                    saved += max(gathering - left, 0.0)
    return saved / spent if saved else 0.0


def _lost(sharding: Sharding, need: Sharding) -> tuple[Split, ...]:
    """The axes over which dims of a tensor are gathered; of dims that move in another way none."""
    if sharding is need or sharding.mesh != need.mesh:
        return ()
    rows = zip(sharding.dims, need.dims, strict=True)
    return tuple([split for old, new in rows if is_prefix(new, old) for split in axes(old[len(new) :])])


def _leaving(
    node: Node, placement: Placement, lost: tuple[Split, ...], left: tuple[Split, ...], nbytes: float
) -> float:  # fmt: skip
    """Seconds where a weight that was gathered, to so many bytes, is left split over some of the axes lost."""
    rest = tuple([split for split in lost if split not in left])
    gathering = _gathering(rest, placement.results[0], nbytes / group_size(left)) if rest else 0.0
    return gathering + _bringing_rows(node, placement, left)


def _bringing_rows(node: Node, placement: Placement, lost: tuple[Split, ...]) -> float:
    """Seconds to gather the rows that an op reads beside a weight, or to scatter those that it makes, if fewer."""
    pairs = zip((*node.call.types, *node.call.results), (*placement.operands, *placement.results), strict=True)
    rows = [shard_bytes(sharding, ttype) for ttype, sharding in pairs if sharding.used().issuperset(lost)]
    return _gathering(lost, placement.results[0], group_size(lost) * min(rows, default=0.0))


def _gathering(over: tuple[Split, ...], sharding: Sharding, nbytes: float) -> float:
    """Seconds to gather so many bytes over axes of a mesh."""
    return all_gather(link_over(sharding.mesh, over), group_size(over), nbytes)


def _reduced_over(plan: ShardedDefinition) -> list[str]:
    """The axes over which there are sums that ops read."""
    left, sums = set(plan.graph.outputs), dict[Sharding, None]()
    for node, choice in zip(plan.graph.nodes, plan.choices, strict=True):
        for i, made in zip(node.outputs, choice.placement.results, strict=True):
            if made.partial and i not in left:
                sums[made] = None
    return list(dict.fromkeys(split.axis for made in sums for split in made.partial if split.axis))


@dataclass(slots=True, eq=False)
class _Part:
    """Ops between which tensors stay split along an axis, such as a layer's attention, forward and backward.

    Seconds to reduce its sums and to gather the rows that it reads; and those that it would take to gather the weights
    that it reads, and to scatter the gradients that it makes.
    """

    reducing: float = 0.0
    gathering: float = 0.0
    joined: _Part | None = None

    def root(self) -> _Part:
        """The part that this one and others have become."""
        found = self
        while found.joined is not None:
            found = found.joined
        return found

    def join(self, other: _Part | None) -> _Part:
        """Both as one."""
        mine = self.root()
        its = mine if other is None else other.root()
        if mine is not its:
            its.joined = mine
            mine.reducing += its.reducing
            mine.gathering += its.gathering
        return mine


class _Along(NamedTuple):
    """What of an op lies along an axis in a placement: is split or unreduced.

    read, whole: the operands that do, by their places, and those that do not.
    made: for each result, whether it does; sums: whether it is unreduced along the axis.
    any: whether an operand or result lies along it.
    adds: whether all that do are unreduced, and there are several operands of them.
    """

    read: tuple[int, ...]
    whole: tuple[int, ...]
    made: tuple[bool, ...]
    sums: tuple[bool, ...]
    any: bool
    adds: bool


class _Parts:
    """The parts of a plan along an axis.

    `_of[i]` is the part of a tensor that is split or unreduced along the axis, `_of[~i]` the part that reads tensor i
    after it was reduced.
    """

    def __init__(self, plan: ShardedDefinition, axis: str):
        self.graph, self.shardings, self.axis = plan.graph, plan.shardings, axis
        self._inputs, self._left = set(plan.graph.input_tensors), set(plan.graph.outputs)
        self._of: dict[int, _Part] = {}
        self._sums: dict[int, Sharding] = {}
        self._rows: set[tuple[int, Sharding]] = set()  # that were gathered
        self._known: dict[int, _Along] = {}  # of equal ops, which have the same placement
        for node, choice in zip(plan.graph.nodes, plan.choices, strict=True):
            placement = choice.placement
            along = self._known.get(id(placement)) or self._learned(placement)
            if along.any:
                self._add(node, placement, along)
            elif not self._of.keys().isdisjoint(node.inputs):
                self._read_whole(node, placement, along, None)

    def spent(self) -> float:
        """Seconds in which sums are reduced and rows gathered along the axis."""
        return sum([part.reducing for part in self._roots()])

    def saved(self) -> float:
        """How many of these seconds gathering weights would save."""
        return sum([max(part.reducing - part.gathering, 0.0) for part in self._roots()])

    def _roots(self) -> Iterable[_Part]:
        return dict.fromkeys([part.root() for part in self._of.values()])

    def _add(self, node: Node, placement: Placement, along: _Along) -> None:
        part, sums = None, self._sums
        places = [
            self._reduced(i, need) if i in sums and not self._is_sum(need) else i
            for i, need in [(node.inputs[k], placement.operands[k]) for k in along.read]
        ]
        # Sums that are added, as in layers with residuals, belong to the part of the one made last.
        for place in [max(places)] if along.adds else places:
            part = (self._of.get(place) or self._begun(place)).join(part)
        for k, i in enumerate(node.outputs):
            if along.made[k]:
                self._of[i] = part = part or _Part()
                if along.sums[k]:
                    sums[i] = placement.results[k]
                elif i in self._left:
                    part.root().gathering += self._gathered(i)
        self._read_whole(node, placement, along, part)

    def _read_whole(self, node: Node, placement: Placement, along: _Along, part: _Part | None) -> None:
        """Count what brings tensors together that an op reads as they are not along the axis."""
        for k in along.whole:
            i, need = node.inputs[k], placement.operands[k]
            if i in self._sums:
                self._reduced(i, need)
            elif i in self._of and i not in self._inputs and (i, need) not in self._rows:
                self._rows.add((i, need))
                (part or self._of[i]).root().reducing += self._seconds(self.shardings[i], need, i)

    def _learned(self, placement: Placement) -> _Along:
        """What lies along the axis in an op's placement."""
        operands, made = (tuple(map(self._is_along, side)) for side in (placement.operands, placement.results))
        terms, sums = (tuple(map(self._is_sum, side)) for side in (placement.operands, placement.results))
        read, whole = (tuple([k for k, is_along in enumerate(operands) if is_along == of]) for of in (True, False))
        adds = len(read) > 1 and (operands, made) == (terms, sums)
        found = self._known[id(placement)] = _Along(read, whole, made, sums, any((*operands, *made)), adds)
        return found

    def _is_along(self, sharding: Sharding) -> bool:
        """Whether a tensor is split or unreduced along the axis."""
        return any([split.axis == self.axis for split in sharding.used()])

    def _is_sum(self, sharding: Sharding) -> bool:
        """Whether a tensor is unreduced along the axis."""
        return any([split.axis == self.axis for split in sharding.partial])

    def _begun(self, place: int) -> _Part:
        """A new part, of the first op that reads this tensor along the axis."""
        part = self._of[place] = _Part()
        if place in self._inputs:
            part.gathering += self._gathered(place)
        return part

    def _reduced(self, tensor: int, need: Sharding) -> int:
        """The number in `_of` under which a reduced sum is read. The reduction counts once, where the sum is made."""
        if ~tensor not in self._of:
            self._of[~tensor] = _Part()
            self._of[tensor].root().reducing += self._seconds(self._sums[tensor], need, tensor)
        return ~tensor

    def _seconds(self, have: Sharding, need: Sharding, tensor: int) -> float:
        """Seconds to bring a tensor from one sharding to another."""
        ttype = self.graph.tensors[tensor].type
        return cheapest((have,), need, ttype.shape, ttype.dtype.itemsize)

    def _gathered(self, tensor: int) -> float:
        """Seconds to gather a tensor along the axis, or to scatter it there: as long."""
        sharding = self.shardings[tensor]
        axis = Split(sharding.mesh.axis_size(self.axis), self.axis)
        return _gathering((axis,), sharding, (axis.size or 1) * shard_bytes(sharding, self.graph.tensors[tensor].type))
