"""Small plans are as good as with any one tensor's place given: what a person could still mend by an annotation."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterator

import pytest

import meshfuse as mf
from defining import graph_of
from meshfuse.compiler import decided
from meshfuse.graph import Graph
from meshfuse.planning.search import spent
from meshfuse.sharding.layout import Split
from meshfuse.sharding.value import Sharding

MESH = mf.DeviceMesh((2, 4), ("dp", "tp"))
BOTH = ("dp", "tp")
Spec = tuple[str | tuple[str, ...] | None, ...]
# Of x [batch, length, width] and of the weights, which no plan can follow all at once.
HEADS: list[list[Spec]] = [
    [(BOTH, None, None), (None, "dp")],
    [("dp", None, "tp"), ("dp", "tp")],
    [(None, "tp", "dp"), (BOTH, None)],
]
PERCEPTRONS: list[list[Spec]] = [
    [(None, BOTH, None), ("tp", None), (None, BOTH)],
    [("dp", None, "tp"), ("tp", None), (None, "dp")],
    [(None, "dp", None), (None, BOTH), ("dp", "tp")],
]


def of_specs(specs: list[Spec], *shapes: list[int]) -> Graph:
    """A head with the sum of its exponentials, or a perceptron."""
    with mf.FusionDefinition() as fd:
        tensors = [fd.define_tensor(shape) for shape in shapes]
        y = fd.ops.matmul(tensors[0], tensors[1])
        fd.add_output(fd.ops.logsumexp(y, -1) if len(tensors) == 2 else fd.ops.matmul(fd.ops.gelu(y), tensors[2]))
        for tensor, spec in zip(tensors, specs, strict=True):
            fd.mesh_split(tensor, MESH, list(spec))  # type: ignore[arg-type]
    return graph_of(fd)


def places(shape: tuple[int, ...]) -> Iterator[Sharding]:
    """Each axis on one dim that it divides, or on none."""
    for dims in itertools.product((None, *range(len(shape))), repeat=2):
        layouts = [tuple(Split(n, axis) for axis, n, d in zip(BOTH, (2, 4), dims, strict=True) if d == dim)
                   for dim in range(len(shape))]  # fmt: skip
        if all(size % math.prod(s.size or 1 for s in layout) == 0 for size, layout in zip(shape, layouts, strict=True)):
            yield Sharding.make(MESH, layouts, shape)


@pytest.mark.parametrize("specs", [*HEADS, *PERCEPTRONS], ids=str)
def test_no_annotation_of_one_tensor_makes_a_plan_notably_better(specs: list[Spec]) -> None:
    shapes = [[8, 512, 1024], [1024, 32768]] if len(specs) == 2 else [[8, 512, 1024], [1024, 4096], [4096, 1024]]
    graph = of_specs(specs, *shapes)
    best = spent(decided(graph, MESH))
    # What follows from a product element by element lies as it does, in nearly all plans.
    products = [node for node in graph.nodes if node.name == "matmul"]
    for node, place in ((n, p) for n in products for p in places(graph.shape(n.outputs[0]))):
        (made,) = node.outputs
        pinned = dataclasses.replace(
            graph,
            annotations={**graph.annotations, made: place},
            annotation_lines={**graph.annotation_lines, made: node.line},
        )
        other = spent(decided(pinned, MESH))
        assert other.moving > 0.95 * best.moving or not other.beats(best), (str(node), str(place), best, other)
