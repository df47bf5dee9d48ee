"""Communication that a script writes itself, as calls of `fd.ops`: copies whose two places are said.

Both the operand and the result are annotated, so that no plan does without the copy. Tensors are whole ones, as all of
a definition are: `all_gather` changes where elements lie, not the shape.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from ..argument_checks import as_int
from ..definition.annotating import annotate, shard
from ..definition.checks import checked_mesh
from ..definition.loop import PARALLEL_NAMES, WHOLE_AXIS, LoopDomain
from ..definition.recording import Definition
from ..definition.tensor_view import TensorView, own
from ..errors import SourceLine, caller_line, shown, user_error
from ..mesh import DeviceMesh
from ..sharding.layout import Layout, Split


def all_gather(fd: Definition, arg: TensorView, mesh: Any, dim: int = 0, axis: str | None = None) -> TensorView:
    """`arg`, of which each rank along a mesh axis has a part of `dim`, whole on each of them."""
    tensor, mesh, line = _checked(fd, arg, mesh, "all_gather")
    name = _axis_of(mesh, axis, "all_gather", line)
    return _copied(tensor, mesh, _without(_split_along(tensor, mesh, dim, name, "all_gather", line), name), line)


def gather(fd: Definition, arg: TensorView, mesh: Any, dim: int = 0, root: int | None = None) -> TensorView:
    """`arg`, of which each rank of a mesh of one axis has a part of `dim`, whole on rank `root` (the first) alone."""
    tensor, mesh, line = _checked(fd, arg, mesh, "gather")
    _split_along(tensor, mesh, dim, _axis_of(mesh, None, "gather", line), "gather", line)
    return _copied(tensor, _alone(_root(mesh, root, "gather", line)), _whole(tensor), line)


def scatter(fd: Definition, arg: TensorView, mesh: Any, dim: int = 0, root: int | None = None) -> TensorView:
    """`arg`, which is on rank `root` (the first of the mesh) alone, with a part of `dim` on each rank of the mesh."""
    tensor, mesh, line = _checked(fd, arg, mesh, "scatter")
    _place(tensor, _alone(_root(mesh, root, "scatter", line)), line)
    name = _axis_of(mesh, None, "scatter", line)
    return _copied(tensor, mesh, _with_split(tensor, _whole(tensor), mesh, dim, name, "scatter", line), line)


def send_recv(fd: Definition, arg: TensorView, source: int, target: int) -> TensorView:
    """`arg`, which is on rank `source` alone, on rank `target` alone."""
    line = caller_line()
    tensor = own(fd, arg, "send_recv", line)
    _place(tensor, _alone(_rank(source, "send_recv: source", line)), line)
    return _copied(tensor, _alone(_rank(target, "send_recv: target", line)), _whole(tensor), line)


def all_reduce(fd: Definition, arg: TensorView, mesh: Any, axis: str | None = None, reduced: int = -1) -> TensorView:
    """The sum (product, maximum ...) that the op of `arg` makes, reduced over a mesh axis, on each rank along it.

    reduced: which of the dims that the op reduces is split over the axis.
    """
    tensor, mesh, line = _checked(fd, arg, mesh, "all_reduce")
    name = _axis_of(mesh, axis, "all_reduce", line)
    return _reduced(tensor, mesh, _layouts(tensor, mesh, "all_reduce", line), (name, reduced), "all_reduce", line)


def reduce_scatter(
    fd: Definition, arg: TensorView, mesh: Any, dim: int = 0, axis: str | None = None, reduced: int = -1
) -> TensorView:
    """As `all_reduce`; each rank along the axis has a part of `dim` of the result."""
    tensor, mesh, line = _checked(fd, arg, mesh, "reduce_scatter")
    name = _axis_of(mesh, axis, "reduce_scatter", line)
    layouts = _layouts(tensor, mesh, "reduce_scatter", line)
    layouts = _with_split(tensor, layouts, mesh, dim, name, "reduce_scatter", line)
    return _reduced(tensor, mesh, layouts, (name, reduced), "reduce_scatter", line)


def create_dtensor(fd: Definition, arg: TensorView, mesh: Any, placements: Sequence[Any]) -> TensorView:
    """`arg` with DTensor's placements on a mesh: itself where nothing is said of it yet, else a copy that lies so."""
    line = caller_line()
    tensor = own(fd, arg, "create_dtensor", line)
    made = fd.ops.set(tensor) if fd.recording.is_annotated(tensor.id) else tensor
    shard(fd.recording, made.id, placements, mesh, line)
    return made


