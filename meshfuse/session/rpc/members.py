"""Who belongs to a group of rpc workers: a number of ranks that is known from the start, or whoever joins its store."""

from __future__ import annotations

import contextlib
import json
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

from ...errors import ArgumentError, caller_line, shown, user_error
from ...runtime.processes import GONE, state_of
from ...runtime.store import await_keys, text_there
from ..errors import WorkerLost, WorkerTimeout

FOREVER = 1e6  # Seconds; poll takes at most 2³¹ milliseconds.
ASK_AGAIN = 5.0  # Seconds between questions to workers of other machines whether they live.
_NAME = re.compile("[A-Za-z0-9_:-]{1,127}")


@dataclass(frozen=True, slots=True, repr=False)
class WorkerInfo:
    """A peer: its name, and its rank (as `id`). Raises ArgumentError for a name that is none."""

    name: str
    id: int

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not _NAME.fullmatch(self.name):
            raise user_error(
                "Worker name must match [A-Za-z0-9_:-]+, be shorter than 128 characters and must be non-empty",
                shown(self.name), "such a name", "", caller_line(), ArgumentError,
            )  # fmt: skip

    def __repr__(self) -> str:
        return f"WorkerInfo(id={self.id}, name={self.name})"


@dataclass(frozen=True, slots=True, eq=False)
class Member:
    """A peer, where it listens, the machine on which its local name holds, and its process there."""

    info: WorkerInfo
    host: str
    port: int
    local_name: str
    place: str
    process: str

    def text(self) -> str:
        """All of it, for the store."""
        info = self.info
        return json.dumps([info.name, info.id, self.host, self.port, self.local_name, self.place, self.process])

    @staticmethod
    def read(text: str) -> Member:
        """What `text` has written."""
        name, rank, *rest = json.loads(text)
        return Member(WorkerInfo(name, rank), *rest)


class Members:
    """The peers of a group of `size` ranks, which start and end together."""

    def __init__(self, me: WorkerInfo, store: dist.Store, size: int):
        self.me, self.store, self.size = me, store, size
        self._known: dict[int, Member] = {}
        self._named: dict[str, Member] = {}
        # Asks a peer for an answer, and raises WorkerLost where it is gone.
        self.ask: Callable[[int], None] = lambda rank: None
        self._asked = 0.0

    def _add(self, member: Member) -> None:
        self._drop(member.info.id)
        self._known[member.info.id] = self._named[member.info.name] = member

    def _drop(self, rank: int) -> None:
        old = self._known.pop(rank, None)
        if old is not None and self._named.get(old.info.name) is old:
            del self._named[old.info.name]

    def meet(self, mine: Member, limit: float) -> None:
        """Tell the others where this one is, and learn the same of them. ArgumentError for a name that is taken."""
        found = [Member.read(text) for text in self.exchange("peers", mine.text(), limit)]
        names = [member.info.name for member in found]
        for member in found:
            self._add(member)
        if len(set(names)) != len(names):
            raise _not_unique(names)

    def member(self, rank: int) -> Member:
        """The peer of that rank."""
        return self._known[rank]

    def infos(self) -> list[WorkerInfo]:
        """All peers that are known, this one among them."""
        return [member.info for _, member in sorted(self._known.items())]

    def find(self, to: Any) -> WorkerInfo:
        """The peer of that name, rank or WorkerInfo. Raises ArgumentError for others."""
        wanted = to.id if isinstance(to, WorkerInfo) else to
        found = self._look_up(wanted) if isinstance(wanted, (int, str)) else None
        if found is None:
            raise user_error("could not find destination, no such rpc worker", shown(to),
                             f"one of {', '.join(self._named)}", "", caller_line(), ArgumentError)  # fmt: skip
        return found.info

    def _look_up(self, wanted: int | str) -> Member | None:
        return self._known.get(wanted) if isinstance(wanted, int) else self._named.get(wanted)

    def exchange(self, what: str, text: str, limit: float) -> list[str]:
        """What each peer says under this name; all of them call this. Waits at most `limit` seconds, 0: for ever."""
        keys = [f"{what}/{rank}" for rank in range(self.size)]
        try:
            self.store.set(keys[self.me.id], text)
            missing = await_keys(self.store, keys, limit or FOREVER, lambda: self._check(what, keys))
            if not missing:
                return [self.store.get(key).decode() for key in keys]
        except dist.DistError as error:
            raise self.lost(0, f"its store does not answer ({error})") from None
        ranks = ", ".join(key.rpartition("/")[2] for key in missing)
        raise WorkerTimeout(
            f"rpc workers did not come to {what}: found none of ranks {ranks} within {limit:g} s, needed all "
            f"{self.size}", caller_line(),
        )  # fmt: skip

    def _check(self, what: str, keys: Sequence[str]) -> None:
        """Raises WorkerLost where a peer that has not come yet never will."""
        missing = [member for rank, member in self._known.items() if not self.store.check([keys[rank]])]
        elsewhere = []
        for member in missing:
            rank, state = member.info.id, state_of(member.process)
            has_ended = state == GONE or self.store.check([_gone(rank)])
            if has_ended and not self.store.check([keys[rank]]):  # It may have come meanwhile, and then ended.
                ended = "its process has ended" if state == GONE else "it has left the group"
                raise self.lost(rank, f"{ended} before it came to {what}")
            elsewhere += [rank] if state is None else []
        if elsewhere and time.monotonic() - self._asked > ASK_AGAIN:
            for rank in elsewhere:
                self.ask(rank)
            self._asked = time.monotonic()

    def lost(self, rank: int, how: str) -> WorkerLost:
        """The error that a peer is gone."""
        known = self._known.get(rank)
        name = f"of rank {rank}" if known is None else f"{known.info.name} (rank {rank})"
        error = WorkerLost(f"rpc worker {name} is gone: {how}", caller_line())
        error.worker, error.how = rank, how
        return error

    def leave(self) -> None:
        """Tell the others that this one has left; where the store's host has ended, there is nobody to tell."""
        with contextlib.suppress(dist.DistError):
            self.store.set(_gone(self.me.id), "")

    def await_leaving(self, limit: float) -> None:
        """Wait until all others have left, for at most so many seconds."""
        await_keys(self.store, [_gone(rank) for rank in range(self.size)], limit, lambda: None)


