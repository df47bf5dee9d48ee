"""Objects as bytes: tensors apart from the rest, and functions that no module has by value.

Pickle protocol 5 leaves a tensor's bytes where they are; they travel beside the payload as raw bytes with their dtype
and shape. So every dtype of torch can be sent, float8 as well.
"""

from __future__ import annotations

import ctypes
import io
import marshal
import pickle
import types
from collections.abc import Callable, Sequence
from typing import Any

import torch

from .functions import is_importable, reduce_function

Buffer = Any  # bytes, bytearray or memoryview
# Up to so many bytes of a tensor are copied into the payload.
_INLINE = 2048
_PLAIN = {int, float, bool, str, bytes, type(None), complex}


class _Pickler(pickle.Pickler):
    def reducer_override(self, obj: Any) -> Any:
        kind = type(obj)
        if kind is torch.Tensor or kind is torch.nn.Parameter:
            return _reduce_tensor(obj)
        if kind is types.FunctionType and not is_importable(obj):
            return reduce_function(obj)
        return NotImplemented


def dumps(value: Any) -> tuple[bytes, list[memoryview]]:
    """A value as a payload, and the raw bytes of its large tensors: views of their memory."""
    buffers: list[memoryview] = []

    def keep(buffer: pickle.PickleBuffer) -> bool:
        raw = buffer.raw()
        if raw.nbytes <= _INLINE:
            return True
        buffers.append(raw)
        return False

    file = io.BytesIO()
    _Pickler(file, 5, buffer_callback=keep).dump(value)
    return file.getvalue(), buffers


def dumps_call(
    function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: int, registers: type
) -> tuple[bytes, list[memoryview]]:
    """A call as bytes. `registers` is the class of references to registers, which have a `number`.

    Calls of a register with plain arguments are marshalled, which takes a tenth of pickle's time.
    """
    if type(function) is registers and not kwargs:
        kinds = set(map(type, args))
        if kinds <= _PLAIN:
            function.check()
            return b"m" + marshal.dumps((function.number, args, (), result)), []
        if kinds <= _PLAIN | {registers}:
            places = tuple(i for i, value in enumerate(args) if type(value) is registers)
            for value in (function, *(args[i] for i in places)):
                value.check()
            plain = tuple(value.number if type(value) is registers else value for value in args)
            return b"m" + marshal.dumps((function.number, plain, places, result)), []
    payload, buffers = dumps((function, args, kwargs, result))
    return b"p" + payload, buffers


def loads_call(
    payload: Buffer, buffers: Sequence[Buffer], register: Callable[[int], Any]
) -> tuple[Any, Sequence[Any], dict[str, Any], int]:
    """Function, arguments, keyword arguments and the register for the result."""
    if payload[:1] == b"p":
        return pickle.loads(memoryview(payload)[1:], buffers=buffers)
    number, args, places, result = marshal.loads(memoryview(payload)[1:])
    if places:
        args = [register(value) if i in places else value for i, value in enumerate(args)]
    return register(number), args, {}, result


def loads(payload: Buffer, buffers: Sequence[Buffer] = ()) -> Any:
    """The value; its tensors use the memory of `buffers`, which must be writable and nobody else's."""
    return pickle.loads(payload, buffers=buffers)


def copies(buffers: Sequence[Buffer]) -> list[Buffer]:
    """Memory of the receiver's own, where it is in the same process."""
    out = []
    for buffer in buffers:
        # torch copies with all cores and does not clear the memory first.
        copy = torch.empty(memoryview(buffer).nbytes, dtype=torch.uint8)
        copy.copy_(torch.frombuffer(buffer, dtype=torch.uint8))
        out.append(bytes_of(copy))
    return out


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """The memory of a contiguous CPU tensor, kept alive by the view. torch's own way needs NumPy."""
    memory = (ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr())
    memory.__dict__["tensor"] = tensor
    return memoryview(memory).cast("B")


def _reduce_tensor(tensor: torch.Tensor) -> Any:
    data = tensor.detach()
    if data.layout != torch.strided or data.is_quantized or data.is_meta:
        return NotImplemented  # torch's own pickle, inside of the payload
    flat = data.resolve_conj().resolve_neg().to("cpu").contiguous().view(-1)
    device = None if tensor.is_cpu else str(tensor.device)
    kind = (type(tensor) is torch.nn.Parameter, tensor.requires_grad)
    raw = pickle.PickleBuffer(bytes_of(flat)) if flat.nbytes else b""
    return _tensor, (raw, tensor.dtype, tuple(tensor.shape), device, kind)


def _tensor(
    raw: Any, dtype: torch.dtype, shape: tuple[int, ...], device: str | None, kind: tuple[bool, bool]
) -> torch.Tensor:
    if len(raw):
        flat = torch.frombuffer(bytearray(raw) if isinstance(raw, bytes) else raw, dtype=torch.uint8)
        made = flat.view(dtype).view(shape)
    else:
        made = torch.empty(shape, dtype=dtype)
    if device is not None:
        made = made.to(device)
    is_parameter, requires_grad = kind
    return torch.nn.Parameter(made, requires_grad) if is_parameter else made.requires_grad_(requires_grad)
