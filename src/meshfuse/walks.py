"""Walks over what is made of what. Programs are deeper than Python's stack: a loss over a thousand terms is a chain."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from typing import TypeVar

T = TypeVar("T", bound=Hashable)


def inner_first(start: T, parts: Callable[[T], Iterable[T]]) -> list[T]:
    """All that something is made of by way of its parts, and itself: each once, after its own parts."""
    done, waiting = dict[T, None](), [start]
    while waiting:
        missing = [part for part in parts(waiting[-1]) if part not in done]
        waiting += reversed(missing)
        if not missing:
            done[waiting.pop()] = None
    return list(done)
