"""Annotations of outputs of which an nvFuser script says nothing: they lie where nvFuser would leave them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ..definition.annotating import annotate
from ..definition.recording import Recording
from ..mesh import DeviceMesh
from ..programs import Shapes
from ..sharding.layout import Split
from .nvfuser_propagation import common_mesh, followed_outputs


def annotate_outputs(
    recording: Recording, aliases: Mapping[int, int], shapes: Shapes, scalars: Mapping[int, Any]
) -> None:
    """Annotate all outputs that have no annotation; nothing, where the definition has no mesh.

    aliases: by an output's place the input that it is written into.
    """
    _annotate_aliases(recording, aliases)
    if (mesh := common_mesh(recording)) is not None:
        found = followed_outputs(recording, mesh, shapes, scalars)
        for tensor, bound in zip(recording.outputs, found, strict=True):
            if bound is not None and tensor not in recording.annotations:
                _annotate(recording, tensor, mesh, bound)


def _annotate_aliases(recording: Recording, aliases: Mapping[int, int]) -> None:
    """Annotate outputs that are written into arguments as those arguments are."""
    for place, alias in aliases.items():
        tensor, given = recording.outputs[place], recording.annotations.get(alias)
        mesh = given.mesh if given is not None else common_mesh(recording)
        if tensor not in recording.annotations and mesh is not None:
            dims = given.named() if given is not None else [()] * recording.tensors[tensor].type.ndim
            why = f"written into {recording.tensors[alias].label}, and laid out as that is"
            _imply(recording, tensor, mesh, dims, why)


def _annotate(recording: Recording, tensor: int, mesh: DeviceMesh, bound: Mapping[str, int]) -> None:
    """Annotate an output by the dim that each mesh axis is bound to."""
    dims: list[tuple[Split, ...]] = [()] * recording.tensors[tensor].type.ndim
    for axis, dim in bound.items():
        dims[dim] = (*dims[dim], Split(mesh.axis_size(axis), axis))
    _imply(recording, tensor, mesh, dims, "an output, left where nvFuser would leave it")


def _imply(recording: Recording, tensor: int, mesh: DeviceMesh, dims: Sequence[Any], why: str) -> None:
    annotate(recording, tensor, mesh, dims, recording.tensors[tensor].line, why)
