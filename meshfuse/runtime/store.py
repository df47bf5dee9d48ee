"""The store through which a job's ranks find each other, under keys that no other user of it has."""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import time
from collections.abc import Callable, Iterator
from datetime import timedelta

import torch.distributed as dist

from ..errors import USER_ERRORS, RankError, RankTimeout, user_error
from . import exit_page
from .deadlines import bounded
from .environment import DEFAULT_GROUP, LOOPBACK, Environment
from .processes import hindrance

_NOTHING = "\0nothing"  # No text that anybody sets.
_BACKLOG = 512  # Ranks that connect at the same time.


def connect(place: Environment, limit: float) -> dist.Store:
    """Join the job's store; rank 0 serves it where nobody else does.

    Raises RankTimeout where the store does not answer within `limit` seconds, RankError for an address that does not
    exist.
    """
    _check_address(place, limit)
    if place.source == DEFAULT_GROUP:
        store = dist.distributed_c10d._get_default_store()
    else:
        store = _serve(place) if hosts_store(place) else _join(place, limit)
    return dist.PrefixStore(f"meshfuse/{place.attempt}", store)


@contextlib.contextmanager
def joining(place: Environment) -> Iterator[None]:
    """Within this context, an error of the store means that this rank cannot join: RankError."""
    try:
        yield
    except (RankError, *USER_ERRORS):
        raise
    except RuntimeError as error:
        raise user_error(
            f"rank {place.rank} cannot join its job", hindrance() + str(error).splitlines()[0],
            f"a store that answers at {place.address}:{place.port}",
            "See whether rank 0 runs, and how many files ulimit -n lets it open.", cls=RankError,
        ) from None  # fmt: skip


def _check_address(place: Environment, limit: float) -> None:
    """Raises RankError for a host name that does not exist.

    torch would ask for it again and again, rank 0 for minutes.
    """
    if place.source == DEFAULT_GROUP:
        return
    try:
        bounded(limit, lambda: socket.getaddrinfo(place.address, place.port))
    except (OSError, RuntimeError, UnicodeError) as error:
        raise user_error(
            "the address of rank 0 cannot be looked up",
            f"{place.address} ({getattr(error, 'strerror', None) or error})",
            "a name or an IP address that this machine knows", "Export another MASTER_ADDR to all ranks.",
            cls=RankError,
        ) from None  # fmt: skip


def hosts_store(place: Environment) -> bool:
    """Whether the store lives in this process, which must then outlive its peers."""
    return place.rank == 0 and not place.agent_store and place.source != DEFAULT_GROUP


def _join(place: Environment, limit: float) -> dist.Store:
    try:
        # A host that is stopped, or has not come to serve yet, accepts the connection and then says nothing.
        return bounded(limit + 1, lambda: _client(place, limit), hopeless=lambda: bool(_end_of_host()))
    except RuntimeError:  # torch's error, or our own Silent: neither says more.
        if _end_of_host():
            raise user_error(
                f"rank {place.rank} cannot join its job", f"rank 0 {_end_of_host()}", "rank 0 to serve its store",
                "Let rank 0 come as far as the others: to its first use of meshfuse.", cls=RankError,
            ) from None  # fmt: skip
        raise RankTimeout(
            f"rank {place.rank} cannot reach the store of its job: found {hindrance()}no answer at "
            f"{place.address}:{place.port} within {limit:g} s, needed rank 0 to serve it there. "
            "See whether rank 0 runs and got as far as meshfuse, or raise MESHFUSE_TIMEOUT."
        ) from None


def _end_of_host() -> str:
    """What became of rank 0, if the launcher has told; else ""."""
    return exit_page.read(exit_page.own()).get(0, "")


def _client(place: Environment, limit: float) -> dist.Store:
    return dist.TCPStore(
        place.address, place.port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=limit)
    )


def _serve(place: Environment) -> dist.Store:
    """A store at the job's port, shared with a default process group that the script makes there."""
    if place.listen_fd is not None:
        return _start(place, _adopt(place.listen_fd))
    try:
        listener = _listen(place)
    except OSError as error:
        return _share(place, error)
    return _start(place, listener)


def _adopt(fd: int) -> socket.socket:
    """The socket that the launcher gave to rank 0. RankError in a process that rank 0 started, which has not got it."""
    try:
        os.set_inheritable(fd, False)
        return socket.socket(fileno=fd)
    except OSError as error:
        raise user_error(
            "a second process is rank 0 of this job", f"no socket {fd} of the launcher's ({error.strerror})",
            "one process for each rank", "Start processes of your own without RANK and WORLD_SIZE.", cls=RankError,
        ) from None  # fmt: skip


def _listen(place: Environment) -> socket.socket:
    # TCPStore by itself listens on every interface; a socket bound beforehand keeps it to one.
    host = LOOPBACK if place.address == "localhost" else place.address
    listener = socket.create_server((host, place.port), backlog=_BACKLOG)
    return listener


def _start(place: Environment, listener: socket.socket) -> dist.Store:
    port = listener.getsockname()[1]
    try:
        return dist.TCPStore(
            place.address, port, is_master=True, wait_for_workers=False, multi_tenant=True,
            master_listen_fd=listener.detach(),
        )  # fmt: skip
    except RuntimeError as error:
        raise user_error(
            "rank 0 cannot serve the store of its job", hindrance() + str(error).splitlines()[0],
            "room for its connections", "Raise the limits that ulimit -a shows.", cls=RankError,
        ) from None  # fmt: skip


def _share(place: Environment, error: OSError) -> dist.Store:
    """The store that this process serves already, where the script called init_process_group first."""
    if error.errno == errno.EADDRINUSE:
        with contextlib.suppress(RuntimeError):
            return dist.TCPStore(place.address, place.port, is_master=True, wait_for_workers=False, multi_tenant=True)
    raise user_error(
        "rank 0 cannot serve the store of its job",
        f"{place.address}:{place.port} unusable ({error.strerror})",
        "a free port of this machine",
        "Export another MASTER_PORT to all ranks, and as MASTER_ADDR an address of rank 0's machine.",
        cls=RankError,
    ) from error


def text_there(store: dist.Store, key: str) -> str | None:
    """The text under a key that others may delete; None where there is none.

    `get` would wait for it, also where it was there a moment before.
    """
    found = store.compare_set(key, _NOTHING, _NOTHING).decode()  # Sets nothing where there is nothing.
    return None if found == _NOTHING else found


def await_keys(store: dist.Store, keys: list[str], limit: float, check: Callable[[], None]) -> list[str]:
    """Wait until all keys are set; returns those still missing after `limit` seconds.

    Calls `check` now and then, which may raise. Polls, because a timed-out TCPStore.wait writes to stderr.
    """
    deadline = time.monotonic() + limit
    pause, next_check = 0.0005, 0.0
    while not store.check(keys):
        now = time.monotonic()
        if now >= deadline:
            return [key for key in keys if not store.check([key])]
        if now >= next_check:
            check()
            next_check = now + 0.2
        time.sleep(pause)
        pause = min(pause * 1.5, 0.02)
    return []
