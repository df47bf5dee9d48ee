"""Programs that nvFuser and meshfuse both plan on two ranks; a script that has nvFuser print its plan of each.

`fd` and `split` (of a tensor's dim over the ranks) are of either of the two.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from typing import Any

RANKS = 2
Split = Callable[[Any, int], None]


def column_linear(fd: Any, split: Split) -> list[Any]:
    x, w, b = _inputs(fd, [6, 10], [14, 10], [14])
    split(w, 0)
    split(b, 0)
    y = fd.ops.linear(x, w, b)
    z = fd.ops.exp(y)
    return [x, w, b, y, z, fd.ops.neg(z)]


def row_linear(fd: Any, split: Split) -> list[Any]:
    """The contracted dim is sharded: the product is a partial sum."""
    x, w = _inputs(fd, [6, 10], [14, 10])
    split(x, 1)
    split(w, 1)
    return [x, w, fd.ops.linear(x, w)]


def rows(fd: Any, split: Split) -> list[Any]:
    x, w, g = _inputs(fd, [6, 10], [14, 10], [14])
    split(x, 0)
    y = fd.ops.linear(x, w)
    scaled = fd.ops.mul(y, fd.ops.broadcast_in_dim(g, [6, 14], [1]))
    return [x, w, g, y, scaled, fd.ops.sum(scaled, [1])]


def row_norms(fd: Any, split: Split) -> list[Any]:
    x, g = _inputs(fd, [6, 14], [14])
    split(x, 0)
    scaled = fd.ops.mul(x, fd.ops.broadcast_in_dim(g, [6, 14], [1]))
    return [x, g, scaled, fd.ops.sum(scaled, [1])]


def reduction(fd: Any, split: Split) -> list[Any]:
    (x,) = _inputs(fd, [6, 10])
    split(x, 0)
    y = fd.ops.mul(x, x)
    return [x, y, fd.ops.sum(y, [0])]


def permuted(fd: Any, split: Split) -> list[Any]:
    (x,) = _inputs(fd, [6, 10, 14])
    split(x, 1)
    y = fd.ops.permute(x, [1, 2, 0])
    return [x, y, fd.ops.tanh(y)]


def heads(fd: Any, split: Split) -> list[Any]:
    """A sharded dim split into heads, outermost."""
    (x,) = _inputs(fd, [6, 20])
    split(x, 1)
    y = fd.ops.reshape(x, [6, 4, 5])
    return [x, y, fd.ops.permute(y, [1, 0, 2])]


def batched(fd: Any, split: Split) -> list[Any]:
    a, b = _inputs(fd, [4, 6, 10], [4, 10, 14])
    split(a, 0)
    split(b, 0)
    y = fd.ops.matmul(a, b)
    return [a, b, y, fd.ops.max(y, [2])]


def half_annotated(fd: Any, split: Split) -> list[Any]:
    """Only one of two operands is annotated."""
    x, y = _inputs(fd, [6, 10], [6, 10])
    split(x, 0)
    return [x, y, fd.ops.add(x, y)]


def residual(fd: Any, split: Split) -> list[Any]:
    """A product, unreduced over the axis that what it is added to is split by."""
    x, w, whole = _inputs(fd, [2, 8, 4], [16, 4], [2, 8, 16])
    split(x, 2)
    split(w, 1)
    split(whole, 1)
    y = fd.ops.linear(x, w)
    z = fd.ops.neg(y)
    return [x, w, whole, y, z, fd.ops.add(whole, z)]


def split_rows_through_an_mlp(fd: Any, split: Split) -> list[Any]:
    x, up, down = _inputs(fd, [2, 8, 4], [16, 4], [4, 16])
    split(x, 1)
    split(up, 0)
    split(down, 1)
    hidden = fd.ops.linear(x, up)
    bent = fd.ops.relu(hidden)
    y = fd.ops.linear(bent, down)
    return [x, up, down, hidden, bent, y, fd.ops.add(x, y)]


def drawn(fd: Any, split: Split) -> list[Any]:
    (x,) = _inputs(fd, [2, 8, 16])
    split(x, 1)
    noise = fd.ops.uniform(fd.define_scalar(0.0), fd.define_scalar(1.0), [2, 8, 16])
    bent = fd.ops.neg(noise)
    return [x, noise, bent, fd.ops.mul(x, bent)]


def read_with_a_split_tensor(fd: Any, split: Split) -> list[Any]:
    """Through a permutation, a broadcast and a sum."""
    x, turned, column, cube = _inputs(fd, [6, 8], [8, 6], [8], [6, 8, 4])
    split(x, 1)
    a, b, c = (fd.ops.relu(t) for t in (turned, column, cube))
    wide = fd.ops.mul(fd.ops.permute(a, [1, 0]), fd.ops.broadcast_in_dim(b, [6, 8], [1]))
    return [x, turned, column, cube, a, b, c, wide, fd.ops.add(fd.ops.mul(x, wide), fd.ops.sum(c, [2]))]


def read_by_a_product(fd: Any, split: Split) -> list[Any]:
    x, w, rows_ = _inputs(fd, [8, 4], [4, 6], [8, 6])
    split(rows_, 0)
    y = fd.ops.relu(x)
    return [x, w, rows_, y, fd.ops.add(fd.ops.matmul(y, w), rows_)]


def as_sharded(fd: Any, split: Split) -> list[Any]:
    a, b = _inputs(fd, [4, 8], [4, 8])
    split(a, 0)
    split(b, 1)
    return [a, b, fd.ops.add(a, b), fd.ops.add(b, a)]


def weights_first(fd: Any, split: Split) -> list[Any]:
    x, w = _inputs(fd, [4, 8], [6, 8])
    split(x, 0)
    split(w, 0)
    return [x, w, fd.ops.linear(x, w), fd.ops.matmul(x, fd.ops.permute(w, [1, 0]))]


def merged(fd: Any, split: Split) -> list[Any]:
    (x,) = _inputs(fd, [2, 8, 6])
    split(x, 0)
    y = fd.ops.reshape(x, [16, 6])
    return [x, y, fd.ops.sum(y, [0]), fd.ops.reshape(y, [2, 8, 6])]


_ALL = (column_linear, row_linear, rows, row_norms, reduction, permuted, heads, batched, half_annotated)
PROGRAMS = {program.__name__: program for program in _ALL}
# All that these compute are outputs.
_KEPT = (residual, split_rows_through_an_mlp, drawn, read_with_a_split_tensor, read_by_a_product, as_sharded,
         weights_first, merged)  # fmt: skip
KEPT = {program.__name__: program for program in _KEPT}


def _inputs(fd: Any, *shapes: list[int]) -> list[Any]:
    return [fd.define_tensor(shape, contiguity=[True] * len(shape)) for shape in shapes]


def main(name: str) -> None:
    """Make nvFuser plan a program; with NVFUSER_DUMP=pre_segmenter_logging it prints how."""
    import nvfuser_direct as nv
    import torch

    mesh = nv.multidevice.DeviceMesh(torch.arange(RANKS))
    split_of: dict[int, int] = {}

    def split(tensor: Any, dim: int) -> None:
        tensor.outer_split(dim, RANKS)
        tensor.axis(dim).parallelize(nv.ParallelType.mesh_x)
        split_of[id(tensor)] = dim

    with nv.FusionDefinition() as fd:
        tensors = (PROGRAMS | KEPT)[name](fd, split)
        inputs = fd.fusion.inputs()
        for tensor in tensors[: len(inputs)]:
            tensor.set_device_mesh(mesh)
        for tensor in tensors[len(inputs) if name in KEPT else -1 :]:
            fd.add_output(tensor)
    print("NAMES " + json.dumps([str(t).partition("_")[0] for t in tensors]), flush=True)
    args = []
    for tensor in tensors[: len(inputs)]:
        shape = [int(str(n)) for n in tensor.shape()]
        if id(tensor) in split_of:
            shape[split_of[id(tensor)]] //= RANKS
        args.append(torch.empty(shape, device="meta"))
    fd.execute(args)


def each() -> None:
    """Each program in a process of its own, forked off one that has loaded nvFuser: a plan ends by an error."""
    import nvfuser_direct  # noqa: F401

    for name in PROGRAMS | KEPT:
        print(f"PROGRAM {name}", flush=True)
        child = os.fork()
        if not child:
            sys.exit(main(name))
        os.waitpid(child, 0)


if __name__ == "__main__":
    each()
