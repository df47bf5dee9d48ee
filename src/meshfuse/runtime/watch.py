"""Collectives that a device is still at: watched by a thread of their own, as no wait on the host ends with them.

A wait for NCCL orders streams, and returns. Where a peer is gone, this rank's main thread blocks later, in some copy
to the host, and no error can reach it there. So the thread ends the process, as torch's own watchdog of NCCL would, but
with the error that a wait would have raised: who failed, or does not arrive, and what the others do.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from ..errors import RankError

# In seconds: between two looks, and after which it is worth asking what the peers do.
_LOOK, _PATIENCE = 0.5, 1.0
# Held while devices are asked, which no thread may do while one captures a graph.
_asking = threading.Lock()
_capturing = threading.Event()


@dataclass(frozen=True, slots=True)
class Pending:
    """What was given to a device: the collective's name and ranks, and what tells whether it is done.

    trouble: what the backend has found to be wrong with the connections, "" for nothing. A collective may then count as
        done that the device is still at.
    """

    name: str
    ranks: tuple[int, ...]
    is_done: Callable[[], bool]
    trouble: Callable[[], str]
    start: float = field(default_factory=time.monotonic)


@contextlib.contextmanager
def unwatched() -> Iterator[None]:
    """In this context devices are not asked, and what they are given is not watched: it becomes a part of a graph."""
    with _asking:
        _capturing.set()
        try:
            yield
        finally:
            _capturing.clear()


class Watch:
    """Watches what is added, in the order in which devices do it.

    judge: raises the RankError of a collective for which it is in vain to wait. end: ends the process by it.
    """

    def __init__(self, judge: Callable[[Pending], None], end: Callable[[RankError], None]):
        self._judge, self._end = judge, end
        self._pending: deque[Pending] = deque()
        self._stopped = threading.Event()
        self._thread: threading.Thread | None = None

    def add(self, pending: Pending) -> None:
        """Watch a collective that was issued."""
        if _capturing.is_set():
            return
        self._pending.append(pending)
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="meshfuse-watch", daemon=True)
            self._thread.start()

    def stop(self, seconds: float) -> None:
        """End the thread: it must not come back from torch while the interpreter is finalised."""
        self._stopped.set()
        if self._thread is not None:
            self._thread.join(seconds)

    def _run(self) -> None:
        with contextlib.suppress(RuntimeError):  # The device fails, which the main thread learns, too.
            while not self._stopped.wait(_LOOK):
                error = self._look()
                if error is not None:
                    self._end(error)

    def _look(self) -> RankError | None:
        """Why it is in vain to wait for what the device is at, if it is."""
        first = self._first()
        if first is None or time.monotonic() < first.start + _PATIENCE:
            return None
        try:
            self._judge(first)
        except RankError as error:
            # If it is done by now, the peer failed after it.
            return error if self._first() is first else None
        return None

    def _first(self) -> Pending | None:
        """The first one that is not done; what is done is forgotten."""
        with _asking:
            while self._pending and self._pending[0].is_done() and not self._pending[0].trouble():
                self._pending.popleft()
        return self._pending[0] if self._pending else None
