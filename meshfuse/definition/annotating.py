"""Annotating the tensors of a recording, as `fd.mesh_split`, `fd.shard` and `fd.overlap` and nvFuser's calls do."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..argument_checks import as_int
from ..errors import SourceLine, shown, user_error
from ..mesh import DeviceMesh
from ..sharding.layout import Layout
from ..sharding.value import Sharding
from .annotation import (
    Annotation,
    check_agreement,
    contradiction,
    layouts_of_placements,
    layouts_of_sharding,
    layouts_of_spec,
)
from .checks import checked_mesh
from .loop import AxisView, LoopDomain
from .recording import Overlap, Recording, TensorDef

# A loop is written out chunk by chunk: to plan more chunks would take longer than the communication that they hide.
_MOST_CHUNKS = 4096


def mesh_split(
    recording: Recording, tensor: int, mesh: Any, spec: Any, line: SourceLine, stationary: Any = False
) -> None:
    """Annotate a tensor by a list of entries, one per dim."""
    made, mesh = recording.tensors[tensor], checked_mesh(mesh, line)
    annotate(recording, tensor, mesh, layouts_of_spec(made.label, mesh, spec, made.type.ndim, line), line)
    if stationary is not False:
        keep_stationary(recording, tensor, stationary, line)


def keep_stationary(recording: Recording, tensor: int, along: Any, line: SourceLine) -> None:
    """Let no collective move a tensor along axes of its mesh; True stands for all of them.

    Raises DefinitionError for a tensor without an annotation, and for what is no axis of its mesh.
    """
    found, label = recording.own_annotations.get(tensor), recording.tensors[tensor].label
    if found is None or found.mesh is None:
        raise user_error(
            f"stationary: {label}", "a tensor without an annotation", "one that is annotated",
            "Say where it lies first, by fd.mesh_split.", line,
        )  # fmt: skip
    names = found.mesh.names
    axes = names if along is True else (along,) if isinstance(along, str) else along
    if not isinstance(axes, (list, tuple)) or not all(axis in names for axis in axes):
        raise user_error(
            f"stationary: {label}", shown(along), f"True, or axes of its mesh: {', '.join(map(repr, names))}",
            "Name the axes along which it must stay.", line,
        )  # fmt: skip
    found.stationary = tuple([name for name in names if name in axes or name in found.stationary])


def leave_as_made(recording: Recording, tensor: int, made: Sharding, line: SourceLine) -> None:
    """Annotate a tensor with a sharding that may be partial: ranks then hold terms of a sum, none the sum itself."""
    shard(recording, tensor, made.reduced(), None, line)
    recording.own_annotations[tensor].terms = made.partial


def shard(recording: Recording, tensor: int, sharding: Any, mesh: Any, line: SourceLine) -> None:
    """Annotate a tensor with a `Sharding`, or with DTensor placements and their mesh."""
    label, ndim = recording.tensors[tensor].label, recording.tensors[tensor].type.ndim
    if isinstance(sharding, Sharding):
        layouts = layouts_of_sharding(label, sharding, ndim, line)
        if mesh is not None and checked_mesh(mesh, line) != sharding.mesh:
            raise contradiction(label, f"mesh {mesh}", f"mesh {sharding.mesh} in its sharding", line)
        annotate(recording, tensor, sharding.mesh, layouts, line)
        return
    mesh = checked_mesh(mesh, line)
    annotate(recording, tensor, mesh, layouts_of_placements(label, mesh, sharding, ndim, line), line)


def annotate(
    recording: Recording, tensor: int, mesh: DeviceMesh, dims: Sequence[Layout], line: SourceLine, implied: str = ""
) -> None:
    """Annotate a tensor with a layout for every dim.

    `implied` is the reason where the user has not annotated the tensor. Raises DefinitionError for an annotation that
    contradicts an earlier one.
    """
    old = recording.own_annotations.get(tensor)
    domain = LoopDomain.of_layouts(dims, recording.reduction_flags(tensor))
    new = Annotation(line, domain, recording.tensors[tensor].label, mesh, stated=True, implied=implied)
    if old is not None:
        check_agreement(old, new)
        new.allocation, new.memory = old.allocation, old.memory
    if old is None or old.mesh is None or old.meaning() != new.meaning():
        recording.own_annotations[tensor] = new


def put_on_mesh(recording: Recording, tensor: int, mesh: Any) -> None:
    """Put a tensor on a mesh and leave open how it splits there: nvFuser's `set_device_mesh`."""
    line = recording.line_of_change()
    found, mesh = recording.annotation_to_edit(tensor), checked_mesh(mesh, line)
    if found.mesh is not None and found.mesh != mesh:
        label = recording.tensors[tensor].label
        raise contradiction(label, f"mesh {mesh}", f"mesh {found.mesh} at {found.line}", line)
    found.mesh, found.line = mesh, line


def overlap(recording: Recording, tensor: int, chunks: Any, dim: Any, ring: Any, line: SourceLine) -> None:
    """Ask for an op in chunks. Raises DefinitionError where an earlier call asked for others."""
    request, old = _checked_overlap(recording.tensors[tensor], chunks, dim, ring, line), recording.overlaps.get(tensor)
    if old is not None and old[:3] != request[:3]:
        label = recording.tensors[tensor].label
        raise contradiction(label, f"overlap {request[:3]}", f"{old[:3]} at {old.line}", line)
    recording.overlaps[tensor] = request


def _checked_overlap(made: TensorDef, chunks: Any, dim: Any, ring: Any, line: SourceLine) -> Overlap:
    """A request for chunks. Raises DefinitionError for what is no number of chunks, no dim of the tensor or no bool."""
    count, place = as_int(chunks), as_int(dim)
    what, ndim = f"overlap of {made.label}", made.type.ndim
    if count is None or not 1 <= count <= _MOST_CHUNKS:
        raise user_error(
            f"{what}: chunks", shown(chunks), f"an int from 1 to {_MOST_CHUNKS}",
            "Pass how many chunks to cut the dim into.", line,
        )  # fmt: skip
    if place is None or not -ndim <= place < ndim:
        raise user_error(f"{what}: no such dim", shown(dim), f"a dim of {made.type}", "Pass an existing dim.", line)
    if not isinstance(ring, bool):
        raise user_error(f"{what}: ring", shown(ring), "True or False", "Pass ring=True for a ring of messages.", line)
    return Overlap(place % ndim, count, ring, line)


def set_allocation(recording: Recording, tensor: int, domain: LoopDomain, loop: Any) -> None:
    """Set the order in which a tensor's dims lie in memory, from axes of its loop domain, major to minor.

    Ignored for the loop domain of a kernel's copy or of unreduced terms, which says nothing of the tensor itself.
    Raises DefinitionError where a dim of the tensor is missing.
    """
    line, made = recording.line_of_change(), recording.tensors[tensor]
    found = recording.annotation_to_edit(tensor)
    axes = [axis for axis in loop if isinstance(axis, AxisView)] if isinstance(loop, (list, tuple)) else []
    leaves = [axis.leaf for axis in axes]
    dims = domain.dims_in_order(leaves)
    # A kernel's copy has axes over several dims, too, which say of no dim where it lies.
    is_whole = domain is not found.domain and set(map(id, leaves)) == set(map(id, domain.loop))
    if len(dims) != made.type.ndim and not is_whole:
        raise user_error(
            f"set_allocation_domain of {made.label}",
            shown(loop),
            f"axes of its loop domain {domain}, of every dim",
            "Pass tv.get_loop_domain(), or a list of tv.axis(i).",
            line,
        )
    if domain is found.domain:
        found.allocation = dims
