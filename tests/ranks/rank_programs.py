"""Programs for two and for four ranks, their inputs and unsharded torch's version of each."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

import meshfuse as mf

DOUBLE = mf.DataType.Double
GRID = mf.DeviceMesh((2, 2), ("dp", "tp"))
Tensors = Sequence[torch.Tensor]


@dataclass(frozen=True)
class Case:
    """A program as `define` writes it, its global input shapes, and unsharded torch's version of it."""

    define: Callable[[], mf.FusionDefinition]
    shapes: tuple[tuple[int, ...], ...]
    reference: Callable[..., Any]
    scalars: tuple[float, ...] = ()

    def inputs(self) -> list[torch.Tensor]:
        made = torch.Generator().manual_seed(3)
        return [torch.randn(shape, generator=made, dtype=torch.float64) for shape in self.shapes]

    def expected(self) -> list[torch.Tensor]:
        found = self.reference(*self.inputs(), *self.scalars)
        return list(found) if isinstance(found, tuple) else [found]


def line(size: int) -> mf.DeviceMesh:
    return mf.DeviceMesh((size,), ("tp",))


def defined(
    shapes: Sequence[Sequence[int]], body: Callable[..., Any], notes: Callable[..., Any]
) -> mf.FusionDefinition:
    """A definition of double inputs; `body` gives its outputs, `notes` annotates the inputs and outputs."""
    with mf.FusionDefinition() as fd:
        tensors = [fd.define_tensor(list(shape), dtype=DOUBLE) for shape in shapes]
        outputs = body(fd, *tensors)
        outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        for output in outputs:
            fd.add_output(output)
        notes(fd, *tensors, *outputs)
    return fd


MLP = ((4, 6, 8), (16, 8), (8, 16))


def mlp_body(fd, x, w1, w2):
    return fd.ops.linear(fd.ops.gelu(fd.ops.linear(x, w1)), w2)


def mlp_torch(x, w1, w2):
    return F.linear(F.gelu(F.linear(x, w1)), w2)


def mlp(open_batch: bool = False) -> mf.FusionDefinition:
    def notes(fd, x, w1, w2, y):
        fd.mesh_split(x, GRID, ["dp", None, None])
        fd.mesh_split(w1, GRID, ["tp", None])
        fd.mesh_split(w2, GRID, [None, "tp"])
        fd.mesh_split(y, GRID, ["dp", None, None])

    return defined([(-1 if open_batch else 4, 6, 8), *MLP[1:]], mlp_body, notes)


def nvfuser_mlp() -> mf.FusionDefinition:
    """Data parallel over y, tensor parallel over x, in nvFuser's words."""

    def notes(fd, x, w1, w2, y):
        mesh = mf.DeviceMesh(torch.arange(4).reshape(2, 2))
        for tv in (x, w1, w2, y):
            tv.set_device_mesh(mesh)
        for tv in (x, y):
            tv.outer_split(0, 2)
            tv.axis(0).parallelize(mf.ParallelType.mesh_y)
        w1.outer_split(0, 2)
        w1.axis(0).parallelize(mf.ParallelType.mesh_x)
        w2.outer_split(1, 2)
        w2.axis(1).parallelize(mf.ParallelType.mesh_x)

    return defined(MLP, mlp_body, notes)


def sequence_parallel_mlp(sequence: int = 6) -> mf.FusionDefinition:
    """Input and output split over the sequence: a gather before the weights, a reduce-scatter after them."""

    def notes(fd, x, w1, w2, y):
        fd.mesh_split(x, GRID, ["dp", "tp", None])
        fd.mesh_split(w1, GRID, ["tp", None])
        fd.mesh_split(w2, GRID, [None, "tp"])
        fd.mesh_split(y, GRID, ["dp", "tp", None])

    return defined([(4, sequence, 8), *MLP[1:]], mlp_body, notes)


def linear_shapes(rows: int, inner: int, outer: int, bias: bool) -> tuple[tuple[int, ...], ...]:
    return ((rows, inner), (outer, inner), *(((outer,),) if bias else ()))


def column_linear(size: int, shapes: Sequence[Sequence[int]]) -> mf.FusionDefinition:
    def notes(fd, x, w, *rest):
        fd.mesh_split(x, line(size), [None, None])
        fd.mesh_split(w, line(size), ["tp", None])
        for bias in rest[:-1]:
            fd.mesh_split(bias, line(size), ["tp"])

    return defined(shapes, lambda fd, *args: fd.ops.linear(*args), notes)


def row_linear(size: int, shapes: Sequence[Sequence[int]]) -> mf.FusionDefinition:
    """nvFuser's spelling: the reduced dim of both operands split over x; the bias is whole and added once."""

    def notes(fd, x, w, *rest):
        mesh = mf.DeviceMesh(range(size))
        for tv in (x, w, *rest[:-1]):
            tv.set_device_mesh(mesh)
        for tv in (x, w):
            tv.outer_split(-1, size)
            tv.axis(-2).parallelize(mf.ParallelType.mesh_x)

    return defined(shapes, lambda fd, *args: fd.ops.linear(*args), notes)


def reduce_scatter_linear(size: int, shapes: Sequence[Sequence[int]]) -> mf.FusionDefinition:
    def notes(fd, x, w, y):
        fd.mesh_split(x, line(size), [None, "tp"])
        fd.mesh_split(w, line(size), [None, "tp"])
        fd.mesh_split(y, line(size), ["tp", None])

    return defined(shapes, lambda fd, *args: fd.ops.linear(*args), notes)


