"""What `repeat_faults.py` does to sessions, each as often as it is asked: the controller's side, a process of its own.

`python fault_turns.py KIND FAULT REPEAT` prints, as JSON, the seconds of each turn from the fault to its error.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace

sys.path.insert(0, str(Path(__file__).parents[1] / "ranks"))

import forked
import torch

import meshfuse.session as di
from meshfuse.session import autograd, forkserver, rpc
from meshfuse.session.listener import connect
from meshfuse.session.nodes import Greeting, version

TOKEN = "a token of the tests"
WORKERS = 4


SERVER = """
import sys
from meshfuse.session.forkserver import main
main(int(sys.argv[1]))
"""


def fork_the_servers() -> None:
    """Have fork servers forked off this process, which has loaded torch."""

    def start(words: Sequence[str], *, pass_fds: Sequence[int], env: Mapping[str, str], **_: object) -> object:
        path = Path("server.py")
        path.write_text(SERVER)
        return forked._Forked([words[0], str(path), str(pass_fds[0])], pass_fds=pass_fds, env=env)

    forkserver.subprocess = SimpleNamespace(  # type: ignore[attr-defined]
        Popen=start, DEVNULL=subprocess.DEVNULL, TimeoutExpired=subprocess.TimeoutExpired
    )


@contextlib.contextmanager
def session_of(kind: str, timeout: float) -> Iterator[di.Session]:
    """Four workers: threads, processes, or processes of two hosts."""
    fork_the_servers()
    if kind == "threads":
        with di.ThreadedSession(WORKERS, timeout=timeout) as session:
            yield session
    elif kind == "processes":
        with di.ProcessSession(WORKERS, timeout=timeout) as session:
            yield session
    else:
        with socket.create_server(("127.0.0.1", 0)) as probe:
            port = probe.getsockname()[1]
        env = {**os.environ, "MESHFUSE_TOKEN": TOKEN}
        remote = forked._Forked([sys.executable, str(Path(__file__).parent / "fault_host.py"), str(port), "2"], env=env)
        with di.SocketSession(2, 2, 1, "127.0.0.1", port, token=TOKEN, timeout=timeout) as session:
            yield session
        assert remote.wait(20) == 0, f"the other host ended with {remote.returncode}"


def check(session: di.Session) -> None:
    """The session works: calls on all, and a collective of all."""
    assert torch.equal(session.allreduce(session.call(torch.ones, 4))[WORKERS - 1], torch.full((4,), 4.0))


def expect(cls: type[BaseException], words: str, action: Callable[[], object]) -> float:
    """Seconds until an action raises this."""
    start = time.monotonic()
    try:
        action()
    except cls as error:
        assert words in str(error), f"not said: {words!r}, but {error}"
        return time.monotonic() - start
    raise AssertionError(f"no {cls.__name__}")


def raise_on_2() -> None:
    if di.worker_id() == 2:
        raise KeyError("told")


def exception(session: di.Session) -> float:
    session.call(raise_on_2)
    seconds = expect(KeyError, "worker 2 raised KeyError", session.sync)
    check(session)
    return seconds


def _pid(session: di.Session, worker: int) -> int:
    return session.call(os.getpid)[worker]


def killed(session: di.Session) -> float:
    victim = _pid(session, 2)
    session.call(time.sleep, 0.6)
    os.kill(victim, signal.SIGKILL)
    seconds = expect(di.WorkerLost, "worker 2 is gone: its process was killed by SIGKILL", session.sync)
    session.restart()
    check(session)
    return seconds


def killed_in_a_collective(session: di.Session) -> float:
    victim, x = _pid(session, 3), session.call(torch.ones, 1000)
    session.sync()
    os.kill(victim, signal.SIGKILL)

    def call() -> None:
        session.allreduce(x)
        session.sync()

    seconds = expect(di.WorkerLost, "worker 3 is gone", call)
    session.restart()
    check(session)
    return seconds


def stopped(session: di.Session) -> float:
    victim, x = _pid(session, 3), session.call(torch.ones, 4)
    os.kill(victim, signal.SIGSTOP)
    try:
        session.allreduce(x)
        return expect(di.WorkerTimeout, "worker 3 does not answer at all", session.sync)
    finally:
        os.kill(victim, signal.SIGCONT)
        check(session)


def interrupted(session: di.Session) -> float:
    signal.signal(signal.SIGALRM, lambda *_: signal.raise_signal(signal.SIGINT))

    def wait() -> None:
        for _ in range(1000):
            time.sleep(0.01)

    session.call(wait)
    start = time.monotonic()
    signal.setitimer(signal.ITIMER_REAL, 0.1)
    try:
        session.sync()
    except KeyboardInterrupt:
        seconds = time.monotonic() - start - 0.1
        check(session)
        return seconds
    raise AssertionError("no KeyboardInterrupt")


def _address(session: di.Session) -> tuple[str, int]:
    """Where it listens: the session itself, or else its part in `rpc`."""
    nodes = getattr(session, "_nodes", None)
    if nodes is not None:
        return nodes.host, nodes.port
    from meshfuse.session.rpc.calls import calls

    listener = calls().agent._listener
    return listener.host, listener.port


def wrong_token(session: di.Session) -> float:
    where = _address(session)
    seconds = expect(
        di.ConnectionRefused, "", lambda: connect(where, "another token", Greeting("node", 2, version()), 5)
    )
    check(session)
    return seconds


def half_a_frame(session: di.Session) -> float:
    """Of one who knows the token, and of one who does not; they hang up later."""
    token = TOKEN if hasattr(session, "_nodes") else None
    stranger = socket.create_connection(_address(session), timeout=5)
    stranger.sendall(b"MF")
    if token is not None:
        friend = connect(_address(session), token, Greeting("node", 2, version()), 5)
        friend.sock.sendall(struct.pack("!2sBIQIQ", b"MF", 1, 0, 0, 0, 100) + b"half")
        check(session)
        friend.close()
    start = time.monotonic()
    check(session)
    stranger.close()
    return time.monotonic() - start


def port_scanner(session: di.Session) -> float:
    start = time.monotonic()
    huge = struct.pack("!2sBIQIQ", b"MF", 40, 0, 0, 0, 2**63)
    for sent in (b"", b"GET / HTTP/1.1\r\n\r\n", huge, os.urandom(64), b"MF"):
        with socket.create_connection(_address(session), timeout=5) as stranger, contextlib.suppress(OSError):
            stranger.sendall(sent)
            stranger.shutdown(socket.SHUT_WR)
            while stranger.recv(4096):
                pass
    check(session)
    return time.monotonic() - start


def live_references(kind: str) -> float:
    """Ends a session while DRefs, references of `rpc` and an autograd context live on, in a cycle."""
    held: list[object] = []
    with session_of(kind, 20) as session:
        held.append([session.call(torch.ones, 100) for _ in range(50)])
        held.append(session.distribute_tensor if kind == "threads" else session.allreduce(session.call(torch.ones, 9)))
        if kind != "threads":
            session.init_rpc(timeout=20)
            held.append([rpc.remote(to, torch.ones, (100,)) for to in range(1, WORKERS) for _ in range(5)])
            context = autograd.context()
            context.__enter__()
            held.append(rpc.rpc_sync(1, torch.mul, (torch.ones(3, requires_grad=True), 2.0)))
        held.append(held)
        session.sync()
        start = time.monotonic()
    return time.monotonic() - start


TURNS = {
    "exception": exception, "killed": killed, "killed-in-a-collective": killed_in_a_collective, "stopped": stopped,
    "interrupted": interrupted, "wrong-token": wrong_token, "half-a-frame": half_a_frame, "port-scanner": port_scanner,
}  # fmt: skip


def dead_controller(kind: str) -> None:
    """Say who the workers are, and wait to be killed: they run, wait for a peer, and for calls."""
    with session_of(kind, 60) as session:
        found = session.call(os.getpid)
        print(json.dumps([found[worker] for worker in range(WORKERS)]), flush=True)
        session.call(time.sleep, 100)
        session.sync()


def main(kind: str, fault: str, repeat: int) -> None:
    if fault == "dead-controller":
        dead_controller(kind)
    elif fault == "live-references":
        print(json.dumps([live_references(kind) for _ in range(repeat)]), flush=True)
    else:
        with session_of(kind, 2 if fault == "stopped" else 20) as session:
            if kind == "processes" and fault in ("wrong-token", "half-a-frame", "port-scanner"):
                session.init_rpc(timeout=20)  # It listens, as a session of processes does not.
            check(session)
            print(json.dumps([TURNS[fault](session) for _ in range(repeat)]), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
