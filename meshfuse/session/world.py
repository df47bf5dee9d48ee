"""The ranks of a session, as one worker sees them: the runtime's groups, ended by the controller's word."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from ..runtime.deadlines import within
from ..runtime.environment import Environment
from ..runtime.peers import Peers
from ..runtime.roll_call import Responder
from ..runtime.work import Work
from ..runtime.world import World
from .errors import Released

# Seconds that the controller has to say why a connection between workers broke.
_REASON = 1.0


class SessionWorld(World):
    """A worker as a rank, in one epoch of its session: after a failure the groups are made anew.

    A wait for other workers ends when `released` gives a reason.
    """

    def __init__(
        self, place: Environment, limit: float, store: dist.Store, released: Callable[[], str | None],
        doing: Callable[[], str],
    ):  # fmt: skip
        self._given, self._released, self._line = store, released, doing
        super().__init__(place, limit)

    def _join(self) -> None:
        # No hooks: the process is the controller's, or ends with its connection to it.
        self._introduce()

    def _introduce(self) -> None:
        self._store = self._given
        self._peers = Peers(self._store)
        self._peers.introduce(self.rank)
        self._peers.agree(self.rank, self.size)
        self._responder = Responder(self._store, self.rank, self._line)

    def raise_if_failed(self, what: str = "leaving") -> None:
        """Raises Released once the controller has told that another worker failed."""
        reason = self._released()
        if reason is not None:
            raise Released(f"{what} was left: {reason}")

    def check_before_meeting(self) -> None:
        """Raises Released, too: those that it would meet may have come and left again."""
        super().check_before_meeting()
        self.raise_if_failed("a meeting of workers")

    def check(self, work: Work) -> None:
        """Raises Released if the collective cannot complete."""
        self.raise_if_failed(str(work))

    def explain(self, work: Work, error: BaseException) -> Any:
        """The error to raise for a backend's: connections break just before the controller tells why."""
        until = time.monotonic() + _REASON
        while time.monotonic() < until:
            with contextlib.suppress(InterruptedError):
                reason = self._released()
                if reason is not None:
                    return Released(f"{work} was left: {reason}")
            time.sleep(0.01)
        return super().explain(work, error)

    def close(self) -> None:
        """Leave: break the connections to the other workers."""
        responder, self._responder = self._responder, None
        for group in self._groups.values():
            group.abort()
        if responder is not None:
            # It sleeps on the store, which a lost worker may have served.
            threading.Thread(target=within, args=(1.0, lambda: responder.stop(0.5)), daemon=True).start()
