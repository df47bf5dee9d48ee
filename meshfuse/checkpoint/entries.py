"""What `save` and `load` take for each name: a tensor, a shard with its sharding, a DTensor or a plain value."""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..definition.checks import mesh_of_torch
from ..definition.tensor_view import TensorView
from ..errors import ArgumentError, MeshfuseError, caller_line, shown, user_error
from ..executor.dtensor import is_dtensor, sharding_of
from ..mesh import DeviceMesh
from ..runtime.world import World
from ..sharding import layout as lay
from ..sharding.value import Sharding

_PLAIN = (int, float, str, bool, type(None))
# Longer ones than Python writes as text, which has at least so many bits.
_LONGEST_INT = 14_000
# Dtypes of which torch has the name and the size, and no numbers.
_NAMES_ALONE = re.compile(r"torch\.(bits\w+|u?int[1-7])")


@dataclass(frozen=True, slots=True)
class CheckpointEntry:
    """A tensor of a checkpoint, on this rank.

    sharding: None where every rank holds all of it.
    local: this rank's part; None where it has none.
    shape: the global shape; None until the ranks have compared their shards' shapes.
    """

    name: str
    local: torch.Tensor | None
    sharding: Sharding | TensorView | None
    shape: tuple[int, ...] | None

    def placed(self, shape: tuple[int, ...]) -> Sharding | None:
        """The sharding, for a global shape. Raises ArgumentError where it does not fit."""
        if isinstance(self.sharding, TensorView):
            return _annotated(self.name, self.sharding, shape)
        if self.sharding is not None and self.sharding.ndim != len(shape):
            raise wrong(self.name, f"a sharding of {self.sharding.ndim} dims", f"{len(shape)}, as the tensor has")
        if self.sharding is not None and self.sharding.partial:
            raise wrong(self.name, f"unreduced sums, {self.sharding}", "a tensor that is reduced")
        return None if self.sharding is None else self.sharding.placement(shape)


def wrong(name: str, found: str, needed: str, do: str = "") -> MeshfuseError:
    """The error of an entry that cannot be saved or loaded."""
    return user_error(f"checkpoint: {name!r}", found, needed, do, cls=ArgumentError)


def as_python(value: Any) -> Any:
    """Python's number for one of numpy's; any other value as it is."""
    numpy = sys.modules.get("numpy")
    return value.item() if numpy is not None and isinstance(value, numpy.generic) and is_plain(value.item()) else value


def is_plain(value: Any) -> bool:
    """Whether a value is stored as it is, and not as a tensor."""
    return isinstance(value, _PLAIN) and not _is_too_long(value)


def _is_too_long(value: Any) -> bool:
    return isinstance(value, int) and value.bit_length() > _LONGEST_INT


def to_save(name: str, value: Any) -> CheckpointEntry:
    """The entry for what the user passes to `save` under a name; plain values have none."""
    if is_dtensor(value):
        return _of_dtensor(name, value)
    if isinstance(value, torch.Tensor):
        return CheckpointEntry(name, _dense(name, value), None, tuple(value.shape))
    if _is_pair(value):
        local, sharding, *shape = value
        given = _sizes(name, shape[0]) if shape else None
        return CheckpointEntry(name, None if local is None else _dense(name, local), sharding, given)
    if _is_too_long(value):
        raise wrong(name, f"an int of {value.bit_length()} bits", f"one of {_LONGEST_INT} at most", "Save it in parts.")
    raise wrong(
        name, type(value).__name__, "a tensor, a DTensor, (shard, sharding), (shard, sharding, global shape), or a "
        "number, text or None", "Pass one of these.",
    )  # fmt: skip


def _dense(name: str, tensor: torch.Tensor) -> torch.Tensor:
    """The tensor without gradient and class. Raises ArgumentError unless its elements are in memory, with strides."""
    if tensor.is_nested or tensor.layout != torch.strided or tensor.is_meta:
        found = "a nested tensor" if tensor.is_nested else "a meta tensor" if tensor.is_meta else str(tensor.layout)
        raise wrong(name, found, "a dense tensor with its elements", "Convert it, with t.to_dense() for one.")
    if _NAMES_ALONE.fullmatch(str(tensor.dtype)):
        raise wrong(name, f"a tensor of {tensor.dtype}", "a dtype with numbers", "Save its bytes: t.view(torch.uint8).")
    if tensor.is_quantized:  # torch writes, and cannot read, its elements without their scale
        raise wrong(name, f"a quantized tensor, {tensor.dtype}", "a tensor of numbers", "Save t.dequantize().")
    if tensor.numel() and not tensor.untyped_storage().nbytes():  # such as a weight that FSDP has put away
        raise wrong(
            name, "a storage of 0 bytes, freed by its owner", "a tensor with memory", "Pass it while it is there."
        )
    return tensor.detach().as_subclass(torch.Tensor)


def _sizes(name: str, shape: Any) -> tuple[int, ...]:
    listed = isinstance(shape, (list, tuple)) and all(isinstance(n, int) and n >= 0 for n in shape)
    if not listed:
        raise wrong(name, f"{shown(shape)} as the global shape", "a list of sizes", "Pass (shard, sharding, [8, 16]).")
    return tuple(shape)


def _is_pair(value: Any) -> bool:
    if not isinstance(value, (tuple, list)) or len(value) not in (2, 3):
        return False
    local, sharding = value[:2]
    return (local is None or isinstance(local, torch.Tensor)) and isinstance(sharding, (Sharding, TensorView))


