"""What the caller's modes of torch would change in a program, kept out of it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

# Whether any device's autocast is on, and how many modes over torch's functions: what may be asked at every step.
_autocasts = torch._C._is_any_autocast_enabled
_function_modes = torch._C._len_torch_function_stack


def modes_are_on() -> bool:
    """Whether the caller's modes might change something."""
    return bool(_autocasts() or _function_modes())


@contextlib.contextmanager
def without_modes(device: torch.device) -> Iterator[None]:
    """A definition says every dtype itself, and buffers of communications are made for those; what a program's text
    makes of numbers is on the program's device, whatever the default one is.
    """
    with contextlib.ExitStack() as stack:
        for kind in {"cpu", device.type} - {"meta"}:
            if torch.is_autocast_enabled(kind):
                stack.enter_context(torch.autocast(kind, enabled=False))
        if _function_modes():
            stack.enter_context(device)
        yield
