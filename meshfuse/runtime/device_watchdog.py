"""What a device is still at: watched by a thread of its own, as no wait on the host ends with it.

A wait for NCCL orders streams, and returns. Where a peer is gone, this rank's main thread blocks later, in some copy
to the host, and no error can reach it there. So the thread ends the process, as torch's own watchdog of NCCL would, but
with the error that a wait would have raised: who failed, or does not arrive, and what the others do.
"""

from __future__ import annotations

import contextlib
import threading
import time
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
    """The last of what was given to a device, `what` in words, and the ranks that it needs.

    is_done: whether the device has done it and all before it. trouble: what the backend has found to be wrong with the
    connections, "" for nothing.
    """

    what: object  # Asked for its text only where something is wrong.
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


def is_watched() -> bool:
    """Whether devices do what they are given now, and not only later, as a part of a graph."""
    return not _capturing.is_set()


class DeviceWatchdog:
    """Watches the last of what a device was given: a host that waits for the device gives it no more.

    judge: raises the RankError of a collective for which it is in vain to wait. end: ends the process by it.
    """

    def __init__(self, judge: Callable[[Pending], None], end: Callable[[RankError], None]):
        self._judge, self._end = judge, end
        self._last: Pending | None = None
        self._stopped = threading.Event()
        self._thread: threading.Thread | None = None

    def put(self, pending: Pending) -> None:
        """DeviceWatchdog this from now on, in the place of what was given before."""
        self._last = pending
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="meshfuse-watchdog", daemon=True)
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
        last = self._last
        if last is None or time.monotonic() < last.start + _PATIENCE or self._is_over(last):
            return None
        try:
            self._judge(last)
        except RankError as error:
            return None if self._is_over(last) else error  # A peer that fails after it does not matter.
        return None

    def _is_over(self, pending: Pending) -> bool:
        """Whether the device has done it, or was given more since."""
        with _asking:
            return self._last is not pending or pending.is_done()
