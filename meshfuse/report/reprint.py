"""`repr` of a definition: Python text that rebuilds it, and by which definitions are compared."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ..definition.annotation import Annotation
from ..definition.loop import TYPE_OF_NAME, Leaf, LoopDomain
from ..definition.recording import OpNode, Recording
from ..definition.units import unit_lines
from ..dtypes import DataType
from ..mesh import STREAM, DeviceMesh, ParallelType
from ..ops import COMPOSITES
from ..ops.values import REQUIRED, Param, ScalarRef, TensorRef
from ..sharding.layout import text

_INDENT = "    "


def definition_source(recording: Recording) -> str:
    """Python text that defines an equal `fd`: composites as the ops that they are made of, tensors by number."""
    meshes = meshes_of(recording)
    lines = ["import meshfuse as mf", ""]
    lines += [f"{name} = mf.{mesh!r}" for mesh, name in meshes.items()]
    seed = recording.seed
    lines.append(f"with mf.FusionDefinition({'' if seed is None else f'seed={seed}'}) as fd:")
    body = [_step(recording, step) for step in recording.history]
    body += [f"fd.add_output(t{i})" for i in recording.outputs]
    body += annotation_lines(recording, meshes)
    return "\n".join([*lines, *(_INDENT + line for line in body or ["pass"])]) + "\n"


def meshes_of(recording: Recording) -> dict[DeviceMesh, str]:
    """The meshes of all annotations, and their names in a text."""
    meshes = dict.fromkeys(a.mesh for a in recording.all_annotations.values() if a.mesh is not None)
    return {mesh: f"mesh{i}" for i, mesh in enumerate(meshes)}


def annotation_lines(recording: Recording, meshes: Mapping[DeviceMesh, str]) -> list[str]:
    """The calls that annotate the tensors t0, t1, ..., to stand after the text that defines them."""
    lines: list[str] = []
    for tensor, annotation in recording.all_annotations.items():
        lines += _annotation(f"t{tensor}", annotation, meshes)
    for tensor, overlap in sorted(recording.overlaps.items()):
        lines.append(
            f"fd.overlap(t{tensor}, {overlap.chunks}, dim={overlap.dim}{', ring=True' if overlap.ring else ''})"
        )
    return lines + unit_lines(recording, meshes)


# inputs, scalars and ops


def _step(recording: Recording, step: TensorRef | ScalarRef | OpNode) -> str:
    if isinstance(step, TensorRef):
        return _input(recording, step)
    return _scalar(recording, step) if isinstance(step, ScalarRef) else _op(step)


def _input(recording: Recording, ref: TensorRef) -> str:
    made = recording.tensors[ref.id]
    order = f", stride_order={list(made.stride_order)}" if made.stride_order is not None else ""
    name = f", name={made.line.name!r}" if made.line.name else ""
    return f"t{ref.id} = fd.define_tensor({list(made.type.shape)}, dtype={_text(made.type.dtype)}{order}{name})"


def _scalar(recording: Recording, ref: ScalarRef) -> str:
    made, name = recording.scalars[ref.id], f"s{ref.id}"
    if made.op == "input":
        return f"{name} = fd.define_scalar(dtype={_text(made.dtype)})"
    if made.op == "const":
        return f"{name} = fd.define_scalar({_text(made.operands[0])}, dtype={_text(made.dtype)})"
    if made.op == "size":
        return f"{name} = {_text(made.operands[0])}.size({made.operands[1]})"
    operands = [*made.operands, made.dtype] if made.op == "cast" else made.operands
    return f"{name} = fd.ops.{made.op}({', '.join(map(_text, operands))})"


def _op(node: OpNode) -> str:
    made = ", ".join(f"t{i}" for i in node.outputs)
    pairs = list(zip(node.op.params, node.args, strict=True))
    plain = [_text(arg) for param, arg in pairs if param.default is REQUIRED]
    named = [(param.name, _text(arg)) for param, arg in pairs if not is_default(param, arg)]
    if node.op.name in COMPOSITES:  # `fd.ops` has a function of that name that gives something else
        keywords = ", ".join(f"{name!r}: {text}" for name, text in named)
        return f"{made} = fd.call({node.op.name!r}, [{', '.join(plain)}], {{{keywords}}})"
    return f"{made} = fd.ops.{node.op.name}({', '.join([*plain, *(f'{name}={text}' for name, text in named)])})"


def is_default(param: Param, arg: Any) -> bool:
    """Whether an argument is its parameter's default, and may be left out of a text."""
    return param.default is REQUIRED or (type(arg) is type(param.default) and repr(arg) == repr(param.default))


