"""What ranks do together, one call after the other and in one order on all ranks."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import CodeType

from ..errors import ArgumentError, MeshfuseError, RankError, caller_line, user_error
from ..kernels.user_functions import comes_from_a_function

# Seconds that a thread which executes has, at the interpreter's exit, to end.
_MOMENT = 0.5


@dataclass(frozen=True, slots=True)
class _LeftOff:
    """Why the next execution cannot simply begin, in the parts of an error's text.

    An error has ended an execution at `where` before it had issued all of its communications. If `ranks` are given,
    they can go on once all of them are at that same place; None means that they cannot go on.
    """

    found: str
    where: str = ""
    ranks: tuple[int, ...] | None = None
    wrong: str = "an execution follows one that failed"
    needed: str = "ranks that go on together"
    do: str = "Let the error end the process; meshfuse run --max-restarts starts all ranks anew."


class CollectiveOrderLock:
    """A lock that a rank takes for each call which ranks make together: an execution, or a save or load.

    Threads would call in another order on each rank, and the parts of different calls would meet: entering raises
    ArgumentError while another thread is inside. It raises RankError where the ranks cannot go on together. An op's
    function may enter again: a program that it runs is at the same place on all ranks. What interrupts a call, such as
    a signal's handler, comes at another place on each.
    """

    def __init__(self, rank: int, size: int, doing: str = "execute"):
        self._rank, self._alone, self.doing = rank, size == 1, doing
        self._lock = threading.RLock()
        self._inside: list[CodeType] = []  # what has entered, of the thread that has the lock
        self._left: _LeftOff | None = None
        if not self._alone:
            os.register_at_fork(after_in_child=self._forked)

    def __enter__(self) -> None:
        if self._alone:
            return
        self.check()
        if not self._lock.acquire(blocking=False):
            self.check()  # `end`, which refuses all further calls, holds the lock.
            thread = f"thread {threading.current_thread().name!r} while another is at it"
            raise self._mixed_up(f"two threads {self.doing} at once", thread, f"Let one thread of a rank {self.doing}.")
        caller = sys._getframe(1)
        if self._inside and not comes_from_a_function(caller.f_back, self._inside[-1]):
            self._lock.release()
            raise self._mixed_up(
                f"a call to {self.doing} interrupts another", "a signal's handler, or the end of an object",
                "Let the handler note that it was called, and look at the note between calls.",
            )  # fmt: skip
        self._inside.append(caller.f_code)

    def _mixed_up(self, wrong: str, found: str, do: str) -> MeshfuseError:
        """The error of a call at a place that is another one on each rank; no call follows it."""
        self._left = _LeftOff(f"{wrong}, {found}", wrong=f"a call to {self.doing} follows one that failed")
        return user_error(wrong, found, "the same order of calls on all ranks", do, caller_line(), ArgumentError)

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if self._alone:
            return
        self._inside.pop()
        self._lock.release()
        if kind is None:
            self.check()  # Another thread may have tried to enter meanwhile.

    def check(self) -> None:
        """RankError where this rank can do nothing more together with the others."""
        left = self._left
        if left is not None and left.ranks is None:
            raise user_error(left.wrong, left.found, left.needed, left.do, caller_line(), RankError)

    def _forked(self) -> None:
        self._lock, self._inside = threading.RLock(), []
        self._left = _LeftOff(
            f"a fork of the process of rank {self._rank}", wrong="this process is no rank",
            needed="the rank's own process, which has its connections",
            do="Execute there, or start processes without RANK and WORLD_SIZE that fork none.",
        )  # fmt: skip

    def end(self, seconds: float) -> bool:
        """Refuse all further calls: this rank is about to tell the others that it is done.

        Returns whether the call that another thread is in has ended within so many seconds. That thread has a moment to
        end by the error of the next one: a daemon that is in torch when the interpreter goes ends the process.
        """
        self._left = _LeftOff(
            f"a call to {self.doing} at the interpreter's exit", wrong="this rank has left its job",
            needed="all of them before",
            do="Register functions that do so with atexit after meshfuse is first used: the last one runs first.",
        )  # fmt: skip
        others = [thread for thread in threading.enumerate() if self._is_in(thread)]
        ended = self._lock.acquire(timeout=seconds)
        for thread in others if ended else ():
            thread.join(_MOMENT)
        return ended

    def _is_in(self, thread: threading.Thread) -> bool:
        """Whether another thread is in a call that has entered."""
        frame = sys._current_frames().get(thread.ident or 0)
        while frame is not None and frame.f_code not in self._inside:
            frame = frame.f_back
        return frame is not None and thread is not threading.current_thread()

    def leave_off(self, where: str, ranks: Sequence[int], error: BaseException) -> None:
        """Note that an error has ended an execution of `ranks` at `where`, before its last communication."""
        mended_by = None if isinstance(error, RankError) else tuple(ranks)
        self._left = self._left or _LeftOff(f"{type(error).__name__} in {where}", where, mended_by)

    def resume(self, check_same: Callable[..., None]) -> None:
        """Let this rank execute again after an error that the script has caught, if all ranks stopped at one place.

        `check_same` compares that over the ranks. Without it this rank's next communications would meet, unnoticed,
        those that the others still wait for.
        """
        left = self._left
        if left is not None:
            self.check()
            do = "Let the error end the process."
            check_same(left.where, f"where executions ended: {left.found}", left.ranks, do=do)
            self._left = None
