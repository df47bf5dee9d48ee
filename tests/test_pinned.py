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
from meshfuse.plans.plan_cost import plan_cost
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


# Of x [batch, length, width] and of a head [vocabulary, width] whose loss has gradients: rows lie over two axes, and
# what is best has both of them on the vocabulary.
LOSSES: list[list[Spec]] = [
    [("dp", "tp", None), (None, None)],
    [("dp", "tp", None), ("dp", None)],
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


def of_a_loss(specs: list[Spec]) -> Graph:
    """The cross entropy of a head, and its gradients by rows and head, which lie as these do."""
    with mf.FusionDefinition() as fd:
        x, w, rows = fd.define_tensor([8, 512, 1024]), fd.define_tensor([32768, 1024]), specs[0][:2]
        index = fd.define_tensor([8, 512], dtype=mf.DataType.Int)
        loss = fd.ops.cross_entropy(fd.ops.linear(x, w), index, ignore_index=None)
        dx, dw = fd.grad(loss, [x, w])
        for out in (loss, dx, dw):
            fd.add_output(out)
        for tensor, spec in ((x, specs[0]), (dx, specs[0]), (w, specs[1]), (dw, specs[1]), (index, rows)):
            fd.mesh_split(tensor, MESH, list(spec))  # type: ignore[arg-type]
    return graph_of(fd)


def check_that_no_place_of_a_product_is_better(graph: Graph, *ops: str, axes: int = 0) -> None:
    """What follows from a product element by element lies as it does, in nearly all plans."""
    best = plan_cost(decided(graph, MESH))
    products = [node for node in graph.nodes if node.name in ops]
    assert products
    found = [(n, p) for n in products for p in places(graph.shape(n.outputs[0])) if len(p.splits) >= axes]
    assert len(found) > 4
    # Every fourth of these, as each takes a plan.
    for node, place in found[::4]:
        (made,) = node.outputs
        pinned = dataclasses.replace(
            graph,
            annotations={**graph.annotations, made: place},
            annotation_lines={**graph.annotation_lines, made: node.line},
        )
        other = plan_cost(decided(pinned, MESH))
        assert other.moving > 0.95 * best.moving or not other.beats(best), (str(node), str(place), best, other)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("specs", [*HEADS, *PERCEPTRONS], ids=str)
def test_no_annotation_of_one_tensor_makes_a_plan_notably_better(specs: list[Spec]) -> None:
    shapes = [[8, 512, 1024], [1024, 32768]] if len(specs) == 2 else [[8, 512, 1024], [1024, 4096], [4096, 1024]]
    check_that_no_place_of_a_product_is_better(of_specs(specs, *shapes), "matmul")


@pytest.mark.parametrize("specs", LOSSES, ids=str)
def test_no_annotation_of_logits_makes_a_loss_and_its_gradients_notably_better(specs: list[Spec]) -> None:
    check_that_no_place_of_a_product_is_better(of_a_loss(specs), "linear", axes=2)
