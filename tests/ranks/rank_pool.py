"""Real ranks for tests: processes started once and reused, killed when they hang."""

from __future__ import annotations

import contextlib
import functools
import os
import pickle
import secrets
import socket
import tempfile
import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import forked

HERE = Path(__file__).resolve().parent
SOURCE = HERE.parents[1]

# Line 11 of a script that starts so makes y, which is what the ranks reduce: one call, as starts are what costs.
# What follows begins at line 17.
START = """
import os, signal, threading, time
import torch
import meshfuse as mf
world = mf.World.current()
mesh = mf.DeviceMesh(range(world.size), ["tp"], links="laptop")
with mf.FusionDefinition() as fd:
    x = fd.define_tensor([-1, 6])
    w = fd.define_tensor([2, 6])
    h = fd.ops.relu(x)
    y = fd.ops.linear(h, w)
    fd.add_output(y)
    fd.mesh_split(x, mesh, [None, "tp"])
    fd.mesh_split(w, mesh, [None, "tp"]), fd.mesh_split(y, mesh, [None, None])
shards = [mf.shard_tensor(torch.ones(rows, 6), tv) for rows, tv in ((40, x), (2, w))]
fd.execute(shards)
"""


def base_environment(**changes: str) -> dict[str, str]:
    """This process's variables, without those of any launcher, and with meshfuse importable."""
    prefixes = (
        "RANK",
        "LOCAL_",
        "WORLD_",
        "MASTER_",
        "TORCHELASTIC",
        "OMPI_",
        "PMIX_",
        "SLURM_",
        "MESHFUSE_",
        "GROUP_",
    )
    kept = {name: value for name, value in os.environ.items() if not name.startswith(prefixes)}
    path = os.pathsep.join(filter(None, [str(SOURCE), kept.get("PYTHONPATH", "")]))
    ours = {"MESHFUSE_CACHE": _cache().name, "MESHFUSE_LINKS": "bytes"}
    return kept | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"} | ours | changes


@functools.cache
def _cache() -> tempfile.TemporaryDirectory[str]:
    """A folder of plans for the ranks of these tests, as users have one: of a job's ranks, one plans."""
    return tempfile.TemporaryDirectory(prefix="meshfuse-cache-")


def free_port() -> str:
    """A port of this machine on which nothing listens now, out of the range of which the kernel gives ports to whoever
    asks for none: a connection of another test's would take it before the job listens.
    """
    while True:
        port = 10_000 + secrets.randbelow(10_000)
        with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return str(port)


