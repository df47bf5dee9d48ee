"""What `rpc` sends and does: calls, their answers, references and autograd contexts that go along with them."""

from __future__ import annotations

import contextlib
import itertools
import marshal
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from ...errors import ArgumentError, caller_line, error_text, shown, user_error
from ..errors import SessionError, WorkerTimeout, describe, rebuild
from ..listener import log
from ..messages import DONE
from ..pickling import Tracked, dumps, loads
from ..wire import Frame
from . import futures
from .agent import REQUEST, Agent, fail, failure_frame, raise_failure
from .constants import UNSET_RPC_TIMEOUT
from .contexts import Contexts, Message, Told, arrived, written
from .functions import ASYNC
from .members import FOREVER, WorkerInfo
from .rref import Id, Job, RRef, Table, add, set_peer

_PATIENCE = 10.0  # Seconds in which a worker that lives answers.


class _Sending(threading.local):
    forks: list[tuple[Any, Id]] | None = None


class Prepared:
    """A call that is written: calling this sends it and gives its result."""

    __slots__ = ("_context", "_forks", "_frame", "_function", "_limit", "_part", "_peer", "_pooled")

    def __init__(
        self, part: Calls, peer: WorkerInfo, frame: Frame, forks: list[tuple[Any, Id]], context: int | None,
        function: Any, limit: float,
    ):  # fmt: skip
        self._part, self._peer, self._frame, self._forks = part, peer, frame, forks
        self._context, self._function, self._limit = context, function, limit
        self._pooled: Any = None

    def __call__(self) -> Any:
        return self.begin().finish()

    def begin(self) -> Prepared:
        """Send it; calls to this process itself run in `finish`."""
        if self._peer.id != self._part.me.id:
            try:
                self._pooled = self._part.agent.begin(self._peer.id, self._frame)
            except SessionError:
                self._part.take_back(self._forks)
                raise
        return self

    def finish(self) -> Any:
        """Wait for the answer. Raises what the function raised."""
        part, peer = self._part, self._peer
        try:
            answer = (
                part.serve_self(self._frame) if self._pooled is None
                else part.agent.finish(peer.id, self._pooled, self._limit)
            )  # fmt: skip
        except SessionError:
            part.take_back(self._forks)  # The references of the message have not arrived.
            raise
        if answer.kind != DONE:
            raise_failure(answer, f"{getattr(self._function, '__name__', self._function)} on {peer.name}")
        return part.read(answer, self._context)[0]


