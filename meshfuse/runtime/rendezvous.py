"""Where the ranks of a job meet, at the same places of their programs, and exchange short texts through its store."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import torch.distributed as dist

from ..errors import caller_line
from .call_order import Calls, first_difference
from .deadlines import Silent, bounded, is_of_torch, within
from .diagnosis import (
    SAME_PROGRAM,
    connection_lost,
    disagreement,
    failed,
    peer_failed,
    peers_gone,
    seconds_since,
    timed_out,
)
from .job import Communicator, Job
from .peers import MANY
from .planning import awaits_a_plan
from .roll_call import Failure, goodbye, text_of
from .store import await_keys, hosts_store

T = TypeVar("T")
_GRACE = 2.0  # Seconds that the store has to answer when a limit is over.
_COMPARING = "same"  # With what the names of meetings begin in which ranks compare.


@dataclass(slots=True)
class _Counters:
    """How often these ranks have met for each purpose: the same number on all of them, as they run the same program."""

    counts: dict[tuple[str, tuple[int, ...]], int] = field(default_factory=dict)

    def next(self, ranks: tuple[int, ...], what: str = "") -> int:
        self.counts[what, ranks] = self.counts.get((what, ranks), 0) + 1
        return self.counts[what, ranks]


class Rendezvous:
    """The meetings of this rank; `waiting` is the one that it is in, "" for none.

    Every wait ends after the world's limit, unless it is for a rank that plans: RankTimeout, or RankError where a peer
    is known to have failed before.
    """

    def __init__(self, world: Job):
        self.world = world
        self._counters = _Counters()
        self.waiting = ""

    def connect(self, group: Communicator, kind: str, make: Callable[[dist.Store], T]) -> T:
        """Make a backend's process group once all ranks of the group have come to make it.

        Each process group has its own name in the store: one that read the addresses of an earlier one would never
        connect.
        """
        name = f"group/{kind}/{'-'.join(map(str, group.ranks))}/{self._counters.next(group.ranks, kind)}"
        start = time.monotonic()
        self._arrive(name, group.ranks, f"connecting {group}")
        context = self.world.failure_context()
        context.peers.remember(group.ranks)
        try:
            return make(dist.PrefixStore(name, self.world.store))
        except RuntimeError as error:
            if not is_of_torch(error):
                raise
            raise failed(context, f"connecting {group}", group.ranks, error, start) from None

    def barrier(self) -> None:
        """Wait for all ranks of the world."""
        if self.world.size > 1:
            self._arrive(f"barrier/{self._counters.next(self.world.all_ranks)}", self.world.all_ranks, "barrier")

    def check_same(
        self,
        value: str,
        what: str,
        ranks: Sequence[int],
        detail: Callable[[], str] | None = None,
        do: str = SAME_PROGRAM,
    ) -> None:
        """Compare a short text over `ranks`, which all call this. Raises RankError on all of them where it differs.

        `what` says what is compared: ranks that are at different calls compare different things, and the error says
        that. `detail` gives a longer text for the error, of which the first line that differs is shown. `do` is the
        advice.
        """
        ranks = tuple(ranks)
        if len(ranks) < 2:
            return
        name, values = self._compared(value, what, ranks, do)
        if len(set(values)) == 1:
            return
        if detail is not None:
            values = self._texts(f"{name}/detail", ranks, f"comparing {what}", detail())
        raise disagreement(what, values, ranks, do)

    def compared(self, value: str, what: str, ranks: Sequence[int]) -> list[str]:
        """The short text of each of `ranks`, which all call this, and compare `what`; without others the own one.

        Raises RankError on all of them where ranks compare different things.
        """
        ranks = tuple(ranks)
        return [value] if len(ranks) < 2 else self._compared(value, what, ranks, SAME_PROGRAM)[1]

    def check_order(self, calls: Calls, ranks: tuple[int, ...]) -> None:
        """Compare over `ranks`, which all call this, the calls that any two of them have made together.

        Raises RankError on all of them where two remember other ones.
        """
        what = "the order of calls"
        name, summaries = self._compared(calls.summary(ranks), what, ranks, SAME_PROGRAM)
        found = first_difference(ranks, summaries)
        if found:
            first, other, *_ = found
            mine = calls.text(other if first == self.world.rank else first)
            texts = dict(zip(ranks, self._texts(f"{name}/detail", ranks, f"comparing {what}", mine), strict=True))
            raise disagreement(what, [texts[rank] for rank in sorted(found)], sorted(found))

    def _compared(self, value: str, what: str, ranks: tuple[int, ...], do: str) -> tuple[str, list[str]]:
        """The name of a meeting of these ranks, and the value of each of them.

        Raises RankError on all of them where ranks compare different things.
        """
        name = f"{_COMPARING}/{'-'.join(map(str, ranks))}/{self._counters.next(ranks)}"
        within(1.0, lambda: self.world.store.set(f"compares/{self.world.rank}", json.dumps([name, what, ranks])))
        values = self._texts(name, ranks, f"comparing {what}", f"{what}\n{value}")
        compared = [text.partition("\n")[0] for text in values]
        if len(set(compared)) > 1:
            raise disagreement("what comes next", [f"comparing {what}" for what in compared], ranks, do)
        return name, [text.removeprefix(f"{what}\n") for text in values]

    def _texts(self, name: str, ranks: tuple[int, ...], what: str, text: str) -> list[str]:
        return [data.decode() for data in self._share(name, ranks, what, text)]

    def any(self, action: Callable[[], bool], what: str, ranks: Sequence[int]) -> bool:
        """Whether `action` gives True on any of `ranks`, which all call this.

        If it raises on one rank, the others raise RankError: that rank's script may catch the error, and they would
        wait. A rank without others does not ask any.
        """
        ranks = tuple(ranks)
        if len(ranks) < 2:
            return action()
        name = f"any/{'-'.join(map(str, ranks))}/{self._counters.next(ranks)}"
        try:
            mine = "1" if action() else "0"
        except Exception as error:
            text = text_of(error)
            within(1.0, lambda: self.world.store.set(f"{name}/{self.world.rank}", text))
            raise
        values = self._share(name, ranks, what, mine)
        for rank, value in zip(ranks, values, strict=True):
            if value not in (b"0", b"1"):
                raise peer_failed(self.world.failure_context(), what, Failure(rank, value.decode(), primary=True))
        return b"1" in values

    def exchange_among(self, ranks: Sequence[int], what: str, value: str) -> list[bytes]:
        """What each of `ranks`, which all call this, gives as `value`."""
        ranks = tuple(ranks)
        name = f"among/{what}/{'-'.join(map(str, ranks))}/{self._counters.next(ranks)}"
        return self._share(name, ranks, f"comparing {what}", value)

    def exchange(self, value: bytes, what: str, limit: float | None = None) -> list[bytes]:
        """Every rank's value, on every rank; all call this.

        The others are waited for `limit` seconds (None: the world's limit).
        """
        if self.world.size == 1:
            return [value]
        # Counted apart: a checkpoint may be saved in a thread, beside executions.
        name = f"exchange/{self._counters.next(self.world.all_ranks, 'exchange')}"
        return self._share(name, self.world.all_ranks, what, value, limit)

    def _share(
        self, name: str, ranks: tuple[int, ...], what: str, value: str | bytes, limit: float | None = None
    ) -> list[bytes]:
        """The value of each of these ranks, once all have come."""
        self._arrive(name, ranks, what, value, limit)
        return self.query_store(what, ranks, lambda: self.world.store.multi_get([f"{name}/{rank}" for rank in ranks]))

    def _arrive(
        self, name: str, ranks: tuple[int, ...], what: str, value: str | bytes = "", limit: float | None = None
    ) -> None:
        """Say that this rank has come to a meeting and wait for the others."""
        self.world.check_before_meeting()
        store, start, limit = self.world.store, time.monotonic(), limit or self.world.limit
        keys = {f"{name}/{rank}": rank for rank in ranks}

        def wait() -> list[str]:
            store.set(f"{name}/{self.world.rank}", value)  # pyright: ignore[reportArgumentType] - bytes are fine
            return await_keys(store, list(keys), limit, lambda: self._raise_if_hopeless(name, keys, what))

        self.waiting = f"{what} at {caller_line()}"
        try:
            missing = self.query_store(what, ranks, wait, limit)
            while missing and awaits_a_plan(self.world.failure_context(), [keys[key] for key in missing]):
                missing = self.query_store(what, ranks, wait, limit)
        finally:
            self.waiting = ""
        if missing:
            raise timed_out(
                self.world.failure_context(), what, [keys[key] for key in missing], seconds_since(start), limit
            )

    def query_store(self, what: str, ranks: Sequence[int], action: Callable[[], T], limit: float | None = None) -> T:
        """The result of an action on the store, within `limit` seconds.

        RankError where the store has gone or stopped.
        """
        start, limit = time.monotonic(), limit or self.world.limit
        try:
            return action() if hosts_store(self.world.place) else bounded(limit + _GRACE, action)
        except Silent:
            raise timed_out(self.world.failure_context(), what, ranks, seconds_since(start), limit) from None
        except RuntimeError as error:
            if not is_of_torch(error):
                raise
            raise connection_lost(self.world.failure_context(), what, ranks, str(error), seconds_since(start)) from None

    def _raise_if_hopeless(self, name: str, keys: Mapping[str, int], what: str) -> None:
        """RankError if a peer has failed, or if one that has not come to the meeting has ended or waits elsewhere."""
        self.world.raise_if_failed(what)
        context = self.world.failure_context()
        context.peers.remember(keys.values())
        left = [rank for rank in list(keys.values())[:MANY] if goodbye(context.store, rank) is not None]
        gone = [
            rank for key, rank in keys.items()
            if (rank in left or context.peers.gone([rank])) and not context.store.check([key])
        ]  # fmt: skip
        if gone:
            self.world.raise_if_failed(what)
            raise peers_gone(context, what, gone)
        if name.startswith(_COMPARING):
            self._raise_if_crossed(name, keys, what)

    def _raise_if_crossed(self, name: str, keys: Mapping[str, int], what: str) -> None:
        """RankError if a rank that has not come here waits where it compares with other ranks, this one among them.

        Each of the two waits for the other, and for good: where programs are on meshes of other ranks, say.
        """
        store, own = self.world.store, self.world.rank
        for key, rank in list(keys.items())[:MANY]:
            if rank == own or not store.check([f"compares/{rank}"]):
                continue
            there, compared, ranks = json.loads(store.get(f"compares/{rank}"))
            if there != name and own in ranks and not store.check([f"{there}/{own}"]) and not store.check([key]):
                places = [_among(what, list(keys.values())), _among(f"comparing {compared}", ranks)]
                error = disagreement("what comes next", places, (own, rank))
                self.world.order_lock.leave_off(what, tuple(keys.values()), error)
                raise error


def _among(what: str, ranks: Sequence[int]) -> str:
    return f"{what} of ranks {', '.join(map(str, ranks))}"
