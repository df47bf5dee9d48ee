"""`Controller`: it calls functions on many workers, which all run the same calls in the same order.

A call is issued without waiting, and returns a DRef to what it gives on each worker. What it raised comes at the next
wait: a sync, or a read of a value. As TVM's Disco has it (github.com/apache/tvm, runtime/disco).
"""

from __future__ import annotations

import atexit
import itertools
import pickle
import threading
import time
import types
import weakref
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NoReturn, TypeVar

from ..argument_checks import as_int
from ..errors import ArgumentError, SourceLine, caller_line, shown, user_error
from . import builtin
from .crew import Crew
from .dref import DRef
from .errors import Raised, SessionError, WorkerError, WorkerLost, WorkerTimeout, WrongType, rebuild
from .forkserver import START_LIMIT
from .functions import is_importable
from .links import Link, Woken
from .messages import CALL, CALL_AND_SYNC, DONE, FAILED, GET, SYNC
from .pickling import dumps, loads
from .progress import Progress
from .registry import registered
from .wire import Closed, Frame, Late

C = TypeVar("C", bound="Controller")
_REMEMBERED = 4096  # Issued calls whose lines are known.
_open: weakref.WeakSet[Controller] = weakref.WeakSet()


@dataclass(frozen=True, slots=True)
class _Issued:
    number: int
    what: str
    line: SourceLine


class _Pickling(threading.local):
    by: object = None


_pickling = _Pickling()


