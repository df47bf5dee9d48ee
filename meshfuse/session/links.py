"""The controller's side of its workers: threads of its own process, and processes behind sockets."""

from __future__ import annotations

import contextlib
import ctypes
import queue
import sys
import threading
import time
from collections.abc import Callable
from typing import Protocol

from ..errors import line_in_script
from .errors import SessionError
from .executor import Executor
from .messages import CANCEL, LEAVE, RELEASE, STOP, WHERE
from .pickling import copies
from .wire import Closed, Connection, Frame, Late

_LOOK = 0.05  # Seconds between two looks of a wait whether something has happened to another worker.


class Woken(Exception):
    """A wait for a worker's answer ended because something happened to another worker."""


class Link(Protocol):
    """One worker, as its controller sees it."""

    worker: int
    last: int  # the number of the last call that it was sent
    asked: int  # that of a call which it was to answer, 0 once it has

    def owes_answer(self, number: int) -> bool: ...
    def send(self, frame: Frame, stalled: Callable[[float], None]) -> None: ...
    def expect(self, number: int) -> None: ...
    def answer(self, number: int, deadline: float) -> Frame: ...
    def release(self, epoch: int, number: int, reason: str) -> None: ...
    def leave(self, epoch: int, reason: str) -> None: ...
    def cancel(self, number: int) -> None: ...
    def ask_where(self) -> None: ...
    def where(self) -> str: ...
    def wake(self) -> None: ...
    def stop(self) -> None: ...


class _Asked:
    """Which calls a worker was sent, and to which it owes an answer."""

    last = asked = 0

    def owes_answer(self, number: int) -> bool:
        """Note a call that it is sent now: whether it owes an answer to an earlier one. If not, it answers this one."""
        self.last = number
        if self.asked:
            return True
        self.asked = number
        return False


class Arrivals:
    """What a controller waits for of all its workers that are threads: the last answer wakes it, and none before."""

    def __init__(self) -> None:
        self.links: list[ThreadLink] = []
        self._left, self._is_woken = 0, False
        self._lock, self._ready = threading.Lock(), threading.Lock()
        self._ready.acquire()

    def arrived(self) -> None:
        """One more answer has come."""
        with self._lock:
            if self._left:
                self._left -= 1
                if not self._left:
                    self._ready.release()

    def wake(self) -> None:
        """Let the wait, or the next one, raise Woken."""
        with self._lock:
            self._is_woken = True
            if self._left:
                self._left = 0
                self._ready.release()

    def wait(self, deadline: float) -> None:
        """Wait for what the links await, or for a part of it. Raises Late, or Woken."""
        with self._lock:
            self._left = 0 if self._is_woken else sum([link.is_awaited() for link in self.links])
            is_over = not self._left
        if not is_over:
            try:
                is_late = not self._ready.acquire(timeout=max(0.0, deadline - time.monotonic()))
            except BaseException:
                self._end_wait()
                raise
            if is_late and not self._end_wait():
                raise Late
        with self._lock:
            is_woken, self._is_woken = self._is_woken, False
        if is_woken:
            raise Woken

    def _end_wait(self) -> bool:
        """Nobody waits any longer; whether the last answer has come meanwhile."""
        with self._lock:
            came, self._left = not self._left, 0
            if came:
                self._ready.acquire()
            return came


