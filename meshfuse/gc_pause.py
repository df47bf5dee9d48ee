"""Python's garbage collector, held off while a program is compiled or its backward is written."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator

from .caches import KEPT

# The garbage collector takes a third of a millisecond to look through so many objects.
MUCH = 10_000


class _Frozen:
    """What the user's program has frozen (`gc.freeze`), as far as is known."""

    def __init__(self) -> None:
        self.found = False

    def is_there(self) -> bool:
        """Whether the user has ever frozen objects.

        Counting looks through all of them, so it ends with the first that is found.
        """
        self.found = self.found or gc.get_freeze_count() > 0
        return self.found


FROZEN = _Frozen()


@contextlib.contextmanager
def no_collection() -> Iterator[None]:
    """In this context nothing is collected: looking for cycles would take a third of the time, and there are none."""
    was_on, before = gc.isenabled(), gc.get_count()[0]
    try:
        gc.disable()
        yield
        if was_on:
            KEPT.add(max(0, gc.get_count()[0] - before))  # all that was made since then and is still there
            _age()
    finally:
        if was_on:
            gc.enable()


def _age() -> None:
    """Make the collector treat many new objects as old. Else its next young collection would look through them all."""
    if gc.get_count()[0] > MUCH and not FROZEN.is_there():  # what the user has frozen would be thawed, too
        try:
            gc.freeze()
        finally:
            gc.unfreeze()
