"""This process among its peers: its rank, its store, its groups, and what happens when one of them fails."""

from __future__ import annotations

import atexit
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, TypeVar

import torch.distributed as dist

from ..errors import ArgumentError, RankError, user_error
from .diagnosis import Scene, connection_lost, disagreement, peer_failed, seconds_since, timed_out
from .environment import DEFAULT_GROUP, Environment, read_environment, time_limit
from .exits import install_hook
from .group import Group
from .liveness import Responder, main_thread_line, publish, published, within
from .store import await_keys, connect, hosts_store
from .work import Work

T = TypeVar("T")
_LINGER = 3.0


@dataclass(slots=True)
class _Counters:
    """How often the ranks of a tuple have met; equal on all of them, as they run the same program."""

    meetings: dict[tuple[int, ...], int] = field(default_factory=dict)

    def next(self, ranks: tuple[int, ...]) -> int:
        self.meetings[ranks] = self.meetings.get(ranks, 0) + 1
        return self.meetings[ranks]


class World:
    """The ranks of this job. `World.current()` is the process's own; alone, it opens no socket.

    Everything lives in a store and process groups of meshfuse's own: whether the script uses torch's default
    process group, before or after, makes no difference. Every wait ends after `limit` seconds.
    """

    _current: ClassVar[World | None] = None

    def __init__(self, place: Environment, limit: float):
        self.place, self.limit = place, limit
        self.rank, self.size = place.rank, place.size
        self.local_rank, self.local_size = place.local_rank, place.local_size
        self.waiting: Work | None = None
        self._meeting = ""
        self._process = os.getpid()
        self._groups: dict[tuple[int, ...], Group] = {}
        self._counters = _Counters()
        self._store: dist.Store | None = None
        self._responder: Responder | None = None
        if self.size > 1:
            self._join()

    @classmethod
    def current(cls) -> World:
        """This process's world, joined at the first call. RankTimeout if rank 0 is not to be found."""
        if cls._current is None:
            cls._current = World(_place(), time_limit())
        return cls._current

    @property
    def store(self) -> dist.Store:
        """The store of the job; a world of one rank has none."""
        assert self._store is not None, "a world of one rank has no store"
        return self._store

    @property
    def all_ranks(self) -> tuple[int, ...]:
        """0, 1, … size - 1."""
        return tuple(range(self.size))

    def _join(self) -> None:
        self._store = connect(self.place, self.limit)
        self._store.set(f"joined/{self.rank}", "")
        self._responder = Responder(self._store, self.rank, self._doing)
        install_hook(self)
        atexit.register(self.leave)

    def _doing(self) -> str:
        waiting = self.waiting or self._meeting
        return f"waits in {waiting}" if waiting else main_thread_line()

    def group(self, ranks: Sequence[int], label: str = "") -> Group:
        """The group of `ranks`, of which this rank is one; the same object at every call.

        Its members connect at their first collective. Raises ArgumentError for ranks outside this world.
        """
        ranks = tuple(ranks)
        group = self._groups.get(ranks)
        if group is None:
            self._check_ranks(ranks)
            group = self._groups[ranks] = Group(self, ranks, label or "of ranks")
        return group

    def _check_ranks(self, ranks: tuple[int, ...]) -> None:
        if len(set(ranks)) != len(ranks) or self.rank not in ranks:
            raise user_error(
                "no group for this rank", f"rank {self.rank} and a group of ranks {list(ranks)}",
                "distinct ranks, this one among them", cls=ArgumentError,
            )  # fmt: skip
        if not 0 <= min(ranks) <= max(ranks) < self.size:
            raise user_error(
                "the group has ranks that do not exist",
                f"ranks {list(ranks)} in a world of {self.size}",
                f"ranks below {self.size}",
                f"Start more ranks: meshfuse run --ranks {max(ranks) + 1} SCRIPT, or run on simulated ranks.",
                cls=ArgumentError,
            )

    def meet(self, group: Group, kind: str, make: Callable[[dist.Store], T]) -> T:
        """Make a backend's process group once all of the group's ranks have come to make it."""
        name = f"group/{kind}/{'-'.join(map(str, group.ranks))}"
        start = time.monotonic()
        self._arrive(name, group.ranks, f"connecting {group}")
        try:
            return make(dist.PrefixStore(name, self.store))
        except RuntimeError as error:
            raise self._explain(f"connecting {group}", group.ranks, error, start) from None

    def barrier(self) -> None:
        """Wait for all ranks of the world."""
        if self.size > 1:
            self._arrive(f"barrier/{self._counters.next(self.all_ranks)}", self.all_ranks, "barrier")

    def check_same(self, value: str, what: str, ranks: Sequence[int], detail: Callable[[], str] | None = None) -> None:
        """Compare a short text over `ranks`, which all call this. RankError on every one if it differs.

        `detail` gives a longer text to show in its place: the first line in which the ranks differ.
        """
        ranks = tuple(ranks)
        if len(ranks) == 1:
            return
        name = f"same/{'-'.join(map(str, ranks))}/{self._counters.next(ranks)}"
        values = self._share(name, ranks, f"comparing {what}", value)
        if len(set(values)) == 1:
            return
        if detail is not None:
            values = self._share(f"{name}/detail", ranks, f"comparing {what}", detail())
        raise disagreement(what, values, ranks)

    def any(self, value: bool, what: str, ranks: Sequence[int]) -> bool:
        """Whether `value` is True on any of `ranks`, which all call this; this rank's own value for less than two."""
        ranks = tuple(ranks)
        if len(ranks) < 2:
            return value
        name = f"any/{'-'.join(map(str, ranks))}/{self._counters.next(ranks)}"
        return "1" in self._share(name, ranks, what, "1" if value else "0")

    def _share(self, name: str, ranks: tuple[int, ...], what: str, value: str) -> list[str]:
        """Every rank's value."""
        self._arrive(name, ranks, what, value)
        return [data.decode() for data in self.store.multi_get([f"{name}/{rank}" for rank in ranks])]

    def _arrive(self, name: str, ranks: tuple[int, ...], what: str, value: str = "") -> None:
        start = time.monotonic()
        self.store.set(f"{name}/{self.rank}", value)
        keys = [f"{name}/{rank}" for rank in ranks]
        self._meeting = what
        try:
            missing = await_keys(self.store, keys, self.limit, lambda: self.raise_if_failed(what))
        finally:
            self._meeting = ""
        if missing:
            absent = [rank for rank, key in zip(ranks, keys, strict=True) if key in missing]
            raise timed_out(self._scene(), what, absent, seconds_since(start))

    def raise_if_failed(self, what: str = "leaving") -> None:
        """RankError if a peer has published a failure; `what` is what this rank was about to do."""
        failure = within(1.0, lambda: published(self.store), None)
        if failure is not None and failure.rank != self.rank:
            raise peer_failed(self._scene(), what, failure)

    def explain(self, work: Work, error: BaseException) -> RankError:
        """The error to raise for a backend's error in `work`: who failed or did not arrive, if known."""
        return self._explain(str(work), work.group.ranks, error, work.start)

    def _explain(self, what: str, ranks: tuple[int, ...], error: BaseException, start: float) -> RankError:
        after = seconds_since(start)
        if "timed out" in str(error).lower() or "timeout" in str(error).lower():
            return timed_out(self._scene(), what, ranks, after)
        return connection_lost(self._scene(), what, ranks, str(error), after)

    def _scene(self) -> Scene:
        host = None if self.place.agent_store or self.place.source == DEFAULT_GROUP else 0
        return Scene(self.rank, self.store, host, self.limit)

    def publish_failure(self, error: BaseException) -> None:
        """Let the peers know why this rank is about to die: its traceback will be in their errors."""
        if self._store is not None:
            within(1.0, lambda: publish(self.store, self.rank, error), None)

    def depart(self, error: BaseException) -> None:
        """After a failure: tell the peers, and keep a store of its own up while they read from it."""
        self._say_done()
        for group in self._groups.values():
            group.abort()
        if hosts_store(self.place):
            gone = getattr(error, "silent", ())
            within(_LINGER, lambda: self._await_others(_LINGER, lambda: None, gone), None)

    def leave(self) -> None:
        """At a normal exit: the rank that holds the store waits for the others to finish with it."""
        if self._responder is None or os.getpid() != self._process:
            return
        self._responder.stop()
        self._responder = None
        self._say_done()
        if hosts_store(self.place):
            within(self.limit, lambda: self._await_others(self.limit, self.raise_if_failed), None)

    def _say_done(self) -> None:
        within(1.0, lambda: self.store.set(f"done/{self.rank}", ""), None)

    def _await_others(self, limit: float, check: Callable[[], None], gone: Sequence[int] = ()) -> None:
        joined = [rank for rank in self.all_ranks if rank not in gone and self.store.check([f"joined/{rank}"])]
        await_keys(self.store, [f"done/{rank}" for rank in joined], limit, check)


def _place() -> Environment:
    place = read_environment()
    if place.source == "none" and dist.is_available() and dist.is_initialized():
        return _default_group_place()
    return place


def _default_group_place() -> Environment:
    """For ranks that know each other by a call of init_process_group alone."""
    size = dist.get_world_size()
    return Environment(DEFAULT_GROUP, dist.get_rank(), size, dist.get_rank(), size)
