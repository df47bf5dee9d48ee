"""This process as a peer in a group that calls each other's functions.

Each call has a connection to itself while it lasts, and each connection a thread of the callee, so that calls may nest
and wait for one another as they like, and a call that waits needs no thread but its own. Connections are kept and used
again.
"""

from __future__ import annotations

import copy
import os
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from ...errors import caller_line
from ...runtime.processes import identity_of, machine
from ..errors import Raised, SessionError, WorkerError, WorkerTimeout, describe, rebuild
from ..listener import Listener, connect
from ..messages import DONE, FAILED
from ..nodes import Greeting, version
from ..pickling import dumps, loads
from ..wire import Closed, Connection, Frame, Late
from .members import FOREVER, Member, Members, WorkerInfo

REQUEST = 60
_ROLE = "rpc"
# Calls that are under way at a time, of those that were issued without waiting.
_MOST_ASYNC = 64


class Protocols(Protocol):
    """What the agent calls to run a request and to write its answer: `calls.Calls`."""

    def serve(self, frame: Frame, peer: int) -> Frame: ...


@dataclass(slots=True)
class Pooled:
    """A connection that one call at a time has."""

    connection: Connection
    peer: Member


class Agent:
    """This process' connections to its peers, and theirs to it. is_spmd: all peers run the same script."""

    def __init__(self, members: Members, limit: float, host: str, token: str, is_spmd: bool = True):
        self.members, self.me, self.limit, self.token, self.is_spmd = members, members.me, limit, token, is_spmd
        self._place = _place()
        self.server: Protocols | None = None
        self._pools: dict[Member, list[Pooled]] = defaultdict(list)
        self._served: set[Connection] = set()
        self._lock = threading.Lock()
        self._threads = ThreadPoolExecutor(_MOST_ASYNC, "meshfuse-rpc")
        self._outstanding = 0
        self._idle = threading.Condition(self._lock)
        self.is_closed = False
        self._listener = Listener(host, 0, token, self._welcome, local=True)
        try:
            members.meet(self._own(), limit)
        except BaseException:
            self._listener.close()
            raise

    def get_worker_info(self, name: str | None = None) -> WorkerInfo:
        """The peer of that name; this process without a name."""
        return self.me if name is None else self.members.find(name)

    def get_worker_infos(self) -> list[WorkerInfo]:
        """All peers that are known, this process among them."""
        return self.members.infos()

    def _own(self) -> Member:
        listener = self._listener
        local, process = listener.local_name, identity_of(os.getpid())
        return Member(self.me, listener.host, listener.port, local, self._place, process)

    def exchange(self, what: str, text: str, limit: float | None = None) -> list[str]:
        """What each peer says under this name; all of them call this. limit: seconds, those of a call if not given."""
        return self.members.exchange(what, text, self.limit if limit is None else limit)

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
            raise self.members.lost(to, str(error)) from None
        return pooled

    def finish(self, to: int, pooled: Pooled, limit: float) -> Frame:
        """Wait for the answer to a request. Raises WorkerLost and WorkerTimeout."""
        try:
            answer = pooled.connection.receive_within(limit or FOREVER)
        except Late:
            pooled.connection.close()
            raise self._late(to, limit) from None
        except Closed as error:
            pooled.connection.close()
            raise self.members.lost(to, str(error)) from None
        except BaseException:
            pooled.connection.close()
            raise
        self._pools[pooled.peer].append(pooled)
        return answer

    def _take(self, to: int) -> Pooled:
        if self.is_closed:
            raise SessionError("rpc has been shut down: call init_rpc first", caller_line())
        there = self.members.member(to)
        try:
            return self._pools[there].pop()
        except IndexError:
            pass
        try:
            local = there.local_name if there.place == self._place else ""
            greeting = Greeting(_ROLE, self.me.id, version())
            connection = connect((there.host, there.port), self.token, greeting, 30.0, local)
        except OSError as error:
            raise self.members.lost(to, str(error)) from None
        return Pooled(connection, there)

    def _late(self, to: int, limit: float) -> WorkerTimeout:
        name = self.members.member(to).info.name
        error = WorkerTimeout(
            f"RPC ran for more than set timeout: {name} did not answer within {limit:g} s", caller_line()
        )
        error.workers = (to,)
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
