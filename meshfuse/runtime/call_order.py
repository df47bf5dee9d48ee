"""The calls that ranks make together, as each rank remembers them: any two ranks must remember the same.

A program concerns the ranks of its meshes alone. So ranks 0 and 1 may run programs of their own while ranks 2 and 3 run
others, and all four together another one in between. Two ranks have the calls in common that both have a part in. These
are remembered once for all peers that they are common with, so that a call costs one line where all programs are on all
ranks.
"""

from __future__ import annotations

import copy
import json
import zlib
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

_FIRST_COMPARED = 4  # The call of some ranks before which they first compare the order of calls.


@dataclass(slots=True)
class History:
    """Calls in their order: how many, a digest of all and the names of the last ones."""

    calls: int = 0
    code: int = 0
    last: deque[str] = field(default_factory=lambda: deque(maxlen=256))

    def add(self, name: str) -> None:
        self.calls += 1
        self.code = zlib.crc32(name.encode(), self.code)
        self.last.append(name)

    @property
    def digest(self) -> str:
        return f"{self.calls} {self.code}"

    def text(self) -> str:
        """One line per call, the latest ones."""
        first = self.calls - len(self.last) + 1
        return "\n".join(f"call {number}: {name}" for number, name in enumerate(self.last, first))


@dataclass(slots=True)
class _Together:
    """What some ranks do together: how many calls, and the histories that these calls are part of."""

    calls: int
    histories: list[History]


class Calls:
    """The calls of one rank: a history for each set of peers that all of its calls are common with."""

    def __init__(self, rank: int, size: int):
        self.rank = rank
        self._common: list[tuple[frozenset[int], History]] = [(frozenset(range(size)) - {rank}, History())]
        self._together: dict[tuple[int, ...], _Together] = {}

    def add(self, ranks: tuple[int, ...], name: str) -> bool:
        """Note a call of these ranks, of which this is one.

        Returns whether it is one before which they compare.
        """
        found = self._together.get(ranks)
        if found is None:
            found = self._come_together(ranks)
        found.calls += 1
        for history in found.histories:
            history.add(name)
        return found.calls >= _FIRST_COMPARED and found.calls & (found.calls - 1) == 0

    def _come_together(self, ranks: tuple[int, ...]) -> _Together:
        """Note that these ranks do something together, which peers outside of them have no part in."""
        inside, split = frozenset(ranks), []
        for peers, history in self._common:
            parts = (peers & inside, peers - inside)
            split += [(part, history if part == peers else copy.deepcopy(history)) for part in parts if part]
        self._common = split
        self._together[ranks] = _Together(0, [])
        for members, together in self._together.items():
            together.histories = [history for peers, history in split if peers <= frozenset(members)]
        return self._together[ranks]

    def summary(self, ranks: Sequence[int]) -> str:
        """What these ranks compare: with whom of them this one has which calls in common."""
        rows = [(sorted((peers & {*ranks}) | {self.rank}), history.digest) for peers, history in self._common]
        return json.dumps(sorted(row for row in rows if len(row[0]) > 1))

    def text(self, peer: int) -> str:
        """The calls in common with a peer, one line for each."""
        return next((history.text() for peers, history in self._common if peer in peers), "")


def first_difference(ranks: Sequence[int], summaries: Sequence[str]) -> tuple[int, ...]:
    """The ranks of which the first remembers other calls in common with another of them than that one; none: ().

    The first of them takes all of its calls with each of the others to be common to all of them.
    """
    if len(set(summaries)) == 1:
        return ()
    common = {
        rank: {peer: (members, digest) for members, digest in json.loads(text) for peer in members}
        for rank, text in zip(ranks, summaries, strict=True)
    }
    for rank in ranks:
        for peer, (members, digest) in common[rank].items():
            if peer != rank and common[peer][rank][1] != digest:
                return (rank, *(member for member in members if member != rank))
    return ()
