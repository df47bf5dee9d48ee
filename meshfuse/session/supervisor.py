"""Watches the workers of a session: which failed, which are gone; and lets the others leave what they wait for."""

from __future__ import annotations

import contextlib
import os
import select
import threading
import time
from collections.abc import Sequence
from typing import Protocol

from .links import Link, SocketLink
from .messages import FAILURE, PLACE
from .wire import Closed, Frame


class Notices(Protocol):
    """What starts and ends processes, and knows how they ended."""

    def fileno(self) -> int: ...
    def read(self) -> None: ...
    def how_ended(self, worker: int) -> str | None: ...


class Supervisor:
    """What is known of the workers' state.

    epoch: counts the failures that the controller's user has been told; news of earlier epochs is dropped.
    lost: by worker how its process ended, in words.
    """

    def __init__(self) -> None:
        self.epoch = 0
        self.links: Sequence[Link] = ()
        self.lost: dict[int, str] = {}
        self.first: tuple[int, int] | None = None
        self.closing = False
        self._lock, self._losing = threading.Lock(), threading.Lock()
        self._end_read, self._end_write = os.pipe()
        self._thread: threading.Thread | None = None
        self.last_beat: dict[int, float] = {}

    def watch(self, links: Sequence[Link], notices: Sequence[Notices] = ()) -> None:
        """Begin to watch these workers."""
        self.links, self._notices = links, notices
        remote = [link for link in links if isinstance(link, SocketLink)]
        if remote:
            self._thread = threading.Thread(target=self._run, args=(remote,), name="meshfuse-supervisor", daemon=True)
            self._thread.start()

    def failed(self, worker: int, epoch: int, number: int) -> None:
        """A call of this number failed on a worker: the others leave what they wait for."""
        with self._lock:
            if epoch != self.epoch or self.first is not None:
                return
            self.first = (worker, number)
        self.release(epoch, number, f"worker {worker} failed in call {number}", beside=worker)
        self._wake()

    def release(self, epoch: int, number: int, reason: str, beside: int = -1) -> None:
        """Let all workers but one leave what they wait for, from this call of the epoch on."""
        for link in self.links:
            if link.worker != beside and link.worker not in self.lost:
                link.release(epoch, number, reason)

    def leave(self, reason: str) -> None:
        """The time limit is over: let all workers leave this epoch's collectives, and do its other calls."""
        for link in self.links:
            link.leave(self.epoch, reason)

    def renew(self) -> int:
        """Begin a new epoch: what failed has been told."""
        with self._lock:
            self.epoch, self.first = self.epoch + 1, None
        return self.epoch

    def _wake(self) -> None:
        for link in self.links:
            link.wake()

    def _run(self, links: Sequence[SocketLink]) -> None:
        poll = select.poll()
        by_file = {link.control.fileno(): link for link in links}
        for file in [*by_file, self._end_read, *(notice.fileno() for notice in self._notices)]:
            poll.register(file, select.POLLIN)
        notices = {notice.fileno(): notice for notice in self._notices}
        while not self.closing:
            for file, _ in poll.poll():
                if file == self._end_read:
                    return
                if file in notices:
                    try:
                        notices[file].read()
                    except (Closed, OSError):
                        poll.unregister(file)
                elif not self._hear(by_file[file]):
                    poll.unregister(file)

    def _hear(self, link: SocketLink) -> bool:
        """Read all that a worker has said; False once it is gone."""
        try:
            self._heed(link, link.control.receive())
            while link.control.is_ready():
                self._heed(link, link.control.receive())
        except (Closed, OSError, ValueError):
            self.lose(link.worker)
            return False
        return True

    def _heed(self, link: SocketLink, frame: Frame) -> None:
        self.last_beat[link.worker] = time.monotonic()
        if frame.kind == FAILURE:
            self.failed(link.worker, frame.epoch, frame.number)
        elif frame.kind == PLACE:
            link.said_where(bytes(frame.payload).decode())

    def lose(self, worker: int) -> None:
        """A worker's connection has ended."""
        with self._losing:  # Who sees that it is lost sees how, too.
            if self.closing or worker in self.lost:
                return
            self.lost[worker] = self._how(worker) or "its connection was closed"
        self.release(self.epoch, 0, f"worker {worker} is gone")
        self._wake()

    def _how(self, worker: int) -> str | None:
        """How its process ended: that is known a moment after its connection."""
        until = time.monotonic() + 0.2
        while time.monotonic() < until:
            for notice in self._notices:
                if select.select([notice], [], [], 0)[0]:
                    with contextlib.suppress(Closed, OSError):
                        notice.read()
                how = notice.how_ended(worker)
                if how is not None:
                    return how
            time.sleep(0.002)
        return None

    def close(self) -> None:
        """Stop watching."""
        self.closing = True
        with contextlib.suppress(OSError):
            os.write(self._end_write, b".")
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(2.0)
        for fd in (self._end_read, self._end_write):
            with contextlib.suppress(OSError):
                os.close(fd)
