"""Torch modes of the caller that would change what a program computes, turned off while it runs."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

# Whether any device's autocast is on, and how many modes over torch's functions: both are cheap enough for every step.
_autocasts = torch._C._is_any_autocast_enabled
_function_modes = torch._C._len_torch_function_stack


def modes_are_on() -> bool:
    """Whether the caller has set a mode that might change something."""
    return bool(_autocasts() or _function_modes())


def on_cpu() -> contextlib.AbstractContextManager[Any]:
    """A context in which tensors are made on the CPU. torch's own costs each function of torch's microseconds, so it is
    taken only where the caller has a mode, which may be another device's.
    """
    return torch.device("cpu") if _function_modes() else contextlib.nullcontext()


@contextlib.contextmanager
def without_modes(device: torch.device) -> Iterator[None]:
    """In this context the caller's modes do not hold: autocast, and modes over torch's functions (a default device).

    A definition gives every dtype itself, and communication buffers are made for those dtypes. What a program's text
    makes of plain numbers must be on the program's device.
    """
    with contextlib.ExitStack() as stack:
        for kind in {"cpu", device.type} - {"meta"}:
            if torch.is_autocast_enabled(kind):
                stack.enter_context(torch.autocast(kind, enabled=False))
        if _function_modes():
            stack.enter_context(device)
        yield
