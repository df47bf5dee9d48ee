"""`init_rpc` and `shutdown`, and the calls by their names in `torch.distributed.rpc`."""

from __future__ import annotations

import atexit
import contextlib
import ipaddress
import os
import secrets
import socket
import threading
from collections.abc import Iterable, Iterator
from dataclasses import replace
from datetime import timedelta
from typing import Any
from urllib.parse import urlsplit

import torch
import torch.distributed as dist

from ...argument_checks import as_int
from ...errors import ArgumentError, caller_line, shown, user_error
from ...runtime.deadlines import within
from ...runtime.environment import LOOPBACK, Environment, read_environment
from ...runtime.store import connect
from ..errors import SessionError
from ..executor import current
from ..handshake import TOKEN, token_of
from .agent import Agent
from .calls import Calls, calls, set_calls
from .constants import DEFAULT_RPC_TIMEOUT_SEC, UNSET_RPC_TIMEOUT
from .gather import all_gather
from .members import FOREVER, Members, OpenMembers, WorkerInfo
from .options import RpcBackendOptions, as_options, check_timeout
from .rref import RRef

_LINGER = 5.0  # Seconds that the host of the store waits for the others to have read it.
_OPEN = "that is open"  # to whoever comes
_GIVEN = "RANK/WORLD_SIZE"
_generation = [0]


def is_available() -> bool:
    """Whether this module can be used: always."""
    return True


def init_rpc(
    name: str,
    backend: Any = None,
    rank: int = -1,
    world_size: int | None = None,
    rpc_backend_options: Any = None,
) -> None:
    """Join a group of workers that call each other's functions. All of them call this, and return together.

    rank, world_size: of this worker; by the environment (RANK, WORLD_SIZE) if not given. With a rank alone the group is
    open: this returns at once, and workers come and go. The workers show each other the token of MESHFUSE_TOKEN;
    without it one makes one and leaves it in the store, which has no token of its own.

    Raises ArgumentError for names that are taken, WorkerTimeout where others do not come, SessionError where this
    process is in a group already. `backend` and torch's own options are accepted, and their limits and method count.
    """
    options = as_options(backend, rpc_backend_options)
    WorkerInfo(name, 0)  # Raises for a name that is none.
    _refuse_second()
    place = _place(options.init_method, rank, world_size)
    members = _members(WorkerInfo(name, place.rank), place, _store(place, options))
    token = _token(members.store)
    _begin(Agent(members, options.rpc_timeout, _own_host(place), token))


def _members(me: WorkerInfo, place: Environment, store: dist.Store) -> Members:
    """The group that this worker joins. Raises SessionError where the store has one of the other kind."""
    kind = _OPEN if place.source == _OPEN else "of a fixed size"
    found = store.compare_set("rpc/kind", "", kind).decode()
    if found != kind:
        raise SessionError(
            "RPC group mixes statically and dynamically initialized members which is not supported.: "
            f"found a group {found}, needed one {kind}. Give all of them world_size, or none.", caller_line(),
        )  # fmt: skip
    if kind == _OPEN:
        return OpenMembers(me, dist.PrefixStore("rpc/open", store))
    _generation[0] += 1
    return Members(me, dist.PrefixStore(f"rpc/{_generation[0]}", store), place.size)


def _begin(agent: Agent) -> None:
    """Be a peer, once all are."""
    part = Calls(agent)
    set_calls(part)
    try:
        agent.exchange("ready", "")
    except BaseException:
        _leave(part)
        raise


def join(token: str, limit: float, generation: int) -> None:
    """On a session's worker: become a peer of the other workers, `worker0` and so on."""
    worker = current()
    world = worker.world()
    _refuse_second()
    store = dist.PrefixStore(f"rpc/{generation}", world.store) if world.size > 1 else dist.HashStore()
    members = Members(WorkerInfo(f"worker{worker.worker}", worker.worker), store, worker.size)
    _begin(Agent(members, limit, world.place.own_address or LOOPBACK, token, is_spmd=False))


def _refuse_second() -> None:
    if _running():
        raise SessionError("RPC is already initialized: call shutdown first", caller_line())


