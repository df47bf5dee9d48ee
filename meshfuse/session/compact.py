"""A short form for what most calls consist of: numbers, texts, tensors, registers, functions, and tuples, lists and
dicts of these.

It is marshalled, in a tenth of the time that pickle takes with its look-ups. What is none of these is left to pickle.
A plain value stands for itself; anything else is a tuple that begins with its kind.
"""

from __future__ import annotations

import ctypes
import importlib
import sys
import types
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from .functions import is_importable

Buffer = Any
PLAIN = {int, float, bool, str, bytes, type(None), complex}
_TUPLE, _TENSOR, _AGAIN, _FUNCTION, _EMPTY_DICT, _OTHER, _LIST, _DICT = range(8)
# Up to so many bytes of a tensor stand in the form itself.
INLINE = 2048
_MOST_DEPTH = 8
_MUCH = 8192  # Bytes from which on the gaps between a tensor's elements are not sent.

DTYPES = tuple(sorted({d for d in vars(torch).values() if isinstance(d, torch.dtype)}, key=str))
_CODES = {dtype: code for code, dtype in enumerate(DTYPES)}
# Further classes: what they are written as (an int), and what reads that.
_writers: dict[type, tuple[int, Callable[[Any], int]]] = {}
_readers: dict[int, Callable[[int], Any]] = {}


class NotCompact(Exception):
    """A value has no short form."""


def register_compact(code: int, kind: type, write: Callable[[Any], int]) -> None:
    """Let instances of a class be written as an int."""
    _writers[kind] = (code, write)


def register_reader(code: int, read: Callable[[int], Any]) -> None:
    """How ints of that code are read."""
    _readers[code] = read


@dataclass(frozen=True, slots=True)
class NamedFunction:
    """A function of a module that only workers load: it is sent by its name, and what reads it gets the function."""

    module: str
    name: str

    @property
    def __name__(self) -> str:
        return self.name

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return named(self.module, self.name)(*args, **kwargs)

    def __reduce__(self) -> Any:
        return named, (self.module, self.name)


class Writer:
    """Writes one value. `buffers` are the bytes of large tensors.

    A tensor, list or dict that comes again is written as the number of its first time, as pickle has it.
    """

    __slots__ = ("_main_is_shared", "_seen", "_tracked", "buffers")

    def __init__(self, main_is_shared: bool, tracked: list[torch.Tensor] | None):
        self.buffers: list[memoryview] = []
        self._seen: dict[int, int] = {}
        self._main_is_shared, self._tracked = main_is_shared, tracked

    def form(self, value: Any, depth: int = 0) -> Any:
        """The short form. Raises NotCompact."""
        kind = type(value)
        if kind in PLAIN:
            return value
        if kind is tuple and depth < _MOST_DEPTH:
            return (_TUPLE, *[item if type(item) in PLAIN else self.form(item, depth + 1) for item in value])
        if kind in _writers:
            code, write = _writers[kind]
            return _OTHER, code, write(value)
        if kind is torch.Tensor:
            return self._again(value) or self._tensor(value)
        if kind is dict and not value:
            return (_EMPTY_DICT,)
        if kind is types.FunctionType and is_importable(value, self._main_is_shared):
            return _FUNCTION, value.__module__, value.__qualname__
        if kind is NamedFunction:
            return _FUNCTION, value.module, value.name
        if kind in (list, dict) and depth < _MOST_DEPTH:
            return self._again(value) or self._container(value, depth)
        raise NotCompact

    def _again(self, value: Any) -> Any:
        count = len(self._seen)
        before = self._seen.setdefault(id(value), count)
        return None if before == count else (_AGAIN, before)

    def _container(self, value: list[Any] | dict[Any, Any], depth: int) -> Any:
        if isinstance(value, list):
            return (_LIST, *[self.form(item, depth + 1) for item in value])
        if not all(type(key) in PLAIN for key in value):
            raise NotCompact
        return (_DICT, *value, *[self.form(item, depth + 1) for item in value.values()])

    def _tensor(self, tensor: torch.Tensor) -> Any:
        if tensor.layout != torch.strided or not tensor.is_cpu or tensor.is_quantized or tensor.__dict__:
            raise NotCompact
        grad = tensor.requires_grad
        if grad and self._tracked is not None:
            self._tracked.append(tensor)
        head = (_CODES[tensor.dtype], tuple(tensor.shape), grad)
        if tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg():
            return _TENSOR, self._raw(tensor), *head
        row, strides = laid_out(tensor.detach().resolve_conj().resolve_neg())
        return _TENSOR, self._raw(row), *head, strides

    def _raw(self, flat: torch.Tensor) -> Any:
        """The bytes of a tensor, or the number of the buffer that has them."""
        if flat.nbytes <= INLINE:
            return ctypes.string_at(flat.data_ptr(), flat.nbytes) if flat.nbytes else b""
        self.buffers.append(bytes_of(flat))
        return len(self.buffers) - 1