def _of_dtensor(name: str, value: Any) -> CheckpointEntry:
    shape = tuple(value.shape)
    World.current().check_number(caller_line())
    sharding = sharding_of(mesh_of_torch(value.device_mesh), tuple(value.placements), shape)
    if sharding is None or sharding.partial:
        raise wrong(
            name, f"a DTensor with placements {tuple(value.placements)}", "Shard and Replicate", "Redistribute it."
        )
    return CheckpointEntry(name, value.to_local().detach(), sharding, shape)


def to_load(name: str, wanted: Any, dtype: torch.dtype, shape: tuple[int, ...], rank: int) -> CheckpointEntry:
    """The entry for what the user asks `load` for under a name, with memory to load into.

    `dtype` and `shape` are those stored.
    """
    if wanted is None or isinstance(wanted, (Sharding, TensorView)):
        entry = CheckpointEntry(name, None, wanted, shape)
        sharding = entry.placed(shape)
        if sharding is not None and rank not in sharding.mesh:
            return entry
        local = shape if sharding is None else sharding.local_shape(shape, rank)
        return CheckpointEntry(name, torch.empty(local, dtype=dtype), wanted, shape)
    if not (isinstance(wanted, torch.Tensor) or _is_pair(wanted)):
        raise wrong(
            name, type(wanted).__name__, "a tensor, a DTensor or (shard, sharding) to load to, a Sharding or an "
            "annotated TensorView for this rank's shard, or None for the whole tensor", "Ask for one of these.",
        )  # fmt: skip
    entry = to_save(name, wanted)
    if entry.local is not None and entry.local.dtype != dtype:
        raise wrong(
            name,
            f"{dtype} in the checkpoint",
            f"{entry.local.dtype}, as the tensor to load to",
            "Cast it after loading.",
        )
    if entry.local is not None and _shares(entry.local):
        raise wrong(
            name, "elements that share memory", "memory of its own for each", "Pass t.contiguous(), or a new tensor."
        )
    if entry.shape not in (None, shape):
        raise wrong(
            name, f"shape {list(shape)} in the checkpoint", f"{list(entry.shape or ())}, as the tensor to load to"
        )
    return CheckpointEntry(name, entry.local, entry.sharding, shape)


def _shares(tensor: torch.Tensor) -> bool:
    """Whether two elements may share memory: what is loaded into one would overwrite the other."""
    end = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1 and stride < end:
            return tensor.numel() > 0
        end += (size - 1) * stride
    return False


def check_local(entry: CheckpointEntry, shape: tuple[int, ...], rank: int) -> None:
    """Raises ArgumentError where this rank's shard does not have the shape that its sharding gives it."""
    sharding = entry.placed(shape)
    needed = shape if sharding is None else sharding.local_shape(shape, rank)
    outside = sharding is not None and rank not in sharding.mesh
    found = None if entry.local is None else tuple(entry.local.shape)
    if outside or found == needed:
        return
    what = f"{sharding} of {list(shape)}" if sharding is not None else "all of the tensor"
    raise wrong(entry.name, "no shard" if found is None else f"a shard of shape {list(found)} on rank {rank}",
                f"{list(needed)}: {what}", "Pass this rank's shard.")  # fmt: skip


def global_shape(entry: CheckpointEntry, shards: Mapping[int, Sequence[int] | None]) -> tuple[int, ...]:
    """A tensor's global shape, from the shapes of its shards on every rank: each index is in one chunk."""
    mesh, dims = _layouts(entry)
    held = {rank: s for rank, s in shards.items() if s is not None and (mesh is None or rank in mesh)}
    if not held or any(len(s) != len(dims) for s in held.values()):
        found = f"shards of shapes {[list(s) for s in held.values()]}"
        raise wrong(entry.name, found, f"shards of {len(dims)} dims, one on every rank of the mesh")
    if mesh is None:
        return tuple(next(iter(held.values())))
    chunks = [{lay.digits(layout, mesh, rank): s[d] for rank, s in held.items()} for d, layout in enumerate(dims)]
    return tuple(sum(sizes.values()) for sizes in chunks)


def _layouts(entry: CheckpointEntry) -> tuple[DeviceMesh | None, Sequence[lay.Layout]]:
    if isinstance(entry.sharding, Sharding):
        return entry.sharding.mesh, entry.sharding.dims
    assert entry.sharding is not None
    annotation = entry.sharding.fd.recording.placed(entry.sharding.id)
    if annotation is None or annotation.mesh is None:
        return None, [lay.WHOLE] * entry.sharding.ndim
    return annotation.mesh, annotation.named()


def _annotated(name: str, view: TensorView, shape: tuple[int, ...]) -> Sharding | None:
    """The sharding of a tensor view for a tensor of this shape. Raises ArgumentError where the view has other sizes."""
    known = view.type.shape
    if len(known) != len(shape):
        raise wrong(name, f"{shown(view)}", f"a tensor view of {len(shape)} dims, as the tensor has")
    if any(n not in (-1, m) for n, m in zip(known, shape, strict=True)):
        raise wrong(
            name, f"a tensor of global shape {list(shape)}", f"{list(known)}, as {view.label} has",
            "Save this rank's shard, such as mf.shard_tensor(t, view), and load to a view of the saved size.",
        )  # fmt: skip
    annotation = view.fd.recording.placed(view.id)
    if annotation is None or annotation.mesh is None:
        return None
    return annotation.sharding(view.label, shape).placement(shape)
