"""Timing of a function as in nvFuser's benchmarks: a warm-up first, then runs that wait for the device."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch


def get_benchmark_fns(func: Callable[..., Any]) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """(a function for the warm-up, a function to measure); both wait for the CUDA device if there is one."""

    def waited(*args: Any, **kwargs: Any) -> Any:
        result = func(*args, **kwargs)
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        return result

    return waited, waited


class Timer:
    """A clock for pytest-benchmark that includes the device's work."""

    def __call__(self) -> float:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        return time.perf_counter()

    def cleanup(self) -> None:
        """Does nothing."""