class Calls:
    """This process' part in a group of rpc workers."""

    def __init__(self, agent: Agent):
        self.agent, self.table, self.contexts = agent, Table(), Contexts(agent.me.id)
        self._numbers, self._ids = itertools.count(1), itertools.count()
        self._sending = _Sending()
        set_peer(self)
        self.table.serve(self._send_jobs)
        agent.members.ask = self.ask
        agent.server = self

    # Calls

    def sync(self, to: Any, function: Any, args: Any, kwargs: Any, timeout: float | None) -> Any:
        """Call a function on a peer and wait for its result."""
        peer, limit = self._checked(to, function, timeout), self._limit(timeout)
        return self._prepare(peer, function, tuple(args or ()), dict(kwargs or {}), limit)()

    def start(self, to: Any, function: Any, args: Any, kwargs: Any, timeout: float | None) -> Any:
        """Call a function on a peer; its result as a future."""
        peer, limit = self._checked(to, function, timeout), self._limit(timeout)
        return self.agent.submit(self._prepare(peer, function, tuple(args or ()), dict(kwargs or {}), limit))

    def remote(self, to: Any, function: Any, args: Any, kwargs: Any, timeout: float | None) -> RRef[Any]:
        """Call a function on a peer, where its result stays; a reference to it."""
        peer, limit = self._checked(to, function, timeout), self._limit(timeout)
        number, fork = self.new_id(), self.new_id()
        arguments = (number, fork, function, tuple(args or ()), dict(kwargs or {}))
        made = RRef.make(peer.id, number, fork, peer.id == self.me.id)
        if peer.id == self.me.id:
            self.table.add(number, fork)
        made._created = self.agent.submit(self._prepare(peer, _create, arguments, {}, limit))
        seen = weakref.ref(made)  # The future must not keep the reference alive.
        made._created.add_done_callback(lambda done: _confirm(done, seen()))
        return made

    def _checked(self, to: Any, function: Any, timeout: Any) -> WorkerInfo:
        if not callable(function):
            raise user_error("rpc", shown(function), "a function", "", caller_line(), ArgumentError)
        is_limit = isinstance(timeout, (int, float)) and (timeout >= 0 or timeout == UNSET_RPC_TIMEOUT)
        if timeout is not None and not is_limit:
            raise user_error("rpc: timeout", shown(timeout), "seconds, or 0 for no limit", "", caller_line(),
                             ArgumentError)  # fmt: skip
        return self.agent.members.find(to)

    def _limit(self, timeout: float | None) -> float:
        return self.agent.limit if timeout is None or timeout == UNSET_RPC_TIMEOUT else timeout

    def _prepare(
        self, peer: WorkerInfo, function: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], limit: float
    ) -> Prepared:
        """Write a call now, in its caller's thread."""
        context = self.contexts.current()
        forks: list[tuple[Any, Id]] = []
        payload, buffers, told = self._written(context, self.contexts.new_message(), (function, args, kwargs), forks)
        number = None
        if context is not None:
            number = context.number
            context.peers.add(peer.id)
        head = marshal.dumps((number, told))
        frame = Frame(REQUEST, len(head), next(self._numbers), head + payload, buffers)
        return Prepared(self, peer, frame, forks, number, function, limit)

    def serve_self(self, frame: Frame) -> Frame:
        """A call of this process to itself, as from another one."""
        copies = [bytearray(buffer) for buffer in frame.buffers]
        answer = self.serve(Frame(frame.kind, frame.epoch, frame.number, frame.payload, copies), self.me.id)
        answer.buffers = [bytearray(buffer) for buffer in answer.buffers]
        return answer

    def _written(
        self, context: Any, message: Message, value: Any, forks: list[tuple[Any, Id]] | None
    ) -> tuple[bytes, list[memoryview], Told | None]:
        """A value as bytes, with the references and tensors in it noted."""
        before, self._sending.forks = self._sending.forks, forks if forks is not None else []
        try:
            if context is None:
                return *dumps(value, self.agent.is_spmd), None
            with Tracked(writing=True) as tracked:
                payload, buffers = dumps(value, self.agent.is_spmd)
            return payload, buffers, written(context, message, tracked)
        finally:
            self._sending.forks = before

    def read(self, frame: Frame, context: int | None) -> tuple[Any, int | None]:
        """What a frame holds, and the context that it belongs to (given, or the one that it names)."""
        named, message = marshal.loads(frame.payload[: frame.epoch])
        number = context if named is None else named
        body = frame.payload[frame.epoch :]
        if number is None:
            return loads(body, frame.buffers), None
        with Tracked(writing=False) as tracked:
            value = loads(body, frame.buffers)
        arrived(self.contexts.get_or_make(number), message, tracked)
        return value, number

    def serve(self, frame: Frame, peer: int) -> Frame:
        """Do what a request says; the answer."""
        before = self.contexts.enter(None)
        try:
            (function, args, kwargs), number = self._read_call(frame)
            self.contexts.enter(number)
            result = function(*args, **kwargs)
            if getattr(function, ASYNC, False):
                result = _awaited(result)
            context = self.contexts.current()
            if context is not None:
                context.peers.add(peer)
            payload, buffers, told = self._written(context, self.contexts.new_message(), result, None)
            head = marshal.dumps((None, told))
            return Frame(DONE, len(head), frame.number, head + payload, buffers)
        except BaseException as error:
            self._note_failure(error, peer)
            return failure_frame(error, self.me.id, frame.number)
        finally:
            self.contexts.enter(before)

    def _read_call(self, frame: Frame) -> tuple[Any, int | None]:
        """What a request says. ArgumentError where it names what this process does not have."""
        try:
            return self.read(frame, None)
        except (AttributeError, ImportError) as error:
            raise user_error(
                "a call names what is not here: the RPC pickler does not serialize what a module has under its name",
                f"{error_text(error)}, on {self.me.name}", "the same modules as the caller has", "", caller_line(),
                ArgumentError,
            ) from error  # fmt: skip

    def _note_failure(self, error: BaseException, peer: int) -> None:
        """Ranks of a script say on their side, too, what has failed there; a session's controller tells its user.

        Not that a group or a peer has ended: that is not of the function's making.
        """
        if self.agent.is_spmd and not isinstance(error, SessionError):
            log.warning("rpc: on %s a call of %s raised %s", self.me.name, self.peer(peer).name, error_text(error))

    # References

    @property
    def me(self) -> WorkerInfo:
        """This process as a peer."""
        return self.agent.me

    def peer(self, rank: int) -> WorkerInfo:
        """The peer of that rank."""
        return self.agent.members.member(rank).info

    def new_id(self) -> Id:
        """A number that no other worker gives."""
        return self.me.id, next(self._ids)

    def is_sending(self) -> bool:
        """Whether this thread is writing a message."""
        return self._sending.forks is not None

    def note_fork(self, rref: RRef[Any], fork: Id) -> None:
        """A message takes a new reference along: the owner knows it at once, another one keeps its own meanwhile."""
        if rref.is_owner():
            self.table.add(rref._id, fork)
        else:
            self.table.pending[fork] = rref
        assert self._sending.forks is not None
        self._sending.forks.append((rref, fork))

    def take_back(self, forks: list[tuple[Any, Id]]) -> None:
        """A message did not arrive: nor did its references."""
        for rref, fork in forks:
            if rref.is_owner():
                self.table.drop(rref._id, fork)
            self.table.pending.pop(fork, None)

    def _send_jobs(self, rank: int, jobs: Sequence[Job]) -> None:
        """What ended references and contexts ask of a worker."""
        if rank == self.me.id:
            _do(list(jobs))
        elif not self.agent.is_closed:
            self.internal(rank, _do, list(jobs))

    def tell_owner(self, rref: RRef[Any]) -> None:
        """Let the owner know of a reference now; nothing happens where the owner is gone."""
        with contextlib.suppress(SessionError):
            self.internal(rref._owner, add, rref._id, rref._fork)
            rref.confirm()

    def ask(self, rank: int) -> None:
        """Wait for a peer to answer; a busy one may take its time. Raises WorkerLost."""
        with contextlib.suppress(WorkerTimeout):
            self.internal(rank, _do, [], limit=_PATIENCE)

    def internal(self, to: int, function: Any, *args: Any, limit: float | None = None) -> Any:
        """A call of `rpc`'s own, outside of any context."""
        before = self.contexts.enter(None)
        try:
            return self._prepare(self.peer(to), function, args, {}, self._limit(limit))()
        finally:
            self.contexts.enter(before)

    def internal_all(self, jobs: Sequence[tuple[int, Callable[..., Any], tuple[Any, ...]]]) -> list[Any]:
        """Results of `rpc`'s own calls to several workers at a time: a worker, a function and its arguments each."""
        before = self.contexts.enter(None)
        try:
            limit = self._limit(None)
            started = [self._prepare(self.peer(to), function, args, {}, limit).begin() for to, function, args in jobs]
            return [call.finish() for call in started]
        finally:
            self.contexts.enter(before)

    def to_here(self, rref: RRef[Any], timeout: float | None) -> Any:
        """The value of a reference."""
        if rref.is_owner():
            return self.table.entry(rref._id, self._limit(timeout) or FOREVER).value.wait()
        if rref._created is not None and rref._created.done():
            _raise_failed_creation(rref._created)
        value = self.sync(rref._owner, _fetch, (rref._id, self._limit(timeout)), {}, timeout)
        if rref._created is not None:
            rref.confirm()  # The call that made the value has told the owner of this reference.
        return value

    def proxy(self, rref: RRef[Any], how: str, timeout: float | None) -> Any:
        """An object whose methods run on the owner."""
        return _Proxy(self, rref, how, timeout)

    def type_of(self, rref: RRef[Any], timeout: float | None) -> torch.futures.Future[Any]:
        """The class of a reference's value."""
        return self.start(rref._owner, _type, (rref,), {}, timeout)

    def backward(self, rref: RRef[Any], context: int, retain_graph: bool) -> None:
        """The backward pass from a reference's value: of torch's own kind on the owner, if no context is given."""
        if rref.is_owner():
            _backward(rref, context, retain_graph)
            return
        if context == -1:
            raise user_error("User RRefs require 'dist_autograd_ctx_id' to be specified", f"{rref} and no context",
                             "the id of an autograd context", "", caller_line(), ArgumentError)  # fmt: skip
        self.sync(rref._owner, _backward, (rref, context, retain_graph), {}, None)


