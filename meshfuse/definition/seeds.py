"""Seeds of definitions that are given none: another one for each, and the same on all of a definition's ranks.

A definition without a seed draws by the number that it has among those made without one, in the process of its first
rank. That process gives no number twice, so that no two definitions with the same first rank draw alike; the rank is
part of the seed, for those that share no rank. A rank whose script makes other definitions beside it has other numbers:
all go by the first one's.
"""

from __future__ import annotations

import hashlib
import itertools
from typing import TYPE_CHECKING

from .builder import DefinitionBuilder

if TYPE_CHECKING:
    from ..runtime.world import World

_numbers = itertools.count(1)


class Seed:
    """What a definition draws random numbers by: the seed that it is given, or one of its own (None)."""

    def __init__(self, given: int | None):
        self.given = given
        self._number = next(_numbers) if given is None else 0
        self._is_agreed, self._own = False, None

    def of(self, fd: DefinitionBuilder) -> int:
        """The seed. A definition's own follows from its first rank, and so from its annotations."""
        if self.given is not None:
            return self.given
        if self._own is None:
            self._own = _own(self._number, min(_ranks(fd), default=0))
        return self._own

    def agree(self, fd: DefinitionBuilder, world: World) -> None:
        """Take the number of the first rank, if the definition draws; all of its ranks do so at their first call."""
        ranks = _ranks(fd) or world.all_ranks
        draws = self.given is None and any(node.draws for node in fd.nodes)
        if draws and not self._is_agreed and world.rank in ranks and len(ranks) > 1:
            self._number, self._own = int(world.rendezvous.exchange_among(ranks, "seeds", str(self._number))[0]), None
        self._is_agreed = True


def _own(number: int, first_rank: int) -> int:
    """A seed of 63 bits: those that users give are hardly ever among them."""
    digest = hashlib.blake2b(f"{first_rank} {number}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


def _ranks(fd: DefinitionBuilder) -> list[int]:
    """The ranks of a definition's meshes, in order; none where it has no mesh, and is computed on every rank."""
    meshes = {id(a.mesh): a.mesh for a in fd.annotations.values() if a.mesh is not None}
    return sorted({rank for mesh in meshes.values() for rank in mesh.ranks})


def given_seed(fd: DefinitionBuilder) -> int | None:
    """The seed that a definition was given; None for none, and for a builder that draws nothing."""
    seed = getattr(fd, "_seed", None)
    return seed.given if isinstance(seed, Seed) else None
