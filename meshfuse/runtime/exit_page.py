"""A page of memory that `meshfuse run` and its ranks share: which rank has ended, and why.

The launcher sees first how a rank ended, but only the ranks know what they were doing; with the page a rank can say
both. It is gone when the last of them has ended. Imports no torch. Without `memfd_create` (Linux) there is no page, and
nothing is said.
"""

from __future__ import annotations

import contextlib
import os

VARIABLE = "MESHFUSE_NEWS_FD"
FINISHED = "has finished"
_USER_ERROR = "user-error"
_MOST = 1 << 18  # At most so many bytes are read: a line for each rank that has ended.
_NAME = "meshfuse-exit-page"


def make() -> int | None:
    """A new page, as a file number to be passed on to ranks; None where there is none."""
    if not hasattr(os, "memfd_create"):
        return None
    with contextlib.suppress(OSError):  # No room for another file.
        return os.memfd_create(_NAME, 0)
    return None


def tell(fd: int | None, rank: int, text: str) -> None:
    """Let all readers know what became of a rank: "was killed by SIGKILL"."""
    if fd is not None:
        with contextlib.suppress(OSError):  # The page counts as a file for `ulimit -f`.
            os.write(fd, f"{rank} {text}\n".encode())  # All writers share one offset.


def read(fd: int | None) -> dict[int, str]:
    """By rank what became of it, the first that was told of each; errors of users are left out."""
    return {rank: text for rank, text in reversed(_lines(fd)) if not text.startswith(_USER_ERROR)}


def first_user_error(fd: int | None) -> tuple[int, str] | None:
    """(rank, kind) of the first error that is the user's own: every attempt would raise it again. None without one."""
    found = [(rank, text.split(" ")[1]) for rank, text in _lines(fd) if text.startswith(_USER_ERROR)]
    return found[0] if found else None


def tell_user_error(rank: int, error: BaseException) -> None:
    """Tell the launcher that this rank ends by an error that follows from the script alone."""
    tell(own(), rank, f"{_USER_ERROR} {type(error).__name__}")


def own() -> int | None:
    """The file number of the page that this rank was given; None where it was given none."""
    text = os.environ.get(VARIABLE, "")
    # A process that a rank started has the variable, but another file or none under that number.
    with contextlib.suppress(OSError, ValueError):
        if _NAME in os.readlink(f"/proc/self/fd/{int(text)}"):
            return int(text)
    return None


def _lines(fd: int | None) -> list[tuple[int, str]]:
    if fd is None:
        return []
    data = b""
    with contextlib.suppress(OSError):
        data = os.pread(fd, _MOST, 0)
    pairs = [line.partition(" ") for line in data.decode(errors="replace").splitlines()]
    return [(int(rank), text) for rank, _, text in pairs if rank.isdigit()]
