"""Classes with a `definition` method, and one that annotates (`multidevice_schedule`)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..errors import caller_line, user_error

if TYPE_CHECKING:
    from .definition import FusionDefinition

NAMES = ("definition", "multidevice_schedule")


class Methods:
    """Runs a definition's methods once, unless the script has called them."""

    __slots__ = ("_failed", "_running")

    def __init__(self) -> None:
        self._running = self._failed = ""

    def run(self, fd: FusionDefinition) -> None:
        """Run the methods that have not run yet.

        Raises DefinitionError where a method asks for what it is to define, or was ended by an error before: what it
        would have said is missing.
        """
        if self._failed or (self._running and not fd.tensors):
            found = f"its method {self._failed or self._running + ', which asks for a result'}"
            do = "Make a new definition." if self._failed else "Execute the definition outside of it."
            needed = "methods that have come to their ends"
            raise user_error("the definition is not finished", found, needed, do, caller_line())
        if fd.tensors:
            return
        for name in NAMES:
            if callable(getattr(fd, name, None)):
                self._call(fd, name)

    def _call(self, fd: FusionDefinition, name: str) -> None:
        self._running = name
        try:
            getattr(fd, name)()
        except BaseException as error:
            self._failed = f"{name}, ended by {type(error).__name__}"
            raise
        finally:
            self._running = ""
