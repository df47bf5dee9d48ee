"""Whether a GPU's streams would race, found from a run of simulated ranks.

On a GPU each rank has a stream for its kernels, one for the collectives of each group, and one for the messages with
each peer of a group. Events order them: a communication comes after the kernels launched before it, and what is
launched after a wait comes after the communication waited for. The host waits for neither. Nothing else orders the
streams, so every use of memory must be ordered by these.

Each launch has a vector clock (Fidge 1988, Mattern 1989). Each byte of memory has the numbers of the launches that read
and wrote it last, by stream. `torch.cuda._sanitizer` does the same for CUDA's streams, by the addresses of tensors.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

from ..host_ir import HostProgram
from ..lowering.instructions import group_name

COMPUTE = "compute"
# By stream, the number of its last launch that is known to be over.
Clock = dict[str, int]


@dataclass(frozen=True, slots=True)
class _TouchedStorage:
    """A storage that is in use: by stream, for each byte the number of the last launch that reads or writes it."""

    alive: StorageWeakRef
    maker: str
    size: int
    reads: dict[str, torch.Tensor] = field(default_factory=dict)
    writes: dict[str, torch.Tensor] = field(default_factory=dict)

    def unordered(self, clock: Clock, tensor: torch.Tensor | None, write: bool) -> Iterator[str]:
        """The streams whose launches touch the tensor's bytes (None: any byte) and are not before this clock."""
        for touched in (self.writes, self.reads) if write else (self.writes,):
            for stream, numbers in touched.items():
                found = numbers if tensor is None else _bytes(numbers, tensor)
                if found.numel() and int(found.max()) > clock.get(stream, 0):
                    yield stream

    def touch(self, stream: str, number: int, tensor: torch.Tensor, write: bool) -> None:
        touched = self.writes if write else self.reads
        if stream not in touched:
            touched[stream] = torch.zeros(self.size, dtype=torch.int32, device="cpu")
        _bytes(touched[stream], tensor).fill_(number)


