"""Checking a call's arguments against a definition, and the shapes that a plan is made for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from .definition.fusion import DefinitionBuilder, TensorDef
from .errors import ArgumentError, user_error
from .ops.base import TensorRef
from .sharding.layout import Layout, extent
from .sharding.value import Sharding

Key = tuple[tuple[int, ...] | object, ...]


@dataclass(frozen=True, slots=True)
class Inputs:
    """A call's arguments split into tensors and scalars, by their numbers in the definition."""

    tensors: Mapping[int, torch.Tensor]
    scalars: Mapping[int, Any]
    device: torch.device


def split_arguments(fd: DefinitionBuilder, arguments: Sequence[Any], line: Any = None) -> Inputs:
    """The arguments by number. Raises ArgumentError for a wrong count, kind, dtype, number of dims or mixed devices."""
    if len(arguments) != len(fd.inputs):
        raise user_error(
            "wrong number of arguments", str(len(arguments)), f"{len(fd.inputs)}: {_signature(fd)}",
            "Pass one argument per define_tensor and define_scalar, in their order.", line, ArgumentError,
        )  # fmt: skip
    tensors: dict[int, torch.Tensor] = {}
    scalars: dict[int, Any] = {}
    for place, (ref, value) in enumerate(zip(fd.inputs, arguments, strict=True)):
        if isinstance(ref, TensorRef):
            tensors[ref.id] = _checked_tensor(fd, place, fd.tensors[ref.id], value, line)
        else:
            scalars[ref.id] = _checked_scalar(fd, place, ref.id, value, line)
    return Inputs(tensors, scalars, _device(fd, tensors, line))


def _signature(fd: DefinitionBuilder) -> str:
    names = [fd.tensors[r.id].name if isinstance(r, TensorRef) else f"s{r.id}" for r in fd.inputs]
    return f"({', '.join(names)})"


def _checked_tensor(
    fd: DefinitionBuilder, place: int, made: TensorDef, value: Any, line: Any
) -> torch.Tensor:
    name = f"argument {place} ({made.name}, defined at {made.line})"
    if not isinstance(value, torch.Tensor):
        raise user_error(
            name, f"{type(value).__name__}", "a torch tensor", "Pass a tensor.", line, ArgumentError
        )
    wanted = made.type.dtype.value
    if str(value.dtype) != f"torch.{wanted}":
        raise user_error(
            f"{name} has the wrong dtype", str(value.dtype), f"torch.{wanted}", f"Convert it: t.to(torch.{wanted}).",
            line, ArgumentError,
        )  # fmt: skip
    if value.dim() != made.type.ndim:
        raise user_error(
            f"{name} has the wrong number of dims", f"shape {list(value.shape)}", f"{made.type.ndim} dims, {made.type}",
            "Reshape the argument or define the tensor with its dims.", line, ArgumentError,
        )  # fmt: skip
    _check_strides(name, made, value, line)
    return value


def _check_strides(name: str, made: TensorDef, value: torch.Tensor, line: Any) -> None:
    """A definition that names a stride order means it: kernels are made for it."""
    if made.stride_order is None or value.numel() == 0:
        return
    sizes_strides = [
        (made.stride_order[d], value.stride(d)) for d in range(value.dim()) if value.shape[d] > 1
    ]
    strides = [stride for _, stride in sorted(sizes_strides)]
    if strides != sorted(strides):
        raise user_error(
            f"{name} has the wrong stride order", f"strides {list(value.stride())}",
            f"stride order {list(made.stride_order)} (0 is the fastest dim)",
            "Pass a tensor laid out so, or define it without stride_order.", line, ArgumentError,
        )  # fmt: skip


def _checked_scalar(fd: DefinitionBuilder, place: int, number: int, value: Any, line: Any) -> Any:
    if isinstance(value, torch.Tensor) and value.dim() == 0:
        value = value.item()
    if not isinstance(value, (bool, int, float, complex)):
        raise user_error(
            f"argument {place} (scalar s{number})", type(value).__name__, fd.scalars[number].dtype.name,
            "Pass a Python number.", line, ArgumentError,
        )  # fmt: skip
    return value


def _device(fd: DefinitionBuilder, tensors: Mapping[int, torch.Tensor], line: Any) -> torch.device:
    devices = {str(t.device) for t in tensors.values()}
    if len(devices) > 1:
        raise user_error(
            "arguments on different devices", ", ".join(sorted(devices)), "one device", "Move them to one device.", line,
            ArgumentError,
        )  # fmt: skip
    return next((t.device for t in tensors.values()), torch.device("cpu"))


def check_global_shapes(
    fd: DefinitionBuilder, inputs: Inputs, line: Any = None
) -> dict[int, tuple[int, ...]]:
    """The shapes of global arguments. Raises ArgumentError where one differs from a size that is fixed."""
    for i, tensor in inputs.tensors.items():
        wanted = fd.tensors[i].type.shape
        if any(n not in (-1, m) for n, m in zip(wanted, tensor.shape, strict=True)):
            raise _wrong_shape(fd, i, tensor, str(list(wanted)), "global", line)
    return {i: tuple(t.shape) for i, t in inputs.tensors.items()}


def _wrong_shape(
    fd: DefinitionBuilder, i: int, tensor: torch.Tensor, needed: str, which: str, line: Any
) -> Exception:
    made = fd.tensors[i]
    return user_error(
        f"tensor {made.name} (defined at {made.line}) has the wrong {which} shape", str(list(tensor.shape)), needed,
        "Pass the rank's shard (mf.shard_tensor cuts it) to execute, the whole tensor to simulate.", line, ArgumentError,
    )  # fmt: skip


def global_shapes(
    fd: DefinitionBuilder,
    inputs: Inputs,
    rank: int,
    globals_: Mapping[int, tuple[int, ...]],
    line: Any = None,
) -> dict[int, tuple[int, ...]]:
    """The global shapes that local arguments mean: fixed sizes as defined, open ones as even shards make them up.

    `globals_` are shapes known otherwise (of DTensors). Raises ArgumentError where a shard is not of its shape.
    """
    out: dict[int, tuple[int, ...]] = {}
    for i, tensor in inputs.tensors.items():
        annotation = fd.annotations.get(i)
        wanted = fd.tensors[i].type.shape
        if i in globals_:
            out[i] = globals_[i]
        elif annotation is None:
            out[i] = tuple(tensor.shape)
        else:
            layouts = annotation.domain.layouts()
            sizes = zip(wanted, tensor.shape, annotation.named_layouts(layouts), strict=True)
            out[i] = tuple(n if n >= 0 else local * _ways(layout) for n, local, layout in sizes)
        _check_shard(fd, i, tensor, out[i], rank, line)
    return out


def _ways(layout: Layout) -> int:
    return extent(tuple(split for split in layout if split.bound))


def _check_shard(
    fd: DefinitionBuilder, i: int, tensor: torch.Tensor, shape: tuple[int, ...], rank: int, line: Any
) -> None:
    wanted, annotation = fd.tensors[i].type.shape, fd.annotations.get(i)
    if any(n not in (-1, m) for n, m in zip(wanted, shape, strict=True)):
        raise _wrong_shape(fd, i, tensor, str(list(wanted)), "global", line)
    if annotation is None or rank not in annotation.mesh:
        return
    sharding: Sharding = annotation.sharding(fd.tensors[i].name, shape)
    local = sharding.local_shape(shape, rank)
    if tuple(tensor.shape) != local:
        raise _wrong_shape(
            fd, i, tensor, f"{list(local)}, rank {rank}'s shard of {list(shape)} in {sharding}", "local", line
        )
