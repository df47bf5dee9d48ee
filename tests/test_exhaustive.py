"""Plans of small random programs beside the best of all placements."""

from __future__ import annotations

import random

import pytest

import meshfuse as mf
from defining import graph_of
from exhaustive import Exhaustive
from meshfuse.plans.plan_cost import plan_cost

T = mf.TensorView
SIZES = (128, 512, 1024, 2048, 4096)
MESHES = {"8": mf.DeviceMesh((8,), ("x",)), "2x4": mf.DeviceMesh((2, 4), ("a", "b"))}


class Drawn:
    """A random program of so many ops on two or three dims; every axis splits at least two of the tensors it reads."""

    def __init__(self, seed: int, mesh: mf.DeviceMesh, ops: int):
        self.draw, self.mesh = random.Random(seed), mesh
        self.sizes = self.draw.sample(SIZES, 4)
        with mf.FusionDefinition() as self.fd:
            made = [self.input([self.draw.choice(self.sizes) for _ in range(self.draw.choice((2, 2, 3)))])]
            while len(made) <= ops:
                made.append(self.op(made))
            self.fd.add_output(made[-1])
            if made[-1].ndim and self.draw.random() < 0.5:
                self.annotate(made[-1])

    def input(self, shape: list[int]) -> T:
        made = self.fd.define_tensor(shape)
        self.annotate(made)
        return made

    def annotate(self, tensor: T) -> None:
        spec: list[str | None] = [None] * tensor.ndim
        for axis in self.mesh.names:
            dim = self.draw.randrange(tensor.ndim)
            if self.draw.random() < 0.65 and spec[dim] is None:
                spec[dim] = axis
        self.fd.mesh_split(tensor, self.mesh, spec)

    def op(self, made: list[T]) -> T:
        ops, x = self.fd.ops, self.draw.choice(made[-2:])
        shape, kind = list(x.type.shape), self.draw.choice(["product"] * 3 + ["add", "add", "relu", "sum", "permute"])
        if kind == "product" and x.ndim > 1:
            n = self.draw.choice(self.sizes)
            linear = self.draw.random() < 0.5
            return ops.linear(x, self.input([n, shape[-1]])) if linear else ops.matmul(x, self.input([shape[-1], n]))
        if kind == "add":
            return x + self.draw.choice([*(t for t in made if list(t.type.shape) == shape), self.input(shape)])
        if kind == "sum" and x.ndim > 1:
            return ops.sum(x, [self.draw.randrange(x.ndim)], keepdim=True)
        return ops.permute(x, self.draw.sample(range(x.ndim), x.ndim)) if kind == "permute" else ops.relu(x)

    def is_split_enough(self) -> bool:
        graph = graph_of(self.fd)
        read = {i for node in graph.nodes for i in node.inputs}.union(graph.outputs)
        used = [split.axis for i, sharding in graph.annotations.items() if i in read for split in sharding.splits]
        return all(used.count(axis) > 1 for axis in self.mesh.names)


def excess(fd: mf.FusionDefinition, mesh: mf.DeviceMesh) -> float:
    """A plan's time as a multiple of the best plan's of whole axes; 1 where that one is no better."""
    ours = plan_cost(fd.compile().planned).seconds
    return ours / Exhaustive(graph_of(fd), mesh, ours).run()


@pytest.mark.fuzz
@pytest.mark.parametrize("mesh, count, ops", [("8", 60, 5), ("2x4", 30, 4)])
def test_small_programs_have_the_best_of_all_plans(mesh: str, count: int, ops: int) -> None:
    drawn = (Drawn(seed, MESHES[mesh], ops) for seed in range(10**6))
    programs = (program.fd for program in drawn if program.is_split_enough())
    found = [excess(next(programs), MESHES[mesh]) for _ in range(count)]
    assert max(found) < 1 + 1e-6, [f"{n:.6f}" for n in found if n >= 1 + 1e-6]


def rows_whole_for_a_wider_result(fd: mf.FusionDefinition, mesh: mf.DeviceMesh) -> None:
    """The rows are half as long as the result's: to gather them before moves less than to gather that."""
    x, w = fd.define_tensor([8192, 512, 1024]), fd.define_tensor([1024, 8192])
    y = fd.ops.relu(fd.ops.neg(fd.ops.matmul(x, w)))
    fd.add_output(y)
    for tensor, spec in ((x, ["b", None, None]), (w, [None, None]), (y, [None, None, "a"])):
        fd.mesh_split(tensor, mesh, spec)


def rows_whole_along_one_axis(fd: mf.FusionDefinition, mesh: mf.DeviceMesh) -> None:
    """With rows gathered over `a` for all products, no weight of the last one need be gathered."""
    x, w1, w2 = fd.define_tensor([64, 64, 64]), fd.define_tensor([512, 64]), fd.define_tensor([512, 512])
    w3 = fd.define_tensor([512, 2048])
    y = fd.ops.matmul(fd.ops.relu(fd.ops.linear(fd.ops.linear(x, w1), w2)), w3)
    fd.add_output(y)
    for tensor, spec in ((x, ["a", "b", None]), (w1, [None, "a"]), (w2, [None, "b"]), (w3, ["a", None])):
        fd.mesh_split(tensor, mesh, spec)


@pytest.mark.parametrize("build", [rows_whole_for_a_wider_result, rows_whole_along_one_axis])
def test_an_axis_is_given_up_where_that_moves_less(build) -> None:
    with mf.FusionDefinition() as fd:
        build(fd, MESHES["2x4"])
    assert excess(fd, MESHES["2x4"]) == 1.0
