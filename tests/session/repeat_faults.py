"""Faults of sessions, many times each: how long until they are told, and what is left of it all: nothing.

`python tests/session/repeat_faults.py --repeat 20 [NAME ...]` (also by `make test-session`) prints a table. WorkerLost
must come within 0.5 s and workers without a controller end within 5 s, on a machine that does nothing else.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "ranks"))

import forked
from rank_pool import base_environment

KINDS = ("threads", "processes", "sockets")
# By fault: the seconds that it may take to be told, and whether threads can have it.
FAULTS = {
    "exception": (1.0, True), "killed": (0.5, False), "killed-in-a-collective": (0.5, False), "stopped": (6.0, False),
    "interrupted": (2.0, True), "wrong-token": (1.0, False), "half-a-frame": (1.0, False),
    "port-scanner": (2.0, False), "live-references": (5.0, True), "dead-controller": (5.0, False),
}  # fmt: skip
GUARD = 600.0


def living_in(folder: Path) -> list[int]:
    """The processes, without those that have ended, whose working directory this is."""
    found = []
    for name in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):
            state = Path(f"/proc/{name}/stat").read_text().rpartition(")")[2].split()[0]
            if os.readlink(f"/proc/{name}/cwd") == str(folder) and state not in "ZX":
                found.append(int(name))
    return found


def start(kind: str, fault: str, repeat: int, folder: Path) -> Any:
    """A controller."""
    env = base_environment(TORCH_CPP_LOG_LEVEL="ERROR", GLOO_SOCKET_IFNAME="lo", TMPDIR=str(folder))
    script = Path(__file__).parent / "fault_turns.py"
    return forked.start(script, env, folder / "out", errors=folder / "errors", args=(kind, fault, str(repeat)))


def printed(folder: Path, process: Any, limit: float) -> Any:
    """What the controller has printed, as soon as it has; None where it ends without."""
    until = time.monotonic() + limit
    while time.monotonic() < until:
        lines = (folder / "out").read_text().splitlines(True) if (folder / "out").exists() else []
        found = [line for line in lines if line.startswith("[") and line.endswith("]\n") and line[1:2].isdigit()]
        if found:
            return json.loads(found[-1])
        if process.exitcode is not None:
            return None
        time.sleep(0.02)
    return None


def in_one_controller(kind: str, fault: str, repeat: int, folder: Path) -> tuple[list[float], list[str]]:
    """The fault again and again, in one session."""
    process = start(kind, fault, repeat, folder)
    times = printed(folder, process, GUARD)
    process.join(30)
    if times is None or process.exitcode != 0:
        return times or [], [f"exit code {process.exitcode}", (folder / "errors").read_text()[-600:]]
    return times, []


def live_references(kind: str, repeat: int, folder: Path) -> tuple[list[float], list[str]]:
    """A session that ends with live references, each time in a new controller."""
    found = []
    for _ in range(repeat):
        (folder / "out").unlink(missing_ok=True)
        found.append(in_one_controller(kind, "live-references", 1, folder))
    return [seconds for times, _ in found for seconds in times], [one for _, problems in found for one in problems]


def dead_controller(kind: str, repeat: int, folder: Path) -> tuple[list[float], list[str]]:
    """A controller that is killed, each time a new one."""
    times, problems = [], []
    for _ in range(repeat):
        (folder / "out").unlink(missing_ok=True)
        process = start(kind, "dead-controller", 1, folder)
        pids = printed(folder, process, 60)
        if pids is None:
            return times, [*problems, "it did not start", (folder / "errors").read_text()[-600:]]
        time.sleep(0.05)
        os.kill(pids[0], signal.SIGKILL)
        began = time.monotonic()
        while living_in(folder) and time.monotonic() < began + 10:
            time.sleep(0.02)
        times.append(time.monotonic() - began)
        process.join(5)
    return times, problems


def leftovers(folder: Path, shared: set[str]) -> list[str]:
    """What is left: processes, and with them their sockets, shared memory, files."""
    until = time.monotonic() + 5
    while living_in(folder) and time.monotonic() < until:
        time.sleep(0.05)
    problems = [f"process {pid} left: {Path(f'/proc/{pid}/cmdline').read_text()[:200]}" for pid in living_in(folder)]
    for pid in living_in(folder):
        with contextlib.suppress(OSError):
            os.kill(pid, signal.SIGKILL)
    mine = {name for name in os.listdir("/dev/shm") if "meshfuse" in name} - shared
    problems += [f"/dev/shm/{name} left" for name in mine]
    files = {path.name for path in folder.iterdir()} - {"out", "errors", "server.py"}
    return problems + [f"file {name} left" for name in files if not name.startswith("torchinductor_")]


def run(kind: str, fault: str, repeat: int) -> bool:
    """Run one and print its row; whether all was well."""
    shared = {name for name in os.listdir("/dev/shm") if "meshfuse" in name}
    with tempfile.TemporaryDirectory(prefix="meshfuse-faults-") as name:
        folder = Path(name).resolve()
        anew = {"dead-controller": dead_controller, "live-references": live_references}.get(fault)
        times, problems = anew(kind, repeat, folder) if anew else in_one_controller(kind, fault, repeat, folder)
        problems += leftovers(folder, shared)
    late = sum(seconds > FAULTS[fault][0] for seconds in times)
    ordered = sorted(times) or [float("nan")]
    print(
        f"{kind:10} {fault:24} {len(times):3} times, {late} late; seconds {ordered[len(ordered) // 2]:.3f} median, "
        f"{ordered[-1]:.3f} most", *(f"\n    {problem}" for problem in problems), flush=True,
    )  # fmt: skip
    return not problems and not late and len(times) == repeat


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeat", type=int, default=20)
    parser.add_argument("names", nargs="*", help="only faults and kinds of sessions with one of these texts")
    args = parser.parse_args(argv)
    rows = [(kind, fault) for fault, (_, has_threads) in FAULTS.items() for kind in KINDS[not has_threads :]]
    chosen = [row for row in rows if not args.names or any(name in " ".join(row) for name in args.names)]
    results = [run(kind, fault, args.repeat) for kind, fault in chosen]
    return 0 if all(results) else 1


if __name__ == "__main__":
    sys.exit(main())
