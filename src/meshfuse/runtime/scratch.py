"""Buffers of the host for the time of one call: each transport knows when it is done with them, and gives them back."""

from __future__ import annotations

import torch


class Scratch:
    """Flat buffers by their number of elements and dtype, never freed: a program's calls come again at every step.

    `pinned`: page-locked, so that a device copies from and to them by itself.
    """

    def __init__(self, pinned: bool = False):
        self._pinned = pinned
        self._free: dict[tuple[int, torch.dtype], list[torch.Tensor]] = {}

    def take(self, count: int, dtype: torch.dtype) -> torch.Tensor:
        """A buffer of `count` elements, of any values: one that was given back, if there is one."""
        free = self._free.get((count, dtype))
        return free.pop() if free else torch.empty(count, dtype=dtype, pin_memory=self._pinned)

    def give(self, *buffers: torch.Tensor) -> None:
        """Give buffers back: nothing reads or writes them any more."""
        for buffer in buffers:
            self._free.setdefault((buffer.numel(), buffer.dtype), []).append(buffer)

    @property
    def free(self) -> int:
        """How many buffers lie ready: all of them where no call runs."""
        return sum(map(len, self._free.values()))
