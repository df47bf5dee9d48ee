"""A host's part of a session of several: it starts workers when the controller says so, and ends with it."""

from __future__ import annotations

import os
import threading
import time

from ..runtime.output import say
from .errors import ConnectionRefused, SessionError
from .forkserver import ForkServer
from .handshake import TOKEN
from .listener import connect
from .nodes import COMMANDS, CONTROL, ENDED, NODE, OUTPUT, START, Greeting, version
from .output import OutputCollector
from .pickling import loads
from .wire import Closed, Connection, Frame
from .worker_main import WorkerSpec

_RETRY = 0.25


def run(host: str, port: int, workers: int, limit: float, token: str | None = None) -> int:
    """Serve a controller until it ends; the exit code. token: None for that of MESHFUSE_TOKEN."""
    token = token or os.environ.get(TOKEN)
    if not token:
        say(f"{TOKEN} is not set: export the token that the session's controller has")
        return 2
    try:
        node = _Node((host, port), token, _reach((host, port), token, workers, limit))
    except (OSError, SessionError) as error:
        say(f"no session at {host}:{port}: {error}")
        return 1
    try:
        node.serve()
    finally:
        node.close()
    return 0


def _reach(address: tuple[str, int], token: str, workers: int, limit: float) -> Connection:
    """Connect to the controller, which may not listen yet."""
    until = time.monotonic() + limit
    while True:
        try:
            return connect(address, token, Greeting(NODE, workers, version()), limit)
        except ConnectionRefused:
            raise
        except OSError:
            if time.monotonic() > until:
                raise
            time.sleep(_RETRY)


class _Node:
    """This host's workers."""

    def __init__(self, address: tuple[str, int], token: str, connection: Connection):
        self._address, self._token, self._connection = address, token, connection
        self._server = ForkServer()
        self._output = OutputCollector(self._print)
        self._watching: threading.Thread | None = None
        self._is_ending = False

    def serve(self) -> None:
        """Start workers whenever the controller says so, until its connection ends."""
        try:
            while (frame := self._connection.receive()).kind == START:
                self._end_all()
                for spec in loads(frame.payload):
                    self._start(spec)
                self._watching = threading.Thread(target=self._watch, daemon=True)
                self._watching.start()
        except Closed:
            pass

    def _end_all(self) -> None:
        """End the workers. The thread that watches them reads alone: of two readers one could wait for ever."""
        self._is_ending = True
        self._server.signal_all()
        if self._watching is not None:
            self._watching.join()
        self._server.forget()
        self._is_ending = False

    def _start(self, spec: WorkerSpec) -> None:
        greetings = [Greeting(role, spec.worker, version()) for role in (COMMANDS, CONTROL)]
        connections = [connect(self._address, self._token, greeting, 30.0) for greeting in greetings]
        pipes = [self._output.pipe(spec.worker, is_error) for is_error in (False, True)]
        self._server.fork(spec, [*(c.fileno() for c in connections), *pipes], os.environ)
        for file in pipes:
            os.close(file)
        for connection in connections:
            connection.sock.close()  # The worker has it.

    def _watch(self) -> None:
        """Tell the controller how workers end, until none is left."""
        told: set[int] = set()
        while True:
            for worker, how in self._server.all_ended().items():
                if worker not in told and not self._is_ending:
                    told.add(worker)
                    self._send(Frame(ENDED, 0, worker, how.encode()))
            if not self._server.pids():
                return
            try:
                self._server.read()
            except (Closed, OSError):
                return

    def _print(self, is_error: bool, text: str) -> None:
        self._send(Frame(OUTPUT, 0, int(is_error), text.encode()))

    def _send(self, frame: Frame) -> None:
        try:
            self._connection.send(frame)
        except Closed:
            return

    def close(self) -> None:
        """End the workers."""
        self._server.close()
        self._output.close()
        self._connection.close()