COMMUNICATIONS: dict[str, Callable[..., TensorView]] = {
    "all_gather": all_gather, "all_reduce": all_reduce, "reduce_scatter": reduce_scatter, "send_recv": send_recv,
    "send": send_recv, "recv": send_recv, "create_dtensor": create_dtensor,
}  # fmt: skip
# Ops of the table have these names as well: a mesh behind the tensor tells which is meant.
BY_MESH: dict[str, Callable[..., TensorView]] = {"scatter": scatter, "gather": gather}


def names_mesh(args: Sequence[Any], named: Any) -> bool:
    """Whether a call's arguments have a mesh, ours or torch's."""
    return "mesh" in named or any(isinstance(arg, DeviceMesh) or hasattr(arg, "mesh_dim_names") for arg in args)


# where tensors lie


def _checked(fd: Definition, arg: Any, mesh: Any, what: str) -> tuple[TensorView, DeviceMesh, SourceLine]:
    line = caller_line()
    return own(fd, arg, what, line), checked_mesh(mesh, line), line


def _axis_of(mesh: DeviceMesh, axis: Any, what: str, line: SourceLine) -> str:
    """The axis of the mesh; the only one where none is named. Raises DefinitionError for any other."""
    if axis is None and mesh.ndim == 1:
        return mesh.names[0]
    if axis not in mesh.names:
        needed = f"one of {', '.join(map(repr, mesh.names))}" if what not in ("scatter", "gather") else "a mesh of one"
        raise user_error(f"{what}: mesh axis", f"{shown(axis)} of {mesh}", needed, "Name the axis to communicate over.",
                         line)  # fmt: skip
    return axis


def _rank(rank: Any, what: str, line: SourceLine) -> int:
    number = as_int(rank)
    if number is None or number < 0:
        raise user_error(what, shown(rank), "the number of a rank", "Count ranks from 0.", line)
    return number


def _root(mesh: DeviceMesh, root: Any, what: str, line: SourceLine) -> int:
    number = mesh.ranks[0] if root is None else _rank(root, f"{what}: root", line)
    if number not in mesh:
        raise user_error(f"{what}: root", str(number), f"a rank of {mesh}", "Pass one of the mesh's ranks.", line)
    return number


def _alone(rank: int) -> DeviceMesh:
    return DeviceMesh((1,), ("x",), ranks=[rank])


def _whole(tensor: TensorView) -> list[Layout]:
    return [()] * tensor.ndim


def _place(tensor: TensorView, mesh: DeviceMesh, line: SourceLine) -> None:
    """Have the tensor lie on the mesh, whole. Raises DefinitionError where it is annotated otherwise."""
    annotate(tensor.fd.recording, tensor.id, mesh, _whole(tensor), line)


def _layouts(tensor: TensorView, mesh: DeviceMesh, what: str, line: SourceLine) -> list[Layout]:
    """How the tensor is annotated; whole where it is not. Raises DefinitionError where it is on another mesh."""
    note = tensor.fd.recording.own_annotations.get(tensor.id)
    if note is None or note.mesh is None:
        return _whole(tensor)
    if note.mesh != mesh:
        raise user_error(f"{what} of {tensor.label}", f"{note.mesh}, where it is annotated", f"{mesh}",
                         "Pass the mesh that it is on, or bring it over by fd.ops.set.", line)  # fmt: skip
    return note.named()


