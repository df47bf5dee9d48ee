"""Mesh axes of one rank: they split nothing, so meshfuse drops them, but scripts ask for their dims."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from ..definition.annotation import Annotation
from ..definition.fusion import DefinitionBuilder
from ..errors import DefinitionError
from ..graph import Graph, Node, concretize

# For a tensor: the dim that is bound to each axis of one rank.
Bound = dict[str, int]
Shapes = Mapping[int, tuple[int, ...]]


def bound_outputs(fd: DefinitionBuilder, shapes: Shapes, scalars: Mapping[int, Any]) -> list[Bound]:
    """For every output the dims bound to axes of one rank; `shapes` are the inputs' global ones."""
    annotated = {i: dict(_bound(annotation)) for i, annotation in fd.annotations.items()}
    if not any(annotated.values()):
        return [{} for _ in fd.outputs]
    found = dict(annotated)
    for node in _graph(fd, shapes, scalars, annotated).nodes:
        factors = _factors(node, found)
        for place, tensor in enumerate(node.outputs):
            found.setdefault(tensor, _of_result(node, place, factors))
    return [found.get(tensor, {}) for tensor in fd.outputs]


def _bound(annotation: Annotation) -> Iterator[tuple[str, int]]:
    assert annotation.mesh is not None
    for dim, layout in enumerate(annotation.named()):
        for split in layout:
            if split.bound and annotation.mesh.axis_size(split.axis or "") == 1:
                yield split.axis or "", dim


def _graph(fd: DefinitionBuilder, shapes: Shapes, scalars: Mapping[int, Any], annotated: Mapping[int, Bound]) -> Graph:
    """The graph, with 2 for bound dims of size 1 where possible: there is no factor to follow in 1."""
    wide = {i: _widened(shape, annotated.get(i, {})) for i, shape in shapes.items()}
    try:
        return concretize(fd, wide, scalars)
    except DefinitionError:  # A size is written in the definition.
        return concretize(fd, shapes, scalars)


def _widened(shape: tuple[int, ...], bound: Bound) -> tuple[int, ...]:
    return tuple(2 if n == 1 and d in bound.values() else n for d, n in enumerate(shape))


def _factors(node: Node, found: Mapping[int, Bound]) -> Bound:
    """The op's factor for each axis, from the first operand that has the axis."""
    factors: Bound = {}
    for tensor, dims in zip(node.inputs, node.rule.operands, strict=True):
        for axis, dim in found.get(tensor, {}).items():
            if dims[dim]:
                factors.setdefault(axis, dims[dim][0])
    return factors


def _of_result(node: Node, place: int, factors: Bound) -> Bound:
    dims = node.rule.results[place]
    pairs = ((axis, d) for axis, factor in factors.items() for d, dim in enumerate(dims) if factor in dim)
    return dict(pairs)
