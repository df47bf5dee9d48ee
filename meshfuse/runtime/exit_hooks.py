"""How a rank ends when it fails: its peers learn why, and its process is gone at once."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from types import TracebackType
from typing import NoReturn, Protocol

from ..errors import MeshfuseError, RankError, RankTimeout
from . import exit_page

# Set by `meshfuse run`: the exit code of ranks that only follow a failed peer, whose traceback they leave to
# it. The code after it is of those that waited in vain for a peer, which may never end by itself.
FOLLOWER = "MESHFUSE_FOLLOWER_CODE"


class Publisher(Protocol):
    """The part of World that a dying rank needs."""

    rank: int

    def publish_failure(self, error: BaseException) -> None: ...
    def depart(self, error: BaseException) -> None: ...


# Taken by the first who says why this process ends, so that it is said once.
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
            previous(kind, error, trace)  # A forked child is not a rank.
            return
        follows = error if isinstance(error, RankError) and FOLLOWER in os.environ else None
        ending.acquire(blocking=False)
        try:
            world.publish_failure(error)
            # torch.distributed's own hook, where it came later, collects what this one prints: the process ends first.
            with contextlib.redirect_stderr(sys.__stderr__ or sys.stderr):
                if follows is not None and _needs_no_traceback(follows):
                    _print_short(world.rank, follows)
                else:
                    previous(kind, error, trace)
                _flush()
            world.depart(error)
        finally:
            os._exit(code_of(error))

    sys.excepthook = hook


def code_of(error: BaseException) -> int:
    """The exit code of a rank that ends by this error."""
    if isinstance(error, RankError) and FOLLOWER in os.environ:
        return int(os.environ[FOLLOWER]) + isinstance(error, RankTimeout)
    return 1


def report_user_errors() -> None:
    """Under `meshfuse run`, tell the launcher of errors in definitions and arguments.

    A restart would only repeat them.
    """
    if FOLLOWER not in os.environ or exit_page.own() is None:
        return
    previous, process = sys.excepthook, os.getpid()

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if os.getpid() == process and isinstance(error, MeshfuseError) and isinstance(error, ValueError):
            exit_page.tell_user_error(int(os.environ.get("RANK", "0")), error)
        previous(kind, error, trace)

    sys.excepthook = hook


def _needs_no_traceback(error: RankError) -> bool:
    """Whether the error's own text has all that this rank's traceback would say: the failed peer's, or the line."""
    return error.peer is not None or error.where is not None


def _print_short(rank: int, error: RankError) -> None:
    """Print an error without the failed peer's traceback that its text has: that rank prints it itself."""
    where = "" if error.where is None else f" at {error.where}"
    followed = f"stopped in {error.ended}{where}, because rank {error.peer} failed"
    print(f"rank {rank}: {error if error.peer is None else followed}", file=sys.stderr)


def end_at_once(code: int) -> NoReturn:
    """End the process without finalising the interpreter."""
    _flush()
    os._exit(code)


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):  # The reader may have gone.
            stream.flush()
