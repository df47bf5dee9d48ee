"""Shardings of outputs without an annotation, as nvFuser would choose them.

An op's results follow its operands, the most sharded operand first; then the operands take axes that they lack from the
results. So the mask of a dropout, and a product that is added to a residual, lie as that residual does. meshfuse itself
chooses by cost, but a script written for nvFuser reads its outputs where nvFuser leaves them. Axes of one rank split
nothing, but are followed as well: scripts ask for their dims.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from ..definition.annotation import Annotation
from ..definition.builder import DefinitionBuilder
from ..errors import DefinitionError
from ..graph import Graph, Node, specialize
from ..mesh import DeviceMesh
from ..ops.rules import FactorKind

# For a tensor: the dim that each mesh axis cuts in chunks, or the dims that it cuts otherwise. None where that is not
# all there is to say.
BoundDims = dict[str, int | frozenset[int]]
Shapes = Mapping[int, tuple[int, ...]]


def followed_outputs(
    fd: DefinitionBuilder, mesh: DeviceMesh, shapes: Shapes, scalars: Mapping[int, Any]
) -> list[dict[str, int] | None]:
    """For every output, the bindings that follow from the annotations for these global input shapes; all are on `mesh`.

    None for an output that is not cut in chunks of a dim.
    """
    given = {i: _bound(annotation) for i, annotation in fd.annotations.items()}
    graph = _graph(fd, shapes, scalars, given)
    found = dict(given)
    for node in graph.nodes:
        for place, tensor in enumerate(node.outputs):
            if tensor not in given:
                found[tensor] = _of_result(node, place, found)
    kept = {*given, *graph.input_tensors}
    for node in reversed(graph.nodes):
        for place, tensor in enumerate(node.inputs):
            if tensor not in kept:
                found[tensor] = _of_operand(node, place, found, mesh)
    return [_sayable(found.get(tensor, {})) for tensor in fd.outputs]


def _sayable(bound: BoundDims | None) -> dict[str, int] | None:
    chunks = {axis: dim for axis, dim in (bound or {}).items() if isinstance(dim, int)}
    return chunks if bound is not None and len(chunks) == len(bound) else None


def common_mesh(fd: DefinitionBuilder) -> DeviceMesh | None:
    """The one mesh of all annotations; None where there are several or none."""
    meshes = {annotation.mesh for annotation in fd.annotations.values()}
    return meshes.pop() if len(meshes) == 1 else None


def follow_meshes(fd: DefinitionBuilder) -> None:
    """Give each parallelized tensor without a mesh the mesh of all that it is made of, if that is a single one."""
    annotations = fd.all_annotations
    if all(a.mesh is not None or not a.is_on_devices for a in annotations.values()):
        return
    found: list[set[DeviceMesh]] = []
    for tensor in range(len(fd.tensors)):
        annotation, node = annotations.get(tensor), fd.producer(tensor)
        meshes = {mesh for i in node.inputs for mesh in found[i]} if node is not None else set[DeviceMesh]()
        if annotation is not None and annotation.mesh is None and annotation.is_on_devices and len(meshes) == 1:
            (annotation.mesh,) = meshes
        found.append(meshes if annotation is None or annotation.mesh is None else {annotation.mesh})


def _bound(annotation: Annotation) -> BoundDims | None:
    assert annotation.mesh is not None
    found: BoundDims = {}
    for dim, layout in enumerate(annotation.named()):
        for place, split in enumerate(layout):
            if split.bound:
                axis = split.axis or ""
                if split.size != annotation.mesh.axis_size(axis) or not all(s.bound for s in layout[:place]):
                    return None
                found[axis] = dim
    return found


def _graph(
    fd: DefinitionBuilder, shapes: Shapes, scalars: Mapping[int, Any], bound: Mapping[int, BoundDims | None]
) -> Graph:
    """The graph; bound dims of size 1 get size 2 where possible, as rules have no factor for size 1."""
    wide = {i: _widened(shape, bound.get(i) or {}) for i, shape in shapes.items()}
    try:
        return specialize(fd, wide, scalars)
    except DefinitionError:  # A size is written in the definition.
        return specialize(fd, shapes, scalars)


def _widened(shape: tuple[int, ...], bound: BoundDims) -> tuple[int, ...]:
    return tuple(2 if n == 1 and d in bound.values() else n for d, n in enumerate(shape))


def _of_result(node: Node, place: int, found: Mapping[int, BoundDims | None]) -> BoundDims | None:
    operands = [(found.get(tensor, {}), dims) for tensor, dims in zip(node.inputs, node.rule.operands, strict=True)]
    if any(bound is None for bound, _ in operands):
        return None
    if node.call.op.follows_weight_first:
        operands = [*operands[1:], operands[0]]
    else:
        operands.sort(key=lambda operand: -len(operand[0] or {}))
    result: BoundDims = {}
    loose: BoundDims = {}
    for bound, dims in operands:
        taken = set(result.values())
        for axis, dim in (bound or {}).items():
            cut = dims[dim][:1] if isinstance(dim, int) else [f for d in dim for f in dims[d]]
            target = _target(node, place, cut, isinstance(dim, int))
            if not isinstance(target, int):
                loose.setdefault(axis, target)
            elif target not in taken:
                result.setdefault(axis, target)
    return {axis: dims for axis, dims in loose.items() if dims} | result


def _target(node: Node, place: int, factors: Sequence[int], chunks: bool) -> int | frozenset[int]:
    """The result's dim that is in chunks where the operand's dim of these factors is.

    If there is none, the dims over which the operand's chunks are scattered.
    """
    kinds, dims = node.rule.factors, node.rule.results[place]
    left = {f for f in factors if kinds[f].kind is not FactorKind.REDUCE}
    if chunks and all(kinds[f].kind is FactorKind.PASS for f in left):
        found = next((d for d, dim in enumerate(dims) if dim and dim[0] in left), None)
        if found is not None:
            return found
    return frozenset(d for d, dim in enumerate(dims) if not left.isdisjoint(dim))


def _of_operand(node: Node, place: int, found: Mapping[int, BoundDims | None], mesh: DeviceMesh) -> BoundDims | None:
    """The operand's bindings, with axes that it lacks taken from the op's most sharded result."""
    before, made = found[node.inputs[place]], [found[i] for i in node.outputs]
    mine = _sayable(before)
    if mine is None or None in made:
        return before
    result, most = max(enumerate(_sayable(bound) or {} for bound in made), key=lambda entry: len(entry[1]))
    taken: BoundDims = {**mine}
    for axis, dim in most.items():
        target = _source(node, place, node.rule.results[result][dim])
        if axis not in mine and target is not None and target not in mine.values():
            ways = math.prod(mesh.axis_size(name) for name, d in taken.items() if d == target) * mesh.axis_size(axis)
            if node.rule.factors[node.rule.operands[place][target][0]].size % ways == 0:
                taken[axis] = target
    return taken


def _source(node: Node, place: int, factors: tuple[int, ...]) -> int | None:
    """The operand's dim from which a result's dim of these factors is made; None where there is none."""
    if not factors or node.rule.factors[factors[0]].kind is not FactorKind.PASS:
        return None
    return next((d for d, dim in enumerate(node.rule.operands[place]) if dim and dim[0] == factors[0]), None)
