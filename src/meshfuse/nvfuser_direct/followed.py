"""Where nvFuser puts what no annotation says: each op's results follow its operands, the most sharded first.

meshfuse chooses by cost; a script written for nvFuser reads its outputs where nvFuser leaves them. Axes of one rank,
which split nothing, are followed as well: scripts ask for their dims.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..definition.annotation import Annotation
from ..definition.fusion import DefinitionBuilder
from ..errors import DefinitionError
from ..graph import Graph, Node, concretize
from ..mesh import DeviceMesh
from ..ops.base import FactorKind

# For a tensor: the dim that each mesh axis cuts in chunks. None where that is not all there is to say.
Bound = dict[str, int]
Shapes = Mapping[int, tuple[int, ...]]


def followed_outputs(fd: DefinitionBuilder, shapes: Shapes, scalars: Mapping[int, Any]) -> list[Bound | None]:
    """For every output the bindings that follow from the annotations, for these global input shapes."""
    found: dict[int, Bound | None] = {i: _bound(annotation) for i, annotation in fd.annotations.items()}
    for node in _graph(fd, shapes, scalars, found).nodes:
        for place, tensor in enumerate(node.outputs):
            if tensor not in found:
                found[tensor] = _of_result(node, place, found)
    return [found.get(tensor, {}) for tensor in fd.outputs]


def common_mesh(fd: DefinitionBuilder) -> DeviceMesh | None:
    """The mesh of all annotations, None where there are several or none."""
    meshes = {annotation.mesh for annotation in fd.annotations.values()}
    return meshes.pop() if len(meshes) == 1 else None


def _bound(annotation: Annotation) -> Bound | None:
    assert annotation.mesh is not None
    found: Bound = {}
    for dim, layout in enumerate(annotation.named()):
        for place, split in enumerate(layout):
            if split.bound:
                axis = split.axis or ""
                if split.size != annotation.mesh.axis_size(axis) or not all(s.bound for s in layout[:place]):
                    return None
                found[axis] = dim
    return found


def _graph(
    fd: DefinitionBuilder, shapes: Shapes, scalars: Mapping[int, Any], bound: Mapping[int, Bound | None]
) -> Graph:
    """The graph, with 2 for bound dims of size 1 where possible: there is no factor to follow in 1."""
    wide = {i: _widened(shape, bound.get(i) or {}) for i, shape in shapes.items()}
    try:
        return concretize(fd, wide, scalars)
    except DefinitionError:  # A size is written in the definition.
        return concretize(fd, shapes, scalars)


def _widened(shape: tuple[int, ...], bound: Bound) -> tuple[int, ...]:
    return tuple(2 if n == 1 and d in bound.values() else n for d, n in enumerate(shape))


def _of_result(node: Node, place: int, found: Mapping[int, Bound | None]) -> Bound | None:
    operands = [(found.get(tensor, {}), dims) for tensor, dims in zip(node.inputs, node.rule.operands, strict=True)]
    if any(bound is None for bound, _ in operands):
        return None
    # Weights come before activations: the later operand wins among equally sharded ones.
    operands = sorted(reversed(operands), key=lambda operand: -len(operand[0] or {}))
    result: Bound = {}
    for bound, dims in operands:
        for axis, dim in (bound or {}).items():
            target = _target(node, place, dims[dim])
            if target is None:
                return None
            if target >= 0:
                result.setdefault(axis, target)
    return result


def _target(node: Node, place: int, factors: tuple[int, ...]) -> int | None:
    """The result's dim that a chunked dim of these factors becomes: -1 where it is reduced, None for neither."""
    if not factors:
        return -1
    kind = node.rule.factors[factors[0]].kind
    if kind is FactorKind.REDUCE:
        return -1
    dims = node.rule.results[place]
    return (
        next((d for d, dim in enumerate(dims) if dim and dim[0] == factors[0]), None)
        if kind is FactorKind.PASS
        else None
    )
