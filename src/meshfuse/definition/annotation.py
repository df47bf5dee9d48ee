"""What a user says of a tensor's sharding: the forms it may be said in, and its meaning for concrete shapes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..errors import SourceLine, user_error
from ..mesh import STREAM, DeviceMesh
from ..sharding.layout import Layout, Split, canonical
from ..sharding.value import Sharding, overlap
from .loop import KIND_OF_NAME, WHOLE_AXIS, LoopDomain

# One dim in `mesh_split`: None, an axis, axes from major to minor, or splits of any kind.
DimSpec = Any


@dataclass(eq=False, slots=True)
class Annotation:
    """A mesh and a loop domain for one tensor; mutable while the definition is written, as nvFuser's is."""

    line: SourceLine
    domain: LoopDomain
    mesh: DeviceMesh | None = None
    allocation: tuple[int, ...] | None = None
    memory: str | None = None

    def sharding(self, name: str, shape: Sequence[int]) -> Sharding:
        """The sharding of a tensor of this shape. Raises DefinitionError where an axis is used twice or unknown."""
        assert self.mesh is not None
        dims = [self._layout(layout, n) for layout, n in zip(self.domain.layouts(), shape, strict=True)]
        _check_axes(name, [*dims, *self.reduction_layouts()], self.mesh, self.line)
        return Sharding.make(self.mesh, dims, shape)

    def reduction_layouts(self) -> list[Layout]:
        """The layouts of the reduction dims of the op that makes the tensor."""
        return [self._named(layout) for layout in self.domain.layouts(reduction=True)]

    def named_layouts(self, layouts: Sequence[Layout]) -> list[Layout]:
        """Layouts with the mesh's axes in the place of nvFuser's parallel types."""
        return [self._named(layout) for layout in layouts]

    def _layout(self, layout: Layout, n: int) -> Layout:
        return canonical(self._named(layout), n)

    def _named(self, layout: Layout) -> Layout:
        """The layout with mesh axes for nvFuser's parallel types, and its splits' sizes checked against the mesh's."""
        assert self.mesh is not None
        return tuple(_sized(_mesh_axis(split, self.mesh, self.line), self.mesh, self.line) for split in layout)


def _mesh_axis(split: Split, mesh: DeviceMesh, line: SourceLine) -> Split:
    if split.axis in KIND_OF_NAME and split.axis not in mesh.names:
        try:
            return split._replace(axis=mesh.parallel_axis(KIND_OF_NAME[split.axis]))
        except ValueError as error:
            error.where = line  # type: ignore[attr-defined]
            raise
    return split


def _sized(split: Split, mesh: DeviceMesh, line: SourceLine) -> Split:
    """A bound split of free size takes the axis' size: the dim itself is the axis (`[d, ...]` with d on mesh_x)."""
    if not split.bound:
        return split
    assert split.axis is not None
    if split.axis not in mesh.names:
        raise user_error(
            "unknown mesh axis", repr(split.axis), f"one of {mesh.names} of {mesh}", "Use an axis of this mesh.", line
        )
    size, pre = mesh.axis_size(split.axis), split.pre or 1
    wanted = size // pre if split.size is None else split.size
    if size % (pre * wanted) or (split.pre == WHOLE_AXIS and wanted != size):
        raise user_error(
            f"a factor of {wanted} cannot be bound to mesh axis {split.axis!r}", f"axis size {size}",
            "a factor as large as the axis (or as a sub-axis of it)", f"Split the dim by {size}.", line,
        )  # fmt: skip
    return Split(wanted, split.axis, pre)


def _check_axes(name: str, dims: Sequence[Layout], mesh: DeviceMesh, line: SourceLine) -> None:
    bound = [(d, split) for d, layout in enumerate(dims) for split in layout if split.bound]
    for i, (d, split) in enumerate(bound):
        for e, other in bound[:i]:
            if overlap(split, other):
                raise user_error(
                    f"tensor {name}: mesh axis {split.axis!r} is used twice", f"on dims {e} and {d}",
                    "each axis once per tensor", "Remove it from one of the dims.", line,
                )  # fmt: skip


def layouts_of_spec(
    name: str, mesh: DeviceMesh, spec: Sequence[DimSpec], ndim: int, line: SourceLine
) -> tuple[Layout, ...]:
    """Layouts from `mesh_split`'s per-dim list. Raises DefinitionError for a wrong length or unknown axes."""
    if isinstance(spec, (str, Mapping)) or len(spec) != ndim:
        raise user_error(
            f"mesh_split of {name}: one entry per dim", f"{spec!r} for {ndim} dims", f"a list of {ndim} entries",
            "Use None for dims that are not split.", line,
        )  # fmt: skip
    dims = tuple(_dim_layout(mesh, entry, line) for entry in spec)
    _check_axes(name, dims, mesh, line)
    return dims


def _dim_layout(mesh: DeviceMesh, entry: DimSpec, line: SourceLine) -> Layout:
    if entry is None or (isinstance(entry, int) and not isinstance(entry, bool) and entry == -1):
        return ()
    entries = entry if isinstance(entry, (list, tuple)) and not isinstance(entry, Split) else (entry,)
    return tuple(_split_of(mesh, part, line) for part in entries)


def _split_of(mesh: DeviceMesh, part: Any, line: SourceLine) -> Split:
    """An axis by name or (GSPMD's dims mapping) number, or a split written out: Split, or (size, axis)."""
    if isinstance(part, Split):
        split = part
    elif isinstance(part, tuple) and len(part) in (2, 3):
        split = Split(*part)
    elif isinstance(part, int) and not isinstance(part, bool):
        if not 0 <= part < mesh.ndim:
            raise user_error(
                "dims mapping: no such mesh axis", str(part), f"-1 (not split) or 0 to {mesh.ndim - 1} for {mesh}",
                "Use the number of an axis.", line,
            )  # fmt: skip
        split = Split(mesh.shape[part], mesh.names[part])
    else:
        split = Split(None, part) if part != STREAM else Split(None, STREAM)
    return _sized(split, mesh, line)


def layouts_of_placements(
    name: str, mesh: DeviceMesh, placements: Sequence[Any], ndim: int, line: SourceLine
) -> tuple[Layout, ...]:
    """Layouts from torch's DTensor placements, one per mesh axis. Raises DefinitionError for Partial."""
    dims: list[list[Split]] = [[] for _ in range(ndim)]
    if len(placements) != mesh.ndim:
        raise user_error(
            f"placements of {name}: one per mesh axis", f"{len(placements)} for {mesh}", f"{mesh.ndim}",
            "Use Replicate() for axes that do not shard it.", line,
        )  # fmt: skip
    for axis, size, placement in zip(mesh.names, mesh.shape, placements, strict=True):
        if placement.is_partial() or type(placement).__name__ == "_StridedShard":
            raise user_error(
                f"placements of {name}: an annotation must say where the elements are", str(placement),
                "Shard or Replicate", "Annotate the tensor that it is reduced to.", line,
            )  # fmt: skip
        if placement.is_shard():
            dims[placement.dim % ndim].append(Split(size, axis))
    return tuple(map(tuple, dims))
