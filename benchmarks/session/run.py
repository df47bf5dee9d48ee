"""Times of a session and of `rpc`, beside a bare channel and torch's RPC in the same run; medians, in microseconds.

    python benchmarks/session/run.py [--count N]

The bare channel is what Python itself takes: three processes behind socket pairs that send 28 bytes back, and threads
behind queues: one beside the processes, or four alone. Issues are beside its sends. A decode step through a session is
beside the same one under `meshfuse run`. Each measurement is repeated in turn with its rival's, so that other load
falls on both.
"""

from __future__ import annotations

import argparse
import json
import os
import queue
import socket
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import decode
import torch

import meshfuse.session as di
from meshfuse.session import autograd, rpc

MEGABYTES = 64


def median(action: Callable[[], object], count: int) -> float:
    """The median time of an action, in microseconds."""
    times = []
    for _ in range(count):
        start = time.perf_counter()
        action()
        times.append((time.perf_counter() - start) * 1e6)
    return sorted(times)[count // 2]


class BareThread:
    """A thread that gives back what it gets."""

    def __init__(self) -> None:
        self._requests: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        self._answers: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        threading.Thread(target=self._echo, daemon=True).start()

    def _echo(self) -> None:
        while True:
            self._answers.put(self._requests.get())

    def send(self) -> None:
        self._requests.put(b"")

    def receive(self) -> None:
        self._answers.get()


class BareProcess:
    """A forked process that gives back 28 bytes of what it gets."""

    def __init__(self) -> None:
        self._socket, its = socket.socketpair()
        if os.fork() == 0:
            self._socket.close()
            while data := its.recv(4096):
                its.send(data[:28])
            os._exit(0)
        its.close()

    def send(self) -> None:
        self._socket.send(b"x" * 100)

    def receive(self) -> None:
        self._socket.recv(4096)


class BareChannel:
    """Three processes and a thread, or four threads. Threads are sent to last, as a session does."""

    def __init__(self) -> None:
        self._processes = [*[BareProcess() for _ in range(3)], BareThread()]
        self._threads = [BareThread() for _ in range(4)]

    def round_trip(self) -> None:
        """To three processes and a thread, and back."""
        self.send()
        self.receive()

    def send(self) -> None:
        for peer in self._processes:
            peer.send()

    def receive(self) -> None:
        for peer in self._processes:
            peer.receive()

    def round_trip_of_threads(self) -> None:
        """To four threads and back; the one that is sent to last is waited for first."""
        for peer in self._threads:
            peer.send()
        for peer in reversed(self._threads):
            peer.receive()


def session_times(channel: BareChannel, count: int) -> tuple[dict[str, float], dict[str, float]]:
    """Call and sync, issue, copies; and the same of a bare channel, which has no copies."""
    found: dict[str, list[float]] = {}
    bare: dict[str, list[float]] = {}
    with di.ThreadedSession(4) as threads, di.ProcessSession(4) as processes:
        kinds: tuple[di.Session, ...] = (threads, processes)
        functions: dict[di.Session, di.DRef] = {session: session.call(lambda: int) for session in kinds}

        def call_and_sync(session: di.Session) -> None:
            functions[session](1)
            session.sync()

        measured: dict[str, tuple[Callable[[], float], Callable[[], float]]] = {
            "call + sync, 4 threads": (
                lambda: median(lambda: call_and_sync(threads), count),
                lambda: median(channel.round_trip_of_threads, count)),
            "call + sync, 4 processes": (
                lambda: median(lambda: call_and_sync(processes), count), lambda: median(channel.round_trip, count)),
            "issue, 4 processes": (
                lambda: _issue(lambda: functions[processes](1), processes.sync, count),
                lambda: _issue(channel.send, channel.receive, count)),
        }  # fmt: skip
        for _ in range(5):
            for name, (ours, its) in measured.items():
                found.setdefault(name, []).append(ours())
                bare.setdefault(name, []).append(its())
        found["64 MB to a process, GiB/s"] = _copies(processes)
    return _medians(found), _medians(bare)


def _medians(found: dict[str, list[float]]) -> dict[str, float]:
    return {name: statistics.median(values) for name, values in found.items()}


def _issue(issue: Callable[[], object], wait: Callable[[], object], count: int) -> float:
    """One call at a time, of idle workers; the wait is not counted."""
    times = []
    for _ in range(count):
        start = time.perf_counter()
        issue()
        times.append((time.perf_counter() - start) * 1e6)
        wait()
    return sorted(times)[count // 2]


def _copies(session: di.Session) -> list[float]:
    """The rates of copies into a tensor that is there; the first ones, which touch its memory, are left out."""
    tensor, target = torch.ones(MEGABYTES << 18), session.empty((MEGABYTES << 18,))
    session.sync()
    rates = []
    for _ in range(8):
        start = time.perf_counter()
        target.debug_copy_from(1, tensor)
        session.sync()
        rates.append(MEGABYTES / 1024 / (time.perf_counter() - start))
    return rates[3:]


def add(a: int, b: int) -> int:
    """What remote calls do."""
    return a + b


def layer(x: torch.Tensor) -> torch.Tensor:
    """One worker's part of the forward pass."""
    return torch.tanh(x @ torch.eye(3))


def chain(modules: str, x: torch.Tensor) -> torch.Tensor:
    """Worker 1's part, and through it those of workers 2 and 3."""
    calls = _modules(modules)[0]
    y = layer(x)
    return calls.rpc_sync("worker2", layer, (y,)) + calls.rpc_sync("worker3", layer, (y,))


def _modules(name: str) -> tuple:
    if name == "meshfuse":
        return rpc, autograd
    import torch.distributed.autograd as torch_autograd
    import torch.distributed.rpc as torch_rpc

    return torch_rpc, torch_autograd


def peer(name: str, count: int) -> None:
    """One of four ranks of `rpc`; rank 0 measures and prints."""
    calls, gradients = _modules(name)
    rank = int(os.environ["RANK"])
    calls.init_rpc(f"worker{rank}", rank=rank, world_size=4)
    if rank == 0:
        x = torch.randn(4, 3, requires_grad=True)

        def step() -> None:
            with gradients.context() as context:
                loss = calls.rpc_sync("worker1", chain, (name, x)).sum()
                gradients.backward(context, [loss])

        large = torch.ones(MEGABYTES << 18)
        for _ in range(3):
            calls.rpc_sync("worker1", torch.numel, (large,))
        copy = median(lambda: calls.rpc_sync("worker1", torch.numel, (large,)), 5)
        print(json.dumps({
            "rpc_sync": median(lambda: calls.rpc_sync("worker1", add, (1, 2)), count),
            "remote + to_here": median(lambda: calls.remote("worker1", add, (1, 2)).to_here(), count),
            "forward + backward through 3": median(step, max(count // 10, 20)),
            "64 MB to a process, GiB/s": MEGABYTES / 1024 / copy * 1e6,
        }), flush=True)  # fmt: skip
    calls.shutdown()


def rpc_times(name: str, count: int) -> dict[str, float]:
    """The times of four ranks."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    base = {**os.environ, "WORLD_SIZE": "4", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    path = os.pathsep.join([str(Path(__file__).resolve().parents[2]), base.get("PYTHONPATH", "")])
    command = [sys.executable, __file__, "--peer", name, "--count", str(count)]
    ranks = [
        subprocess.Popen(command, env={**base, "RANK": str(rank), "PYTHONPATH": path}, stdout=subprocess.PIPE,
                         stderr=subprocess.DEVNULL, text=True)
        for rank in range(4)
    ]  # fmt: skip
    outputs = [rank.communicate()[0] for rank in ranks]
    return json.loads(outputs[0].splitlines()[-1])


BARS = {
    "call + sync, 4 threads": 50.0, "call + sync, 4 processes": 120.0, "issue, 4 processes": 25.0,
    "64 MB to a process, GiB/s": 2.0, "rpc_sync": 0.7, "forward + backward through 3": 0.7,
    "GPT decode step, 2 ranks": 1.03,
}  # fmt: skip


def row(name: str, ours: float, rival: float, of: str) -> dict[str, object]:
    """One line of results: in microseconds, or GiB/s by the name; `bar` is of `ours`, or of `ratio` beside torch."""
    bar = None if of == "torch" and "GiB" in name else BARS.get(name)
    return {"name": name, "ours": round(ours, 2), "rival": round(rival, 2), "rival_name": of,
            "ratio": round(ours / rival, 3), "bar": bar}  # fmt: skip


def show(results: list[dict[str, object]]) -> None:
    """Print them as a table."""
    print(f"{'':34} {'meshfuse':>9} {'rival':>9} {'ratio':>6} {'bar':>6}")
    for r in results:
        bar = "" if r["bar"] is None else r["bar"]
        print(f"{r['name']:34} {r['ours']:9.1f} {r['rival']:9.1f} {r['ratio']:6.2f} {bar:>6} {r['rival_name']}")


def medians(runs: list[dict[str, float]]) -> dict[str, float]:
    """By name the median of several runs."""
    return {name: statistics.median(run[name] for run in runs) for name in runs[0]}


def measured(count: int, rounds: int) -> list[dict[str, object]]:
    """All results. Runs of `rpc` and of torch's take turns."""
    session, bare = session_times(BareChannel(), count)
    copied = session["64 MB to a process, GiB/s"]
    results = [row(name, session[name], bare[name], "a bare channel") for name in bare]
    pairs = [(rpc_times("meshfuse", count), rpc_times("torch", count)) for _ in range(rounds)]
    ours, theirs = (medians([pair[side] for pair in pairs]) for side in (0, 1))
    results.append(row("64 MB to a process, GiB/s", copied, theirs["64 MB to a process, GiB/s"], "torch's rpc"))
    results += [row(name, value, theirs[name], "torch") for name, value in ours.items()]
    steps = [{kind: decode.measured(kind, min(count, 100)) for kind in ("session", "ranks")} for _ in range(rounds)]
    step = medians(steps)
    return [*results, row("GPT decode step, 2 ranks", step["session"], step["ranks"], "meshfuse run")]


def main() -> None:
    """Measure, write results.json and print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=500, help="actions of each measurement")
    parser.add_argument("--rounds", type=int, default=3, help="runs of each rpc")
    parser.add_argument("--peer", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.peer:
        peer(args.peer, args.count)
        return
    results = measured(args.count, args.rounds)
    show(results)
    (Path(__file__).parent / "results.json").write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
