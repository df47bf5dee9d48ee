"""Errors of a session: what a worker's function raised, a worker that is gone, one that does not answer."""

from __future__ import annotations

import functools
import inspect
import pickle
import traceback
from dataclasses import dataclass, replace
from typing import Any

import torch

from ..errors import ArgumentError, MeshfuseError, SourceLine, error_text


class SessionError(MeshfuseError, RuntimeError):
    """A session cannot do what was asked: it has ended, or a worker of it has."""


class WorkerError(MeshfuseError):
    """A function raised on a worker. The error is an instance of the original exception's class as well.

    It is a RuntimeError, too, where torch's RPC raises one in its place: for classes that cannot be made of a text
    alone, and for all errors of a backward pass.

    worker: the worker that failed first. `call` is the number of the call in its session, `trace` the worker's
    traceback as text, `cause_type` the name of the original class.
    failures: by worker, the errors of all workers that raised in the same stretch of calls.
    """

    worker: int = -1
    call: int = -1
    trace: str = ""
    cause_type: str = ""
    failures: dict[int, WorkerError]

    def __str__(self) -> str:
        return f"{MeshfuseError.__str__(self)}\n{self.trace}".rstrip()

    def __reduce__(self) -> tuple[Any, ...]:
        # The class was made for one exception type and has no name that pickle could find.
        base, is_runtime = getattr(type(self), "_original", None), isinstance(self, RuntimeError)
        return _again, (base, is_runtime, self.args, self.worker, self.call, self.trace, self.cause_type, self.where)


_OURS = {"worker", "call", "trace", "cause_type", "where", "failures"}


class WorkerLost(SessionError):
    """A worker's process has ended, or its connection is gone. `worker` is its number, `how` what became of it."""

    worker: int = -1
    how: str = ""


class WorkerTimeout(SessionError, TimeoutError):
    """Workers did not answer within the session's time limit. `workers` are their numbers."""

    workers: tuple[int, ...] = ()


class Released(SessionError):
    """A worker left a collective, or skipped a call, because another worker failed."""


class WrongType(ArgumentError, TypeError):
    """An argument of a type that torch's RPC refuses by a TypeError."""


class ConnectionRefused(SessionError, ConnectionError):
    """A peer did not show the token of the session, or showed another one."""


@dataclass(frozen=True, slots=True)
class Raised:
    """What a worker tells of an exception: its class and arguments, if they can be pickled, and its text.

    is_runtime: it is a RuntimeError, whether or not its class is one.
    """

    worker: int
    call: int
    kind: bytes | None
    name: str
    text: str
    trace: str
    released: bool
    is_runtime: bool


def describe(error: BaseException, worker: int, call: int) -> Raised:
    """An exception as a value that every process can read."""
    trace = "".join(traceback.format_exception(type(error), error, _below_ours(error))).rstrip()
    return Raised(
        worker, call, _pickled(error), type(error).__name__, error_text(error), trace, isinstance(error, Released),
        isinstance(error, (RuntimeError, torch.jit.Error)),  # as torch's RPC has it
    )  # fmt: skip


def _below_ours(error: BaseException) -> Any:
    """The traceback without the first frame, which is the worker's own loop."""
    trace = error.__traceback__
    return trace.tb_next if trace is not None and trace.tb_next is not None else trace


def _pickled(error: BaseException) -> bytes | None:
    """Class, arguments and attributes; None where they cannot be pickled.

    An exception's own pickle calls its class with `args`, which fails for classes of other parameters.
    """
    # Of an error that has come from another worker, the class that it had there.
    kind = getattr(type(error), "_original", type(error))
    attributes = {name: value for name, value in error.__dict__.items() if name not in _OURS}
    try:
        return pickle.dumps((kind, error.args, attributes))
    except Exception:
        try:
            return pickle.dumps((kind, tuple(map(str, error.args)), {}))
        except Exception:
            return None


def rebuild(raised: Raised, where: SourceLine | None, what: str) -> WorkerError:
    """The error that the controller raises: of the original class, if that can be, and a WorkerError.

    The original class' constructor is not called.
    """
    base, args, attributes = _original(raised.kind)
    is_made_of_text = base is None or _takes_a_text(base)
    error = _make(base, raised.is_runtime or not is_made_of_text, args)
    error.__dict__.update(attributes)
    error.worker, error.call, error.cause_type = raised.worker, raised.call, raised.name
    head = f"worker {raised.worker} raised {raised.text}, in call {raised.call}, {what}"
    if not is_made_of_text:
        head += f". Original exception on remote side was {raised.text}"
    error.trace = f"{head}\n{raised.trace}"
    error.where, error.failures = where, {}
    return error


def _original(kind: bytes | None) -> tuple[type[BaseException] | None, tuple[Any, ...], dict[str, Any]]:
    if kind is None:
        return None, (), {}
    try:
        return pickle.loads(kind)
    except Exception:  # its module is not here
        return None, (), {}


def of_backward(error: BaseException, worker: int, where: SourceLine | None) -> WorkerError:
    """An error of one worker's part of a backward pass, which names that worker."""
    text = error_text(error).removeprefix(f"{type(error).__name__}: ")
    raised = replace(describe(error, worker, 0), is_runtime=True)
    return rebuild(raised, where, f"in a backward pass. Error on Node {worker}: {text}")


@functools.lru_cache(maxsize=256)
def _takes_a_text(base: type[BaseException]) -> bool:
    """Whether an exception's class can be called with a text alone."""
    try:
        inspect.signature(base).bind("text")
    except ValueError:  # a class of C, which does not say what it takes
        return True
    except TypeError:
        return False
    return True


def _make(base: type[BaseException] | None, is_runtime: bool, args: tuple[Any, ...]) -> WorkerError:
    cls = _class_of(base or WorkerError, is_runtime)
    original = getattr(cls, "_original", None)
    error = cls.__new__(cls) if original is None else original.__new__(cls)
    assert isinstance(error, WorkerError)
    error.args = args
    return error


@functools.lru_cache(maxsize=256)
def _class_of(base: type[BaseException], is_runtime: bool) -> type[WorkerError]:
    """A class that `except WorkerError` and `except base` both catch; and `except RuntimeError`, if it is one."""
    # Interrupts and exits of a worker must not end the controller.
    if issubclass(base, WorkerError) or not issubclass(base, Exception):
        if not is_runtime:
            return WorkerError
        base = RuntimeError
    bases = (base, RuntimeError) if is_runtime and not issubclass(base, RuntimeError) else (base,)
    bases = (RuntimeError,) if bases == (Exception, RuntimeError) else bases
    try:
        made = type(base.__name__, (WorkerError, *bases), {"__module__": base.__module__, "_original": base})
        base.__new__(made)
    except TypeError:  # classes that cannot have subclasses, or whose instances only they can make
        return WorkerError
    return made


def _again(
    base: type[BaseException] | None, is_runtime: bool, args: tuple[Any, ...], worker: int, call: int, trace: str,
    name: str, where: SourceLine | None,
) -> WorkerError:  # fmt: skip
    error = _make(base, is_runtime, args)
    error.worker, error.call, error.trace, error.cause_type, error.where = worker, call, trace, name, where
    error.failures = {}
    return error


__all__ = [
    "ArgumentError", "ConnectionRefused", "Raised", "Released", "SessionError", "WorkerError", "WorkerLost",
    "WorkerTimeout", "WrongType", "describe", "of_backward", "rebuild",
]  # fmt: skip