class OpenMembers(Members):
    """The peers of a group that ranks join and leave one by one. Who is not known yet is looked for in the store."""

    def __init__(self, me: WorkerInfo, store: dist.Store):
        super().__init__(me, store, 0)

    def meet(self, mine: Member, limit: float) -> None:
        """Join. ArgumentError for a name or a rank that another member has."""
        for key in (_of_name(self.me.name), _of_rank(self.me.id)):
            if self.store.compare_set(key, "", mine.text()).decode() != mine.text():
                self._forget(mine.text())
                raise _not_unique([key])
        self._add(mine)

    def _forget(self, own: str) -> None:
        for key in (_of_name(self.me.name), _of_rank(self.me.id)):
            if text_there(self.store, key) == own:
                self.store.delete_key(key)

    def member(self, rank: int) -> Member:
        """The peer of that rank. Raises WorkerLost where there is none."""
        found = self._look_up(rank)
        if found is None:
            raise self.lost(rank, "it is no member of the group")
        return found

    def _look_up(self, wanted: int | str) -> Member | None:
        known = super()._look_up(wanted)
        if known is not None:
            return known
        with contextlib.suppress(dist.DistError):  # The store's host has left.
            text = text_there(self.store, _of_rank(wanted) if isinstance(wanted, int) else _of_name(wanted))
            if text:
                self._add(Member.read(text))
        return super()._look_up(wanted)

    def exchange(self, what: str, text: str, limit: float) -> list[str]:
        """Nothing: members wait for no others."""
        return []

    def lost(self, rank: int, how: str) -> WorkerLost:
        """The error that a peer is gone; another one may have its name and rank from here on."""
        error = super().lost(rank, how)
        self._drop(rank)
        return error

    def leave(self) -> None:
        """Take this one out of the store, if that is still there."""
        with contextlib.suppress(dist.DistError):
            self._forget(self._known[self.me.id].text())

    def await_leaving(self, limit: float) -> None:
        """Nothing: members may leave before others."""


def _gone(rank: int) -> str:
    return f"gone/{rank}"


def _of_name(name: str) -> str:
    return f"name/{name}"


def _of_rank(rank: int) -> str:
    return f"rank/{rank}"


def _not_unique(found: Sequence[str]) -> Exception:
    return user_error("init_rpc: a worker's name is not unique", f"{list(found)}", "a name of its own for each", "",
                      caller_line(), ArgumentError)  # fmt: skip
