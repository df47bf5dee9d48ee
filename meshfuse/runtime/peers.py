"""What is known of the other ranks' processes: from the launcher, and of those on this machine from the kernel."""

from __future__ import annotations

import os
from collections.abc import Iterable

import torch.distributed as dist

from ..errors import RankError, user_error
from . import exit_page, processes
from .deadlines import within

# A rank may ask the store at most so many questions one by one.
MANY = 16


class Peers:
    """The processes of a job's ranks, as they introduced themselves when they joined."""

    def __init__(self, store: dist.Store):
        self._store = store
        self._known: dict[int, str] = {}
        self._page = exit_page.own()

    def introduce(self, rank: int) -> str:
        """Tell the others which process this rank is.

        Returns the other process that has said so before it, "" if none has.
        """
        mine = self._known[rank] = processes.identity_of(os.getpid())
        there = self._store.compare_set(f"joined/{rank}", "", mine or str(rank)).decode()
        return there if there != (mine or str(rank)) else ""

    def do_without(self, other: str, ranks: Iterable[int]) -> bool:
        """Whether the job does not need this process beside the `other` one of its rank number.

        That is so where the other one started this one, or where all ranks have joined.
        """
        return processes.descends_from(other) or self._store.check([f"joined/{rank}" for rank in ranks])

    def agree(self, rank: int, size: int) -> None:
        """Tell the others how many ranks this one takes the job to have.

        RankError where another rank has told otherwise.
        """
        known, first = self._store.compare_set("world", "", f"{size} {rank}").decode().split()
        if int(known) != size:
            raise user_error(
                "ranks disagree on the size of their world", f"{size} on rank {rank}, {known} on rank {first}",
                "one number", "Give all of them the same WORLD_SIZE, and each job a MASTER_PORT of its own.",
                cls=RankError,
            )  # fmt: skip

    def remember(self, ranks: Iterable[int]) -> None:
        """Ask the store which processes these ranks are. Ranks that have not joined are left out."""
        unknown = [rank for rank in ranks if rank not in self._known]
        keys = [f"joined/{rank}" for rank in unknown]
        if not unknown:
            return
        if not self._store.check(keys):
            if len(unknown) > MANY:
                return  # One question for each, from every rank, would overload the store.
            unknown = [rank for rank, key in zip(unknown, keys, strict=True) if self._store.check([key])]
            keys = [f"joined/{rank}" for rank in unknown]
        for rank, data in zip(unknown, self._store.multi_get(keys) if keys else [], strict=True):
            self._known[rank] = data.decode()

    def strangers(self, ranks: Iterable[int]) -> list[int]:
        """Those of the ranks that `remember` did not find to have joined."""
        unknown = [rank for rank in ranks if rank not in self._known]
        return unknown if len(unknown) <= MANY else []

    def gone(self, ranks: Iterable[int]) -> list[int]:
        """Those of the ranks that are known to have ended, by the launcher or the kernel. Does not ask the store."""
        ended = exit_page.read(self._page)
        return [rank for rank in ranks if rank in ended or self._state(rank) == processes.GONE]

    def fate(self, rank: int) -> str:
        """Why a rank does not answer, as far as it can be found out."""
        within(1.0, lambda: self.remember([rank]))
        ended, who = exit_page.read(self._page).get(rank), self._known.get(rank)
        if ended is not None:
            return ended
        if who is None:
            return "has not joined: it was not started, or did not come as far as meshfuse"
        about = {
            processes.GONE: f"its process {processes.pid_of(who)} has ended",
            processes.STOPPED: f"its process {processes.pid_of(who)} is stopped",
            processes.RUNNING: f"its process {processes.pid_of(who)} runs, but its Python does not",
        }
        return f"does not answer: {about.get(self._state(rank) or '', 'it is stopped or was killed')}"

    def runs(self, rank: int) -> bool:
        """Whether the rank's process is known to be on this machine, and to be neither ended nor stopped."""
        return self._state(rank) == processes.RUNNING

    def silent_already(self, ranks: Iterable[int]) -> list[int]:
        """Those of the ranks that cannot answer: their processes have ended, or are stopped."""
        ranks = list(ranks)
        stopped = [rank for rank in ranks if self._state(rank) == processes.STOPPED]
        return [*self.gone(ranks), *stopped]

    def _state(self, rank: int) -> str | None:
        who = self._known.get(rank)
        return processes.state_of(who) if who else None
