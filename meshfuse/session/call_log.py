"""What a controller remembers of the calls that it issued, for what it says of them."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from ..errors import SourceLine

_REMEMBERED = 4096  # Calls.


@dataclass(frozen=True, slots=True)
class Issued:
    """One call: its number, what was called, and the line of the controller's script."""

    number: int
    what: str
    line: SourceLine

    def __str__(self) -> str:
        return f"{self.what} at {self.line}"


class CallLog:
    """The latest calls."""

    def __init__(self) -> None:
        # In parts: few of them are ever asked for.
        self._calls: deque[tuple[int, str, SourceLine]] = deque(maxlen=_REMEMBERED)

    def add(self, number: int, what: str, line: SourceLine) -> None:
        """Remember a call."""
        self._calls.append((number, what, line))

    def find(self, number: int) -> Issued | None:
        """The call of this number, if it is remembered."""
        return next((Issued(*call) for call in self._calls if call[0] == number), None)

    def latest(self, number: int) -> str:
        """The latest call up to this number, in words."""
        issued = next((Issued(*call) for call in reversed(self._calls) if call[0] <= number), None)
        return "" if issued is None else f" and the calls up to {issued}"

    def difference(self, done: Sequence[tuple[int, int]]) -> str | None:
        """How workers differ in what they have done, in words; None where they do not.

        done: of each worker the first call that it did not finish, and the last one that it has done; 0 for none. One
        that has done no later call than the first that is unfinished anywhere does not differ: of that call users know.
        """
        first = min((unfinished for unfinished, _ in done if unfinished), default=0)
        ahead = [worker for worker, (_, last) in enumerate(done) if last > first]
        if not first or not ahead:
            return None
        behind = [worker for worker in range(len(done)) if worker not in ahead]
        have = f"{_named(ahead)} did calls after {self.find(first) or f'call {first}'}"
        return f"{have}, which {_named(behind)} had to leave: what they hold differs"


def _named(workers: Sequence[int]) -> str:
    return f"worker{'s' if len(workers) > 1 else ''} {', '.join(map(str, workers))}"
