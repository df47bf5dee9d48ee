"""A worker: its registers, and what it does with each command."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import torch
from torch.utils import _pytree as pytree

from ..errors import ArgumentError, user_error
from ..executor.dtensor import is_dtensor, settled
from ..executor.record import Recorder
from ..runtime.world import World
from .compact import register_reader
from .errors import Raised, Released, describe
from .messages import CALL, CALL_AND_SYNC, DONE, FAILED, GET, SETTLE, SKIPPED
from .pickling import dumps, loads
from .wire import Frame

REGISTER = 1  # The short form's code of a register.


class _Here(threading.local):
    executor: Executor | None = None


_here = _Here()


class Executor:
    """The state of one worker, and the one thread that changes it.

    After a call that failed, here or elsewhere, calls are skipped until the controller, which has then told its user,
    begins a new epoch.

    make_world: gives the worker's world of an epoch. told: what is called with the number of a call that failed.
    """

    def __init__(
        self, worker: int, size: int, groups: int, make_world: Callable[[Executor, int], World],
        told: Callable[[int, int], None],
    ):  # fmt: skip
        self.worker, self.size, self.groups = worker, size, groups
        self.registers: dict[int, Any] = {}
        self.epoch, self.running = 0, 0
        self._released, self._reason = (-1, 0), ""
        self._left = -1  # The latest epoch of which the collectives are to be left.
        # By epoch the first call that failed here or was skipped, and the last that was done.
        self._unfinished: dict[int, int] = {}
        self._done: dict[int, int] = {}
        self._last_done = 0  # of this epoch
        self.failure: Raised | None = None
        self._make_world, self._told = make_world, told
        self._world: World | None = None
        # What is to be done when the connections to the other workers break.
        self.at_leave: list[Callable[[], None]] = []
        # While a profile is made: what records this worker's programs, and (number, start, end) of its calls.
        self.recorder: Recorder | None = None
        self.calls: list[tuple[int, float, float]] = []
        self.tape: Any = None  # What an autograd context remembers (tape.Tape).
        self.since = 0.0

    @property
    def group_size(self) -> int:
        """Workers of each group."""
        return self.size // self.groups

    def enter(self) -> None:
        """Make the calling thread the one that runs this worker's calls."""
        _here.executor = self
        World.enter_by(self.world)

    def world(self) -> World:
        """This worker as a rank, among the others of its session."""
        if self._world is None:
            self._world = self._make_world(self, self.epoch)
            self._world.recorder = self.recorder
        return self._world

    def release(self, epoch: int, number: int, reason: str) -> None:
        """From any thread: in this epoch call `number` failed on another worker.

        Calls before it run all the same, as they did there. Those after it are skipped, and it leaves its collectives.
        """
        before = self._released
        if epoch > before[0] or (epoch == before[0] and number < before[1]):
            self._reason = reason
            self._released = (epoch, number)

    def leave(self, epoch: int, reason: str) -> None:
        """From any thread: leave the collectives of this epoch, which others have left; calls are done all the same.

        So this worker does what the others have done already, up to the first call that needs them.
        """
        self._left, self._reason = epoch, reason

    def _skips(self, number: int) -> bool:
        epoch, first = self._released
        return epoch > self.epoch or (epoch == self.epoch and number > first)

    def why_released(self) -> str | None:
        """Why this worker must leave what it waits for; None if it need not."""
        epoch, first = self._released
        if self._left >= self.epoch:
            return self._reason
        return self._reason if epoch > self.epoch or (epoch == self.epoch and self.running >= first) else None

    def handle(self, frame: Frame) -> Frame | None:
        """Do what a command says; the answer, if there is one."""
        if frame.epoch > self.epoch:
            self._renew(frame.epoch)
        for number in frame.freed:
            self.registers.pop(number, None)
        if frame.kind in (CALL, CALL_AND_SYNC):
            if self._skips(frame.number):
                self._unfinished.setdefault(self.epoch, frame.number)
            else:
                self._call(frame)
            return self._report(frame) if frame.kind == CALL_AND_SYNC else None
        if frame.kind == SETTLE:
            epoch = loads(frame.payload)
            last = self._last_done if epoch == self.epoch else self._done.get(epoch, 0)
            found = self._unfinished.get(epoch, 0), last
            return Frame(DONE, self.epoch, frame.number, dumps(found)[0])
        value = self._value(frame) if frame.kind == GET and not self._skips(frame.number) else None
        return value or self._report(frame)

    def _renew(self, epoch: int) -> None:
        self._done[self.epoch], self._last_done = self._last_done, 0
        self.epoch, self.failure = epoch, None
        self.leave_world()

    def leave_world(self) -> None:
        """Break the connections to the other workers."""
        self._leave_others()
        world, self._world = self._world, None
        if world is not None and world.size > 1:
            world.close()  # type: ignore[attr-defined]

    def _leave_others(self) -> None:
        while self.at_leave:
            self.at_leave.pop()()

    def _call(self, frame: Frame) -> None:
        self.running, self.since = frame.number, time.perf_counter()
        try:
            function, args, kwargs, result = loads(frame.payload, frame.buffers)
            self.registers[result] = function(*args, **kwargs)
            self._last_done = frame.number
        except BaseException as error:
            self._fail(error, frame.number)
        finally:
            self.running = 0
            if self.recorder is not None:
                self.calls.append((frame.number, self.since, time.perf_counter()))

    def record_by(self, recorder: Recorder | None) -> None:
        """Record from here on; None ends that."""
        self.recorder, self.calls = recorder, []
        if self._world is not None:
            self._world.recorder = recorder

    def _fail(self, error: BaseException, number: int) -> None:
        self.failure = self.failure or describe(error, self.worker, number)
        self._unfinished.setdefault(self.epoch, number)
        self.release(self.epoch, number, "")
        self._leave_others()  # They may wait for this worker.
        if not isinstance(error, Released):
            self._told(self.epoch, number)

    def _value(self, frame: Frame) -> Frame | None:
        """The answer to GET; None if it failed, which the report tells."""
        self.running = frame.number
        try:
            payload, buffers = dumps(_readable(loads(frame.payload)))
            return Frame(DONE, self.epoch, frame.number, payload, buffers)
        except BaseException as error:
            self._fail(error, frame.number)
            return None
        finally:
            self.running = 0

    def _report(self, frame: Frame) -> Frame:
        if self.failure is not None:
            return Frame(FAILED, self.epoch, frame.number, dumps(self.failure)[0])
        return Frame(SKIPPED if self._skips(frame.number) else DONE, self.epoch, frame.number)


