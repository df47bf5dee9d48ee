"""Units of weights that are fully sharded: which tensors are gathered together, as a user of a definition says it."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ..errors import MeshfuseError, SourceLine, shown, user_error
from ..mesh import DeviceMesh
from . import annotating
from .annotation import layouts_of_spec
from .fsdp import FSDP, Member, UnitGroup
from .name_patterns import matching, nearest
from .recording import Recording


def declare(
    recording: Recording, mesh: DeviceMesh, fsdp: Any, given: Sequence[str | Sequence[int]], line: SourceLine
) -> None:
    """Have weights be cut over axes, and gathered unit by unit.

    given: patterns of inputs' names, and lists of tensors that are inputs or follow from one, as a cast does.

    Raises DefinitionError for axes that the mesh does not have, patterns that fit nothing, tensors that are no weights
    or in two units, and weights that are annotated without the axes.
    """
    chosen = _checked(fsdp, mesh, line)
    units = _units(recording, given or chosen.units or (), line)
    members: dict[int, Member] = {}
    for unit, tensors in units.items():
        for tensor in tensors:
            if tensor in members or any(tensor in group.members for group in recording.units):
                label = recording.tensors[tensor].label
                raise _error(f"{label} is in two units", "", "each weight in one", "Leave it out of one.", line)
            if _is_cut(recording, tensor, mesh, chosen.axes, line):
                members[tensor] = Member(unit, chosen.axes)
    kept = not chosen.reshard_after_forward
    recording.units.append(UnitGroup(members, chosen.prefetch, kept, chosen.replicate))


def _checked(fsdp: Any, mesh: DeviceMesh, line: SourceLine) -> FSDP:
    is_axes = isinstance(fsdp, (list, tuple)) and all(isinstance(axis, str) for axis in fsdp)
    if not isinstance(fsdp, (FSDP, str)) and not is_axes:
        raise _error("fsdp", shown(fsdp), f"an mf.FSDP, or one or several of {list(mesh.names)}", "", line)
    chosen = fsdp if isinstance(fsdp, FSDP) else FSDP(fsdp)
    others = [chosen.replicate] if chosen.replicate is not None else []
    wrong = [axis for axis in (*chosen.axes, *others) if axis not in mesh.names]
    wrong += [axis for axis in others if axis in chosen.axes]
    if wrong or not chosen.axes:
        raise _error("fsdp", shown(wrong[0]) if wrong else "no axis", f"one or several of {list(mesh.names)}",
                     "Name axes of the mesh.", line)  # fmt: skip
    if chosen.param_dtype is not None or chosen.reduce_dtype is not None:
        raise _error("fsdp: param_dtype and reduce_dtype", shown(chosen.param_dtype or chosen.reduce_dtype), "None",
                     "Cast weights by fd.ops.cast, and have the results in units.", line)  # fmt: skip
    return chosen


def _units(recording: Recording, given: Sequence[str | Sequence[int]], line: SourceLine) -> dict[str, list[int]]:
    """By unit its tensors."""
    names = {recording.tensors[i].line.name: i for i in recording.input_tensors() if recording.tensors[i].line.name}
    found: dict[str, list[int]] = {}
    for number, entry in enumerate(given):
        if isinstance(entry, str):
            found |= _by_pattern(entry, names, line)
        else:
            for tensor in entry:
                _check_weight(recording, tensor, line)
            found[f"unit {number}"] = list(entry)
    if not found:
        raise _error("which weights", "none", "a pattern of names, or a list of tensors, for each unit",
                     'Pass "layers.*", or [w1, w2].', line)  # fmt: skip
    return found


def _by_pattern(pattern: str, names: Mapping[str, int], line: SourceLine) -> dict[str, list[int]]:
    """The units that a pattern fits: inputs' names, or what these begin with, up to a dot; the outermost ones."""
    heads = dict.fromkeys(head for name in names for head in _heads(name))
    chosen = set(matching(pattern, heads))
    found: dict[str, list[int]] = {}
    for name, tensor in names.items():
        unit = next((head for head in _heads(name) if head in chosen), None)
        if unit is not None:
            found.setdefault(unit, []).append(tensor)
    if not found:
        near = nearest(pattern, list(heads))
        raise _error(repr(pattern), f"no input of such a name{f'; near to it {near}' if near else ''}",
                     'the name of inputs, or the beginning of some, such as "layers.*"',
                     "Name weights by fd.define_tensor(..., name=).", line)  # fmt: skip
    return found


