"""What a rank plans. Peers that wait for it read it; after two seconds it is printed to stderr.

A rank that plans is no dead peer, however long it takes: waits for other ranks go on while one of them plans, and those
that are waited for answer. A rank that is stopped, or was killed, answers nothing.
"""

from __future__ import annotations

import contextlib
import itertools
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from .deadlines import within
from .diagnosis import FailureContext, seconds_since
from .roll_call import roll_call

_PLANS = "plans "  # With what a rank's answer begins that plans, or waits for one that does.
_TOLD = (2.0, 10.0, 30.0)  # After so many seconds a line is printed, and then every minute.
_ANSWER = 3.0  # Seconds that a rank has to answer: where it plans, its threads share one core.


@dataclass(slots=True)
class _Planning:
    """What is planned, and by which other rank, if this one waits for its plan."""

    what: str
    by: int | None = None
    start: float = field(default_factory=time.monotonic)
    over: threading.Event = field(default_factory=threading.Event)
    lines: int = 0

    def __str__(self) -> str:
        text = f"{_PLANS}{self.what}, for {seconds_since(self.start):.0f} s so far"
        return text if self.by is None else f"{text}, by way of rank {self.by}, which it waits for"


class Plans:
    """The planning of this rank; of a program that is planned within another one's planning nothing is said."""

    def __init__(self, rank: int):
        self._rank = rank
        self._now: _Planning | None = None

    def description(self) -> str:
        """What this rank plans, in words; "" for nothing."""
        now = self._now
        return "" if now is None else str(now)

    @contextlib.contextmanager
    def under_way(self, what: str) -> Iterator[None]:
        """A context in which this rank plans `what`."""
        if self._now is not None:
            yield
            return
        mine, done = _Planning(what), "gave up planning"
        try:
            self._now = mine
            threading.Thread(target=self._tell, args=(mine,), name="meshfuse-planning", daemon=True).start()
            yield
            done = "planned"
        finally:
            self._now = None
            mine.over.set()
            if mine.lines:
                self._print(f"{done} {what} in {seconds_since(mine.start):.1f} s")

    @contextlib.contextmanager
    def waiting_for(self, rank: int) -> Iterator[None]:
        """A context in which another rank makes the plan."""
        now = self._now
        assert now is not None, "only what is planned can be waited for"
        now.by = rank
        try:
            yield
        finally:
            now.by = None

    def _tell(self, planning: _Planning) -> None:
        """Print a line now and then, unless the rank that makes the plan does."""
        for after in itertools.chain(_TOLD, itertools.count(60.0, 60.0)):
            if planning.over.wait(max(0.0, planning.start + after - time.monotonic())):
                return
            if planning.by is None:
                planning.lines += 1
                self._print(f"{planning}; the others wait for it")

    def _print(self, text: str) -> None:
        with contextlib.suppress(OSError, ValueError):  # The reader may have gone.
            print(f"rank {self._rank}: {text}", file=sys.stderr, flush=True)


def plans(answer: str | None) -> bool:
    """Whether a rank that answers so plans."""
    return answer is not None and answer.startswith(_PLANS)


def awaits_a_plan(context: FailureContext, ranks: Sequence[int]) -> bool:
    """Whether it is for planning that `ranks` are waited for: all of them answer, and they or others plan.

    A rank that does not plan itself may wait for one that does.
    """
    others = [rank for rank in ranks if rank != context.rank]
    answers = _answers(context, others)
    if not answers or None in answers.values():
        return False
    rest = [rank for rank in context.all_ranks if rank not in others and rank != context.rank]
    return any(map(plans, answers.values())) or any(map(plans, _answers(context, rest).values()))


def _answers(context: FailureContext, ranks: Sequence[int]) -> dict[int, str | None]:
    """What each of the ranks says it is doing, None where it cannot or does not answer."""
    within(1.0, lambda: context.peers.remember(ranks))
    mute = {*context.peers.silent_already(ranks), *context.peers.strangers(ranks)}
    answers = roll_call(context.store, [rank for rank in ranks if rank not in mute], _ANSWER) if ranks else {}
    return {rank: None for rank in ranks} | (answers or {})