def _readable(value: Any) -> Any:
    """A value as other processes can read it: of DTensors this worker's shards."""
    if type(value) in (torch.Tensor, int, float, str):
        return value
    leaves, tree = pytree.tree_flatten(value)
    if not any(map(is_dtensor, leaves)):
        return value  # A tree that is put together again may have other classes: torch.Size becomes a tuple.
    return pytree.tree_unflatten([_own_part(leaf) for leaf in leaves], tree)


def _own_part(tensor: Any) -> torch.Tensor:
    return settled(tensor.to_local()).detach() if is_dtensor(tensor) else tensor


def current() -> Executor:
    """The worker that runs the calling function. Raises ArgumentError outside of a worker."""
    if _here.executor is None:
        raise user_error(
            "no worker of a session runs this", "a call outside of a session's function", "one on a worker",
            "Call it in a function that s.call runs.", cls=ArgumentError,
        )  # fmt: skip
    return _here.executor


def register(number: int) -> Any:
    """What a register of this worker holds: how a DRef in a call's arguments is read."""
    registers = current().registers
    if number not in registers:
        raise user_error(
            f"register {number} of worker {current().worker} is empty", "a DRef of a call that failed or was skipped",
            "one whose call has returned here", "Call again what makes it.", cls=ArgumentError,
        )  # fmt: skip
    return registers[number]


register_reader(REGISTER, register)
