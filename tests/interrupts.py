"""Errors at any call of meshfuse's own code: KeyboardInterrupt, as Ctrl-C may come, and what the system refuses."""

from __future__ import annotations

import contextlib
import functools
import itertools
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import meshfuse
from meshfuse.plans.shape_reuse import PLANS

# What asks the system for something, by module; less what cannot be refused, or does not say so.
_SYSTEM = ("posix", "_io", "fcntl")
_SAFE = (
    "close",
    "closed",
    "fspath",
    "getpid",
    "getuid",
    "_path_normpath",
    "tell",
    "getvalue",
    "getbuffer",
    "text_encoding",
)


@contextlib.contextmanager
def interrupted(count: int, *files: str) -> Iterator[None]:
    """KeyboardInterrupt at so many calls in the files of these names, or where one of C's functions returns to them."""
    with _raising(count, KeyboardInterrupt(), _calls(files)):
        yield


@contextlib.contextmanager
def refused(count: int, error: Exception, *files: str) -> Iterator[None]:
    """An error in place of what these files, or the library for them, ask the system for, at so many calls."""
    with _raising(count, error, _requests(files)):
        yield


def places(call: Callable[[], object], *files: str) -> list[int]:
    """Counts for `interrupted`: the first time at each place in the files that the call comes by."""
    return _first(call, _calls(files))


def requests(call: Callable[[], object], *files: str) -> list[int]:
    """Counts for `refused`: the first time at each place, identified by three frames, that the call comes by."""
    return _first(call, _requests(files), 3)


_Counts = Callable[[FrameType, str, Any], bool]
_HOME = f"{Path(meshfuse.__file__).parent}/"  # Not any path with its name: environments lie in ~/.cache/meshfuse.


@contextlib.contextmanager
def _raising(count: int, error: BaseException, counts: _Counts) -> Iterator[None]:
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


def _first(call: Callable[[], object], counts: _Counts, depth: int = 1) -> list[int]:
    found: dict[Any, int] = {}
    number = itertools.count(1)

    def look(frame: FrameType, event: str, arg: Any) -> None:
        if counts(frame, event, arg):
            stack = itertools.islice(_callers(frame), depth)
            found.setdefault((event, *((f.f_code, f.f_lineno) for f in stack)), next(number))

    sys.setprofile(look)
    try:
        call()
    finally:
        sys.setprofile(None)
    return sorted(found.values())


@functools.cache
def _check_names(files: tuple[str, ...]) -> None:
    """A name that no file of meshfuse's has watches nothing; "<" begins those of texts that are compiled."""
    paths = [str(path) for path in Path(_HOME).rglob("*.py")]
    unknown = [name for name in files if name[0] != "<" and not any(name in path for path in paths)]
    assert not unknown, f"no file of meshfuse's is called {unknown}"


def _calls(files: tuple[str, ...]) -> _Counts:
    _check_names(files)
    watched: dict[str, bool] = {}  # It is asked at each call of the process.

    def counts(frame: FrameType, event: str, arg: Any) -> bool:
        if event not in ("call", "c_return"):
            return False
        code = frame.f_code
        file = code.co_filename
        if file not in watched:
            watched[file] = _is_one(file, files)
        return watched[file] and code.co_name != "<genexpr>"  # What is raised in its last moment is lost.

    return counts


def _requests(files: tuple[str, ...]) -> _Counts:
    _check_names(files)

    def counts(frame: FrameType, event: str, arg: Any) -> bool:
        if event != "c_call" or arg.__name__ in _SAFE or not _of_system(arg):
            return False
        stack = [found.f_code.co_filename for found in _callers(frame)]
        return any(_is_one(file, files) for file in stack) and not any("importlib" in file for file in stack)

    return counts


def _is_one(file: str, names: tuple[str, ...]) -> bool:
    return file.startswith((_HOME, "<")) and any(name in file for name in names)


def _of_system(function: Any) -> bool:
    owner = getattr(function, "__self__", None)
    return getattr(function, "__module__", None) in _SYSTEM or type(owner).__module__ in _SYSTEM


def _callers(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back


def forget() -> None:
    """Let the next compilation begin as a process' first one does."""
    for cache in _caches():
        cache.cache_clear()
    PLANS.__init__()


@functools.cache
def _caches() -> list[Any]:
    """Found by their modules: the collector does not tell of what conftest.py has frozen."""
    modules = [module for name, module in sys.modules.items() if name.startswith("meshfuse.")]
    spaces = [vars(module) for module in modules]
    spaces += [vars(kind) for space in spaces for kind in space.values() if isinstance(kind, type)]
    held = [getattr(value, "__func__", value) for space in spaces for value in space.values()]
    found = {id(value): value for value in held if type(value) is functools._lru_cache_wrapper}
    caches = [cache for cache in found.values() if cache.__module__.startswith("meshfuse.")]
    assert len(caches) > 20
    return caches
