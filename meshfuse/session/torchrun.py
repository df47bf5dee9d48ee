"""A session over the ranks that a launcher has started: it places and watches them, and no more."""

from __future__ import annotations

import signal
import socket
import sys
import time

import torch.distributed as dist

from ..errors import ArgumentError, caller_line, user_error
from ..runtime.environment import DEFAULT_TIMEOUT, LOOPBACK, TORCHRUN, Environment, read_environment
from ..runtime.processes import die_with_parent
from ..runtime.store import await_keys, connect, joining
from ..runtime.world import World
from .forkserver import START_LIMIT
from .handshake import token_of
from .host import run as serve_host
from .nodes import Nodes
from .session import SocketSession

_POLL = 0.5  # Seconds between two looks whether the session has ended.


class LaunchedSession(SocketSession):
    """A session in a script that `torchrun` or `meshfuse run` has started on several ranks.

    Rank 0 is the controller, and goes on. In all others the constructor serves the session until it ends, and then ends
    the process: of each machine one keeps its workers, as many as there are ranks.

    Raises ArgumentError in a script that no launcher has started on several ranks.
    """

    def __init__(self, num_groups: int = 1, timeout: float = DEFAULT_TIMEOUT):
        place = read_environment()
        if place.size == 1 or place.size % place.local_size:
            raise user_error(
                "a LaunchedSession", f"{place.size} ranks, {place.local_size} of them here, by {place.source}",
                "several ranks, equally many on each machine", "Start the script by torchrun or `meshfuse run`.",
                caller_line(), ArgumentError,
            )  # fmt: skip
        if place.source == TORCHRUN:
            die_with_parent(signal.SIGTERM)
        with joining(place):
            self._store = dist.PrefixStore("session", connect(place, START_LIMIT))
        if place.rank:
            sys.exit(_serve(place, self._store))
        World.stand_alone()
        token, hosts = token_of(), place.size // place.local_size
        host = LOOPBACK if hosts == 1 else _own_address(place)

        def make() -> Nodes:
            return Nodes(hosts - 1, place.local_size, host, 0, token, False, self._announce)

        self._token = token
        super().__init__(hosts, place.local_size, num_groups, host, 0, token, timeout, make)

    def _announce(self, host: str, port: int) -> None:
        self._store.set("address", f"{host} {port} {self._token}")

    def shutdown(self) -> None:
        """End the workers, and let the other ranks end."""
        super().shutdown()
        self._store.set("ended", "")


def _own_address(place: Environment) -> str:
    """The address by which the other machines reach this one, where rank 0 is."""
    return socket.gethostbyname(place.address)


def _serve(place: Environment, store: dist.Store) -> int:
    """What a rank other than 0 does; its exit code."""
    if place.local_rank or place.rank < place.local_size:
        return _await_end(store)
    if await_keys(store, ["address"], START_LIMIT, lambda: None):
        print(f"meshfuse: rank {place.rank}: rank 0 made no session within {START_LIMIT:g} s", file=sys.stderr)
        return 1
    host, port, token = store.get("address").decode().split()
    return serve_host(host, int(port), place.local_size, START_LIMIT, token)


def _await_end(store: dist.Store) -> int:
    """Wait until the session ends: this rank's worker is kept by another process of its machine."""
    while True:
        try:
            if store.check(["ended"]):
                return 0
        except dist.DistError:
            return 0  # The store has ended with its session.
        time.sleep(_POLL)