class _Proxy:
    """Calls methods of a reference's value on its owner."""

    def __init__(self, calls: Calls, rref: RRef[Any], how: str, timeout: float | None):
        self._calls, self._rref, self._timeout = calls, rref, timeout
        self._call = {"rpc_sync": calls.sync, "rpc_async": calls.start, "remote": calls.remote}[how]
        # What `remote` starts fails later, and elsewhere: so it first asks for the method.
        self._asks = how == "remote"

    def __getattr__(self, name: str) -> Any:
        def method(*args: Any, **kwargs: Any) -> Any:
            if self._asks and name not in self._rref._methods:
                self._calls.sync(self._rref._owner, _check_method, (self._rref, name), {}, self._timeout)
                self._rref._methods |= {name}
            return self._call(self._rref._owner, _invoke, (self._rref, name, args, kwargs), {}, self._timeout)

        return method


_calls: list[Calls] = []
# Put here by `autograd`, which stands above this module.
_distributed_backward: list[Callable[[int, list[Any], bool], None]] = []


def provide_backward(function: Callable[[int, list[Any], bool], None]) -> None:
    """What runs a distributed backward pass from tensors of this process."""
    _distributed_backward[:] = [function]


def set_calls(calls: Calls | None) -> None:
    """This process' part in a group; None when it has ended."""
    _calls[:] = [] if calls is None else [calls]
    set_peer(calls)
    futures.install(calls is not None)


