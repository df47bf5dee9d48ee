"""The other hosts of a SocketSession, as the controller sees them: one connection each, and two for every worker."""

from __future__ import annotations

import platform
import queue
import socket
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from ..errors import caller_line
from ..version import __version__
from .errors import SessionError
from .forkserver import START_LIMIT
from .links import SocketLink
from .listener import Listener, log
from .output import show_line
from .pickling import dumps
from .wire import Connection, Frame
from .worker_main import WorkerSpec

# Roles of connections; kinds of frames between a node and the controller.
NODE, COMMANDS, CONTROL = "node", "commands", "control"
START, ENDED, OUTPUT = 50, 51, 52
_LOOK = 0.5  # Seconds between two looks whether a host that has not come still can.


@dataclass(frozen=True, slots=True)
class Greeting:
    """Whose connection it is: a node with so many workers, or that worker's commands or control."""

    role: str
    number: int
    version: str


def version() -> str:
    """What both sides must have alike: functions travel as code."""
    return f"meshfuse {__version__}, Python {platform.python_version().rpartition('.')[0]}"


class Node:
    """One other host; it says how its workers end, and what they print."""

    def __init__(self, connection: Connection):
        self.connection = connection
        self._ended: dict[int, str] = {}

    def fileno(self) -> int:
        """The socket's number."""
        return self.connection.fileno()

    def is_gone(self) -> bool:
        """Whether it has closed its connection, and what it sent before has been read."""
        try:
            return not self.connection.sock.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
        except BlockingIOError:
            return False
        except OSError:
            return True

    def read(self) -> None:
        """Read all messages that have come. Raises Closed."""
        self._heed(self.connection.receive())
        while self.connection.is_ready():
            self._heed(self.connection.receive())

    def _heed(self, frame: Frame) -> None:
        if frame.kind == ENDED:
            self._ended[frame.number] = bytes(frame.payload).decode()
        elif frame.kind == OUTPUT:
            show_line(bool(frame.number), bytes(frame.payload).decode())

    def how_ended(self, worker: int) -> str | None:
        """How a worker's process ended, if that is known."""
        return self._ended.get(worker)

    def start(self, specs: Sequence[WorkerSpec]) -> None:
        """End the workers that it has, and start these."""
        self._ended.clear()
        self.connection.send(Frame(START, 0, 0, dumps(list(specs))[0]))


class Nodes:
    """All other hosts. Waits until they have connected; raises SessionError where they do not."""

    def __init__(
        self, count: int, per_node: int, host: str, port: int, token: str, is_new_token: bool,
        announce: Callable[[str, int], None] = lambda host, port: None, check: Callable[[], None] = lambda: None,
    ):  # fmt: skip
        self._check = check  # Raises where a host will never come.
        self.per_node, self.nodes = per_node, []
        self._arrived: queue.SimpleQueue[Connection] = queue.SimpleQueue()
        self._workers: queue.SimpleQueue[tuple[str, int, Connection]] = queue.SimpleQueue()
        self._listener = Listener(host, port, token, self._welcome)
        self.host, self.port = self._listener.host, self._listener.port
        announce(self.host, self.port)
        if count and is_new_token:
            say = f"MESHFUSE_TOKEN={token} python -m meshfuse.session.remote {self.host} {self.port} {per_node}"
            print(f"meshfuse: waiting for {count} host{'s' if count > 1 else ''}: {say}", file=sys.stderr, flush=True)
        try:
            self._await_nodes(count)
        except BaseException:
            self.close()
            raise

    def _await_nodes(self, count: int) -> None:
        deadline = time.monotonic() + START_LIMIT
        while len(self.nodes) < count:
            try:
                self._check()
                self.nodes.append(Node(self._arrived.get(timeout=min(_LOOK, max(0.0, deadline - time.monotonic())))))
            except queue.Empty:
                if time.monotonic() < deadline:
                    continue
                raise SessionError(
                    f"hosts of the session did not connect: found {len(self.nodes)} within {START_LIMIT:g} s, needed "
                    f"{count}. Start `python -m meshfuse.session.remote {self.host} {self.port} {self.per_node}` there",
                    caller_line(),
                ) from None

    def _welcome(self, connection: Connection, greeting: object) -> None:
        if not isinstance(greeting, Greeting) or greeting.version != version():
            found = getattr(greeting, "version", "something else")
            log.warning("closed a connection of %s: this side has %s", found, version())
        elif greeting.role == NODE and greeting.number == self.per_node:
            self._arrived.put(connection)
            return
        elif greeting.role in (COMMANDS, CONTROL):
            self._workers.put((greeting.role, greeting.number, connection))
            return
        else:
            log.warning("closed a connection of %s: needed a host with %d workers", greeting, self.per_node)
        connection.close()

    def start(self, like: WorkerSpec) -> list[SocketLink]:
        """Start the workers of all other hosts: their links, in order."""
        wanted = {}
        for index, node in enumerate(self.nodes, 1):
            numbers = range(index * self.per_node, (index + 1) * self.per_node)
            address = node.connection.sock.getpeername()[0]
            node.start(
                [
                    replace(like, worker=worker, address=address, local=(place, self.per_node))
                    for place, worker in enumerate(numbers)
                ]
            )
            wanted |= {(role, worker): None for worker in numbers for role in (COMMANDS, CONTROL)}
        found = self._collect(set(wanted))
        workers = sorted({worker for _, worker in wanted})
        return [SocketLink(worker, found[COMMANDS, worker], found[CONTROL, worker]) for worker in workers]

    def _collect(self, wanted: set[tuple[str, int]]) -> dict[tuple[str, int], Connection]:
        found: dict[tuple[str, int], Connection] = {}
        deadline = time.monotonic() + START_LIMIT
        while wanted - set(found):
            try:
                role, worker, connection = self._workers.get(timeout=min(_LOOK, max(0.0, deadline - time.monotonic())))
            except queue.Empty:
                missing = sorted({worker for _, worker in wanted - set(found)})
                self._check_nodes(missing)
                if time.monotonic() < deadline:
                    continue
                raise SessionError(f"workers {missing} did not connect within {START_LIMIT:g} s") from None
            found[role, worker] = connection
        return found

    def _check_nodes(self, missing: list[int]) -> None:
        """Raises SessionError where the host of workers that are waited for has ended."""
        gone = [worker for worker in missing if self.nodes[worker // self.per_node - 1].is_gone()]
        if gone:
            raise SessionError(
                f"the host of workers {gone} is gone: found no `python -m meshfuse.session.remote`, needed it to start "
                "them. Start a new session and its hosts", caller_line(),
            )  # fmt: skip

    def close(self) -> None:
        """Stop listening, and let the other hosts end."""
        self._listener.close()
        for node in self.nodes:
            node.connection.close()