def _bytes(numbers: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
    """From one number per byte of a storage, the numbers of the bytes of a tensor in it."""
    size = tensor.element_size()
    strides = [stride * size for stride in tensor.stride()]
    return numbers.as_strided((*tensor.shape, size), (*strides, 1), tensor.storage_offset() * size)


class Streams(TorchDispatchMode):
    """The streams of one simulated rank. `record` lists its launches and its waits for events, in the host's order."""

    def __init__(self, rank: int):
        super().__init__()
        self.rank = rank
        self.clear()

    def clear(self) -> None:
        """Forget all launches."""
        self.record: list[str] = []
        self._races: list[str] = []
        self._inside = False
        self._clocks: dict[str, Clock] = {}
        self._ends: dict[Any, Clock] = {}
        self._memory: dict[int, _TouchedStorage] = {}

    def watch(self, scope: dict[str, Any], program: HostProgram) -> None:
        """From now on record the launches of a bound program's kernels and communications."""
        for kernel in program.kernels:
            if not isinstance(scope[kernel.name], _OrderedKernel):
                scope[kernel.name] = _OrderedKernel(self, kernel.name, kernel.written, scope[kernel.name])
        for group in program.groups:
            if not isinstance(scope[group_name(group)], _OrderedGroup):
                scope[group_name(group)] = _OrderedGroup(self, group_name(group), scope[group_name(group)])

    @contextlib.contextmanager
    def until_next_wait(self, work: Any) -> Iterator[None]:
        """The context of what a rank does from its wait for `work` (None: its start) up to its next wait."""
        if work is not None:
            self._wait(COMPUTE, self._ends.pop(work), f"of {work.what}")
        with self:
            yield

    def end(self, results: Sequence[torch.Tensor | None]) -> None:
        """End the program: the user may now read and write its results. Raises AssertionError where anything raced."""
        self._launch(COMPUTE, "the user", [], [result for result in results if result is not None])
        self._races += [f"nothing waits for {work.what}" for work in self._ends]
        self._memory.clear()
        assert not self._races, "\n".join([f"rank {self.rank}: {'; '.join(self._races)}", *self.record])

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        if not func.is_view:
            given = _given(func, args, kwargs or {})
            written = [tensor for tensor, write in given if write]
            fresh = _elsewhere(_tensors(made), [tensor for tensor, _ in given])
            self._launch(COMPUTE, str(func), [t for t, write in given if not write], [*written, *fresh])
        return made

    def kernel(self, name: str, written: Sequence[int], run: Callable[..., Any], arguments: Sequence[Any]) -> Any:
        """Launch a segment's kernel, by whichever function runs it."""
        given = _tensors(arguments)
        self._inside = True
        try:
            made = run(*arguments)
        finally:
            self._inside = False
        changed = [arguments[place] for place in written]
        self._launch(COMPUTE, name, given, [*changed, *_elsewhere(_tensors(made), given)])
        return made

    def issue(self, stream: str, call: Callable[[], Any], reads: Sequence[Any], writes: Sequence[Any]) -> Any:
        """Launch a communication on its stream, after all that was launched for kernels; returns its work."""
        with _disable_current_modes():
            work = call()
        self._wait(stream, self._clock(COMPUTE), f"of {COMPUTE}")
        self._launch(stream, work.what, reads, writes)
        self._ends[work] = dict(self._clock(stream))
        return work

    def _clock(self, stream: str) -> Clock:
        return self._clocks.setdefault(stream, {})

    def _wait(self, stream: str, event: Clock, what: str) -> None:
        self.record.append(f"{stream}: wait for the event {what}")
        clock = self._clock(stream)
        clock.update({other: max(number, clock.get(other, 0)) for other, number in event.items()})

    def _launch(self, stream: str, what: str, reads: Sequence[torch.Tensor], writes: Sequence[torch.Tensor]) -> None:
        with _disable_current_modes():
            if not self._inside:
                self.record.append(f"{stream}: {what}")
            clock = self._clock(stream)
            clock[stream] = clock.get(stream, 0) + 1
            self._forget_freed(what)
            for write, tensors in ((False, reads), (True, writes)):
                for tensor in tensors:
                    self._touch(stream, what, tensor, write)

    def _touch(self, stream: str, what: str, tensor: torch.Tensor, write: bool) -> None:
        storage, clock = tensor.untyped_storage(), self._clock(stream)
        memory = self._memory.get(storage._cdata)
        if memory is None:
            memory = self._memory[storage._cdata] = _TouchedStorage(StorageWeakRef(storage), what, storage.nbytes())
        if tensor.numel():
            self._check(memory, memory.unordered(clock, tensor, write), what, stream)
            memory.touch(stream, clock[stream], tensor, write)

    def _forget_freed(self, what: str) -> None:
        """Check memory that has been freed: the next launch on the kernels' stream may get it."""
        for place, memory in [*self._memory.items()]:
            if memory.alive.expired():
                unordered = memory.unordered(self._clock(COMPUTE), None, True)
                self._check(memory, unordered, f"what takes it once it is freed (before {what})", COMPUTE)
                del self._memory[place]

    def _check(self, memory: _TouchedStorage, unordered: Iterator[str], what: str, stream: str) -> None:
        self._races += [
            f"{what} on {stream} uses memory of {memory.maker} that {other} uses, and no event orders them"
            for other in unordered if other != stream
        ]  # fmt: skip


class _OrderedKernel:
    """A kernel's function that tells the streams of its rank of each launch."""

    def __init__(self, streams: Streams, name: str, written: Sequence[int], run: Callable[..., Any]):
        self._streams, self._name, self._written, self._run = streams, name, written, run

    def __call__(self, *arguments: Any) -> Any:
        return self._streams.kernel(self._name, self._written, self._run, arguments)


class _OrderedGroup:
    """A simulated group that tells the streams of its rank of each communication."""

    def __init__(self, streams: Streams, stream: str, group: Any):
        self._streams, self._stream, self._group = streams, stream, group

    def __getattr__(self, kind: str) -> Callable[..., Any]:
        method = getattr(self._group, kind)

        def issue(*arguments: Any) -> Any:
            touched = _reads_and_writes(kind, arguments, self._group.index)
            peer = f" with {self._group.ranks[arguments[1]]}" if kind in ("send", "recv") else ""
            return self._streams.issue(self._stream + peer, lambda: method(*arguments), *touched)

        return issue


def _reads_and_writes(kind: str, arguments: Sequence[Any], mine: int) -> tuple[list[Any], list[Any]]:
    """(tensors read, tensors written) by a communication on the rank at index `mine` of the group."""
    first, second = arguments[0], arguments[1]
    if kind in ("all_gather", "all_to_all"):
        return [second], [first]
    if kind == "send" or (kind == "broadcast" and second == mine):
        return [first], []
    return [], [first]


def _tensors(values: Any) -> list[torch.Tensor]:
    return [value for value in tree_leaves(values) if isinstance(value, torch.Tensor)]


def _given(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[tuple[torch.Tensor, bool]]:
    """The tensors that an op of torch is called with, each with whether the op writes into it."""
    known = _schema(func)
    rows = [*zip(known.values(), args, strict=False), *((known[name], value) for name, value in kwargs.items())]
    return [(tensor, write) for write, value in rows for tensor in _tensors(value)]


@functools.cache
def _schema(func: Any) -> dict[str, bool]:
    """An op's arguments by name, each with whether the op writes into it."""
    return {a.name: a.alias_info is not None and a.alias_info.is_write for a in func._schema.arguments}


def _elsewhere(made: Sequence[torch.Tensor], given: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Those of the tensors made that are in other memory than all tensors given."""
    known = {tensor.untyped_storage()._cdata for tensor in given}
    return [tensor for tensor in made if tensor.untyped_storage()._cdata not in known]
