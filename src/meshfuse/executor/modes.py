"""What the caller's modes of torch would change in a program, kept out of it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

# Whether any device's autocast is on: what may be asked at every step.
autocast_is_on = torch._C._is_any_autocast_enabled


@contextlib.contextmanager
def without_autocast(device: torch.device) -> Iterator[None]:
    """A definition says every dtype itself, and buffers of communications are made for those."""
    with contextlib.ExitStack() as stack:
        for kind in {"cpu", device.type} - {"meta"}:
            if torch.is_autocast_enabled(kind):
                stack.enter_context(torch.autocast(kind, enabled=False))
        yield
