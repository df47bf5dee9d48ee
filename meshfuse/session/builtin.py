"""What sessions have their workers run: functions by name, tensors, modules. Each runs on every worker."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Any

import torch

from ..errors import ArgumentError, shown, user_error
from .executor import current
from .registry import lookup, register_global_func


def get_function(name: str, module: str | None) -> Any:
    """The registered function of that name."""
    return lookup(name, module)


def define_function(name: str, function: Any) -> Any:
    """Register a function that no module has."""
    return register_global_func(name, function)


def import_module(name: str) -> None:
    """Import a module, which registers its functions."""
    importlib.import_module(name)


def constant(value: Any) -> Any:
    """The value, as a register."""
    return value


def empty(
    shape: Sequence[int], dtype: torch.dtype, device: str | None, worker0_only: bool, in_group: bool
) -> torch.Tensor | None:
    """A tensor of any content; None on workers other than the first, if it is for that alone."""
    worker = current()
    place = worker.worker % worker.group_size if in_group else worker.worker
    if worker0_only and place:
        return None
    return torch.empty(tuple(shape), dtype=dtype, device=device)


def fill(number: int, value: Any) -> None:
    """Put a value into a register; a tensor is copied into the tensor that is there, if it has as many elements."""
    registers = current().registers
    there = registers.get(number)
    if isinstance(there, torch.Tensor) and isinstance(value, torch.Tensor):
        if there.numel() != value.numel():
            raise user_error(
                "a tensor does not fit the one that it is copied into", f"shape {list(value.shape)}",
                f"shape {list(there.shape)}, or another one of {there.numel()} elements", "", cls=ArgumentError,
            )  # fmt: skip
        with torch.no_grad():
            there.copy_(value.reshape(there.shape))
    else:
        registers[number] = value


def backward(value: torch.Tensor, gradient: torch.Tensor | None) -> None:
    """torch's backward pass from this worker's tensor."""
    if not isinstance(value, torch.Tensor):
        raise user_error("backward", shown(value), "a tensor in the DRef", "", cls=ArgumentError)
    value.backward(gradient)


def as_dtype(dtype: Any) -> torch.dtype:
    """torch's dtype, from itself or a name such as "float32". ArgumentError for others."""
    found = getattr(torch, dtype, None) if isinstance(dtype, str) else dtype
    if not isinstance(found, torch.dtype):
        raise user_error("no dtype", shown(dtype), "a dtype of torch or its name", "", cls=ArgumentError)
    return found


def worker_id() -> int:
    """The number of the worker that runs the calling function."""
    return current().worker


def num_workers() -> int:
    """How many workers the session has that runs the calling function."""
    return current().size


def group_id() -> int:
    """The group of the worker that runs the calling function."""
    return current().worker // current().group_size


def device() -> torch.device:
    """Where the calling worker's tensors are by default."""
    return torch.empty(0).device


for _function in (worker_id, num_workers, group_id, device):
    register_global_func(f"runtime.disco.{_function.__name__}", _function)
register_global_func("runtime.disco.worker_rank", worker_id)
