"""`s.profile(path)`: one trace of a session's controller and workers, for Perfetto."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from ..errors import ArgumentError, caller_line, shown, user_error
from ..executor.record import Recorder
from ..executor.spans import KINDS, Span, write_events
from .executor import current

_ROUNDS = 5  # Messages there and back, of which the quickest tells how a worker's clock differs.


@dataclass(frozen=True, slots=True)
class CallSpan:
    """A call on a worker, in seconds of its clock."""

    number: int
    start: float
    end: float


class Profile:
    """A context in which a session's calls are recorded; at its end the trace is written."""

    def __init__(self, session: Any, path: Any):
        if not isinstance(path, (str, os.PathLike)) or not str(path):
            raise user_error("profile: path", shown(path), "a file to write to", "", caller_line(), ArgumentError)
        self._session, self._path = session, os.fspath(path)
        self.spans: list[tuple[str, str, int, float, float]] = []

    def __enter__(self) -> Profile:
        if self._session.profiling is not None:
            raise user_error("profile inside of another", self._session.profiling._path, "one at a time", "",
                             caller_line(), ArgumentError)  # fmt: skip
        self._offsets = [self._offset(worker) for worker in range(self._session.num_workers)]
        self._session.call(start_recording)
        self._begin = time.perf_counter()
        self._session.profiling = self
        return self

    def _offset(self, worker: int) -> float:
        """How many seconds a worker's clock is ahead."""
        found = []
        for _ in range(_ROUNDS):
            before = time.perf_counter()
            theirs = self._session.fetch(self._session.call(time.perf_counter), worker)
            found.append((time.perf_counter() - before, theirs - (before + time.perf_counter()) / 2))
        return min(found)[1]

    def add(self, kind: str, name: str, number: int, start: float) -> None:
        """Record what the controller has done since `start`: "issue" or "wait"."""
        self.spans.append((kind, name, number, start, time.perf_counter()))

    def __exit__(self, *_: object) -> None:
        self._session.profiling = None
        recorded = self._session.call(stop_recording)
        workers = [self._session.fetch(recorded, worker) for worker in range(self._session.num_workers)]
        write_events(self._path, [*self._own_events(), *self._workers_events(workers)])

    def _own_events(self) -> Iterable[dict[str, Any]]:
        yield from _head(0, "controller", ("issue", "wait"))
        for kind, name, number, start, end in self.spans:
            tid = ("issue", "wait").index(kind)
            yield self._event(0, tid, kind, name, start, end, {"call": number})
            if kind == "issue":
                yield {"ph": "s", "pid": 0, "tid": tid, "cat": "call", "name": "call", "id": number,
                       "ts": self._at(start)}  # fmt: skip

    def _workers_events(
        self, workers: Sequence[tuple[list[CallSpan], list[Span]]]
    ) -> Iterable[dict[str, Any]]:  # fmt: skip
        names = {number: name for kind, name, number, *_ in self.spans if kind == "issue"}
        for worker, (calls, spans) in enumerate(workers):
            pid, ahead = worker + 1, self._offsets[worker]
            yield from _head(pid, f"worker {worker}", ("call", *KINDS))
            for call in calls:
                if call.number not in names:
                    continue
                start = call.start - ahead
                yield self._event(
                    pid, 0, "call", names[call.number], start, call.end - ahead, {"call": call.number}
                )  # fmt: skip
                if worker == 0:  # One arrow of a call, to the controller's own worker.
                    yield {"ph": "f", "bp": "e", "pid": pid, "tid": 0, "cat": "call", "name": "call",
                           "id": call.number, "ts": self._at(start)}  # fmt: skip
            for span in spans:
                tid = 1 + KINDS.index(span.kind)
                yield self._event(pid, tid, span.kind, span.name, span.start - ahead, span.end - ahead, {})

    def _at(self, moment: float) -> float:
        return (moment - self._begin) * 1e6

    def _event(
        self, pid: int, tid: int, kind: str, name: str, start: float, end: float, args: dict[str, Any]
    ) -> dict[str, Any]:  # fmt: skip
        return {"ph": "X", "pid": pid, "tid": tid, "cat": kind, "name": name, "ts": self._at(start),
                "dur": max(0.0, end - start) * 1e6, "args": args}  # fmt: skip


def _head(pid: int, name: str, rows: Sequence[str]) -> Iterable[dict[str, Any]]:
    yield {"ph": "M", "pid": pid, "name": "process_name", "args": {"name": name}}
    yield {"ph": "M", "pid": pid, "name": "process_sort_index", "args": {"sort_index": pid}}
    for tid, row in enumerate(rows):
        yield {"ph": "M", "pid": pid, "tid": tid, "name": "thread_name", "args": {"name": row}}


# On the workers.


def start_recording() -> None:
    """Record this worker's calls, and the kernels, communications and waits of its programs."""
    current().record_by(Recorder())


def stop_recording() -> tuple[list[CallSpan], list[Span]]:
    """What has been recorded."""
    worker = current()
    recorder, calls = worker.recorder, [CallSpan(*call) for call in worker.calls]
    worker.record_by(None)
    return calls, recorder.spans if recorder is not None else []