class ThreadLink(_Asked):
    """A worker that is a thread of the controller's process."""

    def __init__(self, executor: Executor, arrivals: Arrivals):
        self.worker, self.executor = executor.worker, executor
        self._commands: queue.SimpleQueue[Frame] = queue.SimpleQueue()
        self._answers: dict[int, Frame] = {}
        self._awaited = 0  # the number of the command whose answer the controller waits for
        self._arrivals = arrivals
        arrivals.links.append(self)
        self.thread = threading.Thread(target=self._run, name=f"meshfuse-worker-{self.worker}", daemon=True)
        self.thread.start()

    def _run(self) -> None:
        self.executor.enter()
        while (frame := self._commands.get()).kind != STOP:
            answer = self.executor.handle(frame)
            del frame
            if answer is not None:
                answer.buffers = copies(answer.buffers)
                self._answers[answer.number] = answer
                self._arrivals.arrived()
                del answer
        self.executor.leave_world()
        self.executor.registers.clear()

    def send(self, frame: Frame, stalled: Callable[[float], None]) -> None:
        """Queue a command; its tensors are copied first."""
        if frame.buffers:
            frame = Frame(frame.kind, frame.epoch, frame.number, frame.payload, copies(frame.buffers), frame.freed)
        self._commands.put(frame)

    def expect(self, number: int) -> None:
        """An answer to that command will be waited for; 0: to none."""
        self._awaited = number

    def is_awaited(self) -> bool:
        """Whether an answer that is waited for has not come."""
        return self._awaited != 0 and self._awaited not in self._answers

    def answer(self, number: int, deadline: float) -> Frame:
        """The answer to that command. Raises Late, or Woken."""
        self._awaited = number
        while number not in self._answers:
            try:
                self._arrivals.wait(deadline)
            except Late:
                if number not in self._answers:  # It may be another one that is late.
                    raise
        self.asked = self._awaited = 0
        found = self._answers[number]
        for earlier in [n for n in list(self._answers) if n <= number]:  # of a wait that was given up, too
            del self._answers[earlier]
        return found

    def wake(self) -> None:
        """Let a wait for an answer raise Woken."""
        self._arrivals.wake()

    def release(self, epoch: int, number: int, reason: str) -> None:
        """Call `number` of this epoch failed on another worker."""
        self.executor.release(epoch, number, reason)

    def leave(self, epoch: int, reason: str) -> None:
        """The time limit is over: leave this epoch's collectives, but do its calls."""
        self.executor.leave(epoch, reason)

    def cancel(self, number: int) -> None:
        """Raise KeyboardInterrupt in a call of up to this number, if one runs. It comes between two bytecodes."""
        if 0 < self.executor.running <= number:
            ctypes.pythonapi.PyThreadState_SetAsyncExc(
                ctypes.c_ulong(self.thread.ident or 0), ctypes.py_object(KeyboardInterrupt)
            )

    def ask_where(self) -> None:
        """Nothing to ask: `where` looks itself."""

    def where(self) -> str:
        """What the thread runs."""
        return place_of(self.thread, self.executor)

    def stop(self) -> None:
        """Let the thread end after the commands that it has."""
        self._commands.put(Frame(STOP, 0, 0))


class SocketLink(_Asked):
    """A worker that is another process: a connection for its commands, and one that is read however busy it is."""

    def __init__(self, worker: int, commands: Connection, control: Connection):
        self.worker, self.commands, self.control = worker, commands, control
        self._is_woken = False
        self._place, self._placed = "", threading.Event()

    def send(self, frame: Frame, stalled: Callable[[float], None]) -> None:
        """Send a command. Raises Closed."""
        self.commands.send(frame, stalled)

    def expect(self, number: int) -> None:
        """Nothing to do: each of its answers is read when it is asked for."""

    def answer(self, number: int, deadline: float) -> Frame:
        """The answer to that command. Raises Closed, Late or Woken."""
        while True:
            try:
                found = self.commands.receive_within(min(_LOOK, deadline - time.monotonic()))
            except Late:
                if self._is_woken:
                    self._is_woken = False
                    raise Woken from None
                if time.monotonic() >= deadline:
                    raise
                continue
            if found.number == number:
                self.asked = 0
                return found

    def wake(self) -> None:
        """Let a wait for an answer raise Woken when it looks next."""
        self._is_woken = True

    def release(self, epoch: int, number: int, reason: str) -> None:
        """Call `number` of this epoch failed on another worker."""
        self._tell(Frame(RELEASE, epoch, number, reason.encode()))

    def leave(self, epoch: int, reason: str) -> None:
        """The time limit is over: leave this epoch's collectives, but do its calls."""
        self._tell(Frame(LEAVE, epoch, 0, reason.encode()))

    def cancel(self, number: int) -> None:
        """Raise KeyboardInterrupt in a call of up to this number, if one runs."""
        self._tell(Frame(CANCEL, 0, number))

    def ask_where(self) -> None:
        """Ask what the worker's main thread runs."""
        self._placed.clear()
        self._tell(Frame(WHERE, 0, 0))

    def said_where(self, text: str) -> None:
        """The answer has come."""
        self._place = text
        self._placed.set()

    def where(self) -> str:
        """What the worker's main thread runs; "" if it does not answer within half a second."""
        return self._place if self._placed.wait(0.5) else ""

    def _tell(self, frame: Frame) -> None:
        with contextlib.suppress(Closed, _Stalled):
            self.control.send(frame, _stalled)

    def stop(self) -> None:
        """Let the worker end after the commands that it has."""
        with contextlib.suppress(Closed, _Stalled):
            self.commands.send(Frame(STOP, 0, 0), _stalled)

    def close(self) -> None:
        """Close both connections, which ends the worker."""
        self.commands.close()
        self.control.close()


class _Stalled(SessionError):
    """A worker does not read its control connection: it is stopped."""


def _stalled(seconds: float) -> None:
    raise _Stalled("the worker does not read")


def place_of(thread: threading.Thread | None, executor: Executor) -> str:
    """What a worker's thread does, in words: the call, for how long, and the line of the user's code."""
    if not executor.running:
        return "waits for commands"
    frame = sys._current_frames().get((thread or threading.main_thread()).ident or 0)
    line = f" at {line_in_script(frame)}" if frame is not None else ""
    return f"runs call {executor.running} for {time.perf_counter() - executor.since:.1f} s{line}"
