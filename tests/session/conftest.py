"""Sessions that are started once and used by all tests: threads, processes, and processes behind sockets."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from types import SimpleNamespace

import pytest

import meshfuse.session as di
from meshfuse.session import forkserver
from session import fork_servers

TOKEN = "a token of the tests"


@pytest.fixture(scope="session", autouse=True)
def forked_servers() -> Iterator[None]:
    """Sessions of this process have fork servers that are forked themselves."""
    starts = SimpleNamespace(
        Popen=fork_servers.Popen, DEVNULL=subprocess.DEVNULL, TimeoutExpired=subprocess.TimeoutExpired
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(forkserver, "subprocess", starts)
        yield


@pytest.fixture
def started_servers(monkeypatch: pytest.MonkeyPatch) -> None:
    """In this test they are started as in users' scripts."""
    monkeypatch.setattr(forkserver, "subprocess", subprocess)


def start_socket_session(per_node: int = 2, groups: int = 2) -> tuple[di.SocketSession, subprocess.Popen[bytes]]:
    """Two hosts of so many workers each, both on this machine."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "meshfuse.session.remote", "127.0.0.1", str(port), str(per_node)]
    # A host has a Python path of its own.
    path = os.pathsep.join([os.getcwd(), os.path.join(os.getcwd(), "tests")])
    remote = subprocess.Popen(command, env={**os.environ, "MESHFUSE_TOKEN": TOKEN, "PYTHONPATH": path})
    try:
        return di.SocketSession(2, per_node, groups, "127.0.0.1", port, token=TOKEN, timeout=30), remote
    except BaseException:
        remote.kill()
        raise


@pytest.fixture(scope="session")
def threaded() -> Iterator[di.Session]:
    """Four threads, in two groups."""
    with di.ThreadedSession(4, 2, timeout=30) as session:
        yield session


@pytest.fixture(scope="session")
def processes() -> Iterator[di.Session]:
    """Four workers, in two groups; three are processes."""
    with di.ProcessSession(4, 2, timeout=30) as session:
        yield session


@pytest.fixture(scope="session")
def sockets() -> Iterator[di.Session]:
    """Four workers on two hosts, each a group."""
    session, remote = start_socket_session()
    with session:
        yield session
    assert remote.wait(20) == 0


@pytest.fixture(params=["threaded", "processes", "sockets"])
def session(request: pytest.FixtureRequest) -> di.Session:
    """Each kind of session, of four workers in two groups."""
    return request.getfixturevalue(request.param)