def alive(pid: int) -> bool:
    """Whether the process runs or is stopped; a zombie does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] not in "ZX"
    except OSError:
        return False


def wait_until(condition: Callable[[], object], limit: float = 30) -> bool:
    """Whether the condition holds, now or within this many seconds."""
    until = time.monotonic() + limit
    while time.monotonic() < until:
        if condition():
            return True
        time.sleep(0.05)
    return bool(condition())


def run_bare(
    script: str, folder: Path, size: int = 3, limit: float = 30, stopped: int | None = None
) -> list[tuple[int | None, str]]:
    """Exit code and output of each rank, started by RANK and WORLD_SIZE alone: nobody else ends them.

    Only a rank that stops itself (`stopped`) is killed, once the others have ended. A rank that is still
    there after 40 s is killed too, and says HUNG.
    """
    path = folder / "script.py"
    path.write_text(script)
    common = base_environment(
        WORLD_SIZE=str(size), MASTER_ADDR="127.0.0.1", MASTER_PORT=free_port(), MESHFUSE_TIMEOUT=str(limit),
        TORCH_CPP_LOG_LEVEL="ERROR",
    )  # fmt: skip
    logs = [folder / f"rank{rank}.log" for rank in range(size)]
    ranks = [forked.start(path, common | {"RANK": str(rank)}, log) for rank, log in enumerate(logs)]
    hung = _end(ranks, stopped)
    outputs = ["HUNG" if rank in hung else log.read_text() for rank, log in enumerate(logs)]
    return [(ranks[rank].exitcode, outputs[rank]) for rank in range(size)]


def _end(ranks: Sequence[BaseProcess], stopped: int | None) -> list[int]:
    """Wait for all ranks but `stopped`, then kill what is left; returns those that had not ended."""
    deadline = time.monotonic() + 40
    for rank, process in enumerate(ranks):
        if rank != stopped:
            process.join(max(deadline - time.monotonic(), 0.1))
    hung = [rank for rank, process in enumerate(ranks) if rank != stopped and process.exitcode is None]
    for process in ranks:
        process.kill()
        process.join()
    return hung


class RankFailed(AssertionError):
    """A rank of the pool raised, died or hung; the text has what every rank says."""


class RankPool:
    """`size` processes that are ranks of one World. `run` is SPMD: every rank runs the same function."""

    def __init__(self, size: int, timeout: float = 40.0):
        self.size, self.timeout = size, timeout
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._processes: list[BaseProcess] = []
        self._pipes: list[Connection] = []

    def run(self, target: Callable[..., Any] | str, *args: Any, timeout: float | None = None) -> list[Any]:
        """The results of `target(*args)` on every rank. A function (of an importable file), `module:name` or
        source text that defines `main`. Arguments and results are pickled. After a failure the ranks are
        started anew.
        """
        self._ensure_started()
        message = pickle.dumps((_name(target), args))
        for pipe in self._pipes:
            pipe.send_bytes(message)
        replies = self._collect(timeout or self.timeout + 30)
        if all(worked for worked, _ in replies):
            return [result for _, result in replies]
        parts = [f"--- rank {rank}\n{text}\n{self._log(rank)}" for rank, (ok, text) in enumerate(replies) if not ok]
        self.close()
        raise RankFailed("\n".join(["ranks failed:", *parts]))

    def _log(self, rank: int) -> str:
        """The end of what a rank has printed."""
        return (self.logs / f"rank{rank}.log").read_text(errors="replace")[-2000:]

    @property
    def logs(self) -> Path:
        """What the ranks print; there while they run."""
        assert self._folder is not None
        return Path(self._folder.name)

    def _collect(self, limit: float) -> list[tuple[bool, Any]]:
        deadline = time.monotonic() + limit
        replies: list[tuple[bool, Any]] = [(False, "did not answer: hung and was killed")] * self.size
        pending = dict(enumerate(self._pipes))
        while pending and (left := deadline - time.monotonic()) > 0:
            ready = wait(list(pending.values()), left)
            for rank in [rank for rank, pipe in pending.items() if pipe in ready]:
                replies[rank] = self._receive(rank, pending.pop(rank))
        return replies

    def _receive(self, rank: int, pipe: Connection) -> tuple[bool, Any]:
        try:
            return pickle.loads(pipe.recv_bytes())
        except (EOFError, ConnectionError):
            return False, "died"

    def _ensure_started(self) -> None:
        if self._processes:
            return
        self._folder = tempfile.TemporaryDirectory(prefix="meshfuse-ranks-")
        with socket.create_server(("127.0.0.1", 0), backlog=64) as listener:
            for rank in range(self.size):
                self._start(rank, listener)

    def _start(self, rank: int, listener: socket.socket) -> None:
        ours, theirs = socket.socketpair()
        variables = base_environment(
            RANK=str(rank), WORLD_SIZE=str(self.size), LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=str(self.size),
            MESHFUSE_STORE_PORT=str(listener.getsockname()[1]), MESHFUSE_TIMEOUT=str(self.timeout),
        )  # fmt: skip
        sockets = {"RANK_PIPE": theirs} | ({"MESHFUSE_STORE_FD": listener} if rank == 0 else {})
        process = forked.start(HERE / "rank_worker.py", variables, self.logs / f"rank{rank}.log", sockets)
        theirs.close()
        self._processes.append(process)
        self._pipes.append(Connection(ours.detach()))

    def close(self) -> None:
        """Kill the ranks; the next `run` starts new ones."""
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join()
        for pipe in self._pipes:
            pipe.close()
        self._processes, self._pipes = [], []
        if self._folder is not None:
            self._folder.cleanup()
            self._folder = None


def _name(target: Callable[..., Any] | str) -> str:
    if isinstance(target, str):
        return target
    return f"{Path(target.__code__.co_filename).resolve()}:{target.__qualname__}"
