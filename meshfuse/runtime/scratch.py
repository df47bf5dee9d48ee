"""Host buffers for the time of one call. A transport takes one, knows when it is done with it, and gives it back."""

from __future__ import annotations

import torch

# Above so many bytes a process keeps only buffers that the latest executions asked for: if every step has new sizes,
# every step makes new buffers.
KEPT, RECENT = 1 << 28, 8


class Clock:
    """Counts the executions of programs that this process has begun."""

    def __init__(self) -> None:
        self.now = 0


CLOCK = Clock()


class Scratch:
    """Flat buffers, kept by number of elements and dtype: at every step a program makes the same calls again.

    pinned: page-locked memory, which a device copies from and to by itself.
    """

    def __init__(self, pinned: bool = False):
        self._pinned = pinned
        self._free: dict[tuple[int, torch.dtype], list[torch.Tensor]] = {}
        # By size the execution that asked last. Then the bytes of all buffers that are kept, and the execution in which
        # buffers were last let go.
        self._used: dict[tuple[int, torch.dtype], int] = {}
        self._bytes, self._looked = 0, 0

    def take(self, count: int, dtype: torch.dtype) -> torch.Tensor:
        """A buffer of `count` elements with any values: one that was given back, if there is one."""
        free = self._free.get((count, dtype))
        self._used[count, dtype] = CLOCK.now
        if free:
            return free.pop()
        if self._bytes > KEPT and self._looked < CLOCK.now:
            self._let_go()
        self._bytes += count * dtype.itemsize
        # Outside of inference mode: what is made inside may not be written to elsewhere.
        with torch.inference_mode(False):
            return torch.empty(count, dtype=dtype, device="cpu", pin_memory=self._pinned)

    def _let_go(self) -> None:
        self._looked = CLOCK.now
        for key in [key for key, used in self._used.items() if used < CLOCK.now - RECENT]:
            del self._used[key]
            self._bytes -= sum(buffer.nbytes for buffer in self._free.pop(key, ()))

    def give(self, *buffers: torch.Tensor) -> None:
        """Give back buffers that nothing reads or writes any more."""
        for buffer in buffers:
            self._free.setdefault((buffer.numel(), buffer.dtype), []).append(buffer)

    @property
    def free(self) -> int:
        """How many buffers lie ready; while no call runs, all of them do."""
        return sum(map(len, self._free.values()))