def _heads(name: str) -> Iterator[str]:
    """What a name begins with, up to each of its dots, and itself."""
    parts = name.split(".")
    return (".".join(parts[: end + 1]) for end in range(len(parts)))


def _check_weight(recording: Recording, tensor: int, line: SourceLine) -> None:
    here = recording.producer(tensor)
    while here is not None and len(here.inputs) == 1:
        here = recording.producer(here.inputs[0])
    if here is not None:
        raise _error(recording.tensors[tensor].label, f"a tensor that {here.op.name} makes of several",
                     "an input, or what follows from one", "", line)  # fmt: skip


def _is_cut(
    recording: Recording, tensor: int, mesh: DeviceMesh, axes: Sequence[str], line: SourceLine
) -> bool:  # fmt: skip
    """Whether a weight is cut over the axes; annotates it, and what it follows from, where nobody has."""
    made = recording.tensors[tensor]
    found = recording.own_annotations.get(tensor)
    if found is not None and found.mesh is not None:
        named = {split.axis for layout in found.named() for split in layout}
        if found.mesh == mesh and named.issuperset(axes):
            return True
        raise _error(made.label, f"annotated as {found} at {found.line}", f"cut over {', '.join(axes)} of {mesh}",
                     "Name these axes there, or leave the annotation out.", line)  # fmt: skip
    ranks = math.prod(mesh.axis_size(axis) for axis in axes)
    place = dim_to_cut(made.type.shape, range(made.type.ndim), ranks, len(axes))
    spec = [list(axes) if d == place else None for d in range(made.type.ndim)]
    layouts = layouts_of_spec(made.label, mesh, spec, made.type.ndim, line)
    for here in (tensor, *_above(recording, tensor)):
        if not recording.is_annotated(here) and recording.tensors[here].type.shape == made.type.shape:
            annotating.annotate(recording, here, mesh, layouts, line)
    return place is not None and ranks > 1


def _above(recording: Recording, tensor: int) -> Iterator[int]:
    """What a weight follows from."""
    made = recording.producer(tensor)
    while made is not None:
        yield made.inputs[0]
        made = recording.producer(made.inputs[0])


def dim_to_cut(shape: Sequence[int], free: Sequence[int], ranks: int, axes: int) -> int | None:
    """The dim of a weight that is cut over so many ranks along so many axes; None where it stays whole.

    The first that they divide; else, along one axis, the first that is long enough.
    """
    long = [d for d in free if shape[d] >= ranks]
    even = [d for d in long if shape[d] % ranks == 0]
    return next(iter(even if even or axes > 1 else long), None)


def units_of_gradients(recording: Recording, group: UnitGroup) -> dict[int, str]:
    """By gradient that is an output the unit of the weight whose it is."""
    sources = {source: member.unit for i, member in group.members.items() for source in (i, *_above(recording, i))}
    outputs = set(recording.outputs)
    ends = {grad: sources[i] for grad, i in recording.primals.items() if i in sources and grad in outputs}
    return ends | dict(group.ends)


def _error(what: str, found: str, needed: str, do: str, line: SourceLine) -> MeshfuseError:
    return user_error(f"units: {what}", found, needed, do, line)


def unit_lines(recording: Recording, meshes: Mapping[DeviceMesh, str]) -> list[str]:
    """The calls of `fd.units` that say the same, and which ops are backwards."""
    found = [_line(recording, group, meshes) for group in recording.units if group.is_rule and group.members]
    if not found or not recording.sweeps:
        return found
    primals = {grad: i for grad, i in recording.primals.items() if grad in recording.outputs}
    return [*found, f"fd.recording.sweeps += {recording.sweeps}", f"fd.recording.primals.update({primals})"]


def _line(recording: Recording, group: UnitGroup, meshes: Mapping[DeviceMesh, str]) -> str:
    units: dict[str, list[str]] = {}
    for tensor, member in group.members.items():
        units.setdefault(member.unit, []).append(f"t{tensor}")
    first = next(iter(group.members))
    mesh = recording.own_annotations[first].mesh
    assert mesh is not None
    replicate = f", replicate={group.replicate!r}" if group.replicate else ""
    kept = ", reshard_after_forward=False" if group.is_kept else ""
    fsdp = f"mf.FSDP({list(group.members[first].axes)}{replicate}{kept}, prefetch={group.prefetch})"
    lists = ", ".join("[" + ", ".join(unit) + "]" for unit in units.values())
    return f"fd.units({meshes[mesh]}, {fsdp}, {lists})"