def calls() -> Calls:
    """This process' part in a group. Raises SessionError where init_rpc has not been called."""
    if not _calls:
        raise SessionError("RPC has not been initialized: found no group, needed rpc.init_rpc first", caller_line())
    return _calls[0]


def _awaited(result: Any) -> Any:
    if not isinstance(result, torch._C.Future):
        raise user_error(
            "Functions decorated with @rpc.async_function must return a torch.futures.Future object, which this is not",
            shown(result), "a torch.futures.Future as its result", "", caller_line(), ArgumentError,
        )  # fmt: skip
    return result.wait()


def _raise_failed_creation(created: Any) -> None:
    """Raise what made a call of `remote` fail, told as that: the owner may not have the value."""
    try:
        created.wait()
    except SessionError as error:
        error.args = (
            f"RRef creation by rpc.remote() has failed, and its owner may not have the value: {error.args[0]}",
        )
        raise


def _confirm(done: Any, made: RRef[Any] | None) -> None:
    """The owner has answered to `remote`: it knows the reference, whether or not the function raised."""
    try:
        done.value()
    except Exception:
        return
    if made is not None:
        made.confirm()


# What runs on the other side.


def _create(number: Id, fork: Id, function: Any, args: Any, kwargs: Any) -> None:
    """Make a value that stays here; what its function raises, its readers get."""
    future = calls().table.add(number, fork).value
    try:
        result = function(*args, **kwargs)
        if getattr(function, ASYNC, False):
            result = _awaited(result)
    except Exception as error:
        # With its traceback as text, which its readers are shown.
        fail(future, rebuild(describe(error, calls().me.id, 0), None, "of rpc.remote"))
        return
    future.set_result(result)


def _fetch(number: Id, limit: float) -> Any:
    return calls().table.entry(number, limit or FOREVER).value.wait()


def _do(jobs: Sequence[Job]) -> None:
    for function, args in jobs:
        function(*args)


def _type(rref: RRef[Any]) -> type:
    return type(rref.local_value())


def _check_method(rref: RRef[Any], name: str) -> None:
    getattr(rref.local_value(), name)


def _invoke(rref: RRef[Any], name: str, args: Any, kwargs: Any) -> Any:
    result = getattr(rref.local_value(), name)(*args, **kwargs)
    method = getattr(type(rref.local_value()), name, None)
    return _awaited(result) if getattr(method, ASYNC, False) else result


def _backward(rref: RRef[Any], context: int, retain_graph: bool) -> None:
    value = rref.local_value()
    if not isinstance(value, torch.Tensor):
        raise user_error("RRef should contain a tensor for .backward()", shown(value), "a tensor", "", caller_line(),
                         ArgumentError)  # fmt: skip
    if context == -1:
        value.backward(retain_graph=retain_graph)
    else:
        _distributed_backward[0](context, [value], retain_graph)
