"""What planning keeps in order to look it up again: bounded caches, which are dropped before they are a burden.

Python's garbage collector looks through every object three times when the interpreter ends, and now and then before. A
million objects of planning cost it seconds there, where nothing but an end is wanted; letting go of them costs a tenth
of that.
"""

from __future__ import annotations

import atexit
import functools
import sys
from collections.abc import Iterator, Mapping
from typing import Any

# The objects that may be kept: letting go of so many takes some hundredths of a second.
MOST = 250_000
_CACHE = type(functools.lru_cache(maxsize=1)(len))
_PACKAGE = f"{__package__}."


class _Kept:
    """How many objects plannings have left behind since the caches were last dropped, which hold no more than these."""

    def __init__(self) -> None:
        self.objects = 0

    def add(self, objects: int) -> None:
        """Note what a planning has left behind, and drop the caches where they may hold too much by now."""
        self.objects += objects
        if self.objects > MOST:
            self.objects = 0
            drop()


KEPT = _Kept()


def drop() -> None:
    """Empty all bounded caches of this package: those without a bound hold the few things that are made once."""
    for cache in _bounded_caches():
        cache.cache_clear()


def _bounded_caches() -> Iterator[Any]:
    """Those of functions, of classes and of methods, in all modules that have been imported."""
    spaces = [vars(module) for name, module in list(sys.modules.items()) if name.startswith(_PACKAGE)]
    classes = [vars(value) for space in spaces for value in list(space.values()) if isinstance(value, type)]
    for space in (*spaces, *classes):
        yield from filter(_is_ours, list(space.values()))


def _is_ours(value: Any) -> bool:
    if not isinstance(value, _CACHE) or not value.__module__.startswith(_PACKAGE):
        return False
    parameters: Mapping[str, Any] = value.cache_parameters()
    return parameters["maxsize"] is not None


# What is registered first runs last: after the functions of a script that plan at its end.
atexit.register(drop)
