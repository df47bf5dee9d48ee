"""Where ops run whose results are not annotated, in programs over several meshes: where the fewest bytes are sent."""

from __future__ import annotations

import itertools
import random
from collections.abc import Mapping

import pytest

import meshfuse as mf
from defining import graph_of, random_inputs
from meshfuse.costs import BYTES_ONLY
from meshfuse.graph import Graph
from meshfuse.number_text import duration
from meshfuse.propagation import propagate
from meshfuse.testing import assert_same_as_unsharded, inputs_for

Fd, Tensor = mf.FusionDefinition, mf.TensorView
MESHES = [mf.DeviceMesh((1,), ("p",), ranks=[rank]) for rank in range(3)]


def on(fd: Fd, mesh: mf.DeviceMesh, *shape: int) -> Tensor:
    made = fd.define_tensor(list(shape))
    fd.mesh_split(made, mesh, [None] * len(shape))
    return made


def sent(fd: Fd) -> set[int]:
    """The bytes of the tensors that are sent between meshes, each entry of the bill."""
    return {int(entry.wire) for entry in fd.bill().entries if entry.collective == "send-recv"}


@pytest.mark.parametrize("rows, moved", [(4, 4 * 32), (4096, 64 * 32)])
def test_the_smaller_operand_goes_to_the_larger_one(rows: int, moved: int) -> None:
    with mf.FusionDefinition() as fd:
        x, w = on(fd, MESHES[0], rows, 32), on(fd, MESHES[1], 64, 32)
        y = fd.ops.linear(x, w)
        fd.add_output(y)
    assert sent(fd) == {4 * moved}
    text = fd.explain(y)
    kept = 32 * (rows + 64) - moved
    here, there = (duration(4 * n / BYTES_ONLY.bandwidth) for n in (moved, kept))
    assert f"sending between meshes takes {here} for it; on DeviceMesh" in text and f"it would take {there}" in text
    assert_same_as_unsharded(fd, inputs_for(fd))


@pytest.mark.parametrize("backward", [False, True])
def test_a_pipeline_of_mlps_sends_activations_only(backward: bool) -> None:
    meshes = [mf.DeviceMesh((2,), ("tp",), ranks=[2 * stage, 2 * stage + 1]) for stage in range(3)]
    with mf.FusionDefinition() as fd:
        h, weights = fd.define_tensor([8, 64]), list[Tensor]()
        fd.mesh_split(h, meshes[0], [None, None])
        for mesh in meshes:
            up, down = fd.define_tensor([256, 64]), fd.define_tensor([64, 256])
            fd.mesh_split(up, mesh, ["tp", None])
            fd.mesh_split(down, mesh, [None, "tp"])
            h = fd.ops.add(h, fd.ops.linear(fd.ops.gelu(fd.ops.linear(h, up)), down))
            weights += [up, down]
        loss = fd.ops.sum(fd.ops.mul(h, h))
        fd.add_output(loss)
        for gradient in fd.grad(loss, weights) if backward else ():
            fd.add_output(gradient)
    assert max(sent(fd)) <= 4 * 8 * 64
    assert len([e for e in fd.bill().entries if e.collective == "send-recv"]) == (4 if backward else 2)
    assert_same_as_unsharded(fd, random_inputs(fd))


def random_program(seed: int) -> Fd:
    """Up to seven products, sums and pointwise ops of square matrices and vectors on three meshes."""
    draw = random.Random(seed)
    with mf.FusionDefinition() as fd:
        known = [on(fd, draw.choice(MESHES), *draw.choice([(8, 8), (8,), (1,)])) for _ in range(4)]
        for _ in range(draw.randint(2, 7)):
            op = draw.choice(["add", "mul", "relu", "sum"])
            a, b = draw.choice(known), draw.choice(known)
            known.append(fd.ops.add(a, b) if op == "add" else fd.ops.mul(a, b) if op == "mul"
                         else fd.ops.relu(a) if op == "relu" else fd.ops.sum(a, [a.ndim - 1], True))  # fmt: skip
        fd.add_output(known[-1])
    return fd


def bytes_between(graph: Graph, nodes: Mapping[int, mf.DeviceMesh]) -> int:
    """What is sent: each tensor once to every other mesh on which it is read."""
    made = {i: sharding.mesh for i, sharding in graph.annotations.items()}
    made |= {i: nodes[node.id] for node in graph.nodes for i in node.outputs}
    needs = {(i, nodes[node.id]) for node in graph.nodes for i in node.inputs if nodes[node.id] != made[i]}
    return sum(graph.tensors[i].type.nbytes for i, _ in needs)


def placed(graph: Graph) -> dict[int, mf.DeviceMesh]:
    plan = propagate(graph, MESHES[0])
    return {node.id: c.placement.results[0].mesh for node, c in zip(graph.nodes, plan.choices, strict=True)}


def test_random_programs_send_the_least() -> None:
    found, least = [], []
    for seed in range(150):
        graph = graph_of(random_program(seed))
        ids = [node.id for node in graph.nodes]
        found.append(bytes_between(graph, placed(graph)))
        least.append(min(bytes_between(graph, dict(zip(ids, way, strict=True)))
                         for way in itertools.product(MESHES, repeat=len(ids))))  # fmt: skip
    assert found == least
