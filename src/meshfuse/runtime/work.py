"""A collective that was issued and not yet waited for."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Protocol


class Reporter(Protocol):
    """What turns a backend's error into one that names the failed rank."""

    waiting: Work | None

    def explain(self, work: Work, error: BaseException) -> BaseException: ...


class Work:
    """An issued collective. `wait()` returns once its result is in place, or raises RankError or RankTimeout."""

    __slots__ = ("_finish", "_handle", "_keep", "group", "name", "number", "reporter", "start")

    def __init__(self, group: Any, name: str, keep: Any, finish: Callable[[], object] | None):
        self.group, self.name, self.number = group, name, group.issued
        self.reporter: Reporter = group.world
        self.start = time.monotonic()
        # The backend does not own the tensors that it reads and writes.
        self._handle, self._keep, self._finish = None, keep, finish

    def attach(self, handle: Any) -> None:
        """Take the backend's own handle, which it gave on issue."""
        self._handle = handle

    def wait(self) -> None:
        """Wait at most MESHFUSE_TIMEOUT seconds. A second wait does nothing."""
        handle = self._handle
        if handle is None:
            return
        self.reporter.waiting = self
        try:
            handle.wait()
        except RuntimeError as error:
            raise self.reporter.explain(self, error) from None
        finally:
            self.reporter.waiting = None
            self._handle = None
        if self._finish is not None:
            self._finish()
        self._finish = self._keep = None

    def __str__(self) -> str:
        return f"{self.name} #{self.number} of {self.group}"


class Done:
    """The work of a group of one rank, or on no elements."""

    __slots__ = ()

    def wait(self) -> None:
        """Nothing to wait for."""


DONE = Done()
