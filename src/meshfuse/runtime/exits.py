"""How a rank ends when it fails: its peers learn why, and its process is gone at once."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from types import TracebackType
from typing import NoReturn, Protocol

from ..errors import MeshfuseError, RankError, RankTimeout
from . import news

# Set by `meshfuse run`: the exit code of ranks that only follow a failed peer, whose traceback they leave to
# it. The code after it is of those that waited in vain for a peer, which may never end by itself.
FOLLOWER = "MESHFUSE_FOLLOWER_CODE"


class Publisher(Protocol):
    """The part of World that a dying rank needs."""

    rank: int

    def publish_failure(self, error: BaseException) -> None: ...
    def depart(self, error: BaseException) -> None: ...


# Taken by whoever says first why this process ends: it is said once.
ending = threading.Lock()


def install_hook(world: Publisher) -> None:
    """Make an uncaught exception reach the peers and end the process, whatever threads gloo still has.

    Nothing that was registered with `atexit` runs then. An interactive interpreter keeps its own hook.
    """
    if hasattr(sys, "ps1"):
        return
    previous, process = sys.excepthook, os.getpid()

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if os.getpid() != process:
            previous(kind, error, trace)  # A forked child is no rank.
            return
        follows = FOLLOWER in os.environ and isinstance(error, RankError)
        ending.acquire(blocking=False)
        try:
            world.publish_failure(error)
            # torch.distributed's own hook, where it came later, collects what this one prints: the process ends first.
            with contextlib.redirect_stderr(sys.__stderr__ or sys.stderr):
                if follows and _is_told_elsewhere(error):
                    _print_short(world.rank, error)
                else:
                    previous(kind, error, trace)
                _flush()
            world.depart(error)
        finally:
            os._exit(int(os.environ[FOLLOWER]) + isinstance(error, RankTimeout) if follows else 1)

    sys.excepthook = hook


def report_user_errors() -> None:
    """Under `meshfuse run`, let the launcher know of errors that a restart would only repeat."""
    if FOLLOWER not in os.environ or news.own() is None:
        return
    previous, process = sys.excepthook, os.getpid()

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if os.getpid() == process and isinstance(error, MeshfuseError) and isinstance(error, ValueError):
            news.tell_user_error(int(os.environ.get("RANK", "0")), error)
        previous(kind, error, trace)

    sys.excepthook = hook


def _is_told_elsewhere(error: BaseException) -> bool:
    """Whether this rank's traceback would only repeat a failed peer's or the line in its message."""
    return getattr(error, "peer", None) is not None or getattr(error, "where", None) is not None


def _print_short(rank: int, error: BaseException) -> None:
    peer = getattr(error, "peer", None)
    text = str(error) if peer is None else f"stopped in {_place(error)}, because rank {peer} failed"
    print(f"rank {rank}: {text}", file=sys.stderr)


def _place(error: BaseException) -> str:
    """What the rank was in, and the user's line, out of an error of `diagnosis.peer_failed`."""
    what = str(error.args[0]).partition(" cannot finish")[0]
    where = getattr(error, "where", None)
    return what if where is None else f"{what} at {where}"


def end_at_once(code: int) -> NoReturn:
    """End the process without finalising the interpreter."""
    _flush()
    os._exit(code)


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):  # The reader may have gone.
            stream.flush()
