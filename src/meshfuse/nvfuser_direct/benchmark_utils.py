"""Timing a function as nvFuser's benchmarks do: once to warm up, then with its device waited for."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch


def get_benchmark_fns(func: Callable[..., Any]) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """(a function to warm up by, a function to measure): both wait for the CUDA device where there is one."""

    def waited(*args: Any, **kwargs: Any) -> Any:
        result = func(*args, **kwargs)
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        return result

    return waited, waited


class Timer:
    """A clock for pytest-benchmark: the seconds that passed, the device's work included."""

    def __call__(self) -> float:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        return time.perf_counter()

    def cleanup(self) -> None:
        """Nothing is held."""
