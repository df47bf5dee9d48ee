"""A process that has loaded torch and makes workers by fork: many for the price of one start, and anew in no time.

The controller starts one for each host. It runs no code of the user's and no threads, so its forks are clean. The
kernel ends its workers with it (Linux), and it ends with its connection to the controller: so a controller that is
killed leaves no process behind, whatever its workers do.

Requests and notices are lines of JSON over a Unix socket; the worker's own connections are passed along.
"""

from __future__ import annotations

import array
import contextlib
import gc
import json
import os
import random
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from ..runtime.processes import die_with_parent
from ..runtime.spawn import startable
from . import worker_main
from .errors import SessionError
from .wire import Closed, Connection
from .worker_main import WorkerSpec

START_LIMIT = 180.0  # Seconds for torch to be loaded: several minutes' worth of load on a small machine.


class ForkServer:
    """The controller's side of a fork server."""

    def __init__(self) -> None:
        mine, its = socket.socketpair()
        code = (
            f"import sys; sys.path[:] = {sys.path!r}\n"
            f"from meshfuse.session.forkserver import main\nmain({its.fileno()})"
        )
        variables = dict(os.environ)
        variables.setdefault("OMP_NUM_THREADS", "1")
        variables.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
        with startable("the workers of a session"):
            self.process = subprocess.Popen(
                [sys.executable, "-c", code], pass_fds=(its.fileno(),), env=variables, stdin=subprocess.DEVNULL,
                start_new_session=True,
            )  # fmt: skip
        its.close()
        self._sock, self._text = mine, b""
        self._workers: dict[int, int] = {}  # by process number
        self._ended: dict[int, str] = {}

    def fork(self, spec: WorkerSpec, files: Sequence[int], variables: Mapping[str, str]) -> int:
        """Start a worker with its command and control connections, stdout and stderr; its process number."""
        request = {"spec": asdict(spec), "env": dict(variables), "cwd": os.getcwd(), "path": sys.path}
        self._sock.settimeout(START_LIMIT)
        data = json.dumps(request).encode() + b"\n"
        try:
            sent = socket.send_fds(self._sock, [data], list(files))
            self._sock.sendall(data[sent:])
            pid = self._await_pid()
        except (OSError, Closed) as error:
            raise SessionError(f"the workers of a session cannot be started: {error}") from None
        finally:
            self._sock.settimeout(None)
        self._workers[pid] = spec.worker
        return pid

    def _await_pid(self) -> int:
        while True:
            for notice in self._receive():
                if "pid" in notice:
                    return notice["pid"]

    def _receive(self) -> list[dict[str, Any]]:
        data = self._sock.recv(1 << 16)
        if not data:
            raise Closed(f"the fork server ended ({self.process.poll()})")
        *lines, self._text = (self._text + data).split(b"\n")
        notices = [json.loads(line) for line in lines]
        for notice in notices:
            if "ended" in notice:
                pid, status = notice["ended"]
                worker = self._workers.pop(pid, None)
                if worker is not None:
                    self._ended[worker] = _how(status)
        return notices

    def fileno(self) -> int:
        """The socket's number."""
        return self._sock.fileno()

    def read(self) -> None:
        """Read notices of ended workers. Raises Closed."""
        self._receive()

    def how_ended(self, worker: int) -> str | None:
        """How a worker's process ended, if that is known."""
        return self._ended.get(worker)

    def all_ended(self) -> dict[int, str]:
        """How the workers that have ended did so."""
        return dict(self._ended)

    def pids(self) -> dict[int, int]:
        """The numbers of the processes that run, by worker."""
        return {worker: pid for pid, worker in self._workers.items()}

    def kill(self) -> None:
        """End all workers at once, and wait until they have ended. Not while another thread reads."""
        self.signal_all()
        self.settle(10.0)
        self.forget()

    def signal_all(self) -> None:
        """End all workers at once; whoever reads will know."""
        for pid in list(self._workers):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def forget(self) -> None:
        """Forget workers that have ended."""
        self._ended.clear()

    def settle(self, seconds: float) -> bool:
        """Wait until no worker runs; whether that is so."""
        self._sock.settimeout(seconds)
        with contextlib.suppress(OSError, Closed):
            while self._workers:
                self._receive()
        self._sock.settimeout(None)
        return not self._workers

    def close(self) -> None:
        """End the fork server, and with it all workers that still run."""
        self._sock.close()
        try:
            self.process.wait(5.0)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


def _how(status: int) -> str:
    code = os.waitstatus_to_exitcode(status)
    if code >= 0:
        return f"its process exited with code {code}"
    with contextlib.suppress(ValueError):
        return f"its process was killed by {signal.Signals(-code).name}"
    return f"its process was killed by signal {-code}"


def main(fd: int) -> None:
    """The fork server itself: make workers until the controller closes the connection."""
    sock = socket.socket(fileno=fd)
    wake_read, wake_write = os.pipe()
    os.set_blocking(wake_write, False)
    signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # The controller ends it.
    assert threading.active_count() == 1, "a fork takes only one thread along"
    gc.collect()
    gc.freeze()
    text = b""
    files = array.array("i")
    while True:
        for ready, _ in _poll(sock, wake_read):
            if ready == wake_read:
                os.read(wake_read, 4096)
                _reap(sock)
                continue
            data, found, _, _ = socket.recv_fds(sock, 1 << 16, 8)
            if not data:
                os._exit(0)
            files.extend(found)
            *lines, text = (text + data).split(b"\n")
            for line in lines:
                _fork(sock, json.loads(line), [files.pop(0) for _ in range(4)], (wake_read, wake_write))


def _poll(*files: Any) -> list[tuple[int, int]]:
    poll = select.poll()
    for file in files:
        poll.register(file, select.POLLIN)
    return poll.poll()


def _reap(sock: socket.socket) -> None:
    with contextlib.suppress(ChildProcessError, OSError):
        while (found := os.waitpid(-1, os.WNOHANG))[0]:
            sock.sendall(json.dumps({"ended": found}).encode() + b"\n")


def _fork(sock: socket.socket, request: dict[str, Any], files: list[int], wake: Sequence[int]) -> None:
    parent = os.getpid()
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            die_with_parent(signal.SIGKILL)
            if os.getppid() == parent:
                sock.close()
                _become_worker(request, files, wake)
                code = 0
        finally:
            worker_main.flush()
            os._exit(code)
    for file in files:
        os.close(file)
    sock.sendall(json.dumps({"pid": pid}).encode() + b"\n")


def _become_worker(request: dict[str, Any], files: list[int], wake: Sequence[int]) -> None:
    commands, control, out, err = files
    signal.set_wakeup_fd(-1)
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGCHLD):
        signal.signal(number, signal.SIG_DFL)
    for source, target in ((out, 1), (err, 2)):
        os.dup2(source, target)
    for file in (out, err, *wake):
        os.close(file)
    os.environ.clear()
    os.environ.update(request["env"])
    sys.path[:] = request["path"]
    with contextlib.suppress(OSError):
        os.chdir(request["cwd"])
    random.seed()
    found = request["spec"]
    spec = WorkerSpec(**{**found, "store": tuple(found["store"]), "local": tuple(found["local"])})
    worker_main.serve(spec, Connection(socket.socket(fileno=commands)), Connection(socket.socket(fileno=control)))
