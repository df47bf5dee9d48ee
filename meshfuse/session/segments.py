"""Shared memory between two processes of a host, for the bytes of large tensors.

The sender owns a few segments (memfd, so nothing has a name that could be left behind) and copies into a free one; the
receiver maps each segment once, and its tensors use that memory. When the last of them is gone, the segment's number
goes back to the sender with the next frame. Pages that exist already are written ten times as fast as new ones.
"""

from __future__ import annotations

import ctypes
import math
import mmap
import os
import sys
import weakref
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from .compact import Buffer, bytes_of

# From so many bytes on a frame's buffers go through shared memory.
SHARED = 128 * 1024
_SMALLEST, _ALIGNMENT = 1 << 20, 64
# A sender keeps at most so many bytes of free segments, of which each is at most twice as large as its use.
_KEPT = 1 << 29


def is_available() -> bool:
    """Whether this system has memory that is shared without a name (Linux)."""
    return sys.platform.startswith("linux") and hasattr(os, "memfd_create")


@dataclass(slots=True, eq=False)
class _Segment:
    number: int
    size: int
    memory: torch.Tensor


@dataclass(frozen=True, slots=True)
class Placed:
    """Where the buffers of a frame are: a segment's number and size. `dropped` are numbers not used any more."""

    number: int
    size: int
    dropped: tuple[int, ...]


class SegmentWriter:
    """The sender's segments."""

    def __init__(self) -> None:
        self._free: list[_Segment] = []
        self._used: dict[int, _Segment] = {}
        self._next, self._dropped = 0, ()

    def put(self, buffers: Sequence[Buffer]) -> tuple[Placed, int | None]:
        """Copy the buffers into a segment; also its file if the receiver does not have it yet, to be closed then."""
        offsets, total = layout([len(buffer) for buffer in buffers])
        segment, fd = self._take(total)
        for offset, buffer in zip(offsets, buffers, strict=True):
            part = segment.memory[offset : offset + len(buffer)]
            part.copy_(torch.frombuffer(buffer, dtype=torch.uint8))
        self._used[segment.number] = segment
        dropped, self._dropped = self._dropped, ()
        return Placed(segment.number, segment.size, dropped), fd

    def give_back(self, numbers: Sequence[int]) -> None:
        """The receiver no longer uses these segments."""
        for number in numbers:
            segment = self._used.pop(number, None)
            if segment is not None:
                self._free.append(segment)
        while self._free and sum(segment.size for segment in self._free) > _KEPT:
            self._dropped = (*self._dropped, self._free.pop(0).number)

    def _take(self, total: int) -> tuple[_Segment, int | None]:
        fits = [segment for segment in self._free if total <= segment.size <= max(2 * total, _SMALLEST)]
        if fits:
            found = min(fits, key=lambda segment: segment.size)
            self._free.remove(found)
            return found, None
        self._next += 1
        size = max(_SMALLEST, 1 << math.ceil(math.log2(total)))
        fd = os.memfd_create("meshfuse-session")
        os.ftruncate(fd, size)
        return _Segment(self._next, size, _mapped(fd, size)), fd


class SegmentReader:
    """The receiver's side: the segments that it has mapped, and those that it has done with."""

    def __init__(self) -> None:
        self._mapped: dict[int, torch.Tensor] = {}
        # Filled by the end of objects, in any thread and inside of any lock.
        self.released: deque[int] = deque()

    def buffers(self, placed: Placed, fd: int | None, sizes: Sequence[int]) -> list[Buffer]:
        """The buffers of a frame, as memory of the receiver's own until they are gone."""
        for number in placed.dropped:
            self._mapped.pop(number, None)
        if fd is not None:
            self._mapped[placed.number] = _mapped(fd, placed.size)
            os.close(fd)
        memory = self._mapped[placed.number]
        offsets, total = layout(sizes)
        assert total <= placed.size <= memory.nbytes
        lease = (ctypes.c_char * total).from_address(memory.data_ptr())
        vars(lease)["memory"] = memory
        weakref.finalize(lease, self.released.append, placed.number).atexit = False
        whole = memoryview(lease).cast("B")
        return [whole[offset : offset + size] for offset, size in zip(offsets, sizes, strict=True)]

    def take_released(self) -> tuple[int, ...]:
        """The numbers of segments that may be used again."""
        found = []
        while self.released:
            found.append(self.released.popleft())
        return tuple(found)


def layout(sizes: Sequence[int]) -> tuple[list[int], int]:
    """Where buffers of these sizes begin in a segment, and how large it must be."""
    offsets, end = [], 0
    for size in sizes:
        offsets.append(end)
        end += -(-size // _ALIGNMENT) * _ALIGNMENT
    return offsets, end


def _mapped(fd: int, size: int) -> torch.Tensor:
    return torch.frombuffer(mmap.mmap(fd, size), dtype=torch.uint8)


__all__ = ["SHARED", "Placed", "SegmentReader", "SegmentWriter", "bytes_of", "is_available", "layout"]
