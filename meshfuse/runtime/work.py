"""A collective that was issued and not yet waited for."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any, Protocol

from .deadlines import is_of_torch

_SLICE = timedelta(seconds=0.5)


class Reporter(Protocol):
    """Turns a backend's error into one that names the failed rank."""

    waiting: Work | None
    limit: float

    def explain(self, work: Work, error: BaseException) -> BaseException: ...
    def check(self, work: Work) -> None: ...
    def is_patient(self, work: Work) -> bool: ...


class Work:
    """An issued collective. `wait()` puts its result in place or raises RankError or RankTimeout."""

    __slots__ = ("_finish", "_handle", "_keep", "_sliced", "group", "name", "number", "reporter", "start")

    def __init__(self, group: Any, name: str, keep: Any, finish: Callable[[], object] | None = None):
        self.group, self.name, self.number = group, name, group.issued
        self.reporter: Reporter = group.world
        self.start = time.monotonic()
        # The backend does not own the tensors that it reads and writes.
        self._handle, self._keep, self._finish, self._sliced = None, keep, finish, False

    def attach(self, handle: Any, sliced: bool = False) -> None:
        """Take the backend's handle. `sliced`: its wait can be ended after a while, and repeated."""
        self._handle, self._sliced = handle, sliced

    def then(self, finish: Callable[[], object]) -> Work:
        """Also call `finish` when the wait is over; returns the work itself."""
        before = self._finish
        self._finish = finish if before is None else lambda: (before(), finish())
        return self

    def wait(self) -> None:
        """Wait at most MESHFUSE_TIMEOUT seconds, or while a rank plans. A second wait does nothing."""
        handle = self._handle
        if handle is None:
            return
        self.reporter.waiting = self
        try:
            if self._sliced:
                self._wait_sliced(handle)
            else:
                handle.wait()
        except RuntimeError as error:
            if not is_of_torch(error):
                raise
            raise self.reporter.explain(self, error) from None
        finally:
            self.reporter.waiting = None
            self._handle = None
        if self._finish is not None:
            self._finish()
        self._finish = self._keep = None

    def _wait_sliced(self, handle: Any) -> None:
        # A failed peer may keep its connections open for seconds, or be a member of other groups only.
        end, last = time.monotonic() + self.reporter.limit, False
        while True:
            try:
                handle.wait(_SLICE)
                return
            except RuntimeError as error:
                if last or not is_of_torch(error):
                    raise
            if time.monotonic() > end and self.reporter.is_patient(self):
                end = time.monotonic() + self.reporter.limit
            # If it has ended just after a slice, the next wait gives its result or its own error.
            last = handle.is_completed() or time.monotonic() > end
            if not last:
                self.reporter.check(self)

    def __str__(self) -> str:
        return f"{self.name} #{self.number} of {self.group}"


class Done:
    """The work of a group of one rank, or on no elements."""

    __slots__ = ()

    def wait(self) -> None:
        """Nothing to wait for."""


DONE = Done()
