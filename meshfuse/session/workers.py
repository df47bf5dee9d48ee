"""`Workers`: a session's workers commanded and waited for; what goes wrong becomes an error."""

from __future__ import annotations

import itertools
import time
from collections.abc import Collection, Sequence
from typing import Any, NoReturn

from ..errors import caller_line
from .call_log import CallLog
from .compact import Buffer
from .crew import Crew
from .errors import Raised, SessionError, WorkerError, WorkerLost, WorkerTimeout, rebuild
from .links import Link, SocketLink, Woken
from .messages import CALL, CALL_AND_SYNC, DONE, FAILED, GET, SETTLE, SYNC
from .pickling import dumps, loads
from .progress import Progress
from .wire import Closed, Frame, Late

_AT_REST = 2.0  # Seconds that workers have, after a timeout, to leave the collectives that they wait in.
_MUTE = "does not answer at all (it is stopped, or its Python does not run)"


class Workers:
    """Started workers. All methods are called by one thread at a time.

    timeout: seconds of a wait. broken: why these workers cannot be used any more, if they cannot.
    """

    def __init__(self, crew: Crew, timeout: float):
        self.links, self.supervisor, self.timeout = crew.links, crew.supervisor, timeout
        self._numbers, self.log = itertools.count(1), CallLog()
        self.broken: str | None = None
        self._unsettled: int | None = None  # The epoch in which workers have left calls by themselves.
        self.profiling: Any = None

    def check(self) -> None:
        """Raises SessionError where these workers cannot be used any more, WorkerLost where one is gone."""
        if self.supervisor.lost:
            self.raise_lost(self.links[min(self.supervisor.lost)])
        if self._unsettled is not None and self.broken is None:
            self._settle(self._unsettled)
        if self.broken is not None:
            raise SessionError(f"{self.broken}. Call restart() for new workers", caller_line())

    # Commands

    def call(self, what: str, payload: Buffer, buffers: Sequence[Buffer], freed: Sequence[int]) -> None:
        """Send one call to all workers; `what` is for errors."""
        number, start = self._begin(what)
        epoch = self.supervisor.epoch
        # A worker that owes no answer answers the call: a sync that comes next has one message less.
        first, others = [Frame(kind, epoch, number, payload, buffers, freed) for kind in (CALL_AND_SYNC, CALL)]
        # Threads last: they would take the interpreter's lock from the sends.
        for link in reversed(self.links):
            self.send(link, others if link.owes_answer(number) else first)
        self._end(what, number, start)

    def call_each(self, what: str, own: Sequence[tuple[Buffer, Sequence[Buffer]]], freed: Sequence[int]) -> None:
        """Send a call with other arguments to each worker."""
        number, start = self._begin(what)
        for link in reversed(self.links):
            self._send_call(link, number, *own[link.worker], freed)
        self._end(what, number, start)

    def call_one(self, worker: int, what: str, payload: Buffer, buffers: Sequence[Buffer]) -> None:
        """Send a call to one worker alone."""
        number, start = self._begin(what)
        self._send_call(self.links[worker], number, payload, buffers, ())
        self._end(what, number, start)

    def _begin(self, what: str) -> tuple[int, float]:
        number = next(self._numbers)
        self.log.add(number, what, caller_line())
        return number, time.perf_counter()

    def _end(self, what: str, number: int, start: float) -> None:
        if self.profiling is not None:
            self.profiling.add("issue", what, number, start)

    def _send_call(
        self, link: Link, number: int, payload: Buffer, buffers: Sequence[Buffer], freed: Sequence[int]
    ) -> None:
        kind = CALL if link.owes_answer(number) else CALL_AND_SYNC
        self.send(link, Frame(kind, self.supervisor.epoch, number, payload, buffers, freed))

    def get(self, worker: int, what: str, payload: Buffer) -> Frame:
        """What one worker answers to a read. Raises what any worker has raised."""
        number, _ = self._begin(what)
        link = self.links[worker]
        self.send(link, Frame(GET, self.supervisor.epoch, number, payload))
        (answer,) = self.answers([link], [number])
        if answer.kind != DONE or self.supervisor.first is not None:
            self.raise_failures()
        return answer

    def send(self, link: Link, frame: Frame) -> None:
        """Send a command. Raises WorkerLost, or WorkerTimeout where the worker does not read."""
        try:
            link.send(frame, self._stalled)
        except Closed:
            self.raise_lost(link)
        except Late:
            self.broken = f"worker {link.worker} did not read its commands for {self.timeout:g} s"
            raise self._timed_out([link], self.timeout) from None

    def _stalled(self, seconds: float) -> None:
        """What a send calls that has not moved for so many seconds."""
        if self.supervisor.lost:
            self.raise_lost(self.links[min(self.supervisor.lost)])
        if seconds > self.timeout:
            raise Late

    # Waits

    def wait(self, workers: Sequence[int] | None = None, limit: float | None = None) -> None:
        """Wait until all workers, or these, have done all that they were sent. Raises what any worker has raised."""
        links = self.links if workers is None else [self.links[worker] for worker in workers]
        answers = self.answers(links, self._sync_numbers(links), limit)
        if self.supervisor.first is not None or any(answer.kind != DONE for answer in answers):
            self.raise_failures()

    def _sync_numbers(self, links: Sequence[Link]) -> list[int]:
        return [self._sync_number(link) for link in reversed(links)][::-1]

    def _sync_number(self, link: Link) -> int:
        """The number of the command whose answer says that a worker has done all that it was sent."""
        if link.asked and link.asked == link.last:
            return link.asked
        number = next(self._numbers)
        self.send(link, Frame(SYNC, self.supervisor.epoch, number))
        return number

    def answers(self, links: Sequence[Link], numbers: Sequence[int], limit: float | None = None) -> list[Frame]:
        """The answers of workers to one command each, within the session's timeout or another limit, in seconds."""
        limit = self.timeout if limit is None else limit
        deadline, start = time.monotonic() + limit, time.perf_counter()
        answers: list[Any] = [None] * len(links)
        progress = Progress()
        try:
            # Processes first: threads run while this one waits for them. They were sent the command last to first.
            for place in sorted(range(len(links)), key=lambda place: not isinstance(links[place], SocketLink)):
                answers[place] = self._answer(links[place], numbers[place], deadline, progress)
        except Late:
            left = [pair for pair, answer in zip(zip(links, numbers, strict=True), answers, strict=True) if not answer]
            missing = [link for link, number in left if self._found(link, number, time.monotonic()) is None]
            raise self._timed_out(missing or [left[0][0]], limit) from None
        except KeyboardInterrupt:
            self._abandon(max(numbers))
            raise
        finally:
            progress.wipe()
            if self.profiling is not None:
                self.profiling.add("wait", "a wait for workers", max(numbers), start)
        return answers

    def _answer(self, link: Link, number: int, deadline: float, progress: Progress) -> Frame:
        while True:
            try:
                return link.answer(number, progress.until(deadline))
            except Late:
                if time.monotonic() >= deadline:
                    raise
                progress.show(f"waiting for worker {link.worker}{self.log.latest(number)}")
            except Woken:
                if self.supervisor.lost:
                    self.raise_lost(self.links[min(self.supervisor.lost)])
            except Closed:
                self.raise_lost(link)

    def _found(self, link: Link, number: int, deadline: float) -> Frame | None:
        try:
            return self._answer(link, number, deadline, Progress())
        except Late:
            return None

    def _abandon(self, number: int) -> None:
        """Ctrl-C: end the calls that run, and forget what they raise."""
        self.supervisor.release(self.supervisor.epoch, 0, "the controller was interrupted")
        for link in self.links:
            link.cancel(number)
        self._renew()

    def _renew(self) -> None:
        """Begin a new epoch: what workers still answer belongs to the one before."""
        self.supervisor.renew()
        for link in self.links:
            link.asked = link.last = 0

    # What goes wrong

    def raise_failures(self) -> NoReturn:
        """Raise what failed first, once all workers have come to rest."""
        answers = self.answers(self.links, self._sync_numbers(self.links))
        told = [loads(answer.payload) for answer in answers if answer.kind == FAILED]
        self._renew()
        raise self._error_of(told)

    def _error_of(self, told: Sequence[Raised]) -> SessionError | WorkerError:
        own = sorted(
            (raised for raised in told if not raised.released), key=lambda raised: (raised.call, raised.worker)
        )
        if not own:
            reasons = "; ".join(sorted({raised.text for raised in told})) or "no worker says why"
            return SessionError(f"calls were skipped: {reasons}", caller_line())
        errors = {raised.worker: self._rebuilt(raised) for raised in own}
        first = errors[own[0].worker]
        first.failures = errors
        return first

    def _rebuilt(self, raised: Raised) -> WorkerError:
        issued = self.log.find(raised.call)
        return rebuild(raised, issued.line if issued else caller_line(), str(issued or ""))

    def raise_lost(self, link: Link) -> NoReturn:
        """Raise WorkerLost for a worker whose connection is closed; the session cannot go on."""
        self.supervisor.lose(link.worker)
        worker = min(self.supervisor.lost)
        how = self.supervisor.lost[worker]
        self.broken = f"worker {worker} is gone: {how}"
        error = WorkerLost(f"{self.broken}. Call restart() for new workers", caller_line())
        error.worker, error.how = worker, how
        raise error

    def _timed_out(self, missing: Sequence[Link], limit: float) -> WorkerTimeout:
        for link in missing:
            link.ask_where()
        states = {link.worker: link.where() or _MUTE for link in missing}
        told = "; ".join(f"worker {worker} {state}" for worker, state in states.items())
        error = WorkerTimeout(
            f"workers did not answer within {limit:g} s: {told}. The other workers are released", caller_line()
        )
        error.workers = tuple(link.worker for link in missing)
        if self._unsettled is None and self.broken is None:
            self._leave_calls(f"{error}", {worker for worker, state in states.items() if state == _MUTE})
        else:
            self._renew()
        return error

    # After a timeout

    def _leave_calls(self, reason: str, mute: Collection[int]) -> None:
        """Let workers leave the collectives that they wait in, and do no call after the first that one has left so.

        A worker that is late does what the others have done meanwhile. mute: those that are not waited for.
        """
        epoch = self._unsettled = self.supervisor.epoch
        self.supervisor.leave(reason)
        self._renew()
        until = time.monotonic() + _AT_REST
        asked = zip(self.links, self._ask_to_settle(epoch), strict=True)
        found = {link: None if link.worker in mute else self._found(link, number, until) for link, number in asked}
        first = min((left for answer in found.values() if answer and (left := loads(answer.payload)[0])), default=0)
        for link, answer in found.items():
            if first and not answer:
                link.release(epoch, first, reason)

    def _ask_to_settle(self, epoch: int) -> list[int]:
        numbers = [next(self._numbers) for _ in self.links]
        for link, number in zip(self.links, numbers, strict=True):
            self.send(link, Frame(SETTLE, self.supervisor.epoch, number, dumps(epoch)[0]))
        return numbers

    def _settle(self, epoch: int) -> None:
        """After a timeout in that epoch: wait until all workers have come to rest, and compare what they have done.

        Raises WorkerTimeout where one does not come to rest.
        """
        answers = self.answers(self.links, self._ask_to_settle(epoch))
        self._unsettled = None
        self.broken = self.log.difference([loads(answer.payload) for answer in answers])
