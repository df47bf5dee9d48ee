"""Walks over nested structures without recursion: a loss over a thousand terms is deeper than Python's stack."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from typing import TypeVar

T = TypeVar("T", bound=Hashable)


def inner_first(start: T, parts: Callable[[T], Iterable[T]]) -> list[T]:
    """All parts of `start`, of its parts and so on, and `start` itself: each once, after its own parts."""
    done, waiting = dict[T, None](), [start]
    while waiting:
        missing = [part for part in parts(waiting[-1]) if part not in done]
        waiting += reversed(missing)
        if not missing:
            done[waiting.pop()] = None
    return list(done)
