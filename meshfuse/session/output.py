"""What workers print, passed on line by line with their names; a line that many print at a time is shown once."""

from __future__ import annotations

import contextlib
import os
import select
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

_GATHER = 0.1  # Seconds that a line waits for the same line of other workers.
_MOST = 1 << 16  # Bytes of a line without an end that are held back.


@dataclass(slots=True)
class _Pipe:
    worker: int
    is_error: bool
    text: bytes = b""


@dataclass(slots=True)
class _Waiting:
    """Lines that were printed and not yet shown, in order; who printed each."""

    workers: dict[tuple[bool, str], list[int]] = field(default_factory=dict)
    since: float = 0.0


class OutputCollector:
    """Reads the workers' pipes in a thread of its own, and gives each line to `show` (else to this process' output)."""

    def __init__(self, show: Callable[[bool, str], None] | None = None):
        self._show_line = show or show_line
        self._pipes: dict[int, _Pipe] = {}
        self._poll = select.poll()
        self._read, self._write = os.pipe()
        self._poll.register(self._read, select.POLLIN)
        self._waiting = _Waiting()
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._run, name="meshfuse-output", daemon=True)
        self._thread.start()

    def pipe(self, worker: int, is_error: bool) -> int:
        """A file for a worker to write to; to be closed here once the worker has it."""
        read, write = os.pipe()
        with self._lock:
            self._pipes[read] = _Pipe(worker, is_error)
        self._poll.register(read, select.POLLIN)
        os.write(self._write, b"+")
        return write

    def _run(self) -> None:
        while True:
            for fd, _ in self._poll.poll(_GATHER * 1000 if self._waiting.workers else None):
                if fd == self._read:
                    if b"." in os.read(self._read, 4096):
                        self._drain()
                        return
                else:
                    self._take(fd)
            if self._waiting.workers and time.monotonic() - self._waiting.since >= _GATHER:
                self._show()

    def _take(self, fd: int) -> bool:
        pipe, data = self._pipes[fd], os.read(fd, 1 << 16)
        *lines, pipe.text = (pipe.text + data).split(b"\n")
        if pipe.text and (not data or len(pipe.text) > _MOST):
            lines, pipe.text = [*lines, pipe.text], b""
        for line in lines:
            self._add(pipe, line.decode(errors="replace"))
        if not data:
            self._poll.unregister(fd)
            os.close(fd)
            with self._lock:
                del self._pipes[fd]
        return bool(data)

    def _add(self, pipe: _Pipe, line: str) -> None:
        waiting = self._waiting.workers
        who = waiting.setdefault((pipe.is_error, line), [])
        if pipe.worker in who:  # It says the same again: order matters more than brevity.
            self._show()
            who = self._waiting.workers.setdefault((pipe.is_error, line), [])
        if len(self._waiting.workers) == 1 and not who:
            self._waiting.since = time.monotonic()
        who.append(pipe.worker)

    def _show(self) -> None:
        waiting, self._waiting = self._waiting.workers, _Waiting()
        for (is_error, line), workers in waiting.items():
            self._show_line(is_error, f"[{names(workers)}] {line}\n")

    def _drain(self) -> None:
        """What ended workers have left in their pipes."""
        for fd in list(self._pipes):
            while select.select([fd], [], [], 0)[0] and self._take(fd):
                pass
        self._show()
        for fd in self._pipes:
            os.close(fd)

    def close(self) -> None:
        """Show what is left, and stop."""
        os.write(self._write, b".")
        self._thread.join(2.0)
        os.close(self._read)
        os.close(self._write)


def show_line(is_error: bool, text: str) -> None:
    """Write a line to this process' own output, as a notebook or a test has set it."""
    stream = sys.stderr if is_error else sys.stdout
    with contextlib.suppress(OSError, ValueError, AttributeError):
        stream.write(text)
        stream.flush()


def names(workers: list[int]) -> str:
    """`worker 3`, or `workers 1-3, 5` for several."""
    numbers = sorted(workers)
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    parts = [str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs]
    return f"worker{'s' if len(numbers) > 1 else ''} {', '.join(parts)}"
