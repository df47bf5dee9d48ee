"""Errors at any call of meshfuse's own code: KeyboardInterrupt, as Ctrl-C may come, and what the system refuses."""

from __future__ import annotations

import contextlib
import functools
import gc
import itertools
import sys
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

from meshfuse.plan_store.nearby import PLANS

# What asks the system for something, by module; less what cannot be refused, or does not say so.
_SYSTEM = ("posix", "_io", "fcntl")
_SAFE = ("close", "closed", "fspath", "getpid", "_path_normpath", "tell", "getvalue", "getbuffer")


@contextlib.contextmanager
def interrupted(count: int, *files: str, by: BaseException | None = None) -> Iterator[None]:
    """KeyboardInterrupt, or another error, at so many calls in the files of these names, or where one of C's functions
    returns to them.
    """
    with _raising(count, by or KeyboardInterrupt(), lambda frame, event, arg: _counts(frame, event, files)):
        yield


@contextlib.contextmanager
def refused(count: int, error: Exception, *files: str) -> Iterator[None]:
    """An error in place of what these files, or the library for them, ask the system for, at so many calls."""
    with _raising(count, error, lambda frame, event, arg: event == "c_call" and _asks(frame, arg, files)):
        yield


@contextlib.contextmanager
def _raising(count: int, error: BaseException, counts: Callable[[FrameType, str, Any], bool]) -> Iterator[None]:
    left = itertools.count(count, -1)

    def look(frame: FrameType, event: str, arg: Any) -> None:
        if counts(frame, event, arg) and not next(left):
            sys.setprofile(None)
            raise error

    sys.setprofile(look)
    try:
        yield
    finally:
        sys.setprofile(None)


def _asks(frame: FrameType, function: Any, files: tuple[str, ...]) -> bool:
    owner = getattr(function, "__self__", None)
    names = (getattr(function, "__module__", None), type(owner).__module__)
    if function.__name__ in _SAFE or not any(name in _SYSTEM for name in names):
        return False
    stack = [found.f_code.co_filename for found in _callers(frame)]
    return any(name in file for name in files for file in stack) and not any("importlib" in file for file in stack)


def _callers(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back


def places(call: Callable[[], object], *files: str) -> list[int]:
    """Counts for `interrupted`: the first time at each place in the files that the call comes by."""
    found: dict[Any, int] = {}
    number = itertools.count(1)

    def look(frame: FrameType, event: str, arg: Any) -> None:
        if _counts(frame, event, files):
            found.setdefault((frame.f_code, frame.f_lineno, event), next(number))

    sys.setprofile(look)
    try:
        call()
    finally:
        sys.setprofile(None)
    return sorted(found.values())


def _counts(frame: FrameType, event: str, files: tuple[str, ...]) -> bool:
    code = frame.f_code  # What is raised in a generator's last moment is lost.
    watched = code.co_name != "<genexpr>" and any(name in code.co_filename for name in files)
    return watched and event in ("call", "c_return")


def forget() -> None:
    """Let the next compilation begin as a process' first one does."""
    for cache in _caches():
        cache.cache_clear()
    PLANS.__init__()


@functools.cache
def _caches() -> list[Any]:
    caches = [found for found in gc.get_objects() if type(found) is functools._lru_cache_wrapper]
    return [found for found in caches if str(found.__module__).startswith("meshfuse.")]
