"""Where a session's other hosts connect: one address, one token, and nothing is read before that is shown."""

from __future__ import annotations

import contextlib
import ipaddress
import logging
import secrets
import socket
import threading
from collections.abc import Callable
from typing import Any

from ..errors import ArgumentError, caller_line, shown, user_error
from . import handshake
from .errors import ConnectionRefused
from .pickling import dumps, loads
from .segments import is_available
from .wire import Closed, Connection, Frame

log = logging.getLogger("meshfuse.session")
HELLO = 40
# Peers that have not shown the token yet; more are closed at once.
_MOST_STRANGERS = 512


class Listener:
    """Accepts connections at one address, and gives each that has shown the token to `welcome`, with its greeting.

    local: processes of this machine may connect by a local name, too.
    """

    def __init__(
        self, host: str, port: int, token: str, welcome: Callable[[Connection, Any], None], local: bool = False
    ):
        check_address(host)
        self._token, self._welcome = token, welcome
        try:
            self._sock = socket.create_server((host, port), family=_family(host), backlog=512)
        except (OSError, OverflowError, TypeError) as error:
            why = getattr(error, "strerror", error)
            raise user_error(
                "a session cannot listen there", f"{host}:{port} ({why})", "a free port of this machine", "",
                caller_line(), ArgumentError,
            ) from None  # fmt: skip
        self.host, self.port = self._sock.getsockname()[:2]
        self._strangers = threading.Semaphore(_MOST_STRANGERS)
        self._socks = [self._sock]
        self.local_name = self._listen_locally() if local else ""
        for listening in self._socks:
            threading.Thread(target=self._run, args=(listening,), name="meshfuse-listener", daemon=True).start()

    def _listen_locally(self) -> str:
        """Also a Unix socket without a file (Linux): tensors go through shared memory there."""
        if not is_available():
            return ""
        name = f"meshfuse-{secrets.token_hex(8)}"
        sock = socket.socket(socket.AF_UNIX)
        sock.bind(f"\0{name}")
        sock.listen(512)
        self._socks.append(sock)
        return name

    def _run(self, listening: socket.socket) -> None:
        while True:
            try:
                sock, peer = listening.accept()
                peer = peer or ("this machine",)
            except OSError:
                return  # It was closed.
            if not self._strangers.acquire(blocking=False):
                log.warning("closed a connection from %s: too many that have not shown the token", peer[0])
                sock.close()
                continue
            threading.Thread(target=self._meet, args=(sock, peer), name="meshfuse-handshake", daemon=True).start()

    def _meet(self, sock: socket.socket, peer: Any) -> None:
        try:
            handshake.accept(sock, self._token)
            connection = Connection(sock)
            greeting = loads(connection.receive().payload)
        except (ConnectionRefused, Closed, OSError) as error:
            log.warning("closed a connection from %s: %s", peer[0], error)
            sock.close()
            return
        finally:
            self._strangers.release()
        self._welcome(connection, greeting)

    def close(self) -> None:
        """Stop listening."""
        for sock in self._socks:
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
            sock.close()


def connect(address: tuple[str, int], token: str, greeting: Any, seconds: float, local_name: str = "") -> Connection:
    """Connect to a listener and greet it, by its local name if it is on this machine.

    Raises ConnectionRefused, or OSError where nobody listens.
    """
    if local_name:
        sock = socket.socket(socket.AF_UNIX)
        sock.settimeout(seconds)
        sock.connect(f"\0{local_name}")
    else:
        sock = socket.create_connection(address, timeout=seconds)
    try:
        handshake.connect(sock, token)
        connection = Connection(sock)
        connection.send(Frame(HELLO, 0, 0, dumps(greeting)[0]))
    except BaseException:
        sock.close()
        raise
    return connection


def check_address(host: Any) -> None:
    """Raises ArgumentError for an address that means all interfaces, and for what is none."""
    with contextlib.suppress(ValueError):
        if isinstance(host, str) and host and not ipaddress.ip_address(host).is_unspecified:
            return
    if not isinstance(host, str) or not host or not _is_name(host):
        raise user_error(
            "the address of a session", shown(host), "one interface's address or name, not all of them",
            "Pass 127.0.0.1, or the address by which the other hosts reach this one.", caller_line(), ArgumentError,
        )  # fmt: skip


def _is_name(host: str) -> bool:
    with contextlib.suppress(ValueError):
        ipaddress.ip_address(host)
        return False  # an address, and one that means all interfaces
    with contextlib.suppress(OSError, UnicodeError):
        return not ipaddress.ip_address(socket.gethostbyname(host)).is_unspecified
    return False


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET
