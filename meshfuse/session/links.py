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


class ThreadLink(_Asked):
    """A worker that is a thread of the controller's process."""

    def __init__(self, executor: Executor):
        self.worker, self.executor = executor.worker, executor
        self._commands: queue.SimpleQueue[Frame] = queue.SimpleQueue()
        self._answers: queue.SimpleQueue[Frame | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self.thread = threading.Thread(target=self._run, name=f"meshfuse-worker-{self.worker}", daemon=True)
        self.thread.start()

    def _run(self) -> None:
        self.executor.enter()
        while (frame := self._commands.get()).kind != STOP:
            answer = self.executor.handle(frame)
            del frame
            if answer is not None:
                answer.buffers = copies(answer.buffers)
                self._answers.put(answer)
                del answer
        self.executor.leave_world()
        self.executor.registers.clear()

    def send(self, frame: Frame, stalled: Callable[[float], None]) -> None:
        """Queue a command; its tensors are copied first."""
        if frame.buffers:
            frame = Frame(frame.kind, frame.epoch, frame.number, frame.payload, copies(frame.buffers), frame.freed)
        self._commands.put(frame)

    def answer(self, number: int, deadline: float) -> Frame:
        """The answer to that command. Raises Late, or Woken."""
        while True:
            try:
                found = self._answers.get(timeout=max(0.0, deadline - time.monotonic()))
            except queue.Empty:
                raise Late from None
            if found is None:
                raise Woken
            if found.number == number:
                self.asked = 0
                return found

    def wake(self) -> None:
        """Let a wait for an answer raise Woken."""
        self._answers.put(None)

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
