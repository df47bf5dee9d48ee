"""The segments of a bound program: the arguments that each is called with, and the compiled code put in its place."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch

from ..backends import Backend, Prepared, Task, Unsupported
from ..backends.assignment import MAKERS, Chosen, assigned
from ..host_ir import HostProgram
from ..lowering.instructions import Kernel
from ..lowering.segments import Segment, SegmentedDefinition
from ..runtime.buffers import Plain
from .bind import BoundProgram

KernelArguments = tuple[Any, ...]


class Segments:
    """Runs the segments of one rank's program with the backend that was asked for.

    When call number `due` comes, run the program once inside `recorded()`, then call `compile_next` until it is False.
    `chosen` says by kernel what runs it, and why.
    """

    def __init__(
        self,
        bound: BoundProgram,
        program: HostProgram,
        definition: SegmentedDefinition,
        device: torch.device,
        name: str,
    ):
        made = assigned(definition, name, device)
        self._scope, self._definition, self._device, self.rank = bound.scope, definition, device, program.rank
        self._segments = {part.name: part for part in definition.parts if isinstance(part, Segment)}
        self._kernels = {kernel.name: kernel for kernel in program.kernels}
        self._seen: dict[str, set[KernelArguments]] = {}
        self.due = made.due
        self.chosen: dict[str, Chosen] = {kernel: self._planned(kernel, made.chosen) for kernel in self._kernels}
        self._left = [kernel for kernel, chosen in self.chosen.items() if chosen.backend != "eager"]
        self._texts = {kernel: bound.scope[kernel] for kernel in self._left}
        self._makers: dict[str, Backend] = {}

    def _planned(self, kernel: str, chosen: Mapping[int, Chosen]) -> Chosen:
        segment = self._segments.get(kernel)
        return Chosen("eager", "a part of a segment") if segment is None else chosen[segment.id]

    @contextlib.contextmanager
    def recorded(self) -> Iterator[None]:
        """In this context, note the arguments of the kernels that are to be compiled."""
        texts = {name: self._texts[name] for name in self._left}
        self._seen = {}
        self._scope.update({name: self._recorder(name, text) for name, text in texts.items()})
        try:
            yield
        finally:
            self._scope.update(texts)

    def _recorder(self, name: str, text: Prepared) -> Prepared:
        seen = self._seen.setdefault(name, set())

        def record(*arguments: Any) -> Any:
            seen.add(tuple(map(_outline, arguments)))
            return text(*arguments)

        return record

    def compile_next(self) -> bool:
        """Compile one more kernel; False where none is left."""
        if not self._left:
            self.due = None
            return False
        name = self._left[0]
        self.chosen[name] = self._compile(name, self.chosen[name])
        self._left.pop(0)  # Not before: an error that ends this call earlier must not skip the compilation.
        return True

    def _compile(self, name: str, chosen: Chosen) -> Chosen:
        """Put compiled code in a kernel's place: of the backend that was chosen, else of the one after it, if any."""
        try:
            with self._plain_memory():
                made = self._maker(chosen.backend).prepare(self._task(self._kernels[name]))
        except Unsupported as error:
            why = f"{chosen.backend}: {error}"
            if chosen.otherwise is None:
                return Chosen("eager", why)
            found = self._compile(name, Chosen(chosen.otherwise, chosen.why))
            return replace(found, why=f"{found.why}; {why}")
        self._scope[name] = made
        return Chosen(chosen.backend, getattr(made, "note", "compiled"))

    @contextlib.contextmanager
    def _plain_memory(self) -> Iterator[None]:
        """In this context the text makes new tensors, for a kernel to be traced: a pool has only real ones."""
        memory, self._scope["M"] = self._scope["M"], Plain(self._device)
        try:
            yield
        finally:
            self._scope["M"] = memory

    def _maker(self, backend: str) -> Backend:
        if backend not in self._makers:
            self._makers[backend] = MAKERS[backend]()
        return self._makers[backend]

    def _task(self, kernel: Kernel) -> Task:
        seen = self._seen.get(kernel.name, set())
        if len(seen) != 1:
            raise Unsupported(f"one execution calls it with {len(seen)} kinds of arguments")
        arguments = tuple(v.empty() if isinstance(v, _Outline) else v for v in next(iter(seen)))
        segment = self._segments.get(kernel.name)
        text = self._texts[kernel.name]  # It may be compiled already, if Ctrl-C came just after that.
        return Task(kernel, segment, self._definition, self.rank, self._device, text, arguments)


class _Outline(tuple[Any, ...]):
    """Shape, strides and dtype of a tensor."""

    __slots__ = ()

    def empty(self) -> torch.Tensor:
        shape, strides, dtype = self
        return torch.empty_strided(shape, strides, dtype=dtype, device="meta")


def _outline(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return _Outline((value.shape, value.stride(), value.dtype))
    return value
