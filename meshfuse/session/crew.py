"""The workers of a session: started, watched and ended. Worker 0 is a thread of the controller's process."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta

import torch.distributed as dist

from ..runtime.environment import LOOPBACK
from ..runtime.world import World
from .errors import WorkerLost
from .executor import Executor
from .forkserver import START_LIMIT, ForkServer
from .links import Link, SocketLink, ThreadLink, place_of
from .nodes import Nodes
from .output import OutputCollector
from .supervisor import Notices, Supervisor
from .wire import Connection
from .worker_main import WorkerSpec, place_in
from .world import SessionWorld

_GRACE = 2.0  # Seconds that workers have to end by themselves.


@dataclass(slots=True, eq=False)
class Crew:
    """Started workers, and what belongs to them."""

    links: list[Link]
    supervisor: Supervisor
    notices: list[Notices] = field(default_factory=list)
    closers: list[Callable[[], None]] = field(default_factory=list)
    is_closed: bool = False

    def close(self, in_order: bool = True) -> None:
        """End all workers: after the commands that they have (for at most two seconds), or at once."""
        if self.is_closed:
            return
        self.is_closed = True
        self.supervisor.closing = True
        if not in_order or self.supervisor.lost or self.supervisor.first:
            self.supervisor.release(1 << 31, 0, "the session ends")
        for link in self.links:
            link.stop()
        self._join()
        self.supervisor.close()
        for link in self.links:
            if isinstance(link, SocketLink):
                link.close()
        for close in reversed(self.closers):
            close()

    def _join(self) -> None:
        until = time.monotonic() + _GRACE
        for notice in self.notices:
            if isinstance(notice, ForkServer) and not self.supervisor.lost:
                notice.settle(max(0.0, until - time.monotonic()))
        for link in self.links:
            if isinstance(link, ThreadLink) and link.thread is not threading.current_thread():
                link.thread.join(max(0.0, until - time.monotonic()))
                if link.thread.is_alive():  # It may wait for others in a collective.
                    link.release(1 << 31, 0, "the session ends")
                    link.thread.join(_GRACE)


def threads(size: int, groups: int, limit: float) -> Crew:
    """Workers that are threads of this process; they meet in a store of its memory."""
    store, supervisor = dist.HashStore(), Supervisor()
    specs = [WorkerSpec(worker, size, groups, limit, ("", 0), "", (worker, size)) for worker in range(size)]
    links = [ThreadLink(_local(spec, store, supervisor)) for spec in specs]
    crew = Crew(list(links), supervisor)
    supervisor.watch(links)
    return crew


def _local(spec: WorkerSpec, store: dist.Store, supervisor: Supervisor) -> Executor:
    """A worker in this process."""
    thread: list[threading.Thread] = []

    def doing() -> str:
        return place_of(thread[0] if thread else None, executor)

    def make(executor: Executor, epoch: int) -> World:
        thread[:] = [threading.current_thread()]
        if spec.size == 1:
            return World(place_in(spec), spec.limit)
        named = dist.PrefixStore(f"session/{epoch}", store)
        return SessionWorld(place_in(spec), spec.limit, named, executor.why_released, doing)

    def told(epoch: int, number: int) -> None:
        supervisor.failed(spec.worker, epoch, number)

    executor = Executor(spec.worker, spec.size, spec.groups, make, told)
    return executor


class LocalEngine:
    """Starts the process workers of one host by a fork server, and keeps that for restarts."""

    def __init__(self) -> None:
        self.server = ForkServer()

    def start(
        self, specs: Sequence[WorkerSpec], output: OutputCollector
    ) -> list[SocketLink]:  # fmt: skip
        """Start these workers, whose links are of socket pairs: nobody else can connect."""
        links = []
        for spec in specs:
            pairs = [socket.socketpair() for _ in range(2)]
            pipes = [output.pipe(spec.worker, is_error) for is_error in (False, True)]
            try:
                self.server.fork(spec, [*(its.fileno() for _, its in pairs), *pipes], os.environ)
            finally:
                for file in pipes:
                    os.close(file)
                for _, its in pairs:
                    its.close()
            (commands, _), (control, _) = pairs
            links.append(SocketLink(spec.worker, Connection(commands), Connection(control)))
        return links


def make_store(host: str = LOOPBACK) -> tuple[dist.Store, tuple[str, int]]:
    """A store at a free port of one address of this machine, and where it is."""
    listener = socket.create_server((host, 0), backlog=512)
    port = listener.getsockname()[1]
    store = dist.TCPStore(
        host, port, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=START_LIMIT),
        master_listen_fd=listener.detach(),
    )  # fmt: skip
    return store, (host, port)


def processes(engine: LocalEngine, size: int, groups: int, limit: float) -> Crew:
    """Worker 0 as a thread, and the others as processes of this machine."""
    store, address = make_store()
    supervisor, output = Supervisor(), OutputCollector()
    specs = [WorkerSpec(worker, size, groups, limit, address, "", (worker, size)) for worker in range(size)]
    crew = Crew([], supervisor, [engine.server], [output.close])
    try:
        remote = engine.start(specs[1:], output)
        crew.links = [ThreadLink(_local(specs[0], store, supervisor)), *remote]
        await_ready(remote)
    except BaseException:
        crew.close(in_order=False)
        engine.server.kill()
        raise
    crew.closers.append(engine.server.kill)
    supervisor.watch(crew.links, [engine.server])
    return crew


def sockets(engine: LocalEngine | None, nodes: Nodes, groups: int, limit: float) -> Crew:
    """Worker 0 as a thread, others of its host by a fork server, and those of other hosts by their nodes."""
    store, address = make_store(nodes.host)
    supervisor, output = Supervisor(), OutputCollector()
    per_node, size = nodes.per_node, nodes.per_node * (len(nodes.nodes) + 1)
    own = [
        WorkerSpec(worker, size, groups, limit, address, nodes.host, (worker, per_node)) for worker in range(per_node)
    ]
    crew = Crew([], supervisor, [*([engine.server] if engine else []), *nodes.nodes], [output.close])
    try:
        remote = engine.start(own[1:], output) if engine else []
        remote += nodes.start(WorkerSpec(0, size, groups, limit, address, "", (0, per_node)))
        crew.links = [ThreadLink(_local(own[0], store, supervisor)), *remote]
        await_ready(remote)
    except BaseException:
        crew.close(in_order=False)
        raise
    if engine is not None:
        crew.closers.append(engine.server.kill)
    supervisor.watch(crew.links, crew.notices)
    return crew


def await_ready(links: Sequence[SocketLink]) -> None:
    """Wait until these workers have started. Raises WorkerLost."""
    deadline = time.monotonic() + START_LIMIT
    for link in links:
        try:
            link.answer(0, deadline)
        except (ConnectionError, TimeoutError) as error:
            lost = WorkerLost(f"worker {link.worker} did not start: {error}")
            lost.worker, lost.how = link.worker, str(error)
            raise lost from None