class Controller:
    """Workers that run what their controller, this process, says. Worker 0 is in this process.

    num_workers, num_groups: the workers stand in so many groups of equal size, in order.
    timeout: seconds that a wait for workers takes at most; their start does not count.

    A session ends by `shutdown`, at the end of a `with` block, or with its process. Calls of several threads come one
    after the other. Methods raise SessionError once the session has ended, WorkerLost once a worker has.
    """

    def __init__(self, num_workers: int, num_groups: int, timeout: float):
        line = caller_line()
        self.num_workers = _count(num_workers, "num_workers", line)
        self.num_groups = _count(num_groups, "num_groups", line)
        if self.num_workers % self.num_groups:
            raise user_error(
                "groups of a session must be of one size", f"{num_workers} workers in {num_groups} groups",
                "a number of groups that divides the number of workers", "", line, ArgumentError,
            )  # fmt: skip
        if not isinstance(timeout, (int, float)) or not timeout > 0:
            raise user_error("a session's timeout", shown(timeout), "seconds above 0", "", line, ArgumentError)
        self.timeout, self.generation = float(timeout), 0
        self._lock = threading.RLock()
        self._numbers, self._registers = itertools.count(1), itertools.count(1)
        self._freed: deque[int] = deque()
        self._issued: deque[_Issued] = deque(maxlen=_REMEMBERED)
        self._broken: str | None = None
        self.autograd_context: Any = None
        self.profiling: Any = None
        self._setup: list[tuple[Any, tuple[Any, ...]]] = []
        self._begin()
        _open.add(self)

    def _begin(self) -> None:
        """Start the workers; they end with this object, if not before."""
        self._crew = self._start()
        self._end = weakref.finalize(self, Crew.close, self._crew, False)
        self._end.atexit = False

    def _start(self) -> Crew:
        raise NotImplementedError

    # Calls

    def get_global_func(self, name: str) -> DRef:
        """The function registered under that name, on every worker; the DRef can be called.

        A module that registers it and is imported here is imported on the workers, too. A function of this script or
        notebook is sent as it is.
        """
        function = registered(name)
        if isinstance(function, types.FunctionType) and not is_importable(function):
            return self._call_now_and_after_restarts(builtin.define_function, (name, function), name)
        module = getattr(function, "__module__", None)
        return self._call(builtin.get_function, (name, module), {}, name)

    def call_packed(self, function: Any, *args: Any, **kwargs: Any) -> DRef:
        """Call a function on every worker: a DRef to one, or a function itself.

        In the arguments, however deep, a DRef stands for what each worker has in it. All else is copied to each worker.
        """
        if not callable(function):
            do = f"For a registered one: get_global_func({function!r})." if isinstance(function, str) else ""
            raise user_error("call", shown(function), "a function, or a DRef to one", do, caller_line(), ArgumentError)
        what = getattr(function, "_what", None) or getattr(function, "__name__", type(function).__name__)
        return self._call(function, args, kwargs, what)

    call = call_packed

    def import_python_module(self, name: str) -> None:
        """Import a module on every worker; it may register functions."""
        self._call_now_and_after_restarts(builtin.import_module, (name,), f"import {name}")

    def _call_now_and_after_restarts(self, function: Any, args: tuple[Any, ...], what: str) -> DRef:
        self._setup.append((function, args))
        return self._call(function, args, {}, what)

    def _call(
        self, function: Any, args: Any, kwargs: Any, what: str, only: Link | None = None, placed: Any = None
    ) -> DRef:
        with self._lock:
            self.check_open()
            ref = DRef(self, next(self._registers), what, placed)
            number = next(self._numbers)
            self._issued.append(_Issued(number, what, caller_line()))
            start = time.perf_counter()
            payload, buffers = self._dumps((function, args, kwargs, ref.number))
            self._send_call(Frame(CALL, self._supervisor.epoch, number, payload, buffers, self._take_freed()), only)
            if self.profiling is not None:
                self.profiling.add("issue", what, number, start)
            return ref

    def call_each(self, function: Any, args: Sequence[tuple[Any, ...]], what: str, placed: Any = None) -> DRef:
        """Call a function with other arguments on each worker."""
        with self._lock:
            self.check_open()
            ref, number, line = DRef(self, next(self._registers), what, placed), next(self._numbers), caller_line()
            self._issued.append(_Issued(number, what, line))
            freed, epoch, start = self._take_freed(), self._supervisor.epoch, time.perf_counter()
            for link in reversed(self._crew.links):
                payload, buffers = self._dumps((function, args[link.worker], {}, ref.number))
                self._send_one(link, Frame(CALL, epoch, number, payload, buffers, freed))
            if self.profiling is not None:
                self.profiling.add("issue", what, number, start)
            return ref

    def _send_call(self, frame: Frame, only: Link | None) -> None:
        if only is not None:
            self._send_one(only, replace(frame, freed=()))
            self._freed.extend(frame.freed)  # The others have not heard of these.
            return
        # Threads last: they would take the interpreter's lock from the sends.
        for link in reversed(self._crew.links):
            self._send_one(link, frame)

    def _send_one(self, link: Link, frame: Frame) -> None:
        """Send a call. A worker that owes no answer answers it: a sync that comes next has one message less."""
        link.last = frame.number
        if not link.asked:
            link.asked = frame.number
            # By hand: dataclasses.replace takes ten times as long, for each worker.
            frame = Frame(CALL_AND_SYNC, frame.epoch, frame.number, frame.payload, frame.buffers, frame.freed)
        self._send_to(link, frame)

    def _dumps(self, value: Any) -> tuple[bytes, list[memoryview]]:
        _pickling.by = self
        try:
            return dumps(value)
        except (TypeError, pickle.PicklingError) as error:
            if isinstance(error, ArgumentError):
                raise
            raise user_error(
                f"an argument of a call cannot be sent ({error})", "a value that pickle does not take",
                "values that pickle takes, tensors, DRefs, functions", "Make it on the workers, by a function.",
                caller_line(), WrongType,
            ) from error  # fmt: skip
        finally:
            _pickling.by = None

    def is_pickling(self) -> bool:
        """Whether this thread is writing a call of this session."""
        return _pickling.by is self

    def _send_to(self, link: Link, frame: Frame) -> None:
        try:
            link.send(frame, self._stalled)
        except Closed:
            self._lost(link)
        except Late:
            self._broken = f"worker {link.worker} did not read its commands for {self.timeout:g} s"
            raise self._timed_out([link], self.timeout) from None

    def _stalled(self, seconds: float) -> None:
        """What a send calls that has not moved for so many seconds."""
        if self._supervisor.lost:
            self._lost(self._crew.links[min(self._supervisor.lost)])
        if seconds > self.timeout:
            raise Late

    def _take_freed(self) -> tuple[int, ...]:
        freed = []
        while self._freed:
            freed.append(self._freed.popleft())
        return tuple(freed)

    def free(self, number: int, generation: int) -> None:
        """Let the workers drop a register with the next command. For DRefs; takes no lock."""
        if generation == self.generation:
            self._freed.append(number)

    # Waits

    def sync_worker_0(self) -> None:
        """Wait until worker 0 has done all calls. Raises WorkerError with what a call raised on any worker."""
        self.sync([0])

    def sync(self, workers: Sequence[int] | None = None) -> None:
        """Wait until all workers, or these, have done all calls. Raises WorkerError with what a call raised."""
        with self._lock:
            self.check_open()
            links = self._crew.links if workers is None else [self._crew.links[worker] for worker in workers]
            self._await(links, self.timeout)

    def _import_late(self, module: str) -> None:
        """Have all workers import a module of this package. Waits as long as for their start."""
        with self._lock:
            self.sync()
            self._call(builtin.import_module, (module,), {}, f"import {module}")
            self._await(self._crew.links, max(self.timeout, START_LIMIT))

    def _await(self, links: Sequence[Link], limit: float) -> None:
        answers = self._answers(links, self._sync_numbers(links), limit)
        if self._supervisor.first is not None or any(answer.kind != DONE for answer in answers):
            self._raise_failures()

    def _sync_numbers(self, links: Sequence[Link]) -> list[int]:
        return [self._sync_number(link) for link in reversed(links)][::-1]

    def _sync_number(self, link: Link) -> int:
        """The number of the command whose answer says that a worker has done all that it was sent."""
        if link.asked and link.asked == link.last:
            return link.asked
        number = next(self._numbers)
        self._send_to(link, Frame(SYNC, self._supervisor.epoch, number))
        return number

    def _answers(self, links: Sequence[Link], numbers: Sequence[int], limit: float | None = None) -> list[Frame]:
        """The answers of workers to one command each, within the session's timeout or another limit, in seconds."""
        limit = self.timeout if limit is None else limit
        deadline, start = time.monotonic() + limit, time.perf_counter()
        answers: list[Frame] = []
        progress = Progress()
        try:
            for link, number in zip(links, numbers, strict=True):
                answers.append(self._answer(link, number, deadline, progress))
        except Late:
            left = list(zip(links, numbers, strict=True))[len(answers) :]
            missing = [link for link, number in left if not self._has_answered(link, number)]
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
                progress.show(f"waiting for worker {link.worker}{self._latest(number)}")
            except Woken:
                self._supervisor.clear_wake()
                if self._supervisor.lost:
                    self._lost(self._crew.links[min(self._supervisor.lost)])
            except Closed:
                self._lost(link)

    def _latest(self, number: int) -> str:
        """The latest call up to this number, in words."""
        issued = next((call for call in reversed(self._issued) if call.number <= number), None)
        return "" if issued is None else f" and the calls up to {issued.what} at {issued.line}"

    def _has_answered(self, link: Link, number: int) -> bool:
        try:
            self._answer(link, number, time.monotonic(), Progress())
        except Late:
            return False
        return True

    def _abandon(self, number: int) -> None:
        """Ctrl-C: end the calls that run, and forget what they raise."""
        self._supervisor.release(self._supervisor.epoch, 0, "the controller was interrupted")
        for link in self._crew.links:
            link.cancel(number)
        self._renew()

    def _renew(self) -> None:
        """Begin a new epoch: what workers still answer belongs to the one before."""
        self._supervisor.renew()
        for link in self._crew.links:
            link.asked = link.last = 0

    def _raise_failures(self) -> NoReturn:
        """Raise what failed first, once all workers have come to rest."""
        answers = self._answers(self._crew.links, self._sync_numbers(self._crew.links))
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
        issued = next((call for call in self._issued if call.number == raised.call), None)
        what = "" if issued is None else f"{issued.what} at {issued.line}"
        return rebuild(raised, issued.line if issued is not None else caller_line(), what)

    def _lost(self, link: Link) -> NoReturn:
        """Raise WorkerLost for a worker whose connection is closed; the session cannot go on."""
        self._supervisor.lose(link.worker)
        worker = min(self._supervisor.lost)
        how = self._supervisor.lost[worker]
        self._broken = f"worker {worker} is gone: {how}"
        error = WorkerLost(f"{self._broken}. Call restart() for new workers", caller_line())
        error.worker, error.how = worker, how
        raise error

    def _timed_out(self, missing: Sequence[Link], limit: float) -> WorkerTimeout:
        for link in missing:
            link.ask_where()
        states = "; ".join(f"worker {link.worker} {self._state(link)}" for link in missing)
        error = WorkerTimeout(
            f"workers did not answer within {limit:g} s: {states}. The other workers are released", caller_line()
        )
        error.workers = tuple(link.worker for link in missing)
        self._supervisor.release(self._supervisor.epoch, 0, f"{error}")
        self._renew()
        return error

    def _state(self, link: Link) -> str:
        return link.where() or "does not answer at all (it is stopped, or its Python does not run)"

    def fetch(self, ref: DRef, worker: int) -> Any:
        """What a worker has in a DRef's register, as a copy."""
        with self._lock:
            self.check_open()
            number = next(self._numbers)
            self._issued.append(_Issued(number, f"a read of {ref!r}", caller_line()))
            link = self._crew.links[worker]
            self._send_to(link, Frame(GET, self._supervisor.epoch, number, self._dumps(ref)[0]))
            (answer,) = self._answers([link], [number])
            if answer.kind != DONE or self._supervisor.first is not None:
                self._raise_failures()
            return loads(answer.payload, answer.buffers)

    def whole(self, ref: DRef) -> Any:
        """The global tensor of a distributed one."""
        raise NotImplementedError

    def put(self, ref: DRef, worker: int, value: Any) -> None:
        """Put a value into a DRef's register of one worker."""
        ref.check()
        self._call(builtin.fill, (ref.number, value), {}, f"a copy to worker {worker}", self._crew.links[worker])

    # Life

    @property
    def _supervisor(self) -> Any:
        return self._crew.supervisor

    def check_open(self) -> None:
        """Raises SessionError for a session that has ended or lost a worker."""
        if self._crew.is_closed:
            raise SessionError("this session has ended: found no workers, needed a new session", caller_line())
        if self._supervisor.lost:
            self._lost(self._crew.links[min(self._supervisor.lost)])
        if self._broken is not None:
            raise SessionError(f"{self._broken}. Call restart() for new workers", caller_line())

    def restart(self) -> None:
        """End all workers at once and start new ones, which import the modules and have the functions of before.

        DRefs of before can no longer be used.
        """
        with self._lock:
            self._end.detach()
            self._crew.close(in_order=False)
            self.generation += 1
            self._freed.clear()
            self._broken = self.autograd_context = None
            self._begin()
            for function, args in self._setup:
                self._call(function, args, {}, "restart")

    def shutdown(self) -> None:
        """End the workers after the calls that were issued. Several calls do no harm."""
        with self._lock:
            self._crew.close()
            self._end.detach()
            _open.discard(self)

    def __enter__(self: C) -> C:
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()

    def __repr__(self) -> str:
        state = "ended" if self._crew.is_closed else self._broken or ""
        groups = f" in {self.num_groups} groups" if self.num_groups > 1 else ""
        return f"<{type(self).__name__} of {self.num_workers} workers{groups}{f', {state}' if state else ''}>"


def _count(value: Any, name: str, line: SourceLine) -> int:
    number = as_int(value)
    if number is None or not 1 <= number <= 4096:
        raise user_error(f"a session's {name}", shown(value), "a number from 1 to 4096", "", line, ArgumentError)
    return number


@atexit.register
def _end_all() -> None:
    """Threads that are inside of a collective when the interpreter ends would end the process by SIGABRT."""
    for session in list(_open):
        session.shutdown()
