"""KeyboardInterrupt at any call of meshfuse's own code, as Ctrl-C may come: what is kept over it must stay right."""

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


@contextlib.contextmanager
def interrupted(count: int, *files: str) -> Iterator[None]:
    """KeyboardInterrupt at so many calls in the files of these names, or where one of C's functions returns to them."""
    left = itertools.count(count, -1)

    def look(frame: FrameType, event: str, arg: Any) -> None:
        if _counts(frame, event, files) and not next(left):
            sys.setprofile(None)
            raise KeyboardInterrupt

    sys.setprofile(look)
    try:
        yield
    finally:
        sys.setprofile(None)


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
