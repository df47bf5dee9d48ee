"""Products that torch has no single function for: with stacks of matrices, with a matrix per group, and with scales."""

from __future__ import annotations

import math
from itertools import pairwise

import torch

from ..errors import KernelError, user_error
from .indices import Runs


def stacked_linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """[b*, k] times [d, n, k], plus [d, n], to [d, b*, n]; the bias is added before 16-bit floats are rounded."""
    rows, matrices = x.reshape(1, math.prod(x.shape[:-1]), x.shape[-1]), weight.transpose(-1, -2)
    if bias is None:
        out = torch.matmul(rows, matrices)
    else:
        out = torch.baddbmm(bias.unsqueeze(1), rows.expand(weight.shape[0], -1, -1), matrices)
    return out.reshape(weight.shape[0], *x.shape[:-1], weight.shape[1])


def rows_into(x: torch.Tensor, matrix: torch.Tensor, out: torch.Tensor) -> None:
    """Write [b*, k] times [k, n] into `out` [b*, n], whose rows may lie unevenly in memory, as those of a part do."""
    rows = x.flatten(0, -2)
    try:
        into = out.view(rows.shape[0], out.shape[-1])
    except RuntimeError:  # its strides are not those of one matrix
        out.copy_(torch.mm(rows, matrix).view(out.shape))
    else:
        torch.mm(rows, matrix, out=into)


def _bounds(offsets: torch.Tensor, runs: Runs) -> list[int]:
    """The bounds of each group among the indices in `runs`; group g ends before the global index offsets[g]."""
    ends = [0, *offsets.tolist()]
    return [sum(max(0, min(end, b) - a) for a, b in runs) for end in ends]


def _members(runs: Runs) -> list[int]:
    return [i for a, b in runs for i in range(a, b)]


def grouped_rows(a: torch.Tensor, b: torch.Tensor, offsets: torch.Tensor, rows: Runs, groups: Runs) -> torch.Tensor:
    """[m, k] and [g, k, n] to [m, n]: each row times its group's matrix; zero where that matrix is on another rank."""
    out = a.new_zeros(a.shape[0], b.shape[-1])
    bounds = _bounds(offsets, rows)
    for place, group in enumerate(_members(groups)):
        part = slice(bounds[group], bounds[group + 1])
        out[part] = torch.matmul(a[part], b[place])
    return out


def grouped_columns(
    a: torch.Tensor, b: torch.Tensor, offsets: torch.Tensor, columns: Runs, groups: Runs
) -> torch.Tensor:
    """[g, m, k] and [k, n] to [m, n]: each column times its group's matrix."""
    return grouped_rows(b.transpose(0, 1), a.transpose(1, 2), offsets, columns, groups).transpose(0, 1)


def grouped_inner(a: torch.Tensor, b: torch.Tensor, offsets: torch.Tensor, inner: Runs, groups: Runs) -> torch.Tensor:
    """[m, k] and [k, n] to [g, m, n]: one product for each group of inner indices."""
    spans = list(pairwise(_bounds(offsets, inner)))
    made = [torch.matmul(a[:, slice(*spans[g])], b[slice(*spans[g])]) for g in _members(groups)]
    return torch.stack(made) if made else a.new_zeros(0, a.shape[0], b.shape[1])


def _spread(scale: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """One factor per element, from a scale per tensor, row, column or block."""
    scale = scale.float()
    if scale.ndim != like.ndim:
        return scale
    for d, n in enumerate(like.shape):
        if scale.shape[d] not in (1, n):
            scale = scale.repeat_interleave(-(-n // scale.shape[d]), d).narrow(d, 0, n)
    return scale


def scaled_mm(
    a: torch.Tensor,
    b: torch.Tensor,
    scale_a: torch.Tensor,
    scale_b: torch.Tensor,
    alpha: torch.Tensor | None,
    bias: torch.Tensor | None,
    beta: torch.Tensor | None,
    dtype: torch.dtype,
) -> torch.Tensor:
    """alpha * (a * scale_a) @ (b * scale_b) + beta * bias, computed in float32."""
    out = torch.matmul(a.float() * _spread(scale_a, a), b.float() * _spread(scale_b, b))
    out = out if alpha is None else out * alpha
    if bias is not None:
        out = out + (bias if beta is None else bias * beta)
    return out.to(dtype)


def needs_nvidia(op: str) -> torch.Tensor:
    """Raises: the op works on packed 4-bit numbers and swizzled scales that only NVIDIA's kernels define."""
    raise user_error(
        f"{op} cannot run here: it needs nvFuser and a GPU with nvfp4 (compute capability 10.0 or later)", "", "",
        "Run the definition with the nvFuser backend on such a GPU, or use matmul or grouped_mm in bfloat16.",
        cls=KernelError,
    )  # fmt: skip