def _split_along(
    tensor: TensorView, mesh: DeviceMesh, dim: Any, axis: str, what: str, line: SourceLine
) -> list[Layout]:
    """The tensor's layouts, with `dim` split over the axis. It is annotated so, where it has no annotation.

    Raises DefinitionError where it is annotated otherwise.
    """
    layouts = _layouts(tensor, mesh, what, line)
    if not tensor.fd.recording.is_annotated(tensor.id):
        layouts = _with_split(tensor, layouts, mesh, dim, axis, what, line)
        annotate(tensor.fd.recording, tensor.id, mesh, layouts, line)
    place = _dim(tensor, dim, what, line)
    if all(split.axis != axis for split in layouts[place]):
        raise user_error(
            f"{what} of {tensor.label}", f"dim {place} annotated as not split over {axis!r}", "a dim that is",
            "Name the dim that the axis splits.", line,
        )  # fmt: skip
    return layouts


def _with_split(
    tensor: TensorView, layouts: Sequence[Layout], mesh: DeviceMesh, dim: Any, axis: str, what: str, line: SourceLine
) -> list[Layout]:
    """The layouts with a dim split by the axis as well."""
    place, more = _dim(tensor, dim, what, line), Split(mesh.axis_size(axis), axis)
    return [(*layout, more) if d == place else layout for d, layout in enumerate(_without(layouts, axis))]


def _without(layouts: Sequence[Layout], axis: str) -> list[Layout]:
    """The layouts whole along an axis."""
    freed = [tuple([Split(s.size) if s.axis == axis else s for s in layout]) for layout in layouts]
    return [layout if any(split.axis for split in layout) else () for layout in freed]


def _dim(tensor: TensorView, dim: Any, what: str, line: SourceLine) -> int:
    place = as_int(dim)
    if place is None or not -tensor.ndim <= place < tensor.ndim:
        raise user_error(f"{what}: no such dim", shown(dim), f"a dim of {tensor.type}", "Pass an existing dim.", line)
    return place % tensor.ndim


def _copied(tensor: TensorView, mesh: DeviceMesh, layouts: Sequence[Layout], line: SourceLine) -> TensorView:
    made = tensor.fd.ops.set(tensor)
    annotate(tensor.fd.recording, made.id, mesh, layouts, line)
    return made


def _reduced(
    tensor: TensorView, mesh: DeviceMesh, layouts: Sequence[Layout], reduction: tuple[str, Any], what: str,
    line: SourceLine,
) -> TensorView:  # fmt: skip
    """A copy of the tensor, whose op is told to reduce along the axis, and where its result lies."""
    recording, (axis, reduced) = tensor.fd.recording, reduction
    flags = recording.reduction_flags(tensor.id)
    count, place = sum(flags), as_int(reduced)
    if place is None or not -count <= place < count:
        found = f"reduced dim {shown(reduced)} of {count}" if count else "no reduction"
        raise user_error(
            f"{what} of {tensor.label}", found, "the result of a sum, a matmul, or another op that reduces a dim",
            "Call it on what that op returns.", line,
        )  # fmt: skip
    annotate(recording, tensor.id, mesh, layouts, line)
    bound: list[Layout] = [()] * count
    bound[place] = (Split(mesh.axis_size(axis), _parallel_name(mesh, axis, what, line), WHOLE_AXIS),)
    recording.own_annotations[tensor.id].domain = LoopDomain.of_layouts(layouts, flags, bound)
    return _copied(tensor, mesh, layouts, line)


def _parallel_name(mesh: DeviceMesh, axis: str, what: str, line: SourceLine) -> str:
    """What a loop domain calls the axis: nvFuser's parallel types are of the last three. DefinitionError for others."""
    place = mesh.ndim - 1 - mesh.names.index(axis)
    if place >= len(PARALLEL_NAMES):
        raise user_error(f"{what}: mesh axis", f"{axis!r} of {mesh}", "one of its last three axes",
                         "Put the axis of a reduction behind the others.", line)  # fmt: skip
    return list(PARALLEL_NAMES.values())[place]
