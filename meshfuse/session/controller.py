"""`Controller`: it calls functions on many workers, which all run the same calls in the same order.

A call is issued without waiting, and returns a DRef to what it gives on each worker. What it raised comes at the next
wait: a sync, or a read of a value. As TVM's Disco has it (github.com/apache/tvm, runtime/disco).
"""

from __future__ import annotations

import atexit
import itertools
import pickle
import threading
import types
import weakref
from collections import deque
from collections.abc import Sequence
from typing import Any, TypeVar

from ..argument_checks import as_int
from ..errors import ArgumentError, SourceLine, caller_line, shown, user_error
from . import builtin
from .crew import Crew
from .dref import DRef
from .errors import SessionError, WrongType
from .forkserver import START_LIMIT
from .functions import is_importable
from .pickling import dumps, loads
from .registry import registered
from .workers import Workers

C = TypeVar("C", bound="Controller")
_open: weakref.WeakSet[Controller] = weakref.WeakSet()


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
        self._numbers = itertools.count(1)  # of registers
        self._freed: deque[int] = deque()
        self.autograd_context: Any = None
        self._setup: list[tuple[Any, tuple[Any, ...]]] = []
        self._begin()
        _open.add(self)

    def _begin(self) -> None:
        """Start the workers; they end with this object, if not before."""
        self._crew = self._start()
        self._workers = Workers(self._crew, self.timeout)
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
        self, function: Any, args: Any, kwargs: Any, what: str, only: int | None = None, placed: Any = None
    ) -> DRef:
        with self._lock:
            self.check_open()
            ref = DRef(self, next(self._numbers), what, placed)
            payload, buffers = self._dumps((function, args, kwargs, ref.number))
            if only is None:
                self._workers.call(what, payload, buffers, self._take_freed())
            else:
                self._workers.call_one(only, what, payload, buffers)
            return ref

    def registers(self, count: int, what: str) -> list[DRef]:
        """So many registers, which a call that is told their numbers fills."""
        return [DRef(self, next(self._numbers), what) for _ in range(count)]

    def call_each(self, function: Any, args: Sequence[tuple[Any, ...]], what: str, placed: Any = None) -> DRef:
        """Call a function with other arguments on each worker."""
        with self._lock:
            self.check_open()
            ref = DRef(self, next(self._numbers), what, placed)
            own = [self._dumps((function, mine, {}, ref.number)) for mine in args]
            self._workers.call_each(what, own, self._take_freed())
            return ref

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

    def _sync_worker(self, worker_id: int) -> None:
        """The same of another worker, by Disco's name."""
        self.sync([worker_id])

    def sync(self, workers: Sequence[int] | None = None) -> None:
        """Wait until all workers, or these, have done all calls. Raises WorkerError with what a call raised."""
        with self._lock:
            self.check_open()
            self._workers.wait(workers)

    def _import_late(self, module: str) -> None:
        """Have all workers import a module of this package. Waits as long as for their start."""
        with self._lock:
            self.sync()
            self._call(builtin.import_module, (module,), {}, f"import {module}")
            self._workers.wait(limit=max(self.timeout, START_LIMIT))

    def fetch(self, ref: DRef, worker: int) -> Any:
        """What a worker has in a DRef's register, as a copy."""
        with self._lock:
            self.check_open()
            answer = self._workers.get(worker, f"a read of {ref!r}", self._dumps(ref)[0])
            return loads(answer.payload, answer.buffers)

    def whole(self, ref: DRef) -> Any:
        """The global tensor of a distributed one."""
        raise NotImplementedError

    def put(self, ref: DRef, worker: int, value: Any) -> None:
        """Put a value into a DRef's register of one worker."""
        ref.check()
        self._call(builtin.fill, (ref.number, value), {}, f"a copy to worker {worker}", worker)

    # Life

    @property
    def profiling(self) -> Any:
        """What records the controller's calls and waits, if anything does."""
        return self._workers.profiling

    @profiling.setter
    def profiling(self, by: Any) -> None:
        self._workers.profiling = by

    def check_open(self) -> None:
        """Raises SessionError for a session that has ended or lost a worker."""
        if self._crew.is_closed:
            raise SessionError("this session has ended: found no workers, needed a new session", caller_line())
        self._workers.check()

    def restart(self) -> None:
        """End all workers at once and start new ones, which import the modules and have the functions of before.

        DRefs of before can no longer be used.
        """
        with self._lock:
            self._end.detach()
            self._crew.close(in_order=False)
            self.generation += 1
            self._freed.clear()
            self.autograd_context = None
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
        state = "ended" if self._crew.is_closed else self._workers.broken or ""
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
