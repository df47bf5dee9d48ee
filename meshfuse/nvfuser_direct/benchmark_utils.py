"""Timing of a function as in nvFuser's benchmarks: clocks for pytest-benchmark, and functions that wait for the device.

nvFuser times kernels with NVIDIA's cupti-python. Here torch's own profiler does, which needs no other package.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import Any

import torch

from ..errors import DefinitionError, caller_line, user_error
from .profiler import get_fusion_profile
from .pytorch_utils import check_device

# What a profiler records on the device beside kernels.
_NO_KERNELS = ("Memcpy", "Memset")


def get_benchmark_fns(func: Callable[..., Any]) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """(a function for the warm-up, a function to measure); both wait for the CUDA device if there is one."""

    def waited(*args: Any, **kwargs: Any) -> Any:
        result = func(*args, **kwargs)
        _wait()
        return result

    return waited, waited


def _wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


class Timer:
    """A clock for pytest-benchmark that includes the device's work.

    A subclass whose calls add to `current_time` by `_increment_global_time`, and return it, counts what it likes.
    """

    def __init__(self) -> None:
        self.current_time = 0.0

    def _increment_global_time(self, elapsed_time: float) -> None:
        self.current_time += elapsed_time

    def __call__(self) -> float:
        _wait()
        return time.perf_counter()

    def cleanup(self) -> None:
        """Does nothing."""


class NothingRecordedError(DefinitionError):
    """No kernel ran on the device between two calls of a timer."""


class CuptiProfiler:
    """Records the kernels that run on the CUDA device between `start` and `stop`.

    Raises DeviceError without a CUDA device.
    """

    def __init__(self) -> None:
        check_device("CuptiProfiler", "CuptiTimer measures wall-clock time then.", caller_line())
        self.is_valid = True
        self._running: torch.profiler.profile | None = None

    def start(self) -> None:
        """Begin to record. What was recorded before is forgotten."""
        self._check()
        self._running = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA])
        self._running.start()

    def stop(self) -> list[tuple[str, float]]:
        """(name, seconds) of every kernel since `start`; none without a `start`."""
        self._check()
        profiler, self._running = self._running, None
        if profiler is None:
            return []
        profiler.stop()
        return kernels_of(profiler.events() or ())

    def teardown_cupti(self) -> None:
        """End recording for good."""
        self.stop()
        self.is_valid = False

    def _check(self) -> None:
        if not self.is_valid:
            raise user_error("CuptiProfiler: it was torn down", do="Make another one.", where=caller_line())


def kernels_of(events: Iterable[Any]) -> list[tuple[str, float]]:
    """(name, seconds) of the kernels among what torch's profiler recorded."""
    on_device = (e for e in events if e.device_type is torch.autograd.DeviceType.CUDA)
    return [(e.name, e.time_range.elapsed_us() / 1e6) for e in on_device if not e.name.startswith(_NO_KERNELS)]


class CuptiTimer(Timer):
    """The time of the kernels between two calls of it; without a CUDA device, where kernels run here, wall-clock time.

    Raises NothingRecordedError where no kernel ran on the device.
    """

    def __init__(self) -> None:
        super().__init__()
        self.cupti_profiler = CuptiProfiler() if torch.cuda.is_available() else None
        self.is_running = False

    def __call__(self) -> float:
        if self.cupti_profiler is None:
            return super().__call__()
        _wait()
        self.is_running = not self.is_running
        if self.is_running:
            self.cupti_profiler.start()
        else:
            self._count(self.cupti_profiler.stop())
        return self.current_time

    def _count(self, kernels: list[tuple[str, float]]) -> None:
        if not kernels:
            self.cleanup()
            raise user_error("CuptiTimer: nothing to time", "no kernel on the CUDA device", "at least one",
                             "Benchmark a function of CUDA tensors.", caller_line(), NothingRecordedError)  # fmt: skip
        self._increment_global_time(sum(seconds for _, seconds in kernels))

    def cleanup(self) -> None:
        """End the profiler; the timer cannot be called again then."""
        self.is_running = False
        if self.cupti_profiler is not None and self.cupti_profiler.is_valid:
            self.cupti_profiler.teardown_cupti()


class FusionProfileTimer(Timer):
    """The host's time of the definition that runs, under a PythonProfiler, between two calls of it.

    Raises DefinitionError where none ran so.
    """

    def __init__(self) -> None:
        super().__init__()
        self.fd: Any = None
        self.execution_start = True  # whether the next call is the one before an execution

    def set_fd(self, fd: Any) -> None:
        """Note the definition that runs, which a script may ask for."""
        self.fd = fd

    def __call__(self) -> float:
        if not self.execution_start:
            self._increment_global_time(get_fusion_profile().host_time_ms / 1e3)
        self.execution_start = not self.execution_start
        return self.current_time
