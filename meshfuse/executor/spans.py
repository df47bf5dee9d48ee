"""What ranks do when: spans of time, how much of the communication they hide, and files for Perfetto."""

from __future__ import annotations

import json
import os
import re
import tempfile
from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from ..errors import user_error
from ..layer_folding import fold_rows
from ..whole_files import write_whole

SpanKind = Literal["kernel", "communication", "wait"]
_WORK = re.compile(r" \(w\w+\)$")
KINDS: tuple[SpanKind, ...] = get_args(SpanKind)


@dataclass(frozen=True, slots=True)
class Span:
    """What a rank does from one moment to another, in seconds: a "kernel", a "communication" or a "wait".

    about: for a reader, such as the ops and the tensor of a kernel.
    """

    kind: SpanKind
    name: str
    start: float
    end: float
    about: str = ""

    @property
    def seconds(self) -> float:
        return self.end - self.start


@dataclass(frozen=True, slots=True)
class RankTime:
    """Seconds of one rank: when it ends, in kernels, in communications, in waits for these (`exposed`), and `hidden`.

    Hidden is the time of communications in which a kernel runs. What is neither hidden nor waited for went by while the
    host issued a communication, or did something else between two kernels.
    """

    rank: int
    end: float
    computing: float
    communicating: float
    exposed: float
    hidden: float

    @classmethod
    def of(cls, rank: int, spans: Sequence[Span]) -> RankTime:
        """The sums of a rank's spans."""
        computing, communicating, exposed = (sum(s.seconds for s in spans if s.kind == kind) for kind in KINDS)
        run = _kernel_seconds(spans)
        hidden = sum(run(s.end) - run(s.start) for s in spans if s.kind == "communication")
        end = max((s.end for s in spans), default=0.0)
        return cls(rank, end, computing, communicating, exposed, hidden)


def _kernel_seconds(spans: Sequence[Span]) -> Callable[[float], float]:
    """The seconds in which a kernel has run until some moment: several at once count once.

    A kernel that calls another program waits for that one's communications, and does not run then.
    """
    changes = [(s.start, s.kind, 1) for s in spans] + [(s.end, s.kind, -1) for s in spans]
    begun = {kind: 0 for kind in KINDS}
    times, seconds, running = [0.0], [0.0], [False]
    for time, kind, change in sorted(changes):
        seconds.append(seconds[-1] + running[-1] * (time - times[-1]))
        begun[kind] += change
        times.append(time)
        running.append(begun["kernel"] > 0 and not begun["wait"])

    def until(time: float) -> float:
        last = bisect_right(times, time) - 1
        return seconds[last] + running[last] * (time - times[last])

    return until


def hidden_share(ranks: Iterable[RankTime]) -> float:
    """The part of all communication that was hidden; 1.0 where there was none."""
    listed = list(ranks)
    total = sum(rank.communicating for rank in listed)
    return sum(rank.hidden for rank in listed) / total if total else 1.0


def microseconds(seconds: float) -> str:
    """A text of seconds in microseconds."""
    return f"{seconds * 1e6:,.1f} us"


def rank_text(rank: RankTime) -> str:
    """One line on a rank."""
    return (
        f"kernels {microseconds(rank.computing)}, communication {microseconds(rank.communicating)}, "
        f"of which hidden {microseconds(rank.hidden)}, waited for {microseconds(rank.exposed)}"
    )


def call_name(kind: str, tensor: str, work: str) -> str:
    """What a communication, and the wait for it, is called in a trace."""
    return f"{kind} {tensor} ({work})"


def longest_waits(spans: Sequence[Span], shown: int = 6) -> list[str]:
    """Lines on the communications that a rank waits for longest, those of equal layers as one."""
    waits = [s for s in spans if s.kind == "wait" and s.seconds > 0]
    rows = fold_rows([(_WORK.sub("", s.name),) for s in waits], (0,))
    found = [(sum(waits[i].seconds for i in row.places), f"{row.cells[0]}{row.times}") for row in rows]
    found.sort(key=lambda pair: -pair[0])
    return [f"  waits {microseconds(seconds)} for {name}" for seconds, name in found[:shown]]


def make_writable(folder: str) -> None:
    """Make a folder. Raises OSError where no file can be made in it."""
    os.makedirs(folder, exist_ok=True)
    with tempfile.TemporaryFile(dir=folder):
        pass


def write_trace(path: str, rank: int, spans: Sequence[Span]) -> None:
    """Write a rank's spans in Chrome's trace event format, which Perfetto opens: a row per kind, times in microseconds.

    The file is written whole or not at all. Raises DefinitionError where it cannot be written.
    """
    events: list[dict[str, object]] = [
        {"ph": "M", "pid": rank, "name": "process_name", "args": {"name": f"rank {rank}"}},
        *({"ph": "M", "pid": rank, "tid": tid, "name": "thread_name", "args": {"name": kind}}
          for tid, kind in enumerate(KINDS)),
        *({"ph": "X", "pid": rank, "tid": KINDS.index(s.kind), "cat": s.kind, "name": s.name,
           "ts": s.start * 1e6, "dur": s.seconds * 1e6, **({"args": {"about": s.about}} if s.about else {})}
          for s in spans),
    ]  # fmt: skip
    write_events(path, events)


def write_events(path: str, events: Sequence[Mapping[str, object]]) -> None:
    """Write events in Chrome's trace event format, whole or not at all.

    Raises DefinitionError where the file cannot be written.
    """
    try:
        os.makedirs(os.path.dirname(os.path.abspath(path)), exist_ok=True)
        write_whole(path, json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}).encode())
    except OSError as error:
        raise user_error(
            "a trace cannot be written", f"{path} ({error.strerror})", "a folder with room for it",
            "Name another folder.",
        ) from None  # fmt: skip


def read_trace(path: str) -> tuple[int, list[Span]]:
    """The rank and the spans of a file of `write_trace`."""
    with open(path, encoding="utf-8") as file:
        events = json.load(file)["traceEvents"]
    spans = [
        Span(e["cat"], e["name"], e["ts"] / 1e6, (e["ts"] + e["dur"]) / 1e6) for e in events if e["ph"] == "X"
    ]  # fmt: skip
    return events[0]["pid"], spans