def linear_cases(size: int) -> dict[str, Case]:
    """Sizes that 2 and 4 divide, that they do not, and that leave ranks without any element."""
    made: dict[str, Case] = {}
    for kind, sizes in {"even": (6, 8, 12), "uneven": (5, 7, 9), "empty": (3, 1, 1)}.items():
        for bias in (False, True):
            shapes = linear_shapes(*sizes, bias)
            for define in (column_linear, row_linear):
                name = f"{define.__name__} {kind}{' bias' if bias else ''}"
                made[name] = Case(lambda d=define, s=shapes: d(size, s), shapes, F.linear)
        shapes = linear_shapes(*sizes, False)
        made[f"reduce_scatter_linear {kind}"] = Case(lambda s=shapes: reduce_scatter_linear(size, s), shapes, F.linear)
    return made


def normalised(size: int) -> mf.FusionDefinition:
    """Statistics along a split dim, of uneven size, and a scalar input."""
    with mf.FusionDefinition() as fd:
        x = fd.define_tensor([-1, 7], dtype=DOUBLE)
        eps = fd.define_scalar(dtype=DOUBLE)
        var, mean = fd.ops.var_mean(x, dims=[1], correction=0, keepdim=True)
        y = (x - mean) * fd.ops.rsqrt(var + eps) * (eps + 2.0)
        fd.add_output(y)
        fd.add_output(fd.ops.max(x, dims=[0]))
        fd.mesh_split(x, line(size), [None, "tp"])
    return fd


def normalised_torch(x, eps):
    var, mean = torch.var_mean(x, dim=1, correction=0, keepdim=True)
    return (x - mean) * torch.rsqrt(var + eps) * (eps + 2.0), x.max(0).values


def pipeline(batch: int = -1) -> mf.FusionDefinition:
    """Two disjoint meshes: a linear on ranks 0 and 1, whose result goes to one on ranks 2 and 3."""
    first, second = mf.DeviceMesh((2,), ("tp",), ranks=[0, 1]), mf.DeviceMesh((2,), ("tp",), ranks=[2, 3])

    def body(fd, x, w1, w2):
        h = fd.ops.relu(fd.ops.linear(x, w1))
        return fd.ops.linear(h, w2), fd.ops.sum(h, dims=[0])

    def notes(fd, x, w1, w2, y, total):
        fd.mesh_split(x, first, [None, None])
        fd.mesh_split(w1, first, ["tp", None])
        fd.mesh_split(w2, second, ["tp", None])
        fd.mesh_split(y, second, [None, "tp"])
        fd.mesh_split(total, first, [None])

    return defined([(batch, 6), (10, 6), (4, 10)], body, notes)


def pipeline_torch(x, w1, w2):
    h = F.relu(F.linear(x, w1))
    return F.linear(h, w2), h.sum(0)


def ring(size: int, mesh: mf.DeviceMesh, batch: str | None = None) -> mf.FusionDefinition:
    """Causal attention over a sharded sequence in a ring, in zig-zag order, and its gradients."""

    def body(fd, q, k, v, grad):
        rows = [fd.ops.zigzag(t, 2, size) for t in (q, k, v)]
        out = fd.ops.unzigzag(fd.ops.ring_attention(*rows, size, is_causal=True, zigzag=True)[0], 2, size)
        return out, *fd.grad(out, [q, k, v], grad)

    def notes(fd, *tensors):
        for tensor in tensors:
            fd.mesh_split(tensor, mesh, [batch, None, "tp", None])

    return defined(RING, body, notes)


def ring_torch(q, k, v, grad):
    leaves = [t.requires_grad_() for t in (q, k, v)]
    out = F.scaled_dot_product_attention(*leaves, is_causal=True, enable_gqa=True)
    return out.detach(), *torch.autograd.grad(out, leaves, grad)


RING = ((2, 4, 16, 8), (2, 2, 16, 8), (2, 2, 16, 8), (2, 4, 16, 8))
PIPELINE = ((5, 6), (10, 6), (4, 10))
CASES = {
    2: linear_cases(2)
    | {
        "normalised": Case(lambda: normalised(2), ((3, 7),), normalised_torch, (1e-3,)),
        "ring": Case(lambda: ring(2, line(2)), RING, ring_torch),
    },
    4: linear_cases(4)
    | {
        "mlp": Case(mlp, MLP, mlp_torch),
        "ring": Case(lambda: ring(4, line(4)), RING, ring_torch),
        "rings of two": Case(lambda: ring(2, GRID, "dp"), RING, ring_torch),
        "mlp of an open size": Case(lambda: mlp(True), MLP, mlp_torch),
        "nvfuser mlp": Case(nvfuser_mlp, MLP, mlp_torch),
        "sequence parallel": Case(sequence_parallel_mlp, MLP, mlp_torch),
        "sequence parallel uneven": Case(
            lambda: sequence_parallel_mlp(5), ((4, 5, 8), *MLP[1:]), mlp_torch
        ),
        "normalised": Case(lambda: normalised(4), ((3, 7),), normalised_torch, (1e-3,)),
        "two meshes": Case(pipeline, PIPELINE, pipeline_torch),
    },
}  # fmt: skip
