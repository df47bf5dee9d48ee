"""DTensors in, DTensors out: torch's placements in terms of shardings, and back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ..compiler import CompiledProgram
from ..definition.fusion import DefinitionBuilder, mesh_of_torch
from ..errors import ArgumentError, caller_line, user_error
from ..ops.base import TensorRef
from ..sharding.layout import Layout, Split
from ..sharding.value import Sharding


def is_dtensor(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and hasattr(value, "placements") and hasattr(value, "to_local")


def local_parts(inputs: Sequence[Any]) -> list[Any]:
    """The rank's own tensors of the inputs."""
    return [value.to_local() if is_dtensor(value) else value for value in inputs]


def dtensor_shapes(fd: DefinitionBuilder, inputs: Sequence[Any]) -> dict[int, tuple[int, ...]]:
    """The global shapes of DTensor inputs. Raises ArgumentError where placements are not what was annotated."""
    found = {}
    for ref, value in zip(fd.inputs, inputs, strict=False):
        if isinstance(ref, TensorRef) and is_dtensor(value):
            found[ref.id] = tuple(value.shape)
            _check_placements(fd, ref.id, value)
    return found


def _check_placements(fd: DefinitionBuilder, tensor: int, value: Any) -> None:
    annotation = fd.annotations.get(tensor)
    shape = tuple(value.shape)
    mesh = mesh_of_torch(value.device_mesh)
    if annotation is None:
        wanted = Sharding.replicated(mesh, len(shape))
    else:
        wanted = annotation.sharding(fd.tensors[tensor].name, shape).placement(shape)
    if annotation is not None and wanted.mesh.ranks != mesh.ranks or placements_of(wanted, shape) != tuple(value.placements):
        raise user_error(
            f"tensor {fd.tensors[tensor].name} (defined at {fd.tensors[tensor].line}) is passed with other placements",
            str(value.placements), str(wanted), "Redistribute the DTensor, or annotate the tensor so.", caller_line(),
            ArgumentError,
        )  # fmt: skip


def placements_of(sharding: Sharding, shape: Sequence[int]) -> tuple[Any, ...] | None:
    """torch's placements, one per mesh axis; None where placements cannot say it (inner splits, sub-axes, other orders)."""
    from torch.distributed.tensor import Replicate, Shard

    placements: list[Any] = [Replicate() for _ in sharding.mesh.names]
    for dim, layout in enumerate(sharding.dims):
        if not _says_chunks(sharding, layout, shape[dim]):
            return None
        for split in layout:
            assert split.axis is not None
            placements[sharding.mesh.names.index(split.axis)] = Shard(dim)
    return tuple(placements) if not sharding.partial else None


def _says_chunks(sharding: Sharding, layout: Layout, n: int) -> bool:
    """True for whole axes in mesh order, outermost, cut as `torch.chunk` cuts."""
    names = sharding.mesh.names
    whole = all(s.bound and s.size == sharding.mesh.axis_size(s.axis or "") for s in layout)
    places = [names.index(s.axis) for s in layout if s.axis in names]
    even = len(layout) < 2 or n % _product(layout) == 0
    return whole and places == sorted(places) and even


def _product(layout: Sequence[Split]) -> int:
    out = 1
    for split in layout:
        out *= split.size or 1
    return out


def wrap_outputs(
    fd: DefinitionBuilder, compiled: CompiledProgram, outputs: Sequence[Any], inputs: Sequence[Any]
) -> list[Any]:
    """The outputs as DTensors on the torch mesh of the inputs. Raises ArgumentError where placements cannot say one."""
    from torch.distributed.tensor import DTensor

    meshes: Mapping[tuple[int, ...], Any] = {
        mesh_of_torch(v.device_mesh).ranks: v.device_mesh for v in inputs if is_dtensor(v)
    }
    out, graph = [], compiled.graph
    for tensor, sharding, local in zip(graph.outputs, compiled.output_shardings(), outputs, strict=True):
        shape = graph.shape(tensor)
        placements = placements_of(sharding, shape)
        if placements is None or sharding.mesh.ranks not in meshes:
            raise user_error(
                f"output {graph.tensors[tensor].label} cannot be a DTensor", str(sharding), "placements that DTensor has",
                "Annotate the output, or pass plain shards.", graph.tensors[tensor].line, ArgumentError,
            )  # fmt: skip
        strides = torch.empty(shape, device="meta").stride()
        mesh = meshes[sharding.mesh.ranks]
        out.append(DTensor.from_local(local, mesh, placements, run_check=False, shape=torch.Size(shape), stride=strides))
    return out