def _running() -> bool:
    try:
        calls()
    except SessionError:
        return False
    return True


def _place(method: str, rank: int, size: int | None) -> Environment:
    """This worker's rank, and where the store is."""
    if method == "env://" and (rank < 0 or size is None):
        found = read_environment()
        if found.source != "none":
            return found
    if method == "env://" and rank < 0:
        wrong = "init_rpc: environment variable RANK expected, and rank and world_size were not given"
        raise user_error(wrong, "none of a launcher's variables", "RANK and WORLD_SIZE", "", caller_line(),
                         ArgumentError)  # fmt: skip
    if rank < 0:
        raise user_error("init_rpc: rank parameter missing", f"{shown(rank)} for {method}", "this worker's rank", "",
                         caller_line(), ArgumentError)  # fmt: skip
    if size is None and as_int(rank) is not None:
        return _open_place(method, rank)
    number, count = as_int(rank), as_int(size)
    if number is None or count is None or not 0 <= number < count:
        raise user_error("init_rpc: rank and world_size", f"{shown(rank)} and {shown(size)}",
                         "a rank below the size of the world", "", caller_line(), ArgumentError)  # fmt: skip
    return _given_place(method, number, count)


def _given_place(method: str, rank: int, size: int) -> Environment:
    if method == "env://":
        base = read_environment({**_master(), "RANK": str(rank), "WORLD_SIZE": str(size)})
        return replace(base, rank=rank, size=size)
    there = urlsplit(method)
    return Environment(_GIVEN, rank, size, rank, size, there.hostname or LOOPBACK, there.port or 1, attempt="rpc")


def _open_place(method: str, rank: int) -> Environment:
    """The place of a rank among an unknown number: as that of the last one."""
    return replace(_given_place(method, rank, rank + 1), source=_OPEN)


def _master() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name in ("MASTER_ADDR", "MASTER_PORT")}


def _store(place: Environment, options: RpcBackendOptions) -> dist.Store:
    limit = options.rpc_timeout or DEFAULT_RPC_TIMEOUT_SEC
    if options.init_method.startswith("file:"):
        path = urlsplit(options.init_method).path
        return dist.FileStore(path) if place.source == _OPEN else dist.FileStore(path, place.size)
    if place.size == 1 and place.source != _OPEN:
        return dist.HashStore()
    store = connect(place, limit)
    store.set_timeout(timedelta(seconds=limit))
    return store


def _token(store: dist.Store) -> str:
    """The token of the group, which whoever comes first makes."""
    if os.environ.get(TOKEN):
        return token_of()
    return store.compare_set("token", "", secrets.token_hex(32)).decode()


def _own_host(place: Environment) -> str:
    """The address at which the others reach this process: loopback where all are on this machine.

    A launcher says whether they are; else the address of rank 0 does.
    """
    is_told = place.source not in (_OPEN, _GIVEN) or "LOCAL_WORLD_SIZE" in os.environ
    if (place.one_host and is_told) or _is_loopback(place.address):
        return LOOPBACK
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((place.address, place.port))
        return probe.getsockname()[0]


def _is_loopback(address: str) -> bool:
    with contextlib.suppress(OSError, UnicodeError):
        return ipaddress.ip_address(socket.gethostbyname(address)).is_loopback
    return False


def shutdown(graceful: bool = True, timeout: float = 0) -> None:
    """Leave the group. With `graceful` all workers call this, and each first finishes what others ask of it.

    References that are still alive end: their values go with their owners. Waits at most `timeout` seconds for the
    others to come, and then WorkerTimeout; 0: for as long as they live, so that a rank may serve others from here on.
    """
    part = calls()
    try:
        if graceful:
            _finish(part, timeout or FOREVER)
    finally:
        _leave(part)


def _leave(part: Calls) -> None:
    agent = part.agent
    set_calls(None)
    within(1.0, agent.members.leave)
    part.agent.close()
    part.table.stop()


