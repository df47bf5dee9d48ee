"""This process as a peer in a group that calls each other's functions.

Each call has a connection to itself while it lasts, and each connection a thread of the callee, so that calls may nest
and wait for one another as they like, and a call that waits needs no thread but its own. Connections are kept and used
again.
"""

from __future__ import annotations

import copy
import json
import os
import re
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist

from ...errors import ArgumentError, caller_line, shown, user_error
from ...runtime.processes import GONE, identity_of, machine, state_of
from ...runtime.store import await_keys
from ..errors import Raised, SessionError, WorkerError, WorkerLost, WorkerTimeout, describe, rebuild
from ..listener import Listener, connect
from ..messages import DONE, FAILED
from ..nodes import Greeting, version
from ..pickling import dumps, loads
from ..wire import Closed, Connection, Frame, Late, Waiter

REQUEST = 60
_ROLE = "rpc"
# Calls that are under way at a time, of those that were issued without waiting.
_MOST_ASYNC = 64
_NAME = re.compile("[A-Za-z0-9_:-]{1,127}")
FOREVER = 1e6  # Seconds; poll takes at most 2³¹ milliseconds.


@dataclass(frozen=True, slots=True, repr=False)
class WorkerInfo:
    """A peer: its name, and its rank (as `id`). Raises ArgumentError for a name that is none."""

    name: str
    id: int

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not _NAME.fullmatch(self.name):
            raise user_error(
                "Worker name must match [A-Za-z0-9_:-]+, be shorter than 128 characters and must be non-empty",
                shown(self.name), "such a name", "", caller_line(), ArgumentError,
            )  # fmt: skip

    def __repr__(self) -> str:
        return f"WorkerInfo(id={self.id}, name={self.name})"


class Protocols(Protocol):
    """What the agent calls to run a request and to write its answer: `calls.Calls`."""

    def serve(self, frame: Frame, peer: int) -> Frame: ...


@dataclass(slots=True)
class Pooled:
    """A connection that one call at a time has."""

    connection: Connection
    waiter: Waiter


