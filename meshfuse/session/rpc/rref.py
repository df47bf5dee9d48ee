"""`RRef`: a value on one worker, its owner, and references to it on others.

The owner keeps the value while any reference is alive. Each reference has a number of its own (a fork), and the owner
knows the set of them. A user that passes its reference on keeps its own until the owner knows the new one: so the owner
never sees the last reference go while another is on its way (the protocol of torch's RRefs, pytorch.org/docs/rpc/rref).
"""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, Protocol, TypeVar

import torch

from ...errors import ArgumentError, caller_line, user_error
from ..errors import SessionError
from .members import WorkerInfo

T = TypeVar("T")
Job = tuple[Callable[..., None], tuple[Any, ...]]
# Owners first learn of new references, then parents that these are known, then of what has ended.
ADD, ACCEPT, DROP, _MARK = range(4)
_GATHER = 0.01  # Seconds in which such news are gathered: a message for each would take longer than most calls.
Id = tuple[int, int]  # (rank that made it, its number there)


class Peer(Protocol):
    """What references need of this process' part in the group: `calls.Calls`."""

    table: Table

    @property
    def me(self) -> WorkerInfo: ...
    def peer(self, rank: int) -> WorkerInfo: ...
    def new_id(self) -> Id: ...
    def note_fork(self, rref: Any, fork: Id) -> None: ...
    def is_sending(self) -> bool: ...
    def to_here(self, rref: Any, timeout: float | None) -> Any: ...
    def proxy(self, rref: Any, how: str, timeout: float | None) -> Any: ...
    def backward(self, rref: Any, context: int, retain_graph: bool) -> None: ...
    def tell_owner(self, rref: Any) -> None: ...
    def type_of(self, rref: Any, timeout: float | None) -> torch.futures.Future[Any]: ...


_peer: list[Peer] = []


def set_peer(peer: Peer | None) -> None:
    """Let references belong to this process' part in a group; None when that has ended."""
    _peer[:] = [] if peer is None else [peer]


def peer() -> Peer:
    """This process' part in the group. Raises SessionError where init_rpc has not been called."""
    if not _peer:
        raise SessionError(
            "Current RPC agent is not set! Did you initialize the RPC framework: found no group, needed rpc.init_rpc "
            "first", caller_line(),
        )  # fmt: skip
    return _peer[0]


@dataclass(slots=True)
class Owned:
    """A value that this process owns. `value` is a future: a remote call may still be making it."""

    value: torch.futures.Future[Any] = field(default_factory=torch.futures.Future)
    forks: set[Id] = field(default_factory=set)


class Table:
    """The values that this process owns, and the references that it has passed on and not yet heard of again.

    What ends references runs in a thread of its own: objects end in any thread, and inside of any lock.
    """

    def __init__(self) -> None:
        self.owned: dict[Id, Owned] = {}
        self.pending: dict[Id, Any] = {}
        self.users = 0
        self._changed = threading.Condition()
        self._jobs: queue.SimpleQueue[tuple[int, int, Callable[..., None], tuple[Any, ...]] | None]
        self._jobs = queue.SimpleQueue()

    def later(self, phase: int, rank: int, function: Callable[..., None], *args: Any) -> None:
        """Call a function on a worker soon: with others in one message. Takes no lock."""
        self._jobs.put((phase, rank, function, args))

    def serve(self, send: Callable[[int, Sequence[Job]], None]) -> None:
        """Begin to send what is to be done later, by `send`."""
        self._thread = threading.Thread(target=self._run, args=(send,), name="meshfuse-rrefs", daemon=True)
        self._thread.start()

    def _run(self, send: Callable[[int, Sequence[Job]], None]) -> None:
        while (first := self._jobs.get()) is not None:
            time.sleep(_GATHER)
            jobs, job = [first], None
            with contextlib.suppress(queue.Empty):
                while (job := self._jobs.get_nowait()) is not None:
                    jobs.append(job)
            self._do(jobs, send)
            del first, job, jobs  # They hold references, which must end now and not with the next ones.

    def _do(self, jobs: list[Any], send: Callable[[int, Sequence[Job]], None]) -> None:
        for phase in (ADD, ACCEPT, DROP):
            due = [job for job in jobs if job[0] == phase]
            for rank in sorted({job[1] for job in due}):
                with contextlib.suppress(SessionError, RuntimeError, OSError):  # It is gone, and all that it had.
                    send(rank, [job[2:] for job in due if job[1] == rank])
        for job in jobs:
            if job[0] == _MARK:
                job[2]()

    def settle(self, seconds: float) -> bool:
        """Wait until all that was to be done so far is done; whether that is so."""
        done = threading.Event()
        self._jobs.put((_MARK, 0, done.set, ()))
        return done.wait(seconds)

    def stop(self) -> None:
        """End the thread."""
        self._jobs.put(None)
        self._thread.join(2.0)

    def add(self, rref: Id, fork: Id) -> Owned:
        """A reference that this owner now knows; the entry is made if it is the first."""
        with self._changed:
            entry = self.owned.setdefault(rref, Owned())
            entry.forks.add(fork)
            self._changed.notify_all()
            return entry

    def drop(self, rref: Id, fork: Id) -> None:
        """A reference has ended; the value goes with the last one."""
        with self._changed:
            entry = self.owned.get(rref)
            if entry is not None:
                entry.forks.discard(fork)
                if not entry.forks:
                    del self.owned[rref]

    def entry(self, rref: Id, seconds: float) -> Owned:
        """The entry of a value, which a message that is under way may still make."""
        with self._changed:
            if not self._changed.wait_for(lambda: rref in self.owned, seconds):
                raise SessionError(f"no value of that reference was made within {seconds:g} s")
            return self.owned[rref]


class RRef(Generic[T]):
    """A reference to a value on a worker. `RRef(value)` is one to a value of this process.

    Pass it as an argument of `rpc` calls; it cannot be pickled otherwise.
    """

    _methods: frozenset[str] = frozenset()  # of the value, as far as this reference knows

    def __init__(self, value: T, type_hint: Any = None):
        mine = peer()
        number = mine.new_id()
        self._set(mine.me.id, number, number, True)
        mine.table.add(number, number).value.set_result(value)

    def _set(self, owner: int, number: Id, fork: Id, confirmed: bool) -> None:
        self._owner, self._id, self._fork = owner, number, fork
        self._peer = peer()
        self._created: torch.futures.Future[Any] | None = None
        self._confirmed = confirmed
        self._peer.table.users += 1

    @staticmethod
    def make(owner: int, number: Id, fork: Id, confirmed: bool) -> RRef[Any]:
        """A reference of these numbers."""
        made = RRef.__new__(RRef)
        made._set(owner, number, fork, confirmed)
        return made

    def __del__(self) -> None:
        if not self._is_alive():
            return
        mine = self._peer
        mine.table.users -= 1
        owner, number, fork, created = self._owner, self._id, self._fork, self._created
        if created is not None and not created.done():
            created.add_done_callback(lambda _: mine.table.later(DROP, owner, drop, number, fork))
        else:
            mine.table.later(DROP, owner, drop, number, fork)

    def _is_alive(self) -> bool:
        """Whether its group has not ended."""
        mine = getattr(self, "_peer", None)
        return mine is not None and bool(_peer) and _peer[0] is mine

    def is_owner(self) -> bool:
        """Whether the value is in this process."""
        return self._owner == self._peer.me.id

    def owner(self) -> WorkerInfo:
        """The worker that has the value."""
        return self._peer.peer(self._owner)

    def owner_name(self) -> str:
        """The name of the worker that has the value."""
        return self.owner().name

    def confirmed_by_owner(self) -> bool:
        """Whether the owner knows of this reference. One that came from another user is told to the owner first."""
        if not self._confirmed and self._created is None and self._is_alive():
            self._peer.tell_owner(self)
        return self._confirmed

    def confirm(self) -> None:
        """The owner knows of it now."""
        self._confirmed = True

    def to_here(self, timeout: float | None = None) -> T:
        """The value, or a copy of it. Raises what its call raised, SessionError after the group has ended."""
        if not self._is_alive():
            raise self._deleted("Cannot call to_here() on it after deletion.")
        return self._peer.to_here(self, timeout)

    def _deleted(self, what: str) -> SessionError:
        return SessionError(f"{what} rpc has been shut down: found {self}, needed a reference of this group",
                            caller_line())  # fmt: skip

    def local_value(self) -> T:
        """The value, on its owner. ArgumentError elsewhere."""
        if not self.is_owner():
            ids = f"UserRRef(rref_id={_global(self._id)}, fork_id={_global(self._fork)})"
            wrong = f"For {ids}, can't call localValue() on user {self._peer.me}. Call it on owner {self.owner()}"
            raise user_error(
                wrong, f"a reference on {self._peer.me.name}", f"one on its owner, {self.owner_name()}",
                "Call to_here() for a copy.", caller_line(), ArgumentError,
            )  # fmt: skip
        return self._peer.table.entry(self._id, 60.0).value.wait()

    def _get_future(self) -> torch.futures.Future[Any]:
        """What ends once the owner has answered to the call of `remote` that made this, as torch names it."""
        if self._created is not None:
            return self._created
        done: torch.futures.Future[Any] = torch.futures.Future()
        done.set_result(None)
        return done

    def _get_type(self, timeout: float | None = None, blocking: bool = True) -> Any:
        """The class of the value, or a future of it, as torch names it."""
        found = self._peer.type_of(self, timeout)
        return found.wait() if blocking else found

    def rpc_sync(self, timeout: float | None = None) -> Any:
        """A proxy whose methods run on the owner's value and give their result."""
        return self._peer.proxy(self, "rpc_sync", timeout)

    def rpc_async(self, timeout: float | None = None) -> Any:
        """A proxy whose methods run on the owner's value and give a future."""
        return self._peer.proxy(self, "rpc_async", timeout)

    def remote(self, timeout: float | None = None) -> Any:
        """A proxy whose methods run on the owner's value and give a reference to their result there."""
        return self._peer.proxy(self, "remote", timeout)

    def backward(self, dist_autograd_ctx_id: int = -1, retain_graph: bool = False) -> None:
        """Run the backward pass from the value, a scalar: distributed if a context's id is given."""
        self._peer.backward(self, dist_autograd_ctx_id, retain_graph)

    def __reduce__(self) -> Any:
        return receive, self._serialize()

    def _serialize(self) -> tuple[Any, ...]:
        """What makes a reference of another worker: a fork of this one. Raises where no message takes it along."""
        if not self._is_alive():
            raise self._deleted("Cannot call fork an UserRRef after deletion.")
        if not self._peer.is_sending():
            raise user_error(
                "Can not pickle rref in python pickler, an RRef cannot be pickled", repr(self),
                "an argument or a result of an rpc call", "Send its value: to_here().", caller_line(), ArgumentError,
            )  # fmt: skip
        fork = self._peer.new_id()
        self._peer.note_fork(self, fork)
        return self._owner, self._id, fork, self._peer.me.id

    def __str__(self) -> str:
        if self.is_owner():
            return f"OwnerRRef({_global(self._id)})"
        return f"UserRRef(RRefId = {_global(self._id)}, ForkId = {_global(self._fork)})"

    def __repr__(self) -> str:
        kind = "OwnerRRef" if self.is_owner() else "UserRRef"
        return f"<{kind} {self._id[0]}.{self._id[1]} on {self.owner_name()}>"


def _global(number: Id) -> str:
    return f"GloballyUniqueId(created_on={number[0]}, local_id={number[1]})"


def receive(owner: int, number: Id, fork: Id, parent: int) -> RRef[Any]:
    """A reference that came in a message: its owner and its parent are told."""
    mine = peer()
    made = RRef.make(owner, number, fork, owner in (parent, mine.me.id))
    if owner == mine.me.id:
        mine.table.add(number, fork)
    if parent != owner:
        if owner != mine.me.id:
            mine.table.later(ADD, owner, add, number, fork)
            mine.table.later(ACCEPT, mine.me.id, made.confirm)
        mine.table.later(ACCEPT, parent, accepted, fork)
    return made


def add(number: Id, fork: Id) -> None:
    """On the owner: there is a reference of this number."""
    peer().table.add(number, fork)


def drop(number: Id, fork: Id) -> None:
    """On the owner: a reference has ended."""
    peer().table.drop(number, fork)


def accepted(fork: Id) -> None:
    """On a user that has passed its reference on: the owner knows the new one."""
    peer().table.pending.pop(fork, None)
