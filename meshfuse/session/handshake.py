"""Who may connect: both sides prove that they know the session's token before either reads anything else.

Each side sends a random challenge and answers the other's by its HMAC-SHA256, so the token itself is never sent. All
messages have a fixed length and nothing in them is parsed. Challenge and response as in RFC 2195, in both directions.
"""

from __future__ import annotations

import hmac
import os
import secrets
import socket

from ..errors import ArgumentError, user_error
from .errors import ConnectionRefused

TOKEN = "MESHFUSE_TOKEN"
_GREETING = b"meshfuse-session-1\n"
_CHALLENGE, _PROOF = 32, 32
LIMIT = 10.0  # Seconds for a whole handshake.


def token_of(given: str | None = None) -> str:
    """The given token, that of MESHFUSE_TOKEN, or a new one of 256 bits. ArgumentError for an empty one."""
    token = os.environ.get(TOKEN) or secrets.token_hex(32) if given is None else given
    if not isinstance(token, str) or len(token) < 8:
        raise user_error(
            "the token of a session is too short", f"{len(token) if isinstance(token, str) else 0} characters",
            "8 or more", f"Unset {TOKEN} for a random one.", cls=ArgumentError,
        )  # fmt: skip
    return token


def accept(sock: socket.socket, token: str) -> None:
    """The listening side. Raises ConnectionRefused for a peer that does not know the token."""
    with _Limited(sock):
        mine = os.urandom(_CHALLENGE)
        sock.sendall(_GREETING + mine)
        answer = _exactly(sock, _PROOF + _CHALLENGE)
        _check(answer[:_PROOF], _proof(token, b"connects", mine))
        sock.sendall(_proof(token, b"accepts", answer[_PROOF:]))


def connect(sock: socket.socket, token: str) -> None:
    """The connecting side. Raises ConnectionRefused where the listener is no session, or another one's."""
    with _Limited(sock):
        greeting = _exactly(sock, len(_GREETING) + _CHALLENGE)
        _check(greeting[: len(_GREETING)], _GREETING)
        mine = os.urandom(_CHALLENGE)
        sock.sendall(_proof(token, b"connects", greeting[len(_GREETING) :]) + mine)
        _check(_exactly(sock, _PROOF), _proof(token, b"accepts", mine))


def _proof(token: str, role: bytes, challenge: bytes) -> bytes:
    return hmac.digest(token.encode(), role + challenge, "sha256")


def _check(found: bytes, needed: bytes) -> None:
    if not hmac.compare_digest(found, needed):
        raise ConnectionRefused("a peer did not show this session's token")


def _exactly(sock: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        more = sock.recv(size - len(data))
        if not more:
            raise ConnectionRefused("a peer closed the connection before it showed the session's token")
        data += more
    return data


class _Limited:
    """A context in which a socket has the time limit of a handshake, and any error of it is ConnectionRefused."""

    def __init__(self, sock: socket.socket):
        self._sock = sock

    def __enter__(self) -> None:
        self._sock.settimeout(LIMIT)

    def __exit__(self, kind: type | None, error: BaseException | None, _: object) -> None:
        if isinstance(error, OSError) and not isinstance(error, ConnectionRefused):
            raise ConnectionRefused(f"a peer did not show the session's token: {error}") from None
        if error is None:
            self._sock.settimeout(None)