def _finish(part: Calls, limit: float) -> None:
    """Do what is still to be done, for the others as well: references end, and calls that others have issued."""
    agent = part.agent
    agent.exchange("leaving", "", limit)
    agent.settle(limit)
    agent.exchange("settled", "", limit)
    part.table.settle(limit)
    agent.exchange("done", "", limit)
    _leave_store(agent)


def _leave_store(agent: Agent) -> None:
    """The store may be in this process: it serves until the others no longer need it."""
    within(1.0, agent.members.leave)
    if agent.me.id == 0:
        within(_LINGER, lambda: agent.members.await_leaving(_LINGER))


def abandon(token: str) -> None:
    """Be no peer any more of the group of a session that ends, if this process still is: its workers are gone."""
    if _running() and calls().agent.token == token:
        _end()


@atexit.register
def _end() -> None:
    if _running():
        part = calls()
        set_calls(None)
        part.agent.close()
        part.table.stop()


def rpc_sync(to: Any, func: Any, args: Any = None, kwargs: Any = None, timeout: float | None = None) -> Any:
    """Call a function on worker `to` (a name, rank or WorkerInfo) and return its result.

    What the function raises is raised here, as its own class and WorkerError. timeout: seconds, 0 for no limit.
    """
    return calls().sync(to, func, args, kwargs, timeout)


def rpc_async(
    to: Any, func: Any, args: Any = None, kwargs: Any = None, timeout: float | None = None
) -> torch.futures.Future[Any]:
    """Call a function on worker `to`; its result as a future."""
    future = calls().start(to, func, args, kwargs, timeout)
    if _thread_local_var.__dict__:
        _thread_local_var.future_list.append(future)
    return future


def remote(to: Any, func: Any, args: Any = None, kwargs: Any = None, timeout: float | None = None) -> RRef[Any]:
    """Call a function on worker `to`, which keeps its result; a reference to that."""
    return calls().remote(to, func, args, kwargs, timeout)


_thread_local_var = threading.local()


@contextlib.contextmanager
def _wait_all() -> Iterator[None]:
    """A context that waits for all calls that `rpc_async` begins in it; raises what the first of them raised.

    Its name and that of its list are torch's.
    """
    _thread_local_var.future_list = []
    try:
        yield
    finally:
        try:
            torch.futures.wait_all(_thread_local_var.future_list)
        finally:
            del _thread_local_var.future_list


def get_worker_info(worker_name: str | None = None) -> WorkerInfo:
    """The worker of that name; this one without a name."""
    return calls().me if worker_name is None else calls().agent.members.find(worker_name)


# What several workers do together, and this process' connections, by torch's names.


def _all_gather(obj: Any, worker_names: set[str] | None = None, timeout: float = UNSET_RPC_TIMEOUT) -> dict[str, Any]:
    return all_gather(obj, worker_names, timeout)


def _barrier(worker_names: Iterable[str]) -> None:
    """Wait until all these workers have called this."""
    all_gather(None, worker_names)


def _wait_all_workers(timeout: float = 0) -> None:
    """Wait until all workers have called this. timeout: seconds, 0 for no limit."""
    all_gather(None, None, timeout)


def _get_current_rpc_agent() -> Agent:
    return calls().agent


def get_rpc_timeout() -> float:
    """Seconds that a call takes at most that names no other limit."""
    return calls().agent.limit


def _set_rpc_timeout(rpc_timeout: float) -> None:
    """The limit of calls from here on that name no other; 0 for none."""
    check_timeout(rpc_timeout)
    calls().agent.limit = rpc_timeout


def rref_debug_info() -> dict[str, int]:
    """How many values this worker owns, and how many references it has or has passed on and not heard of."""
    table = calls().table
    return {"num_owner_rrefs": len(table.owned), "num_pending_users": len(table.pending), "num_users": table.users}


def _rref_context_get_debug_info() -> dict[str, str]:
    """The same, by torch's names. As there, a value counts once a reference to it has left this process."""
    table = calls().table
    shared = [entry.forks - {number} for number, entry in list(table.owned.items())]
    return {
        "num_owner_rrefs": str(sum(map(bool, shared))),
        "num_forks": str(sum(map(len, shared))),
        "num_pending_users": str(len(table.pending)),
        "num_pending_futures": "0",
    }
