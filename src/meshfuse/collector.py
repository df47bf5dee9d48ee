"""Python's garbage collector while a program is compiled, or its backward written."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator

# To look through so many objects takes the garbage collector a third of a millisecond.
MUCH = 10_000


class _Frozen:
    """What the user's program has frozen, as far as is known."""

    def __init__(self) -> None:
        self.found = False

    def is_there(self) -> bool:
        """Whether there is any, or once was: to count frozen objects looks through them all, and is done no more."""
        self.found = self.found or gc.get_freeze_count() > 0
        return self.found


FROZEN = _Frozen()


@contextlib.contextmanager
def no_collection() -> Iterator[None]:
    """For what makes many objects and no cycles of them: looking for some takes up to a third of its time."""
    was_on = gc.isenabled()
    try:
        gc.disable()
        yield
        if was_on:
            _age()
    finally:
        if was_on:
            gc.enable()


def _age() -> None:
    """What was made counts as old, where it is much: else the next collection of young objects looks through it all."""
    if gc.get_count()[0] > MUCH and not FROZEN.is_there():  # what a user has frozen would thaw
        try:
            gc.freeze()
        finally:
            gc.unfreeze()
