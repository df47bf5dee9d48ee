"""Records when a real rank's kernels, communications and waits run, for `meshfuse trace`.

The times are the host's: on CPU a kernel's own, on a GPU those of its launch. Each kernel is also a range of its name
in torch's profiler, which knows the device's times.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import os
import sys
import time
from collections.abc import Callable
from typing import Any

import torch

from ..errors import ArgumentError, DefinitionError, caller_line, user_error
from ..host_ir import HostProgram
from ..lowering.instructions import CommunicationCall, Kernel, group_name
from .spans import Span, SpanKind, call_name, make_writable, write_trace

# The folder that traces go to; nothing is recorded where it is not set.
VARIABLE = "MESHFUSE_TRACE"


class Recorder:
    """The spans of one rank, by its clock. begin: the moment that is 0."""

    def __init__(self, begin: float = 0.0):
        self.spans: list[Span] = []
        self.begin = begin

    def now(self) -> float:
        """Seconds since `begin`."""
        return time.perf_counter() - self.begin

    def add(self, kind: SpanKind, name: str, start: float, about: str = "") -> None:
        """Add a span that began at `start` and ends now."""
        self.spans.append(Span(kind, name, start, self.now(), about))

    def watch(self, scope: dict[str, Any], program: HostProgram) -> None:
        """Replace a bound program's kernels and groups by recording ones, where that has not been done."""
        for kernel in program.kernels:
            if not isinstance(scope[kernel.name], _RecordedKernel):
                scope[kernel.name] = _RecordedKernel(self, kernel, scope[kernel.name])
        calls = [i for i in program.instructions if isinstance(i, CommunicationCall)]
        for group in program.groups:
            name = group_name(group)
            if not isinstance(scope[name], _RecordedGroup):
                names = [call_name(c.kind, c.about.tensor, c.work) for c in calls if c.group == group]
                scope[name] = _RecordedGroup(self, scope[name], names)


def unwatch(scope: dict[str, Any]) -> None:
    """Put a bound program's own kernels and groups back."""
    for name, value in list(scope.items()):
        if isinstance(value, _RecordedKernel):
            scope[name] = value.function
        elif isinstance(value, _RecordedGroup):
            scope[name] = value.group


class _FileRecorder(Recorder):
    """Its spans are written to a file when the process ends."""

    def __init__(self, rank: int, folder: str):
        super().__init__(time.perf_counter())
        self._rank, self._path = rank, os.path.join(folder, f"rank{rank}.json")
        atexit.register(self._write)

    def _write(self) -> None:
        """Write the file at the rank's end, where an error would not change anything any more."""
        try:
            write_trace(self._path, self._rank, self.spans)
        except DefinitionError as error:
            print(f"rank {self._rank}: {error}", file=sys.stderr)


@functools.cache
def recorder(rank: int) -> Recorder | None:
    """This process's recorder; None where no trace was asked for."""
    folder = os.environ.get(VARIABLE)
    if not folder:
        return None
    try:
        make_writable(folder)
    except OSError as error:
        raise user_error(VARIABLE, f"{folder!r} ({error.strerror})", "a folder that can be written to",
                         "Unset it, or name another.", caller_line(), ArgumentError) from None  # fmt: skip
    return _FileRecorder(rank, folder)


class _RecordedKernel:
    """A kernel's function that records its calls."""

    def __init__(self, owner: Recorder, kernel: Kernel, function: Callable[..., Any]):
        self.owner, self.name, self.about, self.function = owner, kernel.name, kernel.about, function

    def __call__(self, *arguments: Any) -> Any:
        start = self.owner.now()
        with torch.profiler.record_function(self.name):
            made = self.function(*arguments)
        self.owner.add("kernel", self.name, start, self.about)
        return made


class _RecordedGroup:
    """A group that records its communications, under the names that the program has for them in this order."""

    def __init__(self, owner: Recorder, group: Any, names: list[str]):
        self.owner, self.group, self.names = owner, group, names
        self.issued = 0

    def __getattr__(self, kind: str) -> Any:
        return functools.partial(self._issue, getattr(self.group, kind))

    def _issue(self, method: Callable[..., Any], *arguments: Any) -> _RecordedWork:
        name = self.names[self.issued % len(self.names)]
        self.issued += 1
        start = self.owner.now()
        return _RecordedWork(self.owner, name, start, method(*arguments))


class _RecordedWork:
    """A work that records when it ended, as far as its backend tells, and how long the rank waited for it."""

    def __init__(self, owner: Recorder, name: str, start: float, work: Any):
        self.owner, self.name, self.work = owner, name, work
        self.begun = [start]  # Emptied by the first who says that it is over: this thread or the backend's.
        future = getattr(getattr(work, "_handle", None), "get_future", None)
        if future is not None:
            # The works of a backend without futures are over when they are waited for.
            with contextlib.suppress(RuntimeError):
                future().add_done_callback(lambda _: self._over())

    def _over(self) -> None:
        with contextlib.suppress(IndexError):
            self.owner.add("communication", self.name, self.begun.pop())

    def wait(self) -> None:
        start = self.owner.now()
        self.work.wait()
        self.owner.add("wait", self.name, start)
        self._over()
