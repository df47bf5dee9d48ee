"""Who failed, and where everyone else is: published tracebacks, and a roll call of the ranks.

Each rank runs a thread that sleeps on the store until a peer calls it, and then answers where this rank's main thread
is. So a rank that is stopped or gone is distinguished from one that is only slow.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import timedelta
from types import FrameType

import torch.distributed as dist

from ..errors import RankError, line_in_script
from .deadlines import within
from .store import await_keys

FAILED = "has failed, too"
_HERE = os.path.dirname(os.path.abspath(__file__)) + os.sep
_LOOK = 2.0  # Seconds that a rank has to answer, or a failed one to say why.
_LONG = timedelta(days=20)  # As milliseconds it must fit 31 bits.


@dataclass(frozen=True, slots=True)
class Failure:
    """What a rank published before it died: its traceback. `primary` is False where it died of a peer's failure."""

    rank: int
    text: str
    primary: bool


def publish(store: dist.Store, rank: int, error: BaseException) -> None:
    """Make this rank's failure known. The first primary failure and the first secondary one are kept."""
    text = text_of(error)
    key = "failure/secondary" if isinstance(error, RankError) else "failure/primary"
    store.compare_set(key, "", json.dumps([rank, text]))


def text_of(error: BaseException) -> str:
    """An error with its traceback."""
    return "".join(traceback.format_exception(error)).rstrip()


def published(store: dist.Store) -> Failure | None:
    """The failure that some rank has published: the primary one if there is one."""
    for key in ("failure/primary", "failure/secondary"):
        if store.check([key]):
            rank, text = json.loads(store.get(key))
            return Failure(rank, text, key == "failure/primary")
    return None


def look_for_failure(store: dist.Store, gone: Callable[[], bool]) -> Failure | None:
    """Wait up to two seconds for a primary failure: connections break just before or after it is published.

    `gone` says whether the peer's process has ended, and so publishes nothing more.
    """

    def wait() -> Failure | None:
        until = time.monotonic() + _LOOK
        while not store.check(["failure/primary"]) and time.monotonic() < until and not gone():
            time.sleep(0.02)
        return published(store)

    return within(_LOOK + 1, wait)


def roll_call(store: dist.Store, ranks: Iterable[int], seconds: float = _LOOK) -> dict[int, str | None] | None:
    """By rank what it says it is doing, None where it does not answer; None for all if the store does not answer."""
    ranks = tuple(ranks)
    return within(seconds + 2, lambda: _call(store, ranks, seconds))


def _call(store: dist.Store, ranks: tuple[int, ...], seconds: float) -> dict[int, str | None]:
    finished = {rank: message for rank in ranks if (message := goodbye(store, rank)) is not None}
    replies = {rank: _ring(store, rank) for rank in ranks if rank not in finished}
    silent = await_keys(store, list(replies.values()), seconds, lambda: None)
    answers = {rank: None if key in silent else store.get(key).decode() for rank, key in replies.items()}
    return answers | finished


def goodbye(store: dist.Store, rank: int) -> str | None:
    """The message of a rank that left the job; None where it has not left."""
    key = f"left/{rank}"
    return store.get(key).decode() if store.check([key]) else None


def _ring(store: dist.Store, rank: int) -> str:
    number = store.add(f"calls/{rank}", 1)
    store.set(f"call/{rank}/{number}", "where")
    return f"reply/{rank}/{number}"


class Responder:
    """The thread that answers roll calls for this rank, on its own connection to the store."""

    def __init__(self, store: dist.Store, rank: int, doing: Callable[[], str]):
        self._store, self._rank, self._doing = store, rank, doing
        self._own: dist.Store = store.clone()  # pyright: ignore[reportAttributeAccessIssue]
        self._thread = threading.Thread(target=self._answer, name="meshfuse-responder", daemon=True)
        self._thread.start()

    def _answer(self) -> None:
        number = 1
        try:
            while self._await_call(number):
                self._own.set(f"reply/{self._rank}/{number}", self._doing())
                number += 1
        except RuntimeError:
            pass  # The store is gone, so nobody can call any more.

    def _await_call(self, number: int) -> bool:
        key = f"call/{self._rank}/{number}"
        while True:
            try:
                self._own.wait([key], _LONG)
                return self._own.get(key) != b"stop"
            except dist.DistStoreError:
                continue

    def stop(self, seconds: float) -> bool:
        """End the thread before the interpreter ends; returns whether it has ended.

        It must not wake up while the interpreter is finalised.
        """
        within(seconds, self._send_stop)
        self._thread.join(seconds)
        return not self._thread.is_alive()

    def _send_stop(self) -> None:
        number = self._store.add(f"calls/{self._rank}", 1)
        self._store.set(f"call/{self._rank}/{number}", "stop")


def main_thread_frame() -> FrameType | None:
    """The innermost frame of the main thread; inside a signal handler of that thread, the frame that it interrupted."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    if threading.current_thread() is not threading.main_thread():
        return frame
    while frame is not None and frame.f_code.co_filename.startswith(_HERE):
        frame = frame.f_back
    return frame


def line_of(frame: FrameType | None) -> str:
    """What a thread executes, as `runs function at file:line`; the line is the script's.

    If the thread waits for a thread of this package, the function is the one of this package that waits.
    """
    waits = frame
    while waits is not None and waits.f_code.co_filename == threading.__file__:
        waits = waits.f_back
    found = waits if waits is not None and waits.f_code.co_filename.startswith(_HERE) else frame
    line = None if found is None else line_in_script(found)
    if found is None or line is None or line.file.startswith(_HERE):
        return "is exiting"
    return f"runs {found.f_code.co_name} at {line}"
