"""Texts that one rank makes and the others take over, through the store of the job: plans, which take long to make.

The first rank to come for a text makes it. The others wait for it as long as it is alive and at it; if it gives the
text up, each makes its own.
"""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from typing import TypeVar

import torch.distributed as dist

from .deadlines import within
from .diagnosis import peers_gone, seconds_since, timed_out
from .job import Job
from .planning import plans
from .rendezvous import Rendezvous
from .roll_call import goodbye, roll_call
from .store import await_keys, text_there

T = TypeVar("T")
_KEPT = 4  # How many of its texts a rank leaves in the store. Ranks that work together are no further apart.
_LOOK, _STORE = 0.5, 5.0  # In seconds: between two looks at the maker, and to ask the store something.


@dataclass(slots=True)
class Handed:
    """A text that was handed over; None where there is none. If it is `mine` to make, this rank puts it here."""

    text: str | None
    mine: bool


class PlanHandover:
    """What this rank hands over to others, and takes over from them."""

    def __init__(self, world: Job, rendezvous: Rendezvous):
        self.world, self._rendezvous = world, rendezvous
        self._made: deque[str] = deque()

    @contextlib.contextmanager
    def text(self, key: str, ranks: Collection[int], what: str) -> Iterator[Handed]:
        """A context with the text of this key, which says all that it follows from; `what` is for errors.

        Where this rank is the first to come, it makes the text in the context, and hands it over at its end. Raises
        RankError where the maker is one of `ranks`, which need each other, and has ended, RankTimeout where it is
        stopped.
        """
        place = f"handed/{key}"
        maker = within(_STORE, lambda: int(self._store.compare_set(f"{place}/by", "", str(self.world.rank))))
        mine = maker == self.world.rank
        found = "" if maker is None else self._there(place) if mine else self._awaited(place, maker, ranks, what)
        handed = Handed(found or None, mine and not found)
        try:
            yield handed
        except BaseException:
            handed.text = None
            raise
        finally:
            if handed.mine:
                self._hand_over(place, handed.text or "")

    @property
    def _store(self) -> dist.Store:
        return self.world.store

    def _there(self, place: str) -> str:
        """The text that this rank has handed over before, "" for none."""
        return within(_STORE, lambda: text_there(self._store, place)) or ""

    def _hand_over(self, place: str, text: str) -> None:
        within(_STORE, lambda: self._store.set(place, text))
        self._made.append(place)
        while len(self._made) > _KEPT:
            old = self._made.popleft()
            if old not in self._made:
                # The text first: without `by`, another rank would take the text for its own and hand over nothing.
                within(_STORE, lambda old=old: [self._store.delete_key(key) for key in (old, f"{old}/by")])

    def _awaited(self, place: str, maker: int, ranks: Collection[int], what: str) -> str:
        """The text that another rank makes; "" where it makes none any more."""
        what = f"waiting for rank {maker}'s plan of {what}"
        start = last_look = time.monotonic()
        with self.world.plans.waiting_for(maker):
            while not self._is_there(place, maker, what):
                if self._is_given_up(place, maker, ranks, what):
                    return ""
                if seconds_since(last_look) > self.world.limit:
                    last_look = time.monotonic()
                    if not self._is_at_it(maker, what, start):
                        return ""
            # By now the maker may have taken it back.
            return self._answer_of(what, maker, lambda: text_there(self._store, place)) or ""

    def _is_there(self, place: str, maker: int, what: str) -> bool:
        return not self._answer_of(what, maker, lambda: await_keys(self._store, [place], _LOOK, lambda: None))

    def _is_given_up(self, place: str, maker: int, ranks: Collection[int], what: str) -> bool:
        """Whether nobody makes the text any more. RankError where a peer has failed, or a maker that is needed."""
        self.world.raise_if_failed(what)
        context = self.world.failure_context()
        within(1.0, lambda: context.peers.remember([maker]))
        if context.peers.gone([maker]) or self._answer_of(what, maker, lambda: goodbye(self._store, maker)) is not None:
            if maker in ranks:
                raise peers_gone(context, what, [maker])
            return True
        return not self._answer_of(what, maker, lambda: self._store.check([f"{place}/by"]))

    def _is_at_it(self, maker: int, what: str, start: float) -> bool:
        """Whether the maker, when asked, says that it plans. RankTimeout where it says nothing."""
        context = self.world.failure_context()
        mute = context.peers.silent_already([maker])
        answers = None if mute else roll_call(self._store, [maker])
        if not answers or answers[maker] is None:
            raise timed_out(context, what, [maker], seconds_since(start))
        return plans(answers[maker])

    def _answer_of(self, what: str, maker: int, action: Callable[[], T]) -> T:
        return self._rendezvous.query_store(what, [maker], action)
