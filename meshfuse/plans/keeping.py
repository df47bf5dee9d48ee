"""What the first of two halves hands on, where it must not be more than a rank was given, or than its memory holds.

What the rest reads, such as a gathered weight, is handed on as it is read where that is allowed. Else it is handed on
as its op makes it (a weight in its shards), and the rest brings it where it reads it, at every call. Else the op is
left to the rest, too.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from ..propagation import ShardedDefinition
from ..sharding.value import Sharding
from .binding_times import HalvedPlan, Need, halved


class _Share(NamedTuple):
    """Inputs, and all that is handed on of what follows from any of them: nothing follows from these and others."""

    inputs: frozenset[int]
    needs: tuple[Need, ...]


@dataclass(slots=True, eq=False)
class Keeping:
    """A plan that is cut in two, with more and more left to the rest.

    given: how the inputs are passed. late: ops that are left to the rest. handed: what is handed on in the place of
    what the rest reads.
    """

    plan: ShardedDefinition
    given: Mapping[int, Sharding]
    late: set[int] = field(default_factory=set)
    handed: dict[Need, Need] = field(default_factory=dict)

    def cut(self) -> HalvedPlan:
        """The plan cut in two as far as was decided."""
        return halved(self.plan, self.given, frozenset(self.late), self.handed)

    def within_given(self) -> HalvedPlan:
        """Cut so that a rank keeps no more of what follows from an input than it was given of it."""
        cut = self.cut()
        while over := [share for share in _shares(cut) if self._exceeds(cut, share)]:
            left = [self._leave(cut, share.needs) for share in over]
            assert None not in left, left  # The inputs, as they were given, are not too much.
            cut = self.cut()
        return cut

    def within(self, limit: float, peak: Callable[[HalvedPlan], float]) -> HalvedPlan:
        """Cut so that neither half holds more than `limit` bytes on a rank, as `peak` tells; as far as that helps."""
        best, number = (cut := self.cut()), 1
        least = peak(cut)
        while least > limit and self._leave_some(cut, number):
            cut, number = self.cut(), 2 * number
            if (found := peak(cut)) < least:
                best, least = cut, found
        return best

    def _exceeds(self, cut: HalvedPlan, share: _Share) -> bool:
        there = sum([cut.nbytes(Need(i, self.given[i])) for i in share.inputs])
        return sum(map(cut.nbytes, share.needs)) > there

    def _leave_some(self, cut: HalvedPlan, number: int) -> bool:
        """Leave more to the rest of so many that are handed on; False where nothing is left to leave."""
        left = list(cut.handed_on)
        for done in range(number):
            found = self._leave(cut, left)
            if found is None:
                return done > 0
            left.remove(found)
        return True

    def _leave(self, cut: HalvedPlan, needs: Sequence[Need]) -> Need | None:
        """Leave more to the rest of one of these, what saves most first: its moves, or else its op. None for none."""
        moved = {n: cut.nbytes(n) - _instead(cut, n, needs) for n in needs if _is_moved(cut, n)}
        made = {n: cut.nbytes(n) for n in needs if n.tensor in cut.makers}
        for ways in ({n: saved for n, saved in moved.items() if saved >= 0}, made, moved):
            if ways:
                found = max(ways, key=ways.__getitem__)
                self._put_off(cut, found, its_op=ways is made)
                return found
        return None

    def _put_off(self, cut: HalvedPlan, need: Need, its_op: bool) -> None:
        if its_op:
            self.late.add(cut.makers[need.tensor])
        else:
            self.handed[need] = cut.made[need.tensor]


def _is_moved(cut: HalvedPlan, need: Need) -> bool:
    """Whether it is handed on otherwise than it is made, for the rest to read; outputs must lie as they do."""
    return need != cut.made[need.tensor] and need not in cut.ends.values()


def _instead(cut: HalvedPlan, need: Need, needs: Sequence[Need]) -> int:
    """Bytes that are handed on in its place: none where this is handed on in any case."""
    made = cut.made[need.tensor]
    return 0 if made in needs else cut.nbytes(made)


def _shares(cut: HalvedPlan) -> list[_Share]:
    """What is handed on, by the inputs that it follows from."""
    found: list[_Share] = []
    for need in cut.handed_on:
        inputs = cut.follows[need.tensor]
        joined = [share for share in found if not inputs.isdisjoint(share.inputs)]
        found = [share for share in found if inputs.isdisjoint(share.inputs)]
        needs = itertools.chain.from_iterable([share.needs for share in joined])
        found.append(_Share(inputs.union(*(share.inputs for share in joined)), (*needs, need)))
    return found
