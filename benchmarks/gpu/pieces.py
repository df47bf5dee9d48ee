"""Work in pieces, done by other processes: a crash, a hang or a device left broken costs one piece, not the results.

A worker writes what it does to a file, a JSON object per line. Where it ends early, or on its piece's error leaves the
device unusable, the next one goes on behind that piece. This file needs neither torch nor a GPU.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

Lines = list[dict[str, Any]]
# What a piece is called, and what makes its lines. A line that only has a "problem" is a failure of a part of it.
Piece = tuple[str, Callable[[], Lines]]
BROKEN = 3


@dataclass(frozen=True, slots=True)
class Section:
    """Pieces under one name: seconds for all of them, how many are worked on at a time, and whether other sections
    may run beside it: not where something is timed.
    """

    name: str
    seconds: float
    workers: int = 1
    alone: bool = True


@dataclass(slots=True)
class Outcome:
    """The lines of the pieces that were done, in their order, and what was wrong with the others, by label."""

    lines: Lines = field(default_factory=list)
    failed: dict[str, str] = field(default_factory=dict)


def described(error: BaseException) -> str:
    return f"{type(error).__name__}: {str(error).strip()[:300]}"


# a worker ---------------------------------------------------------------------------------------------------------


def work(pieces: Sequence[Piece], first: int, step: int, into: Path, usable: Callable[[], bool]) -> int:
    """Does every `step`-th piece; the exit status of the process. After an error `usable` says whether to go on."""
    with into.open("a") as out:

        def tell(**line: Any) -> None:
            out.write(json.dumps(line) + "\n")
            out.flush()

        tell(labels=[label for label, _ in pieces])
        for place in range(first, len(pieces), step):
            tell(begun=place)
            try:
                tell(done=place, lines=pieces[place][1]())
            except Exception as error:
                tell(done=place, error=described(error))
                if not usable():
                    return BROKEN
        tell(end=True)
    return 0


# its master -------------------------------------------------------------------------------------------------------


def run_section(section: Section, command: Sequence[str], end: float) -> Outcome:
    """All pieces of a section by `command SECTION FIRST STEP FILE END`, until time.time() is `end`."""
    found: list[_Worker] = [_Worker(section, command, first, end) for first in range(section.workers)]
    threads = [threading.Thread(target=worker.run) for worker in found]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return _outcome(found)


class _Worker:
    """Pieces `first`, `first + workers`, ... of a section, by one process after another."""

    def __init__(self, section: Section, command: Sequence[str], first: int, end: float):
        self.section, self.command, self.first, self.end = section, command, first, end
        self.labels: list[str] = []
        self.done: dict[int, dict[str, Any]] = {}
        self.trouble = ""

    def run(self) -> None:
        place: int | None = self.first
        with tempfile.TemporaryDirectory() as folder:
            while place is not None:
                place = self._process(place, Path(folder))

    def _process(self, first: int, folder: Path) -> int | None:
        """The piece to go on with after a process has ended; None where there is none, or no time for it."""
        into, errors = folder / "lines", folder / "errors"
        into.write_text("")
        status = self._call([*self.command, self.section.name, str(first), str(self.section.workers), str(into),
                             str(self.end)], errors)  # fmt: skip
        begun = self._read(into)
        if status == 0 and begun is None:
            return None
        tail = (errors.read_text(errors="replace").strip().splitlines() or [""])[-1][:300]
        self.trouble = f"{'not done in time' if status is None else f'exit status {status}'}: {tail}".removesuffix(": ")
        if begun is None or begun < first:
            return None
        self.done.setdefault(begun, {"error": self.trouble})
        going_on = begun + self.section.workers
        return going_on if status is not None and going_on < len(self.labels) else None

    def _call(self, command: Sequence[str], errors: Path) -> int | None:
        """The exit status; None where the time was over. Nothing of the process' session is left behind."""
        with errors.open("w") as stderr:
            process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=stderr, stderr=stderr, start_new_session=True
            )
            while process.poll() is None and time.time() < self.end:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(0.2)
            status = process.poll()
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            return status

    def _read(self, into: Path) -> int | None:
        """Takes what was written; the last piece that was begun where the process did not get to its end."""
        begun = -1
        for text in into.read_text().splitlines():
            try:
                line = json.loads(text)
            except json.JSONDecodeError:
                break  # cut off by the process' end
            self.labels = line.get("labels", self.labels)
            begun = line.get("begun", begun)
            if "done" in line:
                self.done[line["done"]] = line
            if "end" in line:
                return None
        return begun


def _outcome(workers: Sequence[_Worker]) -> Outcome:
    labels = max((worker.labels for worker in workers), key=len)
    done = {place: line for worker in workers for place, line in worker.done.items()}
    troubles = dict.fromkeys(worker.trouble for worker in workers if worker.trouble)
    made = Outcome()
    if not labels:
        made.failed["start"] = "; ".join(troubles) or "nothing was begun"
    for place, label in enumerate(labels):
        line = done.get(place, {"error": "; ".join(["not reached", *troubles])})
        if "error" in line:
            made.failed[label] = line["error"]
        for part in line.get("lines", ()):
            if "problem" in part:
                made.failed[f"{label}, {part['part']}"] = part["problem"]
            else:
                made.lines.append(part)
    return made
