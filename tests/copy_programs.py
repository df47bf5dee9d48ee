"""Programs of two ranks with one move each between ops by element: what is packed before it, and unpacked after it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

import meshfuse as mf
from meshfuse.host_ir import HostProgram
from meshfuse.lowering.instructions import Copy, Instruction, Reduce

LINE = mf.DeviceMesh((2,), ("tp",))
Dims = Sequence[Any]
ROWS, COLUMNS, WHOLE = ("tp", None), (None, "tp"), (None, None)


@dataclass(frozen=True)
class Moved:
    """x is `before` the move of `kinds`, its source sharded as `source` and its target as `target`, and `after` it.

    Both are pairs: what a definition calls, and the same in torch.
    """

    shape: tuple[int, ...]
    source: Dims
    target: Dims
    before: tuple[Callable[..., Any], Callable[..., Any]]
    after: tuple[Callable[..., Any], Callable[..., Any]]
    kind: str

    def define(self, dtype: mf.DataType = mf.DataType.Double) -> mf.FusionDefinition:
        with mf.FusionDefinition() as fd:
            x = fd.define_tensor(list(self.shape), dtype=dtype)
            y = self.before[0](fd, x)
            z = fd.ops.set(y)
            out = self.after[0](fd, z)
            fd.add_output(out)
            fd.mesh_split(x, LINE, list(self.source))
            if y.type.shape == x.type.shape:
                fd.mesh_split(y, LINE, list(self.source))
            for t in (z, out):
                fd.mesh_split(t, LINE, list(self.target)[: t.ndim])
        return fd

    def inputs(self) -> list[torch.Tensor]:
        return [torch.randn(self.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)]

    def expected(self) -> torch.Tensor:
        return self.after[1](self.before[1](*self.inputs()))


SCALED = (lambda fd, x: fd.ops.relu(x) * 1.5), (lambda x: x.relu() * 1.5)
RELU = (lambda fd, x: fd.ops.relu(x) + 1.0), (lambda x: x.relu() + 1.0)
NORMED = (lambda fd, x: fd.ops.softmax(x, -1)), (lambda x: x.softmax(-1))
SUMMED = (lambda fd, x: fd.ops.sum(x, [0])), (lambda x: x.sum(0))
TURNED = (lambda fd, x: fd.ops.permute(fd.ops.relu(x), [1, 0])), (lambda x: x.relu().t())

MOVED = {
    "a gather of columns": Moved((8, 12), COLUMNS, WHOLE, SCALED, RELU, "all-gather"),
    "a gather of columns for a softmax": Moved((8, 12), COLUMNS, WHOLE, SCALED, NORMED, "all-gather"),
    "a gather of turned rows": Moved((8, 12), COLUMNS, WHOLE, TURNED, RELU, "all-gather"),
    "a scattered sum of columns": Moved((4, 6, 8), ("tp", None, None), COLUMNS, SUMMED, RELU, "reduce-scatter"),
    "a scattered sum of rows": Moved((4, 6, 8), ("tp", None, None), ROWS, SUMMED, NORMED, "reduce-scatter"),
    "uneven rows to columns": Moved((5, 8), ROWS, COLUMNS, SCALED, RELU, "all-to-all"),
    "rows to columns": Moved((6, 8), ROWS, COLUMNS, SCALED, RELU, "all-to-all"),
    "columns to rows": Moved((6, 8), COLUMNS, ROWS, SCALED, RELU, "all-to-all"),
    "columns to rows for a softmax": Moved((6, 8), COLUMNS, ROWS, SCALED, NORMED, "all-to-all"),
}


def copies(program: HostProgram) -> list[Instruction]:
    """What copies a tensor between the kernels and communications of a program; views are no copies."""
    return [ins for ins in program.instructions if _copies(ins)]


def _copies(ins: Instruction) -> bool:
    return isinstance(ins, Reduce) or (isinstance(ins, Copy) and not ins.aliases)