class Reader:
    """Reads one value. `tensor` finishes each tensor, told whether it requires a gradient."""

    __slots__ = ("_buffers", "_finish", "_seen")

    def __init__(self, buffers: Sequence[Buffer], tensor: Callable[[torch.Tensor, bool], torch.Tensor]):
        self._buffers, self._finish = buffers, tensor
        self._seen: list[Any] = []

    def value(self, form: Any) -> Any:
        """The value of a short form."""
        if type(form) is not tuple:
            return form
        kind = form[0]
        if kind == _TUPLE:
            return tuple([item if type(item) is not tuple else self.value(item) for item in form[1:]])
        if kind == _OTHER:
            return _readers[form[1]](form[2])
        if kind == _TENSOR:
            return self._tensor(*form[1:])
        if kind == _AGAIN:
            return self._seen[form[1]]
        if kind in (_LIST, _DICT):
            return self._container(kind, form[1:])
        return {} if kind == _EMPTY_DICT else named(form[1], form[2])

    def _container(self, kind: int, items: Sequence[Any]) -> Any:
        made: Any = [] if kind == _LIST else {}
        self._seen.append(made)  # before what is in it, as it was written
        if kind == _LIST:
            made.extend([self.value(item) for item in items])
        else:
            count = len(items) // 2
            made.update(zip(items[:count], [self.value(item) for item in items[count:]], strict=True))
        return made

    def _tensor(
        self, raw: Any, code: int, shape: tuple[int, ...], grad: bool, strides: tuple[int, ...] | None = None
    ) -> torch.Tensor:
        if type(raw) is int:
            made = as_tensor(self._buffers[raw], DTYPES[code], shape, strides)
        elif strides is not None:
            made = as_tensor(bytearray(raw), DTYPES[code], shape, strides)
        else:
            made = torch.empty(shape, dtype=DTYPES[code])
            ctypes.memmove(made.data_ptr(), raw, len(raw))
        made = self._finish(made, grad) if grad else made
        self._seen.append(made)
        return made


def laid_out(tensor: torch.Tensor) -> tuple[torch.Tensor, tuple[int, ...] | None]:
    """The memory that a tensor covers, as a row, and its strides there; None for those of a contiguous one.

    Where half of much memory, or more, is not the tensor's, the row is a copy of its elements alone.
    """
    if tensor.is_contiguous():
        return tensor, None
    strides = tensor.stride()
    covered = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, strides, strict=True))
    if covered * tensor.itemsize >= _MUCH and covered >= 2 * tensor.numel():
        return tensor.contiguous(), None
    return tensor.as_strided((covered,), (1,)), strides


def as_tensor(
    memory: Buffer, dtype: torch.dtype, shape: Sequence[int], strides: Sequence[int] | None = None
) -> torch.Tensor:
    """A tensor over memory that can be written. strides: those in it, None for a contiguous tensor."""
    if not len(memory):
        return torch.empty(shape, dtype=dtype)
    row = torch.frombuffer(memory, dtype=dtype)
    return row.view(shape) if strides is None else row.as_strided(shape, strides)


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """The memory of a contiguous CPU tensor, kept alive by the view. torch's own way needs NumPy."""
    memory = (ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr())
    vars(memory)["tensor"] = tensor
    return memoryview(memory).cast("B")


def named(module: str, name: str) -> Any:
    """What a module has under a name, or a path of names; it is imported if it is not."""
    found: Any = sys.modules.get(module)
    if found is None or getattr(getattr(found, "__spec__", None), "_initializing", False):
        found = importlib.import_module(module)  # which waits for another thread that imports it
    for part in name.split("."):
        found = getattr(found, part)
    return found
