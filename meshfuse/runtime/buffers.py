"""Memory of host programs: once warm, a step allocates only what an earlier step has not given back.

A buffer is given back when nothing holds its storage any more: no name of the program, no output that the user still
has, no array made of it, no communication in flight. The reference counts of its storage tell. A buffer whose storage a
holder has freed, enlarged or shared with other processes is not used again. Buffers that were not asked for in a minute
are dropped; above a limit of bytes, those that none of the latest executions asked for.
"""

from __future__ import annotations

import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import torch

from .. import kernels
from . import scratch
from .scratch import CLOCK

_use_count = torch._C._storage_Use_Count
# A new tensor on the same memory, so that what a user sets on it (a name, requires_grad) does not stay.
_alias = torch._C._dynamo.guards._reinterpret_tensor  # pyright: ignore[reportAttributeAccessIssue]
Shape = tuple[int, ...]
# Seconds after which an unused buffer is dropped, and after how many requests the pool looks for such buffers.
_PATIENCE, _INTERVAL = 60.0, 1024


def _dense(shape: Shape) -> Shape:
    """The strides of a contiguous tensor."""
    return torch.empty(shape, device="meta").stride()


class Plain:
    """What the text of programs calls as M: every call makes new memory on a device.

    On a GPU torch's allocator keeps what was freed; on simulated ranks speed does not matter.
    """

    def __init__(self, device: torch.device):
        self._device = device

    def empty(self, shape: Shape, dtype: torch.dtype) -> torch.Tensor:
        """An empty contiguous tensor."""
        return torch.empty(shape, dtype=dtype, device=self._device)

    def full(self, shape: Shape, value: Any, dtype: torch.dtype) -> torch.Tensor:
        """A contiguous tensor of one number."""
        # torch takes no int beyond 64 bits, which a float may be near to.
        return self.empty(shape, dtype).fill_(float(value) if dtype.is_floating_point else value)

    def clone(self, x: torch.Tensor) -> torch.Tensor:
        """A contiguous copy."""
        return x.clone(memory_format=torch.contiguous_format)

    def dense(self, x: torch.Tensor) -> torch.Tensor:
        """The tensor itself where it is contiguous, else a copy."""
        return x if x.is_contiguous() else self.clone(x)

    def cat(self, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        """The tensors' elements behind each other in a flat buffer."""
        return torch.cat([part.reshape(-1) for part in parts])

    def combine(self, a: torch.Tensor, b: torch.Tensor, reduce: str) -> torch.Tensor:
        """Two terms of a reduction, of one shape, reduced."""
        return kernels.combine(a, b, reduce)

    def fold(self, terms: torch.Tensor, reduce: str) -> torch.Tensor:
        """[n, *shape] terms of a reduction, reduced to [*shape]."""
        return kernels.fold(terms, reduce)


class _Slot:
    """A buffer of the pool, with the time and the execution that last asked for it.

    Its storage has two counts of references, torch's and that of its Python object. Both are noted while nobody else
    has the buffer.
    """

    __slots__ = ("_memory", "_names", "_ours", "_place", "_storage", "data", "execution", "strides", "used")

    def __init__(self, shape: Shape, strides: Shape, dtype: torch.dtype):
        self.strides = strides
        # Outside of inference mode: what is made inside may not be written to elsewhere.
        with torch.inference_mode(False):
            self.data = torch.empty_strided(shape, strides, dtype=dtype, device="cpu")
        self._storage = self.data.untyped_storage()
        self._place: int = self._storage._cdata
        self._memory = self._storage.data_ptr()
        self._ours, self._names = _use_count(self._place), sys.getrefcount(self._storage)
        self.used, self.execution = 0.0, 0

    def is_free(self) -> bool:
        """Whether nobody else holds its memory."""
        return _use_count(self._place) == self._ours and sys.getrefcount(self._storage) == self._names

    def is_changed(self) -> bool:
        """Whether its storage no longer has the memory that it was made with: it was freed, or moved to be shared."""
        return self._storage.data_ptr() != self._memory


class Pooled(Plain, threading.local):
    """As `Plain`, but CPU memory that is used again. Every thread has its own pool; `made` counts new buffers."""

    def __init__(self) -> None:
        super().__init__(torch.device("cpu"))
        # By shape, strides (none: contiguous) and dtype.
        self._slots: dict[tuple[Shape, Shape | None, torch.dtype], deque[_Slot]] = {}
        self.made = 0
        self._now, self._left = time.monotonic(), _INTERVAL
        # The bytes of all slots, and the execution in which slots were last dropped for room.
        self._bytes, self._looked = 0, 0

    def empty(self, shape: Shape, dtype: torch.dtype) -> torch.Tensor:
        return self.strided(shape, None, dtype)

    def clone(self, x: torch.Tensor) -> torch.Tensor:
        return self.empty(tuple(x.shape), x.dtype).copy_(x)

    def cat(self, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        out = self.empty((sum(part.numel() for part in parts),), parts[0].dtype)
        return torch.cat([self.dense(part).view(-1) for part in parts], out=out)

    def combine(self, a: torch.Tensor, b: torch.Tensor, reduce: str) -> torch.Tensor:
        return kernels.combine(a, b, reduce, out=self.empty(tuple(a.shape), a.dtype))

    def fold(self, terms: torch.Tensor, reduce: str) -> torch.Tensor:
        return kernels.fold(terms, reduce, out=self.empty(tuple(terms.shape[1:]), terms.dtype))

    def strided(self, shape: Shape, strides: Shape | None, dtype: torch.dtype) -> torch.Tensor:
        """An empty tensor of these strides (None: contiguous) whose memory nobody else holds."""
        self._left -= 1
        if not self._left:
            self._drop_idle()
        slots = self._slots.get((shape, strides, dtype))
        if slots is None:
            slots = self._slots[shape, strides, dtype] = deque()
        # The buffer used last comes first, as it may still be in the processor's caches; those in use go to the end.
        for _ in range(len(slots)):
            slot = slots[0]
            if slot.is_changed():
                self._bytes -= slots.popleft().data.nbytes
                continue
            if slot.is_free():
                break
            slots.rotate(-1)
        else:
            slot = self._new(shape, strides, dtype)
        slot.used, slot.execution = self._now, CLOCK.now
        return _alias(slot.data, shape, slot.strides, 0)

    def _new(self, shape: Shape, strides: Shape | None, dtype: torch.dtype) -> _Slot:
        """Make a buffer; above the limit of bytes, first drop those that the latest executions did not ask for."""
        if self._bytes > scratch.KEPT and self._looked < CLOCK.now:
            self._looked, oldest = CLOCK.now, CLOCK.now - scratch.RECENT
            self._keep_only(lambda slot: slot.execution >= oldest)
        slot = _Slot(shape, _dense(shape) if strides is None else strides, dtype)
        self._slots.setdefault((shape, strides, dtype), deque()).appendleft(slot)
        self.made, self._bytes = self.made + 1, self._bytes + slot.data.nbytes
        return slot

    def _drop_idle(self) -> None:
        """Drop the buffers that were asked for neither within a minute nor since the last look."""
        last = self._now
        self._now, self._left = time.monotonic(), _INTERVAL
        oldest = min(last, self._now - _PATIENCE)
        self._keep_only(lambda slot: slot.used >= oldest)

    def _keep_only(self, is_wanted: Callable[[_Slot], bool]) -> None:
        """Drop all other slots. Whoever holds their memory keeps it."""
        kept = {key: deque(filter(is_wanted, slots)) for key, slots in self._slots.items()}
        self._slots = {key: slots for key, slots in kept.items() if slots}
        self._bytes = sum(slot.data.nbytes for slots in self._slots.values() for slot in slots)


_POOL = Pooled()


def device_memory(device: torch.device, simulated: bool = False) -> Plain:
    """The memory that programs on a device take from."""
    return _POOL if device.type == "cpu" and not simulated else Plain(device)


def use_pool(code: Any) -> None:
    """Let the module of code that Inductor made for the CPU take its buffers from this pool."""
    scope = getattr(getattr(code, "__func__", code), "__globals__", {})
    if "empty_strided_cpu" in scope:
        scope["empty_strided_cpu"] = _POOL.strided