class Agent:
    """This process' connections to its peers, and theirs to it. is_spmd: all peers run the same script."""

    def __init__(
        self, name: str, rank: int, size: int, limit: float, store: dist.Store, host: str, token: str,
        is_spmd: bool = True,
    ):  # fmt: skip
        self.is_spmd = is_spmd
        self._processes: dict[int, str] = {}
        self.me, self.size, self.limit, self.store, self.token = WorkerInfo(name, rank), size, limit, store, token
        self.server: Protocols | None = None
        self._pools: dict[int, list[Pooled]] = {rank: [] for rank in range(size)}
        self._served: set[Connection] = set()
        self._lock = threading.Lock()
        self._threads = ThreadPoolExecutor(_MOST_ASYNC, "meshfuse-rpc")
        self._outstanding = 0
        self._idle = threading.Condition(self._lock)
        self.is_closed = False
        self._listener = Listener(host, 0, token, self._welcome, local=True)
        try:
            self.peers, self._addresses = self._meet()
        except BaseException:
            self._listener.close()
            raise
        self.by_name = {peer.name: peer for peer in self.peers}

    def _meet(self) -> tuple[list[WorkerInfo], list[tuple[str, int, str]]]:
        """Tell the others where this one is, and learn the same of them."""
        listener, place = self._listener, _place()
        mine = [self.me.name, listener.host, listener.port, listener.local_name, place, identity_of(os.getpid())]
        found = [json.loads(text) for text in self.exchange("peers", json.dumps(mine))]
        names = [name for name, *_ in found]
        self._processes = {rank: process for rank, (*_, process) in enumerate(found)}
        if len(set(names)) != len(names):
            raise user_error(
                "init_rpc: a worker's name is not unique", f"{names}", "a name of its own for each", "", caller_line(),
                ArgumentError,
            )  # fmt: skip
        addresses = [(host, port, local if there == place else "") for _, host, port, local, there, _ in found]
        return [WorkerInfo(name, rank) for rank, name in enumerate(names)], addresses

    def exchange(self, what: str, text: str, limit: float | None = None) -> list[str]:
        """What each peer says under this name; all of them call this. limit: seconds, those of a call if not given."""
        keys = [f"{what}/{rank}" for rank in range(self.size)]
        limit = self.limit if limit is None else limit
        try:
            self.store.set(keys[self.me.id], text)
            missing = await_keys(self.store, keys, limit or FOREVER, lambda: self._check(what, keys))
            if not missing:
                return [self.store.get(key).decode() for key in keys]
        except dist.DistError as error:
            raise self._lost(0, f"its store does not answer ({error})") from None
        ranks = ", ".join(key.rpartition("/")[2] for key in missing)
        raise WorkerTimeout(
            f"rpc workers did not come to {what}: found none of ranks {ranks} within {limit:g} s, needed all "
            f"{self.size}", caller_line(),
        )  # fmt: skip

    def _check(self, what: str, keys: list[str]) -> None:
        """Raises WorkerLost where a peer that has not come yet never will."""
        for rank, process in self._processes.items():
            ended = "its process has ended" if state_of(process) == GONE else "it has left the group"
            is_gone = state_of(process) == GONE or self.store.check([gone(rank)])
            if is_gone and not self.store.check([keys[rank]]):
                raise self._lost(rank, f"{ended} before it came to {what}")

    def _welcome(self, connection: Connection, greeting: Any) -> None:
        if not isinstance(greeting, Greeting) or greeting.role != _ROLE or greeting.version != version():
            connection.close()
            return
        with self._lock:
            self._served.add(connection)
        threading.Thread(
            target=self._serve, args=(connection, greeting.number), name=f"meshfuse-rpc-{greeting.number}", daemon=True
        ).start()

    def _serve(self, connection: Connection, peer: int) -> None:
        try:
            while True:
                frame = connection.receive()
                while self.server is None:
                    time.sleep(0.001)
                answer = self.server.serve(frame, peer)
                del frame
                connection.send(answer)
                del answer
        except (Closed, OSError):
            pass
        finally:
            connection.close()
            with self._lock:
                self._served.discard(connection)

    def find(self, to: Any) -> WorkerInfo:
        """The peer of that name, rank or WorkerInfo. Raises ArgumentError for others."""
        if isinstance(to, WorkerInfo):
            return self.peers[to.id]
        if isinstance(to, str) and to in self.by_name:
            return self.by_name[to]
        if isinstance(to, int) and 0 <= to < self.size:
            return self.peers[to]
        wrong, needed = "could not find destination, no such rpc worker", f"one of {', '.join(self.by_name)}"
        raise user_error(wrong, shown(to), needed, "", caller_line(), ArgumentError)

    def request(self, to: int, frame: Frame, limit: float) -> Frame:
        """Send a request and wait for its answer: for `limit` seconds (0: for ever), then raise WorkerTimeout."""
        return self.finish(to, self.begin(to, frame), limit)

    def begin(self, to: int, frame: Frame) -> Pooled:
        """Send a request. Raises WorkerLost."""
        pooled = self._take(to)
        try:
            pooled.connection.send(frame)
        except Closed as error:
            pooled.connection.close()
            raise self._lost(to, str(error)) from None
        return pooled

    def finish(self, to: int, pooled: Pooled, limit: float) -> Frame:
        """Wait for the answer to a request. Raises WorkerLost and WorkerTimeout."""
        try:
            pooled.waiter.wait(time.monotonic() + (limit or FOREVER))
            answer = pooled.connection.receive()
        except Late:
            pooled.connection.close()
            raise self._late(to, limit) from None
        except Closed as error:
            pooled.connection.close()
            raise self._lost(to, str(error)) from None
        except BaseException:
            pooled.connection.close()
            raise
        self._pools[to].append(pooled)
        return answer

    def _take(self, to: int) -> Pooled:
        if self.is_closed:
            raise SessionError("rpc has been shut down: call init_rpc first", caller_line())
        try:
            return self._pools[to].pop()
        except IndexError:
            pass
        try:
            host, port, local = self._addresses[to]
            connection = connect((host, port), self.token, Greeting(_ROLE, self.me.id, version()), 30.0, local)
        except OSError as error:
            raise self._lost(to, str(error)) from None
        return Pooled(connection, Waiter(connection))

    def _late(self, to: int, limit: float) -> WorkerTimeout:
        error = WorkerTimeout(
            f"RPC ran for more than set timeout: {self.peers[to].name} did not answer within {limit:g} s", caller_line()
        )
        error.workers = (to,)
        return error

    def _lost(self, to: int, how: str) -> WorkerLost:
        name = f"{self.peers[to].name} (rank {to})" if self._processes else f"of rank {to}"
        error = WorkerLost(f"rpc worker {name} is gone: {how}", caller_line())
        error.worker, error.how = to, how
        return error

    def submit(self, action: Callable[[], Any]) -> torch.futures.Future[Any]:
        """Run an action in a thread; its result or error as a future."""
        future: torch.futures.Future[Any] = torch.futures.Future()
        with self._lock:
            self._outstanding += 1
        self._threads.submit(self._settle, future, action)
        return future

    def _settle(self, future: torch.futures.Future[Any], action: Callable[[], Any]) -> None:
        try:
            result = action()
        except BaseException as error:
            self._done()
            fail(future, error)
            return
        self._done()
        future.set_result(result)

    def _done(self) -> None:
        with self._idle:
            self._outstanding -= 1
            self._idle.notify_all()

    def settle(self, seconds: float) -> bool:
        """Wait until all that was submitted is done; whether that is so."""
        with self._idle:
            return self._idle.wait_for(lambda: not self._outstanding, seconds)

    def close(self) -> None:
        """Close all connections and stop listening."""
        self.is_closed = True
        self._listener.close()
        with self._lock:
            connections = [*self._served, *(pooled.connection for pool in self._pools.values() for pooled in pool)]
        for connection in connections:
            connection.close()
        self._threads.shutdown(wait=False, cancel_futures=True)


def gone(rank: int) -> str:
    """The key in the store of a peer that has left."""
    return f"gone/{rank}"


def fail(future: torch.futures.Future[Any], error: BaseException) -> None:
    """Give a future an error, of which each reader raises a copy.

    torch's futures are not seen by Python's garbage collector: an error that has been raised holds the frames of its
    readers, and these the future.
    """

    def raise_copy(stored: BaseException) -> None:
        try:
            found = copy.copy(stored)
        except Exception:  # a class of other arguments than its `args`
            found = stored
        raise found

    future._set_unwrap_func(raise_copy)
    future.set_result(error.with_traceback(None))


def failure_frame(error: BaseException, rank: int, number: int) -> Frame:
    """The answer to a request whose function raised."""
    return Frame(FAILED, 0, number, dumps(describe(error, rank, number))[0])


def raise_failure(answer: Frame, what: str) -> None:
    """Raise what the callee's function raised, if it did."""
    if answer.kind != DONE:
        raised: Raised = loads(answer.payload)
        error: WorkerError = rebuild(raised, caller_line(), what)
        try:
            raise error
        finally:
            del error  # Else frame and error would hold each other, and the references in the frames around.


def _place() -> str:
    """The machine and its name space of networks, in which local names hold; "" where that cannot be known."""
    try:
        return f"{machine()} {os.readlink('/proc/self/ns/net')}"
    except OSError:
        return ""