def _text(value: Any) -> str:
    if isinstance(value, TensorRef):
        return f"t{value.id}"
    if isinstance(value, ScalarRef):
        return f"s{value.id}"
    if isinstance(value, DataType):
        return f"mf.{value!r}"
    if isinstance(value, (tuple, list)):
        return f"[{', '.join(map(_text, value))}]"
    if isinstance(value, complex):
        return f"complex({_text(value.real)}, {_text(value.imag)})"
    is_special = isinstance(value, float) and repr(value).lstrip("-") in ("nan", "inf")
    return f'float("{value}")' if is_special else repr(value)


# annotations


def _annotation(name: str, annotation: Annotation, meshes: Mapping[DeviceMesh, str]) -> Iterator[str]:
    """The calls of one annotation: `mesh_split` where that can say it, else nvFuser's calls in an order that works."""
    mesh = meshes.get(annotation.mesh) if annotation.mesh is not None else None
    domain = annotation.domain.unmerged()
    roots = domain.roots
    written = [root for root in roots if not root[0].reduction] if annotation.stated else []
    if annotation.stated:
        entries = ", ".join(_entry(root, annotation.mesh) for root in written)
        kept = f", stationary={list(annotation.stationary)}" if annotation.stationary else ""
        terms = f"  # terms of a sum over {text(annotation.terms)}" if annotation.terms else ""
        yield f"fd.mesh_split({name}, {mesh}, [{entries}]{kept}){terms}"
    elif mesh is not None:
        yield f"{name}.set_device_mesh({mesh})"
    for place, root in enumerate(roots):
        if not any(root is done for done in written):
            yield from _splits(name, sum(len(done) for done in roots[:place]), root)
    yield from _reordered(name, domain)
    for place, leaf in enumerate(domain.order):
        yield from _marks(f"{name}.axis({place})", name, place, leaf, _is_written(leaf, written))
    if annotation.allocation is not None:
        places = [_first_place(domain, d) for d in annotation.allocation]
        yield f"{name}.set_allocation_domain([{', '.join(f'{name}.axis({p})' for p in places)}])"
    if annotation.memory is not None:
        yield f"{name}.set_memory_type({annotation.memory!r})"


def _entry(root: Sequence[Leaf], mesh: DeviceMesh | None) -> str:
    """One dim's entry of a `mesh_split`. Factors that nvFuser's calls have bound later are written as free ones."""
    leaves = [Leaf(leaf.size) if leaf.pre == 0 else leaf for leaf in root]
    if leaves[-1].size is None and leaves[-1].axis is None:
        leaves.pop()  # mesh_split adds what remains of the dim
    if not leaves:
        return "None"
    parts = [_factor(leaf, mesh) for leaf in leaves]
    return parts[0] if len(parts) == 1 and parts[0].startswith("'") else f"[{', '.join(parts)}]"


def _factor(leaf: Leaf, mesh: DeviceMesh | None) -> str:
    if mesh is not None and leaf.axis in mesh.names and (leaf.size, leaf.pre) == (mesh.axis_size(leaf.axis), 1):
        return repr(leaf.axis)
    if leaf.axis == STREAM and leaf.size is None:
        return repr(STREAM)
    arguments = [
        str(leaf.size),
        *([repr(leaf.axis)] if leaf.axis else []),
        *([str(leaf.pre)] if leaf.pre != 1 else []),
    ]
    return f"mf.Split({', '.join(arguments)})"


def _is_written(leaf: Leaf, written: Sequence[Sequence[Leaf]]) -> bool:
    return leaf.pre != 0 and any(leaf is other for root in written for other in root)


def _splits(name: str, place: int, root: Sequence[Leaf]) -> Iterator[str]:
    """The splits that make a dim's leaves: outer splits up to the free leaf, then inner splits from the end."""
    free = next(i for i, leaf in enumerate(root) if leaf.size is None)
    for i, leaf in enumerate(root[:free]):
        yield f"{name}.outer_split({place + i}, {leaf.size})"
    for leaf in reversed(root[free + 1 :]):
        yield f"{name}.inner_split({place + free}, {leaf.size})"


def _reordered(name: str, domain: LoopDomain) -> Iterator[str]:
    flat = [id(leaf) for root in domain.roots for leaf in root]
    moves = {flat.index(id(leaf)): new for new, leaf in enumerate(domain.order)}
    if any(old != new for old, new in moves.items()):
        yield f"{name}.reorder({dict(sorted(moves.items()))})"


def _marks(axis: str, name: str, place: int, leaf: Leaf, written: bool) -> Iterator[str]:
    if leaf.axis is not None and not written:
        kind = ParallelType.stream if leaf.axis == STREAM else TYPE_OF_NAME[leaf.axis]
        yield f"{axis}.parallelize(mf.{kind!r})"
    if leaf.swizzled:
        yield f"{name}.swizzle1d({place}, mf.ParallelType.stream)"


def _first_place(domain: LoopDomain, dim: int) -> int:
    root = [root for root in domain.roots if not root[0].reduction][dim]
    return next(place for place, leaf in enumerate(domain.order) if any(leaf is other for other in root))
