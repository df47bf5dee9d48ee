"""What several workers say to each other by calls alone: torch's names for it are `_all_gather` and `_barrier`.

The worker of the least name collects what the others have, and tells it to all of them.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from ...errors import caller_line
from ..errors import SessionError, WorkerTimeout
from .calls import Calls, calls
from .constants import UNSET_RPC_TIMEOUT
from .members import ASK_AGAIN

Key = tuple[tuple[str, ...], int]  # (names of the workers, how often they have met before)


@dataclass(slots=True)
class _Meeting:
    found: dict[str, Any] = field(default_factory=dict)
    is_complete: threading.Event = field(default_factory=threading.Event)


class _Meetings:
    """The meetings of this process: those that it is in, and those that others have come to before it."""

    def __init__(self) -> None:
        self._open: dict[Key, _Meeting] = {}
        self._counts: Counter[tuple[str, ...]] = Counter()
        self._lock = threading.Lock()

    def begin(self, names: tuple[str, ...]) -> Key:
        """The next meeting of these workers."""
        with self._lock:
            self._counts[names] += 1
            return names, self._counts[names]

    def of(self, key: Key) -> _Meeting:
        """The meeting of that key."""
        with self._lock:
            return self._open.setdefault(key, _Meeting())

    def bring(self, key: Key, found: dict[str, Any]) -> None:
        """Add what workers have brought."""
        meeting = self.of(key)
        with self._lock:
            meeting.found.update(found)
            if len(meeting.found) == len(key[0]):
                meeting.is_complete.set()

    def end(self, key: Key) -> None:
        """Forget a meeting."""
        with self._lock:
            self._open.pop(key, None)


# By group, as long as it lives.
_meetings: list[tuple[Calls, _Meetings]] = []
_beginning = threading.Lock()


def _ours() -> _Meetings:
    with _beginning:
        if not _meetings or _meetings[0][0] is not calls():
            _meetings[:] = [(calls(), _Meetings())]
        return _meetings[0][1]


def all_gather(value: Any, names: Iterable[str] | None = None, timeout: float = UNSET_RPC_TIMEOUT) -> dict[str, Any]:
    """What each of these workers (None: all) has passed, by name; all of them call this, and wait for one another.

    timeout: seconds of a message and of the wait; by default those of a call for a message, and any wait; 0 for none.
    Raises WorkerTimeout, and WorkerLost where one of them has ended.
    """
    part = calls()
    met = tuple(sorted(set(names or (info.name for info in part.agent.members.infos()))))
    meetings, limit = _ours(), part.agent.limit if timeout == UNSET_RPC_TIMEOUT else timeout
    key, leads = meetings.begin(met), part.me.name == met[0]
    try:
        if leads:
            meetings.bring(key, {part.me.name: value})
        else:
            part.sync(met[0], _bring, (key, {part.me.name: value}), {}, limit)
        _await(part, meetings.of(key), key, None if timeout in (UNSET_RPC_TIMEOUT, 0) else timeout)
        found = meetings.of(key).found
        if leads:
            _tell(part, key, found, limit)
        return found
    finally:
        meetings.end(key)


def _bring(key: Key, found: dict[str, Any]) -> None:
    _ours().bring(key, found)


def _await(part: Calls, meeting: _Meeting, key: Key, limit: float | None) -> None:
    """Wait until all have come; a peer that has ended never will."""
    while not meeting.is_complete.wait(ASK_AGAIN if limit is None else limit):
        missing = [name for name in key[0] if name not in meeting.found and name != part.me.name]
        if limit is not None:
            raise _late(missing, limit, "they did not come")
        for name in missing:
            part.ask(part.agent.members.find(name).id)


def _tell(part: Calls, key: Key, found: dict[str, Any], limit: float) -> None:
    """Tell all others what has been brought. Raises WorkerTimeout with those that do not answer."""
    told = {name: part.start(name, _bring, (key, found), {}, limit) for name in key[0] if name != part.me.name}
    failed: dict[str, SessionError] = {}
    for name, future in told.items():
        try:
            future.wait()
        except SessionError as error:
            failed[name] = error
    if failed:
        raise _late(list(failed), limit, str(next(iter(failed.values()))))


def _late(names: list[str], limit: float, how: str) -> WorkerTimeout:
    return WorkerTimeout(f"Followers {names} timed out in _all_gather after {limit:.2f} seconds: {how}", caller_line())
