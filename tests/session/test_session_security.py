"""Who may connect: nobody without the token, whatever they send; and nothing listens on all interfaces."""

from __future__ import annotations

import contextlib
import logging
import os
import pickle
import socket
import struct
import time

import pytest

import meshfuse.session as di
from meshfuse.errors import ArgumentError
from meshfuse.session import handshake
from meshfuse.session.listener import Listener, connect
from meshfuse.session.nodes import Greeting, version
from meshfuse.session.wire import BadFrame, Closed, Connection, Frame

TOKEN = "a token of the tests"


class _Bomb:
    def __reduce__(self):
        return os.putenv, ("MESHFUSE_BOMB", "exploded")


def test_what_strangers_send_is_closed_and_logged(caplog: pytest.LogCaptureFixture) -> None:
    welcomed = []
    listener = Listener("127.0.0.1", 0, TOKEN, lambda connection, greeting: welcomed.append(greeting))
    bomb = b"p" + pickle.dumps(_Bomb())
    frame = struct.pack("!2sBIQIQ", b"MF", 40, 0, 0, 0, len(bomb)) + bomb
    with caplog.at_level(logging.WARNING, "meshfuse.session"):
        for sent in (b"", b"GET / HTTP/1.1\r\n\r\n", frame, struct.pack("!2sBIQIQ", b"MF", 40, 0, 0, 0, 2**63),
                     os.urandom(64), b"MF"):  # fmt: skip
            with socket.create_connection((listener.host, listener.port), timeout=5) as stranger:
                stranger.sendall(sent)
                received = b""
                with contextlib.suppress(OSError):  # It was closed with our bytes unread, perhaps by now.
                    stranger.shutdown(socket.SHUT_WR)
                    while more := stranger.recv(4096):
                        received += more
                assert len(received) in (0, 51) if sent else len(received) == 51, "a greeting with a challenge, no more"
        for wrong in ("another token", TOKEN + "x"):
            with pytest.raises(di.ConnectionRefused):
                connect((listener.host, listener.port), wrong, Greeting("node", 1, version()), 5)
        until = time.monotonic() + 5
        while len(caplog.records) < 8 and time.monotonic() < until:
            time.sleep(0.01)
    assert not welcomed and "MESHFUSE_BOMB" not in os.environ
    assert len([r for r in caplog.records if "closed a connection from 127.0.0.1" in r.getMessage()]) == 8
    connect((listener.host, listener.port), TOKEN, Greeting("node", 1, version()), 5).close()
    until = time.monotonic() + 5
    while not welcomed and time.monotonic() < until:
        time.sleep(0.01)
    assert welcomed == [Greeting("node", 1, version())]
    listener.close()


def test_a_listener_that_does_not_know_the_token_gets_nothing() -> None:
    """A worker must not unpickle what a false controller sends."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        sock = socket.create_connection(server.getsockname(), timeout=5)
        peer, _ = server.accept()
        peer.sendall(b"meshfuse-session-1\n" + b"c" * 32 + b"not the proof that it should be!")
        with pytest.raises(di.ConnectionRefused):
            handshake.connect(sock, TOKEN)
        peer.close()
        sock.close()


@pytest.mark.parametrize(("sent", "kind"), [
    (b"XX" + b"\0" * 40, BadFrame), (struct.pack("!2sBIQIQ", b"MF", 1, 0, 0, 0, 2**63), BadFrame),
    (struct.pack("!2sBIQIQ", b"MF", 1, 0, 0, 2**31, 0), BadFrame), (b"MF", Closed),
    (struct.pack("!2sBIQIQ", b"MF", 1, 0, 0, 0, 100) + b"half", Closed),
])  # fmt: skip
def test_frames_that_are_none_end_the_connection(sent: bytes, kind: type[Exception]) -> None:
    ours, theirs = socket.socketpair()
    theirs.sendall(sent)
    theirs.close()
    with pytest.raises(kind):
        Connection(ours).receive()


def test_frames_of_all_sizes_arrive_whole() -> None:
    ours, theirs = (Connection(sock) for sock in socket.socketpair())
    for size in (0, 1, 100, 70_000):
        ours.send(Frame(1, 2, size, b"x" * size, [memoryview(bytearray(b"y" * size))], (1, 2)))
        found = theirs.receive()
        assert (found.kind, found.epoch, found.number, tuple(found.freed)) == (1, 2, size, (1, 2))
        assert found.payload == b"x" * size and bytes(found.buffers[0]) == b"y" * size
    ours.close()


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "", None, "no such host."])
def test_no_session_listens_everywhere(host: object) -> None:
    with pytest.raises(ArgumentError, match="the address of a session: found"):
        Listener(host, 0, TOKEN, lambda *_: None)  # type: ignore[arg-type]


@pytest.mark.parametrize("port", [99_999_999, -1, "80"])
def test_ports_that_are_none(port: object) -> None:
    with pytest.raises(ArgumentError, match="a session cannot listen there: found"):
        Listener("127.0.0.1", port, TOKEN, lambda *_: None)  # type: ignore[arg-type]


def test_short_tokens() -> None:
    with pytest.raises(ArgumentError, match="the token of a session is too short: found 3 characters"):
        handshake.token_of("abc")


def test_process_sessions_listen_on_loopback_alone(processes: di.Session) -> None:
    loopback = ("0100007F", "00000000000000000000000001000000", "0000000000000000FFFF00000100007F")
    found = processes.call(os.getpid)
    for pid in {found[worker] for worker in range(4)}:
        sockets = set()
        for fd in os.listdir(f"/proc/{pid}/fd"):
            with contextlib.suppress(OSError):
                sockets.add(os.readlink(f"/proc/{pid}/fd/{fd}"))
        for table in ("tcp", "tcp6"):
            with open(f"/proc/{pid}/net/{table}") as file:
                rows = [line.split() for line in file.readlines()[1:]]
            listening = [row[1] for row in rows if row[3] == "0A" and f"socket:[{row[9]}]" in sockets]
            assert all(address.partition(":")[0] in loopback for address in listening), listening
