"""Objects as bytes: tensors apart from the rest, and functions that no module has by value.

Pickle protocol 5 leaves a tensor's bytes where they are; they travel beside the payload as raw bytes with their dtype
and shape. So every dtype of torch can be sent, float8 as well.
"""

from __future__ import annotations

import io
import marshal
import pickle
import threading
import types
from collections.abc import Sequence
from typing import Any

import torch

from .compact import INLINE, Buffer, NotCompact, Reader, Writer, as_tensor, bytes_of, laid_out, named
from .functions import is_importable, reduce_function


class _Tracking(threading.local):
    """Tensors that require a gradient, as a thread writes or reads them; None where nobody asks."""

    sent: list[torch.Tensor] | None = None
    received: list[torch.Tensor] | None = None


_tracking = _Tracking()


class Tracked:
    """A context that collects the tensors that require a gradient, in the order in which they are written or read.

    Those that are read are then no leaves: they follow from the collected ones, whose gradients somebody else wants.
    """

    def __init__(self, writing: bool):
        self.tensors: list[torch.Tensor] = []
        self._name = "sent" if writing else "received"

    def __enter__(self) -> Tracked:
        setattr(_tracking, self._name, self.tensors)
        return self

    def __exit__(self, *_: object) -> None:
        setattr(_tracking, self._name, None)


class _Received(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, leaf: torch.Tensor) -> torch.Tensor:
        return leaf.detach()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0]


_SCRIPTED = (torch.jit.ScriptFunction, torch.jit.ScriptModule)


class _Pickler(pickle.Pickler):
    main_is_shared = False

    def reducer_override(self, obj: Any) -> Any:
        kind = type(obj)
        if kind is torch.Tensor or kind is torch.nn.Parameter:
            return _reduce_tensor(obj)
        if kind is types.FunctionType and not is_importable(obj, self.main_is_shared):
            return reduce_function(obj, self.main_is_shared)
        if isinstance(obj, _SCRIPTED):
            return _reduce_script(obj)
        return NotImplemented


class _SameScript(_Pickler):
    main_is_shared = True


def dumps(value: Any, main_is_shared: bool = False) -> tuple[bytes, list[memoryview]]:
    """A value as a payload, and the raw bytes of its large tensors: views of their memory.

    main_is_shared: the reader runs the same script, so functions of it go by their names.
    """
    tracked = _tracking.sent
    writer, before = Writer(main_is_shared, tracked), len(tracked or ())
    try:
        return b"m" + marshal.dumps(writer.form(value)), writer.buffers
    except NotCompact:
        if tracked is not None:
            del tracked[before:]
        return _pickled(value, main_is_shared)


def _pickled(value: Any, main_is_shared: bool) -> tuple[bytes, list[memoryview]]:
    buffers: list[memoryview] = []

    def keep(buffer: pickle.PickleBuffer) -> bool:
        raw = buffer.raw()
        if raw.nbytes <= INLINE:
            return True
        buffers.append(raw)
        return False

    file = io.BytesIO()
    file.write(b"p")
    (_SameScript if main_is_shared else _Pickler)(file, 5, buffer_callback=keep).dump(value)
    return file.getvalue(), buffers


def loads(payload: Buffer, buffers: Sequence[Buffer] = ()) -> Any:
    """The value; its tensors use the memory of `buffers`, which must be writable and nobody else's."""
    body = memoryview(payload)[1:]
    if payload[:1] == b"p":
        return pickle.loads(body, buffers=buffers)
    return Reader(buffers, _finished).value(marshal.loads(body))


def _finished(made: torch.Tensor, requires_grad: bool) -> torch.Tensor:
    """A tensor that has been read: one that requires a gradient is collected where somebody asks."""
    if _tracking.received is not None and requires_grad:
        _tracking.received.append(made.requires_grad_())
        # No view: what is read may be changed in place. To copy what is small is quicker than a function in Python.
        is_small = made.layout == torch.strided and made.nbytes <= INLINE
        return made.clone() if is_small else _Received.apply(made)
    return made.requires_grad_(requires_grad)


def copies(buffers: Sequence[Buffer]) -> list[Buffer]:
    """Memory of the receiver's own, where it is in the same process."""
    out = []
    for buffer in buffers:
        # torch copies with all cores and does not clear the memory first.
        copy = torch.empty(memoryview(buffer).nbytes, dtype=torch.uint8)
        copy.copy_(torch.frombuffer(buffer, dtype=torch.uint8))
        out.append(bytes_of(copy))
    return out


def _reduce_tensor(tensor: torch.Tensor) -> Any:
    data = tensor.detach()
    kind = (type(tensor) is torch.nn.Parameter, tensor.requires_grad)
    by_torch = data.layout != torch.strided or data.is_quantized or data.is_meta
    if by_torch and not any(kind):
        return NotImplemented  # torch's own pickle, inside of the payload
    if _tracking.sent is not None and tensor.requires_grad:
        _tracking.sent.append(tensor)
        kind = (False, True)
    if by_torch:
        return _as_kind, (data, kind)
    row, strides = laid_out(data.resolve_conj().resolve_neg().to("cpu"))
    device = None if tensor.is_cpu else str(tensor.device)
    raw = pickle.PickleBuffer(bytes_of(row)) if row.nbytes else b""
    return _tensor, (raw, tensor.dtype, tuple(tensor.shape), device, kind, strides)


def _tensor(
    raw: Any, dtype: torch.dtype, shape: tuple[int, ...], device: str | None, kind: tuple[bool, bool],
    strides: tuple[int, ...] | None,
) -> torch.Tensor:  # fmt: skip
    made = as_tensor(bytearray(raw) if isinstance(raw, bytes) else raw, dtype, shape, strides)
    return _as_kind(made if device is None else made.to(device), kind)


def _as_kind(made: torch.Tensor, kind: tuple[bool, bool]) -> torch.Tensor:
    """A tensor that has been read, as the one that was sent: whether it is a parameter, and requires a gradient."""
    is_parameter, requires_grad = kind
    return torch.nn.Parameter(made, requires_grad) if is_parameter else _finished(made, requires_grad)


def _reduce_script(scripted: Any) -> Any:
    """TorchScript: a function that the other side has in the same module goes by its name, else by value."""
    source = getattr(scripted, "_torchdynamo_inline", None)  # the function that was compiled
    if source is not None and is_importable(source, of=scripted):
        return named, (source.__module__, source.__qualname__)
    file = io.BytesIO()
    torch.jit.save(scripted, file)
    return _load_script, (file.getvalue(),)


def _load_script(saved: bytes) -> Any:
    return torch.jit.load(io.BytesIO(saved))
