"""meshfuse from scratch, in one file: run it with `python examples/tutorial.py` and read along.

Every step prints what it shows. No launcher and no GPU are needed: ranks are simulated in this process.
"""

from __future__ import annotations

from typing import Any

import torch

import meshfuse as mf


def step(title: str) -> None:
    print(f"\n--- {title} ---")


# 1. A program for one device. Nothing is said of ranks, so there is one.
step("1. math, written once")
with mf.FusionDefinition() as fd:
    a = fd.define_tensor([6, 8], dtype=mf.DataType.Double)
    b = fd.define_tensor([8, 4], dtype=mf.DataType.Double)
    c = fd.ops.relu(fd.ops.matmul(a, b))
    fd.add_output(c)
A, B = torch.randn(6, 8, dtype=torch.float64), torch.randn(8, 4, dtype=torch.float64)
(C,) = fd(A, B)
print("same as torch:", torch.equal(C, torch.relu(A @ B)))


# 2. The same program on four ranks: one annotation. Column-parallel: no communication at all.
def product(
    a_spec: list[Any], b_spec: list[Any], c_spec: list[Any] | None = None, mesh: mf.DeviceMesh | None = None
) -> mf.FusionDefinition:
    """relu(a @ b) with annotations, run on simulated ranks; prints the bill and returns the definition."""
    mesh = mesh or mf.DeviceMesh((4,), ("tp",))
    with mf.FusionDefinition() as fd:
        a = fd.define_tensor([6, 8], dtype=mf.DataType.Double)
        b = fd.define_tensor([8, 4], dtype=mf.DataType.Double)
        c = fd.ops.relu(fd.ops.matmul(a, b))
        fd.add_output(c)
        fd.mesh_split(a, mesh, a_spec)
        fd.mesh_split(b, mesh, b_spec)
        if c_spec is not None:
            fd.mesh_split(c, mesh, c_spec)
    (out,) = fd(A, B)
    assert torch.allclose(out, torch.relu(A @ B))
    print(f"a {a_spec}, b {b_spec}: output {fd.output_shardings()[0]}")
    print(fd.bill())
    return fd


step("2. split b's columns over four ranks")
product([None, None], [None, "tp"])

# 3. Splitting the summed dim leaves every rank with one term of the sum: a partial value. relu is not linear, so the
# terms are reduced first. Where the output is wanted whole, that is an all-reduce; an output that nothing is said of is
# left in pieces, for half of the bytes.
step("3. split the summed dim: an all-reduce, or a reduce-scatter")
product([None, "tp"], ["tp", None], [None, None])
product([None, "tp"], ["tp", None])

# 4. An axis need not divide a dim: six rows on four ranks are 2, 2, 2 and 0.
step("4. uneven shards")
product(["tp", None], [None, None])

# 5. Two axes, and what a rank really runs.
step("5. the program of rank 3 on a 2 x 2 mesh")
fd = product(["dp", "tp"], ["tp", None], mesh=mf.DeviceMesh((2, 2), ("dp", "tp")))
print(fd.host_program(3))

# 6. nvFuser's way of saying the same: edit the loop domain of each tensor.
step("6. nvFuser's spelling")
mesh = mf.DeviceMesh(torch.arange(4))
with mf.FusionDefinition() as fd:
    a = fd.define_tensor([6, 8], dtype=mf.DataType.Double)
    b = fd.define_tensor([8, 4], dtype=mf.DataType.Double)
    c = fd.ops.matmul(a, b)
    fd.add_output(c)
    for tensor in (a, b, c):
        tensor.set_device_mesh(mesh)
    a.outer_split(1, 4)
    a.axis(1).parallelize(mf.ParallelType.mesh_x)
    b.outer_split(0, 4)
    b.axis(0).parallelize(mf.ParallelType.mesh_x)
(out,) = fd(A, B)
print("same as torch:", torch.allclose(out, A @ B))

# 7. Why?
step("7. ask")
print(fd.explain(c))

# 8. Mistakes are told in one form: what is wrong, what was found and needed, what to do, and your line.
step("8. a mistake")
try:
    fd(A, B.float())
except mf.ArgumentError as error:
    print(error)
