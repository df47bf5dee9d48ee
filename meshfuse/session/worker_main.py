"""A worker that is a process of its own: reads commands, and hears its controller in a second thread."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import sys
import threading
import time
from dataclasses import dataclass
from datetime import timedelta

import torch.distributed as dist

from ..runtime.environment import LOOPBACK, Environment
from ..runtime.world import World
from .executor import Executor
from .links import place_of
from .messages import BEAT, CANCEL, FAILURE, LEAVE, PLACE, READY, RELEASE, STOP, WHERE
from .wire import Closed, Connection, Frame
from .world import SessionWorld

_BEAT = 1.0  # Seconds between two signs of life.


@dataclass(frozen=True, slots=True)
class WorkerSpec:
    """What a worker's process needs to know.

    store: host and port of the session's store. address: where other workers reach this one, "" for loopback alone.
    local: its number among the workers of its host, and how many those are.
    """

    worker: int
    size: int
    groups: int
    limit: float
    store: tuple[str, int]
    address: str
    local: tuple[int, int]


def serve(spec: WorkerSpec, commands: Connection, control: Connection) -> None:
    """Do what the controller says, until it says STOP or is gone."""

    def told(epoch: int, number: int) -> None:
        with contextlib.suppress(Closed):
            control.send(Frame(FAILURE, epoch, number))

    executor = Executor(spec.worker, spec.size, spec.groups, lambda e, epoch: _world(spec, e, epoch), told)
    executor.enter()
    signal.signal(signal.SIGINT, lambda number, frame: _interrupt(executor))
    listener = _Listener(executor, control)
    threading.Thread(target=listener.run, name="meshfuse-control", daemon=True).start()
    with contextlib.suppress(Closed):
        commands.send(Frame(READY, 0, 0))
        while (frame := commands.receive()).kind != STOP:
            listener.catch_up()
            answer = executor.handle(frame)
            del frame
            if answer is not None:
                commands.send(answer)
                del answer
    executor.leave_world()
    flush()


def _interrupt(executor: Executor) -> None:
    if executor.running:
        raise KeyboardInterrupt


class _Listener:
    """Hears the controller, in a thread of its own, and shows it that this process lives."""

    def __init__(self, executor: Executor, control: Connection):
        self._executor, self._control = executor, control
        self._poll = select.poll()
        self._poll.register(control.sock, select.POLLIN)
        self._idle_at = time.monotonic()  # when all had been heard

    def run(self) -> None:
        """Listen until the controller is gone, then end the process."""
        try:
            while True:
                if self._hears(0):
                    continue
                self._idle_at = time.monotonic()
                if not self._hears(_BEAT * 1000):
                    self._control.send(Frame(BEAT, self._executor.epoch, self._executor.running), _drop)
        except (Closed, OSError):
            _end_soon()

    def _hears(self, milliseconds: float) -> bool:
        # Frames that came together with the last one are no longer in the socket.
        if not self._control.is_ready() and not self._poll.poll(milliseconds):
            return False
        _obey(self._executor, self._control, self._control.receive())
        return True

    def catch_up(self) -> None:
        """Before a command: hear first what was said while this process was stopped."""
        now = time.monotonic()
        while self._idle_at < now - 2 * _BEAT:
            time.sleep(0.001)


def _drop(seconds: float) -> None:
    raise Closed("the controller does not read")


def _obey(executor: Executor, control: Connection, frame: Frame) -> None:
    if frame.kind == RELEASE:
        executor.release(frame.epoch, frame.number, bytes(frame.payload).decode())
    elif frame.kind == LEAVE:
        executor.leave(frame.epoch, bytes(frame.payload).decode())
    elif frame.kind == CANCEL and 0 < executor.running <= frame.number:
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
    elif frame.kind == WHERE:
        control.send(Frame(PLACE, executor.epoch, 0, place_of(None, executor).encode()), _drop)


def _end_soon() -> None:
    """The main thread ends by the end of its own connection, if it reads that; it may also be busy for hours."""
    threading.Event().wait(0.5)
    flush()
    os._exit(1)


def flush() -> None:
    """Write out what was printed."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError, AttributeError):
            stream.flush()


def _world(spec: WorkerSpec, executor: Executor, epoch: int) -> World:
    place = place_in(spec)
    if spec.size == 1:
        return World(place, spec.limit)
    host, port = spec.store
    store = dist.TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=spec.limit))
    return SessionWorld(
        place, spec.limit, dist.PrefixStore(f"session/{epoch}", store), executor.why_released,
        lambda: place_of(None, executor),
    )  # fmt: skip


def place_in(spec: WorkerSpec) -> Environment:
    """The worker as a rank. The store is in the controller's process, and not in that of a rank."""
    local, local_size = spec.local
    return Environment(
        source="a session", rank=spec.worker, size=spec.size, local_rank=local, local_size=local_size,
        address=spec.store[0] or LOOPBACK, port=spec.store[1] or 1, agent_store=True, own_address=spec.address,
    )  # fmt: skip
